"""The share of the floor that steps reach, by batch or by tokens of a prompt, as one SVG. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log2

from evals.bench_gpu.prefill_records import PrefillRecord, vllm_ms
from evals.bench_gpu.records import VLLM_MS, StepRecord

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 250, 40, 48
_MODES = ("eager", "graphs", "ahead")  # what a server has comes last
_COLOURS = ("#1b6ca8", "#c1440e", "#2e7d32", "#6a1b9a", "#8d6e00", "#00838f")

Line = tuple[str, list[tuple[int, float]], bool]  # name, (batch, ratio), dashed


def lines_of(steps: Sequence[StepRecord]) -> list[Line]:
    """Group steps by shape and context; vLLM's own figures, over the same uniform floor, are dashed.

    A step is drawn in the mode that a server has it in, of those that were measured: planned ahead, else captured.
    """
    found: dict[tuple[str, int], dict[int, float]] = {}
    peers: dict[tuple[str, int], dict[int, float]] = {}
    for one in sorted(steps, key=lambda one: _MODES.index(one.mode)):
        found.setdefault((one.shape, one.context), {})[one.batch] = one.uniform_ratio
        vllm = VLLM_MS.get(one.shape, {}).get((one.batch, one.context))
        if vllm is not None:
            peers.setdefault((one.shape, one.context), {})[one.batch] = one.uniform_floor_ms / vllm
    ours: list[Line] = [
        (f"{shape}, ctx {context}", sorted(points.items()), False) for (shape, context), points in found.items()
    ]
    theirs: list[Line] = [
        (f"{shape}, ctx {context}, vLLM 0.26", sorted(points.items()), True)
        for (shape, context), points in peers.items()
    ]
    return ours + theirs


def lines_of_prefill(steps: Sequence[PrefillRecord]) -> list[Line]:
    """Group steps of one prompt by shape and context; vLLM's own figures, over the same uniform floor, are dashed.

    A step that ran as a graph is drawn as that, as a server has it.
    """
    found: dict[tuple[str, int], dict[int, float]] = {}
    peers: dict[str, dict[int, float]] = {}
    for one in sorted(steps, key=lambda one: one.captured):
        if one.prompts > 1 or one.decodes:
            continue
        found.setdefault((one.shape, one.context), {})[one.rows] = one.uniform_ratio
        vllm = vllm_ms(one)
        if vllm is not None:
            peers.setdefault(one.shape, {})[one.rows] = one.uniform_floor_ms / vllm
    ours: list[Line] = [
        (f"{shape}{f', context {context}' if context else ''}", sorted(points.items()), False)
        for (shape, context), points in found.items()
    ]
    return ours + [(f"{shape}, vLLM 0.26", sorted(points.items()), True) for shape, points in peers.items()]


def svg(lines: Sequence[Line], title: str, axis: str = "batch") -> str:
    """Draw ratio (0 to 1) over batch or tokens (powers of two)."""
    batches = sorted({at for _, points, _ in lines for at, _ in points}) or [1]
    low, high = log2(batches[0]), max(log2(batches[-1]), log2(batches[0]) + 1)

    def x(batch: float) -> float:
        return _LEFT + (log2(batch) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(ratio: float) -> float:
        return _HEIGHT - _BOTTOM - min(ratio, 1.0) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for i in range(6):
        at = y(i / 5)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{i / 5:.1f}</text>')
    for batch in batches:
        parts.append(f'<text x="{x(batch):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{batch}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">{axis}</text>')
    for i, (name, points, dashed) in enumerate(lines):
        colour = _COLOURS[i % len(_COLOURS)]
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        path = " ".join(f"{x(batch):.1f},{y(ratio):.1f}" for batch, ratio in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts += [f'<circle cx="{x(b):.1f}" cy="{y(r):.1f}" r="3" fill="{colour}"/>' for b, r in points]
        at = _TOP + 16 * i
        from_x, to_x = _WIDTH - _RIGHT + 16, _WIDTH - _RIGHT + 40
        parts.append(f'<line x1="{from_x}" x2="{to_x}" y1="{at}" y2="{at}" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{to_x + 6}" y="{at + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])
