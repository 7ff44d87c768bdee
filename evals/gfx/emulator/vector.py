"""Vector instructions with a meaning of their own: comparisons, carries, packed pairs, FP8, division, lanes."""

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
    U16,
    U32,
    U64,
    Fp8,
    Vector,
    fma32,
    fp8_values,
    low_half,
    to_bf16,
    to_fp8,
)
from evals.gfx.emulator.instruction import Effect, Instruction, means
from evals.gfx.emulator.vector_sources import Sources
from evals.gfx.emulator.vector_table import TABLE
from evals.gfx.emulator.wave import EXEC, LANE, LANES, WORD, Operand, Wave, lanes_of, mask_of

Compare = Callable[[Vector, Vector], Vector]
_COMPARE: dict[str, Compare] = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ne": np.not_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": np.greater_equal,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
    "t": lambda a, b: np.ones(LANES, bool),
}
_COMPARED = {
    **{"f32": "f", "i32": "i", "u32": "u", "u16": "w", "i16": "s", "f16": "h", "u64": "q", "i64": "q", "f64": "d"},
}
_PACKED: dict[str, Callable[..., Vector]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mul_lo": lambda a, b: a * b,
    "lshrrev": lambda a, b: b >> (a & U16(15)),
    "lshlrev": lambda a, b: b << (a & U16(15)),
    "ashrrev": lambda a, b: b >> (a & I16(15)),
    "max": lambda a, b: np.fmax(a, b) if a.dtype == F16 else np.maximum(a, b),
    "min": lambda a, b: np.fmin(a, b) if a.dtype == F16 else np.minimum(a, b),
    "fma": lambda a, b, c: (a.astype(F64) * b + c).astype(F16),
    "mad": lambda a, b, c: a * b + c,
}
_PACKED_16 = (
    *("add_u16", "sub_u16", "sub_i16", "add_i16", "mul_lo_u16", "lshrrev_b16", "lshlrev_b16", "ashrrev_i16", "mad_u16"),
    *("max_u16", "min_u16", "max_i16", "min_i16", "add_f16", "mul_f16", "fma_f16", "max_f16", "min_f16"),
)


@means(*(f"v_{name}" for name in TABLE))
def _from_table(i: Instruction) -> Effect:
    result, kinds, function = TABLE[i.name[2:]]
    if len(i.operands) - 1 < len(kinds):
        raise i.unknown(f"with {len(i.operands) - 1} sources")
    sources = Sources(i)
    reads = [sources.read(k, kind) for k, kind in enumerate(kinds)]

    def effect(w: Wave) -> None:
        sources.write(w, result, function(*[read(w) for read in reads]), sources.writing(w))

    return effect


@means("v_nop")
def _nothing(i: Instruction) -> Effect:
    return lambda w: None


@means(*(f"v_{k}_{c}_{t}" for k in ("cmp", "cmpx") for c in _COMPARE for t in _COMPARED))
def _compare(i: Instruction) -> Effect:
    _, form, comparison, type_ = i.name.split("_")
    kind, function, sources = _COMPARED[type_], _COMPARE[comparison], Sources(i)
    a, b, destination = sources.read(0, kind), sources.read(1, kind), i.operands[0].i

    def effect(w: Wave) -> None:
        p, q = a(w), b(w)
        if type_ == "i64":
            p, q = p.view(I64), q.view(I64)
        mask = mask_of(function(p, q) & w.active())
        w.set_pair(destination, mask)
        if form == "cmpx":
            w.set_pair(EXEC, mask)

    return effect


def _classes(x: Vector) -> list[Vector]:
    """Return the ten classes of a float in the order of the mask's bits."""
    negative, tiny = np.signbit(x), np.finfo(x.dtype).tiny
    zero, inf, nan = x == 0, np.isinf(x), np.isnan(x)
    small = (np.abs(x) < tiny) & ~zero
    normal = ~(zero | inf | nan | small)
    quiet = nan  # a signalling NaN is none of numpy's
    return [
        *(np.zeros(LANES, bool), quiet, inf & negative, normal & negative, small & negative, zero & negative),
        *(zero & ~negative, small & ~negative, normal & ~negative, inf & ~negative),
    ]


@means("v_cmp_class_f32", "v_cmp_class_f64", "v_cmp_class_f16")
def _compare_class(i: Instruction) -> Effect:
    kind = {"f32": "f", "f64": "d", "f16": "h"}[i.name[-3:]]
    sources = Sources(i)
    a, wanted, destination = sources.read(0, kind), sources.read(1, "u"), i.operands[0].i

    def effect(w: Wave) -> None:
        mask = wanted(w)
        found = np.zeros(LANES, bool)
        for bit, lanes in enumerate(_classes(a(w))):
            found |= lanes & ((mask >> U32(bit)) & U32(1)).astype(bool)
        w.set_pair(destination, mask_of(found & w.active()))

    return effect


