"""The mixture of experts: the choice, the routed experts, the shared expert's gate and sum."""

from __future__ import annotations

from functools import cache

import torch

from rocm_serve.ops.contract import Arguments
from rocm_serve.ops.judging import JUDGED_ROWS
from rocm_serve.tuning import floor
from rocm_serve.tuning.case import Case
from rocm_serve.tuning.operands import Bench, relative


def experts(bench: Bench, rows: int, context: int = 0) -> Case:
    """The routed experts of uniformly chosen ids, two layers in turn."""
    d = bench.dims
    once = floor.experts(d, rows, floor.expected_distinct(d.experts, d.top_k, rows))
    sets = bench.sets(once.nbytes, least=4)
    ids = bench.choices(rows, sets)
    x = [bench.rows(rows, d.hidden) for _ in range(sets)]
    shares = [bench.shares(rows) for _ in range(sets)]
    layers = bench.experts
    prepared = [bench.ops.prepare("moe_experts", layer) for layer in layers]
    distinct = 0.0 if bench.hollow else sum(len(one.unique()) for one in ids) / sets
    how = {"activation": bench.ops.fp8_activation}

    def call(i: int) -> torch.Tensor:
        return bench.ops.moe_experts(x[i], ids[i], shares[i], rows, **prepared[i % len(layers)], **how)

    own = None if bench.hollow else bench.own_bound("moe_experts", rows)  # compilers ask for no GPU
    # Twice what the judge wants: of rows that are cut half is left, the others are gone or have no expert.
    picked = bench.sample(rows) if own is None else bench.sample(rows, 2 * JUDGED_ROWS)
    reference = bench.ops.providers["moe_experts"].semantics or bench.ops.table["moe_experts"].reference

    def some_of(i: int, ids_Tk: torch.Tensor, some: list[int]) -> Arguments:
        cut = {"x_TH": x[i][some], "ids_Tk": ids_Tk[some], "weights_Tk": shares[i][some], "num_rows": len(some)}
        return {**cut, **layers[i], **how}

    @cache
    def expected() -> tuple[torch.Tensor, Arguments]:  # the same for all tiles
        made = some_of(1, ids[1], picked)
        return reference(**made), made

    def check() -> float:
        return bench.judged("moe_experts", rows, call(1)[picked], *expected())

    def check_cut() -> float:
        """Judge three quarters of the rows, the last of them padding; some rows have no expert, some one fewer."""
        count = rows - rows // 4
        live = max(1, count - 1)
        held = ids[0][:count].clone()
        held[::3, -1] = held[1::3] = -1
        counted = torch.tensor([live], dtype=torch.int32, device=bench.device)
        got = bench.ops.moe_experts(x[0][:count], held, shares[0][:count], counted, **prepared[0], **how)
        inside = sorted({live - 1, *(i for i in picked if i < live)})
        made = some_of(0, held, inside)
        off = bench.judged("moe_experts", rows, got[inside], reference(**made), made)
        return max(off, relative(got[live:], torch.zeros_like(got[live:])))

    calls = [lambda i=i: call(i) for i in range(sets)]
    cost = floor.experts(d, rows, distinct)
    return Case("moe_experts", f"B {rows}", cost, calls, check, distinct, check_cut=check_cut, pure=True)


def route(bench: Bench, rows: int, context: int = 0) -> Case:
    """The choice of experts from router logits."""
    d = bench.dims
    logits = [bench.rows(rows, d.experts, scale=2.0) for _ in range(bench.sets(floor.route(d, rows).nbytes))]
    how = {"top_k": d.top_k, "renormalise": True}

    def check() -> float:
        got, expected = (f(logits[0], **how) for f in (bench.ops.moe_route, bench.ops.table["moe_route"].reference))
        return relative(got[1], expected[1])  # ids of equal logits may differ, their weights may not

    calls = [lambda x=x: bench.ops.moe_route(x, **how) for x in logits]
    return Case("moe_route", f"B {rows}", floor.route(d, rows), calls, check, pure=True)


def shared_add(bench: Bench, rows: int, context: int = 0) -> Case:
    """The shared expert's gate and the sum of both halves of the MLP."""
    h = bench.dims.hidden
    cost = floor.shared_add(h, rows)
    operands = [[bench.rows(rows, h) for _ in range(3)] for _ in range(bench.sets(cost.nbytes))]
    weight = bench.rows(1, h, scale=h**-0.5)

    def check() -> float:
        expected = bench.ops.table["shared_expert_add"].reference(*operands[0], weight)
        return relative(bench.ops.shared_expert_add(*operands[0], weight), expected)

    calls = [lambda some=some: bench.ops.shared_expert_add(*some, weight) for some in operands]
    return Case("shared_expert_add", f"B {rows}", cost, calls, check)
