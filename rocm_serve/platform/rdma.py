"""RDMA cards as the kernel lists them in /sys/class/infiniband, and which of them RCCL would take. Asks for files only.

Folders of a device: `device/vendor` (PCI), `ports/N/{state,rate,link_layer}`, `ports/N/gids/ROW`,
`ports/N/gid_attrs/types/ROW`. Reading an empty row of the last one is an error.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROCE_V2 = "RoCE v2"
ACTIVE = "ACTIVE"
_CLASS = Path("sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Fabric:
    """A preset of launch/fabric: the cards that it is for."""

    preset: str
    vendor: str  # PCI id
    names: str  # how its devices begin, unless somebody has renamed them
    card: str


FABRICS = (
    Fabric("cx7", "0x15b3", "mlx5", "NVIDIA ConnectX (mlx5)"),
    Fabric("thor2", "0x14e4", "bnxt_re", "Broadcom Thor (bnxt_re)"),
    Fabric("ainic", "0x1dd8", "ionic", "AMD Pensando (ionic)"),
)


@dataclass(frozen=True, slots=True)
class Gid:
    """One row of a port's address table. `kind` is the kernel's: "RoCE v2", "IB/RoCE v1"."""

    row: int
    address: str
    kind: str

    @property
    def routable(self) -> bool:
        """Whether RCCL reaches other nodes by it: RoCE v2 with an IPv4 address inside."""
        return self.kind == ROCE_V2 and ipaddress.IPv6Address(self.address).ipv4_mapped is not None

    def __str__(self) -> str:
        inner = ipaddress.IPv6Address(self.address)
        shown = inner.ipv4_mapped or inner
        return f"row {self.row}: {self.kind or 'no kind'}, {shown}{' (link-local)' if inner.is_link_local else ''}"


@dataclass(frozen=True, slots=True)
class RdmaPort:
    device: str
    port: int
    vendor: str
    state: str  # "ACTIVE", "DOWN"
    rate: str  # "400 Gb/sec (4X NDR)"
    ethernet: bool
    gids: tuple[Gid, ...]

    @property
    def name(self) -> str:
        return self.device if self.port == 1 else f"{self.device}:{self.port}"

    @property
    def fabric(self) -> Fabric | None:
        """Which preset it belongs to: by the card's vendor, by the device's name where the kernel names none."""
        for fabric in FABRICS:
            if self.vendor == fabric.vendor or (not self.vendor and self.device.startswith(fabric.names)):
                return fabric
        return None

    def gid(self, row: int) -> Gid | None:
        return next((gid for gid in self.gids if gid.row == row), None)


def read_ports(root: Path) -> tuple[RdmaPort, ...]:
    """List every port of every device below `root`, which is / but for tests; empty without any."""
    found: list[RdmaPort] = []
    for device in sorted((root / _CLASS).glob("*"), key=_by_number):
        for port in sorted((device / "ports").glob("*"), key=_by_number):
            found.append(
                RdmaPort(
                    device.name,
                    int(port.name),
                    _text(device / "device" / "vendor"),
                    _text(port / "state").rpartition(": ")[2],
                    _text(port / "rate"),
                    _text(port / "link_layer") == "Ethernet",
                    tuple(_gids(port)),
                )
            )
    return tuple(found)


def chosen_ports(wish: str, ports: Sequence[RdmaPort]) -> list[RdmaPort]:
    """Choose as RCCL does by NCCL_IB_HCA: prefixes, exact names after `=`, all others after `^`.

    Each name may have :PORT after it.
    """
    exclude, rest = wish.startswith("^"), wish.removeprefix("^")
    exact, rest = rest.startswith("="), rest.removeprefix("=")
    parts = [part.partition(":") for part in rest.split(",") if part]
    if not parts:
        return list(ports)

    def listed(one: RdmaPort) -> bool:
        for name, _, port in parts:
            same = one.device == name if exact else one.device.startswith(name)
            if same and port in ("", str(one.port)):
                return True
        return False

    return [one for one in ports if listed(one) != exclude]


def preset_for(ports: Sequence[RdmaPort]) -> str | None:
    """Name the preset of launch/fabric when all cards that are up are of one maker."""
    found = {one.fabric for one in ports if one.state == ACTIVE} or {one.fabric for one in ports}
    (only,) = found if len(found) == 1 else (None,)
    return None if only is None else only.preset


def _gids(port: Path) -> list[Gid]:
    found = []
    for file in sorted((port / "gids").glob("*"), key=_by_number):
        address, kind = _text(file), _text(port / "gid_attrs" / "types" / file.name)
        if address and ipaddress.IPv6Address(address) != ipaddress.IPv6Address("::"):
            found.append(Gid(int(file.name), address, kind))
    return found


def _by_number(path: Path) -> tuple[str, int]:
    words = re.fullmatch(r"(.*?)(\d*)", path.name)
    assert words is not None
    return words[1], int(words[2] or -1)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""  # an empty row, or a driver without that file
