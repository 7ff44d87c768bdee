"""The draw of a token and the log-sum-exp of one vocabulary shard, in Triton. Letters: R rows, V ids, P parts of a row.

One program reads one part of one row; another kernel merges the parts of a row. The draw compiles without fused
multiply-adds and takes its logarithms from sums, products and IEEE divisions alone, so its noise has the same bits on
every GPU: some 2 units in the last place from the reference's, whose logarithms are the C library's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.sampling import rng
from rocm_serve.ops.triton_common.triton import rows_of

_GAMMA, _MIX_1, _MIX_2 = tl.constexpr(rng.GAMMA), tl.constexpr(rng.MIX_1), tl.constexpr(rng.MIX_2)
_UNIT, _BELOW_ONE = tl.constexpr(2.0**-53), tl.constexpr(1.0 - 2.0**-24)
_LN_2 = tl.constexpr(0.6931471805599453)
_ROOT_HALF = tl.constexpr(0x3F3504F3)  # the bits of sqrt(1/2)
_ONE_LESS_ROOT_HALF = tl.constexpr(0.2929)
_EXPONENT = tl.constexpr(0x7F800000)  # all ones: NaN or infinity
_PART = 2048


def draw_token(
    logits_RV: torch.Tensor,
    keys_R: torch.Tensor | None = None,
    temperature_R: torch.Tensor | None = None,
    *,
    first_id: int,
    used: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Say of each row of this shard whether its logits are finite, its best score, and which id has that.

    Shapes: logits float32 [R, V], keys int64 [R], temperature float32 [R] -> bool [R], float32 [R], int64 [R].
    Greedy rows are those of the reference to the bit; noise as said above.
    """
    assert logits_RV.dtype == torch.float32, f"logits are float32, not {logits_RV.dtype}"
    logits = rows_of(logits_RV)
    (rows, width), device = logits.shape, logits.device
    finite_R = torch.empty(rows, dtype=torch.bool, device=device)
    score_R = torch.empty(rows, dtype=torch.float32, device=device)
    id_R = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return finite_R, score_R, id_R
    tile, parts = _parts(width)
    best_RP = torch.empty(rows, parts, dtype=torch.float32, device=device)
    at_RP = torch.empty(rows, parts, dtype=torch.int32, device=device)
    odd_RP = torch.empty(rows, parts, dtype=torch.int32, device=device)
    draw_part_kernel[(rows, parts)](
        *(logits, keys_R, temperature_R, best_RP, at_RP, odd_RP, logits.stride(0), first_id, used),
        WIDTH=width,
        **tile,
        enable_fp_fusion=False,
    )
    draw_merge_kernel[(rows,)](
        *(best_RP, at_RP, odd_RP, finite_R, score_R, id_R, parts),
        BLOCK=triton.next_power_of_2(parts),
        num_warps=1,
    )
    return finite_R, score_R, id_R


