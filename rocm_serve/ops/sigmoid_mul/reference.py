"""An output gate. Letters: T rows, H width, or heads of D."""

from __future__ import annotations

import torch

from rocm_serve.ops.rows import fresh_float, steady_


def sigmoid_mul(x_TH: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate).

    Shapes: x [T, H], gate [T, H], or [T, 1] for one gate a row -> [T, H]; or x, gate [T, H, D] -> [T, H, D].
    The result has the dtype of x.
    Numerics: fp32 inside, one rounding.
    """
    return (x_TH.float() * steady_(torch.sigmoid_, fresh_float(gate))).to(x_TH.dtype)
