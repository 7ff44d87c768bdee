"""A shared expert from its gate and up on, and the sum with the routed ones. Letters: T rows, I its width, H width."""

from __future__ import annotations

import torch

from rocm_serve.ops.linear.reference import linear
from rocm_serve.ops.sigmoid_mul.reference import sigmoid_mul
from rocm_serve.ops.silu_mul.reference import silu_mul


def shared_down_add(
    routed_TH: torch.Tensor, gate_up_TI: torch.Tensor, gate_T1: torch.Tensor, weight_HI: torch.Tensor
) -> torch.Tensor:
    """Return routed + linear(silu(gate) * up, weight) * sigmoid(gate of the row).

    Shapes: routed [T, H], gate_up [T, 2 I] (gate, then up), gate [T, 1], weight [H, I] -> [T, H], dtype of routed.
    T is at most SHARED_ROWS of ops/tiles_linear.py.
    Numerics: each of `silu_mul`, `linear`, `sigmoid_mul` and the sum rounds once.
    Source: Qwen3_5MoeSparseMoeBlock.
    """
    return routed_TH + sigmoid_mul(linear(silu_mul(gate_up_TI), weight_HI), gate_T1)
