"""The experts of few rows, in Triton: weights stream by, and a kernel is as fast as it keeps loads on their way.

The weight is the left factor of every product. Matrix instructions that read it from shared memory take 64 rows or more
on the left, but 16 are enough on the right: so the few rows of an expert stand there and are not padded to 64.

Letters: T rows, H width, I expert width, E experts, k choices a row; of kernels, BM rows of a tile, BN of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from rocm_serve.ops.fp8 import BLOCK, fp8_max
from rocm_serve.ops.moe_experts.triton_few_kernels import (
    few_activate_kernel,
    few_combine_kernel,
    few_down_combine_kernel,
    few_down_kernel,
    few_gate_up_kernel,
    few_partial_kernel,
)
from rocm_serve.ops.moe_experts.triton_order import Order, place_few
from rocm_serve.ops.triton_common.triton import quantise_rows


@dataclass(frozen=True, slots=True)
class Call:
    """What every kernel of one call reads. `order` None: a tile is a choice, whatever other rows have chosen."""

    ids_Tk: torch.Tensor
    num_rows: int | torch.Tensor
    order: Order | None
    experts: int
    dot: tl.dtype
    tile: Mapping[str, int]

    @property
    def tiles(self) -> int:
        return self.ids_Tk.numel() if self.order is None else self.order.max_tiles

    @property
    def places(self) -> dict[str, object]:
        """Arguments that tell a kernel its expert and its rows."""
        return {
            "ids_ptr": self.ids_Tk,
            "num_rows": self.num_rows,
            "choices_ptr": None if self.order is None else self.order.choices,
            "expert_of_tile_ptr": None if self.order is None else self.order.expert_of_tile,
            "num_choices": self.ids_Tk.numel(),
            "EXPERTS": self.experts,
            "TOP_K": self.ids_Tk.shape[1],
            "ROWS_ON_DEVICE": isinstance(self.num_rows, torch.Tensor),
        }

    @property
    def launch(self) -> dict[str, bool]:
        """How a kernel follows the one before it. Other backends than NVIDIA's do not know the option."""
        return {"PDL": True, "launch_pdl": True} if self.tile["PDL"] else {"PDL": False}

    def product(self, part: str, width: int) -> dict[str, object]:
        """Return the tile of the kernels whose numbers begin with `part`, over a weight of `width` rows."""
        tile = {name.removeprefix(f"{part}_"): size for name, size in self.tile.items() if name.startswith(f"{part}_")}
        deep = {8: BLOCK, 16: 64, 32: 32}[self.dot.primitive_bitwidth]
        return {
            "BM": self.tile["BM"],
            "BN": tile["BN"],
            "BK": deep,
            "UNROLL": tile["UNROLL"] if deep == BLOCK else 1,
            "DOT": self.dot,
            "ONE_SCALE": BLOCK % tile["BN"] == 0 and width % BLOCK == 0,
            "num_warps": tile["WARPS"],
            "num_stages": tile["STAGES"],
            **self.launch,
        }


def few_rows(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    num_rows: int | torch.Tensor,
    w13_EIH: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2_EHI: torch.Tensor,
    w2_scale: torch.Tensor | None,
    out_TH: torch.Tensor,
    *,
    quantised: bool,
    dot: tl.dtype,
    tile: Mapping[str, int],
) -> None:
    """Compute `moe_experts` into `out_TH`. `tile`: see ops/tiles.py. `quantised`: rows are, or are to be, FP8."""
    experts = w13_EIH.shape[0]
    to_quantise = quantised and x_scale is None
    call = Call(ids_Tk, num_rows, None, experts, dot, tile)
    if not tile["DIRECT"]:
        made = (x, w13_EIH.dtype) if to_quantise else (None, None)
        order, values, scales = place_few(ids_Tk, num_rows, experts, tile["BM"], *made, call.launch)
        call = replace(call, order=order)
        x, x_scale = (values, scales) if to_quantise else (x, x_scale)
    elif to_quantise:
        x, x_scale = quantise_rows(x, w13_EIH.dtype)
    hidden, hidden_scale = _gate_up(call, x, x_scale, w13_EIH, w13_scale)
    if tile["FUSED"]:
        _down_and_combine(call, hidden, hidden_scale, weights_Tk, w2_EHI, w2_scale, out_TH)
    else:
        _down(call, hidden, hidden_scale, weights_Tk, w2_EHI, w2_scale, out_TH)


