"""Decode: which ops and steps are measured, at which batches and contexts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product

import torch

from evals.bench_gpu import measuring, op_level, stage, step_level
from evals.bench_gpu.measuring import Measuring, compile_points, tokens_that_fit
from evals.bench_gpu.records import StepRecord
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.ops.bind import binding_lines
from rocm_serve.tuning import floor
from rocm_serve.tuning.shapes import SHAPES, facts_of
from rocm_serve.tuning.wish import Point

BATCHES = (1, 8, 16, 64, 256)
CONTEXTS = (1024, 8192, 32768)
_FIRST_CONTEXT = {"q35tp1": 1024, "q38tp8": 8192}  # where vLLM was measured, and aims are
_STEP_SLOTS = 8  # more than the largest batch
_MARGIN_OF_OPS = 64  # positions behind the longest context


def contexts(a: argparse.Namespace) -> list[int]:
    """Return the contexts to measure where none is asked for: those that every shape has positions for, or one."""
    most = min(facts_of(name).max_position for name in a.shape)
    return [context for context in CONTEXTS if context + max(_MARGIN_OF_OPS, _margin(a)) <= most] or [CONTEXTS[0]]


def longest(a: argparse.Namespace) -> tuple[int, str]:
    """Return the tokens of the longest sequence, and the flags that say so."""
    return max(a.ctx) + max(_MARGIN_OF_OPS, _margin(a) if "step" in a.levels else 0), "--ctx"


def ops(a: argparse.Namespace) -> list[op_level.Make]:
    """List what makes the cases of ops."""
    return list(op_level.op_points(a.batch, a.ctx, a.many))


def _margin(a: argparse.Namespace) -> int:
    return step_level.WARM_UP_STEPS + int(a.steps) + 32


def ops_of_shape(run: Measuring, name: str) -> None:
    """Measure the ops of one shape."""
    a = run.arguments
    rank = stage.rank_of(name, running=max(a.batch), longest=max(a.ctx) + _MARGIN_OF_OPS, op=a.op)
    measuring.ops_of_shape(run, name, ops(a), rank)


def _points_of_steps(batches: Sequence[int]) -> list[Point]:
    """Name the calls of a step whose kernels have a tile for each batch."""
    names = ("experts", "attention", "step", "conv", "head", "norms", "route", "qk", "shared_add")
    more: dict[str, dict[str, int]] = {"attention": {"context": 1024}, "norms": {"residual": True}}
    return [Point(name, {"rows": rows, **more.get(name, {})}) for name in names for rows in batches]


def steps_of_shape(run: Measuring, name: str) -> None:
    """Measure whole steps of one shape, its model built once."""
    a = run.arguments
    wished = list(step_level.points(a.batch, a.ctx, _FIRST_CONTEXT.get(name, min(a.ctx))))
    if not run.reached(f"{name}: all steps"):
        return
    margin = _margin(a)
    most = max(context for _, context in wished) + margin
    rank = stage.rank_of(name, running=max(a.batch), longest=most, op=a.op)
    run.run.bound[name] = list(binding_lines(rank.ops.report))
    compile_points(run, rank, _points_of_steps(a.batch))
    loaded = stage.load(rank, a.seed)
    modes = list(a.modes)
    if "graphs" in modes and loaded.graph_refusal is not None:
        run.run.left_out.append(f"{name}: graphs: {loaded.graph_refusal}")
        modes.remove("graphs")
    _steps_of_stage(run, name, modes, loaded, wished, margin)
    del loaded, rank
    run.clean(thoroughly=True)


def _steps_of_stage(
    run: Measuring,
    name: str,
    modes: Sequence[str],
    loaded: LoadedStage,
    wished: Sequence[tuple[int, int]],
    margin: int,
) -> None:
    a = run.arguments
    slots = max(batch for batch, _ in wished) + _STEP_SLOTS
    fits = tokens_that_fit(loaded, slots)
    tokens = max(
        (batch * (context + margin) for batch, context in wished if batch * (context + margin) <= fits), default=0
    )
    page = loaded.resolved.page_size
    runner = loaded.runner(num_pages=-(-tokens // page) + slots, num_slots=slots)
    step_level.randomise(runner.cache, torch.Generator(run.device).manual_seed(a.seed))
    for i, ((batch, context), mode) in enumerate(product(wished, modes)):
        what = f"{name} {mode} step B {batch} ctx {context}"
        if batch * (context + margin) > tokens:
            run.run.left_out.append(f"{what} (does not fit the memory)")
            continue
        if not run.reached(what):
            continue
        try:
            ahead = mode == "ahead"
            captured = mode == "graphs" or (ahead and loaded.graph_refusal is None)
            how = {"captured": captured, "ahead": ahead, "steps": a.steps, "profile": a.profile}
            found = step_level.measure(loaded, runner, batch, context, (i + 1) << 16, **how)
        except Exception as error:  # whatever ends a point is written down, and the next one is tried
            run.failed(what, error)
            continue
        run.found(_step_record(run, name, mode, batch, context, found))


def _step_record(
    run: Measuring, name: str, mode: str, batch: int, context: int, found: step_level.StepFinding
) -> StepRecord:
    dims = SHAPES[name]
    uniform = floor.expected_distinct(dims.experts, dims.top_k, batch)
    parts = floor.step(dims, batch, context, found.distinct)
    least = floor.seconds(parts, run.ceilings) * 1e3
    even = floor.seconds(floor.step(dims, batch, context, [uniform] * dims.layers), run.ceilings) * 1e3
    return StepRecord(
        shape=name,
        mode=mode,
        batch=batch,
        context=context,
        wall_ms=found.wall,
        low=found.wall_low,
        high=found.wall_high,
        device_ms=found.device,
        device_how=found.device_how,
        floor_ms=least,
        uniform_floor_ms=even,
        ratio=least / found.wall,
        uniform_ratio=even / found.wall,
        distinct=sum(found.distinct) / len(found.distinct),
        uniform_distinct=uniform,
        kernels=found.kernels,
        parts_ms={cost.op: cost.seconds(run.ceilings) * 1e3 for cost in parts},
    )
