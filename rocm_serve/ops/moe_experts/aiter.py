"""The routed experts by AITER's fused MoE. Letters: T rows, H width, I expert width, E experts here, k choices a row.

What AITER is kept from: choices of no expert (it follows a negative id out of bounds), no rows, weights that are not
shuffled or lost the mark that says so (it would multiply the shuffled bytes as plain ones), a count of rows beside rows
that are quantised already (its one-stage kernel reads their scales column by column, as many rows apart as the buffer
has, and AITER turns them around as many apart as are counted): dead rows are kept out by the masked expert alone then.
"""

from __future__ import annotations

from functools import lru_cache

import aiter
import torch
import torch.nn.functional as F
from aiter import ActivationType, QuantType
from aiter.fused_moe import fused_moe
from aiter.ops.shuffle import shuffle_weight

from rocm_serve.ops.contract import WeightTensors
from rocm_serve.ops.moe_experts.reference import check_quantised


def prepare_weights(weights: WeightTensors) -> WeightTensors:
    """Shuffle both weights; scales stay as they are, in fp32. AITER's mark is set on the tensors returned."""
    ready = {name: weight.clone() for name, weight in weights.items() if name.endswith("_scale")}
    for name, scale in ready.items():
        assert scale.dtype == torch.float32, f"{name} is float32, not {scale.dtype}"
    for name in ("w13_EIH", "w2_EHI"):
        ready[name] = shuffle_weight(x=weights[name], layout=(16, 16))
        ready[name].is_shuffled = True  # type: ignore[attr-defined]
    return ready


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
    """Run each row through its chosen experts and sum what they return, weighted; see the reference.

    Errors: ValueError for FP8 weights with an activation other than "fp8_1x128"; as the reference for `x_scale`.
    """
    if w13_scale is not None and activation != "fp8_1x128":
        raise ValueError(f"moe_experts by aiter knows the activation fp8_1x128 for FP8 weights, not {activation!r}")
    check_quantised(x_scale, w13_scale, activation, out_dtype)
    out_dtype = out_dtype or x_TH.dtype
    for weight in (w13_EIH, w2_EHI):
        assert getattr(weight, "is_shuffled", False), "AITER's mark of a shuffled weight is not on the tensor passed"
    experts, all_TH = w13_EIH.shape[0], x_TH
    count = None
    if isinstance(num_rows, int):  # known on the host: rows of padding are not even passed
        x_TH, ids_Tk, weights_Tk = x_TH[:num_rows], ids_Tk[:num_rows], weights_Tk[:num_rows]
        x_scale = None if x_scale is None else x_scale[:num_rows]
    else:
        count = num_rows.to(device=x_TH.device, dtype=torch.int32).reshape(1)
    if not x_TH.shape[0]:
        return torch.zeros_like(all_TH, dtype=out_dtype)
    live_T1 = None if count is None else (torch.arange(x_TH.shape[0], device=x_TH.device) < count)[:, None]
    y_TH = fused_moe(
        hidden_states=x_TH.contiguous(),
        w1=w13_EIH,
        w2=w2_EHI,
        topk_weight=F.pad(weights_Tk.float(), (0, 1)),
        topk_ids=_ids(ids_Tk, experts, live_T1),
        expert_mask=_mask(experts, x_TH.device),
        activation=ActivationType.Silu,
        quant_type=QuantType.No if w13_scale is None else QuantType.per_1x128,
        w1_scale=_checked(w13_EIH, w13_scale),
        w2_scale=_checked(w2_EHI, w2_scale),
        a1_scale=None if x_scale is None else _checked(x_TH, x_scale.contiguous(), "row"),
        num_local_tokens=count if x_scale is None else None,
        dtype=out_dtype,
    )
    if live_T1 is not None:
        y_TH = torch.where(live_T1, y_TH, 0)  # AITER leaves rows past the count as they were in memory
    padding = all_TH.shape[0] - y_TH.shape[0]
    return F.pad(y_TH, (0, 0, 0, padding)) if padding else y_TH


def _ids(ids_Tk: torch.Tensor, experts: int, live_T1: torch.Tensor | None) -> torch.Tensor:
    """Return int32 [T, k + 1]: choices held elsewhere, and all of a dead row, name the masked expert E.

    So does the last column: AITER looks for a tuned kernel under one choice less when it is given a mask.
    """
    elsewhere = ids_Tk < 0 if live_T1 is None else (ids_Tk < 0) | ~live_T1
    ids = ids_Tk.masked_fill(elsewhere, experts).to(torch.int32)
    return F.pad(ids, (0, 1), value=experts).contiguous()


@lru_cache(maxsize=8)
def _mask(experts: int, device: torch.device) -> torch.Tensor:
    """Return int32 [E + 1]: 1 for each expert here, 0 for the one that stands for all others."""
    mask = torch.ones(experts + 1, dtype=torch.int32, device=device)
    mask[experts] = 0
    return mask


def _checked(x: torch.Tensor, scale: torch.Tensor | None, what: str = "weight") -> torch.Tensor | None:
    if scale is not None:
        assert x.dtype == aiter.dtypes.fp8, f"AITER reads {aiter.dtypes.fp8} here, the {what} is {x.dtype}"
        assert scale.dtype == torch.float32, f"block scales are float32, not {scale.dtype}"
    return scale
