"""A rank of the real worker that also writes down what its ops, collectives and layers return, for chosen rows.

`python -m rocm_serve.executor.taps --resolved FILE --rank R`. Nothing that is computed changes: the bound ops of each
module are wrapped after loading. While the run's folder holds a wish (see `tap_files`), a step with such rows leaves a
file; without one, a step costs a look for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rocm_serve.config.schema import Resolved
from rocm_serve.diagnostics.parity.tap_files import BEFORE_LAYERS, Band
from rocm_serve.executor.launched import Launched
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.loading import load_stage_model
from rocm_serve.executor.runner import StageRunner
from rocm_serve.executor.tap_recorder import EXPERTS, Place, Taps
from rocm_serve.executor.worker import main
from rocm_serve.layers.attention import GatedAttention
from rocm_serve.layers.gated_delta_net import GatedDeltaNet
from rocm_serve.layers.moe import SparseMoe
from rocm_serve.messages import Plan
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, stage_params
from rocm_serve.ops.bind import BoundOps, op_names
from rocm_serve.parallel import layout
from rocm_serve.parallel.board import Board
from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.exchange.contract import Dispatched, ExpertExchange
from rocm_serve.parallel.exchange.shares import share_of
from rocm_serve.parallel.expert_map import ExpertPlan
from rocm_serve.parallel.mesh import Coord

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


class TappedComm:
    """Another Comm's collectives, with the sums recorded."""

    def __init__(self, inner: Comm, taps: Taps, place: Place) -> None:
        self._inner, self._taps, self._place = inner, taps, place
        self.rank, self.size, self.graph_refusal = inner.rank, inner.size, inner.graph_refusal

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._taps.all_reduce(self._place, self._inner, x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner.all_gather(x)

    def all_to_all(self, x: torch.Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]) -> torch.Tensor:
        return self._inner.all_to_all(x, send_rows, receive_rows)


