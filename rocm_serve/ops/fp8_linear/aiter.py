"""The matrix product with a block-FP8 weight by AITER. Letters: T rows, K inner, N outer.

The weight is shuffled at load. Scales of the rows lie column by column ([K / 128, T] in memory) behind a tensor of
shape [T, K / 128], as AITER's own quantisation writes them: in row order they give wrong numbers and no error.
"""

from __future__ import annotations

import aiter
import torch
from aiter.ops.gemm_op_a8w8 import gemm_a8w8_blockscale_bpreshuffle
from aiter.ops.quant import per_group_quant_hip
from aiter.ops.shuffle import shuffle_weight

from rocm_serve.ops.contract import WeightTensors
from rocm_serve.ops.fp8 import BLOCK


def prepare_weights(weights: WeightTensors) -> WeightTensors:
    """Shuffle the weight; its scales stay as they are, in fp32."""
    assert weights["scale"].dtype == torch.float32, f"block scales are float32, not {weights['scale'].dtype}"
    return {"weight_NK": shuffle_weight(x=weights["weight_NK"], layout=(16, 16)), "scale": weights["scale"].clone()}


def fp8_linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, scale: torch.Tensor, *, activation: str) -> torch.Tensor:
    """Multiply rows, quantised per 128 columns, with an FP8 weight; see the reference.

    Errors: ValueError for an activation other than "fp8_1x128".
    """
    if activation != "fp8_1x128":
        raise ValueError(f"fp8_linear by aiter knows the activation fp8_1x128, not {activation!r}")
    assert weight_NK.dtype == aiter.dtypes.fp8, f"AITER reads {aiter.dtypes.fp8} here, the weight is {weight_NK.dtype}"
    if not x_TK.shape[0]:
        return x_TK.new_empty(0, weight_NK.shape[0])
    q_TK, scale_TB = per_group_quant_hip(
        x=x_TK.contiguous(), quant_dtype=aiter.dtypes.fp8, group_size=BLOCK, transpose_scale=True
    )
    return gemm_a8w8_blockscale_bpreshuffle(XQ=q_TK, WQ=weight_NK, x_scale=scale_TB, w_scale=scale, dtype=x_TK.dtype)
