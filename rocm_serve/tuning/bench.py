"""From a wish to operands on a device, and which kernels ask for a tile there."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch

from rocm_serve.ops import tiles
from rocm_serve.ops.bind import bind_ops
from rocm_serve.ops.fp8 import FP8_DTYPES
from rocm_serve.ops.tiles import Tile
from rocm_serve.tuning import cases
from rocm_serve.tuning.cases import Case
from rocm_serve.tuning.operands import Bench
from rocm_serve.tuning.wish import Point, Wish

_IN_A_STEP = ("gdn_decode", "causal_conv")
Asked = tuple[str, dict[str, int]]  # kernel, shape


def bench_of(wish: Wish, device: torch.device, *, hollow: bool = False) -> Bench:
    """Bind the wish's providers and make its operands' maker."""
    ops = bind_ops(wish.providers, wish.arch, activation=wish.activation)  # type: ignore[arg-type]
    fp8 = None if wish.dialect is None else FP8_DTYPES[wish.dialect]
    return Bench(wish.sizes, ops, device, getattr(torch, wish.dtype), fp8, wish.seed, hollow=hollow)


def make(bench: Bench, point: Point) -> Case:
    """Make the operands of one call."""
    return cases.CASES[point.case](bench, **point.arguments)


@torch.inference_mode()
def asked_for(wish: Wish, todo: Sequence[Point], device: torch.device) -> dict[int, list[Asked]]:
    """Say which kernels each of the calls asks a tile for, and at which shape, by place in `todo`; nothing is run."""
    found: dict[int, list[Asked]] = {}
    launches = importlib.import_module("rocm_serve.ops.triton_launches.triton")  # where Triton is, here only
    bench = bench_of(wish, device, hollow=True)
    with launches.left_out(wish.arch):
        for i, point in enumerate(todo):
            op = op_of(point)
            if not hasattr(bench.ops, op) or (op in _IN_A_STEP and wish.providers.get("gdn_step") != "reference"):
                continue  # not there, or only run where no one provides the two in one
            with tiles.watched() as seen:
                make(bench, point).calls[0]()
            found[i] = [one for n, one in enumerate(seen) if one not in seen[:n]]
    return found


def op_of(point: Point) -> str:
    """Name the op that a case calls first."""
    return cases.OP_OF[point.case]


def candidates(asked: Asked, arch: str) -> list[Tile]:
    """List what to try, the rule's tile first."""
    return tiles.candidates(*asked, arch)
