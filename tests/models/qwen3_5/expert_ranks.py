"""A small MoE model with a draft head over simulated ranks of one process, under any exchange and placement.

Experts are FP8 (the draft's are, or are not), everything else is in float32. PP stages of a rank are called in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from rocm_serve.layers.moe import ExpertWiring, SparseMoe
from rocm_serve.models.qwen3_5.spec import ModelFacts, stage_params
from rocm_serve.models.registry import build_model
from rocm_serve.ops.bind import bind_ops
from rocm_serve.ops.rows import ROW_MULTIPLE
from rocm_serve.parallel.comm import Comm, SoloComm, run_ranks
from rocm_serve.parallel.exchange.contract import ExchangeSpec
from rocm_serve.parallel.exchange.make import Exchanges
from rocm_serve.parallel.exchange.mori import MoriSetup
from rocm_serve.parallel.expert_map import DRAFT_LAYER, ExpertMap, ExpertPlan
from rocm_serve.parallel.mesh import Mesh
from tests.models.harness import Chunk, Pipeline, Stage, caches, facts_of, fill, hf_model, make_batch, text
from tests.parallel.mori_package import installed

H, E, K, LAYERS, CAPACITY = 128, 8, 3, 2, 64
SIZES: dict[str, Any] = {
    "hidden_size": H,
    "num_hidden_layers": LAYERS,
    "layer_types": ["linear_attention", "full_attention"],
    "moe_intermediate_size": 256,  # two blocks of scales: an expert can be cut in two
    "shared_expert_intermediate_size": 64,
    "num_experts": E,
    "num_experts_per_tok": K,
}


@dataclass(frozen=True)
class Fp8Experts:
    """Fused experts in FP8, those of the draft head if `draft`."""

    draft: bool
    tied: ClassVar[bool] = False

    def fused(self, stem: str) -> bool:
        return True

    def fp8(self, key: str) -> bool:
        return ".experts." in key and (self.draft or not key.startswith("mtp."))


def quantised(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 weights [E, N, K] and a scale for each block of 128 x 128."""
    e, n, k = w.shape
    blocks = w.view(e, n // 128, 128, k // 128, 128)
    scale = blocks.abs().amax((2, 4)) / 448
    return (blocks / scale[:, :, None, :, None]).view(e, n, k).to(torch.float8_e4m3fn), scale


@dataclass(frozen=True)
class Checkpoint:
    """HF's model, its experts such as FP8 holds, and the tensors by the name of a draft's dtype."""

    hf: nn.Module
    facts: ModelFacts
    tensors: Mapping[str, Mapping[str, torch.Tensor]]


@cache
def checkpoint() -> Checkpoint:
    hf = hf_model(seed=21, **SIZES)
    with torch.no_grad():
        for name, p in hf.named_parameters():
            if ".experts." in name:
                q, scale = quantised(p)
                p.copy_(q.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2))
    state = dict(hf.state_dict())
    g = torch.Generator().manual_seed(22)
    draft = {name: p.clone() for name, p in state.items() if name.startswith(f"model.layers.{LAYERS - 1}.")}
    draft = {
        f"mtp.layers.0.{name.split('.', 3)[3]}": p[torch.randperm(len(p), generator=g)] for name, p in draft.items()
    }
    draft["mtp.fc.weight"] = torch.randn(H, 2 * H, generator=g) * (2 * H) ** -0.5
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        draft[f"mtp.{norm}.weight"] = torch.randn(H, generator=g) * 0.3

    def in_fp8(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = dict(tensors)
        for name, p in tensors.items():
            if ".experts." in name:
                out[name], out[f"{name}_scale_inv"] = quantised(p)
        return out

    main = in_fp8(state)
    facts = facts_of(hf, mtp_num_hidden_layers=1)
    return Checkpoint(hf, facts, {"fp8": main | in_fp8(draft), "bf16": main | draft})


@dataclass(frozen=True)
class Cell:
    """One way to lay the model over ranks."""

    exchange: str = "local"
    tp: int = 1
    ep: int = 1
    pp: int = 1
    draft: str = "fp8"  # the dtype of its experts
    draft_exchange: str | None = None  # as the model's
    activation: str = "bf16"
    maps: Mapping[int, ExpertMap] = field(default_factory=dict, hash=False)

    def name_of(self, layer: int) -> str:
        return self.draft_exchange or self.exchange if layer == DRAFT_LAYER else self.exchange

    @property
    def plan(self) -> ExpertPlan:
        whole = {layer: self.name_of(layer) != "local" for layer in (0, DRAFT_LAYER)}
        return ExpertPlan(self.ep, whole[0], whole[DRAFT_LAYER], self.maps)

    def spec(self, layer: int) -> ExchangeSpec:
        fp8 = self.draft == "fp8" or layer != DRAFT_LAYER
        name = self.name_of(layer)
        return ExchangeSpec(
            name,
            self.ep,
            self.plan.of_layer(layer, E).slots_per_rank,
            K,
            H,
            CAPACITY,
            torch.float32,
            fp8_rows=fp8 and name != "local" and self.activation == "fp8_1x128",
        )


def build_rank(cell: Cell, comm: Comm) -> tuple[Pipeline, Exchanges]:
    """Build all stages of one tensor-parallel rank, and its exchanges first."""
    made, formats = checkpoint(), Fp8Experts(cell.draft == "fp8")
    mesh, layers = Mesh(cell.tp, cell.pp, cell.ep), (*range(LAYERS), DRAFT_LAYER)
    mori = MoriSetup(comm, gpus_per_node=8, compute_units=304)
    exchanges = Exchanges(map(cell.spec, layers), comm, row_multiple=ROW_MULTIPLE, mori=mori)
    wiring = ExpertWiring(cell.plan, {layer: exchanges.of(cell.spec(layer)) for layer in layers})
    ops = bind_ops({}, "cpu", activation=cell.activation)  # type: ignore[arg-type]
    stages = []
    for stage in range(cell.pp):
        coord = mesh.coord(stage * cell.tp + comm.rank)
        params = stage_params(made.facts, coord, formats=formats, mtp=True, experts=cell.plan)
        model = build_model(
            made.facts, coord, params, comm, ops, device="cpu", dtype=torch.float32, mtp=True, experts=wiring
        )
        fill(dict(model.named_parameters()), params, made.tensors[cell.draft], coord.place)
        model.prepare()
        pages = caches(made.facts, coord, pages=8, slots=3, draft=coord.last_stage)
        stages.append(Stage(model, pages))
    return Pipeline(stages), exchanges


def moe_layers(run: Pipeline) -> dict[int, SparseMoe]:
    """Return the MoE layers of all stages by number, the draft's among them."""
    found: dict[int, SparseMoe] = {}
    for stage in run.stages:
        for name, layer in stage.model.model.layers.items():
            found[int(name)] = layer.mlp
    head = run.stages[-1].model.mtp
    assert head is not None
    return found | {DRAFT_LAYER: head.layers["0"].mlp}


Change = Callable[[Pipeline, Comm], None]
Body = Callable[[Pipeline], Sequence[torch.Tensor]]


def on_ranks(cell: Cell, body: Body, change: Change = lambda run, comm: None) -> list[torch.Tensor]:
    """Run `body` on every rank, after `change` has had its way with the model; join the vocabulary shards."""

    def rank(comm: Comm) -> Sequence[torch.Tensor]:
        run, exchanges = build_rank(cell, comm)
        change(run, comm)
        try:
            return body(run)
        finally:
            exchanges.close()

    shards = [rank(SoloComm())] if cell.tp == 1 and cell.exchange == "local" else run_ranks(cell.tp, rank)
    return [torch.cat(pieces, dim=-1) for pieces in zip(*shards, strict=True)]


@contextmanager
def mori_if(needed: bool, folder: Path) -> Iterator[None]:
    """Put the stand-in of MORI on the import path, where it is needed."""
    with installed(folder) if needed else nullcontext():
        yield


@torch.inference_mode()
def drafted(run: Pipeline, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
    """Return the draft head's logits of every row: `hidden` at t and the token at t + 1."""
    stage = run.stages[-1]
    head = stage.model.mtp
    assert head is not None
    batch = make_batch([Chunk(text(2, pages=4), tokens)], stage.cache, run.page_size)
    rows = torch.zeros(len(batch.token_ids_T), H)
    rows[: len(tokens)] = hidden
    return head.logits(head(batch, rows))[: len(tokens)]
