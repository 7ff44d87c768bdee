"""The imbalance of every layer, in order and as planned: one SVG file, made by hand, that holds all it shows."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from rocm_serve.diagnostics.experts.planner import imbalance
from rocm_serve.diagnostics.experts.show import Planned, total_line
from rocm_serve.diagnostics.gate.plots import Axis
from rocm_serve.parallel.expert_map import DRAFT_LAYER

WIDTH, HEIGHT = 920, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 64, 330
_INK, _QUIET, _GRID, _BEFORE, _AFTER = "#222222", "#666666", "#dddddd", "#c2571a", "#1a6fc2"


def svg(planned: Planned) -> str:
    """Draw max/mean of each layer: a ring for experts in order, a dot as planned."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' font-family="sans-serif" font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
        f"{''.join(_parts(planned))}</svg>\n"
    )


def _parts(planned: Planned) -> Iterator[str]:
    # The draft layer, whose number is below those of the others, runs after them.
    layers = sorted(planned.layers.items(), key=lambda one: (one[0] == DRAFT_LAYER, one[0]))
    most = max((*planned.before, *planned.after))
    load = Axis(1.0, 1.0 + 1.08 * max(most - 1.0, 0.01), _BOTTOM, _TOP)
    place = Axis(-0.5, len(layers) - 0.5, _LEFT, WIDTH - _RIGHT)
    yield _text(_LEFT, 20, f"Busiest expert-parallel rank of {planned.ep} over the mean, by layer", _INK, "start", 14)
    yield _text(_LEFT, 38, total_line(planned), _QUIET, "start")
    yield _mark(WIDTH - 210, 16, ring=True) + _text(WIDTH - 200, 20, "in order", _INK, "start")
    yield _mark(WIDTH - 126, 16, ring=False) + _text(WIDTH - 116, 20, "as planned", _INK, "start")
    for tick in load.ticks():
        yield _line(_LEFT, load.at(tick), WIDTH - _RIGHT, load.at(tick), _GRID)
        yield _text(_LEFT - 8, load.at(tick) + 4, f"{tick:.3g}", _QUIET, "end")
    every = max(1, -(-len(layers) // 24))
    for number, (layer, plan) in enumerate(layers):
        x, after = place.at(number), load.at(imbalance(plan.planned))
        name = "draft" if layer == DRAFT_LAYER else f"{layer}"
        if number % every == 0:
            yield _text(x, _BOTTOM + 18, name, _QUIET, "middle")
        told = f"layer {name}: {imbalance(plan.planned):.3f} as planned, {plan.copies} copies"
        marks = ""
        if plan.plain:
            before = load.at(imbalance(plan.plain))
            marks = _line(x, before, x, after, _GRID) + _mark(x, before, ring=True)
            told += f", {imbalance(plan.plain):.3f} in order"
        yield f"<g><title>{escape(told)}</title>{marks}{_mark(x, after, ring=False)}</g>"
    yield _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 12, "layer", _QUIET, "middle")


def _mark(x: float, y: float, *, ring: bool) -> str:
    look = f'fill="none" stroke="{_BEFORE}" stroke-width="1.5"' if ring else f'fill="{_AFTER}"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" {look}/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, colour: str, anchor: str, size: int = 12) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {where} fill="{colour}" font-size="{size}">{escape(text)}</text>'
