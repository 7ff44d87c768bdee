"""The shapes of everything a stage keeps between steps, told once: allocation and byte counts both read this.

Pure. Letters as in `ops.batch.StageCache`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from rocm_serve.models.qwen3_5.spec import ModelFacts, stage_layers
from rocm_serve.parallel.expert_map import DRAFT_LAYER
from rocm_serve.parallel.mesh import Coord

CACHE_ITEMSIZE = {"float32": 4, "bfloat16": 2, "fp8_e4m3": 1}
SSM_ITEMSIZE = 4  # the recurrent state is float32 whatever the model's dtype


@dataclass(frozen=True, slots=True)
class StageLayout:
    """What one rank of one stage caches. Per-page and per-slot shapes leave out the leading page or slot dimension."""

    kv_layers: tuple[int, ...]  # global indices of this stage's full-attention layers, the draft layer's among them
    gdn_layers: tuple[int, ...]  # global indices of this stage's GDN layers
    page_size: int
    kv_heads: int  # local
    head_dim: int
    conv_rows: int
    conv_channels: int  # local: q, k and v
    value_heads: int  # local
    value_dim: int
    key_dim: int
    draft_tokens: int = 0  # most drafts of a request in a step

    @property
    def page_shape(self) -> tuple[int, ...]:
        """NHD: [page_size, kv_heads_local, head_dim], once for K and once for V in every full-attention layer."""
        return (self.page_size, self.kv_heads, self.head_dim)

    @property
    def conv_shape(self) -> tuple[int, ...]:
        """[rows, channels_local], oldest row first."""
        return (self.conv_rows, self.conv_channels)

    @property
    def ssm_shape(self) -> tuple[int, ...]:
        """V-major: [Hv_local, dv, dk]."""
        return (self.value_heads, self.value_dim, self.key_dim)

    @property
    def pending_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the drafts of a slot brought to one layer: [K, channels_local] and [K, 2 Hv_local]."""
        return (self.draft_tokens, self.conv_channels), (self.draft_tokens, 2 * self.value_heads)

    def page_bytes(self, kv_itemsize: int) -> int:
        """Bytes of one page over all layers of this rank."""
        return 2 * len(self.kv_layers) * prod(self.page_shape) * kv_itemsize

    def slot_bytes(self, conv_itemsize: int) -> int:
        """Bytes of one slot over all layers of this rank. Convolution windows and pending rows have one dtype."""
        rows = sum(prod(shape) for shape in (self.conv_shape, *self.pending_shapes))
        one = rows * conv_itemsize + prod(self.ssm_shape) * SSM_ITEMSIZE
        return len(self.gdn_layers) * one


def stage_layout(facts: ModelFacts, coord: Coord, page_size: int, draft_tokens: int = 0) -> StageLayout:
    """Describe the caches of one rank. With more ranks than KV heads a head is held by several of them.

    With drafts the last stage holds pages of the draft layer, and every GDN layer their pending rows.
    """
    tp = coord.mesh.tp
    layers = stage_layers(facts, coord)
    key_heads, value_heads = facts.linear_num_key_heads // tp, facts.linear_num_value_heads // tp
    key_dim, value_dim = facts.linear_key_head_dim, facts.linear_value_head_dim
    draft_layers = (DRAFT_LAYER,) if draft_tokens and coord.last_stage else ()
    return StageLayout(
        kv_layers=(*(i for i in layers if facts.layer_types[i] == "full_attention"), *draft_layers),
        gdn_layers=tuple(i for i in layers if facts.layer_types[i] != "full_attention"),
        page_size=page_size,
        kv_heads=max(1, facts.num_kv_heads // tp),
        head_dim=facts.head_dim,
        conv_rows=facts.conv_kernel - 1,
        conv_channels=2 * key_heads * key_dim + value_heads * value_dim,
        value_heads=value_heads,
        value_dim=value_dim,
        key_dim=key_dim,
        draft_tokens=draft_tokens,
    )
