"""Gated DeltaNet in a decode step: convolution, recurrence, and all of it in one. States lie at random slots."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

import torch

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.contract import OpFunction
from rocm_serve.tuning import floor
from rocm_serve.tuning.case import Case, decoding_sets, one_row_each, pool_of
from rocm_serve.tuning.operands import Bench, relative
from rocm_serve.tuning.timing import Call


def gdn(bench: Bench, rows: int, context: int = 0) -> Case:
    """The recurrence of one token a row, states at random slots of a pool of 512."""
    d = bench.dims
    cost = floor.gdn_state(d, rows)
    sets = bench.sets(cost.nbytes)
    keys, values = floor.gdn_widths(d)
    state = bench.rows(
        pool_of(bench) + 1, d.value_heads, d.gdn_head_dim, d.gdn_head_dim, scale=0.1, dtype=torch.float32
    )
    operands = [rows_of_layer(bench, rows) for _ in range(sets)]
    a_log, bias = bench.rows(d.value_heads, dtype=torch.float32), bench.rows(d.value_heads, dtype=torch.float32)
    batches = decoding_sets(bench, rows, sets)
    out = bench.rows(rows, d.value_heads, d.gdn_head_dim)

    def heads(i: int) -> tuple[torch.Tensor, ...]:
        mixed, ba = operands[i]
        q, k, v = mixed.split([keys // 2, keys // 2, values], dim=-1)
        b, a = ba.chunk(2, dim=-1)
        return (*(x.view(rows, -1, d.gdn_head_dim) for x in (q, k, v)), a, b)

    def call(i: int) -> torch.Tensor:
        return bench.ops.gdn_decode(*heads(i), a_log, bias, state, batches[i], out)

    picked = bench.sample(rows)

    def check() -> float:
        some = picked
        slots = [batches[0].slots[i] for i in some]
        held = state[[0, *slots]]
        expected = torch.empty_like(out[some])
        few = one_row_each(batches[0], some, range(1, len(some) + 1))
        arguments = [x[some] for x in heads(0)]
        bench.ops.table["gdn_decode"].reference(*arguments, a_log, bias, held, few, expected)
        out.fill_(float("nan"))
        call(0)
        return max(relative(out[some], expected), relative(state[slots], held[1:]))

    peers: dict[str, Sequence[Call]] = {}
    if not bench.small and importlib.util.find_spec("fla") is not None:
        peers["fla, gates given, states in rows"] = _fla(bench, rows, [heads(i)[:3] for i in range(sets)])
    return Case("gdn_decode", f"B {rows}", cost, [lambda i=i: call(i) for i in range(sets)], check, peers=peers)


def _fla(bench: Bench, rows: int, operands: Sequence[tuple[torch.Tensor, ...]]) -> list[Call]:
    """Return calls of fla's recurrent kernel: it takes gates that are computed already, and states without slots."""
    d, op = bench.dims, importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    shape = (rows, d.value_heads, d.gdn_head_dim, d.gdn_head_dim)
    states = [bench.rows(*shape, scale=0.1, dtype=torch.float32) for _ in operands]
    decay, strength = (bench.rows(rows, 1, d.value_heads, dtype=torch.float32) for _ in range(2))
    how = {"g": -decay.abs(), "beta": strength.sigmoid(), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return [
        lambda q=q, k=k, v=v, state=state: op(q=q[:, None], k=k[:, None], v=v[:, None], initial_state=state, **how)
        for (q, k, v), state in zip(operands, states, strict=True)
    ]


def step(bench: Bench, rows: int, context: int = 0) -> Case:
    """Everything between the projections of Gated DeltaNet for one token a row, states at random slots of 512."""
    d = bench.dims
    cost = floor.gdn_step(d, rows)
    sets = bench.sets(cost.nbytes)
    keys, values = floor.gdn_widths(d)
    shape = (pool_of(bench) + 1, d.value_heads, d.gdn_head_dim, d.gdn_head_dim)
    state, window = (
        bench.rows(*shape, scale=0.1, dtype=torch.float32),
        bench.rows(shape[0], d.conv_kernel - 1, keys + values),
    )
    taps = bench.rows(keys + values, d.conv_kernel, scale=0.5)
    a_log, bias = bench.rows(d.value_heads, dtype=torch.float32), bench.rows(d.value_heads, dtype=torch.float32)
    norm = bench.rows(d.gdn_head_dim, scale=0.1)
    wide = [bench.rows(rows, keys + 2 * values) for _ in range(sets)]
    gates = [bench.rows(rows, 2 * d.value_heads) for _ in range(sets)]
    batches = decoding_sets(bench, rows, sets)

    def arguments(
        op: OpFunction, i: int, some: Sequence[int] | slice, held: tuple[torch.Tensor, ...], b: Sequences
    ) -> torch.Tensor:
        u, z = wide[i][some].split([keys + values, values], dim=-1)
        strength, decay = gates[i][some].chunk(2, dim=-1)
        z = z.view(-1, d.value_heads, d.gdn_head_dim)
        return op(u, taps, held[0], decay, strength, a_log, bias, held[1], z, norm, b, eps=1e-6, activation="silu")

    def call(i: int) -> torch.Tensor:
        return arguments(bench.ops.gdn_step, i, slice(None), (window, state), batches[i])

    picked = bench.sample(rows)

    def check() -> float:
        some = picked
        slots = [batches[0].slots[i] for i in some]
        held = (window[[0, *slots]], state[[0, *slots]])
        few = one_row_each(batches[0], some, range(1, len(some) + 1))
        expected = arguments(bench.ops.table["gdn_step"].reference, 0, some, held, few)
        got = call(0)
        return max(
            relative(got[some], expected), relative(window[slots], held[0][1:]), relative(state[slots], held[1][1:])
        )

    return Case("gdn_step", f"B {rows}", cost, [lambda i=i: call(i) for i in range(sets)], check)


def conv(bench: Bench, rows: int, context: int = 0) -> Case:
    """The short convolution of one token a row."""
    d = bench.dims
    cost = floor.conv(d, rows)
    sets = bench.sets(cost.nbytes)
    channels = sum(floor.gdn_widths(d))
    state = bench.rows(pool_of(bench) + 1, d.conv_kernel - 1, channels)
    weight = bench.rows(channels, d.conv_kernel, scale=0.5)
    u = [bench.rows(rows, channels + floor.gdn_widths(d)[1])[:, :channels] for _ in range(sets)]
    batches = decoding_sets(bench, rows, sets)

    def call(i: int) -> torch.Tensor:
        return bench.ops.causal_conv(u[i], weight, state, batches[i])

    picked = bench.sample(rows)

    def check() -> float:
        some = picked
        slots = [batches[0].slots[i] for i in some]
        held = state[[0, *slots]]
        few = one_row_each(batches[0], some, range(1, len(some) + 1))
        expected = bench.ops.table["causal_conv"].reference(u[0][some], weight, held, few)
        got = call(0)
        return max(relative(got[some], expected), relative(state[slots], held[1:]))

    return Case("causal_conv", f"B {rows}", cost, [lambda i=i: call(i) for i in range(sets)], check)


def rows_of_layer(bench: Bench, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return bench.rows(rows, sum(floor.gdn_widths(bench.dims))), bench.rows(rows, 2 * bench.dims.value_heads)
