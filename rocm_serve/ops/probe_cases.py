"""The calls that a provider is probed with: every op at the shapes that a rank will run. Same builders as the cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

import torch

from rocm_serve.ops.add_norm_linear.cases import add_norm_linear_case
from rocm_serve.ops.attention_cases import attention_case
from rocm_serve.ops.causal_conv.cases import conv_case
from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.facts import OpFacts
from rocm_serve.ops.fp8 import FP8_DTYPES
from rocm_serve.ops.fp8_linear.cases import fp8_linear_case
from rocm_serve.ops.gated_rms_norm.cases import gated_norm_case
from rocm_serve.ops.gdn_cases import gdn_case
from rocm_serve.ops.gdn_extend.cases import extend_case
from rocm_serve.ops.gdn_step.cases import step_case
from rocm_serve.ops.inputs import in_fnuz
from rocm_serve.ops.kv_write.cases import kv_case
from rocm_serve.ops.linear.cases import linear_case
from rocm_serve.ops.moe_experts.cases import experts_case
from rocm_serve.ops.qk_norm_rope.cases import qk_case
from rocm_serve.ops.qk_norm_rope_kv_write.cases import qkv_case
from rocm_serve.ops.quantise_rows.cases import quantise_case
from rocm_serve.ops.rms_norm.cases import norm_case
from rocm_serve.ops.sampling.cases import draw_case, sum_case
from rocm_serve.ops.shared_down_add.cases import down_case
from rocm_serve.ops.shared_expert_add.cases import shared_case
from rocm_serve.ops.sigmoid_mul.cases import sigmoid_mul_case, sigmoid_mul_heads_case
from rocm_serve.ops.silu_mul.cases import silu_mul_case
from rocm_serve.ops.tiles_linear import FOLDED_ROWS, SHARED_ROWS

# Row counts at which released kernels change their path or were wrong (MoE kernels above 32 rows; faults at 304), and
# the largest step, at which block products have returned NaN.
_ROWS = (0, 1, 16, 32, 33, 64, 128, 304, 512)
_FEW_ROWS = (0, 1, 33)
_LONG = 1200  # tokens of the longest context; more proves nothing new about a kernel and takes time
_PADDING = 2  # rows after the real ones, for the op that leaves them out
_STORED = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn})
Cases = Iterator[tuple[str, Case]]


def probe_cases(op: str, facts: OpFacts) -> dict[str, Case]:
    """Return the calls of `op`, by a name that says their shape. Empty: the model does not call it."""
    made = dict(_OF_OP[op](facts))
    return {name: partial(_in_dialect, case, facts.fp8_dialect) for name, case in made.items()}


def _in_dialect(case: Case, dialect: str, g: torch.Generator, dtype: torch.dtype) -> Arguments:
    made = case(g, dtype)
    return in_fnuz(made) if dialect == "fnuz" else made


def _counts(facts: OpFacts, some: tuple[int, ...]) -> list[int]:
    return sorted({*(n for n in some if n < facts.max_rows), facts.max_rows})


def _norms(facts: OpFacts, *, residual: bool) -> Cases:
    for n in _counts(facts, _FEW_ROWS):
        shape = (n, facts.hidden_size)
        yield f"{n} x {facts.hidden_size}", partial(norm_case, shape=shape, residual=residual, eps=facts.eps)


def _gated_norms(facts: OpFacts) -> Cases:
    for n in _counts(facts, _FEW_ROWS):
        shape = (n, facts.value_heads, facts.value_dim)
        case = partial(gated_norm_case, shape=shape, eps=facts.eps, activation=facts.gate_activation)
        yield f"{n} x {facts.value_heads} x {facts.value_dim}", case


def _linears(facts: OpFacts, *, fp8: bool) -> Cases:
    shapes = [shape for shape in facts.linears if shape.fp8 == fp8]
    for shape in shapes:
        for t in _counts(facts, _ROWS):
            name = f"{t} x [{shape.rows}, {shape.columns}]"
            if fp8:
                case: Case = partial(fp8_linear_case, t=t, k=shape.columns, n=shape.rows, activation=facts.activation)
            else:
                case = partial(linear_case, t=t, k=shape.columns, n=shape.rows)
            yield name, case
    if shapes and not fp8:  # the head's logits leave in float32
        head = max(shapes)
        t = min(facts.max_running, facts.max_rows)
        case = partial(linear_case, t=t, k=head.columns, n=head.rows, out_dtype=torch.float32)
        yield f"{t} x [{head.rows}, {head.columns}] to float32", case


def _silu_muls(facts: OpFacts) -> Cases:
    for t in _counts(facts, _FEW_ROWS):
        yield f"{t} x 2 x {facts.mlp_width}", partial(silu_mul_case, t=t, i=facts.mlp_width)


def _sigmoid_muls(facts: OpFacts) -> Cases:
    wide = facts.heads * facts.head_dim
    for t in _counts(facts, _FEW_ROWS):
        yield f"{t} x {wide}", partial(sigmoid_mul_case, t=t, h=wide, gate=wide)
        heads = partial(sigmoid_mul_heads_case, t=t, heads=facts.heads, d=facts.head_dim)
        yield f"{t} x {facts.heads} heads of {facts.head_dim}", heads
        if facts.num_experts:
            yield (
                f"{t} x {facts.hidden_size}, one gate a row",
                partial(sigmoid_mul_case, t=t, h=facts.hidden_size, gate=1),
            )


def _shared_adds(facts: OpFacts) -> Cases:
    if facts.num_experts:
        for t in _counts(facts, _FEW_ROWS):
            yield f"{t} x {facts.hidden_size}", partial(shared_case, t=t, h=facts.hidden_size)


def _norms_in_products(facts: OpFacts) -> Cases:
    """Products of a layer's normed rows, weight by weight, though some are joined."""
    plain = [shape for shape in facts.linears if not shape.fp8 and shape.columns == facts.hidden_size]
    for shape in plain:
        if shape.rows == facts.vocab:
            continue  # the head's rows are picked between its norm and its product
        for t in range(min(FOLDED_ROWS, facts.max_rows) + 1):
            case = partial(add_norm_linear_case, t=t, h=shape.columns, n=shape.rows, eps=facts.eps)
            yield f"{t} x [{shape.rows}, {shape.columns}]", case


