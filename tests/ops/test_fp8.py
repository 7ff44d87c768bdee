"""Block FP8: what a row or a weight becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rocm_serve.ops.bind import OPS
from rocm_serve.ops.contract import Arguments
from rocm_serve.ops.fp8 import dequantise, fp8_max, quantise_rows, widened
from rocm_serve.ops.inputs import in_fnuz
from rocm_serve.ops.moe_experts.cases import experts_case

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


@pytest.mark.parametrize(("dtype", "top"), [(FN, 448.0), (FNUZ, 224.0)])
def test_the_largest_value_of_a_block_becomes_the_largest_code(dtype: torch.dtype, top: float) -> None:
    x = torch.randn(9, 300, generator=torch.Generator().manual_seed(0)) * 50
    values, scales = quantise_rows(x, dtype)
    assert values.shape == (9, 300) and scales.shape == (9, 3)
    for at, block in enumerate(values.float().split(128, dim=1)):
        assert torch.equal(block.abs().amax(1), torch.full((9,), top))
        back = block * scales[:, at, None]
        assert (back - x[:, at * 128 : at * 128 + 128]).abs().max() <= x.abs().max() * 2**-4
    assert fp8_max(dtype) == top


@pytest.mark.parametrize("dtype", [FN, FNUZ])
@pytest.mark.parametrize("without_nan", [False, True])
def test_every_code_is_widened_as_torch_does_it(dtype: torch.dtype, without_nan: bool) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    if without_nan:
        codes = codes[~codes.view(dtype).float().isnan()]
    x = codes.view(dtype)
    assert torch.equal(widened(x).view(torch.int32), x.float().view(torch.int32))
    assert widened(x[:0]).shape == (0,) and widened(codes.expand(3, -1)[:, ::2].view(dtype)).dtype is torch.float32


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_one_nan_of_either_sign_is_kept(code: int) -> None:
    x = torch.tensor([0x38, code, 0x80], dtype=torch.uint8).view(FN)
    assert widened(x).isnan().tolist() == [False, True, False]


class ByReciprocals(TorchDispatchMode):
    """Division by a Python number as torch does it on GPUs: by multiplying with the rounded reciprocal."""

    def __torch_dispatch__(self, f: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if f is torch.ops.aten.div.Tensor and isinstance(args[1], float):
            return args[0] * (1.0 / torch.tensor(args[1]))
        return f(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [FN, FNUZ])
def test_a_gpu_finds_the_same_multipliers_and_codes(dtype: torch.dtype) -> None:
    """The kernels divide as IEEE 754 has it, and are judged by the reference on the GPU."""
    x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    with ByReciprocals():
        assert not torch.equal(x.float() / 448.0, x.float() / torch.full((1,), 448.0)), "the mode does nothing"
        values, scales = quantise_rows(x, dtype)
    expected_values, expected_scales = quantise_rows(x, dtype)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))


def test_a_row_of_zeros_stays_zero_and_has_a_scale() -> None:
    values, scales = quantise_rows(torch.zeros(2, 256), FN)
    assert values.float().abs().max() == 0
    assert (scales > 0).all()


@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (1, 1)])
def test_every_weight_is_multiplied_by_the_scale_of_its_block(shape: tuple[int, int]) -> None:
    n, k = shape
    g = torch.Generator().manual_seed(1)
    w = torch.randn(n, k, generator=g).to(FN)
    scale = torch.rand(-(-n // 128), -(-k // 128), generator=g)
    wide = dequantise(w, scale)
    for i, j in ((0, 0), (n - 1, k - 1), (n // 2, k // 3)):
        assert wide[i, j] == w[i, j].float() * scale[i // 128, j // 128]


@pytest.mark.parametrize("dialect", [FN, FNUZ], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_give_the_same_bits_to_rows_quantised_before_they_are_sent(
    dtype: torch.dtype, dialect: torch.dtype
) -> None:
    op = OPS["moe_experts"]
    sizes = {"h": 384, "i": 256, "e": 5, "k": 3, "fp8": True, "activation": "fp8_1x128", "elsewhere": True}
    for t, live in ((1, 1), (45, 45), (45, 40), (3, 0), (0, 0)):
        made = experts_case(torch.Generator().manual_seed(t + live), dtype, t=t, live=live, **sizes)  # type: ignore[arg-type]
        made = in_fnuz(made) if dialect is FNUZ else made
        x = made["x_TH"]
        assert isinstance(x, torch.Tensor)
        if t > 2:
            x[1] = 0
        rows, scales = quantise_rows(x, dialect)
        sent = op.reference(**(made | {"x_TH": rows, "x_scale": scales, "out_dtype": dtype}))
        assert sent.dtype == dtype
        assert torch.equal(sent, op.reference(**made))


@pytest.mark.parametrize(
    "change", [{"activation": "bf16"}, {"out_dtype": None}, {"w13_scale": None, "w2_scale": None}], ids=str
)
def test_quantised_rows_are_refused_where_the_rest_does_not_go_with_them(change: Arguments) -> None:
    made = OPS["moe_experts"].cases["rows sent as fp8"](torch.Generator().manual_seed(1), torch.float32)
    with pytest.raises(ValueError, match="takes rows with x_scale for FP8 weights, the activation fp8_1x128 and an"):
        OPS["moe_experts"].reference(**(made | change))
