"""Products with one weight: in bf16, in block FP8, and lm_head with a draw from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from rocm_serve.ops.fp8 import FN
from rocm_serve.tuning import floor, floor_prefill
from rocm_serve.tuning.case import Case, product_of
from rocm_serve.tuning.operands import Bench, relative
from rocm_serve.tuning.timing import Call
from rocm_serve.tuning.weights import fp8_weight


def linear(bench: Bench, rows: int, name: str) -> Case:
    """A bf16 product with few rows; the weight is another one at each call."""
    outputs, columns = product_of(bench, name, rows)
    cost = floor.linear(rows, columns, outputs)
    sets = bench.sets(cost.nbytes)
    x, w = bench.rows(rows, columns), [bench.rows(outputs, columns, scale=columns**-0.5) for _ in range(sets)]
    prepared = [bench.ops.prepare("linear", {"weight_NK": one})["weight_NK"] for one in w]

    def check() -> float:
        return relative(bench.ops.linear(x, prepared[0]), bench.ops.table["linear"].reference(x, w[0]))

    def check_cut() -> float:
        some = x[: rows - rows // 4]
        return relative(bench.ops.linear(some, prepared[0]), bench.ops.table["linear"].reference(some, w[0]))

    peers: dict[str, Sequence[Call]] = {}
    for provider in bench.ops.table["linear"].providers.values():
        other = provider.name not in (bench.ops.providers["linear"].name, "reference", "aiter")
        if other and not bench.small and provider.refusal(bench.arch, {}) is None:
            product = provider.load()
            peers[f"by {provider.name}"] = [lambda one=one, f=product: f(x, one) for one in w]
    calls = [lambda one=one: bench.ops.linear(x, one) for one in prepared]
    what = f"{name} [{outputs}, {columns}] T {rows}"
    return Case("linear", what, cost, calls, check, peers=peers, check_cut=check_cut)


def fp8_linear(bench: Bench, rows: int, name: str) -> Case:
    """A product with a block-FP8 weight of the sizes of `name`, as dense layers of the family have them."""
    outputs, columns = floor.linears_of(bench.dims)[name]
    cost = floor_prefill.fp8_linear(rows, columns, outputs)
    sets = bench.sets(cost.nbytes)
    made = {"dtype": bench.fp8 or FN, "device": bench.device, "g": None if bench.hollow else bench.g}
    x = [bench.rows(rows, columns) for _ in range(sets)]
    plain = [fp8_weight(outputs, columns, **made) for _ in range(sets)]
    prepared = [bench.ops.prepare("fp8_linear", {"weight_NK": w, "scale": scale}) for w, scale in plain]
    how = {"activation": bench.ops.fp8_activation}
    picked = bench.sample(rows)

    def call(i: int) -> torch.Tensor:
        return bench.ops.fp8_linear(x[i], **prepared[i], **how)

    def check() -> float:
        reference = bench.ops.providers["fp8_linear"].semantics or bench.ops.table["fp8_linear"].reference
        return relative(call(0)[picked], reference(x[0][picked], *plain[0], **how))

    peers: dict[str, Sequence[Call]] = {}
    if not bench.small and made["dtype"] is FN:
        one, codes = torch.ones((), device=bench.device), [one.to(FN) for one in x]

        def product(i: int) -> torch.Tensor:
            return torch._scaled_mm(codes[i], plain[i][0].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

        peers["torch._scaled_mm, rows in FP8 already, one scale"] = [lambda i=i: product(i) for i in range(sets)]
    calls = [lambda i=i: call(i) for i in range(sets)]
    return Case("fp8_linear", f"{name} [{outputs}, {columns}] T {rows}", cost, calls, check, peers=peers)


def head(bench: Bench, rows: int, context: int = 0) -> Case:
    """lm_head in float32 and a greedy draw from it."""
    d = bench.dims
    cost = floor.head(d, rows)
    x = bench.rows(rows, d.hidden)
    w = [bench.rows(d.vocabulary, d.hidden, scale=d.hidden**-0.5) for _ in range(bench.sets(cost.nbytes, least=1))]

    def call(weight: torch.Tensor) -> torch.Tensor:
        logits = bench.ops.linear(x, weight, out_dtype=torch.float32)
        return bench.ops.draw_token(logits, first_id=0, used=d.vocabulary)

    def check() -> float:
        expected = bench.ops.table["linear"].reference(x, w[0], out_dtype=torch.float32)
        _, _, token = call(w[0])
        best = expected.amax(-1)
        missed = float(((best - expected.gather(-1, token[:, None])[:, 0]) / best.abs()).max())
        return max(missed, relative(bench.ops.linear(x, w[0], out_dtype=torch.float32), expected))

    def plain(weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight).argmax(-1)

    peers = {} if bench.small else {"torch linear in bf16, argmax": [lambda one=one: plain(one) for one in w]}
    return Case("lm_head + draw", f"B {rows}", cost, [lambda one=one: call(one) for one in w], check, peers=peers)
