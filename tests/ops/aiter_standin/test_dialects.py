"""Adapters beyond the ops' cases: gfx942's FP8, row counts on the device, sizes of real ranks, logits in float32."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from rocm_serve.errors import UserError
from rocm_serve.ops.attention_cases import attention_case
from rocm_serve.ops.bind import OPS, choose
from rocm_serve.ops.contract import Arguments
from rocm_serve.ops.fp8 import FN, FNUZ
from rocm_serve.ops.inputs import in_fnuz
from rocm_serve.ops.moe_experts.cases import experts_case
from tests.ops.aiter_standin.conftest import Install
from tests.ops.aiter_standin.package import releases
from tests.ops.aiter_standin.test_adapters import BOUND, answers, case_arguments
from tests.ops.test_references import copied, error, outputs

NEWEST = releases()[-1]
BF16 = torch.bfloat16


def experts(seed: int, **sizes: Any) -> Arguments:
    print(f"seed {seed}")
    return experts_case(torch.Generator().manual_seed(seed), BF16, **sizes)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("fp8_linear", "odd rows, fp8_1x128"),
        ("fp8_linear", "one row, fp8_1x128"),
        ("fp8_linear", "blocks of zeros, fp8_1x128"),
        ("moe_experts", "fp8 weights and rows"),
        ("moe_experts", "rows sent as fp8"),
    ],
)
def test_in_fnuz_products_agree_with_what_aiter_means(install: Install, name: str, case: str) -> None:
    install(NEWEST, FNUZ)
    op = OPS[name]
    made = in_fnuz(case_arguments(op, case, 11))
    (got,) = answers(op, made)
    semantics = op.providers["aiter"].semantics
    assert semantics is not None
    assert error(got, semantics(**copied(made)).double()) <= op.tol["bfloat16"].rel
    assert error(got, op.reference(**copied(made)).double()) > 2 * op.tol["bfloat16"].rel


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("kv_write", "fp8 pages"),
        ("kv_write", "fp8 pages, too large"),
        ("kv_write", "fp8 pages, scales"),
        ("attention_prefill", "fp8 pages, scales"),
        ("attention_decode", "fp8 pages, scales"),
    ],
)
def test_in_fnuz_pages_are_written_and_read_as_the_reference_does(install: Install, name: str, case: str) -> None:
    install(NEWEST, FNUZ)
    op = OPS[name]
    made = in_fnuz(case_arguments(op, case, 12))
    assert made["k_pages_PSGD"].dtype is FNUZ  # type: ignore[attr-defined]
    for got, expected in zip(answers(op, made), outputs(op, made), strict=True):
        if got.dtype.itemsize == 1:
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
        else:
            assert error(got, expected.double()) <= op.tol["bfloat16"].rel


@pytest.mark.parametrize("name", ["fp8_linear", "moe_experts"])
def test_a_weight_in_the_other_dialect_is_refused(install: Install, name: str) -> None:
    install(NEWEST, FNUZ)
    op = OPS[name]
    case = {"fp8_linear": "odd rows, fp8_1x128", "moe_experts": "fp8 weights and rows"}[name]
    with pytest.raises(AssertionError, match=f"AITER reads {FNUZ} here, the weight is {FN}"):
        answers(op, case_arguments(op, case, 13))


@pytest.mark.parametrize("live", [0, 1, 6, 9])
def test_experts_take_their_number_of_rows_from_the_device(install: Install, live: int) -> None:
    install(NEWEST)
    op = OPS["moe_experts"]
    made = experts(live, t=9, live=live, h=256, i=128, fp8=True, activation="fp8_1x128", elsewhere=True)
    (by_host,) = answers(op, made)
    (by_device,) = answers(op, made | {"num_rows": torch.tensor(live)})
    assert torch.equal(by_host, by_device)
    assert error(by_device, op.reference(**copied(made)).double()) <= op.tol["bfloat16"].rel
    assert not by_device[live:].count_nonzero() and by_device.isfinite().all()


@pytest.mark.parametrize("live", [0, 1, 6, 9])
def test_quantised_rows_in_a_buffer_with_dead_ones_reach_aiter_without_their_count(install: Install, live: int) -> None:
    install(NEWEST)
    op = OPS["moe_experts"]
    sizes = {"h": 256, "i": 128, "fp8": True, "activation": "fp8_1x128", "elsewhere": True, "quantised": True}
    made = experts(live, t=9, live=live, **sizes)
    x, scales = made["x_TH"], made["x_scale"]
    assert isinstance(x, torch.Tensor) and isinstance(scales, torch.Tensor)
    x[live:], scales[live:] = float("nan"), float("nan")  # what an earlier step left there
    (by_host,) = answers(op, made)
    (by_device,) = answers(op, made | {"num_rows": torch.tensor(live)})
    assert by_device.dtype is BF16 and torch.equal(by_host, by_device)
    assert error(by_device, op.reference(**copied(made)).double()) <= op.tol["bfloat16"].rel
    assert not by_device[live:].count_nonzero() and by_device.isfinite().all()


@pytest.mark.parametrize("rows", [1, 16, 33])
def test_experts_of_a_rank_with_ten_choices(install: Install, rows: int) -> None:
    install(releases()[1])
    op = OPS["moe_experts"]
    made = experts(rows, t=rows, h=512, i=256, e=32, k=10, fp8=True, activation="fp8_1x128", elsewhere=True)
    (got,) = answers(op, made)
    assert error(got, op.reference(**copied(made)).double()) <= op.tol["bfloat16"].rel


@pytest.mark.parametrize("most", [1, 150, 230, 10**6])
def test_prompts_are_attended_in_runs_of_a_bounded_number_of_keys(
    install: Install, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    install(NEWEST)
    op = OPS["attention_prefill"]
    adapter = importlib.import_module(op.providers["aiter"].load().__module__)
    whole, keys = adapter.flash_attn_varlen_func, []
    monkeypatch.setattr(adapter, "_MOST_KEYS", most)
    monkeypatch.setattr(adapter, "flash_attn_varlen_func", lambda **a: keys.append(a["k"].shape[0]) or whole(**a))
    lengths = {"rows": (37, 1, 90, 5), "contexts": (40, 70, 60, 0), "page_size": 8, "first_row": 3}
    made = attention_case(torch.Generator().manual_seed(15), BF16, **lengths)
    got = answers(op, made)[0]
    assert error(got, outputs(op, made)[0].double()) <= op.tol["bfloat16"].rel
    assert keys == {1: [77, 71, 150, 5], 150: [148, 150, 5], 230: [148, 155], 10**6: [303]}[most]


def test_logits_in_float32_are_not_rounded_on_the_way(install: Install) -> None:
    install(NEWEST)
    op = OPS["linear"]
    made = case_arguments(op, "float32 out", 14)
    weight = torch.randn(8200, 256, generator=torch.Generator().manual_seed(14)).to(BF16)  # more than one piece
    (got,) = answers(op, made | {"weight_NK": weight})
    x: Any = made["x_TK"]
    assert got.dtype is torch.float32
    assert error(got, x.double() @ weight.double().T) < 1e-6


def test_on_an_amd_gpu_with_aiter_its_adapters_are_bound(install: Install) -> None:
    install(NEWEST)
    report = choose({"rms_norm": "aiter", "add_rms_norm": "aiter"}, "gfx950")
    assert [line.op for line in report if line.provider == "aiter"] == BOUND


@pytest.mark.parametrize("arch", ["cpu", "sm_90", "gfx1201"])
def test_elsewhere_it_is_refused_in_words(arch: str) -> None:
    with pytest.raises(UserError, match=f"--op moe_experts=aiter: aiter runs on gfx942, gfx950, not on {arch}"):
        choose({"moe_experts": "aiter"}, arch)


def test_without_aiter_a_wish_for_it_says_what_to_install() -> None:
    with pytest.raises(UserError, match="--op linear=aiter: aiter is not installed; install AMD's AITER"):
        choose({"linear": "aiter"}, "gfx942")
