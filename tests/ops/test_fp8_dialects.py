"""e4m3fnuz is e4m3fn with every scale doubled: code by code against float64, and op by op bit for bit."""

from __future__ import annotations

import pytest
import torch

from rocm_serve.ops.bind import OPS
from rocm_serve.ops.fp8 import FN, FNUZ, FNUZ_SCALE, FP8_DTYPES, fn_to_fnuz, fn_to_fnuz_, kv_scale, quantise_rows
from rocm_serve.ops.inputs import in_fnuz
from rocm_serve.platform.facts import fp8_dialect
from tests.ops.test_references import DTYPES, EVERY_CASE, arguments, copied, outputs

CODES = torch.arange(256, dtype=torch.uint8)


def value(code: int, *, bias: int, no_number: set[int]) -> float:
    """Decode s eeee mmm as float64 arithmetic does, from the definition of the format."""
    if code in no_number:
        return float("nan")
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 0xF, code & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0 ** (1 - bias)
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - bias)


def fn(code: int) -> float:
    return value(code, bias=7, no_number={0x7F, 0xFF})


def fnuz(code: int) -> float:
    return value(code, bias=8, no_number={0x80})


def test_torch_decodes_both_dialects_as_their_definitions_say() -> None:
    for dtype, decode in ((FN, fn), (FNUZ, fnuz)):
        expected = torch.tensor([decode(code) for code in range(256)], dtype=torch.float64)
        assert torch.equal(CODES.view(dtype).double().nan_to_num(7.25), expected.nan_to_num(7.25))


def test_every_code_keeps_its_number_under_a_doubled_scale() -> None:
    turned = fn_to_fnuz(CODES.view(FN))
    assert turned.dtype is FNUZ
    for code in range(256):
        before, after = fn(code), fnuz(int(turned.view(torch.uint8)[code])) * FNUZ_SCALE
        assert before == after or (before != before and after != after), f"{code:#x}: {before} became {after}"
    assert int(turned.view(torch.uint8)[0x80]) == 0, "minus zero would be NaN"


def test_a_part_of_a_tensor_is_turned_in_place_and_nothing_beside_it() -> None:
    wide = CODES.repeat(3).view(3, 256).clone()
    part = wide[1, 64:192]
    assert fn_to_fnuz_(part) is None
    assert torch.equal(wide[[0, 2]], CODES.repeat(2).view(2, 256))
    assert torch.equal(wide[1, :64], CODES[:64]) and torch.equal(wide[1, 192:], CODES[192:])
    assert torch.equal(part, fn_to_fnuz(CODES.view(FN)).view(torch.uint8)[64:192])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "case"), [c for c in EVERY_CASE if "fp8" in c[1] or c[0] == "fp8_linear"])
def test_a_reference_gives_the_same_bits_in_either_dialect(name: str, case: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    made = arguments(op, case, dtype)
    turned = in_fnuz(made)
    if case != "fp8 rows, plain weights":
        assert any(isinstance(x, torch.Tensor) and x.dtype is FNUZ for x in turned.values())
    for got, expected in zip(outputs(op, turned), outputs(op, made), strict=True):
        if got.dtype is FNUZ:  # pages
            got, expected = got.float() * FNUZ_SCALE, expected.float()
        assert torch.equal(got, expected)


def test_rows_are_quantised_to_the_same_codes_under_doubled_scales() -> None:
    x = torch.randn(33, 300, generator=torch.Generator().manual_seed(3)) * 20
    (q, s), (qz, sz) = quantise_rows(x, FN), quantise_rows(x, FNUZ)
    assert torch.equal(sz, s * FNUZ_SCALE)
    assert torch.equal(qz.float() * FNUZ_SCALE, q.float())
    assert qz.float().abs().max() == 224


def test_keys_beyond_what_pages_hold_are_clamped_to_the_same_number_in_either_dialect() -> None:
    k = torch.tensor([[[500.0, -1e6, 448.0, 0.0]]])
    for dtype in (FN, FNUZ):
        pages = torch.zeros(1, 1, 1, 4).to(dtype)
        scale = kv_scale(dtype)
        write = OPS["kv_write"].reference
        write(k, k, pages, pages.clone(), torch.tensor([0]), k_scale=scale, v_scale=scale)
        assert (pages.float() * scale).flatten().tolist() == [448.0, -448.0, 448.0, 0.0]


@pytest.mark.parametrize("case", ["fp8 pages", "fp8 pages, scales"])
def test_a_scale_that_is_not_doubled_shows(case: str) -> None:
    op = OPS["attention_decode"]
    made = arguments(op, case, torch.float32)
    turned = in_fnuz(made) | {"k_scale": made.get("k_scale", 1.0)}
    assert not torch.equal(outputs(op, copied(turned))[0], outputs(op, made)[0])


@pytest.mark.parametrize(
    ("device", "arch", "dtype"),
    [("rocm", "gfx942", FNUZ), ("rocm", "gfx950", FN), ("cuda", "sm_90", FN), ("cuda", "sm_80", FN), ("cpu", "", FN)],
)
def test_each_device_stores_its_own_dialect(device: str, arch: str, dtype: torch.dtype) -> None:
    assert FP8_DTYPES[fp8_dialect(device, arch)] is dtype  # type: ignore[arg-type]


def test_a_case_asks_for_the_dialect_of_its_machine() -> None:
    made = OPS["quantise_rows"].cases["odd rows"](torch.Generator().manual_seed(1), torch.float32)
    rows, scales = OPS["quantise_rows"].reference(**in_fnuz(made))
    assert rows.dtype is FNUZ
    assert torch.equal(scales, 2 * OPS["quantise_rows"].reference(**made)[1])
