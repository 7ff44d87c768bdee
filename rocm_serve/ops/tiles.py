"""Which tile a Triton kernel runs with: a tuned one where this card has one for the shape, else by rule. No torch.

A pure function of kernel, shape and card, so that it can be printed, tested and tuned anywhere. A shape is what is
static in a launch, and `rows`, which is rounded up to a power of two: a batch of 5 and the captured batch of 8 that it
is padded to run the same code.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import msgspec

from rocm_serve.config.load import environment
from rocm_serve.errors import UserError
from rocm_serve.ops.tiles_attention import attention_decode_tile, attention_decode_tiles
from rocm_serve.ops.tiles_fp8 import fp8_linear_tile, fp8_linear_tiles
from rocm_serve.ops.tiles_gdn import (
    gdn_chunk_tile,
    gdn_chunk_tiles,
    gdn_decode_tile,
    gdn_drafts_tile,
    gdn_scan_tile,
    gdn_step_tile,
    gdn_step_tiles,
    gdn_tiles,
)
from rocm_serve.ops.tiles_linear import (
    folded_tile,
    folded_tiles,
    linear_tile,
    linear_tiles,
    shared_tile,
    shared_tiles,
)
from rocm_serve.ops.tiles_moe import moe_experts_tile, moe_experts_tiles, moe_route_tile, moe_route_tiles
from rocm_serve.ops.tiles_prefill import attention_prefill_tile, attention_prefill_tiles

log = logging.getLogger(__name__)

Tile = dict[str, int]
Table = dict[str, dict[str, Tile]]  # kernel -> shape key -> tile
Shape = Mapping[str, int]
Rule = Callable[[Shape, str], Tile]  # shape, arch -> tile
Candidates = Callable[[Shape, str], list[Tile]]

RULES: dict[str, Rule] = {}  # kernel -> what it runs with where nothing was tuned
CANDIDATES: dict[str, Candidates] = {}  # kernel -> what `rocm-serve tune` tries


def bucketed(shape: Shape) -> dict[str, int]:
    """Return the shape with `rows` rounded up to a power of two."""
    rows = shape.get("rows")
    return {**shape} if rows is None else {**shape, "rows": 1 << max(rows - 1, 0).bit_length()}


def shape_key(shape: Shape) -> str:
    """Name a shape in the tuned table: "k=2048,n=512,rows=8"."""
    return ",".join(f"{name}={size}" for name, size in sorted(bucketed(shape).items()))


def tile(kernel: str, shape: Shape, arch: str) -> Tile:
    """Return the tile of `kernel` for this shape. Errors: KeyError for a kernel that no rule knows."""
    if _watching is not None:
        _watching.append((kernel, bucketed(shape)))
    if kernel in _forced:
        return dict(_forced[kernel])
    return dict(_chosen(kernel, arch, tuple(shape.items())))


@cache
def _chosen(kernel: str, arch: str, sizes: tuple[tuple[str, int], ...]) -> Tile:
    """Return the tile of a launch: asked for at each, so it is looked for once."""
    shape = dict(sizes)
    found = tuned_table(arch).get(kernel, {}).get(shape_key(shape))
    if found is not None:
        if any(found.keys() == one.keys() for one in candidates(kernel, shape, arch)):
            return found
        _say_other(kernel, arch)
    return by_rule(kernel, shape, arch)


@cache
def _say_other(kernel: str, arch: str) -> None:
    """Say once for a kernel that its tiles are not those of this version."""
    log.warning("tiles tuned for %s on %s are those of another version: a rule chooses; tune again", kernel, arch)


def by_rule(kernel: str, shape: Shape, arch: str) -> Tile:
    """Return the tile that a shape gets where nothing was tuned."""
    return RULES[kernel](bucketed(shape), arch)


def candidates(kernel: str, shape: Shape, arch: str) -> list[Tile]:
    """List the tiles that may win at a shape, each once; the rule's own is the first."""
    others = CANDIDATES[kernel](bucketed(shape), arch) if kernel in CANDIDATES else []
    found: list[Tile] = []
    for one in (by_rule(kernel, shape, arch), *others):
        if one not in found:
            found.append(one)
    return found


@cache
def tuned_table(arch: str) -> Table:
    """Return what was tuned for this card; empty where nothing was. What a user has tuned goes before what is
    committed."""
    committed = resources.files("rocm_serve.ops") / "tuned" / f"{arch}.json"
    merged: Table = {}
    for file in (committed, user_table(arch)):
        for kernel, shapes in read_table(file).items():
            merged[kernel] = merged.get(kernel, {}) | shapes
    return merged


def read_table(file: Traversable) -> Table:
    """Return a table of tiles; an empty one where there is no file. Errors: UserError for a file that is none."""
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=Table)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is no table of tiles: {error}; without it a rule chooses") from None


def user_table(arch: str) -> Path:
    """Say where `rocm-serve tune` keeps what it found, outside a checkout: beside the verdicts of probes."""
    return user_folder(environment()) / f"{arch}.json"


def user_folder(environ: Mapping[str, str]) -> Path:
    """Return $XDG_CACHE_HOME/rocm_serve/tuned, ~/.cache by default."""
    home = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or tempfile.gettempdir()) / ".cache")
    return Path(home) / "rocm_serve" / "tuned"


def forget() -> None:
    """Read the tables anew when they are next asked for."""
    for one in (tuned_table, _chosen, _say_other):
        one.cache_clear()


@contextmanager
def forced(kernel: str, chosen: Tile) -> Iterator[None]:
    """Have `kernel` run with this tile at every shape, in this process, inside the block."""
    before = _forced.get(kernel)
    _forced[kernel] = chosen
    try:
        yield
    finally:
        if before is None:
            del _forced[kernel]
        else:
            _forced[kernel] = before


@contextmanager
def watched() -> Iterator[list[tuple[str, dict[str, int]]]]:
    """Note every kernel and shape that a tile is asked for inside the block."""
    global _watching
    assert _watching is None, "one watcher at a time"
    _watching = []
    try:
        yield _watching
    finally:
        _watching = None


_forced: dict[str, Tile] = {}
_watching: list[tuple[str, dict[str, int]]] | None = None


RULES["add_norm_linear"], CANDIDATES["add_norm_linear"] = folded_tile, folded_tiles
RULES["attention_decode"], CANDIDATES["attention_decode"] = attention_decode_tile, attention_decode_tiles
RULES["attention_prefill"], CANDIDATES["attention_prefill"] = attention_prefill_tile, attention_prefill_tiles
RULES["fp8_linear"], CANDIDATES["fp8_linear"] = fp8_linear_tile, fp8_linear_tiles
RULES["gdn_chunk"], CANDIDATES["gdn_chunk"] = gdn_chunk_tile, gdn_chunk_tiles
RULES["gdn_scan"], CANDIDATES["gdn_scan"] = gdn_scan_tile, gdn_tiles
RULES["gdn_decode"], CANDIDATES["gdn_decode"] = gdn_decode_tile, gdn_tiles
RULES["gdn_step"], CANDIDATES["gdn_step"] = gdn_step_tile, gdn_step_tiles
RULES["gdn_step_drafts"], CANDIDATES["gdn_step_drafts"] = gdn_drafts_tile, gdn_tiles
RULES["linear"], CANDIDATES["linear"] = linear_tile, linear_tiles
RULES["moe_experts"], CANDIDATES["moe_experts"] = moe_experts_tile, moe_experts_tiles
RULES["moe_route"], CANDIDATES["moe_route"] = moe_route_tile, moe_route_tiles
RULES["shared_down_add"], CANDIDATES["shared_down_add"] = shared_tile, shared_tiles