def _shared_downs(facts: OpFacts) -> Cases:
    if facts.num_experts:
        for t in (t for t in (0, 1, 3, 16, 33, SHARED_ROWS) if t <= facts.max_rows):
            name = f"{t} x [{facts.hidden_size}, {facts.mlp_width}]"
            yield name, partial(down_case, t=t, i=facts.mlp_width, h=facts.hidden_size)


def _routes(facts: OpFacts) -> Cases:
    if facts.num_experts:
        for t in _counts(facts, _FEW_ROWS):
            name = f"{t} x {facts.num_experts}, {facts.top_k} chosen"
            yield name, partial(_unequal_logits, t=t, facts=facts)


def _unequal_logits(g: torch.Generator, dtype: torch.dtype, *, t: int, facts: OpFacts) -> Arguments:
    """Router logits of which no two of a row are equal in bf16: which of two equal ones is chosen is nobody's fault.

    They are drawn from the bf16 numbers of magnitude 2^-6 up to 4 with either sign, 2048 of them.
    """
    codes = torch.arange(0x3C80, 0x4080, dtype=torch.int32)
    numbers = torch.cat([codes, codes - 0x8000]).to(torch.int16).view(torch.bfloat16)
    assert facts.num_experts <= numbers.numel(), f"{facts.num_experts} experts are more than {numbers.numel()} numbers"
    order = torch.rand(t, numbers.numel(), generator=g).argsort(dim=1)[:, : facts.num_experts]
    return {"logits_TE": numbers[order].to(dtype), "top_k": facts.top_k, "renormalise": facts.renormalise}


def _experts(facts: OpFacts) -> Cases:
    if facts.num_experts:
        for t in _counts(facts, _ROWS):
            here = "" if facts.local_experts == facts.num_experts else f" ({facts.local_experts} of them here)"
            of = f"{facts.num_experts} experts{here} of {facts.expert_width}"
            name = f"{t} x {facts.hidden_size}, {facts.top_k} of {of}"
            case = partial(
                experts_case,
                t=t + _PADDING,
                live=t,
                h=facts.hidden_size,
                i=facts.expert_width,
                e=facts.local_experts,
                e_all=facts.num_experts,
                k=facts.top_k,
                fp8=facts.expert_fp8,
                activation=facts.activation,
            )
            yield name, case
            if facts.fp8_dispatch:
                yield f"{name}, sent as FP8", partial(case, quantised=True, elsewhere=True, counted=True)


