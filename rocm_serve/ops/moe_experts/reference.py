"""The routed experts of an MoE layer. Letters: T rows, H width, I expert width, E experts, k choices a row, n rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rocm_serve.ops.fp8 import dequantise, multiply_1x128
from rocm_serve.ops.rows import fresh_float, pad_rows, silu_, steady_


def moe_experts(
    x_TH: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    num_rows: int | torch.Tensor,
    w13_EIH: torch.Tensor,
    w2_EHI: torch.Tensor,
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    *,
    activation: str,
) -> torch.Tensor:
    """Run each row through its chosen experts and sum what they return, weighted.

    Shapes: x [T, H], ids int [T, k] (negative: no expert, held elsewhere), weights fp32 [T, k], w13 [E, 2 I, H]
    (gate rows, then up rows), w2 [E, H, I] -> [T, H], dtype of x. FP8 weights come with fp32 scales
    [E, 2 I / 128, H / 128] and [E, H / 128, I / 128]. Rows from `num_rows` on are padding and come out as zeros.
    Errors: ValueError for an activation other than "bf16" and "fp8_1x128".
    Numerics: fp32 inside, one rounding; sums run in the order of the k choices, so a row's bits depend on that row
    alone. "fp8_1x128" quantises the rows before both products; it needs FP8 weights, plain ones ignore it.
    Source: sum_j w_j * W2[e_j] (silu(Wgate[e_j] x) * (Wup[e_j] x)).
    """
    if activation not in ("bf16", "fp8_1x128"):
        raise ValueError(f"moe_experts knows the activations bf16 and fp8_1x128, not {activation!r}")
    live, top_k = int(num_rows), ids_Tk.shape[1]
    x = x_TH[:live].float()
    per_choice = torch.zeros(live * top_k, x_TH.shape[1], dtype=torch.float32, device=x_TH.device)
    for expert, picks_n in _groups(ids_Tk[:live]):
        x_nH = pad_rows(x[picks_n // top_k])
        h_nI = _product(x_nH, w13_EIH, w13_scale, expert, activation)
        gate, up = h_nI.chunk(2, dim=-1)
        y_nH = _product(steady_(silu_, fresh_float(gate)).mul_(up), w2_EHI, w2_scale, expert, activation)
        per_choice[picks_n] = y_nH[: len(picks_n)]
    per_choice = per_choice.view(live, top_k, x_TH.shape[1]) * weights_Tk[:live, :, None]
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    for j in range(top_k):
        out_TH[:live] += per_choice[:, j]
    return out_TH.to(x_TH.dtype)


def _groups(ids_nk: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """List (expert, flat indices of the choices that name it), experts ascending, choices in row order."""
    flat = ids_nk.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
    pieces = order.split(counts.tolist())
    return [(e, piece) for e, piece in zip(experts.tolist(), pieces, strict=True) if e >= 0]


def _product(
    x_nK: torch.Tensor, w_ENK: torch.Tensor, scale: torch.Tensor | None, expert: int, activation: str
) -> torch.Tensor:
    if scale is None:
        return F.linear(x_nK, w_ENK[expert].float())
    if activation == "bf16":
        return F.linear(x_nK, dequantise(w_ENK[expert], scale[expert]))
    return multiply_1x128(x_nK, w_ENK[expert], scale[expert])