class TappedExchange:
    """Another exchange that scatters rows, with what comes home recorded where one rank has its sums."""

    def __init__(self, inner: ExpertExchange, taps: Taps, place: Place) -> None:
        self._inner, self._taps, self._place = inner, taps, place
        self.name, self.complete, self.scattered = inner.name, inner.complete, inner.scattered
        self.graph_refusal = inner.graph_refusal

    def scatter(self, x_TH: torch.Tensor, num_rows: int | torch.Tensor) -> tuple[torch.Tensor, int | torch.Tensor]:
        own_nH, live = self._inner.scatter(x_TH, num_rows)
        coord = self._taps.coord
        first = coord.tp_rank * share_of(x_TH.shape[0], num_rows, coord.mesh.tp)
        self._taps.work_on(range(first, first + int(live)))
        return own_nH, live

    def dispatch(self, *args: Any) -> Dispatched:
        return self._inner.dispatch(*args)

    def combine(self, returned_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        routed_nH = self._inner.combine(returned_RH, dispatched)
        if self._taps.on:
            self._taps.keep(self._place, f"{EXPERTS}.moe_experts", "moe_experts", routed_nH)
        return routed_nH

    def gather(self, own_nH: torch.Tensor, rows: int, num_rows: int | torch.Tensor) -> torch.Tensor:
        self._taps.work_on(None)
        every_TH = self._inner.gather(own_nH, rows, num_rows)
        if self._taps.on and self.complete:  # else the sum was recorded by its all-reduce
            self._taps.keep(self._place, f"{self._place.module}.all_reduce", f"gather by {self.name}", every_TH)
        return every_TH


@dataclass(frozen=True, slots=True)
class TappedRunner(StageRunner):
    """Runs plans, each to its end inside a recorded step."""

    taps: Taps = field(kw_only=True)

    def launch(self, plan: Plan, hidden_TH: torch.Tensor | None) -> torch.Tensor | Launched:
        with self.taps.step(plan):
            left = StageRunner.launch(self, plan, hidden_TH)
            if not isinstance(left, Launched):
                return left
            sampled = left.result().sampled
        return Launched(plan.seq, lambda: sampled, None, left.drawn_R3)


@dataclass(frozen=True, slots=True)
class TappedStage(LoadedStage):
    """A loaded stage whose modules are wrapped."""

    taps: Taps

    def runner(self, *, num_pages: int, num_slots: int) -> StageRunner:
        plain = LoadedStage.runner(self, num_pages=num_pages, num_slots=num_slots)
        parts = {name: getattr(plain, name) for name in StageRunner.__dataclass_fields__}
        parts["decode"] = parts["prompts"] = None  # their batches are padded, and a replay calls no op
        return TappedRunner(**parts, taps=self.taps)


def load_tapped_stage(
    resolved: Resolved,
    coord: Coord,
    comm: Comm,
    *,
    moved: Callable[[], None] = lambda: None,
    board: Board | None = None,
    host: Comm | None = None,
) -> TappedStage:
    """Stand in for `load_stage_model`."""
    stage = load_stage_model(resolved, coord, comm, moved=moved, board=board, host=host)
    taps = Taps(coord, resolved.run_dir, stage.facts)
    assert isinstance(stage.model, nn.Module)
    tap_modules(stage.model, stage.facts, coord, stage.experts.wiring.plan, taps)
    parts = {name: getattr(stage, name) for name in LoadedStage.__dataclass_fields__}
    return TappedStage(**parts, taps=taps)


def tap_modules(model: nn.Module, facts: ModelFacts, coord: Coord, plan: ExpertPlan, taps: Taps) -> None:
    """Wrap the ops and collectives that every module holds, and both ends of every layer."""
    params = stage_params(facts, coord, formats=ConfigFormats(facts), mtp=False, experts=plan)
    for path, module in model.named_modules():
        if path == "lm_head":
            continue  # its rows are not those of the batch; the log-probs that come out of it are compared
        place = _place(path, facts, coord, params)
        ops = getattr(module, "ops", None)
        if isinstance(ops, BoundOps):
            wrapped = {op: partial(taps.call, place, op, getattr(ops, op)) for op in op_names()}
            module.ops = replace(ops, **wrapped)
        if isinstance(module, GatedAttention | GatedDeltaNet | SparseMoe):
            module.run_by_parts()
        if hasattr(module, "comm"):
            module.comm = TappedComm(module.comm, taps, place)
        if isinstance(module, SparseMoe) and module.exchange.scattered:
            module.exchange = TappedExchange(module.exchange, taps, place)
        if _LAYER.search(path) and not place.module:
            module.register_forward_pre_hook(partial(_enter, taps, place.layer))
            module.register_forward_hook(partial(_leave, taps, place.layer))


def _enter(taps: Taps, layer: int, module: nn.Module, args: tuple[Any, ...]) -> None:
    added, hidden = args[:2]  # what the layer before has left to be added, if any
    taps.stream(layer, "stream_in", hidden if added is None else hidden + added)


def _leave(taps: Taps, layer: int, module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> None:
    taps.stream(layer, "stream_out", args[1] + out)  # the layer has advanced the stream in place


def _place(path: str, facts: ModelFacts, coord: Coord, params: dict[str, layout.Param]) -> Place:
    found = _LAYER.search(path)
    if found is None:
        layer = BEFORE_LAYERS if path.endswith("embed_tokens") else facts.num_layers
        return Place(layer, path.removeprefix("model."), None, False)
    module = path[found.end() :]
    weight = {"linear_attn": "conv1d.weight", "mlp.experts": "down_proj"}.get(module, "weight")
    param = params.get(f"{path}.{weight}")
    if param is None:
        down = params.get(f"{path}.down_proj.weight")
        return Place(int(found[1]), module, None, False, down is not None and not any(down.splits))
    shares = tuple(share for band in param.dims[-2 if module == "mlp.experts" else 0] if (share := _share(band, coord)))
    return Place(int(found[1]), module, shares or None, any(_share(band, coord) for band in param.dims[-1]))


def _share(band: layout.Band, coord: Coord) -> Band | None:
    """Return this rank's part of a band, or None where every rank holds all of it."""
    if band.split is None or band.split.axis is layout.Axis.EP:
        return None
    width = len(band.owned(coord.place))
    degree, _ = coord.place.on(band.split.axis)
    return Band(width, max(1, degree // band.split.units) if band.split.repeat else 1)


if __name__ == "__main__":
    main(load_tapped_stage)
