"""Scalar instructions against arithmetic written another way, on numbers drawn at random and at the ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.gfx.emulator.memory import EmulatorError
from evals.gfx.emulator.wave import EXEC, VCC
from tests.evals.gfx.emulator.machine import step, wave

M = 2**32
words = st.integers(0, M - 1) | st.sampled_from([0, 1, 31, 32, 2**31 - 1, 2**31, M - 1])
pairs = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**63, 2**64 - 1])


def as_signed(v: int) -> int:
    return int.from_bytes(v.to_bytes(4, "little"), "little", signed=True)


BINARY: dict[str, Callable[[int, int], tuple[int, int | None]]] = {
    "s_add_u32": lambda a, b: ((a + b) % M, int(a + b >= M)),
    "s_sub_u32": lambda a, b: ((a - b) % M, int(b > a)),
    "s_add_i32": lambda a, b: ((a + b) % M, int(abs(as_signed(a) + as_signed(b) + 0.5) > 2**31)),
    "s_mul_i32": lambda a, b: (a * b % M, None),
    "s_mul_hi_u32": lambda a, b: (a * b // M, None),
    "s_mul_hi_i32": lambda a, b: (as_signed(a) * as_signed(b) // M % M, None),
    "s_and_b32": lambda a, b: (a & b, int(a & b > 0)),
    "s_andn2_b32": lambda a, b: (a & (M - 1 - b), int(a & (M - 1 - b) > 0)),
    "s_xor_b32": lambda a, b: (a ^ b, int(a != b)),
    "s_lshl_b32": lambda a, b: (a * 2 ** (b % 32) % M, int(a * 2 ** (b % 32) % M > 0)),
    "s_lshr_b32": lambda a, b: (a // 2 ** (b % 32), int(a // 2 ** (b % 32) > 0)),
    "s_ashr_i32": lambda a, b: (as_signed(a) // 2 ** (b % 32) % M, int(as_signed(a) // 2 ** (b % 32) != 0)),
    "s_lshl3_add_u32": lambda a, b: ((8 * a + b) % M, int(8 * a + b >= M)),
    "s_min_i32": lambda a, b: (min(as_signed(a), as_signed(b)) % M, int(as_signed(a) <= as_signed(b))),
    "s_max_u32": lambda a, b: (max(a, b), int(a >= b)),
    "s_bfm_b32": lambda a, b: ((2 ** (a % 32) - 1) * 2 ** (b % 32) % M, None),
    "s_pack_ll_b32_b16": lambda a, b: (a % 65536 + b % 65536 * 65536, None),
}


@pytest.mark.parametrize("name", BINARY)
@given(a=words, b=words)
def test_two_words(name: str, a: int, b: int) -> None:
    w = wave()
    w.s[1], w.s[2], w.scc = a, b, 7
    step(w, f"{name} s0, s1, s2")
    value, scc = BINARY[name](a, b)
    assert w.s[0] == value
    assert w.scc == (7 if scc is None else scc)


@given(a=words, b=words, carry=st.integers(0, 1))
def test_carries_go_on(a: int, b: int, carry: int) -> None:
    w = wave()
    w.s[1], w.s[2], w.scc = a, b, carry
    step(w, "s_addc_u32 s0, s1, s2")
    assert w.s[0] + M * w.scc == a + b + carry
    w.scc = carry
    step(w, "s_subb_u32 s3, s1, s2")
    assert w.s[3] - M * w.scc == a - b - carry


@given(a=words, offset=st.integers(0, 31), width=st.integers(0, 32))
def test_fields_are_cut_out(a: int, offset: int, width: int) -> None:
    w = wave()
    w.s[1], w.s[2] = a, offset | width << 16
    step(w, "s_bfe_u32 s0, s1, s2")
    text = f"{a:032b}"[::-1][offset : offset + width]
    unsigned = int(text[::-1] or "0", 2)
    assert w.s[0] == unsigned
    step(w, "s_bfe_i32 s3, s1, s2")
    negative = len(text) == width and width > 0 and text[-1] == "1"
    assert w.s[3] == (unsigned - (2**width if negative else 0)) % M


@given(a=pairs, b=pairs, shift=words)
def test_pairs_of_words(a: int, b: int, shift: int) -> None:
    w = wave()
    w.set_pair(2, a)
    w.set_pair(4, b)
    w.s[6] = shift
    assert step(w, "s_and_b64 s[0:1], s[2:3], s[4:5]").pair(0) == a & b
    assert step(w, "s_lshl_b64 s[0:1], s[2:3], s6").pair(0) == a * 2 ** (shift % 64) % 2**64
    assert step(w, "s_ashr_i64 s[0:1], s[2:3], s6").pair(0) == (a - (a >> 63 << 64)) // 2 ** (shift % 64) % 2**64
    assert step(w, "s_bcnt1_i32_b64 s0, s[2:3]").s[0] == bin(a).count("1")
    assert step(w, "s_ff1_i32_b64 s0, s[2:3]").s[0] == ((a & -a).bit_length() - 1) % M
    w.set_pair(EXEC, b)
    step(w, "s_and_saveexec_b64 s[0:1], s[2:3]")
    assert (w.pair(0), w.pair(EXEC), w.scc) == (b, a & b, int(a & b != 0))


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("s_cmp_lt_i32 s1, s2", lambda a, b: as_signed(a) < as_signed(b)),
        ("s_cmp_ge_u32 s1, s2", lambda a, b: a >= b),
        ("s_cmp_lg_u32 s1, s2", lambda a, b: a != b),
        ("s_cmpk_gt_i32 s1, 0xfff0", lambda a, b: as_signed(a) > -16),
        ("s_cmpk_eq_u32 s1, 0xfff0", lambda a, b: a == 0xFFF0),
        ("s_bitcmp1_b32 s1, s2", lambda a, b: a >> (b % 32) & 1),
    ],
)
@given(a=words | st.just(0xFFF0), b=words)
def test_comparisons(text: str, holds: Callable[[int, int], bool], a: int, b: int) -> None:
    w = wave()
    w.s[1], w.s[2] = a, b
    assert step(w, text).scc == int(holds(a, b))


@pytest.mark.parametrize(
    ("name", "scc", "vcc", "exec_", "goes"),
    [
        ("s_branch", 0, 0, 0, True),
        ("s_cbranch_scc0", 0, 0, 0, True),
        ("s_cbranch_scc1", 0, 0, 0, False),
        ("s_cbranch_vccz", 0, 1 << 40, 0, False),
        ("s_cbranch_vccnz", 0, 1 << 40, 0, True),
        ("s_cbranch_execz", 0, 0, 0, True),
        ("s_cbranch_execnz", 0, 0, 0, False),
    ],
)
def test_branches(name: str, scc: int, vcc: int, exec_: int, goes: bool) -> None:
    w = wave()
    w.scc = scc
    w.set_pair(VCC, vcc)
    w.set_pair(EXEC, exec_)
    step(w, f"{name} 65534")  # two words back from the next instruction
    assert w.pc == (4 - 8 if goes else 4)


def test_an_instruction_that_is_not_known_is_named() -> None:
    with pytest.raises(EmulatorError, match="not implemented: s_rfe_b64 s\\[0:1\\]"):
        step(wave(), "s_rfe_b64 s[0:1]")
