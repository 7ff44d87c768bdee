"""The least time of what one or two GPUs share: each rank's kernels, and what crosses the link. Pure, no torch.

Kernels as in tuning/floor.py and floor_prefill.py, with experts chosen evenly. A tensor-parallel rank has half of the
heads, of the widths of experts and of the vocabulary, and reads router and norms whole; ranks then add rows, twice a
layer and once after the embedding. Two stages have half of the layers each, and rows go from one to the other. With two
plans in flight both stages work at once, so a step of all requests takes twice the longer stage with half of them.

Letters: B requests, T rows of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from rocm_serve.checkpoint.synthetic_configs import Dims
from rocm_serve.parallel.mesh import split_layers
from rocm_serve.tuning import floor, floor_prefill
from rocm_serve.tuning.floor import BF16, Ceilings, Cost
from rocm_serve.tuning.floor_prefill import Mixed
from rocm_serve.tuning.shapes import SHAPES

RANKS = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """Who shares the model. `ahead`: steps are planned ahead of their tokens also where they are not by default."""

    tp: int
    pp: int
    ahead: bool = False


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {"tp1": Layout(1, 1), "tp2": Layout(RANKS, 1), "pp2": Layout(1, RANKS), "pp2-ahead": Layout(1, RANKS, ahead=True)}
)
PAIR_SHAPES: Mapping[str, Dims] = MappingProxyType(
    # An expert of the tiny shape is one block of FP8, which two ranks cannot share.
    {"q35tp1": SHAPES["q35tp1"], "tiny": replace(SHAPES["tiny"], expert_width=256, shared_width=256)}
)


@dataclass(frozen=True, slots=True)
class Message:
    """What crosses the link so many times in a row. `what`: "all_reduce" or "send"; `nbytes` each way."""

    what: str
    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Least:
    """Of one step of all requests, or of all prompts: seconds of kernels, and messages that they wait for."""

    kernels_s: float
    messages: tuple[Message, ...] = ()

    def seconds(self, bytes_s: float) -> float:
        """Add the messages' bytes over a link of `bytes_s`."""
        return self.kernels_s + sum(one.count * one.nbytes for one in self.messages) / bytes_s


def share(dims: Dims, tp: int) -> Dims:
    """Return the sizes of one tensor-parallel rank."""
    return replace(
        dims,
        heads=dims.heads // tp,
        kv_heads=dims.kv_heads // tp,
        key_heads=dims.key_heads // tp,
        value_heads=dims.value_heads // tp,
        expert_width=dims.expert_width // tp,
        shared_width=dims.shared_width // tp,
        vocabulary=dims.vocabulary // tp,
    )


def decode(dims: Dims, layout: Layout, batch: int, context: int, ceilings: Ceilings) -> Least:
    """Return the least time in which each of B requests gets one token."""
    groups = min(layout.pp, batch)
    rows = -(-batch // groups)
    mine = share(dims, layout.tp)
    distinct = floor.expected_distinct(dims.experts, dims.top_k, rows)
    stages = []
    for layers in split_layers(dims.layers, layout.pp):
        parts = [one for i in layers for one in floor.layer(mine, rows, context, distinct, full=floor.is_full(i))]
        stages.append(_seconds(parts, layers, floor.head(mine, rows), dims, ceilings))
    if groups == 1:
        return Least(sum(stages), _messages(dims, layout, rows))
    return Least(groups * max(stages))


def prefill(dims: Dims, layout: Layout, prompts: int, length: int, chunk: int, ceilings: Ceilings) -> Least:
    """Return the least time for prompts of `length` tokens in plans of `chunk` rows: one divides the other."""
    mine = share(dims, layout.tp)
    plans = plans_of(prompts, length, chunk)
    times: list[list[float]] = []
    messages: list[Message] = []
    for plan in plans:
        distinct = floor.expected_distinct(dims.experts, dims.top_k, plan.num_rows)
        stages = []
        for layers in split_layers(dims.layers, layout.pp):
            parts = [one for i in layers for one in floor_prefill.layer(mine, plan, distinct, full=floor.is_full(i))]
            drawn = floor.head(mine, plan.prompts if plan.context + plan.rows == length else 0)
            stages.append(_seconds(parts, layers, drawn, dims, ceilings))
        times.append(stages)
        if layout.pp == 1 or len(plans) == 1:
            messages += _messages(dims, layout, plan.num_rows)
    # The first plan fills the stages, after that the longer one sets the pace.
    return Least(sum(times[0]) + sum(max(stages) for stages in times[1:]), tuple(messages))


def plans_of(prompts: int, length: int, chunk: int) -> list[Mixed]:
    """List the plans in which prompts come one after the other."""
    if length >= chunk:
        assert length % chunk == 0, f"prompts of {length} tokens are not whole chunks of {chunk}"
        return [Mixed(rows=chunk, context=at) for _ in range(prompts) for at in range(0, length, chunk)]
    assert chunk % length == 0, f"chunks of {chunk} rows are not whole prompts of {length}"
    each = chunk // length
    return [Mixed(rows=length, prompts=min(each, prompts - at)) for at in range(0, prompts, each)]


def _seconds(parts: Sequence[Cost], layers: range, head: Cost, dims: Dims, ceilings: Ceilings) -> float:
    last = layers.stop == dims.layers
    return floor.seconds([*parts, head] if last else parts, ceilings)


def _messages(dims: Dims, layout: Layout, rows: int) -> tuple[Message, ...]:
    nbytes = rows * dims.hidden * BF16
    if layout.tp > 1:
        return (Message("all_reduce", 2 * dims.layers + 1, nbytes),)
    return (Message("send", layout.pp - 1, nbytes),) if layout.pp > 1 else ()
