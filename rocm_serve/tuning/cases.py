"""The ops of a decode step at a shape: operands, what they must move, a comparison with the reference, peers.

Letters as in the ops: T rows, H width, E experts, k choices, B sequences, P pages, S rows of a page, G key/value heads.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.contract import OpFunction
from rocm_serve.ops.fp8 import BLOCK, FN, kv_scale
from rocm_serve.tuning import floor
from rocm_serve.tuning.floor import Cost
from rocm_serve.tuning.operands import SLOTS, Bench, relative
from rocm_serve.tuning.timing import Call

PAGE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one size. `calls` go through sets of operands; `check` returns the relative L2 of sampled rows."""

    op: str
    what: str
    cost: Cost
    calls: Sequence[Call]
    check: Callable[[], float]
    distinct: float | None = None
    peers: Mapping[str, Sequence[Call]] = field(default_factory=dict)


def _picked(sequences: Sequences, rows: Sequence[int], slots: Sequence[int]) -> Sequences:
    """Return one-row sequences out of others, as rows 0.. of a new batch with new slots."""
    index = torch.tensor(list(rows), device=sequences.slots_B.device)
    return replace(
        sequences,
        row_starts=tuple(range(len(rows) + 1)),
        contexts=tuple(sequences.contexts[i] for i in rows),
        slots=tuple(slots),
        num_recurrent=len(rows),
        row_starts_B1=sequences.row_starts_B1[: len(rows) + 1],
        contexts_B=sequences.contexts_B[index],
        slots_B=torch.tensor(list(slots), dtype=torch.int32, device=index.device),
        page_table_BP=sequences.page_table_BP[index],
    )