@means("v_cndmask_b32")
def _select(i: Instruction) -> Effect:
    sources = Sources(i)
    kinds = ["f" if i.operands[k].negative or i.operands[k].absolute else "u" for k in (1, 2)]
    a, b = sources.read(0, kinds[0]), sources.read(1, kinds[1])
    condition = i.operands[3] if len(i.operands) > 3 else Operand("vcc")

    def effect(w: Wave) -> None:
        chosen = np.where(lanes_of(condition.scalar64(w)), b(w).view(U32), a(w).view(U32))
        sources.write(w, "u", chosen, sources.writing(w))

    return effect


@means("v_readfirstlane_b32", "v_readlane_b32", "v_writelane_b32")
def _one_lane(i: Instruction) -> Effect:
    destination, source = i.operands[0].i, i.operands[1]

    def first(w: Wave) -> None:
        w.s[destination] = int(source.vector(w)[int(np.argmax(w.active()))])

    def read(w: Wave) -> None:
        w.s[destination] = int(source.vector(w)[i.operands[2].scalar(w) & 63])

    def write(w: Wave) -> None:
        w.v[destination][i.operands[2].scalar(w) & 63] = source.scalar(w)

    return {"v_readfirstlane_b32": first, "v_readlane_b32": read, "v_writelane_b32": write}[i.name]


