"""What members compare: package, checkpoint and settings, but nothing that is a host's own affair."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

from rocm_serve.agreement import agreement, difference, identity, source_hash
from rocm_serve.version import VERSION
from tests.executor.wishes import resolved


def test_hosts_with_paths_addresses_and_cores_of_their_own_agree(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(checkpoints["text-bf16"], copy)
    one = resolved(model=str(checkpoints["text-bf16"]), tp=2, pp=2, nnodes=2, members=2, run_dir="a", torch_threads=8)
    other = resolved(model=str(copy), tp=2, pp=2, nnodes=2, members=2, member=1, node_rank=1, run_dir="b", port=9)
    assert difference(agreement(one, {}), "node 0", agreement(other, {}), "node 1") is None


def test_another_checkpoint_or_setting_is_named(checkpoints: dict[str, Path]) -> None:
    one = agreement(resolved(model=str(checkpoints["text-bf16"])), {})
    told = difference(one, "node 0", agreement(resolved(model=str(checkpoints["dense"]), page_size=32), {}), "node 1")
    assert told is not None and "config.json: " in told and "page-size: 16 on node 0, 32 on node 1" in told
    assert "run-dir" not in told and "\n" not in told


def test_a_placement_of_experts_is_compared_by_what_it_says(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    here, there = tmp_path / "a.json", tmp_path / "b.json"
    here.write_text("one")
    there.write_text("one")
    wish = resolved(model=str(checkpoints["text-bf16"]), expert_placement=str(here), expert_counts="c.json")
    other = resolved(model=str(checkpoints["text-bf16"]), expert_placement=str(there))
    assert difference(agreement(wish, {}), "node 0", agreement(other, {}), "node 1") is None
    there.write_text("another")
    told = difference(agreement(wish, {}), "node 0", agreement(other, {}), "node 1")
    assert told is not None and told.startswith("node 0 and node 1 differ; expert placement: ")


def test_a_checkpoint_that_is_missing_on_one_host_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    told = difference(
        agreement(resolved(model=str(checkpoints["text-bf16"])), {}),
        "node 0",
        agreement(resolved(model=str(tmp_path)), {}),
        "node 1",
    )
    assert told is not None and "missing on node 1" in told


def test_another_mtu_or_another_source_of_the_same_version_is_told_with_what_to_do(
    checkpoints: dict[str, Path],
) -> None:
    one = agreement(resolved(model=str(checkpoints["text-bf16"]), mtu=9000), {})
    other = agreement(resolved(model=str(checkpoints["text-bf16"]), mtu=1500), {}) | {"rocm-serve source": "0" * 16}
    told = difference(one, "node 0", other, "node 1")
    assert told is not None and "mtu: 9000 on node 0, 1500 on node 1" in told and "ip link set dev NAME mtu" in told
    assert f"rocm-serve source: {source_hash()} on node 0, {'0' * 16} on node 1" in told and "same package" in told


def test_the_line_of_a_node_has_its_package_and_checkpoint_and_nothing_else(checkpoints: dict[str, Path]) -> None:
    line = identity(agreement(resolved(model=str(checkpoints["text-bf16"])), {}))
    assert line.startswith(f"rocm-serve version {VERSION}, rocm-serve source {source_hash()}, torch version ")
    assert ", config.json " in line
    assert "model.safetensors.index.json" in line and "page-size" not in line and "tp " not in line
    assert f"torch version {importlib.metadata.version('torch')}" in line


def test_what_rccl_is_told_must_be_alike_but_for_names_of_cards_and_interfaces(checkpoints: dict[str, Path]) -> None:
    wish = resolved(model=str(checkpoints["text-bf16"]))
    own = {"NCCL_IB_HCA": "mlx5_", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_GID_INDEX": "3", "NCCL_DEBUG": "INFO"}
    one = agreement(wish, {"NCCL_NET": "IB", **own})
    assert difference(one, "node 0", agreement(wish, {"NCCL_NET": "IB"}), "node 1") is None
    told = difference(one, "node 0", agreement(wish, {"NCCL_IB_DISABLE": "1"}), "node 1")
    assert told is not None and "NCCL_NET: IB on node 0, absent on node 1" in told
    assert "NCCL_IB_DISABLE: absent on node 0, 1 on node 1" in told
    assert "NCCL" not in identity(one)