def log_sum_exp(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's maximum and the sum of exp(logit - maximum). Shapes: float32 [R, V] -> float32 [R] twice."""
    assert logits_RV.dtype == torch.float32, f"logits are float32, not {logits_RV.dtype}"
    logits = rows_of(logits_RV)
    rows, width = logits.shape
    max_R, sum_R = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if not rows:
        return max_R, sum_R
    tile, parts = _parts(width)
    max_RP, sum_RP = (torch.empty(rows, parts, dtype=torch.float32, device=logits.device) for _ in range(2))
    sum_part_kernel[(rows, parts)](logits, max_RP, sum_RP, logits.stride(0), WIDTH=width, **tile)
    sum_merge_kernel[(rows,)](*(max_RP, sum_RP, max_R, sum_R, parts), BLOCK=triton.next_power_of_2(parts), num_warps=1)
    return max_R, sum_R


def _parts(width: int) -> tuple[dict[str, int], int]:
    """Choose, by the width alone, how many columns a program reads, and say how many programs a row takes."""
    block = min(_PART, triton.next_power_of_2(width))
    return {"BLOCK": block, "num_warps": max(1, min(4, block // 256))}, triton.cdiv(width, block)


@triton.jit
def log_ratio(s):
    """Return ln((1 + s) / (1 - s)) for |s| up to 0.172: 2 (s + s^3 / 3 + ...), whose sixth term is 2e-9 of it."""
    z = s * s
    return s * (2.0 + z * (2.0 / 3 + z * (2.0 / 5 + z * (2.0 / 7 + z * (2.0 / 9)))))


@triton.jit
def log_of(x):
    """Return ln(x) of positive normal float32: x = m 2^e with m within a factor of sqrt(2) of 1."""
    bits = x.to(tl.int32, bitcast=True)
    e = (bits - _ROOT_HALF) >> 23
    m = (bits - (e << 23)).to(tl.float32, bitcast=True)
    return e.to(tl.float32) * _LN_2 + log_ratio(tl.div_rn(m - 1.0, m + 1.0))


@triton.jit
def gumbel(key, token):
    """Return Gumbel noise of (key, token): the bits of rng.random_bits, then -ln(-ln(1 - u)).

    1 - u is never formed where it would round: -ln(1 - u) = ln((1 + s) / (1 - s)) with s = u / (2 - u).
    """
    z = key.to(tl.uint64, bitcast=True) + (token.to(tl.uint64) + 1) * _GAMMA
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    z = z ^ (z >> 31)
    odd = ((z >> 12) * 2 + 1).to(tl.int64)
    u = tl.minimum(odd.to(tl.float32) * _UNIT, _BELOW_ONE)
    waited = tl.where(u < _ONE_LESS_ROOT_HALF, log_ratio(tl.div_rn(u, 2.0 - u)), -log_of(1.0 - u))
    return -log_of(waited)


@triton.jit(do_not_specialize=["first_id", "used"])
def draw_part_kernel(
    logits_ptr,
    keys_ptr,
    temperature_ptr,
    best_ptr,
    at_ptr,
    odd_ptr,
    row_stride,
    first_id,
    used,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits_ptr + row.to(tl.int64) * row_stride + column, mask=column < WIDTH, other=0.0)
    odd = (score.to(tl.int32, bitcast=True) & _EXPONENT) == _EXPONENT
    if keys_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            score += gumbel(tl.load(keys_ptr + row), first_id + column) * temperature
    score = tl.where((column < used) & (score == score), score, float("-inf"))
    best = tl.max(score, 0)
    place = row * tl.num_programs(1) + part
    tl.store(best_ptr + place, best)
    tl.store(at_ptr + place, tl.min(tl.where(score == best, column, part * BLOCK + BLOCK), 0))
    tl.store(odd_ptr + place, tl.max(odd.to(tl.int32), 0))


@triton.jit(do_not_specialize=["parts"])
def draw_merge_kernel(best_ptr, at_ptr, odd_ptr, finite_ptr, score_ptr, id_ptr, parts, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.arange(0, BLOCK)
    place, real = row * parts + part, part < parts
    score = tl.load(best_ptr + place, mask=real, other=float("-inf"))
    at = tl.load(at_ptr + place, mask=real, other=0x7FFFFFFF)
    odd = tl.load(odd_ptr + place, mask=real, other=0)
    best = tl.max(score, 0)
    tl.store(finite_ptr + row, tl.max(odd, 0) == 0)
    tl.store(score_ptr + row, best)
    tl.store(id_ptr + row, tl.min(tl.where(score == best, at, 0x7FFFFFFF), 0).to(tl.int64))


@triton.jit
def sum_part_kernel(logits_ptr, max_ptr, sum_ptr, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row.to(tl.int64) * row_stride + column, mask=column < WIDTH, other=float("-inf"))
    top = tl.max(x, 0)
    place = row * tl.num_programs(1) + part
    tl.store(max_ptr + place, top)
    tl.store(sum_ptr + place, tl.sum(tl.exp(x - top), 0))


@triton.jit(do_not_specialize=["parts"])
def sum_merge_kernel(max_part_ptr, sum_part_ptr, max_ptr, sum_ptr, parts, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.arange(0, BLOCK)
    place, real = row * parts + part, part < parts
    x = tl.load(max_part_ptr + place, mask=real, other=float("-inf"))
    mass = tl.load(sum_part_ptr + place, mask=real, other=0.0)
    top = tl.max(x, 0)
    tl.store(max_ptr + row, top)
    tl.store(sum_ptr + row, tl.sum(mass * tl.exp(x - top), 0))
