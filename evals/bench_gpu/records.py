"""What a run found, as it is written: one JSON file that grows with every point. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from evals.bench_gpu.prefill_records import PrefillRecord, prefill_line, prefill_markdown
from rocm_serve.outputs import write_file

# vLLM 0.26.0 on one H200, 2026-11-29, the same shapes and FP8 scheme, random weights, CUDA graphs: whole engine step
# from outside, median of 32, ms. Not of the same run as ours.
VLLM_MS = {
    "q35tp1": {(1, 1024): 4.20, (16, 1024): 7.80, (64, 1024): 13.2, (256, 1024): 22.7},
    "q38tp8": {(1, 8192): 2.73, (8, 8192): 3.21, (16, 8192): 3.35, (64, 8192): 6.33, (256, 8192): 11.7},
}


class OpRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One op at one size. Times in microseconds; `ratio`: floor over measured."""

    shape: str
    op: str
    what: str
    provider: str
    us: float
    low: float
    high: float
    drift: float
    how: str
    nbytes: float
    operations: float
    floor_us: float
    ratio: float
    error: float
    right: bool
    distinct: float | None = None
    peers: dict[str, float] = {}
    peers_failed: dict[str, str] = {}


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One whole decode step. Times in milliseconds; ratios: floor over measured.

    `floor_ms` counts the experts that this run touched, `uniform_floor_ms` those that uniform routing would.
    """

    shape: str
    mode: str  # "graphs", "ahead" or "eager"
    batch: int
    context: int
    wall_ms: float
    low: float
    high: float
    device_ms: float | None
    device_how: str
    floor_ms: float
    uniform_floor_ms: float
    ratio: float
    uniform_ratio: float
    distinct: float  # experts of a layer, mean
    uniform_distinct: float
    parts_ms: dict[str, float]  # the floor, by op
    kernels: dict[str, tuple[int, float]] = {}  # launches of one captured step and their microseconds


class Failure(msgspec.Struct, frozen=True):
    """A point that ended with an error."""

    what: str
    error: str


class Run(msgspec.Struct, kw_only=True):
    """Everything of one run. Ceilings in bytes/s and operations/s: measured in it, and what floors were taken with."""

    machine: dict[str, object]
    command: str
    seed: int
    measured_ceilings: tuple[float, float, float]
    ceilings: tuple[float, float, float]
    bound: dict[str, list[str]] = {}  # shape -> lines of the start-up report
    ops: list[OpRecord] = []
    steps: list[StepRecord] = []
    prefills: list[PrefillRecord] = []
    failures: list[Failure] = []
    left_out: list[str] = []  # points that the budget did not reach

    def write(self, path: Path | None) -> None:
        """Write the run to the file of --json, if there is one. Errors: UserError."""
        if path is not None:
            write_file("--json", path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def op_line(one: OpRecord) -> str:
    """Write one op for people."""
    word = "" if one.right else "  WRONG"
    peers = "".join(f"  {name} {us:.1f} us ({us / one.us:.2f}x ours)" for name, us in one.peers.items())
    peers += "".join(f"  {name}: {why[:80]}" for name, why in one.peers_failed.items())
    distinct = "" if one.distinct is None else f"  {one.distinct:.1f} experts"
    how = "" if one.how in ("graph", "clock") else f"  [{one.how[:60]}]"
    drift = f"  drift {one.drift:.0%}" if one.drift > 0.03 else ""
    return (
        f"{one.shape:7} {one.op:17} {one.what:34} {one.provider:9} {one.us:9.1f} us  floor {one.floor_us:8.1f}"
        f"  {one.ratio:5.2f}  {one.nbytes / one.us / 1e6:5.2f} TB/s  err {one.error:.1e}"
        f"{word}{distinct}{peers}{drift}{how}"
    )


def step_line(one: StepRecord) -> str:
    """Write one step for people."""
    vllm = VLLM_MS.get(one.shape, {}).get((one.batch, one.context))
    beside = "" if vllm is None else f"  vLLM {vllm:.2f} ({vllm / one.wall_ms:.2f}x ours)"
    device = "-" if one.device_ms is None else f"{one.device_ms:.3f}"
    how = "" if one.device_how in ("", "graph", "clock") else f"  [{one.device_how[:60]}]"
    return (
        f"{one.shape:7} {one.mode:6} B {one.batch:<4} ctx {one.context:<6} {one.wall_ms:8.3f} ms"
        f" ({one.low:.3f} to {one.high:.3f})  device {device}  floor {one.floor_ms:.3f}"
        f"  {one.ratio:5.2f}  uniform {one.uniform_floor_ms:.3f}  {one.uniform_ratio:5.2f}"
        f"  {one.distinct:.1f} experts a layer (uniform {one.uniform_distinct:.1f}){beside}{how}"
    )


def kernel_lines(one: StepRecord, most: int = 20) -> list[str]:
    """Write the kernels of a step that take longest, and all the others together."""
    found = [(name[:90], count, us) for name, (count, us) in one.kernels.items()]
    if not found:
        return []
    found = [(f"in all, of {one.shape} B {one.batch} ctx {one.context}", *_sum(found)), *found]
    rest = found[most + 1 :]
    if rest:
        found[most + 1 :] = [(f"{len(rest)} others", *_sum(rest))]
    return [f"  {us:9.1f} us  {count:4} x  {name}" for name, count, us in found]


def _sum(kernels: Sequence[tuple[str, int, float]]) -> tuple[int, float]:
    return sum(count for _, count, _ in kernels), sum(us for _, _, us in kernels)


def _short(one: OpRecord) -> str:
    word = "" if one.right else " WRONG"
    peer = f" peer {min(one.peers.values()):.1f}" if one.peers else ""
    eager = "" if one.how in ("graph", "clock") else " eager"
    return f"{one.shape} {one.op} {one.what}: {one.us:.1f} us {one.ratio:.2f} {one.provider}{peer}{eager}{word}"


def table(run: Run) -> list[str]:
    """Write the whole run for people; what matters most comes last.

    Ops are short here (microseconds, share of the floor): each had its whole line when it was found.
    """
    lines = [_short(one) for one in run.ops]
    lines += [step_line(one) for one in run.steps]
    lines += [prefill_line(one) for one in run.prefills]
    lines += [f"FAILED {one.what}: {one.error}" for one in run.failures]
    if run.left_out:
        lines.append(f"not reached within the budget: {', '.join(run.left_out)}")
    wrong = [f"{one.op} {one.what}" for one in run.ops if not one.right]
    names = ("copy TB/s", "bf16 TF", "fp8 TF")
    seen = ", ".join(f"{name} {x / 1e12:.4g}" for name, x in zip(names, run.measured_ceilings, strict=True))
    used = ", ".join(f"{x / 1e12:.4g}" for x in run.ceilings)
    lines.append(f"ceilings of this run: {seen}; floors taken with {used}")
    steps = len(run.steps) + len(run.prefills)
    lines.append(f"{len(run.ops)} ops, {len(wrong)} wrong{': ' if wrong else ''}{', '.join(wrong)}; {steps} steps")
    return lines


def markdown(run: Run) -> list[str]:
    """Write the tables of docs/performance.md: steps, then ops."""
    gpu, ceilings = run.machine["gpu"], ", ".join(f"{x / 1e12:.4g}" for x in run.measured_ceilings)
    lines = [
        f"{gpu}, {run.machine['date']}, commit {run.machine['commit']}, sources {run.machine['sources']},"
        f" {run.machine['packages']}; measured: copy TB/s, bf16 TF, FP8 TF {ceilings}; `{run.command}`"
    ]
    if run.steps:
        lines += ["", *_decode_table(run.steps)]
    if run.prefills:
        lines += ["", *prefill_markdown(run.prefills)]
    return [*lines, "", *_op_table(run.ops)]


def _decode_table(steps: Sequence[StepRecord]) -> list[str]:
    lines = [
        "| shape, ctx | B | step planned ahead, ms | one after the other | device alone | without graphs"
        " | floor | reached | uniform routing | reached | experts a layer (uniform) | vLLM 0.26 | times faster |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    points: dict[tuple[str, int, int], dict[str, StepRecord]] = {}
    for one in steps:
        points.setdefault((one.shape, one.context, one.batch), {})[one.mode] = one
    for (shape, context, batch), modes in points.items():
        one = modes.get("ahead") or modes.get("graphs") or modes["eager"]
        vllm = VLLM_MS.get(shape, {}).get((batch, context))
        device = "" if one.device_ms is None else f"{one.device_ms:.3f}"
        ahead, graphs, eager = (
            f"{modes[mode].wall_ms:.3f}" if mode in modes else "" for mode in ("ahead", "graphs", "eager")
        )
        beside = "| |" if vllm is None else f"{vllm:.2f} | {vllm / one.wall_ms:.2f} |"
        lines.append(
            f"| {shape}, {context} | {batch} | {ahead} | {graphs} | {device} | {eager}"
            f" | {one.floor_ms:.3f} | {one.ratio:.2f} | {one.uniform_floor_ms:.3f} | {one.uniform_ratio:.2f}"
            f" | {one.distinct:.1f} ({one.uniform_distinct:.1f})"
            f" | {beside}"
        )
    return lines


def _op_table(ops: Sequence[OpRecord]) -> list[str]:
    lines = ["| shape | op | size | provider | us | floor, us | reached | relative L2 | others, us |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for op in ops:
        peers = ", ".join(f"{name} {us:.1f}" for name, us in op.peers.items())
        word = "" if op.right else " WRONG"
        lines.append(
            f"| {op.shape} | {op.op} | {op.what} | {op.provider} | {op.us:.1f} | {op.floor_us:.1f} | {op.ratio:.2f}"
            f" | {op.error:.1e}{word} | {peers} |"
        )
    return lines
