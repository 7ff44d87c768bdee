"""What the Triton providers share: tiles of rows, quantisation of rows, and the product of two tiles along K.

Letters: T rows, K inner, N outer; in kernels, M rows of a tile. Kernels take row counts as ordinary arguments that are
not specialised on, so a new batch size compiles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl

from rocm_serve.ops.fp8 import AMAX_FLOOR, BLOCK, fp8_max
from rocm_serve.ops.tiles_linear import has_following
from rocm_serve.ops.tiles_rows import quantise_rows_tile

_BLOCK = tl.constexpr(BLOCK)
_AMAX_FLOOR = tl.constexpr(AMAX_FLOOR)


def arch() -> str:
    """Name the GPU that kernels are compiled for, as the probe does: "gfx942", "sm_90"; "interpreter" without one."""
    if not isinstance(quantise_rows_kernel, triton.runtime.JITFunction):
        return "interpreter"
    target = triton.runtime.driver.active.get_current_target()
    return str(target.arch) if target.backend == "hip" else f"sm_{target.arch}"


def following() -> Mapping[str, bool]:
    """Return arguments of a launch whose kernel calls `begin`: it may be put on the device while the one before ends.

    NVIDIA's programmatic dependent launch, from sm_90 on. Other backends do not know the option.
    """
    interpreted = not isinstance(quantise_rows_kernel, triton.runtime.JITFunction)
    return _ALONE if interpreted else _following(triton.runtime.driver.active)


_ALONE: Mapping[str, bool] = {"PDL": False}


@cache
def _following(driver: object) -> Mapping[str, bool]:
    """Ask a driver once: every launch wants to know."""
    return {"PDL": True, "launch_pdl": True} if has_following(arch()) else _ALONE


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as [rows, width] whose rows are contiguous: a view where its strides allow that, else a copy."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.shape[1] == 1 or flat.stride(1) == 1 else flat.contiguous()


def blocks(size: int, block: int) -> int:
    """Return how many blocks cover `size`. triton.cdiv, a function of kernels too, takes 20 times as long."""
    return -(-size // block)


@triton.jit
def tile_of(row_starts, b, tile, SEQUENCES: tl.constexpr, UNIT: tl.constexpr):
    """Return the sequence that a tile of UNIT rows belongs to, and its first row there.

    SEQUENCES = 0: the grid knows, `tile` is one of sequence b. Else `tile` is a place: tile c of sequence b has the
    place (row_starts[b] - row_starts[0]) // UNIT + b + c. No two share one, and nobody has to count them; what a place
    returns that no tile has is behind the rows of a sequence.
    """
    if SEQUENCES:
        first_row = tl.load(row_starts)
        begun = 0
        for some in range(0, SEQUENCES, 64):
            i = some + tl.arange(0, 64)
            at = (tl.load(row_starts + i, mask=i < SEQUENCES, other=0) - first_row) // UNIT + i
            begun += tl.sum(((i < SEQUENCES) & (at <= tile)).to(tl.int32), 0)
        b = begun - 1
        tile -= (tl.load(row_starts + b) - first_row) // UNIT + b
    return b, tile * UNIT


def places(rows: int, sequences: int, unit: int) -> int:
    """Return how many places `tile_of` knows at most, of so many sequences that have so many rows together."""
    return rows // unit + sequences


class Counters:
    """Zeros on each device in which the programs of a kernel count one another; a kernel leaves zeros behind.

    One launch at a time uses those of an object. They are made before a graph is captured: every captured size runs
    once before. Where a call needs more than there are, the old ones stay: graphs hold their address.
    """

    def __init__(self, first: int = 1 << 14) -> None:
        self._first = first
        self._made: dict[torch.device, list[torch.Tensor]] = {}

    def of(self, count: int, device: torch.device) -> torch.Tensor:
        """Return int32 zeros, at least so many."""
        made = self.made(device)
        if not made or len(made[-1]) < count:
            made.append(torch.zeros(max(count, self._first), dtype=torch.int32, device=device))
        return made[-1]

    def made(self, device: torch.device) -> list[torch.Tensor]:
        """Return all that there are, the largest last."""
        return self._made.setdefault(device, [])


@cache
def whole_row_tile(width: int) -> dict[str, int]:
    """Choose a tile that holds whole rows: short rows share a program. 8 to 32 elements a lane."""
    block = 1 << max(width - 1, 0).bit_length()
    rows = max(1, 1024 // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(8, max(1, rows * block // 512))}


def part_row_tile(width: int) -> dict[str, int]:
    """Choose a tile for elementwise work, where a row may be cut."""
    return whole_row_tile(min(width, 2048))


def dot_dtype(rows: torch.Tensor, weight: torch.Tensor, arch: str, *, quantised: bool) -> tl.dtype:
    """Choose what two factors are multiplied as; every choice holds both factors exactly.

    float32 rows ask for float32 sums. bf16 holds every e4m3 value, so an FP8 weight loses nothing beside bf16 rows.
    FP8 matrix instructions are used on gfx, taken to sum in float32. sm_90's keep 12 to 13 bits of a sum
    (docs/numerics.md), so bf16 is used there, but where an op has tiles for FP8 (fp8_linear, moe_experts);
    evals/fp8_on_gpu.py measures what that is worth.
    """
    if rows.dtype == torch.float32:
        return tl.float32
    if not quantised or not arch.startswith("gfx"):
        return tl.bfloat16
    return {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e4m3fnuz: tl.float8e4b8}[weight.dtype]


def quantise_rows(x_TK: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row per 128 columns, bit for bit as ops.fp8.quantise_rows does.

    Shapes: x_TK -> FP8 values [T, K] and fp32 multipliers [T, ceil(K / 128)].
    """
    rows, k = x_TK.shape
    x = rows_of(x_TK)
    q_TK = torch.empty(rows, k, dtype=dtype, device=x.device)
    s_TB = torch.empty(rows, blocks(k, BLOCK), dtype=torch.float32, device=x.device)
    if x.numel():
        tile = quantise_rows_tile(rows)
        quantise_rows_kernel[(blocks(s_TB.numel(), tile["BLOCKS"]),)](
            x,
            q_TK,
            s_TB,
            x.stride(0),
            rows,
            WIDTH=k,
            TOP=fp8_max(dtype),
            **tile,
            **following(),
        )
    return q_TK, s_TB


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """Allow the kernel after this one onto the device, as soon as every program of this one has come here.

    Small programs that follow are best let in at once: what they read of a weight is on its way early. Large ones,
    which fill the device once, are let in at the end: where they find room before, they do not spread evenly.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until all kernels before have ended and their results can be read.

    Every program of a kernel that is launched with PDL must come here before it writes, ends, or reads what this step
    has made: the kernel after it waits for this one alone. Several kernels may be on the device at once, so what is
    read earlier can only be parameters, and what was there before the step began; or, where the kernel before is known
    to let the next begin after its own wait, what was made before that one.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin(PDL: tl.constexpr):
    """Do both: for a kernel that has nothing to do before."""
    let_next_begin(PDL)
    wait_for_previous(PDL)


@triton.jit
def begin_in_turn(PDL: tl.constexpr):
    """Do both in the other order: the kernel after this one comes when those before have ended."""
    wait_for_previous(PDL)
    let_next_begin(PDL)


@triton.jit
def _quotients(x, scale):
    """Return the correctly rounded x / scale of every row, but for quotients that FP8 rounds to zero.

    Of the rounded inverse and its product with x, which may be two units off, one step with the exact remainder makes
    a quotient that is less than one unit off, and a second the rounded one (Markstein). Small quotients have
    remainders that are not exact. An infinite scale has no inverse: zeros then, and NaN for what is infinite itself.
    """
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    by = tl.broadcast_to(tl.where(scale == float("inf"), 0.0, -scale)[:, None], x.shape)
    inverse = tl.broadcast_to(inverse[:, None], x.shape)
    scaled = x * inverse
    scaled = tl.fma(tl.fma(scaled, by, x), inverse, scaled)
    return tl.fma(tl.fma(scaled, by, x), inverse, scaled)


@triton.jit
def quantise_tile(x, TOP: tl.constexpr, dtype: tl.constexpr, INVERSE: tl.constexpr = 0):
    """Quantise a float32 tile whose rows are one block of 128 columns each; return values and multipliers.

    The divisions are IEEE's, so that the codes are those of the reference. Magnitudes are compared as integers: a NaN
    is the largest then, and makes the multiplier one. INVERSE: one division a block, see `_quotients`.
    """
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(magnitude, 1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.where(largest < _AMAX_FLOOR, _AMAX_FLOOR, largest), TOP)
    if INVERSE:  # no quotient is larger than TOP by more than its last bit: FP8 rounds that away
        clamped = _quotients(x, scale)
    else:
        scaled = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        clamped = tl.where(scaled > TOP, TOP, tl.where(scaled < -TOP, -TOP, scaled))
    return clamped.to(dtype), scale


@triton.jit(do_not_specialize=["num_rows"])
def quantise_rows_kernel(
    x_ptr,
    q_ptr,
    s_ptr,
    x_stride,
    num_rows,
    WIDTH: tl.constexpr,
    TOP: tl.constexpr,
    BLOCKS: tl.constexpr,
    INVERSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some blocks of 128 columns, in the order in which they lie in memory."""
    begin_in_turn(PDL)
    EACH: tl.constexpr = (WIDTH + _BLOCK - 1) // _BLOCK
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row = block // EACH
    column = (block % EACH * _BLOCK)[:, None] + tl.arange(0, _BLOCK)[None, :]
    wide = row.to(tl.int64)[:, None]
    live = (row < num_rows)[:, None] & (column < WIDTH)
    x = tl.load(x_ptr + wide * x_stride + column, mask=live, other=0.0).to(tl.float32)
    q, scale = quantise_tile(x, TOP, q_ptr.dtype.element_ty, INVERSE)
    tl.store(q_ptr + wide * WIDTH + column, q, mask=live)
    tl.store(s_ptr + block, scale, mask=row < num_rows)