def _quantised(facts: OpFacts) -> Cases:
    if facts.fp8_dispatch:
        for t in _counts(facts, _FEW_ROWS):
            dtype = FP8_DTYPES[facts.fp8_dialect]
            yield f"{t} x {facts.hidden_size}", partial(quantise_case, t=t, k=facts.hidden_size, to=dtype)


def _qk_norms(facts: OpFacts) -> Cases:
    for t in _counts(facts, _FEW_ROWS):
        yield (
            f"{t} x {facts.heads} and {facts.kv_heads} heads of {facts.head_dim}",
            partial(
                qk_case,
                t=t,
                heads=facts.heads,
                kv_heads=facts.kv_heads,
                d=facts.head_dim,
                rotated=facts.rotary_dim,
                eps=facts.eps,
            ),
        )


def _qkv_writes(facts: OpFacts) -> Cases:
    for t in _counts(facts, _FEW_ROWS):
        padding = min(t, _PADDING)
        yield (
            f"{t} x {facts.heads} and {facts.kv_heads} heads of {facts.head_dim} to {facts.kv_dtype} pages",
            partial(
                qkv_case,
                t=t,
                padding=padding,
                skipped=(t - padding) // 8,
                heads=facts.heads,
                kv_heads=facts.kv_heads,
                d=facts.head_dim,
                rotated=facts.rotary_dim,
                page_size=facts.page_size,
                eps=facts.eps,
                stored=_STORED[facts.kv_dtype],
            ),
        )


def _kv_writes(facts: OpFacts) -> Cases:
    for n in _counts(facts, _FEW_ROWS):
        yield (
            f"{n} x {facts.kv_heads} x {facts.head_dim} to {facts.kv_dtype} pages of {facts.page_size}",
            partial(
                kv_case,
                n=n,
                kv_heads=facts.kv_heads,
                d=facts.head_dim,
                page_size=facts.page_size,
                stored=_STORED[facts.kv_dtype],
            ),
        )


def _attention(facts: OpFacts, *, prefill: bool) -> Cases:
    longest = min(facts.max_model_len, _LONG)
    prompts, plain = ((min(facts.max_rows, 130), 0), (7, 129), (1, longest)), ((1, 0), (1, 127), (1, longest))
    verified = ((1 + facts.draft_tokens, 0), (1, 127), (1 + facts.draft_tokens, longest))
    for wished in (prompts,) if prefill else (plain, verified) if facts.draft_tokens else (plain,):
        fits = [(n, min(context, facts.max_model_len - n)) for n, context in wished if n <= facts.max_model_len]
        rows, contexts = tuple(n for n, _ in fits), tuple(context for _, context in fits)
        yield (
            f"rows {rows} after {contexts}, {facts.heads} on {facts.kv_heads} heads of {facts.head_dim}",
            partial(
                attention_case,
                rows=rows,
                contexts=contexts,
                heads=facts.heads,
                kv_heads=facts.kv_heads,
                d=facts.head_dim,
                page_size=facts.page_size,
                stored=_STORED[facts.kv_dtype],
            ),
        )


