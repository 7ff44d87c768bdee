"""Vector instructions that are a function of their sources: (kind of the result, kinds of the sources, function).

Kinds: f fp32, h fp16, d fp64, u uint32, i int32, w uint16, s int16, q uint64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from evals.gfx.emulator.formats import (
    F16,
    F32,
    F64,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    Vector,
    fma32,
    from_bf16,
    to_bf16,
    to_f16_towards_zero,
)

Function = Callable[..., Vector]


def _shift(a: Vector) -> Vector:
    return a & U32(31)


def _to_i32(x: Vector) -> Vector:
    clipped = np.clip(np.trunc(x.astype(F64)), -(2**31), 2**31 - 1)
    return np.where(np.isnan(x), 0, clipped).astype(I64).astype(I32)


def _to_u32(x: Vector) -> Vector:
    return np.where(np.isnan(x), 0, np.clip(np.trunc(x.astype(F64)), 0, 2**32 - 1)).astype(U64).astype(U32)


def _bfe_u32(a: Vector, b: Vector, c: Vector) -> Vector:
    return (a >> _shift(b)) & ((U32(1) << _shift(c)) - U32(1))


def _bfe_i32(a: Vector, b: Vector, c: Vector) -> Vector:
    width = (c & 31).astype(I64)
    cut = (a.view(U32).astype(I64) >> (b & 31).astype(I64)) & ((1 << width) - 1)
    negative = (cut >> np.maximum(width - 1, 0)) & 1
    return np.where(width > 0, np.where(negative, cut - (1 << width), cut), 0).astype(I32)


def _perm(a: Vector, b: Vector, c: Vector) -> Vector:
    source = np.concatenate([b[:, None].view(U8), a[:, None].view(U8)], 1)  # bytes 0 to 3 are the second source's
    chosen = np.ascontiguousarray(c)[:, None].view(U8)
    result = np.take_along_axis(source, (chosen & 7).astype(int), 1)
    signs = np.stack([(source[:, k] >> 7) * 255 for k in (1, 3, 5, 7)], 1)
    result = np.where(
        (chosen >= 8) & (chosen < 12), np.take_along_axis(signs, ((chosen - 8) & 3).astype(int), 1), result
    )
    result = np.where(chosen == 12, 0, np.where(chosen > 12, 255, result)).astype(U8)
    return np.ascontiguousarray(result).view(U32).reshape(-1)


def _align(a: Vector, b: Vector, bits: Vector) -> Vector:
    return (((a.astype(U64) << U64(32)) | b) >> bits.astype(U64)).astype(U32)


def _reverse(x: Vector) -> Vector:
    return np.array([int(f"{int(q):032b}"[::-1], 2) for q in x], U32)


def _ones(x: Vector) -> Vector:
    return np.array([int(q).bit_count() for q in x], U32)


def _leading(x: Vector) -> Vector:
    return np.array([32 - int(q).bit_length() if q else 0xFFFFFFFF for q in x], U32)


def _trailing(x: Vector) -> Vector:
    return np.array([(int(q) & -int(q)).bit_length() - 1 if q else 0xFFFFFFFF for q in x], U32)


def _multiply_high_u32(a: Vector, b: Vector) -> Vector:
    return ((a.astype(U64) * b.astype(U64)) >> U64(32)).astype(U32)


def _multiply_high_i32(a: Vector, b: Vector) -> Vector:
    return ((a.astype(I64) * b.astype(I64)) >> 32).astype(I32)


def _u24(a: Vector, b: Vector) -> Vector:
    return (a & U32(0xFFFFFF)) * (b & U32(0xFFFFFF))


def _i24(a: Vector, b: Vector) -> Vector:
    return ((a << 8) >> 8) * ((b << 8) >> 8)


def _middle(a: Vector, b: Vector, c: Vector) -> Vector:
    return np.asarray(np.sort(np.stack([a, b, c]), 0)[1])


def _half_bits(x: Vector) -> Vector:
    return x.astype(F16).view(U16).astype(U32)


def _in_f64(function: Function) -> Function:
    def rounded(a: Vector) -> Vector:
        wide: Vector = function(a.astype(F64))
        return wide.astype(F32)

    return rounded


def _byte(k: int) -> Function:
    return lambda a: ((a >> U32(8 * k)) & U32(255)).astype(F32)


TABLE: dict[str, tuple[str, str, Function]] = {
    "mov_b32": ("u", "u", lambda a: a),
    "not_b32": ("u", "u", lambda a: ~a),
    "bfrev_b32": ("u", "u", _reverse),
    "accvgpr_write_b32": ("u", "u", lambda a: a),
    "accvgpr_read_b32": ("u", "u", lambda a: a),
    "accvgpr_mov_b32": ("u", "u", lambda a: a),
    # fp32
    "add_f32": ("f", "ff", lambda a, b: a + b),
    "sub_f32": ("f", "ff", lambda a, b: a - b),
    "subrev_f32": ("f", "ff", lambda a, b: b - a),
    "mul_f32": ("f", "ff", lambda a, b: a * b),
    "mul_legacy_f32": ("f", "ff", lambda a, b: np.where((a == 0) | (b == 0), F32(0), a * b)),
    "max_f32": ("f", "ff", np.fmax),
    "min_f32": ("f", "ff", np.fmin),
    "max3_f32": ("f", "fff", lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "min3_f32": ("f", "fff", lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    "maximum3_f32": ("f", "fff", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "minimum3_f32": ("f", "fff", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "med3_f32": ("f", "fff", _middle),
    "fma_f32": ("f", "fff", fma32),
    "fmaak_f32": ("f", "fff", fma32),
    "fmamk_f32": ("f", "fff", fma32),
    "mad_f32": ("f", "fff", lambda a, b, c: a * b + c),
    "rcp_f32": ("f", "f", _in_f64(lambda a: 1 / a)),
    "rcp_iflag_f32": ("f", "f", _in_f64(lambda a: 1 / a)),
    "rsq_f32": ("f", "f", _in_f64(lambda a: 1 / np.sqrt(a))),
    "sqrt_f32": ("f", "f", np.sqrt),
    "exp_f32": ("f", "f", _in_f64(np.exp2)),
    "log_f32": ("f", "f", _in_f64(np.log2)),
    "sin_f32": ("f", "f", _in_f64(lambda a: np.sin(a * 2 * np.pi))),
    "cos_f32": ("f", "f", _in_f64(lambda a: np.cos(a * 2 * np.pi))),
    "rndne_f32": ("f", "f", np.rint),
    "floor_f32": ("f", "f", np.floor),
    "ceil_f32": ("f", "f", np.ceil),
    "trunc_f32": ("f", "f", np.trunc),
    "fract_f32": ("f", "f", lambda a: a - np.floor(a)),
    "frexp_mant_f32": ("f", "f", lambda a: np.frexp(a)[0]),
    "frexp_exp_i32_f32": ("i", "f", lambda a: np.frexp(a)[1].astype(I32)),
    "ldexp_f32": ("f", "fi", lambda a, b: np.ldexp(a.astype(F64), np.clip(b, -400, 400)).astype(F32)),
    # conversions
    "cvt_f32_i32": ("f", "i", lambda a: a.astype(F32)),
    "cvt_f32_u32": ("f", "u", lambda a: a.astype(F32)),
    "cvt_i32_f32": ("i", "f", _to_i32),
    "cvt_u32_f32": ("u", "f", _to_u32),
    "cvt_flr_i32_f32": ("i", "f", lambda a: _to_i32(np.floor(a))),
    "cvt_f32_ubyte0": ("f", "u", _byte(0)),
    "cvt_f32_ubyte1": ("f", "u", _byte(1)),
    "cvt_f32_ubyte2": ("f", "u", _byte(2)),
    "cvt_f32_ubyte3": ("f", "u", _byte(3)),
    "cvt_f32_f16": ("f", "h", lambda a: a.astype(F32)),
    "cvt_f16_f32": ("h", "f", lambda a: a.astype(F16)),
    "cvt_f32_bf16": ("f", "u", from_bf16),
    "cvt_pk_bf16_f32": ("u", "ff", lambda a, b: to_bf16(a) | (to_bf16(b) << U32(16))),
    "cvt_pk_f16_f32": ("u", "ff", lambda a, b: _half_bits(a) | (_half_bits(b) << U32(16))),
    "cvt_pkrtz_f16_f32": ("u", "ff", lambda a, b: to_f16_towards_zero(a) | (to_f16_towards_zero(b) << U32(16))),
    "pack_b32_f16": ("u", "uu", lambda a, b: (a & U32(0xFFFF)) | (b << U32(16))),
    # bits
    "and_b32": ("u", "uu", lambda a, b: a & b),
    "or_b32": ("u", "uu", lambda a, b: a | b),
    "xor_b32": ("u", "uu", lambda a, b: a ^ b),
    "xnor_b32": ("u", "uu", lambda a, b: ~(a ^ b)),
    "and_or_b32": ("u", "uuu", lambda a, b, c: (a & b) | c),
    "or3_b32": ("u", "uuu", lambda a, b, c: a | b | c),
    "bfi_b32": ("u", "uuu", lambda a, b, c: (a & b) | (~a & c)),
    "lshlrev_b32": ("u", "uu", lambda a, b: b << _shift(a)),
    "lshrrev_b32": ("u", "uu", lambda a, b: b >> _shift(a)),
    "ashrrev_i32": ("i", "ui", lambda a, b: b >> _shift(a).view(I32)),
    "lshl_or_b32": ("u", "uuu", lambda a, b, c: (a << _shift(b)) | c),
    "lshl_add_u32": ("u", "uuu", lambda a, b, c: (a << _shift(b)) + c),
    "add_lshl_u32": ("u", "uuu", lambda a, b, c: (a + b) << _shift(c)),
    "xad_u32": ("u", "uuu", lambda a, b, c: (a ^ b) + c),
    "bfe_u32": ("u", "uuu", _bfe_u32),
    "bfe_i32": ("i", "iuu", _bfe_i32),
    "bfm_b32": ("u", "uu", lambda a, b: ((U32(1) << _shift(a)) - U32(1)) << _shift(b)),
    "perm_b32": ("u", "uuu", _perm),
    "alignbit_b32": ("u", "uuu", lambda a, b, c: _align(a, b, c & U32(31))),
    "alignbyte_b32": ("u", "uuu", lambda a, b, c: _align(a, b, U32(8) * (c & U32(3)))),
    "bcnt_u32_b32": ("u", "uu", lambda a, b: _ones(a) + b),
    "ffbh_u32": ("u", "u", _leading),
    "ffbl_b32": ("u", "u", _trailing),
    # integers
    "add_u32": ("u", "uu", lambda a, b: a + b),
    "sub_u32": ("u", "uu", lambda a, b: a - b),
    "subrev_u32": ("u", "uu", lambda a, b: b - a),
    "add3_u32": ("u", "uuu", lambda a, b, c: a + b + c),
    "add_i32": ("u", "uu", lambda a, b: a + b),
    "sub_i32": ("u", "uu", lambda a, b: a - b),
    "mul_lo_u32": ("u", "uu", lambda a, b: a * b),
    "mul_hi_u32": ("u", "uu", _multiply_high_u32),
    "mul_hi_i32": ("i", "ii", _multiply_high_i32),
    "mul_u32_u24": ("u", "uu", _u24),
    "mad_u32_u24": ("u", "uuu", lambda a, b, c: _u24(a, b) + c),
    "mul_i32_i24": ("i", "ii", _i24),
    "mad_i32_i24": ("i", "iii", lambda a, b, c: _i24(a, b) + c),
    "max_u32": ("u", "uu", np.maximum),
    "min_u32": ("u", "uu", np.minimum),
    "max_i32": ("i", "ii", np.maximum),
    "min_i32": ("i", "ii", np.minimum),
    "max3_u32": ("u", "uuu", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "max3_i32": ("i", "iii", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "min3_u32": ("u", "uuu", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "min3_i32": ("i", "iii", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "med3_i32": ("i", "iii", _middle),
    "med3_u32": ("u", "uuu", _middle),
    "sad_u32": ("u", "uuu", lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c),
    # 16 bits: the upper half of the result is zero
    "add_u16": ("w", "ww", lambda a, b: a + b),
    "sub_u16": ("w", "ww", lambda a, b: a - b),
    "mul_lo_u16": ("w", "ww", lambda a, b: a * b),
    "mad_u16": ("w", "www", lambda a, b, c: a * b + c),
    "max_u16": ("w", "ww", np.maximum),
    "min_u16": ("w", "ww", np.minimum),
    "max_i16": ("s", "ss", np.maximum),
    "min_i16": ("s", "ss", np.minimum),
    "lshlrev_b16": ("w", "ww", lambda a, b: b << (a & U16(15))),
    "lshrrev_b16": ("w", "ww", lambda a, b: b >> (a & U16(15))),
    "ashrrev_i16": ("s", "ws", lambda a, b: b >> (a & U16(15)).view(I16)),
    "add_f16": ("h", "hh", lambda a, b: a + b),
    "sub_f16": ("h", "hh", lambda a, b: a - b),
    "mul_f16": ("h", "hh", lambda a, b: a * b),
    "max_f16": ("h", "hh", np.fmax),
    "min_f16": ("h", "hh", np.fmin),
    # 64 bits
    "mov_b64": ("q", "q", lambda a: a),
    "lshl_add_u64": ("q", "quq", lambda a, b, c: (a << (b & U32(7)).astype(U64)) + c),
    "lshlrev_b64": ("q", "uq", lambda a, b: b << (a & U32(63)).astype(U64)),
    "lshrrev_b64": ("q", "uq", lambda a, b: b >> (a & U32(63)).astype(U64)),
    "ashrrev_i64": ("q", "uq", lambda a, b: (b.view(I64) >> (a & U32(63)).astype(I64)).view(U64)),
    "add_f64": ("d", "dd", lambda a, b: a + b),
    "mul_f64": ("d", "dd", lambda a, b: a * b),
    "max_f64": ("d", "dd", np.fmax),
    "min_f64": ("d", "dd", np.fmin),
    "fma_f64": ("d", "ddd", lambda a, b, c: a * b + c),  # rounded twice: as near as numpy comes
    "rcp_f64": ("d", "d", lambda a: 1 / a),
    "rsq_f64": ("d", "d", lambda a: 1 / np.sqrt(a)),
    "ldexp_f64": ("d", "di", np.ldexp),
    "rndne_f64": ("d", "d", np.rint),
    "cvt_f32_f64": ("f", "d", lambda a: a.astype(F32)),
    "cvt_f64_f32": ("d", "f", lambda a: a.astype(F64)),
    "cvt_f64_i32": ("d", "i", lambda a: a.astype(F64)),
    "cvt_f64_u32": ("d", "u", lambda a: a.astype(F64)),
    "cvt_i32_f64": ("i", "d", _to_i32),
    "cvt_u32_f64": ("u", "d", _to_u32),
}