def _gate_up(
    call: Call, x: torch.Tensor, x_scale: torch.Tensor | None, w13_EIH: torch.Tensor, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return silu(gate) * up of every choice [T k, I], and its multipliers when the rows have some."""
    width, choices = w13_EIH.shape[1] // 2, call.ids_Tk.numel()
    blocks = triton.cdiv(width, BLOCK)
    hidden = torch.empty(choices, width, dtype=x.dtype, device=x.device)
    hidden_scale = None
    if x_scale is not None:
        hidden_scale = torch.empty(choices, blocks, dtype=torch.float32, device=x.device)
    top = fp8_max(x.dtype) if x_scale is not None else 0.0
    tile, splits = call.product("UP", width), call.tile["UP_SPLITS"]
    common = {"x_ptr": x, "x_scale_ptr": x_scale, "w_ptr": w13_EIH, "w_scale_ptr": scale, "x_stride": x.stride(0)}
    common |= {"K": x.shape[1], **call.places, **tile}
    if not splits:
        assert x_scale is None or tile["BN"] == BLOCK, "a program quantises one block of 128 columns"
        few_gate_up_kernel[(call.tiles, triton.cdiv(width, tile["BN"]))](
            hidden_ptr=hidden, hidden_scale_ptr=hidden_scale, WIDTH=width, TOP=top, **common
        )
        return hidden, hidden_scale
    parts = torch.empty(splits, choices, 2 * width, dtype=torch.float32, device=x.device)
    few_partial_kernel[(call.tiles, triton.cdiv(2 * width, tile["BN"]), splits)](
        parts_ptr=parts, WIDTH=2 * width, SPLITS=splits, **common
    )
    few_activate_kernel[(triton.cdiv(choices, 4), blocks)](
        parts, hidden, hidden_scale, choices, WIDTH=width, SPLITS=splits, TOP=top, ROWS=4, num_warps=4, **call.launch
    )
    return hidden, hidden_scale


def _down(
    call: Call,
    hidden: torch.Tensor,
    hidden_scale: torch.Tensor | None,
    weights_Tk: torch.Tensor,
    w2_EHI: torch.Tensor,
    scale: torch.Tensor | None,
    out_TH: torch.Tensor,
) -> None:
    rows, top_k = call.ids_Tk.shape
    width = w2_EHI.shape[1]
    tile = call.product("DOWN", width)
    returned = torch.empty(rows * top_k, width, dtype=torch.float32, device=out_TH.device)
    few_down_kernel[(call.tiles, triton.cdiv(width, tile["BN"]))](
        hidden_ptr=hidden,
        hidden_scale_ptr=hidden_scale,
        w_ptr=w2_EHI,
        w_scale_ptr=scale,
        returned_ptr=returned,
        WIDTH=width,
        K=hidden.shape[1],
        **call.places,
        **tile,
    )
    block = 512 if rows <= 64 else 1024
    few_combine_kernel[(rows, triton.cdiv(width, block))](
        returned_ptr=returned,
        weights_ptr=weights_Tk,
        out_ptr=out_TH,
        ids_ptr=call.ids_Tk,
        num_rows=call.num_rows,
        num_choices=rows * top_k,
        WIDTH=width,
        EXPERTS=call.experts,
        TOP_K=top_k,
        ROWS_ON_DEVICE=isinstance(call.num_rows, torch.Tensor),
        BLOCK=block,
        num_warps=block // 256,
        **call.launch,
    )


def _down_and_combine(
    call: Call,
    hidden: torch.Tensor,
    hidden_scale: torch.Tensor | None,
    weights_Tk: torch.Tensor,
    w2_EHI: torch.Tensor,
    scale: torch.Tensor | None,
    out_TH: torch.Tensor,
) -> None:
    """Let a program own some columns of one row and go through the experts of that row, in the order of its choices."""
    rows, top_k = call.ids_Tk.shape
    width = w2_EHI.shape[1]
    tile = call.product("DOWN", width)
    few_down_combine_kernel[(rows, triton.cdiv(width, tile["BN"]))](
        hidden_ptr=hidden,
        hidden_scale_ptr=hidden_scale,
        w_ptr=w2_EHI,
        w_scale_ptr=scale,
        weights_ptr=weights_Tk,
        out_ptr=out_TH,
        ids_ptr=call.ids_Tk,
        num_rows=call.num_rows,
        num_choices=rows * top_k,
        WIDTH=width,
        K=hidden.shape[1],
        EXPERTS=call.experts,
        TOP_K=top_k,
        CHOSEN=triton.next_power_of_2(top_k),
        ROWS_ON_DEVICE=isinstance(call.num_rows, torch.Tensor),
        **tile,
    )
