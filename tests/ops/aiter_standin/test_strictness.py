"""The stand-in itself: what AITER would answer with wrong numbers, it refuses. A lax one would prove nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ops.aiter_standin.checks import ActivationType, QuantType, StandinError
from tests.ops.aiter_standin.conftest import Install

BF16 = torch.bfloat16
Change = Callable[[dict[str, Any]], dict[str, Any]]


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(BF16)


def norm() -> dict[str, Any]:
    x, weight = bf16(3, 64), bf16(64)
    return {"out": torch.empty_like(x), "input": x, "weight": weight, "epsilon": 1e-6, "gemma_norm": True}


def add_norm() -> dict[str, Any]:
    one = norm()
    return one | {"residual_in": bf16(3, 64), "residual_out": bf16(3, 64)}


def experts() -> dict[str, Any]:
    shuffle = importlib.import_module("aiter.ops.shuffle").shuffle_weight
    return {
        "hidden_states": bf16(2, 64),
        "w1": shuffle(x=bf16(3, 64, 64), layout=(16, 16)),
        "w2": shuffle(x=bf16(3, 64, 32), layout=(16, 16)),
        "topk_weight": torch.rand(2, 2),
        "topk_ids": torch.tensor([[0, 3], [2, 3]], dtype=torch.int32),
        "expert_mask": torch.tensor([1, 1, 1, 0], dtype=torch.int32),
        "activation": ActivationType.Silu,
        "quant_type": QuantType.No,
    }


def sent_experts() -> dict[str, Any]:
    """Rows that are FP8 already."""
    fp8, shuffle = torch.float8_e4m3fn, importlib.import_module("aiter.ops.shuffle").shuffle_weight
    return experts() | {
        "hidden_states": torch.randn(2, 256).to(fp8),
        "w1": shuffle(x=torch.randn(3, 256, 256).to(fp8), layout=(16, 16)),
        "w2": shuffle(x=torch.randn(3, 256, 128).to(fp8), layout=(16, 16)),
        "quant_type": QuantType.per_1x128,
        "w1_scale": torch.rand(3, 2, 2),
        "w2_scale": torch.rand(3, 2, 1),
        "a1_scale": torch.rand(2, 2),
        "dtype": BF16,
    }


def gemm() -> dict[str, Any]:
    weight = torch.randn(128, 256).to(torch.float8_e4m3fn)
    codes, scales = importlib.import_module("aiter.ops.quant").per_group_quant_hip(
        x=bf16(5, 256), quant_dtype=torch.float8_e4m3fn, group_size=128, transpose_scale=True
    )
    return {
        "XQ": codes,
        "WQ": importlib.import_module("aiter.ops.shuffle").shuffle_weight(x=weight, layout=(16, 16)),
        "x_scale": scales,
        "w_scale": torch.rand(1, 2),
    }


FUNCTIONS = {
    "rmsnorm": ("aiter.ops.rmsnorm", norm),
    "add_rmsnorm": ("aiter.ops.rmsnorm", add_norm),
    "fused_moe": ("aiter.fused_moe", experts),
    "fused_moe of FP8 rows": ("aiter.fused_moe", sent_experts),
    "gemm_a8w8_blockscale_bpreshuffle": ("aiter.ops.gemm_op_a8w8", gemm),
}
FAULTS: list[tuple[str, str, Change]] = [
    ("rmsnorm", "wants torch.bfloat16", lambda a: {"weight": a["weight"].float()}),
    ("rmsnorm", "strides", lambda a: {"input": bf16(3, 128)[:, ::2]}),
    ("rmsnorm", "empty", lambda a: {"input": bf16(0, 64), "out": bf16(0, 64)}),
    ("rmsnorm", "wider than 8192", lambda a: {k: bf16(1, 8200) for k in ("input", "out")} | {"weight": bf16(8200)}),
    ("add_rmsnorm", "lies upon", lambda a: {"residual_out": a["residual_in"]}),
    ("fused_moe", "out of bounds", lambda a: {"topk_ids": a["topk_ids"] - 1}),
    ("fused_moe", "last choice", lambda a: {"topk_ids": a["topk_ids"].flip(1).contiguous()}),
    ("fused_moe", "no mask of the experts", lambda a: {"expert_mask": torch.arange(4, dtype=torch.int32)}),
    (
        "fused_moe",  # an expert map, -1 for what is elsewhere, in a mask's place
        "no mask of the experts",
        lambda a: {"expert_mask": torch.tensor([0, 1, 2, -1], dtype=torch.int32)},
    ),
    ("fused_moe", "is_shuffled", lambda a: {"w1": a["w1"].clone()}),
    ("fused_moe", "is_shuffled", lambda a: {"w2": a["w2"].view(a["w2"].shape)}),
    ("fused_moe", "wants torch.int32", lambda a: {"topk_ids": a["topk_ids"].long()}),
    ("fused_moe", "wants torch.float32", lambda a: {"topk_weight": a["topk_weight"].to(BF16)}),
    ("fused_moe", "nothing that our adapters pass", lambda a: {"doweight_stage1": True}),
    ("fused_moe of FP8 rows", "hidden_states is torch.float8", lambda a: {"a1_scale": None}),
    ("fused_moe of FP8 rows", "wants torch.float8", lambda a: {"hidden_states": bf16(2, 256)}),
    ("fused_moe of FP8 rows", "the output is torch.float8", lambda a: {"dtype": None}),
    ("fused_moe of FP8 rows", "strides", lambda a: {"a1_scale": torch.rand(2, 2).T}),
    ("fused_moe of FP8 rows", "a1_scale is torch.bfloat16", lambda a: {"a1_scale": a["a1_scale"].to(BF16)}),
    (
        "fused_moe of FP8 rows",
        "turned around by num_local_tokens",
        lambda a: {"num_local_tokens": torch.ones(1, dtype=torch.int32)},
    ),
    ("gemm_a8w8_blockscale_bpreshuffle", "is_shuffled", lambda a: {"WQ": a["WQ"].clone()}),
    ("gemm_a8w8_blockscale_bpreshuffle", "w_scale", lambda a: {"w_scale": a["w_scale"].to(BF16)}),
    ("gemm_a8w8_blockscale_bpreshuffle", "strides", lambda a: {"x_scale": torch.rand(2, 5).T}),
]


def call(name: str, change: Change) -> Any:
    module, made = FUNCTIONS[name]
    arguments = made()
    return getattr(importlib.import_module(module), name.partition(" ")[0])(**(arguments | change(arguments)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_right_call_is_answered(install: Install, name: str) -> None:
    install("v0.1.17")
    call(name, lambda arguments: {})


@pytest.mark.parametrize(("name", "words", "change"), FAULTS, ids=[f"{n}: {w}" for n, w, _ in FAULTS])
def test_a_call_that_aiter_would_read_wrongly_is_refused(
    install: Install, name: str, words: str, change: Change
) -> None:
    install("v0.1.17")
    with pytest.raises(StandinError, match=words):
        call(name, change)


def test_arguments_by_position_are_refused(install: Install) -> None:
    install("v0.1.17")
    with pytest.raises(StandinError, match="by position"):
        importlib.import_module("aiter.ops.rmsnorm").rmsnorm(*norm().values())


def test_a_name_that_the_release_does_not_have_is_refused(install: Install) -> None:
    install("v0.1.16.post6")
    with pytest.raises(TypeError, match="gemma_norm"):
        call("rmsnorm", lambda arguments: {})


def test_scales_in_row_order_give_other_numbers_and_no_error(install: Install) -> None:
    install("v0.1.17")
    name = "gemm_a8w8_blockscale_bpreshuffle"
    torch.manual_seed(7)
    made = gemm()
    function = getattr(importlib.import_module("aiter.ops.gemm_op_a8w8"), name)
    right = function(**made).float()
    by_rows = made["x_scale"].view(2, 5).T.contiguous() * torch.arange(1, 6)[:, None]
    by_columns = by_rows.T.contiguous().view(5, 2)
    assert not torch.equal(function(**(made | {"x_scale": by_rows})), function(**(made | {"x_scale": by_columns})))
    assert torch.allclose(
        function(**(made | {"x_scale": by_columns})).float(), right * torch.arange(1, 6)[:, None], 2e-2
    )


def test_a_shuffled_weight_comes_back_and_moves_in_between() -> None:
    from tests.ops.aiter_standin.matrices import shuffled, unshuffled

    for dtype, columns in ((BF16, 96), (torch.float8_e4m3fn, 128)):
        x = torch.randn(2, 48, columns).to(dtype)
        assert torch.equal(unshuffled(shuffled(x)).view(torch.uint8), x.view(torch.uint8))
        assert not torch.equal(shuffled(x).view(torch.uint8), x.view(torch.uint8))
        # the first 16 rows' first pack of 16 bytes lie one after the other
        pack = 16 // x.element_size()
        assert torch.equal(
            shuffled(x)[0].view(-1)[: 16 * pack].view(torch.uint8), x[0, :16, :pack].reshape(-1).view(torch.uint8)
        )
