"""What a rank holds of its stage from its start to its end: weights, and each page and slot. Pure, no torch.

Units: bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rocm_serve.cache.layout import CACHE_ITEMSIZE, StageLayout, stage_layout
from rocm_serve.config.schema import Resolved
from rocm_serve.models.qwen3_5.spec import ModelFacts
from rocm_serve.parallel.layout import Param, bytes_at
from rocm_serve.parallel.mesh import Coord


def layout_of(facts: ModelFacts, coord: Coord, resolved: Resolved) -> StageLayout:
    return stage_layout(facts, coord, resolved.page_size, resolved.draft_tokens)


def page_bytes(facts: ModelFacts, coord: Coord, resolved: Resolved) -> int:
    """Bytes of one KV page on this rank: K and V of every full-attention layer of its stage."""
    return layout_of(facts, coord, resolved).page_bytes(CACHE_ITEMSIZE[resolved.kv_cache_dtype])


def slot_bytes(facts: ModelFacts, coord: Coord, resolved: Resolved) -> int:
    """Bytes of one slot on this rank: conv rows and SSM state of every GDN layer of its stage."""
    return layout_of(facts, coord, resolved).slot_bytes(CACHE_ITEMSIZE[resolved.dtype])


def weight_bytes(params: Mapping[str, Param], coord: Coord, resolved: Resolved) -> int:
    """Bytes of this rank's parameters."""
    itemsize = CACHE_ITEMSIZE[resolved.dtype]
    return sum(bytes_at(p, coord.place, model_itemsize=itemsize) for p in params.values())


def preparation_bytes(params: Mapping[str, Param], coord: Coord, resolved: Resolved, preparing: Iterable[str]) -> int:
    """Bytes that laying weights out anew takes for a moment: those of one op in one layer exist twice.

    A prepared weight has as many bytes as a plain one, so nothing else changes. `preparing`: the ops that do it.
    """
    ops, itemsize = set(preparing), CACHE_ITEMSIZE[resolved.dtype]
    groups: dict[str, int] = {}
    for name, param in params.items():
        op, group = _op_weights(name, param, params)
        if op in ops:
            size = bytes_at(param, coord.place, model_itemsize=itemsize)
            groups[group] = groups.get(group, 0) + size
    return max(groups.values(), default=0)


def _op_weights(name: str, param: Param, params: Mapping[str, Param]) -> tuple[str, str]:
    """Name the op whose weight a parameter is ("" for those that no provider lays out), and its group."""
    weight = name.removesuffix("_scale_inv")
    if ".experts." in name:
        return "moe_experts", name.partition(".experts.")[0]
    if params[weight].dtype == "fp8":
        return "fp8_linear", weight
    matrix = len(param.dims) == 2 and weight.endswith(".weight") and not weight.endswith("embed_tokens.weight")
    return ("linear" if matrix else ""), weight
