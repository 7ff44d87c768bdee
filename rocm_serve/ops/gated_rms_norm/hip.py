"""The norm at the output of Gated DeltaNet by kernels_hip. Letters: T rows, H value heads, D value head size."""

from __future__ import annotations

import torch

from rocm_serve.ops.contract import OpFunction
from rocm_serve.ops.hip_library import Library, aligned, check

MAX_WIDTH = 512
_ACTIVATIONS = {"silu": 0, "sigmoid": 1}


def make_gated_rms_norm(library: Library) -> OpFunction:
    """Return the op's function."""
    launch = library.entry("rs_gated_rms_norm")

    def gated_rms_norm(
        x_THD: torch.Tensor, gate_THD: torch.Tensor, weight_D: torch.Tensor, *, eps: float, activation: str
    ) -> torch.Tensor:
        """Shapes: x, gate [T, H, D] bfloat16, weight [D] bfloat16 or float32 -> [T, H, D]."""
        width = check("gated_rms_norm", x_THD, MAX_WIDTH)
        check("gated_rms_norm", gate_THD, MAX_WIDTH)
        if activation not in _ACTIVATIONS:
            raise ValueError(f"gated_rms_norm knows the activations silu and sigmoid, not {activation!r}")
        if weight_D.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"gated_rms_norm by hip takes a weight of bfloat16 or float32, not {weight_D.dtype}")
        x, gate, weight = aligned(x_THD), aligned(gate_THD), aligned(weight_D)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        tokens, heads, _ = x.shape
        (x_stride, x_head, _), (gate_stride, gate_head, _) = x.stride(), gate.stride()
        strides = (x_stride, x_head, gate_stride, gate_head)
        flags = (weight.dtype == torch.float32, _ACTIVATIONS[activation])
        launch(x, gate, weight, y, tokens, heads, *strides, width, eps, *flags)
        return y

    return gated_rms_norm
