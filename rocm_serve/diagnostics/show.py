"""A launch plan for people (a table on a terminal, plain lines otherwise) and for programs (JSON)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec
from rich.console import Console
from rich.table import Table

from rocm_serve.diagnostics.launch_result import Launch, RankMemory
from rocm_serve.diagnostics.split import Split
from rocm_serve.executor.budget import human

COLUMNS = ("ranks", "stage", "layers", "weights", "step", "caches", "page", "slot", "outside (estimated)")
_FILES_SHOWN = 4


def show(launch: Launch, console: Console) -> None:
    """Print the plan."""
    for line in head_lines(launch):
        console.print(line)
    print_rows(COLUMNS, rank_rows(launch), console)
    for line in tail_lines(launch):
        console.print(line)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], console: Console) -> None:
    """Print a table on a terminal, else a line for each row."""
    if console.is_terminal:
        table = Table(*columns)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    for row in rows:
        console.print(", ".join(f"{name} {value}" for name, value in zip(columns, row, strict=True)))


def head_lines(launch: Launch) -> Iterator[str]:
    resolved, gpu = launch.resolved, launch.gpu
    degrees = f"tp {resolved.tp} x pp {resolved.pp}" + (f" with ep {resolved.ep}" if resolved.ep > 1 else "")
    yield (
        f"plan: {degrees} on {resolved.nnodes} x {launch.mesh.world // resolved.nnodes}"
        f" {gpu.name} ({gpu.arch}, {human(gpu.hbm_bytes)} each), by {launch.source}"
    )
    tp, ep = ", ".join(map(str, launch.legal.tp)), ", ".join(map(str, launch.legal.ep))
    beside = f"(with ep {resolved.ep}); pp 1..{launch.legal.pp}"
    yield f"legal for this model: tp {tp} {beside}; ep {ep} (with tp {resolved.tp})"
    yield from expert_lines(launch)
    yield f"stages as the server cuts them: {_split(launch.split)}; neutral: {_split(launch.neutral)}"
    if launch.server_with_mtp is not None and launch.neutral_with_mtp is not None:
        yield (
            f"with the draft layer (--speculative mtp): {_split(launch.server_with_mtp)};"
            f" neutral: {_split(launch.neutral_with_mtp)}"
        )
    one = launch.ranks[0]
    reserved = ((one.heap, "MORI's heap"), (one.sums, "AITER's buffers for sums over ranks"))
    heap = "".join(f" and {human(size)} of {what}" for size, what in reserved if size)
    yield (
        f"budget of a rank: --mem-fraction {resolved.mem_fraction:g} of {human(gpu.hbm_bytes)} less"
        f" {human(one.runtime)} of driver and libraries (estimated){heap} = {human(one.allowed)};"
        f" {resolved.dtype}, KV in {resolved.kv_cache_dtype}"
    )
    if any(rank.preparing for rank in launch.ranks):
        yield (
            f"while weights are laid out for their kernels, up to {human(max(r.preparing for r in launch.ranks))} of"
            " them exist twice, before there are caches"
        )


def expert_lines(launch: Launch) -> Iterator[str]:
    """Say how experts lie and how rows come to them, unless that is plain tensor parallelism."""
    resolved, experts = launch.resolved, launch.experts
    if experts is None or (resolved.ep == 1 and resolved.expert_exchange == "local"):
        return
    cut = "each expert whole" if experts.slices == 1 else f"each expert cut in {experts.slices} slices"
    line = f"experts: {experts.slots} slots a rank, {cut}; exchange {resolved.expert_exchange}"
    if resolved.expert_capacity:
        line += f", up to {resolved.expert_capacity} rows a rank"
        line += f", up to {human(max(rank.exchange for rank in launch.ranks))} of a step for rows on their way"
    if experts.shared_extra:
        line += f"; the shared expert is whole on every rank: {human(experts.shared_extra)} more than cut"
    yield line


def rank_rows(launch: Launch) -> Iterator[tuple[str, ...]]:
    """One row for ranks that hold the same."""
    for _, group in groupby(launch.ranks, key=_same):
        ranks = list(group)
        one, weights = ranks[0], ranks[0].weights
        last = ranks[-1].weights.rank
        parts = ", ".join(f"{name} {human(size)}" for name, size in weights.weight_bytes.items() if size)
        yield (
            f"{weights.rank}" if last == weights.rank else f"{weights.rank}..{last}",
            f"{weights.stage}",
            f"{weights.layers.start}..{weights.layers.stop - 1}",
            f"{human(weights.total_bytes)} ({parts})",
            human(one.step),
            human(one.cache) if one.cache > 0 else f"none: {human(-one.cache)} too much",
            human(one.page),
            human(one.slot),
            f"communicators {human(one.communicators)}, graphs {human(one.graphs)}",
        )


def tail_lines(launch: Launch) -> Iterator[str]:
    for node in launch.nodes:
        size = "" if node.nbytes is None else f", {human(node.nbytes)}"
        shown = " ".join(node.files[:_FILES_SHOWN]) + (" ..." if len(node.files) > _FILES_SHOWN else "")
        yield f"node {node.node} reads {len(node.files)} files{size}: {shown}"
    if launch.missing_files:
        yield f"not here yet: {len(launch.missing_files)} of the files that the index names"
    if launch.limits is not None:
        limits = launch.limits
        for field in ("max_model_len", "num_pages", "num_slots"):
            yield f"effective {field} = {getattr(limits, field)}  ({limits.reasons[field]})"
        for load in launch.concurrency:
            yield f"at {load.length} tokens: {load.at_once} requests at once; memory alone allows {load.by_memory}"
    yield verdict(launch)


def verdict(launch: Launch) -> str:
    """Say yes, or no and why, in one line."""
    if launch.why is None:
        return "fits"
    return f"does not fit: {launch.why}" + (f"; {launch.fits_with}" if launch.fits_with else "")


def to_json(launch: Launch) -> bytes:
    """Encode the plan; sizes in bytes, every rank on its own."""
    resolved, limits = launch.resolved, launch.limits
    plan = {
        "fits": launch.fits,
        "why": launch.why,
        "fits_with": launch.fits_with,
        "source": launch.source,
        "architecture": launch.facts.architecture,
        "gpu": launch.gpu,
        "tp": resolved.tp,
        "pp": resolved.pp,
        "ep": resolved.ep,
        "expert_exchange": resolved.expert_exchange,
        "expert_capacity": resolved.expert_capacity,
        "experts": launch.experts,
        "nnodes": resolved.nnodes,
        "mtp": launch.mtp,
        "mem_fraction": resolved.mem_fraction,
        "max_model_len": resolved.max_model_len,
        "kv_cache_dtype": resolved.kv_cache_dtype,
        "legal": launch.legal,
        "splits": {
            "server": launch.split,
            "neutral": launch.neutral,
            "server_with_mtp": launch.server_with_mtp,
            "neutral_with_mtp": launch.neutral_with_mtp,
        },
        "ranks": [_rank_json(one) for one in launch.ranks],
        "nodes": launch.nodes,
        "missing_files": launch.missing_files,
        "limits": None if limits is None else msgspec.structs.asdict(limits),
        "kv_tokens": None if limits is None else limits.num_pages * limits.page_size,
        "concurrency": launch.concurrency,
    }
    return msgspec.json.format(msgspec.json.encode(plan), indent=1)


def _rank_json(one: RankMemory) -> dict[str, object]:
    weights = one.weights
    return {
        "rank": weights.rank,
        "stage": weights.stage,
        "layers": [weights.layers.start, weights.layers.stop],
        "weight_bytes": dict(weights.weight_bytes),
        "disk_bytes": weights.disk_bytes,
        "allowed_bytes": one.allowed,
        "preparing_bytes": one.preparing,
        "step_bytes": one.step,
        "exchange_bytes": one.exchange,
        "heap_bytes": one.heap,
        "sums_bytes": one.sums,
        "cache_bytes": one.cache,
        "page_bytes": one.page,
        "slot_bytes": one.slot,
        "estimates": {"runtime": one.runtime, "communicators": one.communicators, "graphs": one.graphs},
    }


def _split(split: Split) -> str:
    return f"{split.words} ({', '.join(human(size) for size in split.stage_bytes)} of weights a rank)"


def _same(one: RankMemory) -> tuple[object, ...]:
    weights = one.weights
    return weights.stage, tuple(weights.weight_bytes.items()), one.allowed, one.step, one.cache, one.page, one.slot
