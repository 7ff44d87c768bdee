"""Which kernels a start would run here, and why not others: for `rocm-serve doctor --kernels`.

Providers are chosen, and where there is a GPU probed, by the functions of a start. What could not be seen is listed.
"""

from __future__ import annotations

import importlib.metadata
import platform as python
import re
import tempfile
from pathlib import Path

import msgspec
import torch

from rocm_serve.agreement import source_hash
from rocm_serve.checkpoint.ledger import stage_catalogue
from rocm_serve.checkpoint.reader import CheckpointReader, read_config
from rocm_serve.config.experts import expert_plan
from rocm_serve.config.load import environment
from rocm_serve.config.resolve import resolve
from rocm_serve.config.schema import ServeConfig
from rocm_serve.executor.binding import Refusals, Wishes, op_facts, settle
from rocm_serve.executor.probe_node import NodeProber, cache_folder, machine_key
from rocm_serve.models.qwen3_5.spec import ConfigFormats, Formats, ModelFacts, parse_config, stage_params
from rocm_serve.ops.bind import REFERENCE, Binding, choose
from rocm_serve.ops.facts import OpFacts
from rocm_serve.ops.probe_cases import probe_cases
from rocm_serve.ops.probe_child import PRODUCT_TABLE, Verdict, ops_of
from rocm_serve.ops.tuning import shape_tunings
from rocm_serve.parallel.board import NotesOfOneProcess
from rocm_serve.parallel.mesh import Coord, Mesh
from rocm_serve.platform.facts import Platform, fp8_dialect
from rocm_serve.platform.gpus import Gpu
from rocm_serve.platform.probe import gpus_seen_by_torch
from rocm_serve.platform.table import fp8_activation
from rocm_serve.version import VERSION

_LIBRARIES = ("torch", "triton", "pytorch-triton-rocm", "amd-aiter", "flydsl", "amd-mori")
_ROWS_FIRST = re.compile(r"(\d+) x (.*)")


class ShapeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One shape of an op. `rows`: the row counts that a probe calls it with."""

    shape: str
    rows: tuple[int, ...] = ()
    tuned_rows: tuple[int, ...] | None = None  # None: its provider looks nothing up in a table


class OpReport(msgspec.Struct, frozen=True, kw_only=True):
    """One op. `probe` says what its provider has shown, or why it was not asked. `called`: the model needs the op."""

    op: str
    provider: str
    tuning: str
    refused: tuple[tuple[str, str], ...]
    probe: str
    shapes: tuple[ShapeReport, ...]
    called: bool = True


class KernelReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer. `seen`: the GPU is here; else it is one that was named, or a CPU."""

    arch: str
    gpu: str
    compute_units: int
    seen: bool
    fp8_dialect: str
    fp8_activation: str
    versions: dict[str, str]
    ops: tuple[OpReport, ...]
    not_seen: tuple[str, ...]


class _Target(msgspec.Struct, frozen=True, kw_only=True):
    """The device that is asked about."""

    platform: Platform
    arch: str  # of the table: "cpu" for any make of it
    seen: bool


def kernel_report(
    config: ServeConfig | None, gpu: Gpu | None, *, run: bool = True, table: str = PRODUCT_TABLE
) -> KernelReport:
    """Say what a start with `config` would bind on this machine's GPU, on `gpu` if one is named, or on the CPU.

    Without a model only what providers say of the device and of packages is known. `run`: probe on a GPU that is here.
    Errors: UserError.
    """
    target = _target(gpu)
    ops = ops_of(table)
    overrides = dict(config.op) if config is not None else {}
    facts = None if config is None else _facts(config, target)
    refused: Refusals = {}
    verdicts: dict[tuple[str, str], Verdict] = {}
    runs = run and target.seen and facts is not None
    if runs and facts is not None:
        refused, verdicts = _probe(facts, target, overrides, table)
    known = {"arch": target.arch} if facts is None else facts.mapping()
    lines = choose(overrides, target.arch, facts=known, table=ops, refused=refused)
    dialect = fp8_dialect(target.platform.device, target.platform.arch)
    return KernelReport(
        arch=target.arch,
        gpu=target.platform.gpu_name,
        compute_units=target.platform.compute_units,
        seen=target.seen,
        fp8_dialect=dialect,
        fp8_activation=fp8_activation(target.arch),
        versions=_versions(),
        ops=tuple(_op(line, facts, verdicts, runs) for line in lines),
        not_seen=tuple(_not_seen(target, gpu, config is not None, runs)),
    )


def _target(gpu: Gpu | None) -> _Target:
    found = gpus_seen_by_torch()
    if gpu is not None:
        here = found.kind != "none" and (found.arch, found.compute_units) == (gpu.arch, gpu.compute_units)
        return _Target(platform=gpu.hosts(8), arch=gpu.arch, seen=here)
    if found.kind == "none":
        cpu = Platform(device="cpu", arch=python.machine(), cores=1, free_ram_bytes=0)
        return _Target(platform=cpu, arch="cpu", seen=False)
    here_now = Platform(
        device=found.kind,
        arch=found.arch,
        num_gpus=found.num_gpus,
        compute_units=found.compute_units,
        hbm_bytes=found.hbm_bytes,
        gpu_name=found.name,
        cores=1,
        free_ram_bytes=0,
    )
    return _Target(platform=here_now, arch=found.arch, seen=True)


