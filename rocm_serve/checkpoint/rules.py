"""How checkpoint names map to ours, and how each tensor is stored: decided name by name, nothing remembered. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import scale_key
from rocm_serve.models.qwen3_5.spec_facts import canonical

_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")
_VISION = "model.visual."
_MTP = "mtp."
_SCALE = "_scale_inv"
_HEAD = "lm_head.weight"


@dataclass(slots=True)
class Catalogue:
    """The tensors that one stage may use, by canonical name, and the groups of those that it may not."""

    tensors: dict[str, str] = field(default_factory=dict)  # canonical -> name in the file
    foreign: Counter[str] = field(default_factory=Counter)  # belongs to another stage
    ignored: Counter[str] = field(default_factory=Counter)  # belongs to no stage of this run
    tied: bool = False  # lm_head is embed_tokens

    def fused(self, stem: str) -> bool:
        return stem in self.tensors

    def fp8(self, key: str) -> bool:
        return scale_key(key) in self.tensors


def catalogue(names: Iterable[str], layers: range, *, first: bool, last: bool, mtp: bool, tied: bool) -> Catalogue:
    """Sort checkpoint names for a stage: layers of other stages are set aside before any name is mapped.

    `first`, `last`: the stage's place; `mtp`: the draft layer is wanted; `tied`: the configuration says that lm_head is
    embed_tokens, which a file with a lm_head.weight of its own overrules (HF Transformers takes that one, too).
    Errors: UserError when two names mean the same tensor.
    """
    names = tuple(names)
    tied = tied and _HEAD not in names
    found = Catalogue(tied=tied)
    for name in names:
        layer = _LAYER.match(name)
        if layer is not None:
            if int(layer[1]) not in layers:
                found.foreign["layers of other stages"] += 1
                continue
        elif name.startswith(_VISION):
            found.ignored["model.visual.* (this server reads text only)"] += 1
            continue
        elif name.startswith(_MTP) and not mtp:
            found.ignored["mtp.* (no draft layer on this rank)"] += 1
            continue
        elif name.startswith(_MTP) and not last:
            found.foreign["mtp.* of the last stage"] += 1
            continue
        key = canonical(name)
        needed = {
            "model.embed_tokens.weight": first or (last and (mtp or tied)),
            "model.norm.weight": last,
            _HEAD: last,
        }.get(key, True)
        if not needed:
            found.foreign[f"{key} of another stage"] += 1
        elif key in found.tensors:
            raise UserError(f"the checkpoint holds {key} twice, as {found.tensors[key]} and as {name}")
        else:
            found.tensors[key] = name
    return found


def orphan_scales(tensors: Mapping[str, str]) -> list[str]:
    """List the scales whose weight is missing, by the name in the file."""
    return [name for key, name in tensors.items() if key.endswith(_SCALE) and key.removesuffix(_SCALE) not in tensors]


def weight_keys(tensors: Mapping[str, str]) -> Iterable[str]:
    """List the canonical names that are not scales."""
    return (key for key in tensors if not key.endswith(_SCALE))
