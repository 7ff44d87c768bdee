"""Exchanges on GPUs: the CPU's results over NCCL or RCCL, and all_gather in a graph. Run by hand, with two GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rocm_serve.parallel.comm import Comm, SoloComm
from rocm_serve.parallel.exchange.contract import ExpertExchange
from rocm_serve.parallel.exchange.make import make_exchange
from rocm_serve.parallel.groups import Groups
from rocm_serve.parallel.mesh import Coord, Mesh
from tests.parallel.dense import Batch, Layer, dequantised, draw, make_layer, padded, quantised, spec_of, step
from tests.parallel.ranks import run_processes

pytestmark = pytest.mark.gpu

CELLS = [("local", 2), ("torch", 2), ("torch", 1), ("all_gather", 2), ("all_gather", 1)]
ROWS, LIVE = 16, 11


def gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def on(device: str, batch: Batch) -> Batch:
    return Batch(batch.x.to(device), batch.ids.to(device), batch.weights.to(device))


def layer_on(device: str) -> Layer:
    layer = make_layer(9)
    return Layer(layer.w1.to(device), layer.w2.to(device))


@dataclass(frozen=True)
class Inputs:
    """What goes into `dispatch`. `scales` has no columns where rows are not FP8."""

    rows: torch.Tensor
    scales: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    live: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.rows, self.scales, self.ids, self.weights, self.live


def drawn(rank: int, turn: int, device: str, *, fp8: bool) -> Inputs:
    """Eight rows with fewer and fewer of them live."""
    live = 8 - 3 * turn - rank
    batch = on(device, padded(draw(live, seed=30 + 10 * turn + rank), 8))
    rows, scales = quantised(batch.x.nan_to_num()) if fp8 else (batch.x, batch.x[:, :0])
    return Inputs(rows, scales, batch.ids, batch.weights.nan_to_num(), torch.tensor(live, device=device))


def between(exchange: ExpertExchange, given: Inputs) -> torch.Tensor:
    """Dispatch and combine; for experts, twice a row by the sum of its weights held here: that can be recorded."""
    scales = given.scales if given.scales.shape[1] else None
    sent = exchange.dispatch(given.rows, scales, given.ids, given.weights, given.live)
    rows = sent.rows if sent.scales is None else dequantised(sent.rows, sent.scales)
    held = torch.where(sent.ids >= 0, sent.weights, 0).sum(dim=1, keepdim=True)
    return exchange.combine(torch.where(held > 0, 2 * held * rows, 0), sent)


def captured(comm: Comm, device: str, *, fp8: bool) -> bool:
    """Record one exchange, replay it with other rows and another number of them, compare with the same unrecorded."""
    exchange = make_exchange(spec_of("all_gather", comm.size, fp8=fp8), comm, row_multiple=1)
    inputs = [drawn(comm.rank, turn, device, fp8=fp8) for turn in range(2)]
    static = Inputs(*(tensor.clone() for tensor in inputs[0].tensors()))
    expected = [between(exchange, given) for given in inputs]  # makes connections and loads kernels, too
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = between(exchange, static)
    same = True
    for turn in (1, 0):
        for held, new in zip(static.tensors(), inputs[turn].tensors(), strict=True):
            held.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        same = same and torch.equal(out, expected[turn]) and bool(out.any())
    return same


def everything(coord: Coord, groups: Groups) -> dict[str, Any]:
    device = f"cuda:{coord.tp_rank}"
    torch.cuda.set_device(device)
    layer, batch = layer_on(device), on(device, padded(draw(LIVE, seed=600), ROWS))
    results: dict[str, Any] = {}
    for name, ep in CELLS:
        for fp8 in (False, True):
            exchange = make_exchange(spec_of(name, ep, fp8=fp8), groups.tp, row_multiple=1)
            out = step(exchange, groups.tp, layer, batch, LIVE, ep, fp8=fp8)
            results[f"{name} {ep} {fp8}"] = out[:LIVE].cpu().numpy()
    results["graph"] = [captured(groups.tp, device, fp8=fp8) for fp8 in (False, True)]
    return results


@pytest.mark.skipif(gpus() < 1, reason="no GPU here")
@pytest.mark.parametrize("fp8", [False, True])
def test_all_gather_is_captured_on_one_gpu(fp8: bool) -> None:
    assert captured(SoloComm(), "cuda:0", fp8=fp8)


@pytest.mark.multirank
@pytest.mark.skipif(gpus() < 2, reason="fewer than two GPUs here")
def test_two_gpus() -> None:
    batch, layer = draw(LIVE, seed=600), make_layer(9)
    for results in run_processes(Mesh(tp=2, pp=1), everything, gpu=True):
        assert results.pop("graph") == [True, True]
        assert len(results) == 2 * len(CELLS)
        for cell, out in results.items():
            x = dequantised(*quantised(batch.x)) if cell.endswith("True") else batch.x
            expected = layer.whole(x, batch.ids, batch.weights)
            assert float((torch.tensor(out).double() - expected).abs().max()) < 1e-5, cell
