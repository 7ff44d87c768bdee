"""Number formats that numpy lacks, as tables and bit patterns."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[Any]
U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I8, I16, I32, I64 = np.int8, np.int16, np.int32, np.int64
F16, F32, F64 = np.float16, np.float32, np.float64

Fp8 = Literal["fp8", "bf8"]
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F32)
_BITS = {"fp8": (4, 3), "bf8": (5, 2)}  # exponent, mantissa


def _value(code: int, kind: Fp8, fnuz: bool) -> float:
    exponent_bits, mantissa_bits = _BITS[kind]
    bias = (1 << (exponent_bits - 1)) - (0 if fnuz else 1)
    exponent, mantissa = (code >> mantissa_bits) & ((1 << exponent_bits) - 1), code & ((1 << mantissa_bits) - 1)
    if fnuz and code == 0x80:
        return float("nan")
    if not fnuz and kind == "fp8" and code & 0x7F == 0x7F:
        return float("nan")
    if not fnuz and kind == "bf8" and exponent == 31:
        return float("nan") if mantissa else float("-inf" if code & 0x80 else "inf")
    fraction = mantissa / (1 << mantissa_bits)
    size = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
    return -size if code & 0x80 else size


@cache
def fp8_values(kind: Fp8, fnuz: bool) -> Vector:
    """Return the fp32 value of each of the 256 codes."""
    return np.array([_value(code, kind, fnuz) for code in range(256)], F32)


@cache
def _finite_codes(kind: Fp8, fnuz: bool) -> tuple[Vector, Vector]:
    values = fp8_values(kind, fnuz)
    codes = [code for code in range(128) if np.isfinite(values[code])]
    return values[codes].astype(F64), np.array(codes, U32)


def to_fp8(x: Vector, kind: Fp8, fnuz: bool) -> Vector:
    """Round fp32 to the nearest code, ties to even, finite values clamped, as v_cvt_pk_fp8_f32 does."""
    values, codes = _finite_codes(kind, fnuz)
    size = np.abs(x.astype(F64))
    high = np.clip(np.searchsorted(values, size), 0, len(values) - 1)
    low = np.maximum(high - 1, 0)
    below, above = size - values[low], values[high] - size
    tie = np.where(codes[low] & 1, high, low)
    nearest = np.where(below < above, low, np.where(above < below, high, tie))
    nearest = np.where(size >= values[-1], len(values) - 1, nearest)
    result = codes[nearest] | (np.signbit(x).astype(U32) << U32(7))
    if fnuz:  # it has no minus zero
        result = np.where((result & 0x7F) == 0, U32(0), result)
    return np.where(np.isnan(x), U32(0x80 if fnuz else 0x7F), result).astype(U32)


def to_bf16(x: Vector) -> Vector:
    """Round fp32 to the nearest bf16, ties to even; return the 16 bits in uint32."""
    bits = x.view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(x), (bits >> U32(16)) | U32(0x40), rounded).astype(U32)


def from_bf16(bits: Vector) -> Vector:
    """Widen the low 16 bits of uint32 to fp32."""
    return (bits << U32(16)).astype(U32).view(F32)


def to_f16_towards_zero(x: Vector) -> Vector:
    """Round fp32 to fp16 towards zero; return the 16 bits in uint32."""
    half = x.astype(F16)
    too_far = (np.abs(half.astype(F32)) > np.abs(x)) & np.isfinite(x)
    return (half.view(U16) - too_far.astype(U16)).astype(U32)


def fma32(a: Vector, b: Vector, c: Vector) -> Vector:
    """Return a * b + c in fp32. The product is exact in float64; the sum is rounded there, then to fp32."""
    return (a.astype(F64) * b.astype(F64) + c.astype(F64)).astype(F32)


def low_half(bits: Vector) -> Vector:
    """Return the low 16 bits as uint16."""
    return (bits & U32(0xFFFF)).astype(U16)


def signed(value: int, bits: int) -> int:
    """Read an unsigned number of `bits` as two's complement."""
    return value - (1 << bits) if (value >> (bits - 1)) & 1 else value
