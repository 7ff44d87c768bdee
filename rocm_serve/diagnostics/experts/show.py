"""A placement for people (a table on a terminal, plain lines otherwise) and for programs (JSON)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from rich.console import Console

from rocm_serve.diagnostics.experts.counts import Counts, LayerCount
from rocm_serve.diagnostics.experts.planner import LayerPlan, imbalance
from rocm_serve.diagnostics.plan import human
from rocm_serve.diagnostics.show import print_rows
from rocm_serve.parallel.expert_map import DRAFT_LAYER

COLUMNS = ("layer", "tokens", "hottest expert", "max/mean in order", "max/mean as planned", "copies")


@dataclass(frozen=True, slots=True)
class Planned:
    """What the command has found. `extra_bytes`: of copies, on the GPU that has most; None where nobody can say."""

    counts: Counts
    ep: int
    redundant: int
    layers: Mapping[int, LayerPlan]
    extra_bytes: int | None = None
    layout: str = ""  # that `extra_bytes` is meant for, in words

    @property
    def before(self) -> list[float]:
        """Imbalance of each layer with experts in order; empty where that cannot be."""
        return [imbalance(plan.plain) for plan in self.layers.values() if plan.plain]

    @property
    def after(self) -> list[float]:
        return [imbalance(plan.planned) for plan in self.layers.values()]


def show(planned: Planned, console: Console) -> None:
    """Print a row a layer, and what they come to."""
    counts = planned.counts
    console.print(
        f"{counts.model}: {counts.tokens:,} tokens in {len(counts.layers)} layers, from {len(counts.files)} files;"
        f" experts over --ep {planned.ep}, {planned.redundant} copies allowed"
    )
    print_rows(COLUMNS, _rows(planned), console)
    for line in _tail(planned):
        console.print(line)


def _rows(planned: Planned) -> Iterator[tuple[str, ...]]:
    for layer, plan in planned.layers.items():
        count = planned.counts.layers[layer]
        yield (
            "draft" if layer == DRAFT_LAYER else f"{layer}",
            f"{count.tokens}",
            _hottest(count),
            f"{imbalance(plan.plain):.3f}" if plan.plain else "none: not equal shares",
            f"{imbalance(plan.planned):.3f}",
            f"{plan.copies}",
        )


def _hottest(count: LayerCount) -> str:
    total = sum(count.chosen)
    if not total:
        return "none: saw no token"
    most = max(count.chosen)
    return f"{count.chosen.index(most)} ({most * len(count.chosen) / total:.2f} times its share)"


def total_line(planned: Planned) -> str:
    """Say what all layers come to."""
    before, after = planned.before, planned.after
    shown = f"{mean(before):.3f} (worst {max(before):.3f}) in order, " if before else ""
    return f"busiest rank over the mean, all layers: {shown}{mean(after):.3f} (worst {max(after):.3f}) as planned"


def _tail(planned: Planned) -> Iterator[str]:
    yield total_line(planned)
    copied = sum(plan.copies > 0 for plan in planned.layers.values())
    if planned.redundant:
        yield f"copies help in {copied} of {len(planned.layers)} layers; the others get none"
    if planned.extra_bytes is not None:
        yield f"copies take {human(planned.extra_bytes)} more of the GPU that has most of them ({planned.layout})"
    elif copied:
        yield "what copies take of a GPU is said with --model"


def to_json(planned: Planned) -> dict[str, Any]:
    """Everything, loads as they are."""
    return {
        "model": planned.counts.model,
        "files": [str(path) for path in planned.counts.files],
        "ep": planned.ep,
        "redundant": planned.redundant,
        "extra_bytes": planned.extra_bytes,
        "layers": {
            layer: {
                "tokens": planned.counts.layers[layer].tokens,
                "slots": plan.slots,
                "copies": plan.copies,
                "loads_in_order": plan.plain or None,
                "loads_planned": plan.planned,
                "imbalance_in_order": imbalance(plan.plain) if plan.plain else None,
                "imbalance_planned": imbalance(plan.planned),
            }
            for layer, plan in planned.layers.items()
        },
    }
