"""Compiles what calls would launch, tile after tile, into Triton's cache: `python -m rocm_serve.tuning.compile_child`.

First line in: the wish. Each further line: a job. Each line out: why it failed, or "". Nothing is launched. With
`--elsewhere` the card of the wish is not here.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import msgspec
import torch

from rocm_serve.ops import tiles
from rocm_serve.ops.triton_launches.triton import compiled_only
from rocm_serve.tuning.bench import bench_of, make
from rocm_serve.tuning.wish import Point, Wish


class Job(msgspec.Struct, frozen=True):
    """Compile one call with one tile of one kernel; without a kernel, with the tiles that it gets anyway."""

    point: Point
    kernel: str = ""
    tile: dict[str, int] = {}


def _tile_of(job: Job) -> AbstractContextManager[None]:
    return tiles.forced(job.kernel, job.tile) if job.kernel else nullcontext()


@torch.inference_mode()
def main() -> int:
    """Answer jobs until there are no more."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever compilers print is no answer
    wish = msgspec.json.decode(sys.stdin.readline(), type=Wish)
    elsewhere = "--elsewhere" in sys.argv[1:]
    device = torch.device("cpu" if elsewhere else "cuda:0")
    bench = bench_of(wish, device, hollow=True)
    for line in sys.stdin:
        job = msgspec.json.decode(line, type=Job)
        try:
            with compiled_only(wish.arch if elsewhere else None), _tile_of(job):
                make(bench, job.point).calls[0]()
            why = ""
        except Exception as error:  # a tile that cannot be compiled is an answer
            why = f"{type(error).__name__}: {error}".splitlines()[0]
        bench.__dict__.pop("experts", None)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # several of these share one GPU
        answers.write(f"{why}\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
