"""The order of providers: families of GPUs, ops with an order of their own, names that an op does not have."""

from __future__ import annotations

import pytest

from rocm_serve.platform import table
from rocm_serve.platform.table import PROVIDERS, fp8_activation, laid_out, provider_order


@pytest.fixture
def some_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    have = {
        "norm": ("reference", "triton", "hip"),
        "experts": ("reference", "aiter", "triton"),
        "plain": ("reference",),
    }
    monkeypatch.setattr(table, "PROVIDERS", have)


@pytest.mark.parametrize(
    ("op", "arch", "order"),
    [
        ("norm", "gfx942", ("hip", "triton", "reference")),
        ("experts", "gfx950", ("aiter", "triton", "reference")),
        ("experts", "gfx1201", ("aiter", "triton", "reference")),
        ("experts", "sm_90", ("triton", "reference")),
        ("norm", "sm_120", ("triton", "reference")),
        ("plain", "sm_90", ("reference",)),
        ("norm", "cpu", ("reference",)),
        ("norm", "x86_64", ("reference",)),
    ],
)
@pytest.mark.usefixtures("some_providers")
def test_a_family_has_one_order_and_an_op_takes_of_it_what_it_has(op: str, arch: str, order: tuple[str, ...]) -> None:
    assert provider_order(op, arch) == order


@pytest.mark.usefixtures("some_providers")
def test_one_gpu_of_a_family_and_one_op_may_have_an_order_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"gfx942": {"experts": ("triton", "aiter"), "*": ("hip", "reference")}}
    monkeypatch.setattr(table, "PROVIDER_ORDER", {**table.PROVIDER_ORDER, **own})
    assert provider_order("experts", "gfx942") == ("triton", "aiter")
    assert provider_order("norm", "gfx942") == ("hip", "reference")
    assert provider_order("experts", "gfx950") == ("aiter", "triton", "reference")


@pytest.mark.parametrize("arch", ["cpu", "gfx942", "gfx950", "sm_90", "sm_120", "riscv"])
@pytest.mark.parametrize("op", PROVIDERS)
def test_every_order_ends_with_the_reference(op: str, arch: str) -> None:
    order = provider_order(op, arch)
    assert order[-1] == "reference"
    assert len(set(order)) == len(order)


def test_weights_are_laid_out_where_a_provider_that_does_so_is_tried_first() -> None:
    assert laid_out("gfx942", {}) == laid_out("gfx950", {"rms_norm": "hip"}) == {"fp8_linear", "moe_experts"}
    assert laid_out("sm_90", {}) == laid_out("cpu", {}) == set()
    assert laid_out("gfx942", {"moe_experts": "triton"}) == {"fp8_linear"}
    assert laid_out("gfx942", {"moe_experts": "triton", "fp8_linear": "triton"}) == set()
    assert laid_out("gfx942", {"moe_experts": "triton", "fp8_linear": "triton", "layers.3.moe_experts": "aiter"}) == {
        "moe_experts"
    }


def test_only_the_cpu_takes_rows_as_they_are() -> None:
    assert fp8_activation("cpu") == "bf16"
    assert {fp8_activation(arch) for arch in ("gfx942", "gfx950", "sm_90")} == {"fp8_1x128"}
