"""Which rank holds which expert: one table for parameter table, loader, planner and layers. Pure, no torch.

Letters: E experts of a layer (logical), P slots over all ranks (physical, P >= E when hot experts are held twice).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rocm_serve.errors import UserError

DRAFT_LAYER = -1  # the key of the draft head's layer


@dataclass(frozen=True, slots=True)
class ExpertMap:
    """One layer's placement: `experts[p]` is the expert in slot p; slots go rank by rank, equally many each."""

    experts: tuple[int, ...]
    ep: int

    def __post_init__(self) -> None:
        if len(self.experts) % self.ep:
            raise UserError(f"{len(self.experts)} expert slots cannot be shared by --ep {self.ep} equally")
        missing = set(range(max(self.experts, default=-1) + 1)) - set(self.experts)
        if missing:
            raise UserError(f"experts {sorted(missing)[:4]} are on no rank")

    @property
    def slots_per_rank(self) -> int:
        return len(self.experts) // self.ep

    def held_by(self, ep_rank: int) -> tuple[int, ...]:
        """Return the experts of one expert-parallel rank, slot by slot."""
        each = self.slots_per_rank
        return self.experts[ep_rank * each : (ep_rank + 1) * each]

    @property
    def is_plain(self) -> bool:
        """Expert e is in slot e."""
        return self.experts == tuple(range(len(self.experts)))


def plain_map(num_experts: int, ep: int) -> ExpertMap:
    """Place experts in order, equally many on each rank."""
    return ExpertMap(tuple(range(num_experts)), ep)


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """How a model's experts lie over the ranks of a stage; layers that `maps` does not name are plain.

    `shared_whole`: the shared expert is whole on every rank (all-to-all exchanges), not cut over tensor parallelism.
    `draft_shared_whole`: the same for the draft head's layer, whose exchange may be another.
    """

    ep: int = 1
    shared_whole: bool = False
    draft_shared_whole: bool = False
    maps: Mapping[int, ExpertMap] = field(default_factory=dict)

    def of_layer(self, layer: int, num_experts: int) -> ExpertMap:
        return self.maps.get(layer) or plain_map(num_experts, self.ep)

    def slots_of(self, layer: int, num_experts: int) -> tuple[int, ...]:
        """Return the expert of each slot over all ranks, also where the degree is illegal and no map can be made.

        Errors: UserError for a placement made for another model or another degree.
        """
        places = self.maps.get(layer)
        if places is None:
            return tuple(range(num_experts))
        found = len(set(places.experts))
        if found != num_experts or places.ep != self.ep:
            where = "the draft layer" if layer == DRAFT_LAYER else f"layer {layer}"
            raise UserError(
                f"the expert placement of {where} is one of {found} experts over {places.ep} ranks;"
                f" legal: {num_experts} experts over {self.ep} (--ep)"
            )
        return places.experts

    def shared_is_whole(self, layer: int) -> bool:
        return self.draft_shared_whole if layer == DRAFT_LAYER else self.shared_whole