def _with_drafts(facts: OpFacts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows of sequences and those of them to commit: no draft, K of them, and K behind K that are replayed."""
    k = facts.draft_tokens
    return (1, 1 + k, 1 + 2 * k), (1, 1, 1 + k)


def _convs(facts: OpFacts) -> Cases:
    channels = 2 * facts.key_heads * facts.key_dim + facts.value_heads * facts.value_dim
    case = partial(conv_case, channels=channels, taps=facts.conv_kernel)
    for rows in ((1, 1, 1), (1, 5, 70)):
        yield f"rows {rows} x {channels}", partial(case, rows=rows)
    if facts.draft_tokens:
        rows, commits = _with_drafts(facts)
        yield f"rows {rows}, {commits} committed, x {channels}", partial(case, rows=rows, commits=commits)


def _gdns(facts: OpFacts, rows: tuple[int, ...], *, drafts: bool = False) -> Cases:
    heads = f"{facts.key_heads} and {facts.value_heads} heads of {facts.key_dim} and {facts.value_dim}"
    case = partial(
        gdn_case, heads=facts.value_heads, key_heads=facts.key_heads, key=facts.key_dim, value=facts.value_dim
    )
    yield f"rows {rows}, {heads}", partial(case, rows=rows)
    if drafts and facts.draft_tokens:
        rows, commits = _with_drafts(facts)
        yield f"rows {rows}, {commits} committed, {heads}", partial(case, rows=rows, commits=commits)


def _extensions(facts: OpFacts) -> Cases:
    if facts.draft_tokens:
        k, value = facts.draft_tokens, facts.value_heads * facts.value_dim
        channels = 2 * facts.key_heads * facts.key_dim + value
        sizes = {"channels": channels, "value": value, "gates": 2 * facts.value_heads, "most": k}
        rows, accepted, drafts = (1, 1 + k, 1 + k), (k, 0, k), (0, k, k)
        case = partial(extend_case, rows=rows, accepted=accepted, drafts=drafts, beyond=k, **sizes)
        yield f"rows {rows} behind {accepted}, {drafts} of them drafts, x {channels}", case


def _steps(facts: OpFacts) -> Cases:
    heads = f"{facts.key_heads} and {facts.value_heads} heads of {facts.key_dim} and {facts.value_dim}"
    case = partial(
        step_case,
        heads=facts.value_heads,
        key_heads=facts.key_heads,
        key=facts.key_dim,
        value=facts.value_dim,
        eps=facts.eps,
        activation=facts.gate_activation,
    )
    yield f"rows {(1,) * 3}, {heads}", partial(case, rows=(1,) * 3)
    if facts.draft_tokens:
        rows, commits = _with_drafts(facts)
        yield f"rows {rows}, {commits} committed, {heads}", partial(case, rows=rows, commits=commits)


def _sampled_rows(facts: OpFacts) -> list[int]:
    """Rows of logits: none, one, and the most, which is a row for each draft of a request and one more."""
    return sorted({0, 1, facts.max_running * (1 + facts.draft_tokens)})


def _draws(facts: OpFacts) -> Cases:
    if facts.vocab:
        for r in _sampled_rows(facts):
            sizes = {"r": r, "v": facts.vocab, "used": facts.vocab - 1, "first_id": facts.vocab}
            yield f"{r} x {facts.vocab}", partial(draw_case, **sizes, temperatures=(0.7, 0.0, 1.0))
            yield f"{r} x {facts.vocab}, greedy", partial(draw_case, **sizes)


def _sums(facts: OpFacts) -> Cases:
    if facts.vocab:
        for r in _sampled_rows(facts):
            yield f"{r} x {facts.vocab}", partial(sum_case, r=r, v=facts.vocab)


_OF_OP: Mapping[str, Callable[[OpFacts], Cases]] = MappingProxyType(
    {
        "rms_norm": partial(_norms, residual=False),
        "add_rms_norm": partial(_norms, residual=True),
        "gated_rms_norm": _gated_norms,
        "linear": partial(_linears, fp8=False),
        "add_norm_linear": _norms_in_products,
        "fp8_linear": partial(_linears, fp8=True),
        "silu_mul": _silu_muls,
        "sigmoid_mul": _sigmoid_muls,
        "shared_expert_add": _shared_adds,
        "shared_down_add": _shared_downs,
        "moe_route": _routes,
        "moe_experts": _experts,
        "quantise_rows": _quantised,
        "qk_norm_rope": _qk_norms,
        "qk_norm_rope_kv_write": _qkv_writes,
        "kv_write": _kv_writes,
        "attention_prefill": partial(_attention, prefill=True),
        "attention_decode": partial(_attention, prefill=False),
        "causal_conv": _convs,
        "gdn_chunk": partial(_gdns, rows=(130, 7, 64)),
        "gdn_decode": partial(_gdns, rows=(1, 1, 4), drafts=True),
        "gdn_extend": _extensions,
        "gdn_step": _steps,
        "draw_token": _draws,
        "log_sum_exp": _sums,
    }
)