def attention(bench: Bench, rows: int, context: int) -> Case:
    """Decode attention over `context` keys a row; pages in random order in one pool."""
    d = bench.dims
    cost = floor.attention(d, rows, context)
    sets = bench.sets(cost.nbytes)
    each = -(-context // PAGE)
    shape = (sets * rows * each, PAGE, d.kv_heads, d.head_dim)
    k, v = bench.rows(*shape), bench.rows(*shape)
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
        reference(q[0][some], k, v, _picked(batches[0], some, some), expected, **scale)
        return relative(out[some], expected)

    peers: dict[str, Sequence[Call]] = {}
    if not bench.small:
        plain = [
            x.view(sets, rows, each * PAGE, d.kv_heads, d.head_dim)[:, :, :context].transpose(2, 3) for x in (k, v)
        ]

        def flash(i: int) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # another one would copy the keys for each head
                return F.scaled_dot_product_attention(q[i][:, :, None], plain[0][i], plain[1][i], enable_gqa=True)

        peers["torch flash, keys in one piece"] = [lambda i=i: flash(i) for i in range(sets)]
    calls = [lambda i=i: call(i) for i in range(sets)]
    return Case("attention_decode", f"B {rows} ctx {context}", cost, calls, check, peers=peers)


def gdn(bench: Bench, rows: int, context: int = 0) -> Case:
    """The recurrence of one token a row, states at random slots of a pool of 512."""
    d = bench.dims
    cost = floor.gdn_state(d, rows)
    sets = bench.sets(cost.nbytes)
    keys, values = floor.gdn_widths(d)
    state = bench.rows(_slots(bench) + 1, d.value_heads, d.gdn_head_dim, d.gdn_head_dim, scale=0.1, dtype=torch.float32)
    operands = [_gdn_rows(bench, rows) for _ in range(sets)]
    a_log, bias = bench.rows(d.value_heads, dtype=torch.float32), bench.rows(d.value_heads, dtype=torch.float32)
    batches = _batches(bench, rows, sets)
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
        few = _picked(batches[0], some, range(1, len(some) + 1))
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
    shape = (_slots(bench) + 1, d.value_heads, d.gdn_head_dim, d.gdn_head_dim)
    state, window = (
        bench.rows(*shape, scale=0.1, dtype=torch.float32),
        bench.rows(shape[0], d.conv_kernel - 1, keys + values),
    )
    taps = bench.rows(keys + values, d.conv_kernel, scale=0.5)
    a_log, bias = bench.rows(d.value_heads, dtype=torch.float32), bench.rows(d.value_heads, dtype=torch.float32)
    norm = bench.rows(d.gdn_head_dim, scale=0.1)
    wide = [bench.rows(rows, keys + 2 * values) for _ in range(sets)]
    gates = [bench.rows(rows, 2 * d.value_heads) for _ in range(sets)]
    batches = _batches(bench, rows, sets)

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
        few = _picked(batches[0], some, range(1, len(some) + 1))
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
    state = bench.rows(_slots(bench) + 1, d.conv_kernel - 1, channels)
    weight = bench.rows(channels, d.conv_kernel, scale=0.5)
    u = [bench.rows(rows, channels + floor.gdn_widths(d)[1])[:, :channels] for _ in range(sets)]
    batches = _batches(bench, rows, sets)

    def call(i: int) -> torch.Tensor:
        return bench.ops.causal_conv(u[i], weight, state, batches[i])

    picked = bench.sample(rows)

    def check() -> float:
        some = picked
        slots = [batches[0].slots[i] for i in some]
        held = state[[0, *slots]]
        few = _picked(batches[0], some, range(1, len(some) + 1))
        expected = bench.ops.table["causal_conv"].reference(u[0][some], weight, held, few)
        got = call(0)
        return max(relative(got[some], expected), relative(state[slots], held[1:]))

    return Case("causal_conv", f"B {rows}", cost, [lambda i=i: call(i) for i in range(sets)], check)


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

    picked = bench.sample(rows)

    def check() -> float:
        some = picked
        reference = bench.ops.providers["moe_experts"].semantics or bench.ops.table["moe_experts"].reference
        expected = reference(x[1][some], ids[1][some], shares[1][some], len(some), **bench.experts[1], **how)
        return relative(call(1)[some], expected)

    calls = [lambda i=i: call(i) for i in range(sets)]
    return Case("moe_experts", f"B {rows}", floor.experts(d, rows, distinct), calls, check, distinct)


def route(bench: Bench, rows: int, context: int = 0) -> Case:
    """The choice of experts from router logits."""
    d = bench.dims
    logits = [bench.rows(rows, d.experts, scale=2.0) for _ in range(bench.sets(floor.route(d, rows).nbytes))]
    how = {"top_k": d.top_k, "renormalise": True}

    def check() -> float:
        got, expected = (f(logits[0], **how) for f in (bench.ops.moe_route, bench.ops.table["moe_route"].reference))
        return relative(got[1], expected[1])  # ids of equal logits may differ, their weights may not

    calls = [lambda x=x: bench.ops.moe_route(x, **how) for x in logits]
    return Case("moe_route", f"B {rows}", floor.route(d, rows), calls, check)


def linear(bench: Bench, rows: int, name: str) -> Case:
    """A bf16 product with few rows; the weight is another one at each call."""
    outputs, columns = floor.linears_of(bench.dims)[name]
    cost = floor.linear(rows, columns, outputs)
    sets = bench.sets(cost.nbytes)
    x, w = bench.rows(rows, columns), [bench.rows(outputs, columns, scale=columns**-0.5) for _ in range(sets)]
    prepared = [bench.ops.prepare("linear", {"weight_NK": one})["weight_NK"] for one in w]

    def check() -> float:
        return relative(bench.ops.linear(x, prepared[0]), bench.ops.table["linear"].reference(x, w[0]))

    peers: dict[str, Sequence[Call]] = {}
    for provider in bench.ops.table["linear"].providers.values():
        other = provider.name not in (bench.ops.providers["linear"].name, "reference", "aiter")
        if other and not bench.small and provider.refusal(bench.arch, {}) is None:
            product = provider.load()
            peers[f"by {provider.name}"] = [lambda one=one, f=product: f(x, one) for one in w]
    calls = [lambda one=one: bench.ops.linear(x, one) for one in prepared]
    return Case("linear", f"{name} [{outputs}, {columns}] T {rows}", cost, calls, check, peers=peers)


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
    angles = bench.rows(4096, d.head_dim // 8, dtype=torch.float32)
    turn = angles.cos(), angles.sin()
    positions = [bench.order(4096)[:rows] for _ in range(sets)]
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


def _slots(bench: Bench) -> int:
    return 8 if bench.small and not bench.hollow else SLOTS


def _batches(bench: Bench, rows: int, sets: int) -> list[Sequences]:
    """Return sets of sequences at random slots; sets share no slot as long as the pool lasts."""
    slots = _slots(bench)
    assert rows <= slots, f"{rows} states in a pool of {slots}"
    each = slots // rows
    decks = [[1 + slot for slot in bench.deck(slots)] for _ in range(-(-sets // each))]
    return [bench.decoding(decks[i // each][i % each * rows : (i % each + 1) * rows], 0) for i in range(sets)]


def _gdn_rows(bench: Bench, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return bench.rows(rows, sum(floor.gdn_widths(bench.dims))), bench.rows(rows, 2 * bench.dims.value_heads)