@means("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
def _lanes_below(i: Instruction) -> Effect:
    low = "lo" in i.name
    lane = np.clip(LANE if low else LANE - 32, 0, 32)
    below = ((np.uint64(1) << lane.astype(U64)) - U64(1)).astype(U64)
    sources = Sources(i)
    mask, more = sources.read(0, "u"), sources.read(1, "u")

    def effect(w: Wave) -> None:
        counted = np.array([int(q).bit_count() for q in mask(w).astype(U64) & below], U32)
        sources.write(w, "u", counted + more(w), w.active())

    return effect


@means("v_add_co_u32", "v_sub_co_u32", "v_subrev_co_u32", "v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32")
def _carry(i: Instruction) -> Effect:
    a, b = i.operands[2:4]
    carry_in = i.operands[4] if len(i.operands) > 4 else None
    reverse = "rev" in i.name

    def effect(w: Wave) -> None:
        p, q = a.vector(w).astype(I64), b.vector(w).astype(I64)
        p, q = (q, p) if reverse else (p, q)
        carried = lanes_of(carry_in.scalar64(w)).astype(I64) if carry_in else np.zeros(LANES, I64)
        total = p + q + carried if i.name.startswith("v_add") else p - q - carried
        active = w.active()
        carry = mask_of(((total >> 32) != 0) & active)
        w.write(i.operands[0].i, (total & WORD).astype(U32), active)
        w.set_pair(i.operands[1].i, carry)

    return effect


@means("v_mad_u64_u32", "v_mad_i64_i32")
def _multiply_add_64(i: Instruction) -> Effect:
    a, b, c = i.operands[2:5]
    narrow, wide = (U32, U64) if "u64" in i.name else (I32, I64)

    def effect(w: Wave) -> None:
        product = a.vector(w).view(narrow).astype(wide) * b.vector(w).view(narrow).astype(wide)
        w.write64(i.operands[0].i, product.view(U64) + c.vector64(w), w.active())

    return effect


@means("v_fmac_f32", "v_fmac_f64")
def _accumulate(i: Instruction) -> Effect:
    kind = "f" if i.name.endswith("f32") else "d"
    sources, destination = Sources(i), Operand(i.operands[0].text)
    a, b = sources.read(0, kind), sources.read(1, kind)

    def effect(w: Wave) -> None:
        if kind == "f":
            total = fma32(a(w), b(w), destination.vector(w).view(F32))
        else:
            total = a(w) * b(w) + destination.vector64(w).view(F64)
        sources.write(w, kind, total, sources.writing(w))

    return effect


@means("v_pk_mul_f32", "v_pk_add_f32", "v_pk_fma_f32", "v_pk_mov_b32")
def _packed_words(i: Instruction) -> Effect:
    count = len(i.operands) - 1
    low, high = i.numbers("op_sel", 0, count), i.numbers("op_sel_hi", 1, count)
    signs = i.numbers("neg_lo", 0, count), i.numbers("neg_hi", 0, count)
    functions: dict[str, Callable[..., Vector]] = {"mul": lambda a, b: a * b, "add": lambda a, b: a + b, "fma": fma32}

    def pick(w: Wave, k: int, word: int, negative: int) -> Vector:
        operand = i.operands[k + 1]
        pair = operand.kind == "v" or (operand.kind == "s" and operand.count > 1)
        x = operand.vector(w, word if pair else 0).view(F32)
        return -x if negative else x

    def effect(w: Wave) -> None:
        if i.name == "v_pk_mov_b32":
            first, second = pick(w, 0, low[0], 0).copy(), pick(w, 1, low[1], 0).copy()
        else:
            function = functions[i.name[5:8]]
            first = function(*[pick(w, k, low[k], signs[0][k]) for k in range(count)])
            second = function(*[pick(w, k, high[k], signs[1][k]) for k in range(count)])
        w.write(i.operands[0].i, first, w.active())
        w.write(i.operands[0].i + 1, second, w.active())

    return effect


@means(*(f"v_pk_{name}" for name in _PACKED_16))
def _packed_halves(i: Instruction) -> Effect:
    operation, type_ = i.name[5:].rsplit("_", 1)
    dtype = F16 if type_ == "f16" else I16 if type_ == "i16" else U16
    count = len(i.operands) - 1
    halves = i.numbers("op_sel", 0, count), i.numbers("op_sel_hi", 1, count)
    signs = i.numbers("neg_lo", 0, count), i.numbers("neg_hi", 0, count)

    def half(w: Wave, k: int, upper: int, negative: int) -> Vector:
        operand = i.operands[k + 1]
        if operand.kind == "constant" and operand.float_ is not None:
            bits = np.full(LANES, np.array(operand.float_, F16).view(U16), U32)
        elif operand.kind == "constant":
            bits = np.full(LANES, operand.value & (WORD if abs(operand.value) > 64 else 0xFFFF), U32)
        else:
            bits = operand.vector(w)
        x = low_half(bits >> U32(16) if upper else bits).view(dtype)
        return -x if negative else x

    def effect(w: Wave) -> None:
        low, high = (
            _PACKED[operation](*[half(w, k, halves[n][k], signs[n][k]) for k in range(count)]).view(U16).astype(U32)
            for n in (0, 1)
        )
        w.write(i.operands[0].i, low | (high << U32(16)), w.active())

    return effect


@means("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16")
def _mixed(i: Instruction) -> Effect:
    """Multiply and add fp32 numbers and halves, which op_sel_hi names; the result in fp32, or as one half of a word."""
    sources = Sources(i)
    half, upper = i.numbers("op_sel_hi", 0, 3), i.numbers("op_sel", 0, 3)
    wide = [sources.read(k, "f") for k in range(3)]

    def narrow(w: Wave, k: int) -> Vector:
        operand = i.operands[k + 1]
        bits = operand.vector(w) >> U32(16) if upper[k] else operand.vector(w)
        x = low_half(bits).view(F16).astype(F32)
        x = np.abs(x) if operand.absolute else x
        return -x if operand.negative else x

    def effect(w: Wave) -> None:
        total = fma32(*[narrow(w, k) if half[k] else wide[k](w) for k in range(3)])
        into = i.operands[0].i
        if i.name == "v_fma_mix_f32":
            w.write(into, total.view(U32), w.active())
            return
        bits, kept = total.astype(F16).view(U16).astype(U32), w.v[into]
        low = i.name == "v_fma_mixlo_f16"
        w.write(into, (kept & U32(0xFFFF0000)) | bits if low else (kept & U32(0xFFFF)) | (bits << U32(16)), w.active())

    return effect


@means("v_permlane32_swap_b32", "v_permlane16_swap_b32")
def _swap_lanes(i: Instruction) -> Effect:
    size = 32 if "32_swap" in i.name else 16
    upper = (LANE // size) % 2 == 1
    a, b = i.operands[0].i, i.operands[1].i

    def effect(w: Wave) -> None:
        p, q = w.v[a].copy(), w.v[b].copy()
        w.v[a][upper], w.v[b][~upper] = q[~upper], p[upper]

    return effect


@means("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32")
def _to_fp8_pair(i: Instruction) -> Effect:
    kind: Fp8 = "fp8" if "fp8" in i.name else "bf8"
    sources, upper = Sources(i), bool(i.numbers("op_sel", 0)[-1])
    a, b, destination = sources.read(0, "f"), sources.read(1, "f"), i.operands[0].i

    def effect(w: Wave) -> None:
        pair = to_fp8(a(w), kind, i.fnuz) | (to_fp8(b(w), kind, i.fnuz) << U32(8))
        old = w.v[destination]
        merged = (old & U32(0xFFFF)) | (pair << U32(16)) if upper else (old & U32(0xFFFF0000)) | pair
        w.write(destination, merged, w.active())

    return effect


@means("v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8", "v_cvt_f32_fp8", "v_cvt_f32_bf8")
def _from_fp8(i: Instruction) -> Effect:
    values = fp8_values("fp8" if i.name.endswith("fp8") else "bf8", i.fnuz)
    sources, upper = Sources(i), bool(i.numbers("op_sel", 0)[0])
    read, destination, pair = sources.read(0, "u"), i.operands[0].i, "_pk_" in i.name

    def effect(w: Wave) -> None:
        bits = read(w) >> U32(16) if upper and pair else read(w)
        low, high = (
            values[(bits >> U32(shift)) & U32(255)] for shift in (0, 8)
        )  # the register may be read and written
        w.write(destination, low, w.active())
        if pair:
            w.write(destination + 1, high, w.active())

    return effect


def _unscaled(i: Instruction) -> None:
    """Conversions of gfx950 divide or multiply by a power of two: only one is known here, and all that is used."""
    scale = i.operands[-1]
    if scale.kind != "constant" or scale.float_ != 1.0:
        raise i.unknown("(a scale other than 1)")


@means("v_cvt_scalef32_pk_fp8_f32", "v_cvt_scalef32_pk_bf8_f32")
def _to_scaled_fp8_pair(i: Instruction) -> Effect:
    _unscaled(i)
    return _to_fp8_pair(i)


@means("v_cvt_scalef32_pk_f32_fp8", "v_cvt_scalef32_pk_f32_bf8")
def _from_scaled_fp8(i: Instruction) -> Effect:
    _unscaled(i)
    return _from_fp8(i)


@means("v_cvt_scalef32_pk_bf16_fp8", "v_cvt_scalef32_pk_bf16_bf8")
def _from_scaled_fp8_to_bf16(i: Instruction) -> Effect:
    _unscaled(i)
    values = fp8_values("fp8" if i.name.endswith("fp8") else "bf8", i.fnuz)
    upper, destination = bool(i.numbers("op_sel", 0)[0]), i.operands[0].i
    read = Sources(i).read(0, "u")

    def effect(w: Wave) -> None:
        bits = read(w) >> U32(16) if upper else read(w)
        low, high = (to_bf16(values[(bits >> U32(shift)) & U32(255)]) for shift in (0, 8))
        w.write(destination, low | (high << U32(16)), w.active())

    return effect


@means("v_div_scale_f32", "v_div_scale_f64")
def _divide_scale(i: Instruction) -> Effect:
    # Nothing is scaled: right where neither operand nor quotient is near the ends of the range.
    kind, sources = ("f" if i.name.endswith("f32") else "d"), Sources(i, first=2)
    a = sources.read(0, kind)

    def effect(w: Wave) -> None:
        sources.write(w, kind, a(w), w.active())
        w.set_pair(i.operands[1].i, 0)

    return effect


@means("v_div_fmas_f32", "v_div_fmas_f64")
def _divide_step(i: Instruction) -> Effect:
    kind, sources = ("f" if i.name.endswith("f32") else "d"), Sources(i)
    a, b, c = (sources.read(k, kind) for k in range(3))
    function = fma32 if kind == "f" else (lambda p, q, r: p * q + r)
    return lambda w: sources.write(w, kind, function(a(w), b(w), c(w)), w.active())


@means("v_div_fixup_f32", "v_div_fixup_f64")
def _divide_end(i: Instruction) -> Effect:
    kind, sources = ("f" if i.name.endswith("f32") else "d"), Sources(i)
    quotient, denominator, numerator = (sources.read(k, kind) for k in range(3))

    def effect(w: Wave) -> None:
        q, d, n = quotient(w), denominator(w), numerator(w)
        exact = (n.astype(F64) / d.astype(F64)).astype(n.dtype)
        usable = np.isfinite(exact) & (exact != 0) & np.isfinite(q)
        sources.write(w, kind, np.where(usable, q, exact), w.active())

    return effect


@means("v_bitop3_b32", "v_bitop3_b16")
def _truth_table(i: Instruction) -> Effect:
    table, kind, sources = i.number("bitop3"), ("u" if i.name.endswith("32") else "w"), Sources(i)
    reads = [sources.read(k, kind) for k in range(3)]

    def effect(w: Wave) -> None:
        a, b, c = (read(w) for read in reads)
        result = np.zeros_like(a)
        for row in range(8):
            if table >> row & 1:
                result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        sources.write(w, kind, result, sources.writing(w))

    return effect
