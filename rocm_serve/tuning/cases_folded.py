"""Products of few rows that make what they multiply: norms, and the hidden rows of the shared expert."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rocm_serve.tuning import floor
from rocm_serve.tuning.case import Case, product_of
from rocm_serve.tuning.operands import Bench, relative

_NORM = {"eps": 1e-6, "plus_one": True}


def norm_in_product(bench: Bench, rows: int, name: str) -> Case:
    """A sum with the stream, its norm and a product; beside it the same by two ops. The weight is another each time."""
    outputs, columns = product_of(bench, name, rows)
    cost = floor.norm_in_product(columns, rows, outputs)
    w = [bench.rows(outputs, columns, scale=columns**-0.5) for _ in range(bench.sets(cost.nbytes))]
    x, stream, total = (bench.rows(rows, columns) for _ in range(3))
    scale = bench.rows(columns, scale=0.1)

    def call(weight: torch.Tensor) -> torch.Tensor:
        return bench.ops.add_norm_linear(x, stream, scale, weight, total, **_NORM)[0]

    def apart(weight: torch.Tensor) -> torch.Tensor:
        return bench.ops.linear(bench.ops.add_rms_norm(x, stream, scale, **_NORM), weight)

    def check() -> float:
        expected = bench.ops.table["add_norm_linear"].reference(x, stream, scale, w[0], total.clone(), **_NORM)
        return relative(call(w[0]), expected[0])

    return _case("add_norm_linear", f"{name} [{outputs}, {columns}] T {rows}", cost, call, apart, w, check)


def shared_down(bench: Bench, rows: int) -> Case:
    """The shared expert from its gate and up on, added to the routed ones; beside it the same by three ops."""
    h, i = bench.dims.hidden, bench.dims.shared_width
    cost = floor.shared_down(h, i, rows)
    w = [bench.rows(h, i, scale=i**-0.5) for _ in range(bench.sets(cost.nbytes))]
    routed, x, gate_up, gate = (bench.rows(rows, width) for width in (h, h, 2 * i, 1))
    opener = bench.rows(1, h, scale=h**-0.5)

    def call(weight: torch.Tensor) -> torch.Tensor:
        return bench.ops.shared_down_add(routed, gate_up, gate, weight)

    def apart(weight: torch.Tensor) -> torch.Tensor:
        shared = bench.ops.linear(bench.ops.silu_mul(gate_up), weight)
        return bench.ops.shared_expert_add(routed, shared, x, opener)

    def check() -> float:
        return relative(call(w[0]), bench.ops.table["shared_down_add"].reference(routed, gate_up, gate, w[0]))

    return _case("shared_down_add", f"[{h}, {i}] T {rows}", cost, call, apart, w, check)


def _case(
    op: str,
    what: str,
    cost: floor.Cost,
    call: Callable[[torch.Tensor], torch.Tensor],
    apart: Callable[[torch.Tensor], torch.Tensor],
    weights: list[torch.Tensor],
    check: Callable[[], float],
) -> Case:
    calls, others = ([lambda one=one, f=f: f(one) for one in weights] for f in (call, apart))
    return Case(op, what, cost, calls, check, peers={"apart": others}, pure=True)
