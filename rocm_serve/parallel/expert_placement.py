"""The file that says which expert is in which slot (`--expert-placement`), written by `rocm-serve experts`. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from rocm_serve.errors import UserError
from rocm_serve.parallel.expert_map import DRAFT_LAYER, ExpertMap

FORMAT: Final = "rocm-serve expert placement"
_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class MoeShape(msgspec.Struct, frozen=True, kw_only=True):
    """What two models have in common whose experts can be spoken of with one table."""

    architecture: str
    num_layers: int
    num_experts: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.architecture}, {self.num_layers} layers of {self.num_experts} experts, {self.top_k} a token"


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`layers[n]`: the expert in each slot of layer n, rank by rank, equally many each; n = -1 is the draft layer.

    A layer that is not named has its experts in order, each once.
    """

    format: Literal["rocm-serve expert placement"]
    version: Literal[1]
    model: MoeShape
    ep: int
    layers: dict[int, tuple[int, ...]]

    def write(self, path: Path) -> None:
        """Write the file, a line a layer. Errors: OSError."""
        lines = ",\n".join(f'  "{layer}": {list(slots)}' for layer, slots in sorted(self.layers.items()))
        head = msgspec.json.encode(
            {"format": self.format, "version": self.version, "model": self.model, "ep": self.ep}
        ).decode()
        path.write_text(f'{head[:-1]},\n "layers": {{\n{lines}\n}}}}\n', encoding="utf-8")


def read_placement(path: str | Path, model: MoeShape, ep: int, *, draft: bool) -> dict[int, ExpertMap]:
    """Read a placement for `ExpertPlan.maps`. `draft`: the model has a draft layer, loaded or not.

    Errors: UserError for what is no placement, or one of another model or expert-parallel degree.
    """
    name = f"--expert-placement {path}"
    placement = read_versioned(path, Placement, FORMAT, name)
    if placement.model != model:
        raise UserError(f"{name} is of another model ({placement.model}); this one is {model}")
    if placement.ep != ep:
        raise UserError(f"{name} was made for --ep {placement.ep}, not {ep}; legal with it: --ep {placement.ep}")
    return {layer: _map_of(name, placement, layer, draft=draft) for layer in sorted(placement.layers)}


def _map_of(name: str, placement: Placement, layer: int, *, draft: bool) -> ExpertMap:
    slots, experts, ep = placement.layers[layer], placement.model.num_experts, placement.ep
    if not (0 <= layer < placement.model.num_layers or (draft and layer == DRAFT_LAYER)):
        also = f" and {DRAFT_LAYER} (the draft layer)" if draft else ""
        raise UserError(f"{name} names layer {layer}; the model has 0..{placement.model.num_layers - 1}{also}")
    foreign = [expert for expert in slots if not 0 <= expert < experts]
    if foreign:
        raise UserError(f"{name}, layer {layer}: no such expert: {foreign[0]}; legal: 0..{experts - 1}")
    absent = sorted(set(range(experts)) - set(slots))
    if absent:
        raise UserError(f"{name}, layer {layer}: expert {absent[0]} is in no slot")
    if len(slots) % ep:
        raise UserError(f"{name}, layer {layer}: {len(slots)} slots cannot be shared by --ep {ep} equally")
    return ExpertMap(slots, ep)


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


def read_versioned(path: str | Path, kind: type[_Kind], form: str, name: str) -> _Kind:
    """Read a JSON file that says what it is. `name` begins every complaint.

    Errors: UserError for a file that is absent, something else, of another version, or damaged.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from None
    try:
        head = msgspec.json.decode(raw, type=_Head)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise UserError(f"{name} is no '{form}' file, or only a part of one") from None
    if head.format != form:
        raise UserError(f"{name} is no '{form}' file: its format is '{head.format}'")
    if head.version != 1:
        raise UserError(f"{name} has version {head.version} of its format; this rocm-serve reads version 1")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{name} is damaged: {error}") from None
