"""The routed experts of an MoE layer. Letters: T rows, H width, I expert width, E experts, k choices a row, n rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from rocm_serve.ops.fp8 import dequantise, multiply_1x128, multiply_quantised, widened
from rocm_serve.ops.rows import fresh_float, pad_rows, silu_, steady_

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # rows, FP8 weight, scale


def moe_experts(
    x_TH: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    num_rows: int | torch.Tensor,
    w13_EIH: torch.Tensor,
    w2_EHI: torch.Tensor,
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    *,
    activation: str,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Run each row through its chosen experts and sum what they return, weighted.

    Shapes: x [T, H], ids int [T, k] (negative: no expert, held elsewhere), weights fp32 [T, k], w13 [E, 2 I, H]
    (gate rows, then up rows), w2 [E, H, I] -> [T, H], `out_dtype` or the dtype of x. FP8 weights come with fp32 scales
    [E, 2 I / 128, H / 128] and [E, H / 128, I / 128]. Rows from `num_rows` on are padding and come out as zeros.
    With `x_scale` [T, H / 128] the rows are those of `quantise_rows` already, in the dtype of the weights, and the
    result has the bits that it has for the rows before.
    Errors: ValueError for an activation other than "bf16" and "fp8_1x128", for quantised rows without "fp8_1x128", FP8
    weights and an `out_dtype`.
    Numerics: fp32 inside, one rounding; sums run in the order of the k choices, so a row's bits depend on that row
    alone. "fp8_1x128" quantises the rows before both products; it needs FP8 weights, plain ones ignore it.
    Source: sum_j w_j * W2[e_j] (silu(Wgate[e_j] x) * (Wup[e_j] x)).
    """
    if activation not in ("bf16", "fp8_1x128"):
        raise ValueError(f"moe_experts knows the activations bf16 and fp8_1x128, not {activation!r}")
    check_quantised(x_scale, w13_scale, activation, out_dtype)
    multiply = multiply_1x128 if activation == "fp8_1x128" else _dequantised
    return experts(
        x_TH,
        ids_Tk,
        weights_Tk,
        num_rows,
        w13_EIH,
        w2_EHI,
        w13_scale,
        w2_scale,
        x_scale,
        multiply=multiply,
        out_dtype=out_dtype,
    )


def check_quantised(
    x_scale: torch.Tensor | None, w13_scale: torch.Tensor | None, activation: str, out_dtype: torch.dtype | None
) -> None:
    """Errors: ValueError for quantised rows with arguments that do not go with them."""
    if x_scale is not None and (w13_scale is None or activation != "fp8_1x128" or out_dtype is None):
        raise ValueError(
            "moe_experts takes rows with x_scale for FP8 weights, the activation fp8_1x128 and an out_dtype"
        )


def experts(
    x_TH: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    num_rows: int | torch.Tensor,
    w13_EIH: torch.Tensor,
    w2_EHI: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2_scale: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    *,
    multiply: Multiply,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Compute `moe_experts` with `multiply` for the products of unquantised rows with FP8 weights."""
    live, top_k = int(num_rows), ids_Tk.shape[1]
    x = widened(x_TH[:live])  # exact for FP8 values
    per_choice = torch.zeros(live * top_k, x_TH.shape[1], dtype=torch.float32, device=x_TH.device)
    for expert, picks_n in _groups(ids_Tk[:live]):
        rows_n = picks_n // top_k
        x_nH = pad_rows(x[rows_n])
        if x_scale is None:
            h_nI = _product(x_nH, w13_EIH, w13_scale, expert, multiply)
        else:
            assert w13_scale is not None
            h_nI = multiply_quantised(x_nH, pad_rows(x_scale[rows_n]), w13_EIH[expert], w13_scale[expert])
        gate, up = h_nI.chunk(2, dim=-1)
        y_nH = _product(steady_(silu_, fresh_float(gate)).mul_(up), w2_EHI, w2_scale, expert, multiply)
        per_choice[picks_n] = y_nH[: len(picks_n)]
    per_choice = per_choice.view(live, top_k, x_TH.shape[1]) * weights_Tk[:live, :, None]
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    for j in range(top_k):
        out_TH[:live] += per_choice[:, j]
    return out_TH.to(out_dtype or x_TH.dtype)


def _groups(ids_nk: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """List (expert, flat indices of the choices that name it), experts ascending, choices in row order."""
    flat = ids_nk.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
    pieces = order.split(counts.tolist())
    return [(e, piece) for e, piece in zip(experts.tolist(), pieces, strict=True) if e >= 0]


def _product(
    x_nK: torch.Tensor, w_ENK: torch.Tensor, scale: torch.Tensor | None, expert: int, multiply: Multiply
) -> torch.Tensor:
    if scale is None:
        return F.linear(x_nK, w_ENK[expert].float())
    return multiply(x_nK, w_ENK[expert], scale[expert])


def _dequantised(x_nK: torch.Tensor, w_NK: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.linear(x_nK, dequantise(w_NK, scale))
