"""Counts which experts the rows of one rank choose, for `rocm-serve experts`. Letters: E experts, k choices."""

from __future__ import annotations

import logging
import re
import time
from functools import partial

import torch

from rocm_serve.config.experts import moe_shape
from rocm_serve.config.schema import Resolved
from rocm_serve.diagnostics.experts.counts import FORMAT, CountFile, LayerCount, file_of_rank
from rocm_serve.layers.moe import SparseMoe
from rocm_serve.models.qwen3_5.spec import ModelFacts
from rocm_serve.parallel.expert_map import DRAFT_LAYER
from rocm_serve.parallel.mesh import Coord

log = logging.getLogger(__name__)

EVERY_S = 60.0  # between writes while steps run; one waits for the device, and takes some milliseconds
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.mlp$")


class ExpertCounter:
    """Counts on the device, without waiting for it, and writes a file now and then and at the end.

    Of ranks that route the same rows only the first of the stage counts them.
    """

    def __init__(self, resolved: Resolved, coord: Coord, facts: ModelFacts, model: object) -> None:
        assert resolved.expert_counts is not None
        self._path = file_of_rank(resolved.expert_counts, coord.rank)
        self._resolved = resolved
        self._coord = coord
        self._shape = moe_shape(facts)
        self._layers: list[int] = []
        layers = _moe_layers(model)
        device = next((moe.gate.weight.device for moe in layers.values()), torch.device("cpu"))
        self._counts = torch.zeros((len(layers), facts.num_experts + 1), dtype=torch.int64, device=device)
        self._scattered = any(moe.exchange.scattered for moe in layers.values())
        self._written_at = time.monotonic()
        for layer, moe in layers.items():
            if coord.tp_rank == 0 or moe.exchange.scattered:
                moe.observe = partial(count_rows, self._counts[len(self._layers)])
                self._layers.append(layer)

    def reset(self) -> None:
        """Forget: what was counted so far was made up, to warm up."""
        self._counts.zero_()

    def after_step(self) -> None:
        """Write when it is time again."""
        if time.monotonic() - self._written_at >= EVERY_S:
            self.write()

    def write(self) -> None:
        """Replace the file, waiting for the device. A failure is logged: counting must not end the server."""
        if not self._layers:
            return
        try:
            self.content().write(self._path)
        except OSError as error:
            log.error("rank %d: --expert-counts %s: %s", self._coord.rank, self._path, error.strerror)
        self._written_at = time.monotonic()

    def content(self) -> CountFile:
        """Return what was counted since `reset`."""
        coord, rows = self._coord, self._counts.tolist()
        return CountFile(
            format=FORMAT,
            version=1,
            served=self._resolved.served_model_name,
            model=self._shape,
            tp=coord.mesh.tp,
            pp=coord.mesh.pp,
            rank=coord.rank,
            stage=coord.stage,
            counting=coord.mesh.tp_group(coord.stage)[: None if self._scattered else 1],
            layers={
                layer: LayerCount(tokens=row[-1], chosen=tuple(row[:-1]))
                for layer, row in zip(self._layers, rows, strict=False)
            },
        )


def count_rows(counts_E1: torch.Tensor, ids_nk: torch.Tensor, num_rows: int | torch.Tensor) -> None:
    """Count the choices of the first `num_rows` rows, and these rows in the last element. Asks the device for nothing.

    Shapes: counts int64 [E + 1], ids int [n, k]; num_rows [1], if it is a tensor.
    """
    if isinstance(num_rows, int):
        ids_nk = ids_nk[:num_rows]
        counted_nk = counts_E1.new_ones(()).expand_as(ids_nk)
    else:
        live_n = torch.arange(ids_nk.shape[0], device=ids_nk.device) < num_rows
        counted_nk = live_n.to(torch.int64)[:, None].expand_as(ids_nk)
    counts_E1.scatter_add_(0, ids_nk.reshape(-1).to(torch.int64), counted_nk.reshape(-1))
    counts_E1[-1:] += num_rows


def counter_of(resolved: Resolved, coord: Coord, facts: ModelFacts, model: object) -> ExpertCounter | None:
    """Begin to count, if that is wished."""
    return None if resolved.expert_counts is None else ExpertCounter(resolved, coord, facts, model)


def _moe_layers(model: object) -> dict[int, SparseMoe]:
    """Find the MoE layers by the numbers in their names."""
    if not isinstance(model, torch.nn.Module):
        return {}
    found = {}
    for name, module in model.named_modules():
        match = _LAYER.search(name)
        if match is not None and isinstance(module, SparseMoe):
            found[DRAFT_LAYER if name.startswith("mtp.") else int(match[1])] = module
    return found
