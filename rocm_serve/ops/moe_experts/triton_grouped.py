"""The experts of many rows, in Triton: a program multiplies one tile of the rows of one expert.

FP8 rows meet FP8 weights in the matrix units, 128 columns at a time; sums over blocks of 128 are float32.

Letters: T rows, H width, I expert width, E experts, k choices a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rocm_serve.ops.fp8 import BLOCK, fp8_max
from rocm_serve.ops.moe_experts.triton_grouped_down import down_in_turn_kernel, down_kernel
from rocm_serve.ops.moe_experts.triton_grouped_kernels import combine_kernel, gate_up_kernel
from rocm_serve.ops.moe_experts.triton_order import Order, sort_choices
from rocm_serve.ops.tiles_moe_grouped import BN, deep_of
from rocm_serve.ops.triton_common.triton import quantise_rows

_RETURNED_BYTES = 1 << 28  # what experts return for every choice is held for so many bytes of columns


@dataclass(frozen=True, slots=True)
class Call:
    """What every kernel of one call reads."""

    order: Order
    num_rows: int | torch.Tensor
    dot: tl.dtype
    tile: Mapping[str, int]

    @property
    def deep(self) -> int:
        """Columns multiplied at once."""
        return deep_of(self.dot.primitive_bitwidth)

    def rows(self, part: str, x: torch.Tensor) -> torch.Tensor:
        """Return rows as a kernel takes them: as bytes where they are to be read from registers."""
        return x.view(torch.uint8) if self.tile[f"{part}_REGS"] else x

    def product(self, part: str, weight_ENK: torch.Tensor) -> dict[str, Any]:
        """Return how the kernel of one product is launched."""
        tile = self.tile
        deep, desc = self.deep, bool(tile[f"{part}_DESC"])
        k = weight_ENK.shape[2]
        at_once = BN // 2 if tile[f"{part}_HALVES"] else BN
        weight: Any = weight_ENK
        if desc:
            assert weight_ENK.element_size() * k % 16 == 0, "the copy engine reads rows of whole 16 bytes"
            weight = TensorDescriptor.from_tensor(weight_ENK.view(-1, k), [at_once, deep])
        return {
            "w": weight,
            "choices_ptr": self.order.choices,
            "expert_of_tile_ptr": self.order.expert_of_tile,
            "num_tiles_ptr": self.order.num_tiles,
            "num_choices": self.order.num_choices,
            "K": k,
            "DOT": self.dot,
            "DESC": desc,
            "BM": tile["BM"],
            "BN": BN if part == "UP" else at_once,
            "BK": deep,
            "num_warps": tile[f"{part}_WARPS"],
            "num_stages": tile[f"{part}_STAGES"],
        }


def many_rows(
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
    """Compute `moe_experts` into `out_TH`. `tile`: see ops/tiles_moe_grouped.py. `quantised`: rows are, or are to be,
    FP8."""
    order = sort_choices(ids_Tk, num_rows, w13_EIH.shape[0], tile["BM"])
    if quantised and x_scale is None:
        x, x_scale = quantise_rows(x, w13_EIH.dtype)
    call = Call(order, num_rows, dot, tile)
    hidden, hidden_scale = _gate_up(call, x, x_scale, w13_EIH, w13_scale)
    _down(call, hidden, hidden_scale, weights_Tk, w2_EHI, w2_scale, out_TH)


def _gate_up(
    call: Call, x: torch.Tensor, x_scale: torch.Tensor | None, w13_EIH: torch.Tensor, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return silu(gate) * up of every choice [T k, I], and its multipliers when the rows have some.

    With TILED they are those of every place of the tiles; a place without a choice holds anything.
    """
    order, width = call.order, w13_EIH.shape[1] // 2
    rows = order.max_tiles * call.tile["BM"] if call.tile["TILED"] else order.num_choices
    hidden = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    hidden_scale, top = None, 0.0
    if x_scale is not None:
        hidden_scale = torch.empty(rows, triton.cdiv(width, BLOCK), dtype=torch.float32, device=x.device)
        top = fp8_max(x.dtype)
    gate_up_kernel[(order.max_tiles * triton.cdiv(width, BN),)](
        x_ptr=call.rows("UP", x),
        x_scale_ptr=x_scale,
        w_scale_ptr=scale,
        hidden_ptr=hidden,
        hidden_scale_ptr=hidden_scale,
        x_stride=x.stride(0),
        TOP_K=order.ids_Tk.shape[1],
        WIDTH=width,
        TOP=top,
        HALVES=bool(call.tile["UP_HALVES"]),
        TILED=bool(call.tile["TILED"]),
        SHORT=call.tile["UP_SHORT"],
        **call.product("UP", w13_EIH),
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
    """Write the weighted sums of what the experts return, a panel of columns after the other."""
    order, width = call.order, out_TH.shape[1]
    rows, top_k = order.ids_Tk.shape  # the panel goes by powers of two of rows, as tiles do: it is compiled in
    panel = panel_of(triton.next_power_of_2(rows) * top_k, out_TH, BN)
    returned = torch.empty(order.num_choices, panel, dtype=out_TH.dtype, device=out_TH.device)
    product = call.product("DOWN", w2_EHI)
    product |= {"hidden_scale_ptr": hidden_scale, "w_scale_ptr": scale, "returned_ptr": returned}
    product |= {"WIDTH": width, "PANEL": panel}
    for first in range(0, width, panel):
        if call.tile["DOWN_PROGRAMS"]:
            _down_in_turn(call, hidden, {**product, "first_column": first})
        else:
            _down_by_programs(call, hidden, {**product, "first_column": first})
        combine(returned, order, weights_Tk, call.num_rows, w2_EHI.shape[0], first, out_TH)


def _down_by_programs(call: Call, hidden: torch.Tensor, product: Mapping[str, Any]) -> None:
    tile = call.tile
    run = tile["DOWN_RUN"] * (BN // product["BN"])
    down_kernel[(call.order.max_tiles * triton.cdiv(product["PANEL"], product["BN"] * run),)](
        hidden_ptr=call.rows("DOWN", hidden),
        HELD=bool(tile["DOWN_HELD"]),
        TILED=bool(tile["TILED"]),
        SHORT=tile["DOWN_SHORT"],
        RUN=run,
        **product,
    )


def _down_in_turn(call: Call, hidden: torch.Tensor, product: Mapping[str, Any]) -> None:
    tile = call.tile
    assert tile["TILED"], "programs that work in turn read hidden rows in the order of the tiles"
    rows: Any = call.rows("DOWN", hidden)
    if tile["DOWN_DESC"]:
        rows = TensorDescriptor.from_tensor(hidden, [tile["BM"], call.deep])
    down_in_turn_kernel[(tile["DOWN_PROGRAMS"],)](hidden=rows, PROGRAMS=tile["DOWN_PROGRAMS"], **product)


def panel_of(choices: int, out_TH: torch.Tensor, block: int) -> int:
    """Return how many columns of what experts return are held at once: as many in each panel, in whole blocks."""
    width = out_TH.shape[1]
    most = max(block, _RETURNED_BYTES // (out_TH.element_size() * choices) // block * block)
    panels = triton.cdiv(width, most)
    return triton.cdiv(triton.cdiv(width, panels), block) * block


def combine(
    returned: torch.Tensor,
    order: Order,
    weights_Tk: torch.Tensor,
    num_rows: int | torch.Tensor,
    experts: int,
    first: int,
    out_TH: torch.Tensor,
) -> None:
    """Sum what experts returned for each row, weighted, in the order of its choices: columns from `first` on."""
    (rows, width), panel = out_TH.shape, returned.shape[1]
    block = 1024 if panel > 512 else 512
    combine_kernel[(rows, triton.cdiv(panel, block))](
        returned,
        order.ids_Tk,
        weights_Tk,
        num_rows,
        out_TH,
        order.num_choices,
        first,
        WIDTH=width,
        PANEL=panel,
        TOP_K=order.ids_Tk.shape[1],
        EXPERTS=experts,
        ROWS_ON_DEVICE=isinstance(num_rows, torch.Tensor),
        BLOCK=block,
        num_warps=block // 512,
    )
