"""What a shared expert adds to the routed ones. Letters: T rows, H width."""

from __future__ import annotations

import torch

from rocm_serve.ops.linear.reference import linear
from rocm_serve.ops.sigmoid_mul.reference import sigmoid_mul


def shared_expert_add(
    routed_TH: torch.Tensor, shared_TH: torch.Tensor, x_TH: torch.Tensor, gate_weight_1H: torch.Tensor
) -> torch.Tensor:
    """Return routed + shared * sigmoid(x . gate_weight), one gate a row.

    Shapes: routed, shared and x [T, H], gate_weight [1, H] -> [T, H], dtype of x.
    Numerics: each of `linear`, `sigmoid_mul` and the sum rounds once.
    Source: Qwen3_5MoeSparseMoeBlock.
    """
    return routed_TH + sigmoid_mul(shared_TH, linear(x_TH, gate_weight_1H))
