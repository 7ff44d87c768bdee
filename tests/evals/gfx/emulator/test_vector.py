"""Vector instructions on random lanes, against numpy and torch written another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from evals.gfx.emulator.memory import EmulatorError
from evals.gfx.emulator.wave import EXEC, VCC, lanes_of, mask_of
from tests.evals.gfx.emulator.machine import step, vectors, wave

LANE = np.arange(64)
F32, U32, I32 = np.float32, np.uint32, np.int32


@pytest.fixture
def rng() -> np.random.Generator:
    seed = np.random.SeedSequence()
    print(f"seed {seed.entropy}")
    return np.random.default_rng(seed)


def words(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 2**32, 64, dtype=np.uint64).astype(U32)


def floats(rng: np.random.Generator) -> np.ndarray:
    return (rng.standard_normal(64) * np.exp2(rng.integers(-20, 20, 64))).astype(F32)


def of_python(function: Any) -> Callable[[list[np.ndarray]], np.ndarray]:
    """Apply a function of Python's integers to as many sources as it takes, lane by lane, modulo 2^32."""
    count = function.__code__.co_argcount
    return lambda sources: np.array([function(*map(int, s[:count])) % 2**32 for s in zip(*sources, strict=True)], U32)


def as_signed(v: int) -> int:
    return v - (v >> 31 << 32)


