"""A comparison as a table and sentences."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from rocm_serve.diagnostics.parity.flow import Parity
from rocm_serve.diagnostics.parity.localise import Apart
from rocm_serve.diagnostics.parity.tap_files import BEFORE_LAYERS


def show(parity: Parity, console: Console) -> None:
    """Print rule, prompts, and where the sides first part."""
    console.print(f"A: {parity.a}    B: {parity.b}    {parity.rule}")
    console.print(_prompts(parity))
    if parity.divergence is not None and parity.divergence.layers:
        console.print(_layers(parity.divergence.layers))
    for line in sentences(parity):
        console.print(line)


def sentences(parity: Parity) -> Iterator[str]:
    """Say the verdict, and what it rests on."""
    yield from _own_noise(parity)
    for one in parity.prompts:
        if one.near_tie is not None:
            yield (
                f"prompt {one.index}: from position {one.near_tie} on not judged: the router's last chosen and next"
                " expert are a near tie, and the sides chose differently"
            )
    if parity.agree:
        yield "agree"
        return
    divergence = parity.divergence
    assert divergence is not None
    if divergence.first is None:
        yield f"differ: {divergence.how}"
        return
    first = divergence.first
    yield f"differ: {where(first)}: {_size(first)} ({divergence.how})"


def _own_noise(parity: Parity) -> Iterator[str]:
    """Say that A's two forms differ. Under a rule of medians single positions may, and prove nothing."""
    by_median = parity.rule.of == "median"
    noise = [one.median_noise_of_a if by_median else one.noise_of_a for one in parity.prompts]
    if any(own > one.bar for own, one in zip(noise, parity.prompts, strict=True)):
        yield (
            "A differs from itself, all at once against token by token, by more than the bar:"
            " one of its two forms is wrong, or it is not deterministic"
        )
        return
    moved = [str(one.index) for one in parity.prompts if one.noise_of_a > one.bar]
    if moved:
        prompts = f"prompt{'s' * (len(moved) > 1)} {', '.join(moved)}"
        yield (
            f"A's own noise is above the bar at single positions of {prompts}, its medians are not: rounding rows"
            " does that, where an expert's choice or a code flips"
        )


def where(apart: Apart) -> str:
    """Name a site in words."""
    layer = "before the layers" if apart.layer == BEFORE_LAYERS else f"layer {apart.layer}"
    ranks = f", rank{'s' * (len(apart.ranks) > 1)} {', '.join(map(str, apart.ranks))} of A" if apart.ranks else ""
    return f"{layer}, op {apart.op} at {apart.site}{ranks}, prompt {apart.prompt}, position {apart.position}"


def _size(apart: Apart) -> str:
    return f"{apart.relative:.1e} of its size, at most {apart.absolute:.1e}"


def _prompts(parity: Parity) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("prompt", "tokens", "new", "A's noise", "bar", "|A - B|", "at", "median", "verdict"):
        table.add_column(name, justify="left" if name == "verdict" else "right")
    for one in parity.prompts:
        verdict = "agree" if one.first is None else f"differ from position {one.first}"
        numbers = (one.noise_of_a, one.bar, one.worst)
        shown = [f"{value:.1e}" for value in numbers]
        table.add_row(
            str(one.index),
            str(one.prompt_tokens),
            str(one.new_tokens),
            *shown,
            str(one.worst_at),
            f"{one.median:.1e}",
            verdict,
        )
    return table


def _layers(layers: tuple[Apart, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("layer", "worst site", "op", "of its size", "at most", "prompt", "position"):
        table.add_column(name, justify="left" if name in ("worst site", "op") else "right")
    for one in layers:
        numbers = (f"{one.relative:.1e}", f"{one.absolute:.1e}", str(one.prompt), str(one.position))
        table.add_row(str(one.layer), one.site, one.op, *numbers)
    return table