@triton.jit
def product(
    x_rows,
    x_live,
    x_scales,
    w_rows,
    w_live,
    w_scales,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DOT: tl.constexpr,
):
    """Multiply BM rows with BN rows of a weight along K: float32 [BM, BN].

    `x_rows` and `w_rows` point to where each row begins, `x_scales` and `w_scales` (or None) to its multipliers, one
    for 128 columns. Rows that do not live are taken as zeros. Products within 128 columns are rescaled before they are
    added.
    """
    column = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        at = k + column
        if K % BK == 0:
            x = tl.load(x_rows[:, None] + at[None, :], mask=x_live[:, None], other=0.0)
            w = tl.load(w_rows[None, :] + at[:, None], mask=w_live[None, :], other=0.0)
        else:
            x = tl.load(x_rows[:, None] + at[None, :], mask=x_live[:, None] & (at < K)[None, :], other=0.0)
            w = tl.load(w_rows[None, :] + at[:, None], mask=w_live[None, :] & (at < K)[:, None], other=0.0)
        if w_scales is None:
            total = tl.dot(x.to(DOT), w.to(DOT), total, input_precision="ieee")
        else:
            part = tl.dot(x.to(DOT), w.to(DOT), input_precision="ieee")
            part *= tl.load(w_scales + k // _BLOCK, mask=w_live, other=0.0)[None, :]
            if x_scales is not None:
                part *= tl.load(x_scales + k // _BLOCK, mask=x_live, other=0.0)[:, None]
            total += part
    return total
