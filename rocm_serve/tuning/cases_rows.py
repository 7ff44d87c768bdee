"""Ops that pass once over rows: norms, quantisation, keys and values into pages."""

from __future__ import annotations

import torch

from rocm_serve.ops.contract import OpFunction
from rocm_serve.ops.fp8 import BLOCK, FN
from rocm_serve.tuning import floor
from rocm_serve.tuning.case import PAGE, Case
from rocm_serve.tuning.operands import Bench, relative


def norms(bench: Bench, rows: int, *, residual: bool) -> Case:
    """RMS norm over the hidden width; with a residual stream as between the halves of a layer."""
    h, name = bench.dims.hidden, "add_rms_norm" if residual else "rms_norm"
    cost = floor.norm(h, rows, residual=residual, op=name)
    sets = bench.sets(cost.nbytes)
    weight, how = bench.rows(h, scale=0.1), {"eps": 1e-6, "plus_one": True}
    x, stream = ([bench.rows(rows, h) for _ in range(sets)] for _ in range(2))
    op, reference = getattr(bench.ops, name), bench.ops.table[name].reference

    def call(i: int) -> torch.Tensor:
        return op(x[i], stream[i], weight, **how) if residual else op(x[i], weight, **how)

    picked = bench.sample(rows)

    def check() -> float:
        some = picked
        held = stream[0][some].clone()
        expected = reference(x[0][some], held, weight, **how) if residual else reference(x[0][some], weight, **how)
        worst = relative(call(0)[some], expected)
        return max(worst, relative(stream[0][some], held)) if residual else worst

    kept: list[object] = [None] * sets  # each call writes to another place
    calls = [lambda i=i: kept.__setitem__(i, call(i)) for i in range(sets)]
    return Case(name, f"{rows} x {h}", cost, calls, check)


def quantise(bench: Bench, rows: int) -> Case:
    """Rows to FP8, a scale for every 128 columns."""
    h = bench.dims.hidden
    cost, dtype = floor.quantise(h, rows), bench.fp8 or FN
    x = [bench.rows(rows, h) for _ in range(bench.sets(cost.nbytes))]

    picked = bench.sample(rows)

    def check() -> float:
        some = picked
        (q, s), (eq, es) = (
            f(one, dtype=dtype)
            for f, one in ((bench.ops.quantise_rows, x[0]), (bench.ops.table["quantise_rows"].reference, x[0][some]))
        )
        wide = [c.float() * m.repeat_interleave(BLOCK, 1)[:, :h] for c, m in ((q[some], s[some]), (eq, es))]
        return relative(*wide)

    kept: list[object] = [None] * len(x)
    calls = [lambda i=i: kept.__setitem__(i, bench.ops.quantise_rows(x[i], dtype=dtype)) for i in range(len(x))]
    return Case("quantise_rows", f"{rows} x {h}", cost, calls, check)


def kv_write(bench: Bench, rows: int) -> Case:
    """Keys and values of many rows to pages in random order."""
    d = bench.dims
    cost = floor.kv_write(d, rows)
    sets = bench.sets(cost.nbytes)
    k, v = ([bench.rows(rows, d.kv_heads, d.head_dim) for _ in range(sets)] for _ in range(2))
    pages = [bench.rows(-(-rows // PAGE) * sets, PAGE, d.kv_heads, d.head_dim) for _ in range(2)]
    whole = bench.order(len(pages[0]))[:, None] * PAGE + torch.arange(PAGE, device=bench.device)
    index = whole.view(sets, -1)[:, :rows].contiguous()
    scale = {"k_scale": 1.0, "v_scale": 1.0}

    def call(i: int) -> object:
        return bench.ops.kv_write(k[i], v[i], *pages, index[i], **scale)

    def check() -> float:
        call(0)
        flat = [x.flatten(0, 1)[index[0]] for x in pages]
        return max(relative(flat[0], k[0]), relative(flat[1], v[0]))

    return Case(
        "kv_write", f"{rows} x 2 x {d.kv_heads} x {d.head_dim}", cost, [lambda i=i: call(i) for i in range(sets)], check
    )


def qk(bench: Bench, rows: int, context: int = 0) -> Case:
    """Norms and rotation of queries and keys, and keys and values into pages in random order, in one."""
    d, eps = bench.dims, 1e-6
    cost = floor.qk(d, rows)
    sets = bench.sets(cost.nbytes)
    width = 2 * (d.heads + d.kv_heads) * d.head_dim
    qkv = [bench.rows(rows, width) for _ in range(sets)]
    norms = [bench.rows(d.head_dim, scale=0.3) for _ in range(2)]
    longest = max(4096, rows)
    angles = bench.rows(longest, d.head_dim // 8, dtype=torch.float32)
    turn = angles.cos(), angles.sin()
    positions = [bench.order(longest)[:rows] for _ in range(sets)]
    pages = [bench.rows(-(-rows // PAGE) * sets, PAGE, d.kv_heads, d.head_dim) for _ in range(2)]
    index = bench.order(len(pages[0]) * PAGE)[: sets * rows].view(sets, rows)

    def call(op: OpFunction, i: int, into: list[torch.Tensor]) -> torch.Tensor:
        return op(qkv[i], *norms, *turn, positions[i], *into, index[i], eps=eps)

    def check() -> float:
        held = [x.clone() for x in pages]
        expected = call(bench.ops.table["qk_norm_rope_kv_write"].reference, 0, held)
        got = call(bench.ops.qk_norm_rope_kv_write, 0, pages)
        return max(relative(got, expected), *(relative(x, y) for x, y in zip(pages, held, strict=True)))

    calls = [lambda i=i: call(bench.ops.qk_norm_rope_kv_write, i, pages) for i in range(sets)]
    return Case("qk_norm_rope_kv_write", f"B {rows}", cost, calls, check)
