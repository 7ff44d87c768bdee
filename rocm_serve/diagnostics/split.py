"""Where to cut the layers into pipeline stages: what every cut puts on a rank. Pure.

Units: bytes on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from rocm_serve.parallel.mesh import split_layers


@dataclass(frozen=True, slots=True)
class Split:
    """One way to cut: layers of each stage, and the weights that each stage's ranks hold."""

    layers: tuple[int, ...]
    stage_bytes: tuple[int, ...]

    @property
    def words(self) -> str:
        return "/".join(map(str, self.layers))

    @property
    def heaviest(self) -> int:
        return max(self.stage_bytes)


@dataclass(frozen=True, slots=True)
class Pieces:
    """What one rank holds of every layer, and beside the layers on the first and the last stage."""

    layers: tuple[int, ...]
    first: int
    last: int

    def cut(self, counts: Sequence[int]) -> Split:
        """Weigh the stages of a cut into `counts` layers each."""
        assert sum(counts) == len(self.layers)
        ends = [sum(counts[: n + 1]) for n in range(len(counts))]
        weights = [sum(self.layers[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        weights[0] += self.first
        weights[-1] += self.last
        return Split(tuple(counts), tuple(weights))

    def even(self, pp: int) -> Split:
        """Cut as the server does: equal counts, the first stages take the remainder."""
        return self.cut([len(layers) for layers in split_layers(len(self.layers), pp)])

    def neutral(self, pp: int) -> Split:
        """Cut so that the heaviest stage is as light as can be."""
        sums = [0]
        for size in self.layers:
            sums.append(sums[-1] + size)
        total = len(self.layers)

        @cache
        def best(stage: int, start: int) -> tuple[int, int, tuple[int, ...]]:
            """The heaviest stage, the sum of squares and the counts of stages `stage`.. over layers `start`.."""
            beside = self.first if stage == 0 else 0
            if stage == pp - 1:
                weight = sums[total] - sums[start] + beside + self.last
                return weight, weight * weight, (total - start,)
            found = None
            for end in range(start + 1, total - (pp - stage - 1) + 1):
                weight = sums[end] - sums[start] + beside
                if found is not None and weight > found[0]:
                    break
                heaviest, squares, counts = best(stage + 1, end)
                option = max(weight, heaviest), squares + weight * weight, (end - start, *counts)
                found = option if found is None else min(found, option)
            assert found is not None
            return found

        return self.cut(best(0, 0)[2])