def _facts(config: ServeConfig, target: _Target) -> OpFacts:
    """Say what is static in the model on rank 0 of --tp ranks: all layers, both ends, the draft layer if it drafts."""
    path = Path(config.model)
    model = parse_config(*read_config(path))
    config = msgspec.structs.replace(config, pp=1, nnodes=1)
    wide = msgspec.structs.replace(target.platform, num_gpus=max(config.tp, target.platform.num_gpus))
    resolved = resolve(
        config,
        model,
        wide if target.platform.device != "cpu" else target.platform,
        vocab_used=model.vocab_size,
        run_dir="",
        free_port=lambda: 0,
    )
    coord = Mesh(config.tp, 1, config.ep).coord(0)
    plan, mtp = expert_plan(resolved, model), resolved.draft_tokens > 0
    params = stage_params(model, coord, formats=_formats(path, model, coord, mtp=mtp), mtp=mtp, experts=plan)
    return op_facts(
        model,
        params,
        coord,
        resolved,
        arch=target.arch,
        compute_units=target.platform.compute_units,
        dialect=fp8_dialect(target.platform.device, target.platform.arch),
        activation=resolved.fp8_activation,
    )


def _formats(path: Path, model: ModelFacts, coord: Coord, *, mtp: bool) -> Formats:
    """Ask the headers of the shards how tensors are stored; where there are none, the configuration."""
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        return ConfigFormats(model)
    with CheckpointReader(path) as reader:
        return stage_catalogue(reader, model, coord, mtp=mtp)


def _probe(
    facts: OpFacts, target: _Target, overrides: dict[str, str], table: str
) -> tuple[Refusals, dict[tuple[str, str], Verdict]]:
    """Probe on the first GPU, as one node of one rank would."""
    ops = ops_of(table)
    with tempfile.TemporaryDirectory(prefix="rocm_serve_doctor_") as folder:
        prober = NodeProber(
            ops=ops,
            facts=facts,
            device="cuda:0",
            machine=machine_key(torch.device("cuda:0"), facts.arch, facts.compute_units),
            run_dir=Path(folder),
            table=table,
            cache_dir=cache_folder(environment()),
        )
        refused = settle(ops, Wishes(overrides), facts, NotesOfOneProcess(), (0,), prober)
    return refused, prober.verdicts


def _op(line: Binding, facts: OpFacts | None, verdicts: dict[tuple[str, str], Verdict], ran: bool) -> OpReport:
    op = line.op.rpartition(".")[2]
    verdict = verdicts.get((op, line.provider))
    shapes = () if facts is None else _shapes(op, line.provider, facts)
    called = facts is None or bool(shapes)
    if not called:
        probe = "needs none: this model does not call it"
    elif line.fell_back:
        probe = "needs none; slow: a probe refused the kernel that would be bound"
    elif line.provider == REFERENCE:
        probe = "needs none: it is what others are judged by"
    elif verdict is not None:
        probe = f"passed: {verdict.calls} calls, relative L2 up to {verdict.error:.1e}"
    else:
        probe = "not run"
    return OpReport(
        op=line.op,
        provider=line.provider,
        tuning=line.tuning,
        refused=line.refused,
        probe=probe,
        shapes=shapes,
        called=called,
    )


def _shapes(op: str, provider: str, facts: OpFacts) -> tuple[ShapeReport, ...]:
    """Group the calls of a probe by their shape, and put beside each what the provider's tables hold for it."""
    rows: dict[str, list[int]] = {}
    for name in probe_cases(op, facts):
        found = _ROWS_FIRST.fullmatch(name)
        rows.setdefault(found[2] if found else name, []).extend([int(found[1])] if found else [])
    tuned = {one.shape: one.tuned_rows for one in shape_tunings(op, provider, facts)}
    return tuple(
        ShapeReport(shape=shape, rows=tuple(counts), tuned_rows=_of_shape(shape, tuned))
        for shape, counts in rows.items()
    )


def _of_shape(shape: str, tuned: dict[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Find the table's shape in the words of a probe's call, which may say more before or after it."""
    return next((rows for name, rows in tuned.items() if f" {name} " in f" {shape} "), None)


def _versions() -> dict[str, str]:
    found = {"rocm-serve": f"{VERSION} (source {source_hash()})", "python": python.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found | {"torch": str(torch.__version__)}


def _not_seen(target: _Target, gpu: Gpu | None, model: bool, ran: bool) -> list[str]:
    missed = []
    if target.arch == "cpu":
        missed.append(
            f"a GPU: torch {torch.__version__} finds none here, so this is what the CPU runs;"
            " --gpu NAME says what would be tried on one"
        )
    elif not target.seen:
        assert gpu is not None
        missed.append(
            f"an {gpu.name}: it is not here, so no kernel was run; what was refused for want of a GPU or of a package"
            " is this machine's want, and over there a provider's own probe decides"
        )
    if not model:
        missed.append("shapes: without --model DIR no provider was asked about sizes, and no kernel was run")
    elif target.seen and not ran:
        missed.append("results: --no-run was given, no kernel was run")
    if target.seen and ran:
        missed.append("collectives, device graphs and speed: a probe looks at results only")
    return missed
