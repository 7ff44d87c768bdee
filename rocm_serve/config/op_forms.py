"""Wishes for providers of which one has layers take the form that never calls the other's op. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rocm_serve.config.ops import calls_in
from rocm_serve.config.schema import Resolved
from rocm_serve.models.qwen3_5.spec import ModelFacts
from rocm_serve.platform.table import PARTS, split_wish

# A layer in which a kernel is bound as the second never calls the first. Other parts run there too, beside prompts or
# with more rows.
_DONE_BY = MappingProxyType(
    {"gdn_decode": "gdn_step", "qk_norm_rope": "qk_norm_rope_kv_write", "kv_write": "qk_norm_rope_kv_write"}
)
# A layer that calls one of the others calls the first only where a kernel is bound as each of those.
_BESIDE = MappingProxyType(
    {
        "gdn_extend": ("gdn_step",),
        "shared_down_add": ("shared_expert_add",),
        "add_norm_linear": ("gdn_step", "shared_expert_add"),
    }
)
_REFERENCE = "reference"
_Wishes = Mapping[tuple[int | None, str], str]  # (layer, None for all of them; op) -> provider


def ruled_out(resolved: Resolved, facts: ModelFacts) -> tuple[str, ...]:
    """Say of each wish whose op no layer calls, because of another wish, that it has no effect, and which that is."""
    calls = calls_in(resolved, facts)
    wishes = {split_wish(name): provider for name, provider in resolved.op.items()}
    said = []
    for (layer, op), provider in wishes.items():
        places: list[tuple[int | None, frozenset[str]]] = [(layer, calls.by_layer[layer])] if layer is not None else []
        if layer is None:
            places = [(i, calls.by_layer[i]) for i in calls.layers(op) if (i, op) not in wishes]
            places += [(None, calls.beside)] if op in calls.beside else []
        why = [_against(op, provider, where, called, wishes) for where, called in places]
        if why and all(why):
            said.append(
                f"--op {_said((layer, op), wishes)} has no effect: --op {why[0]} has its layers do without {op}"
            )
    return tuple(said)


def _against(op: str, provider: str, layer: int | None, called: frozenset[str], wishes: _Wishes) -> str | None:
    """Name the wish for which a layer never calls `op`, or None. `called`: the layer's ops, in one form of it each."""
    whole = _DONE_BY.get(op)
    if whole is not None:
        found = _decides(whole, layer, wishes)
        return found and _said(found, wishes) if found and _is_kernel(found, whole, wishes) else None
    for beside in _BESIDE.get(op, ()) if provider != _REFERENCE else ():
        found = _decides(beside, layer, wishes) if beside in called else None
        if found is not None and not _is_kernel(found, beside, wishes):
            return _said(found, wishes)
    return None


def _decides(whole: str, layer: int | None, wishes: _Wishes) -> tuple[int | None, str] | None:
    """Return the wish that decides what is bound as `whole` in a layer: for it, or for a part, which is by parts."""
    for where in dict.fromkeys((layer, None)):
        found = next((op for op in (whole, *PARTS[whole]) if (where, op) in wishes), None)
        if found is not None:
            return where, found
    return None


def _is_kernel(found: tuple[int | None, str], whole: str, wishes: _Wishes) -> bool:
    return found[1] == whole and wishes[found] != _REFERENCE


def _said(wish: tuple[int | None, str], wishes: _Wishes) -> str:
    layer, op = wish
    return f"{op if layer is None else f'layers.{layer}.{op}'}={wishes[wish]}"
