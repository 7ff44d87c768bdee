"""Trials of the Triton kernels that walk sequences: attention, the gated delta rule, the convolution, rotary norms.

The executed ones are small and odd: tails of every mask, several sequences, rows that do not begin at 0. Real sizes are
compiled only. Widths stay multiples of 16, as every model's are: others cost the convolution some scalar registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from evals.gfx.registry import Arch, Trial, fp8_dtype
from rocm_serve.ops.attention_cases import attention_case
from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.contract import Arguments
from rocm_serve.ops.gdn_cases import committing, gdn_case
from rocm_serve.ops.gdn_extend.cases import extend_case
from rocm_serve.ops.gdn_step.cases import step_case
from rocm_serve.ops.inputs import normal, sequences_of
from rocm_serve.ops.qk_norm_rope_kv_write.cases import qkv_case

_BF16 = torch.bfloat16
Build = Callable[[torch.Generator, Arch], Arguments]


def _kv(g: torch.Generator, arch: Arch, *, rows: int, heads: int, d: int, fp8: bool) -> Arguments:
    """K of magnitudes up to beyond what FP8 holds; V a slice of a wider projection."""
    pages = [torch.zeros(rows // 4 + 2, 4, heads, d).to(fp8_dtype(arch) if fp8 else _BF16) for _ in range(2)]
    wide = normal(g, rows, heads * d + 16, dtype=_BF16)
    return {
        "k_NGD": normal(g, rows, heads, d, scale=200.0, dtype=_BF16),
        "v_NGD": wide[:, 16:].view(rows, heads, d),
        "k_pages_PSGD": pages[0],
        "v_pages_PSGD": pages[1],
        "index_N": torch.randperm(pages[0].shape[0] * 4, generator=g)[:rows],
        "k_scale": 0.5 if fp8 else 1.0,
        "v_scale": 3.0 if fp8 else 1.0,
    }


def _turned(g: torch.Generator, arch: Arch, *, rows: int, heads: int, kv_heads: int, d: int, rotated: int) -> Arguments:
    angle = torch.arange(50)[:, None] * 1e4 ** (-torch.arange(0, rotated, 2) / rotated)
    return {
        "q_THD": normal(g, rows, heads, 2 * d, dtype=_BF16)[..., :d],
        "k_TGD": normal(g, rows, kv_heads, d, dtype=_BF16),
        "q_weight_D": normal(g, d, scale=0.3, dtype=_BF16),
        "k_weight_D": normal(g, d, scale=0.3, dtype=_BF16),
        "cos_PR": angle.cos(),
        "sin_PR": angle.sin(),
        "positions_T": torch.randint(0, 50, (rows,), generator=g),
        "eps": 1e-6,
    }


def _qkv(g: torch.Generator, arch: Arch, *, fp8: bool = True, **sizes: int) -> Arguments:
    scales = {"k_scale": 0.5, "v_scale": 3.0} if fp8 else {}
    return qkv_case(g, _BF16, stored=fp8_dtype(arch) if fp8 else None, **scales, **sizes)  # type: ignore[arg-type]


def _conv(
    g: torch.Generator,
    arch: Arch,
    *,
    rows: tuple[int, ...],
    channels: int,
    commits: tuple[int, ...] | None = None,
    shared: bool = False,
    recurrent: int = 0,
) -> Arguments:
    sequences, _ = sequences_of(g, rows, (0,) * len(rows), first_row=1)
    sequences = replace(sequences, shared=shared, num_recurrent=recurrent)
    if commits is not None:
        sequences = committing(sequences, commits)
    total = sequences.row_starts[-1] + 2
    return {
        "u_TC": normal(g, total, channels + 16, dtype=_BF16)[:, :channels],
        "weight_CK": normal(g, channels, 4, dtype=_BF16),
        "state": normal(g, len(rows) + 2, 3, channels, dtype=_BF16),
        "sequences": sequences,
    }


def _rule(g: torch.Generator, arch: Arch, **sizes: int | tuple[int, ...]) -> Arguments:
    return gdn_case(g, _BF16, **sizes)  # type: ignore[arg-type]


def _extend(g: torch.Generator, arch: Arch, **sizes: int | tuple[int, ...]) -> Arguments:
    return extend_case(g, _BF16, **sizes)  # type: ignore[arg-type]


def _step(g: torch.Generator, arch: Arch, **sizes: int | tuple[int, ...]) -> Arguments:
    return step_case(g, _BF16, **sizes)  # type: ignore[arg-type]


def _attend(
    g: torch.Generator,
    arch: Arch,
    *,
    rows_in: torch.dtype = _BF16,
    fp8: bool = False,
    shared: bool = False,
    **sizes: object,
) -> Arguments:
    made = attention_case(g, rows_in, stored=fp8_dtype(arch) if fp8 else None, **sizes)  # type: ignore[arg-type]
    return made | {"sequences": replace(made["sequences"], shared=shared)}  # type: ignore[type-var]


def _untouched(
    g: torch.Generator,
    arch: Arch,
    *,
    rows: int,
    context: int,
    heads: int,
    kv_heads: int,
    fp8: bool = False,
    many: int = 1,
) -> Arguments:
    """Arguments of a real size that are never read: to compile for."""
    length = context + rows
    pages = torch.empty(length // 16 + 1, 16, kv_heads, 256, dtype=fp8_dtype(arch) if fp8 else _BF16)
    sequences = Sequences(
        row_starts=tuple(rows * b for b in range(many + 1)),
        contexts=(context,) * many,
        slots=(1,) * many,
        num_recurrent=0,
        row_starts_B1=torch.arange(many + 1, dtype=torch.int32) * rows,
        contexts_B=torch.full((many,), context, dtype=torch.int32),
        slots_B=torch.ones(many, dtype=torch.int32),
        page_table_BP=torch.zeros(many, len(pages), dtype=torch.int32),
    )
    q = torch.empty(rows * many, heads, 256, dtype=_BF16)
    held = {"k_pages_PSGD": pages, "v_pages_PSGD": pages}
    return {"q_THD": q, **held, "sequences": sequences, "out_THD": torch.empty_like(q), "scale": 1 / 16}


def _trial(op: str, case: str, build: Build, *kernels: str, **other: object) -> Trial:
    return Trial(op=op, provider="triton", case=case, arguments=build, kernels=kernels, **other)  # type: ignore[arg-type]


_ONCE = {
    "prefill_attention_kernel:wide_stores": "a row is stored once a step, as the matrix instruction lays it out",
}
_PARTS = {
    "decode_attention_kernel:wide_stores": "a split is stored once, as the matrix instruction lays it out",
    "merge_splits_kernel:wide_stores": "a row is stored once a step, as the sum over splits leaves it",
}
_SMALL_BLOCKS = _PARTS | {
    "decode_attention_kernel:wide_loads": "a block of short heads is less than 16 bytes a lane",
}
_AS_LAID_OUT = {
    "gdn_chunk_prepare_kernel:wide_stores": "a square is stored once, as the matrix instruction lays it out",
    "gdn_chunk_solve_kernel:wide_stores": "a square is stored once, as the matrix instruction lays it out",
    "gdn_chunk_scan_kernel:wide_stores": "rows are stored once, as the matrix instruction lays them out",
}
_QKV = "qk_norm_rope_kv_write_kernel"
_COPY, _PREFILL, _ADD = "copy_keys_kernel", "prefill_attention_kernel", "add_splits_kernel"
_SPLIT, _MERGE = "decode_attention_kernel", "merge_splits_kernel"
_SCAN, _CONV, _STEP = "gated_delta_rule_kernel", "causal_conv_kernel", "gdn_step_kernel"
_CHUNKS = "gdn_chunk_prepare_kernel", "gdn_chunk_solve_kernel", "gdn_chunk_scan_kernel"
_SMALL: dict[str, Any] = {"heads": 6, "kv_heads": 2, "d": 24, "page_size": 5}
_HEADS: dict[str, Any] = {"heads": 16, "key_heads": 2, "key": 128, "value": 128}

TRIALS: tuple[Trial, ...] = (
    _trial("kv_write", "bf16, 5 x 3 x 16", partial(_kv, rows=5, heads=3, d=16, fp8=False), "kv_write_kernel"),
    _trial("kv_write", "fp8, 5 x 3 x 16", partial(_kv, rows=5, heads=3, d=16, fp8=True), "kv_write_kernel"),
    _trial(
        "kv_write",
        "fp8, one head of 256",
        partial(_kv, rows=2, heads=1, d=256, fp8=True),
        "kv_write_kernel",
        compile_only=True,
    ),
    _trial(
        "qk_norm_rope",
        "3 x 5 + 1 heads of 40",
        partial(_turned, rows=3, heads=5, kv_heads=1, d=40, rotated=12),
        "qk_norm_rope_kernel",
        exceptions={"wide_stores": "what does not turn begins behind 12 numbers, 24 bytes, of a head"},
    ),
    _trial(
        "qk_norm_rope",
        "2 x 5 + 1 heads of 256",
        partial(_turned, rows=2, heads=5, kv_heads=1, d=256, rotated=64),
        "qk_norm_rope_kernel",
    ),
    _trial(
        "qk_norm_rope_kv_write",
        "fp8, 5 rows of 3 + 2 heads of 40",
        partial(_qkv, t=5, padding=1, skipped=1, heads=3, kv_heads=2, d=40, rotated=12, page_size=4),
        _QKV,
        exceptions={
            "wide_loads": "two heads of 40 are less than 16 bytes a lane",
            "wide_stores": "two heads of 40 are less than 16 bytes a lane",
        },
    ),
    _trial(
        "qk_norm_rope_kv_write",
        "bf16, 2.4T heads at tp 8",
        partial(_qkv, t=2, heads=8, kv_heads=1, d=256, rotated=64, fp8=False),
        _QKV,
    ),
    *(
        _trial(
            "qk_norm_rope_kv_write",
            f"{'fp8' if fp8 else 'bf16'}, 2.4T heads at tp 8, many rows",
            partial(_qkv, t=600, heads=8, kv_heads=1, d=256, rotated=64, fp8=fp8),
            _QKV,
            compile_only=True,
        )
        for fp8 in (False, True)
    ),
    _trial("causal_conv", "rows 2, 1, 18", partial(_conv, rows=(2, 1, 18), channels=48), _CONV),
    _trial("causal_conv", "drafts on a copy", partial(_conv, rows=(2, 4), channels=144, commits=(1, 3)), _CONV),
    _trial("causal_conv", "one row each", partial(_conv, rows=(1, 1, 1), channels=528, recurrent=3), _CONV),
    _trial("causal_conv", "shared rows", partial(_conv, rows=(2, 0, 37), channels=48, shared=True), _CONV),
    _trial(
        "causal_conv",
        "2560 channels",
        partial(_conv, rows=(40,), channels=2560),
        _CONV,
        compile_only=True,
    ),
    _trial(
        "gdn_chunk",
        "rows 70, 9",
        partial(_rule, rows=(70, 9), heads=2, key_heads=1, key=32, value=48),
        *_CHUNKS,
        exceptions=_AS_LAID_OUT,
    ),
    _trial(
        "gdn_decode",
        "drafts on a copy",
        partial(_rule, rows=(1, 3), heads=2, key_heads=1, key=32, value=48, first_row=2, commits=(1, 1)),
        _SCAN,
    ),
    _trial("gdn_decode", "heads of 128", partial(_rule, rows=(1,), heads=2, key_heads=1, key=128, value=128), _SCAN),
    _trial(
        "gdn_decode",
        "2.4T heads at tp 8, drafts",
        partial(_rule, rows=(7,), commits=(4,), **_HEADS),
        _SCAN,
        compile_only=True,
    ),
    _trial(
        "gdn_chunk",
        "heads of 128",
        partial(_rule, rows=(65,), heads=1, key_heads=1, key=128, value=32),
        *_CHUNKS,
        exceptions=_AS_LAID_OUT,
    ),
    _trial(
        "gdn_chunk",
        "2.4T heads at tp 8",
        partial(_rule, rows=(3,), **_HEADS),
        *_CHUNKS,
        compile_only=True,
        exceptions=_AS_LAID_OUT,
    ),
    _trial(
        "gdn_extend",
        "all kinds of rows",
        partial(_extend, rows=(1, 3, 2, 4), accepted=(3, 0, 2, 1), drafts=(0, 2, 1, 3), beyond=5, gates=8),
        "gdn_extend_kernel",
    ),
    _trial(
        "gdn_extend",
        "2.4T heads at tp 8",
        partial(_extend, rows=(4,), accepted=(3,), drafts=(3,), channels=2560, value=2048, gates=32, most=3),
        "gdn_extend_kernel",
        compile_only=True,
    ),
    _trial("gdn_step", "heads of 128", partial(_step, rows=(1, 1), heads=2, key_heads=1, key=128, value=128), _STEP),
    _trial(
        "gdn_step",
        "drafts on a copy",
        partial(_step, rows=(1, 3), heads=2, key_heads=1, key=32, value=48, first_row=2, commits=(1, 1)),
        _STEP,
    ),
    _trial(
        "gdn_step",
        "2.4T heads at tp 8, drafts",
        partial(_step, rows=(7,), commits=(4,), **_HEADS),
        _STEP,
        "gated_rms_norm_kernel",
        compile_only=True,
    ),
    _trial(
        "attention_prefill",
        "3 heads on each key, 24 wide",
        partial(_attend, rows=(9, 25), contexts=(70, 0), first_row=3, **_SMALL),
        _COPY,
        _PREFILL,
        exceptions=_ONCE,
    ),
    _trial(
        "attention_prefill",
        "fp8 pages",
        partial(_attend, rows=(20,), contexts=(11,), heads=4, kv_heads=2, d=64, k_scale=0.5, v_scale=3.0, fp8=True),
        _COPY,
        _PREFILL,
        exceptions=_ONCE,
    ),
    _trial(
        "attention_prefill",
        "shared rows",
        partial(_attend, rows=(9, 0, 5), contexts=(0, 0, 130), heads=4, kv_heads=2, d=64, first_row=3, shared=True),
        _COPY,
        _PREFILL,
        exceptions=_ONCE,
    ),
    _trial(
        "attention_prefill",
        "shared rows in splits",
        partial(_attend, rows=(2, 1), contexts=(1030, 3), heads=8, kv_heads=1, d=256, shared=True),
        _COPY,
        _PREFILL,
        _ADD,
        compile_only=True,
        exceptions=_ONCE,
    ),
    _trial(
        "attention_prefill",
        "heads of 256",
        partial(_attend, rows=(9,), contexts=(30,), heads=8, kv_heads=1, d=256),
        _COPY,
        _PREFILL,
        exceptions=_ONCE,
    ),
    _trial(
        "attention_prefill",
        "two rows behind 1030 keys, in splits",
        partial(_attend, rows=(2,), contexts=(1030,), heads=8, kv_heads=1, d=256),
        _COPY,
        _PREFILL,
        _ADD,
        exceptions=_ONCE,
    ),
    _trial(
        "attention_decode",
        "float32",
        partial(_attend, rows=(1, 4), contexts=(40, 3), rows_in=torch.float32, **_SMALL),
        _SPLIT,
        _MERGE,
        limit=2e-6,
        exceptions=_PARTS
        | {"merge_splits_kernel:wide_loads": "two splits of 24 numbers leave a lane less than 16 bytes"},
    ),
    _trial(
        "attention_decode",
        "one and four rows",
        partial(_attend, rows=(1, 4), contexts=(40, 3), first_row=1, **_SMALL),
        _SPLIT,
        _MERGE,
        exceptions=_SMALL_BLOCKS,
    ),
    _trial(
        "attention_decode",
        "fp8 pages",
        partial(_attend, rows=(1, 2), contexts=(70, 8), heads=4, kv_heads=2, d=64, k_scale=0.5, v_scale=3.0, fp8=True),
        _SPLIT,
        _MERGE,
        exceptions=_SMALL_BLOCKS,
    ),
    *(
        _trial(
            "attention_decode",
            f"2.4T heads at tp 8, {'fp8' if fp8 else 'bf16'}",
            partial(_untouched, rows=1, context=5000, heads=8, kv_heads=1, fp8=fp8),
            _SPLIT,
            _MERGE,
            compile_only=True,
            exceptions=_PARTS,
        )
        for fp8 in (False, True)
    ),
    _trial(
        "attention_decode",
        "2.4T heads at tp 4, four rows",
        partial(_untouched, rows=4, context=500, heads=16, kv_heads=1),
        _SPLIT,
        _MERGE,
        compile_only=True,
        exceptions=_PARTS,
    ),
    _trial(
        "attention_decode",
        "256 sequences, not split",
        partial(_untouched, rows=1, context=500, heads=8, kv_heads=1, many=256),
        _SPLIT,
        compile_only=True,
        exceptions={"wide_stores": _PARTS["decode_attention_kernel:wide_stores"]},
    ),
    _trial(
        "attention_prefill",
        "2.4T heads at tp 8, fp8",
        partial(_untouched, rows=500, context=0, heads=8, kv_heads=1, fp8=True),
        _COPY,
        _PREFILL,
        compile_only=True,
        exceptions=_ONCE,
    ),
)
