"""One rank's model with random weights, built of the engine's own parts: no files, no probes of providers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

import torch

from rocm_serve.config.experts import expert_plan
from rocm_serve.config.resolve import LEAST_MODEL_LEN, resolve
from rocm_serve.config.schema import Resolved, ServeConfig
from rocm_serve.errors import UserError
from rocm_serve.executor import stage_memory
from rocm_serve.executor.binding import op_facts
from rocm_serve.executor.device import MODEL_DTYPES, dialect_of
from rocm_serve.executor.experts import build_exchanges
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, stage_params
from rocm_serve.models.registry import build_model
from rocm_serve.ops.bind import BoundOps, bind_ops, choose
from rocm_serve.ops.facts import OpFacts
from rocm_serve.ops.fp8 import FP8_DTYPES
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.layout import Param
from rocm_serve.parallel.mesh import Coord, Mesh
from rocm_serve.platform.facts import Platform
from rocm_serve.platform.probe import free_ram_bytes, gpus_seen_by_torch
from rocm_serve.tuning import weights
from rocm_serve.tuning.compiling import Compilers
from rocm_serve.tuning.shapes import SHAPES, facts_of
from rocm_serve.tuning.wish import Point, Wish


@dataclass(frozen=True, slots=True)
class Rank:
    """What is fixed before any weight exists: the one rank of a shape on this machine."""

    name: str
    facts: ModelFacts
    resolved: Resolved
    coord: Coord
    params: Mapping[str, Param]
    ops: BoundOps
    device: torch.device
    arch: str
    compute_units: int


def device_here() -> torch.device:
    """Return the first GPU, or the CPU of a machine without one."""
    return torch.device("cpu" if gpus_seen_by_torch().kind == "none" else "cuda:0")


def rank_of(
    name: str,
    *,
    running: int,
    longest: int,
    op: Mapping[str, str] | None = None,
    kv_cache_dtype: str = "auto",
) -> Rank:
    """Decide what a start would decide, and bind ops by the table of this machine. Errors: UserError."""
    facts, device = facts_of(name), device_here()
    resolved = _resolved(name, running=running, longest=longest, op=op or {}, kv_cache_dtype=kv_cache_dtype)
    coord, params = _of_one_rank(facts)
    static = _static(facts, coord, params, resolved, device)
    ops = bind_ops(resolved.op, static.arch, facts=static.mapping(), activation=resolved.fp8_activation)
    return Rank(name, facts, resolved, coord, params, ops, device, static.arch, static.compute_units)


def check_ops(names: Sequence[str], op: Mapping[str, str]) -> None:
    """Refuse a wish for a provider that one of the shapes cannot have, before any of them is run. Errors: UserError.

    Providers are asked, too, as `rank_of` asks them; none is loaded.
    """
    for name in names:
        facts = facts_of(name)
        resolved = _resolved(name, running=1, longest=LEAST_MODEL_LEN, op=op, kv_cache_dtype="auto")
        static = _static(facts, *_of_one_rank(facts), resolved, device_here())
        choose(resolved.op, static.arch, facts=static.mapping())


def check_length(names: Sequence[str], longest: int, flags: str) -> None:
    """Refuse sequences that are longer than a shape's positions. Errors: UserError."""
    for name in names:
        most = facts_of(name).max_position
        if longest > most:
            raise UserError(f"{flags} ask for {longest} tokens of a sequence; legal with {name}: {most} at most")


def _of_one_rank(facts: ModelFacts) -> tuple[Coord, dict[str, Param]]:
    coord = Mesh(1, 1).coord(0)
    return coord, stage_params(facts, coord, formats=ConfigFormats(facts), mtp=False)


def _static(
    facts: ModelFacts, coord: Coord, params: Mapping[str, Param], resolved: Resolved, device: torch.device
) -> OpFacts:
    gpus = gpus_seen_by_torch()
    return op_facts(
        facts,
        params,
        coord,
        resolved,
        arch="cpu" if device.type == "cpu" else gpus.arch,
        compute_units=gpus.compute_units,
        dialect=dialect_of(device),
        activation=resolved.fp8_activation,
    )


def _resolved(name: str, *, running: int, longest: int, op: Mapping[str, str], kv_cache_dtype: str) -> Resolved:
    gpus = gpus_seen_by_torch()
    platform = Platform(
        device="cpu" if gpus.kind == "none" else gpus.kind,
        arch=gpus.arch,
        num_gpus=gpus.num_gpus,
        compute_units=gpus.compute_units,
        hbm_bytes=gpus.hbm_bytes,
        gpu_name=gpus.name,
        cores=1,
        free_ram_bytes=free_ram_bytes(),
    )
    config = ServeConfig(
        model=name,
        max_running_requests=running,
        max_model_len=longest,
        op=dict(op),
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
    )
    facts = facts_of(name)
    return resolve(config, facts, platform, vocab_used=facts.vocab_size, run_dir="", free_port=lambda: 0)


def load(rank: Rank, seed: int) -> LoadedStage:
    """Build the model on the device and fill it with random numbers."""
    resolved, facts, device = rank.resolved, rank.facts, rank.device
    dtype = MODEL_DTYPES[resolved.dtype]
    comm = SoloComm()
    experts = build_exchanges(
        facts,
        expert_plan(resolved, facts),
        rank.coord,
        resolved,
        comm,
        host=None,
        compute_units=rank.compute_units,
        dtype=dtype,
    )
    model = build_model(
        facts,
        rank.coord,
        rank.params,
        comm,
        rank.ops,
        device=device,
        dtype=dtype,
        mtp=False,
        fp8=FP8_DTYPES[dialect_of(device)],
        experts=experts.wiring,
    )
    weights.fill(model.named_parameters(), torch.Generator(device).manual_seed(seed))
    model.prepare()
    planned = stage_memory.weight_bytes(rank.params, rank.coord, resolved)
    held = sum(tensor.nbytes for tensor in model.state_dict().values())
    return LoadedStage(resolved, rank.coord, facts, model, rank.ops, comm, device, dtype, planned, held, 0, experts, 0)


def compile_beside(rank: Rank, points: Sequence[Point], jobs: int, timeout_s: float) -> list[str]:
    """Compile what these calls launch in several processes: one after the other it would take most of a run.

    Returns what could not be; it is compiled, or fails, when it is called.
    """
    d = SHAPES[rank.name]
    wish = Wish(
        dims={field: getattr(d, field) for field in d.__dataclass_fields__},
        providers={op: provider.name for op, provider in rank.ops.providers.items()},
        arch=rank.arch,
        dtype=rank.resolved.dtype,
        dialect=dialect_of(rank.device),
        activation=rank.resolved.fp8_activation,
        seed=0,
    )
    compilers = Compilers(wish, jobs)
    try:
        futures = {str(point): compilers.compile(point) for point in points}
        wait(futures.values(), timeout_s)
        return [f"{name}: {future.result()}" for name, future in futures.items() if future.done() and future.result()]
    finally:
        compilers.stop()
