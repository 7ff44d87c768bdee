"""Ops of prompt rows at a shape: attention, the delta rule and the convolution in front of it.

`rows` of each of `count` prompts, `context` tokens before them. Letters: P pages, S rows of a page, T rows in all.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.fp8 import kv_scale
from rocm_serve.tuning import floor, floor_prefill
from rocm_serve.tuning.case import PAGE, Case, pool_of
from rocm_serve.tuning.cases_gdn import rows_of_layer
from rocm_serve.tuning.operands import PIECE, Bench, relative, worst_piece
from rocm_serve.tuning.timing import Call


def attention_prefill(bench: Bench, rows: int, context: int = 0, count: int = 1, kv: str = "bf16") -> Case:
    """Causal attention of prompts; pages in random order in one pool."""
    d = bench.dims
    cost = floor_prefill.attention(d, rows, context, count, 1 if kv == "fp8" else floor.BF16)
    sets, total, each = bench.sets(cost.nbytes), rows * count, -(-(context + rows) // PAGE)
    shape = (sets * count * each, PAGE, d.kv_heads, d.head_dim)
    k, v = bench.pages(*shape, kv=kv), bench.pages(*shape, kv=kv)
    table = bench.order(shape[0]).to(torch.int32).view(sets, count, each)
    lengths, slots = [rows] * count, range(1, count + 1)
    batches = [bench.prompts(lengths, slots, context=context, table_BP=one) for one in table]
    q = [bench.rows(total, d.heads, d.head_dim) for _ in range(sets)]
    out = torch.full_like(q[0], float("nan"))
    scale = {"scale": d.head_dim**-0.5, "k_scale": kv_scale(k.dtype), "v_scale": kv_scale(k.dtype)}

    def call(i: int) -> torch.Tensor:
        return bench.ops.attention_prefill(q[i], k, v, batches[i], out, **scale)

    picked = bench.sample(total)

    def check() -> float:
        out.fill_(float("nan"))
        call(0)
        expected = torch.empty_like(q[0][picked])
        each_its_own = bench.decoding(
            range(1, len(picked) + 1),
            [context + row % rows for row in picked],
            table[0][torch.tensor([row // rows for row in picked], device=bench.device)],
        )
        bench.ops.table["attention_prefill"].reference(q[0][picked], k, v, each_its_own, expected, **scale)
        return relative(out[picked], expected)

    peers: dict[str, Sequence[Call]] = {}
    if not bench.small and kv == "bf16" and not context:
        pages = [x.view(sets, count, each * PAGE, d.kv_heads, d.head_dim)[:, :, :rows].transpose(2, 3) for x in (k, v)]

        def plain(i: int, backend: SDPBackend) -> torch.Tensor:
            queries = q[i].view(count, rows, d.heads, d.head_dim).transpose(1, 2)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    queries, pages[0][i], pages[1][i], is_causal=True, enable_gqa=True
                )

        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
            peers[f"torch {name}, keys in one piece"] = [lambda i=i, b=backend: plain(i, b) for i in range(sets)]
    calls = [lambda i=i: call(i) for i in range(sets)]
    return Case("attention_prefill", _named(rows, context, count, kv), cost, calls, check, peers=peers)


def gdn_chunk(bench: Bench, rows: int, count: int = 1) -> Case:
    """The delta rule over prompts, states at random slots of a pool of 512. Every row and state is compared."""
    d = bench.dims
    cost = floor_prefill.gdn(d, rows, count)
    sets, total = bench.sets(cost.nbytes), rows * count
    keys, values = floor.gdn_widths(d)
    state = bench.rows(
        pool_of(bench) + 1, d.value_heads, d.gdn_head_dim, d.gdn_head_dim, scale=0.1, dtype=torch.float32
    )
    operands = [rows_of_layer(bench, total) for _ in range(sets)]
    a_log = bench.rows(d.value_heads, scale=2.0, dtype=torch.float32)  # heads that forget slowly, and quickly
    bias = bench.rows(d.value_heads, dtype=torch.float32)
    batches = _at_slots(bench, rows, count, sets)
    out = bench.rows(total, d.value_heads, d.gdn_head_dim)

    def heads(i: int) -> tuple[torch.Tensor, ...]:
        mixed, ba = operands[i]
        q, k, v = mixed.split([keys // 2, keys // 2, values], dim=-1)
        b, a = ba.chunk(2, dim=-1)
        return (*(x.view(total, -1, d.gdn_head_dim) for x in (q, k, v)), a, b)

    def call(i: int) -> torch.Tensor:
        return bench.ops.gdn_chunk(*heads(i), a_log, bias, state, batches[i], out)

    def check() -> float:
        slots = list(batches[0].slots)
        held, expected = state[[0, *slots]], torch.empty_like(out)
        own = bench.prompts([rows] * count, range(1, count + 1))
        bench.ops.table["gdn_chunk"].reference(*heads(0), a_log, bias, held, own, expected)
        out.fill_(float("nan"))
        call(0)
        return max(worst_piece(out, expected, PIECE), worst_piece(state[slots], held[1:], 1))

    peers: dict[str, Sequence[Call]] = {}
    if not bench.small and importlib.util.find_spec("fla") is not None:
        peers["fla, gates given, states in rows"] = _fla(bench, rows, count, [heads(i)[:3] for i in range(sets)])
    calls = [lambda i=i: call(i) for i in range(sets)]
    return Case("gdn_chunk", _named(rows, 0, count), cost, calls, check, peers=peers)


def _fla(bench: Bench, rows: int, count: int, operands: Sequence[tuple[torch.Tensor, ...]]) -> list[Call]:
    """Return calls of fla's chunked kernels: they take gates that are computed already, states without slots."""
    d, op = bench.dims, importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    shape = (count, d.value_heads, d.gdn_head_dim, d.gdn_head_dim)
    states = [bench.rows(*shape, scale=0.1, dtype=torch.float32) for _ in operands]
    decay, strength = (bench.rows(count, rows, d.value_heads, dtype=torch.float32) for _ in range(2))
    how = {"g": -decay.abs(), "beta": strength.sigmoid(), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    made = [[x.reshape(count, rows, *x.shape[1:]).contiguous() for x in some] for some in operands]
    return [
        lambda q=q, k=k, v=v, state=state: op(q=q, k=k, v=v, initial_state=state, **how)
        for (q, k, v), state in zip(made, states, strict=True)
    ]


def prompt_conv(bench: Bench, rows: int, count: int = 1) -> Case:
    """The short convolution of prompts."""
    d = bench.dims
    cost = floor_prefill.conv(d, rows, count)
    sets, total, channels = bench.sets(cost.nbytes), rows * count, sum(floor.gdn_widths(d))
    state = bench.rows(pool_of(bench) + 1, d.conv_kernel - 1, channels)
    weight = bench.rows(channels, d.conv_kernel, scale=0.5)
    u = [bench.rows(total, channels + floor.gdn_widths(d)[1])[:, :channels] for _ in range(sets)]
    batches = _at_slots(bench, rows, count, sets)

    def call(i: int) -> torch.Tensor:
        return bench.ops.causal_conv(u[i], weight, state, batches[i])

    def check() -> float:
        slots = list(batches[0].slots)
        held, own = state[[0, *slots]], bench.prompts([rows] * count, range(1, count + 1))
        expected = bench.ops.table["causal_conv"].reference(u[0], weight, held, own)
        return max(worst_piece(call(0), expected, PIECE), worst_piece(state[slots], held[1:], 1))

    calls = [lambda i=i: call(i) for i in range(sets)]
    return Case("causal_conv", _named(rows, 0, count), cost, calls, check)


def _at_slots(bench: Bench, rows: int, count: int, sets: int) -> list[Sequences]:
    """Return sets of prompts, each set at random slots of its own as long as the pool lasts."""
    deck = [1 + slot for slot in bench.deck(pool_of(bench))]
    assert count <= len(deck), f"{count} states in a pool of {len(deck)}"
    starts = [i % (len(deck) // count) * count for i in range(sets)]
    return [bench.prompts([rows] * count, deck[start : start + count]) for start in starts]


def _named(rows: int, context: int, count: int, kv: str = "bf16") -> str:
    before = f" ctx {context}" if context else ""
    return f"{f'{count} x ' if count > 1 else ''}T {rows}{before}{' fp8 pages' if kv == 'fp8' else ''}"
