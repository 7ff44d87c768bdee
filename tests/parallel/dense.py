"""A layer of experts written down directly: the judge of every exchange, and the work between dispatch and combine.

Letters: H width, I expert width, E experts, k choices a row, t ranks, n rows of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.exchange.contract import Dispatched, ExchangeSpec, ExpertExchange
from rocm_serve.parallel.exchange.make import Exchanges
from rocm_serve.parallel.exchange.mori import MoriSetup

H, INNER, E, K = 256, 16, 32, 10


@dataclass(frozen=True)
class Layer:
    """Experts e: x -> W2[e] tanh(W1[e] x), in float64."""

    w1: torch.Tensor  # [E, I, H]
    w2: torch.Tensor  # [E, H, I]

    def whole(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return [n, H] in float64: every row through all its choices."""
        return _mixed(x.double(), ids, weights.double(), self.w1, self.w2)

    def held(self, comm: Comm, ep: int, sent: Dispatched, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Do the work of one rank: its experts, its slice of their columns, on the rows that came. NaN in padding."""
        slices = comm.size // ep
        first, cut = comm.rank // slices * (E // ep), comm.rank % slices
        held = slice(first, first + E // ep)
        columns = slice(cut * INNER // slices, (cut + 1) * INNER // slices)
        live = int(sent.count)
        x = sent.rows[:live] if sent.scales is None else dequantised(sent.rows[:live], sent.scales[:live])
        x = torch.where((sent.ids[:live] >= 0).any(dim=1, keepdim=True), x.float(), 0)
        y = _mixed(
            x, sent.ids[:live], sent.weights[:live], self.w1[held, columns].float(), self.w2[held, :, columns].float()
        )
        out = torch.full((sent.rows.shape[0], H), torch.nan, dtype=dtype, device=y.device)
        out[:live] = y.to(dtype)
        return out


def _mixed(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros_like(x)
    for row in range(x.shape[0]):  # one row at a time, so that no row's bits depend on its neighbours
        for choice in range(ids.shape[1]):
            expert = int(ids[row, choice])
            if expert >= 0:
                out[row] += weights[row, choice] * (w2[expert] @ torch.tanh(w1[expert] @ x[row]))
    return out


def make_layer(seed: int) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    w1 = torch.randn(E, INNER, H, generator=generator, dtype=torch.float64) / H**0.5
    return Layer(w1, torch.randn(E, H, INNER, generator=generator, dtype=torch.float64) / INNER**0.5)


@dataclass(frozen=True)
class Batch:
    """Rows and their routing; [n, H], int32 [n, k], fp32 [n, k]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def rows(self, rows: slice) -> Batch:
        return Batch(self.x[rows], self.ids[rows], self.weights[rows])


def draw(n: int, seed: int, *, experts: slice = slice(0, E), dtype: torch.dtype = torch.float32) -> Batch:
    """Draw rows that choose k distinct experts of a range."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.full((n, E), -torch.inf)
    scores[:, experts] = torch.rand(n, E, generator=generator)[:, experts]
    weights, ids = scores.topk(K, dim=1)
    return Batch(torch.randn(n, H, generator=generator).to(dtype), ids.int(), weights / weights.sum(1, keepdim=True))


def padded(batch: Batch, rows: int) -> Batch:
    """Append rows of NaN with plausible choices up to `rows`."""
    more = rows - batch.x.shape[0]
    return Batch(
        torch.cat([batch.x, torch.full((more, H), torch.nan, dtype=batch.x.dtype)]),
        torch.cat([batch.ids, torch.arange(K, dtype=torch.int32).repeat(more, 1)]),
        torch.cat([batch.weights, torch.full((more, K), torch.nan)]),
    )


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 rows and a scale for 128 columns, as the layer does before it sends them."""
    groups = x.float().unflatten(1, (-1, 128))
    scales = groups.abs().amax(dim=2).clamp(min=1e-12) / 448
    return (groups / scales[:, :, None]).flatten(1).to(torch.float8_e4m3fn), scales


def dequantised(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (rows.float().unflatten(1, (-1, 128)) * scales[:, :, None]).flatten(1)


def spec_of(
    name: str, ep: int, *, capacity: int = 64, fp8: bool = False, dtype: torch.dtype = torch.float32
) -> ExchangeSpec:
    return ExchangeSpec(name, ep, E // ep, K, H, capacity, dtype, fp8_rows=fp8)


def build(spec: ExchangeSpec, comm: Comm, *, row_multiple: int = 1) -> Exchanges:
    setup = MoriSetup(comm, gpus_per_node=8, compute_units=304) if spec.name == "mori" else None
    return Exchanges([spec], comm, row_multiple=row_multiple, mori=setup)


Count = Callable[[int], int | torch.Tensor]


def step(
    exchange: ExpertExchange,
    comm: Comm,
    layer: Layer,
    batch: Batch,
    count: int | torch.Tensor,
    ep: int,
    *,
    fp8: bool = False,
) -> torch.Tensor:
    """Run a layer's step as layers/moe.py does, its shared expert left out: [T, H], the same on every rank."""
    x, ids, weights, live = batch.x, batch.ids, batch.weights, count
    if exchange.scattered:
        x, live = exchange.scatter(x, count)
        ids, _ = exchange.scatter(ids, count)
        weights, _ = exchange.scatter(weights, count)
    scales = None
    if fp8:
        x, scales = quantised(x)
    sent = exchange.dispatch(x, scales, ids, weights, live)
    out = exchange.combine(layer.held(comm, ep, sent, dtype=batch.x.dtype), sent)
    if not exchange.complete:
        out = comm.all_reduce(out)
    return exchange.gather(out, batch.x.shape[0], count) if exchange.scattered else out
