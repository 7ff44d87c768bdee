"""What steps with prompts took, as it is written and as people read it. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

# vLLM 0.26.0 on one H200, 2026-11-29, the same shapes and FP8 scheme, random weights, one prompt, no context: whole
# engine step from outside, median of 32, ms. Not of the same run as ours.
VLLM_PREFILL_MS = {"q35tp1": {2048: 125.0, 8192: 192.0}, "q38tp8": {2048: 36.9, 8192: 60.6, 16384: 107.0}}


class PrefillRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One whole step with prompts. Times in milliseconds; ratios: floor over measured.

    `host_ms`: until the last launch of a step that draws nothing; on a device whose queue is full it is the device's
    time. `busy_ms`, `idle_ms`: of the device in one step under the profiler. `floor_ms` counts the experts that this
    run touched, `uniform_floor_ms` those that uniform routing would.
    """

    shape: str
    prompts: int
    rows: int  # of each prompt in this step
    context: int  # before them
    decodes: int  # rows of other requests beside
    decode_context: int
    tokens: int  # rows of all
    captured: bool  # as a device graph
    wall_ms: float
    low: float
    high: float
    host_ms: float
    busy_ms: float | None
    idle_ms: float | None
    tokens_s: float
    floor_ms: float
    uniform_floor_ms: float
    ratio: float
    uniform_ratio: float
    distinct: float  # experts of a layer, mean
    uniform_distinct: float
    fullest: float  # rows of a layer's expert with most of them over those of the mean, mean of the layers
    parts_ms: dict[str, float]  # the floor, by op
    kernels: dict[str, tuple[int, float]] = {}  # launches of one step and their microseconds
    gaps: dict[str, tuple[int, float]] = {}  # what the device waited for: how often, microseconds


def named(one: PrefillRecord) -> str:
    """Say what a step consists of."""
    prompts = f"{one.prompts} x {one.rows}" if one.prompts > 1 else f"{one.rows}"
    before = f" at {one.context}" if one.context else ""
    beside = f" + {one.decodes} decodes at {one.decode_context}" if one.decodes else ""
    return f"{prompts}{before}{beside}"


def vllm_ms(one: PrefillRecord) -> float | None:
    """Return what vLLM took for such a step; None: it was not measured."""
    alone = one.prompts == 1 and not one.context and not one.decodes
    return VLLM_PREFILL_MS.get(one.shape, {}).get(one.rows) if alone else None


def prefill_line(one: PrefillRecord) -> str:
    """Write one step for people."""
    vllm = vllm_ms(one)
    beside = "" if vllm is None else f"  vLLM {vllm:.1f} ({vllm / one.wall_ms:.2f}x ours)"
    device = "-" if one.busy_ms is None else f"busy {one.busy_ms:.2f} idle {one.idle_ms:.2f}"
    how = "graph" if one.captured else ""
    return (
        f"{one.shape:7} prefill {named(one):28} {how:5} {one.wall_ms:8.2f} ms ({one.low:.2f} to {one.high:.2f})"
        f"  {one.tokens_s / 1e3:7.1f} k tokens/s  host {one.host_ms:.2f}  device {device}"
        f"  floor {one.floor_ms:.2f}  {one.ratio:5.2f}  uniform {one.uniform_floor_ms:.2f}  {one.uniform_ratio:5.2f}"
        f"  {one.distinct:.1f} experts a layer (uniform {one.uniform_distinct:.1f}),"
        f" the fullest {one.fullest:.1f} x the mean{beside}"
    )


def prefill_kernel_lines(one: PrefillRecord, most: int = 25, gaps: int = 8) -> list[str]:
    """Write the kernels of a step that take longest, and what the device waited for."""
    lines = _longest(one.kernels, f"in all, of {one.shape} {named(one)}", most)
    return lines + _longest(one.gaps, "idle in all, by the kernel that was waited for", gaps)


def _longest(found: dict[str, tuple[int, float]], title: str, most: int) -> list[str]:
    if not found:
        return []
    rows = [(title, *_sum(list(found.values()))), *((name[:90], *some) for name, some in found.items())]
    if len(rows) > most + 1:
        rest = rows[most + 1 :]
        rows[most + 1 :] = [(f"{len(rest)} others", *_sum([(count, us) for _, count, us in rest]))]
    return [f"  {us:9.1f} us  {count:4} x  {name}" for name, count, us in rows]


def _sum(found: Sequence[tuple[int, float]]) -> tuple[int, float]:
    return sum(count for count, _ in found), sum(us for _, us in found)


def prefill_markdown(steps: Sequence[PrefillRecord]) -> list[str]:
    """Write the table of docs/performance.md."""
    lines = [
        "| shape, tokens | step, ms | k tokens/s | host | device busy | floor | reached | uniform routing | reached"
        " | experts a layer (uniform) | vLLM 0.26 | times faster |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in steps:
        vllm = vllm_ms(one)
        busy = "" if one.busy_ms is None else f"{one.busy_ms:.1f}"
        beside = " | |" if vllm is None else f"{vllm:.1f} | {vllm / one.wall_ms:.2f} |"
        how = ", a graph" if one.captured else ""
        lines.append(
            f"| {one.shape}, {named(one)}{how} | {one.wall_ms:.1f} | {one.tokens_s / 1e3:.1f} | {one.host_ms:.1f}"
            f" | {busy}"
            f" | {one.floor_ms:.1f} | {one.ratio:.2f} | {one.uniform_floor_ms:.1f} | {one.uniform_ratio:.2f}"
            f" | {one.distinct:.1f} ({one.uniform_distinct:.1f}) | {beside}"
        )
    return lines
