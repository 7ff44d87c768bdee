"""Prefill: which ops and steps are measured, at which rows and contexts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from evals.bench_gpu import measuring, op_level, prefill_level, stage, step_level
from evals.bench_gpu.measuring import Measuring, compile_points, tokens_that_fit
from evals.bench_gpu.prefill_records import PrefillRecord
from rocm_serve.errors import UserError
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.runner import StageRunner
from rocm_serve.ops.bind import binding_lines
from rocm_serve.tuning import floor, floor_prefill
from rocm_serve.tuning.floor_prefill import Mixed
from rocm_serve.tuning.shapes import SHAPES
from rocm_serve.tuning.wish import Point

ROWS = (2048, 8192, 16384, 512)  # the first two have aims
LONG_CONTEXT = 30 << 10
SHORT_PROMPTS = (64, 128)  # so many of so many rows
DECODES = (64, 1024)  # beside a prompt: so many after so many tokens
_BESIDE = 2048  # rows of the prompt after a long context, and of that beside decodes
_MARGIN = 64  # positions beyond the longest


def shapes_of(rows: Sequence[int], kinds: Sequence[str], *, most: int = 1 << 30) -> list[Mixed]:
    """List the steps, kinds and rows in the order given. `most`: cuts every size, for a trial."""
    decodes, context = (min(size, most) for size in DECODES)
    prompts, each = (min(size, most) for size in SHORT_PROMPTS)
    beside = min(_BESIDE, most)
    listed = {
        "single": [Mixed(min(count, most)) for count in rows],
        "context": [Mixed(beside, context=min(LONG_CONTEXT, most))],
        "short": [Mixed(each, prompts=prompts)],
        "mixed": [Mixed(beside, decodes=decodes, decode_context=context)],
    }
    return [one for kind in kinds for one in listed[kind]]


def longest(a: argparse.Namespace) -> tuple[int, str]:
    """Return the tokens of the longest sequence, and the flags that say so."""
    steps = shapes_of(a.rows, a.kinds, most=a.most) if "step" in a.levels else []
    return _longest([*steps, Mixed(max(a.rows))] if "ops" in a.levels else steps), "--rows, --kinds and --most"


def ops(a: argparse.Namespace) -> list[op_level.Make]:
    """List what makes the cases of ops."""
    return list(op_level.prompt_points(a.rows, a.most))


def _longest(shapes: Sequence[Mixed]) -> int:
    return max(max(one.context + one.rows, one.decode_context) for one in shapes) + _MARGIN


def _rank(run: Measuring, name: str, shapes: Sequence[Mixed]) -> stage.Rank:
    running = max(one.prompts + one.decodes for one in shapes)
    return stage.rank_of(name, running=running, longest=_longest(shapes), op=run.arguments.op)


def ops_of_shape(run: Measuring, name: str) -> None:
    """Measure the ops of one shape."""
    a = run.arguments
    rank = _rank(run, name, [Mixed(max(a.rows))])
    measuring.ops_of_shape(run, name, ops(a), rank)


def _points_of_steps(shapes: Sequence[Mixed]) -> Iterator[Point]:
    """Name the calls of these steps whose kernels take longest to compile."""
    for one in shapes:
        rows = {"rows": one.num_rows}
        yield Point("experts", rows)
        yield Point("attention_prefill", {"rows": one.rows, "context": one.context, "count": one.prompts})
        yield Point("gdn_chunk", {"rows": one.rows, "count": one.prompts})
        yield Point("prompt_conv", {"rows": one.rows, "count": one.prompts})
        yield Point("norms", {**rows, "residual": True})
        yield Point("route", rows)
        yield Point("qk", rows)
        yield Point("shared_add", rows)
        yield Point("head", {"rows": one.prompts + one.decodes})
        if one.decodes:
            yield Point("attention", {"rows": one.decodes, "context": one.decode_context})
            yield Point("step", {"rows": one.decodes})


def steps_of_shape(run: Measuring, name: str) -> None:
    """Measure whole steps of one shape, its model built once."""
    a = run.arguments
    wished = shapes_of(a.rows, a.kinds, most=a.most)
    if not run.reached(f"{name}: all steps"):
        return
    rank = _rank(run, name, wished)
    run.run.bound[name] = list(binding_lines(rank.ops.report))
    compile_points(run, rank, list(_points_of_steps(wished)))
    _steps_of_stage(run, name, stage.load(rank, a.seed), wished)
    run.clean(thoroughly=True)


def _steps_of_stage(run: Measuring, name: str, loaded: LoadedStage, wished: Sequence[Mixed]) -> None:
    a = run.arguments
    page = loaded.resolved.page_size
    slots = max(one.prompts + one.decodes for one in wished)
    needed = [
        one.prompts * (one.context + one.rows + page) + one.decodes * (one.decode_context + a.steps + _MARGIN + page)
        for one in wished
    ]
    fits = tokens_that_fit(loaded, slots)
    tokens = max((count for count in needed if count <= fits), default=0)
    runner = loaded.runner(num_pages=-(-tokens // page), num_slots=slots)
    step_level.randomise(runner.cache, torch.Generator(run.device).manual_seed(a.seed))
    for i, (one, count) in enumerate(zip(wished, needed, strict=True)):
        if count > tokens:
            run.run.left_out.append(f"{name} prefill {one} (does not fit the memory)")
            continue
        for mode, how in _modes(run, name, loaded, runner, one):
            what = f"{name} {mode} prefill {one}"
            if not run.reached(what):
                continue
            try:
                found = prefill_level.measure(loaded, how, one, (i + 1) << 16, steps=a.steps)
            except Exception as error:  # whatever ends a point is written down, and the next one is tried
                run.failed(what, error)
                continue
            run.found(_record(run, name, one, found, captured=mode == "graphs"))


def _modes(
    run: Measuring, name: str, loaded: LoadedStage, runner: StageRunner, one: Mixed
) -> Iterator[tuple[str, StageRunner]]:
    """Yield the step as a server has it, a graph where it is one, and where that is asked for without graphs too."""
    plain = replace(runner, prompts=None)
    try:
        fixed = prefill_level.at_fixed_sizes(loaded, runner, [one]) if "graphs" in run.arguments.modes else plain
    except UserError as error:
        run.failed(f"{name} prefill {one}: capture", error)
        fixed = plain
    if fixed.prompts is not None:
        yield "graphs", fixed
    if fixed.prompts is None or "eager" in run.arguments.modes:
        yield "eager", plain


def _record(
    run: Measuring, name: str, one: Mixed, found: prefill_level.PrefillFinding, *, captured: bool
) -> PrefillRecord:
    dims, tokens = SHAPES[name], one.num_rows
    uniform = floor.expected_distinct(dims.experts, dims.top_k, tokens)
    parts = floor_prefill.step(dims, one, found.distinct)
    least = floor.seconds(parts, run.ceilings) * 1e3
    even = floor.seconds(floor_prefill.step(dims, one, [uniform] * dims.layers), run.ceilings) * 1e3
    device, listed = found.device, run.arguments.profile
    return PrefillRecord(
        shape=name,
        prompts=one.prompts,
        rows=one.rows,
        context=one.context,
        decodes=one.decodes,
        decode_context=one.decode_context,
        tokens=tokens,
        captured=captured,
        wall_ms=found.wall,
        low=found.wall_low,
        high=found.wall_high,
        host_ms=found.host,
        busy_ms=None if device is None else device.busy,
        idle_ms=None if device is None else device.idle,
        tokens_s=tokens / found.wall * 1e3,
        floor_ms=least,
        uniform_floor_ms=even,
        ratio=least / found.wall,
        uniform_ratio=even / found.wall,
        distinct=sum(found.distinct) / len(found.distinct),
        uniform_distinct=uniform,
        fullest=sum(found.fullest) / len(found.fullest),
        parts_ms={cost.op: cost.seconds(run.ceilings) * 1e3 for cost in parts},
        kernels=device.kernels if device is not None and listed else {},
        gaps=device.gaps if device is not None and listed else {},
    )
