"""The routed experts of an MoE layer, in Triton. Letters: T rows, H width, I expert width, E experts, k choices a row.

Two forms: where an expert gets few rows, the time is that of reading weights (triton_few.py); where it gets many, that
of multiplying (triton_grouped.py). ops/tiles.py chooses, by what is static in a launch.
"""

from __future__ import annotations

import torch
import triton.language as tl

from rocm_serve.ops import tiles
from rocm_serve.ops.moe_experts.reference import check_quantised
from rocm_serve.ops.moe_experts.triton_alone import rows_alone
from rocm_serve.ops.moe_experts.triton_alone_blocks import rows_alone_by_blocks
from rocm_serve.ops.moe_experts.triton_few import few_rows
from rocm_serve.ops.moe_experts.triton_grouped import many_rows
from rocm_serve.ops.triton_common.triton import arch, dot_dtype, rows_of

_FP8 = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e4m3fnuz: tl.float8e4b8}


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
    With `x_scale` [T, H / 128] the rows are quantised already.
    Errors: ValueError as the reference.
    Numerics: as the reference, but for "bf16" rows the hidden activation is rounded to bf16 once more. Sums run in the
    order of the k choices, so a row's bits depend on that row and the tile alone. FP8 rows are multiplied as FP8,
    few of them as float16 with gate and up on sm_90: its FP8 instructions keep 12 to 13 bits of a sum
    (docs/numerics.md).
    """
    if activation not in ("bf16", "fp8_1x128"):
        raise ValueError(f"moe_experts knows the activations bf16 and fp8_1x128, not {activation!r}")
    check_quantised(x_scale, w13_scale, activation, out_dtype)
    out_TH = torch.empty(x_TH.shape, dtype=out_dtype or x_TH.dtype, device=x_TH.device)
    if not out_TH.numel():
        return out_TH
    assert w13_EIH.is_contiguous() and w2_EHI.is_contiguous(), "experts are whole matrices"
    quantised = activation == "fp8_1x128" and w13_scale is not None
    dot = dot_dtype(out_TH, w13_EIH, arch(), quantised=quantised)
    few_dot = _FP8[w13_EIH.dtype] if quantised and dot != tl.float32 else dot
    shape = {
        "rows": ids_Tk.shape[0],
        "k": ids_Tk.shape[1],
        "e": w13_EIH.shape[0],
        "h": w13_EIH.shape[2],
        "i": w2_EHI.shape[2],
        "bits": few_dot.primitive_bitwidth,
    }
    tile = tiles.tile("moe_experts", shape, arch())
    tensors = (rows_of(x_TH), None if x_scale is None else x_scale.contiguous(), ids_Tk.contiguous())
    tensors += (weights_Tk.contiguous(), num_rows, w13_EIH, w13_scale, w2_EHI, w2_scale, out_TH)
    if tile.get("ALONE") == 2:
        rows_alone_by_blocks(*tensors, quantised=quantised, dot=few_dot, tile=tile)
    elif tile.get("ALONE"):
        rows_alone(*tensors, quantised=quantised, tile=tile)
    elif tile["FEW"]:
        few_rows(*tensors, quantised=quantised, dot=few_dot, tile=tile)
    else:
        many_rows(*tensors, quantised=quantised, dot=few_dot, tile=tile)
    return out_TH
