"""RDMA cards are read from a tree as the kernel shows it, and chosen as RCCL chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocm_serve.platform.rdma import chosen_ports, preset_for, read_ports
from tests.platform.fabric import V4, V6, make_device


def test_devices_are_read_in_the_order_of_their_numbers_with_their_rows(tmp_path: Path) -> None:
    for i in (10, 2, 0):
        make_device(tmp_path, f"mlx5_{i}", rows={3: V4, 0: V6})
    ports = read_ports(tmp_path)
    assert [one.name for one in ports] == ["mlx5_0", "mlx5_2", "mlx5_10"]
    first = ports[0]
    assert (first.state, first.rate, first.ethernet) == ("ACTIVE", "400 Gb/sec (4X NDR)", True)
    assert [gid.row for gid in first.gids] == [0, 3], "rows without an address are none"
    assert [gid.routable for gid in first.gids] == [False, True]
    assert str(first.gids[0]) == "row 0: IB/RoCE v1, fe80::1 (link-local)"
    assert str(first.gids[1]) == "row 3: RoCE v2, 10.0.0.1"


def test_a_host_without_any_has_none(tmp_path: Path) -> None:
    assert read_ports(tmp_path) == () and preset_for(()) is None


@pytest.mark.parametrize(
    ("wish", "names"),
    [
        ("", ["mlx5_0", "mlx5_1", "mlx5_10", "rdma0"]),
        ("mlx5_", ["mlx5_0", "mlx5_1", "mlx5_10"]),
        ("mlx5_1", ["mlx5_1", "mlx5_10"]),
        ("=mlx5_1", ["mlx5_1"]),
        ("=mlx5_1:1,rdma0", ["mlx5_1", "rdma0"]),
        ("mlx5_0:2", []),
        ("^mlx5_1", ["mlx5_0", "rdma0"]),
        ("^=mlx5_1", ["mlx5_0", "mlx5_10", "rdma0"]),
        ("bnxt_re", []),
    ],
)
def test_hcas_are_chosen_in_rccls_syntax(wish: str, names: list[str], tmp_path: Path) -> None:
    for name in ("mlx5_0", "mlx5_1", "mlx5_10", "rdma0"):
        make_device(tmp_path, name)
    assert [one.name for one in chosen_ports(wish, read_ports(tmp_path))] == names


@pytest.mark.parametrize(
    ("devices", "preset"),
    [
        ([("mlx5_0", "0x15b3", "ACTIVE")], "cx7"),
        ([("bnxt_re0", "0x14e4", "ACTIVE")], "thor2"),
        ([("rdma0", "0x1dd8", "ACTIVE")], "ainic"),  # some images rename them
        ([("ionic_0", "", "ACTIVE")], "ainic"),
        ([("rdma0", "0x1dd8", "ACTIVE"), ("mlx5_0", "0x15b3", "DOWN")], "ainic"),
        ([("rdma0", "0x1dd8", "ACTIVE"), ("mlx5_0", "0x15b3", "ACTIVE")], None),
        ([("efa0", "0x1d0f", "ACTIVE")], None),
    ],
)
def test_the_preset_is_that_of_the_cards_maker_when_there_is_one(
    devices: list[tuple[str, str, str]], preset: str | None, tmp_path: Path
) -> None:
    for name, vendor, state in devices:
        make_device(tmp_path, name, vendor=vendor, state=state)
    assert preset_for(read_ports(tmp_path)) == preset
