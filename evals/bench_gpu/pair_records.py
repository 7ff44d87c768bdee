"""What a run on a pair of GPUs found, as it is written: one JSON file that grows with every point. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from evals.bench_gpu.records import Failure
from rocm_serve.outputs import write_file


class LinkRecord(msgspec.Struct, frozen=True):
    """One message of a size. Times in microseconds. `what`: "all_reduce", "send" (one way), "copy"."""

    what: str
    nbytes: int
    us: float
    low: float
    high: float
    how: str

    @property
    def bytes_s(self) -> float:
        """Of an all-reduce of two ranks each rank sends as many bytes as the message has."""
        return self.nbytes / (self.us * 1e-6)


class PairRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One point of one layout. Times in milliseconds: of a step in which each request gets a token, or of all prompts.

    `context`: tokens before the step, mean over requests; of prompts their length. `messages_ms`: what the floor's
    messages took when nothing else ran. `at_work`: by rank, the share of the time that it ran steps.
    """

    layout: str
    part: str  # "decode" or "prefill"
    batch: int
    context: int
    chunk: int
    steps: int  # plans
    in_flight: int
    ms: float
    low: float
    high: float
    tokens_s: float
    floor_ms: float
    messages_ms: float | None
    ratio: float  # floor over measured
    at_work: dict[int, float]

    @property
    def idle(self) -> float:
        """Mean over ranks of the share of the time in which they ran nothing."""
        return 1.0 - sum(self.at_work.values()) / len(self.at_work)


class FirstRecord(msgspec.Struct, frozen=True):
    """Milliseconds of the first requests after the start, one after the other, and of a step of the last of them."""

    layout: str
    ms: tuple[float, ...]
    step_ms: float

    @property
    def late_ms(self) -> float:
        """Return how much longer the first took than those from the sixth on."""
        return self.ms[0] - statistics.median(self.ms[5:])


class AgreementRecord(msgspec.Struct, frozen=True):
    """How far log-probs of the same prompts' tokens are from those of tp1, whose prompts came one by one.

    `company`: the prompts came all at once, so that rows were multiplied by other tiles. That of tp1 is the noise.
    """

    layout: str
    company: bool
    tokens: int
    mean: float
    most: float


class Timeline(msgspec.Struct, frozen=True):
    """Some steps of a point: (rank, plan, start, end), in microseconds."""

    layout: str
    part: str
    batch: int
    bars: list[tuple[int, int, float, float]]


class PairRun(msgspec.Struct, kw_only=True):
    """Everything of one run. Ceilings in bytes/s and operations/s: measured in it, and what floors were taken with."""

    machine: dict[str, object]
    command: str
    seed: int
    shape: str
    measured_ceilings: tuple[float, float, float]
    ceilings: tuple[float, float, float]
    limits: dict[str, dict[str, str]] = {}  # layout -> what the server came to and why
    links: list[LinkRecord] = []
    points: list[PairRecord] = []
    first: list[FirstRecord] = []
    agreement: list[AgreementRecord] = []
    timelines: list[Timeline] = []
    failures: list[Failure] = []
    left_out: list[str] = []

    def write(self, path: Path | None) -> None:
        """Write the run to the file of --json, if there is one. Errors: UserError."""
        if path is not None:
            write_file("--json", path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @property
    def link_bytes_s(self) -> float:
        """The most that crossed the link in a second, one way."""
        return max((one.bytes_s for one in self.links), default=float("inf"))

    def alone_us(self, what: str, nbytes: int) -> float | None:
        """Return what a message took when nothing else ran: one of this size, or the next larger that was measured."""
        sizes = sorted((one.nbytes, one.us) for one in self.links if one.what == what and one.nbytes >= nbytes)
        return sizes[0][1] if sizes else None


def link_line(one: LinkRecord) -> str:
    """Write one message for people."""
    return (
        f"link {one.what:10} {one.nbytes:>10} bytes  {one.us:9.1f} us ({one.low:.1f} to {one.high:.1f})"
        f"  {one.bytes_s / 1e9:7.1f} GB/s  [{one.how}]"
    )


def pair_line(one: PairRecord) -> str:
    """Write one point for people."""
    messages = "" if one.messages_ms is None else f"  messages alone {one.messages_ms:.3f}"
    ranks = ", ".join(f"{share:.1%}" for share in one.at_work.values())
    return (
        f"{one.layout} {one.part:7} B {one.batch:<4} ctx {one.context:<5} {one.ms:9.3f} ms ({one.low:.3f} to"
        f" {one.high:.3f})  {one.tokens_s:9.0f} tokens/s  floor {one.floor_ms:.3f}  {one.ratio:5.2f}{messages}"
        f"  at work {ranks}  idle {one.idle:.1%}  {one.steps} plans, {one.in_flight} in flight"
    )


def first_line(one: FirstRecord) -> str:
    """Write the first requests for people."""
    times = ", ".join(f"{ms:.2f}" for ms in one.ms)
    late = f"the first is {one.late_ms:+.2f} from those after the fifth, a step takes {one.step_ms:.2f}"
    return f"{one.layout} first requests after the start, ms: {times}; {late}"


def agreement_line(one: AgreementRecord) -> str:
    """Write one comparison for people."""
    how = "all at once" if one.company else "one by one"
    return (
        f"{one.layout} {how}: log-probs of {one.tokens} prompt tokens differ from tp1's one by one by"
        f" {one.mean:.2e} on average, {one.most:.2e} at most"
    )


def table(run: PairRun) -> list[str]:
    """Write the whole run for people."""
    lines = [link_line(one) for one in run.links]
    lines += [first_line(one) for one in run.first]
    lines += [agreement_line(one) for one in run.agreement]
    lines += [pair_line(one) for one in run.points]
    lines += [f"FAILED {one.what}: {one.error}" for one in run.failures]
    if run.left_out:
        lines.append(f"not reached within the budget: {', '.join(run.left_out)}")
    return lines


def markdown(run: PairRun) -> list[str]:
    """Write the tables of docs/performance.md: decode, prompts, link."""
    used = ", ".join(f"{one / 1e12:.4g}" for one in run.ceilings)
    lines = [
        f"{run.machine['gpu']}, {run.machine['date']}, commit {run.machine['commit']}, sources"
        f" {run.machine['sources']}; {run.shape}; ceilings TB/s, bf16 TF, FP8 TF {used}; link"
        f" {run.link_bytes_s / 1e9:.4g} GB/s; `{run.command}`",
    ]
    for part, what in (("decode", "step, ms"), ("prefill", "all prompts, ms")):
        lines += ["", *_part(what, [one for one in run.points if one.part == part])]
    lines += ["", "| message | bytes | us alone | GB/s one way |", "|---|---|---|---|"]
    lines += [f"| {one.what} | {one.nbytes} | {one.us:.1f} | {one.bytes_s / 1e9:.1f} |" for one in run.links]
    return lines


def _part(what: str, points: Sequence[PairRecord]) -> Iterable[str]:
    yield f"| B | layout | context | {what} | tokens/s | floor, ms | reached | messages alone, ms | GPUs idle |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for one in sorted(points, key=lambda one: one.batch):
        messages = "" if one.messages_ms is None else f"{one.messages_ms:.3f}"
        yield (
            f"| {one.batch} | {one.layout} | {one.context} | {one.ms:.3f} | {one.tokens_s:.0f} | {one.floor_ms:.3f}"
            f" | {one.ratio:.2f} | {messages} | {one.idle:.1%} |"
        )