INTEGERS = {
    "v_add_u32_e32": of_python(lambda a, b: a + b),
    "v_subrev_u32_e32": of_python(lambda a, b: b - a),
    "v_mul_lo_u32": of_python(lambda a, b: a * b),
    "v_mul_hi_u32": of_python(lambda a, b: a * b >> 32),
    "v_mul_hi_i32": of_python(lambda a, b: as_signed(a) * as_signed(b) >> 32),
    "v_lshlrev_b32_e32": of_python(lambda a, b: b << (a & 31)),
    "v_ashrrev_i32_e32": of_python(lambda a, b: as_signed(b) >> (a & 31)),
    "v_mul_u32_u24_e32": of_python(lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    "v_bfm_b32": of_python(lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    "v_max_i32_e32": of_python(lambda a, b: max(as_signed(a), as_signed(b))),
    "v_bcnt_u32_b32": of_python(lambda a, b: bin(a).count("1") + b),
    "v_and_or_b32": of_python(lambda a, b, c: a & b | c),
    "v_lshl_add_u32": of_python(lambda a, b, c: (a << (b & 31)) + c),
    "v_bfi_b32": of_python(lambda a, b, c: a & b | ~a & c),
    "v_alignbit_b32": of_python(lambda a, b, c: (a << 32 | b) >> (c & 31)),
    "v_med3_i32": of_python(lambda a, b, c: sorted(map(as_signed, (a, b, c)))[1]),
    "v_mad_u32_u24": of_python(lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
    "v_bfrev_b32_e32": of_python(lambda a: int(f"{a:032b}"[::-1], 2)),
    "v_ffbh_u32_e32": of_python(lambda a: 32 - a.bit_length() if a else -1),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(rng: np.random.Generator, name: str) -> None:
    sources = [words(rng) for _ in range(3)]
    w = vectors(wave(), {k + 1: s for k, s in enumerate(sources)})
    step(w, f"{name} v0, v1, v2, v3")
    np.testing.assert_array_equal(w.v[0], INTEGERS[name](sources))


def test_only_active_lanes_are_written(rng: np.random.Generator) -> None:
    mask = int(rng.integers(1, 2**63))
    w = vectors(wave(), {0: U32(7), 1: words(rng)})
    w.set_pair(EXEC, mask)
    step(w, "v_mov_b32_e32 v0, v1")
    np.testing.assert_array_equal(w.v[0], np.where(lanes_of(mask), w.v[1], 7))
    assert mask_of(lanes_of(mask)) == mask


def test_signs_of_sources_and_modifiers_of_results(rng: np.random.Generator) -> None:
    a, b = floats(rng), floats(rng)
    w = vectors(wave(), {1: a, 2: b})
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(step(w, "v_add_f32_e64 v0, -v1, |v2|").v[0].view(F32), -a + np.abs(b))
        np.testing.assert_array_equal(step(w, "v_mul_f32_e64 v0, v1, v2 clamp").v[0].view(F32), (a * b).clip(0, 1))
        np.testing.assert_array_equal(step(w, "v_add_f32_e64 v0, v1, v2 mul:4").v[0].view(F32), (a + b) * 4)
        np.testing.assert_array_equal(step(w, "v_add_f32_e64 v0, v1, v2 div:2").v[0].view(F32), (a + b) / 2)
        np.testing.assert_array_equal(step(w, "v_mul_f32_e32 v0, 0.5, v1").v[0].view(F32), a / 2)


def test_fused_products_are_rounded_once(rng: np.random.Generator) -> None:
    a, b, c = floats(rng), floats(rng), floats(rng)
    exact = torch.from_numpy(a).double() * torch.from_numpy(b).double() + torch.from_numpy(c).double()
    w = vectors(wave(), {0: c, 1: a, 2: b, 3: c})
    expected = exact.float().numpy()
    np.testing.assert_array_equal(step(w, "v_fma_f32 v4, v1, v2, v3").v[4].view(F32), expected)
    np.testing.assert_array_equal(step(w, "v_fmac_f32_e32 v0, v1, v2").v[0].view(F32), expected)


def test_halves_and_words_are_multiplied_and_added_together(rng: np.random.Generator) -> None:
    a, b, old = rng.standard_normal(64).astype(F32), rng.standard_normal(64).astype(F32), words(rng)
    halves = rng.standard_normal((64, 2)).astype(np.float16)
    w = vectors(wave(), {0: old, 1: a, 2: b, 3: halves.view(U32).reshape(64)})
    total = (
        torch.from_numpy(a).double() * torch.from_numpy(halves[:, 1]).double() - torch.from_numpy(b).double()
    ).float()
    half = total.half().numpy().view(np.uint16).astype(U32)
    mixed = "v1, v3, -v2 op_sel:[0,1,0] op_sel_hi:[0,1,0]"
    np.testing.assert_array_equal(step(w, f"v_fma_mix_f32 v4, {mixed}").v[4].view(F32), total.numpy())
    np.testing.assert_array_equal(step(w, f"v_fma_mixlo_f16 v0, {mixed}").v[0], old & 0xFFFF0000 | half)
    np.testing.assert_array_equal(step(w, f"v_fma_mixhi_f16 v0, {mixed}").v[0], half << 16 | half)
    pair = np.stack([a, b], 1).astype(np.float16).view(U32).reshape(64)
    np.testing.assert_array_equal(step(w, "v_cvt_pk_f16_f32 v5, v1, v2").v[5], pair)


def test_carries_of_lanes(rng: np.random.Generator) -> None:
    a, b = words(rng), words(rng)
    w = vectors(wave(), {1: a, 2: b, 3: a, 4: b})
    step(w, "v_add_co_u32_e32 v0, vcc, v1, v2")
    step(w, "v_addc_co_u32_e32 v5, vcc, v3, v4, vcc")
    wide = [(int(x) << 32 | int(x)) + (int(y) << 32 | int(y)) for x, y in zip(a, b, strict=True)]
    assert [int(h) << 32 | int(low) for h, low in zip(w.v[5], w.v[0], strict=True)] == [v % 2**64 for v in wide]
    assert w.pair(VCC) == mask_of(np.array([v >= 2**64 for v in wide]))


def test_wide_products(rng: np.random.Generator) -> None:
    a, b, c = words(rng), words(rng), words(rng)
    w = vectors(wave(), {2: a, 3: b, 4: c, 5: a})
    step(w, "v_mad_u64_u32 v[0:1], s[0:1], v2, v3, v[4:5]")
    for lane in range(64):
        total = int(a[lane]) * int(b[lane]) + (int(a[lane]) << 32 | int(c[lane]))
        assert int(w.v[1][lane]) << 32 | int(w.v[0][lane]) == total % 2**64


def test_comparisons_write_a_bit_a_lane(rng: np.random.Generator) -> None:
    a, b = floats(rng), floats(rng)
    a[::7], b[::5] = np.nan, np.nan
    w = vectors(wave(), {1: a, 2: b})
    mask = int(rng.integers(1, 2**63))
    w.set_pair(EXEC, mask)
    for name, holds in {"lt": a < b, "nlt": ~(a < b), "lg": (a < b) | (a > b), "u": np.isnan(a) | np.isnan(b)}.items():
        step(w, f"v_cmp_{name}_f32_e64 s[4:5], v1, v2")
        assert w.pair(4) == mask_of(holds) & mask
    w.set_pair(6, mask_of(a > 0))
    w.set_pair(EXEC, 2**64 - 1)
    step(w, "v_cndmask_b32_e64 v0, v1, v2, s[6:7]")
    np.testing.assert_array_equal(w.v[0], np.where(a > 0, b, a).view(U32))


def test_classes_of_numbers() -> None:
    kinds = [np.nan, -np.inf, -1.5, -1e-40, -0.0, 0.0, 1e-40, 1.5, np.inf]
    w = vectors(wave(), {1: np.resize(np.array(kinds, F32), 64)})
    for bit, kind in enumerate(range(1, 10)):
        step(w, f"v_cmp_class_f32_e64 s[4:5], v1, {1 << kind}")
        expected = [int(k % len(kinds) == bit) for k in range(64)]
        assert lanes_of(w.pair(4)).astype(int).tolist() == expected


@pytest.mark.parametrize(
    ("pattern", "source"),
    [
        ("quad_perm:[1,0,3,2]", lambda n: n ^ 1),
        ("row_shl:3", lambda n: n + 3 if n % 16 + 3 < 16 else None),
        ("row_shr:1", lambda n: n - 1 if n % 16 else None),
        ("row_ror:8", lambda n: n // 16 * 16 + (n - 8) % 16),
        ("row_mirror", lambda n: n // 16 * 16 + 15 - n % 16),
        ("row_half_mirror", lambda n: n // 8 * 8 + 7 - n % 8),
        ("row_bcast:15", lambda n: n // 16 * 16 - 1 if n >= 16 else None),
        ("row_bcast:31", lambda n: 31 if n >= 32 else None),
        ("row_newbcast:5", lambda n: n // 16 * 16 + 5),
    ],
)
def test_lanes_read_from_others(rng: np.random.Generator, pattern: str, source: Callable[[int], int | None]) -> None:
    a, old = words(rng), words(rng)
    for bound, outside in (("", old), (" bound_ctrl:0", np.zeros(64, U32))):
        w = vectors(wave(), {0: old, 1: a})
        step(w, f"v_mov_b32_dpp v0, v1 {pattern} row_mask:0xf bank_mask:0xf{bound}")
        expected = [a[source(n)] if source(n) is not None else outside[n] for n in range(64)]  # type: ignore[index]
        np.testing.assert_array_equal(w.v[0], np.array(expected, U32))
    w = vectors(wave(), {0: old, 1: a})
    step(w, "v_mov_b32_dpp v0, v1 quad_perm:[0,1,2,3] row_mask:0x5 bank_mask:0x3")
    np.testing.assert_array_equal(w.v[0], np.where((LANE // 16 % 2 == 0) & (LANE % 16 < 8), a, old))


def test_parts_of_words(rng: np.random.Generator) -> None:
    a, b, old = words(rng), words(rng), words(rng)
    w = vectors(wave(), {0: old, 1: a, 2: b})
    select = "dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_2 src1_sel:WORD_1"
    step(w, f"v_add_u32_sdwa v0, v1, v2 {select}")
    total = ((a >> 16 & 255) + (b >> 16)) & 0xFFFF
    np.testing.assert_array_equal(w.v[0], old & 0xFFFF | total << 16)


def test_lane_counts_and_single_lanes(rng: np.random.Generator) -> None:
    w = vectors(wave(), {1: U32(100), 2: words(rng)})
    w.s[0] = w.s[1] = 0xFFFFFFFF
    step(w, "v_mbcnt_lo_u32_b32 v0, s0, 0")
    step(w, "v_mbcnt_hi_u32_b32 v0, s1, v0")
    np.testing.assert_array_equal(w.v[0], LANE)
    w.set_pair(EXEC, 0xFF00)
    assert step(w, "v_readfirstlane_b32 s4, v2").s[4] == w.v[2][8]
    assert step(w, "v_readlane_b32 s4, v2, 50").s[4] == w.v[2][50]
    w.s[5] = 12345
    assert step(w, "v_writelane_b32 v2, s5, 33").v[2][33] == 12345


@pytest.mark.parametrize(("size", "name"), [(32, "v_permlane32_swap_b32_e32"), (16, "v_permlane16_swap_b32_e32")])
def test_halves_of_lanes_change_places(rng: np.random.Generator, size: int, name: str) -> None:
    a, b = words(rng), words(rng)
    w = step(vectors(wave(), {0: a, 1: b}), f"{name} v0, v1")
    for lane in range(64):
        lower = lane // size % 2 == 0
        assert w.v[0][lane] == (a[lane] if lower else b[lane - size])
        assert w.v[1][lane] == (a[lane + size] if lower else b[lane])


@pytest.mark.parametrize(("fnuz", "dtype"), [(True, torch.float8_e4m3fnuz), (False, torch.float8_e4m3fn)])
def test_fp8_pairs_go_there_and_back(rng: np.random.Generator, fnuz: bool, dtype: torch.dtype) -> None:
    a, b = (rng.standard_normal(64).astype(F32) * 20 for _ in range(2))
    w = vectors(wave(), {0: U32(0xAABBCCDD), 1: a, 2: b})
    step(w, "v_cvt_pk_fp8_f32 v0, v1, v2 op_sel:[0,0,1]", fnuz=fnuz)
    codes = [torch.from_numpy(x).to(dtype) for x in (a, b)]
    low, high = (c.view(torch.uint8).numpy().astype(U32) for c in codes)
    np.testing.assert_array_equal(w.v[0], 0xCCDD | low << 16 | high << 24)
    step(w, "v_cvt_pk_f32_fp8_e64 v[4:5], v0 op_sel:[1,0]", fnuz=fnuz)
    np.testing.assert_array_equal(w.v[4].view(F32), codes[0].float().numpy())
    np.testing.assert_array_equal(w.v[5].view(F32), codes[1].float().numpy())


def test_fp8_conversions_of_gfx950_take_a_scale_of_one_only(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(64).astype(F32) * 20 for _ in range(2))
    w = vectors(wave(), {0: U32(0xAABBCCDD), 1: a, 2: b})
    step(w, "v_cvt_scalef32_pk_fp8_f32 v0, v1, v2, 1.0 op_sel:[0,0,0,1]")
    codes = [torch.from_numpy(x).to(torch.float8_e4m3fn) for x in (a, b)]
    low, high = (c.view(torch.uint8).numpy().astype(U32) for c in codes)
    np.testing.assert_array_equal(w.v[0], 0xCCDD | low << 16 | high << 24)
    step(w, "v_cvt_scalef32_pk_bf16_fp8 v3, v0, 1.0 op_sel:[1,0,0]")
    exact = [c.to(torch.bfloat16).view(torch.uint16).numpy().astype(U32) for c in codes]
    np.testing.assert_array_equal(w.v[3], exact[0] | exact[1] << 16)
    step(w, "v_cvt_scalef32_pk_f32_fp8 v[4:5], v0, 1.0 op_sel:[1,0,0]")
    np.testing.assert_array_equal(w.v[5].view(F32), codes[1].float().numpy())
    with pytest.raises(EmulatorError, match="a scale other than 1"):
        step(w, "v_cvt_scalef32_pk_fp8_f32 v0, v1, v2, 2.0")


def test_packed_numbers(rng: np.random.Generator) -> None:
    a, b, c = [floats(rng) for _ in range(2)], [floats(rng) for _ in range(2)], floats(rng)
    w = vectors(wave(), {2: a[0], 3: a[1], 4: b[0], 5: b[1], 6: c})
    with np.errstate(all="ignore"):
        step(w, "v_pk_mul_f32 v[0:1], v[2:3], v[4:5] op_sel:[0,1] op_sel_hi:[1,0]")
        np.testing.assert_array_equal(w.v[0].view(F32), a[0] * b[1])
        np.testing.assert_array_equal(w.v[1].view(F32), a[1] * b[0])
        step(w, "v_pk_add_f32 v[0:1], v[2:3], v[4:5] neg_lo:[0,1] neg_hi:[0,0]")
        np.testing.assert_array_equal(w.v[0].view(F32), a[0] - b[0])
        np.testing.assert_array_equal(w.v[1].view(F32), a[1] + b[1])
    x, y = words(rng), words(rng)
    step(vectors(w, {1: x, 2: y}), "v_pk_add_u16 v0, v1, v2")
    np.testing.assert_array_equal(w.v[0].view(np.uint16), x.view(np.uint16) + y.view(np.uint16))


def test_bytes_are_permuted(rng: np.random.Generator) -> None:
    a, b = words(rng), words(rng)
    w = vectors(wave(), {1: a, 2: b, 3: U32(0x0C0D0703)})
    step(w, "v_perm_b32 v0, v1, v2, v3")
    np.testing.assert_array_equal(w.v[0], b >> 24 | a >> 24 << 8 | U32(0xFF) << 16)


def test_a_truth_table_of_three() -> None:
    w = vectors(wave(), {1: U32(0xF0), 2: U32(0xCC), 3: U32(0xAA)})
    for table in (0x96, 0xE8, 0x01):
        step(w, f"v_bitop3_b32 v0, v1, v2, v3 bitop3:{table:#x}")
        assert w.v[0][0] & 0xFF == table


@pytest.mark.parametrize("fault", ["v_mov_b32_dpp v0, v1 row_share:1", "v_frobnicate_b32 v0, v1", "v_fma_f32 v0, v1"])
def test_what_is_not_known_is_refused(fault: str) -> None:
    with pytest.raises(EmulatorError):
        step(wave(), fault)


def test_divisions_are_exact(rng: np.random.Generator) -> None:
    a: Any = rng.standard_normal(64).astype(F32)
    b: Any = rng.standard_normal(64).astype(F32) + F32(3)
    w = vectors(wave(), {1: a, 2: b})
    for text in (
        "v_div_scale_f32 v3, s[0:1], v2, v2, v1",
        "v_div_scale_f32 v4, vcc, v1, v2, v1",
        "v_rcp_f32_e32 v5, v3",
        "v_fma_f32 v6, -v3, v5, 1.0",
        "v_fmac_f32_e32 v5, v6, v5",
        "v_mul_f32_e32 v6, v4, v5",
        "v_fma_f32 v7, -v3, v6, v4",
        "v_fmac_f32_e32 v6, v7, v5",
        "v_fma_f32 v3, -v3, v6, v4",
        "v_div_fmas_f32 v3, v3, v5, v6",
        "v_div_fixup_f32 v0, v3, v2, v1",
    ):
        step(w, text)
    np.testing.assert_array_equal(w.v[0].view(F32), a / b)
