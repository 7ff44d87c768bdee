"""Plots as inline SVG, made by hand: no library, nothing to fetch. Colours are classes, so the page's theme rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from rocm_serve.diagnostics.gate.protocol import Filter
from rocm_serve.diagnostics.gate.verdict import Score

WIDTH: Final = 760
_LEFT, _RIGHT = 150, 190  # columns of labels
_ROW = 58
_BARS = 24
_PLOT_HEIGHT = 190


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear scale with round ticks."""

    low: float
    high: float
    start: float  # pixels
    end: float

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        step = round_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


def round_step(rough: float) -> float:
    """Return the least of 1, 2, 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def accuracy(scores: Mapping[Filter, Score], gated: Filter, least: int) -> str:
    """Draw each filter's share with its interval, the reference's share, and the floor of the one that is gated."""
    rows = sorted(scores.items(), key=lambda row: row[0] != gated)  # the gated one first, below the floor's label
    floor = least / rows[0][1].questions
    values = [value for _, one in rows for value in (one.low, one.high, one.reference)] + [floor]
    spread = max(max(values) - min(values), 0.02)
    low, high = max(0.0, min(values) - 0.12 * spread), min(1.0, max(values) + 0.12 * spread)
    axis = Axis(low, high, _LEFT, WIDTH - _RIGHT)
    top, bottom = 30, 30 + _ROW * len(rows)
    parts = [_grid(axis, top, bottom, "{:.3f}")]
    for number, (name, one) in enumerate(rows):
        y = top + _ROW * number
        parts.append(_score_row(axis, name, one, y))
        if name == gated:
            x = axis.at(floor)
            parts.append(_line(x, y + 4, x, y + _ROW - 4, "floor"))
            parts.append(_text(x, top - 10, f"floor {floor:.4f}", "label", "middle"))
    description = "share of right answers with 95 % interval, reference and floor"
    return _svg("".join(parts), bottom + 34, description)


def _score_row(axis: Axis, name: str, one: Score, y: float) -> str:
    ours, theirs = y + 20, y + 41
    x = axis.at(one.reference)
    return "".join(
        (
            _text(_LEFT - 14, ours + 4, name, "name", "end"),
            _line(axis.at(one.low), ours, axis.at(one.high), ours, "ours-line"),
            _line(axis.at(one.low), ours - 6, axis.at(one.low), ours + 6, "ours-line"),
            _line(axis.at(one.high), ours - 6, axis.at(one.high), ours + 6, "ours-line"),
            f'<circle class="ours" cx="{axis.at(one.share):.1f}" cy="{ours}" r="6"/>',
            f'<path class="theirs" d="M{x:.1f} {theirs - 6}l6 6l-6 6l-6 -6z"/>',
            _text(WIDTH - _RIGHT + 14, ours + 4, f"server {one.share:.4f}", "name", "start"),
            _text(WIDTH - _RIGHT + 14, theirs + 4, f"reference {one.reference:.4f}", "label", "start"),
        )
    )


def histogram(values: Sequence[float], others: Sequence[float], unit: str, description: str) -> str:
    """Draw how often each value occurs; `others` (the reference's) as an outline over it, scaled to the same total."""
    everything = [*values, *others]
    high = max(everything)
    step = round_step(max(high, 1e-9) / _BARS)
    count = math.floor(high / step) + 1
    ours, theirs = _bins(values, step, count), _bins(others, step, count)
    scale = len(values) / len(others) if others else 1.0
    scaled = [number * scale for number in theirs]
    tallest = max(*ours, *scaled, 1)
    axis = Axis(0.0, count * step, 56, WIDTH - 24)
    top, bottom = 16, 16 + _PLOT_HEIGHT
    height = Axis(0.0, tallest * 1.05, bottom, top)
    parts = [_grid(axis, top, bottom, "{:g}"), _counts(height, axis)]
    for number, amount in enumerate(ours):
        x, wide = axis.at(number * step), axis.at((number + 1) * step) - axis.at(number * step)
        if amount:
            y = height.at(amount)
            parts.append(
                f'<rect class="bar" x="{x + 1:.1f}" y="{y:.1f}" width="{wide - 2:.1f}" height="{bottom - y:.1f}">'
                f"<title>{number * step:g} to {(number + 1) * step:g} {escape(unit)}: {amount}</title></rect>"
            )
    if others:
        points = [f"{axis.at(0):.1f},{bottom}"]
        for number, share in enumerate(scaled):
            y = height.at(share)
            points += [f"{axis.at(number * step):.1f},{y:.1f}", f"{axis.at((number + 1) * step):.1f},{y:.1f}"]
        points.append(f"{axis.at(count * step):.1f},{bottom}")
        parts.append(f'<polyline class="outline" points="{" ".join(points)}"/>')
    parts.append(_text((56 + WIDTH - 24) / 2, bottom + 40, unit, "label", "middle"))
    return _svg("".join(parts), bottom + 50, description)


def _bins(values: Sequence[float], step: float, count: int) -> list[int]:
    found = [0] * count
    for value in values:
        found[min(count - 1, math.floor(value / step))] += 1
    return found


def _counts(height: Axis, axis: Axis) -> str:
    ticks = [tick for tick in height.ticks(4) if tick == int(tick)]
    return "".join(
        _line(axis.start, height.at(tick), axis.end, height.at(tick), "grid")
        + _text(axis.start - 8, height.at(tick) + 4, f"{tick:g}", "label", "end")
        for tick in ticks
    )


def _grid(axis: Axis, top: float, bottom: float, form: str) -> str:
    """Vertical lines at the ticks, each with its value below."""
    return "".join(
        _line(axis.at(tick), top, axis.at(tick), bottom, "grid")
        + _text(axis.at(tick), bottom + 18, form.format(tick), "label", "middle")
        for tick in axis.ticks()
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(content: str, height: float, description: str) -> str:
    return (
        f'<div class="plot"><svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(description)}">'
        f"{content}</svg></div>"
    )
