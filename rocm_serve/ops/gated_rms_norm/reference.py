"""The norm at the output of Gated DeltaNet. Letters: T rows, H value heads, D value head size."""

from __future__ import annotations

import torch

from rocm_serve.ops.rows import fresh_float, silu_, steady_


def gated_rms_norm(
    x_THD: torch.Tensor, gate_THD: torch.Tensor, weight_D: torch.Tensor, *, eps: float, activation: str
) -> torch.Tensor:
    """Normalise each head, scale it, then gate it.

    Shapes: x, gate [T, H, D], weight [D] (used as it is, not 1 + w) -> [T, H, D], dtype of the gate.
    Errors: ValueError for an activation other than "silu" and "sigmoid".
    Numerics: fp32 inside, one rounding.
    Source: norm first, gate second: Qwen3_5MoeRMSNormGated with norm_before_gate.
    """
    functions = {"silu": silu_, "sigmoid": torch.sigmoid_}
    if activation not in functions:
        raise ValueError(f"gated_rms_norm knows the activations silu and sigmoid, not {activation!r}")
    x = x_THD.float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_D.float()
    return (normed * steady_(functions[activation], fresh_float(gate_THD))).to(gate_THD.dtype)
