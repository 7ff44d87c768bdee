"""Trees as /sys/class/infiniband shows them, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

V4 = ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2")
V4_OF_V1 = ("0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1")
V6 = ("fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1")
V6_OF_V2 = ("fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2")
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
ROWS = {0: V6, 1: V6_OF_V2, 2: V4_OF_V1, 3: V4}  # as on a ConnectX


def make_device(
    root: Path,
    name: str,
    *,
    vendor: str = "0x15b3",
    state: str = "ACTIVE",
    rate: str = "400 Gb/sec (4X NDR)",
    link: str = "Ethernet",
    rows: Mapping[int, tuple[str, str]] = ROWS,
) -> None:
    """Write one device with one port and eight rows, of which those of `rows` hold an address."""
    device = root / "sys/class/infiniband" / name
    port = device / "ports/1"
    (port / "gid_attrs/types").mkdir(parents=True)
    (port / "gids").mkdir()
    (device / "device").mkdir()
    if vendor:
        (device / "device/vendor").write_text(f"{vendor}\n")
    (port / "state").write_text(f"{4 if state == 'ACTIVE' else 1}: {state}\n")
    (port / "rate").write_text(f"{rate}\n")
    (port / "link_layer").write_text(f"{link}\n")
    for row in range(8):
        address, kind = rows.get(row, (EMPTY, ""))
        (port / "gids" / str(row)).write_text(f"{address}\n")
        if kind:
            (port / "gid_attrs/types" / str(row)).write_text(f"{kind}\n")


def make_gpu_host(root: Path, *, uverbs: bool = True, numa_balancing: int = 0) -> None:
    """Write what else the preflight reads of a host with GPUs, all in order."""
    (root / "dev/shm").mkdir(parents=True)
    (root / "dev/kfd").touch()
    if uverbs:
        (root / "dev/infiniband").mkdir()
        (root / "dev/infiniband/uverbs0").touch()
    (root / "proc/sys/kernel").mkdir(parents=True)
    (root / "proc/sys/kernel/numa_balancing").write_text(f"{numa_balancing}\n")
    (root / "proc/self").mkdir()
    (root / "proc/self/status").write_text("Name:\tpython\nCapEff:\t0000000000004000\n")
