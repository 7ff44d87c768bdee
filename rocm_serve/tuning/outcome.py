"""What tuning found, in words and in the table of tiles. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rocm_serve.ops.tiles import Table, Tile


class Tried(msgspec.Struct, frozen=True):
    """One tile. `us`: of each call of its group; `score`: their geometric mean. None: it was not timed, and `why`."""

    tile: Tile
    us: tuple[float, ...] | None = None
    error: float | None = None
    why: str = ""
    score: float = float("inf")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel at one shape. `best` is `rule` where nothing beat it."""

    kernel: str
    key: str
    calls: tuple[str, ...]
    rule: Tried
    best: Tried
    tried: tuple[Tried, ...]
    candidates: int
    nbytes: tuple[float, ...]
    operations: tuple[float, ...]
    peers: dict[str, float] = {}  # microseconds of the first call by others

    @property
    def gain(self) -> float:
        """How many times faster the best is than the rule's tile; 1 where neither was timed."""
        if self.best.us is None:
            return 1.0
        return self.rule.score / self.best.score


def words(one: Outcome) -> str:
    """Say in one line what won, and by how much."""
    failed = sum(t.us is None for t in one.tried)
    wrong = sum(t.why.startswith("wrong") for t in one.tried)
    count = f"{len(one.tried)} of {one.candidates} tried, {failed} not fit" + (
        f", {wrong} of them WRONG" if wrong else ""
    )
    if one.best.us is None:
        return f"{one.kernel} {one.key}: nothing ran ({count}): {one.rule.why}"
    each = zip(one.nbytes, one.operations, one.best.us, strict=True)
    speeds = ", ".join(f"{n / us / 1e6:.2f} TB/s {count / us / 1e6:.0f} TF" for n, count, us in each)
    tile = " ".join(f"{name} {size}" for name, size in one.best.tile.items())
    us = ", ".join(f"{x:.1f}" for x in one.best.us)
    peers = "".join(f"; {name} {x:.1f} us" for name, x in one.peers.items())
    rule = ", ".join(f"{x:.1f}" for x in one.rule.us) if one.rule.us else one.rule.why
    return f"{one.kernel} {one.key}: {us} us ({speeds}), rule {rule} us, {one.gain:.2f}x: {tile} ({count}{peers})"


def merged(table: Table, one: Outcome, least_gain: float) -> Table:
    """Return the table with this outcome: its tile where it beats the rule's, no line where it does not."""
    shapes = {key: tile for key, tile in table.get(one.kernel, {}).items() if key != one.key}
    if one.best.us is not None and one.gain >= least_gain:
        shapes[one.key] = dict(one.best.tile)
    return {**{k: v for k, v in table.items() if k != one.kernel}, **({one.kernel: shapes} if shapes else {})}


def write_table(path: Path, table: Table) -> None:
    """Write a table of tiles, a line for each shape, in an order that does not depend on when it was tuned."""
    blocks = []
    for kernel in sorted(table):
        shapes = [
            f"    {msgspec.json.encode(key).decode()}: {msgspec.json.encode(table[kernel][key]).decode()}"
            for key in sorted(table[kernel])
        ]
        joined = ",\n".join(shapes)
        blocks.append(f"  {msgspec.json.encode(kernel).decode()}: {{\n{joined}\n  }}")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".new")
    aside.write_text("{\n" + ",\n".join(blocks) + "\n}\n" if blocks else "{}\n")
    aside.replace(path)


def write_report(path: Path, machine: dict[str, object], outcomes: Sequence[Outcome]) -> None:
    """Write everything that was tried as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode({"machine": machine, "outcomes": outcomes}), indent=1))
