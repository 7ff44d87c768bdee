"""Products with rows quantised to the whole range of FP8: the reference in fn, another quantisation in fnuz."""

from __future__ import annotations

import pytest
import torch

from rocm_serve.ops.bind import OPS
from rocm_serve.ops.contract import Arguments
from rocm_serve.ops.fp8 import dequantise
from rocm_serve.ops.inputs import in_fnuz
from tests.ops.test_references import arguments, error

CASES = {"fp8_linear": "odd rows, fp8_1x128", "moe_experts": "fp8 weights and rows"}


def both(name: str, made: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    semantics = OPS[name].providers["aiter"].semantics
    assert semantics is not None
    return semantics(**made), OPS[name].reference(**made)


@pytest.mark.parametrize("name", CASES)
def test_in_fn_it_is_the_reference_to_the_bit(name: str) -> None:
    whole, reference = both(name, arguments(OPS[name], CASES[name], torch.bfloat16))
    assert torch.equal(whole, reference)


@pytest.mark.parametrize("name", CASES)
def test_in_fnuz_it_is_as_near_to_the_unquantised_product_and_far_from_the_reference(name: str) -> None:
    made = in_fnuz(arguments(OPS[name], CASES[name], torch.float32))
    whole, reference = both(name, made)
    exact = OPS[name].reference(**(made | {"activation": "bf16"})).double()
    assert 0.01 < error(whole, reference.double()) < 0.1
    assert 0.8 < error(whole, exact) / error(reference, exact) < 1.25


def test_a_row_is_quantised_to_240_in_fnuz() -> None:
    """One block whose largest value is 240 times a power of two: whole numbers that e4m3fnuz has come back exactly."""
    codes = torch.tensor([240.0, -224, 15, 7, 1, 0.5, -0.125, 0] * 16)
    weight = torch.eye(128).to(torch.float8_e4m3fnuz)
    made: Arguments = {"x_TK": codes[None] * 2**-6, "weight_NK": weight, "scale": torch.ones(1, 1)}
    whole, reference = both("fp8_linear", made | {"activation": "fp8_1x128"})
    assert torch.equal(whole, codes[None] * 2**-6 @ dequantise(weight, torch.ones(1, 1)).T)
    assert not torch.equal(reference, whole)


@pytest.mark.parametrize("name", CASES)
def test_rows_as_they_are_are_refused(name: str) -> None:
    made = arguments(OPS[name], CASES[name], torch.float32) | {"activation": "bf16"}
    semantics = OPS[name].providers["aiter"].semantics
    assert semantics is not None
    with pytest.raises(ValueError, match="by aiter knows the activation fp8_1x128"):
        semantics(**made)
