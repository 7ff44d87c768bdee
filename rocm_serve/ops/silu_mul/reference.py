"""The activation of a gated MLP. Letters: T rows, I width of the MLP."""

from __future__ import annotations

import torch

from rocm_serve.ops.rows import fresh_float, silu_, steady_


def silu_mul(gate_up_TI: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half of each row.

    Shapes: [T, 2 I] (gate, then up) -> [T, I], same dtype. Numerics: fp32 inside, one rounding.
    """
    gate_TI, up_TI = gate_up_TI.chunk(2, dim=-1)
    return steady_(silu_, fresh_float(gate_TI)).mul_(up_TI).to(gate_up_TI.dtype)
