"""Scalar instructions: integers of 32 and 64 bits, branches, loads of arguments and constants."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

import numpy as np

from evals.gfx.emulator.formats import U32, U64, signed
from evals.gfx.emulator.instruction import Effect, Instruction, Step, jumps, means
from evals.gfx.emulator.wave import ALL, EXEC, M0, VCC, WORD, Wave

Scalar = Callable[[int, int], int]

_BITWISE: dict[str, Scalar] = {
    "and": lambda p, q: p & q,
    "or": lambda p, q: p | q,
    "xor": lambda p, q: p ^ q,
    "andn2": lambda p, q: p & ~q,
    "orn2": lambda p, q: p | ~q,
    "nand": lambda p, q: ~(p & q),
    "nor": lambda p, q: ~(p | q),
    "xnor": lambda p, q: ~(p ^ q),
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "lg": operator.ne,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
}
_LOADS = {"dword": 1, "dwordx2": 2, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16}


def _int(value: int) -> int:
    return signed(value & WORD, 32)


def _field(bits: int, packed: int, width_mask: int = 127) -> tuple[int, int]:
    """Return the field that a packed (offset, width) cuts out of `bits`, and its width."""
    offset, width = packed & (bits - 1), (packed >> 16) & width_mask
    return offset, width


def _bfe_i32(a: int, b: int) -> int:
    offset, width = _field(32, b)
    return signed((a >> offset) & ((1 << width) - 1), width) if width else 0


def _bfe_u(bits: int) -> Scalar:
    def cut(a: int, b: int) -> int:
        offset, width = _field(bits, b)
        return (a >> offset) & ((1 << width) - 1)

    return cut


# Name -> (value, what becomes of scc: "" nothing, "nz" not zero, "carry" above 32 bits or below zero, "over" signed)
_ARITHMETIC32: dict[str, tuple[Scalar, str]] = {
    "add_u32": (lambda a, b: a + b, "carry"),
    "sub_u32": (lambda a, b: a - b, "carry"),
    "add_i32": (lambda a, b: _int(a) + _int(b), "over"),
    "sub_i32": (lambda a, b: _int(a) - _int(b), "over"),
    "mul_i32": (lambda a, b: a * b, ""),
    "mul_hi_u32": (lambda a, b: (a * b) >> 32, ""),
    "mul_hi_i32": (lambda a, b: (_int(a) * _int(b)) >> 32, ""),
    "lshl1_add_u32": (lambda a, b: (a << 1) + b, "carry"),
    "lshl2_add_u32": (lambda a, b: (a << 2) + b, "carry"),
    "lshl3_add_u32": (lambda a, b: (a << 3) + b, "carry"),
    "lshl4_add_u32": (lambda a, b: (a << 4) + b, "carry"),
    "lshl_b32": (lambda a, b: a << (b & 31), "nz"),
    "lshr_b32": (lambda a, b: a >> (b & 31), "nz"),
    "ashr_i32": (lambda a, b: _int(a) >> (b & 31), "nz"),
    "bfe_u32": (_bfe_u(32), "nz"),
    "bfe_i32": (_bfe_i32, "nz"),
    "bfm_b32": (lambda a, b: ((1 << (a & 31)) - 1) << (b & 31), ""),
    "pack_ll_b32_b16": (lambda a, b: (a & 0xFFFF) | (b << 16), ""),
    "pack_lh_b32_b16": (lambda a, b: (a & 0xFFFF) | (b & 0xFFFF0000), ""),
    "pack_hh_b32_b16": (lambda a, b: (a >> 16) | (b & 0xFFFF0000), ""),
    "absdiff_i32": (lambda a, b: abs(_int(a) - _int(b)), "nz"),
    **{f"{name}_b32": (function, "nz") for name, function in _BITWISE.items()},
}
_UNARY32: dict[str, tuple[Callable[[int], int], str]] = {
    "mov_b32": (lambda a: a, ""),
    "not_b32": (lambda a: ~a, "nz"),
    "brev_b32": (lambda a: int(f"{a:032b}"[::-1], 2), ""),
    "ff1_i32_b32": (lambda a: (a & -a).bit_length() - 1, ""),
    "flbit_i32_b32": (lambda a: 32 - a.bit_length() if a else -1, ""),
    "bcnt1_i32_b32": (lambda a: a.bit_count(), "nz"),
    "sext_i32_i16": (lambda a: signed(a & 0xFFFF, 16), ""),
    "sext_i32_i8": (lambda a: signed(a & 0xFF, 8), ""),
    "abs_i32": (lambda a: abs(_int(a)), "nz"),
}
# Results of 32 bits from 64.
_UNARY64_TO_32: dict[str, tuple[Callable[[int], int], str]] = {
    "ff1_i32_b64": (lambda a: (a & -a).bit_length() - 1, ""),
    "flbit_i32_b64": (lambda a: 64 - a.bit_length() if a else -1, ""),
    "bcnt1_i32_b64": (lambda a: a.bit_count(), "nz"),
}
_UNARY64: dict[str, tuple[Callable[[int], int], str]] = {
    "mov_b64": (lambda a: a, ""),
    "not_b64": (lambda a: ~a, "nz"),
}
_ARITHMETIC64: dict[str, tuple[Scalar, str]] = {
    **{f"{name}_b64": (function, "nz") for name, function in _BITWISE.items()},
}
# The second operand is of 32 bits.
_SHIFT64: dict[str, tuple[Scalar, str]] = {
    "lshl_b64": (lambda a, b: a << (b & 63), "nz"),
    "lshr_b64": (lambda a, b: a >> (b & 63), "nz"),
    "ashr_i64": (lambda a, b: signed(a, 64) >> (b & 63), "nz"),
    "bfe_u64": (_bfe_u(64), "nz"),
}
_IGNORED = (
    *("s_waitcnt", "s_waitcnt_vmcnt", "s_waitcnt_lgkmcnt", "s_waitcnt_depctr", "s_nop", "s_setprio", "s_sleep"),
    *("s_sethalt", "s_icache_inv", "s_dcache_inv", "s_dcache_wb", "s_setreg_b32", "s_setreg_imm32_b32", "s_setvskip"),
)


def _flag(rule: str, result: int) -> int:
    if rule == "carry":
        return int(result > WORD or result < 0)
    if rule == "over":
        return int(not -(2**31) <= result < 2**31)
    return int(result & WORD != 0)


def _store(i: Instruction, value: Callable[[Wave], int], rule: str) -> Effect:
    destination = i.operands[0].i

    def effect(w: Wave) -> None:
        result = value(w)
        w.s[destination] = result & WORD
        if rule:
            w.scc = _flag(rule, result)

    return effect


def _store64(i: Instruction, value: Callable[[Wave], int], rule: str) -> Effect:
    destination = i.operands[0].i

    def effect(w: Wave) -> None:
        result = value(w) & ALL
        w.set_pair(destination, result)
        if rule:
            w.scc = int(result != 0)

    return effect


@means(*(f"s_{name}" for name in _ARITHMETIC32))
def _two_words(i: Instruction) -> Effect:
    function, rule = _ARITHMETIC32[i.name[2:]]
    a, b = i.operands[1:3]
    return _store(i, lambda w: function(a.scalar(w), b.scalar(w)), rule)


@means(*(f"s_{name}" for name in _UNARY32))
def _one_word(i: Instruction) -> Effect:
    function, rule = _UNARY32[i.name[2:]]
    a = i.operands[1]
    return _store(i, lambda w: function(a.scalar(w)), rule)


@means(*(f"s_{name}" for name in _UNARY64_TO_32))
def _one_pair_to_word(i: Instruction) -> Effect:
    function, rule = _UNARY64_TO_32[i.name[2:]]
    a = i.operands[1]
    return _store(i, lambda w: function(a.scalar64(w)), rule)


@means(*(f"s_{name}" for name in _UNARY64))
def _one_pair(i: Instruction) -> Effect:
    function, rule = _UNARY64[i.name[2:]]
    a = i.operands[1]
    return _store64(i, lambda w: function(a.scalar64(w)), rule)


@means(*(f"s_{name}" for name in _ARITHMETIC64))
def _two_pairs(i: Instruction) -> Effect:
    function, rule = _ARITHMETIC64[i.name[2:]]
    a, b = i.operands[1:3]
    return _store64(i, lambda w: function(a.scalar64(w), b.scalar64(w)), rule)


@means(*(f"s_{name}" for name in _SHIFT64))
def _pair_and_word(i: Instruction) -> Effect:
    function, rule = _SHIFT64[i.name[2:]]
    a, b = i.operands[1:3]
    return _store64(i, lambda w: function(a.scalar64(w), b.scalar(w)), rule)


@means("s_bfm_b64")
def _bfm64(i: Instruction) -> Effect:
    a, b = i.operands[1:3]
    return _store64(i, lambda w: ((1 << (a.scalar(w) & 63)) - 1) << (b.scalar(w) & 63), "")


@means("s_addc_u32", "s_subb_u32")
def _with_carry(i: Instruction) -> Effect:
    a, b = i.operands[1:3]
    sign = 1 if i.name == "s_addc_u32" else -1
    return _store(i, lambda w: a.scalar(w) + sign * (b.scalar(w) + w.scc), "carry")


@means("s_movk_i32", "s_addk_i32", "s_mulk_i32", "s_cmovk_i32")
def _short_constant(i: Instruction) -> Effect:
    constant, destination = signed(i.operands[1].value & 0xFFFF, 16), i.operands[0].i
    if i.name == "s_movk_i32":
        return _store(i, lambda w: constant, "")
    if i.name == "s_addk_i32":
        return _store(i, lambda w: _int(w.s[destination]) + constant, "over")
    if i.name == "s_cmovk_i32":
        return _store(i, lambda w: constant if w.scc else w.s[destination], "")
    return _store(i, lambda w: _int(w.s[destination]) * constant, "")


@means("s_min_u32", "s_max_u32", "s_min_i32", "s_max_i32")
def _least_or_most(i: Instruction) -> Effect:
    a, b = i.operands[1:3]
    choose = min if "min" in i.name else max
    read = _int if i.name.endswith("i32") else (lambda value: value)
    destination = i.operands[0].i

    def effect(w: Wave) -> None:
        p, q = read(a.scalar(w)), read(b.scalar(w))
        result = choose(p, q)
        w.scc = int(result == p)
        w.s[destination] = result & WORD

    return effect


@means("s_cselect_b32", "s_cmov_b32")
def _select(i: Instruction) -> Effect:
    if i.name == "s_cmov_b32":
        a, destination = i.operands[1], i.operands[0].i
        return _store(i, lambda w: a.scalar(w) if w.scc else w.s[destination], "")
    a, b = i.operands[1:3]
    return _store(i, lambda w: (a if w.scc else b).scalar(w), "")


@means("s_cselect_b64")
def _select64(i: Instruction) -> Effect:
    a, b = i.operands[1:3]
    return _store64(i, lambda w: (a if w.scc else b).scalar64(w), "")


@means(*(f"s_{k}_{c}_{t}" for k in ("cmp", "cmpk") for c in _COMPARE for t in ("u32", "i32", "u64")))
def _compare(i: Instruction) -> Effect:
    _, kind, comparison, type_ = i.name.split("_")
    compare, (a, b) = _COMPARE[comparison], i.operands
    if type_ == "u64":

        def pair(w: Wave) -> None:
            w.scc = int(compare(a.scalar64(w), b.scalar64(w)))

        return pair
    read = _int if type_ == "i32" else (lambda value: value)
    short = b.value & 0xFFFF
    constant = signed(short, 16) if type_ == "i32" else short

    def word(w: Wave) -> None:
        w.scc = int(compare(read(a.scalar(w)), constant if kind == "cmpk" else read(b.scalar(w))))

    return word


@means("s_bitcmp0_b32", "s_bitcmp1_b32")
def _test_bit(i: Instruction) -> Effect:
    a, b = i.operands
    wanted = int(i.name[8])

    def effect(w: Wave) -> None:
        w.scc = int(((a.scalar(w) >> (b.scalar(w) & 31)) & 1) == wanted)

    return effect


@means("s_bitset0_b32", "s_bitset1_b32")
def _set_bit(i: Instruction) -> Effect:
    a, destination = i.operands[1], i.operands[0].i
    if i.name == "s_bitset1_b32":
        return _store(i, lambda w: w.s[destination] | (1 << (a.scalar(w) & 31)), "")
    return _store(i, lambda w: w.s[destination] & ~(1 << (a.scalar(w) & 31)), "")


@means(*(f"s_{name}_saveexec_b64" for name in _BITWISE))
def _save_exec(i: Instruction) -> Effect:
    function = _BITWISE[i.name.split("_")[1]]
    source, destination = i.operands[1], i.operands[0].i

    def effect(w: Wave) -> None:
        before = w.pair(EXEC)
        after = function(source.scalar64(w), before) & ALL
        w.set_pair(destination, before)
        w.set_pair(EXEC, after)
        w.scc = int(after != 0)

    return effect


@means(*(f"s_{kind}_{size}" for kind in ("load", "buffer_load") for size in _LOADS))
def _load(i: Instruction) -> Effect:
    count = _LOADS[i.name.rsplit("_", 1)[1]]
    destination, base, offset = i.operands[0].i, i.operands[1], i.operands[2]
    more, buffer = i.number("offset"), "buffer" in i.name

    def effect(w: Wave) -> None:
        address = base.scalar64(w)
        if buffer:
            address &= (1 << 48) - 1
        address += (offset.scalar(w) if offset.kind == "s" else offset.value) + more
        words = w.workgroup.memory.gather(np.array([address & ~3], U64), 4 * count).view(U32).reshape(-1)
        w.s[destination : destination + count] = [int(word) for word in words]

    return effect


@means("s_getpc_b64")
def _get_pc(i: Instruction) -> Effect:
    return _store64(i, lambda w: i.next_pc, "")


@means("s_getreg_b32")
def _get_register(i: Instruction) -> Effect:
    return _store(i, lambda w: 0, "")


@means(*_IGNORED)
def _ignored(i: Instruction) -> Effect:
    return lambda w: None


@means("s_set_gpr_idx_on")
def _index_on(i: Instruction) -> Effect:
    source = i.operands[0]
    inside = re.search(r"\((.*)\)", ",".join(i.texts))
    if inside is None:
        raise i.unknown("without its operands")
    moved = frozenset(inside[1].split(","))

    def effect(w: Wave) -> None:
        offset = source.scalar(w) & 0xFF
        w.s[M0] = (w.s[M0] & ~0xFF) | offset
        w.index = (offset, moved)

    return effect


@means("s_set_gpr_idx_off")
def _index_off(i: Instruction) -> Effect:
    def effect(w: Wave) -> None:
        w.index = None

    return effect


@jumps("s_endpgm")
def _end(i: Instruction) -> Step:
    def step(w: Wave) -> bool:
        w.done = True
        return False

    return step


@jumps("s_barrier")
def _barrier(i: Instruction) -> Step:
    def step(w: Wave) -> bool:
        w.pc = i.next_pc
        return True

    return step


_CONDITIONS: dict[str, Callable[[Wave], bool]] = {
    "s_branch": lambda w: True,
    "s_cbranch_scc0": lambda w: not w.scc,
    "s_cbranch_scc1": lambda w: bool(w.scc),
    "s_cbranch_vccz": lambda w: w.pair(VCC) == 0,
    "s_cbranch_vccnz": lambda w: w.pair(VCC) != 0,
    "s_cbranch_execz": lambda w: w.pair(EXEC) == 0,
    "s_cbranch_execnz": lambda w: w.pair(EXEC) != 0,
}


@jumps(*_CONDITIONS)
def _branch(i: Instruction) -> Step:
    target = i.next_pc + 4 * signed(int(i.texts[0], 0) & 0xFFFF, 16)
    holds = _CONDITIONS[i.name]

    def step(w: Wave) -> bool:
        w.pc = target if holds(w) else i.next_pc
        return False

    return step


@jumps("s_setpc_b64", "s_swappc_b64")
def _jump(i: Instruction) -> Step:
    def step(w: Wave) -> bool:
        target = i.operands[-1].scalar64(w)
        if i.name == "s_swappc_b64":
            w.set_pair(i.operands[0].i, i.next_pc)
        w.pc = target
        return False

    return step
