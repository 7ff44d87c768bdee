"""Arguments as layers have them: pieces of wider projections, whose rows lie apart, between numbers of other pieces."""

from __future__ import annotations

from typing import Any

import torch

# Arguments that a layer cuts out of one projection: they keep their values and get another row stride.
CUT = {
    "kv_write": ("v_NGD",),
    "qk_norm_rope": ("k_TGD",),
    "qk_norm_rope_kv_write": ("qkv_TC",),
    "causal_conv": ("u_TC",),
    "gdn_decode": ("q_ThK", "k_ThK", "v_THV", "a_TH", "b_TH"),
    "gdn_extend": ("u_TC", "ba_TG", "z_TV"),
    "gdn_step": ("u_TC", "a_TH", "b_TH", "z_THV"),
    "gdn_chunk": ("q_ThK", "k_ThK", "v_THV", "a_TH", "b_TH"),
}


def as_in_the_layer(op: str, made: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with those that a layer cuts out of a projection cut out of NaN."""
    return made | {name: cut(made[name]) for name in CUT.get(op, ())}


def cut(x: torch.Tensor) -> torch.Tensor:
    """Return the same values; each row lies between 16 NaN and 16 more, as aligned as pieces of a projection are."""
    flat = x.flatten(1)
    wider = torch.full((flat.shape[0], flat.shape[1] + 32), float("nan"), dtype=x.dtype, device=x.device)
    piece = wider[:, 16 : 16 + flat.shape[1]]
    piece.copy_(flat)
    return piece.view(x.shape)
