"""Attention of a decode step at a shape. Letters: P pages, S rows of a page, G key/value heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rocm_serve.ops.fp8 import kv_scale
from rocm_serve.tuning import floor
from rocm_serve.tuning.case import PAGE, Case, one_row_each
from rocm_serve.tuning.operands import Bench, relative
from rocm_serve.tuning.timing import Call


def attention(bench: Bench, rows: int, context: int, kv: str = "bf16") -> Case:
    """Decode attention over `context` keys a row; pages in random order in one pool, of FP8 with `kv` "fp8"."""
    d = bench.dims
    cost = floor.attention(d, rows, context, 1 if kv == "fp8" else floor.BF16)
    sets = bench.sets(cost.nbytes)
    each = -(-context // PAGE)
    shape = (sets * rows * each, PAGE, d.kv_heads, d.head_dim)
    k, v = bench.pages(*shape, kv=kv), bench.pages(*shape, kv=kv)
    table = bench.order(shape[0]).to(torch.int32).view(sets, rows, each)
    batches = [bench.decoding(range(1, rows + 1), context - 1, table[i]) for i in range(sets)]
    q = [bench.rows(rows, d.heads, d.head_dim) for _ in range(sets)]
    out = torch.full_like(q[0], float("nan"))
    scale = {"scale": d.head_dim**-0.5, "k_scale": kv_scale(k.dtype), "v_scale": kv_scale(k.dtype)}

    def call(i: int) -> torch.Tensor:
        return bench.ops.attention_decode(q[i], k, v, batches[i], out, **scale)

    picked = bench.sample(rows)

    def check() -> float:
        out.fill_(float("nan"))
        call(0)
        some = sorted({picked[0], picked[len(picked) // 2], picked[-1]})
        expected = torch.empty_like(q[0][some])
        reference = bench.ops.table["attention_decode"].reference
        reference(q[0][some], k, v, one_row_each(batches[0], some, some), expected, **scale)
        return relative(out[some], expected)

    peers: dict[str, Sequence[Call]] = {}
    if not bench.small and kv == "bf16":
        plain = [
            x.view(sets, rows, each * PAGE, d.kv_heads, d.head_dim)[:, :, :context].transpose(2, 3) for x in (k, v)
        ]

        def flash(i: int) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # another one would copy the keys for each head
                return F.scaled_dot_product_attention(q[i][:, :, None], plain[0][i], plain[1][i], enable_gqa=True)

        peers["torch flash, keys in one piece"] = [lambda i=i: flash(i) for i in range(sets)]
    calls = [lambda i=i: call(i) for i in range(sets)]
    return Case(
        "attention_decode",
        f"B {rows} ctx {context}{' fp8 pages' if kv == 'fp8' else ''}",
        cost,
        calls,
        check,
        peers=peers,
    )
