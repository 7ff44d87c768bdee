"""What a tapped rank is asked to record, and the files it leaves. No torch: whoever compares reads numpy arrays.

A file holds the rows of one step on one rank. Each of its tensors is one site (a result of an op, a collective or a
layer), float32 [rows, width]; the header says of each where it was made and how the shares of the ranks of a stage
make up the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from safetensors import safe_open

WISH = "taps.json"
FOLDER = "taps"
BEFORE_LAYERS = -1  # layer of what the embedding gives; what follows the last layer has its number plus one

Array = np.ndarray[tuple[int, int], np.dtype[np.float32]]


class TapWish(msgspec.Struct, frozen=True):
    """Rows to record. Requests go by the seed of their sampling parameters, which the driver makes unique.

    `rows`: positions in the sequence whose rows are recorded at every site. `routed`: the router's sites are recorded
    at every position below this one.
    """

    rows: dict[int, tuple[int, ...]] = {}
    routed: dict[int, int] = {}


class Band(msgspec.Struct, frozen=True, array_like=True):
    """A run of columns that is cut over the ranks of a stage; `repeat` neighbouring ranks hold the same share."""

    width: int  # of this rank's share
    repeat: int = 1


class Site(msgspec.Struct, frozen=True):
    """One tensor of a file.

    `name` is the same on all ranks and in all topologies, `op` is what ran. Shares: `bands` are laid side by side;
    without them the ranks hold addends (`addend`), or each of them the whole. `keys`: (seed, position) of each row.
    """

    layer: int
    name: str
    op: str
    keys: tuple[tuple[int, int], ...]
    bands: tuple[Band, ...] = ()
    addend: bool = False


class Header(msgspec.Struct, frozen=True):
    """Of one file: the rank, its place in its stage, and the sites in the order in which they were made."""

    rank: int
    tp_rank: int
    tp: int
    sites: tuple[Site, ...]


def wish_file(run_dir: str | Path) -> Path:
    return Path(run_dir) / WISH


def step_file(run_dir: str | Path, rank: int, seq: int) -> Path:
    return Path(run_dir) / FOLDER / f"rank-{rank}-step-{seq:06d}.safetensors"


def read_taps(folder: Path) -> Iterator[tuple[Header, list[Array]]]:
    """Read the files of a run, rank by rank and step by step."""
    for path in sorted((folder / FOLDER).glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            header = msgspec.json.decode(file.metadata()["header"], type=Header)
            yield header, [file.get_tensor(str(i)) for i in range(len(header.sites))]
