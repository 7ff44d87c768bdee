"""When each of two GPUs ran which plan, as one SVG. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from evals.bench_gpu.pair_records import PairRecord, Timeline

_WIDTH, _LEFT, _RIGHT = 760, 64, 16
_LANE, _GAP, _PANEL = 22, 4, 92  # heights of a bar, between bars, of a panel
_TOP = 62
_COLOURS = ("#1b6ca8", "#c1440e")  # plans take turns
_MOST_TICKS = 8


def svg(timelines: Sequence[Timeline], points: Sequence[PairRecord], title: str) -> str:
    """Draw a panel for each timeline: one lane a GPU, a box from the start to the end of each of its steps."""
    height = _TOP + _PANEL * len(timelines) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="16" y="22" font-size="14">{escape(title)}</text>',
        *_legend(),
    ]
    for i, one in enumerate(timelines):
        parts += _panel(one, _share_of(one, points), _TOP + _PANEL * i)
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> list[str]:
    words = ("even plans", "odd plans")
    parts = []
    for i, word in enumerate(words):
        x = 16 + 110 * i
        parts.append(f'<rect x="{x}" y="32" width="12" height="12" fill="{_COLOURS[i]}"/>')
        parts.append(f'<text x="{x + 18}" y="42">{word}</text>')
    parts.append('<text x="236" y="42">a box is one plan on one GPU; white between boxes: the GPU waits</text>')
    return parts


def _share_of(one: Timeline, points: Sequence[PairRecord]) -> str:
    for point in points:
        if (point.layout, point.part, point.batch) == (one.layout, one.part, one.batch):
            return f", GPUs idle {point.idle:.1%} of the whole measured stretch"
    return ""


def _panel(one: Timeline, share: str, top: int) -> list[str]:
    end = max(stop for _, _, _, stop in one.bars)
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    what = "decoding" if one.part == "decode" else "prompts"
    parts = [f'<text x="{_LEFT}" y="{top + 12}">{escape(one.layout)}, {one.batch} {what}{escape(share)}</text>']
    ranks = sorted({rank for rank, *_ in one.bars})
    for lane, rank in enumerate(ranks):
        y = top + 18 + lane * (_LANE + _GAP)
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">GPU {rank}</text>')
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y + _LANE}" y2="{y + _LANE}" stroke="#ccc"/>')
        for owner, seq, start, stop in one.bars:
            if owner == rank:
                x, width = _LEFT + start * scale, max(0.5, (stop - start) * scale)
                parts.append(
                    f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_LANE}" fill="{_COLOURS[seq % 2]}"'
                    f' stroke="#fff" stroke-width="0.5"><title>plan {seq}: {start:.0f} to {stop:.0f} us</title></rect>'
                )
    y = top + 18 + len(ranks) * (_LANE + _GAP)
    step = _tick(end)
    for i in range(int(end // step) + 1):
        x = _LEFT + i * step * scale
        parts.append(f'<text x="{x:.1f}" y="{y + 10}" font-size="10" text-anchor="middle">{i * step / 1e3:g} ms</text>')
    return parts


def _tick(end: float) -> float:
    """Return a round step, in microseconds, of which at most so many fit."""
    step = 1.0
    while end / step > _MOST_TICKS:
        step *= 2.5 if f"{step:.0f}".startswith("2") and not f"{step:.0f}".startswith("25") else 2
    return step
