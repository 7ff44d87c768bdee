"""Measure what drafting brings over HTTP: wall clock, CPU time and tokens per forward, with drafts against without.

    python -m evals.bench_drafting --model DIR [--batch 1 4 16] [--draft-tokens 1 3] [--device cpu|cuda|rocm]

Starts one server without drafts and one for each number of drafts, side by side, and asks them in turns: off, on, off,
on, off. Each figure with drafts is held against the two turns without beside it, so that a machine that is busy for a
while harms both. Asked are greedy 5-shot questions of the tiny checkpoint's task, `--batch` at a time. Needs what the
server needs; /metrics is read before and after each turn. One plan in 32 of a drafting server runs without drafts, by
which it measures itself: that is part of the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from evals.bench_host.machine import cpu_seconds, describe
from evals.program import at_least, ended, to_write
from evals.smoke import served
from evals.tiny.documents import few_shot_prompt
from evals.tiny.generator import pool
from rocm_serve.diagnostics.gate.server import parse_metrics
from rocm_serve.outputs import write_file
from rocm_serve.platform.probe import gpus_seen_by_torch

SHOTS = 5
STOP = "Question:"
ANSWER_S = 600.0
FEWEST_ANSWERS = 8  # of a turn
SHARE_OF_A_GPU = 0.15  # of its memory, for each server
LONGEST = 128  # tokens of an answer; the task's have about 50


@dataclass(frozen=True)
class Serving:
    """A server: most drafts of a step (0: it does not draft), its URL, and the processes that are its own."""

    drafts: int
    url: str
    pids: tuple[int, ...]

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=ANSWER_S) as page:
            return parse_metrics(page.read().decode())


@dataclass(frozen=True)
class Turn:
    """Some questions put to one server, `batch` at a time. `texts` are its answers, in the order of the questions.

    `between_s`: mean time between two tokens of an answer as the server saw it. `accepted`: share of drafts by place.
    """

    drafts: int
    batch: int
    tokens: int
    wall_s: float
    cpu_s: float
    between_s: float
    tokens_per_forward: float
    accepted: tuple[float, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Gain:
    """What drafting brings at one size: multiples of the figures without drafts, medians over rounds.

    `speed`: tokens a second of whole answers, prompts included; `decoding`: tokens a second between first and last.
    `cpu`: CPU time of a token. `noise`: largest over smallest `speed` of the turns without drafts.
    """

    batch: int
    drafts: int
    speed: float
    decoding: float
    cpu: float
    noise: float
    tokens_per_forward: float
    accepted: tuple[float, ...]
    same_texts: int
    texts: int


@contextmanager
def serving(model: Path, drafts: int, flags: str) -> Iterator[Serving]:
    before = set(psutil.Process().children(recursive=True))
    more = f"--speculative mtp --draft-tokens {drafts}" if drafts else ""
    with served(model, f"{flags} {more}") as url:
        own = set(psutil.Process().children(recursive=True)) - before
        yield Serving(drafts, url, tuple(process.pid for process in own))


def ask(url: str, prompt: str) -> tuple[str, int]:
    """Return the greedy answer to one prompt, and its number of tokens."""
    body = {"prompt": prompt, "max_tokens": LONGEST, "temperature": 0, "stop": [STOP]}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        answer = json.load(response)
    return str(answer["choices"][0]["text"]), int(answer["usage"]["completion_tokens"])


def turn(server: Serving, prompts: Sequence[str], batch: int) -> Turn:
    """Ask all prompts, `batch` at a time."""
    metrics, cpu, began = server.metrics(), cpu_seconds(server.pids), time.perf_counter()
    with ThreadPoolExecutor(batch) as threads:
        answers = list(threads.map(lambda prompt: ask(server.url, prompt), prompts))
    wall = time.perf_counter() - began
    cpu = cpu_seconds(server.pids) - cpu
    texts, tokens = zip(*answers, strict=True)
    since = {name: value - metrics.get(name, 0.0) for name, value in server.metrics().items()}
    return Turn(server.drafts, batch, sum(tokens), wall, cpu, *rates(since, server.drafts), texts)


def rates(since: dict[str, float], drafts: int) -> tuple[float, float, tuple[float, ...]]:
    """Return seconds between tokens, tokens per forward and accepted shares by place from what counters have grown."""
    between = since["rocm_serve_inter_token_seconds_sum"] / since["rocm_serve_inter_token_seconds_count"]
    per_forward = since["rocm_serve_decode_tokens_total"] / since["rocm_serve_decode_forwards_total"]
    accepted = []
    for place in range(1, drafts + 1):
        label = f'_by_position_total{{position="{place}"}}'
        made = since[f"rocm_serve_draft_tokens{label}"]
        accepted.append(since[f"rocm_serve_accepted_draft_tokens{label}"] / made if made else 0.0)
    return between, per_forward, tuple(accepted)


def order(drafts: Sequence[int], rounds: int) -> list[int]:
    """Say who is asked in turn: each with drafts between two turns without."""
    return [0, *(number for _ in range(rounds) for one in drafts for number in (one, 0))]


def gain(turns: Sequence[Turn], drafts: int) -> Gain:
    """Hold the turns with `drafts` against those beside them. `turns`: in the order asked, of one size."""
    places = [i for i, one in enumerate(turns) if one.drafts == drafts]
    beside = [(turns[i], (turns[i - 1], turns[i + 1])) for i in places]
    assert drafts and all(not off.drafts for _, pair in beside for off in pair)
    without = [one for one in turns if not one.drafts]
    speeds = [one.tokens / one.wall_s for one in without]
    return Gain(
        batch=turns[0].batch,
        drafts=drafts,
        speed=median(on.tokens / on.wall_s / fmean(off.tokens / off.wall_s for off in pair) for on, pair in beside),
        decoding=median(fmean(off.between_s for off in pair) / on.between_s for on, pair in beside),
        cpu=median(on.cpu_s / on.tokens / fmean(off.cpu_s / off.tokens for off in pair) for on, pair in beside),
        noise=max(speeds) / min(speeds),
        tokens_per_forward=fmean(on.tokens_per_forward for on, _ in beside),
        accepted=tuple(fmean(shares) for shares in zip(*(on.accepted for on, _ in beside), strict=True)),
        same_texts=sum(a == b for on, _ in beside for a, b in zip(on.texts, without[0].texts, strict=True)),
        texts=sum(len(on.texts) for on, _ in beside),
    )


def memory_share(device: str, count: int) -> str:
    """Return the flag that lets the `count`-th server of one GPU start beside those before it, which hold theirs."""
    return "" if device == "cpu" else f"--mem-fraction {SHARE_OF_A_GPU * count:.2f}"


def measure(args: argparse.Namespace, say: Console) -> tuple[list[Turn], list[dict[str, Any]]]:
    """Ask all servers at all sizes; return the turns, and what drafting servers say of their own net speed."""
    shots, turns, own = pool("train", SHOTS), [], []
    flags = f"--device {args.device} --max-running-requests {max(args.batch)} {args.serve_args}"
    with ExitStack() as stack:
        servers = {}
        for count, number in enumerate((0, *args.draft_tokens), 1):
            share = memory_share(args.device, count)
            servers[number] = stack.enter_context(serving(args.model, number, f"{flags} {share}"))
        for batch in args.batch:
            questions = pool("test", max(FEWEST_ANSWERS, args.waves * batch))
            prompts = [few_shot_prompt(shots, one.question) for one in questions]
            for server in servers.values():
                turn(server, prompts[:batch], batch)  # compiles what is compiled when it is first called
            for number in order(args.draft_tokens, args.rounds):
                turns.append(turn(servers[number], prompts, batch))
                say.print(f"batch {batch}, {number or 'no'} drafts: {turns[-1].wall_s:.1f} s", style="dim")
        for number in args.draft_tokens:
            page = servers[number].metrics()
            own.append({name: value for name, value in page.items() if "draft_net_speed" in name} | {"drafts": number})
    return turns, own


def table(gains: Sequence[Gain]) -> Table:
    made = Table(title="with drafts, as multiples of without")
    names = (
        "batch",
        "drafts",
        "speed",
        "decoding",
        "CPU a token",
        "off/off",
        "tokens a forward",
        "accepted",
        "same text",
    )
    for name in names:
        made.add_column(name, justify="right")
    for one in gains:
        figures = (f"{value:.2f}" for value in (one.speed, one.decoding, one.cpu, one.noise, one.tokens_per_forward))
        accepted = " ".join(f"{share:.2f}" for share in one.accepted)
        made.add_row(str(one.batch), str(one.drafts), *figures, accepted, f"{one.same_texts} of {one.texts}")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=at_least(1), nargs="+", default=[1, 4, 16], help="questions at a time")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[1, 3], choices=(1, 2, 3, 4))
    parser.add_argument("--device", choices=("cpu", "cuda", "rocm"), default="cpu")
    parser.add_argument("--rounds", type=at_least(1), default=1, help="turns of each size and number of drafts")
    parser.add_argument(
        "--waves", type=at_least(1), default=2, help="questions of a turn for each of the batch, at least 8 in all"
    )
    parser.add_argument("--serve-args", default="", help="more flags for `rocm-serve serve`, in one string")
    parser.add_argument("--json", type=to_write, help="write the figures to this file")
    args = parser.parse_args(arguments)
    console, machine = Console(width=140), describe()
    if args.device != "cpu":
        machine["gpu"] = gpus_seen_by_torch().name
    turns, own = measure(args, console)
    by_size = {batch: [one for one in turns if one.batch == batch] for batch in args.batch}
    gains = [gain(by_size[batch], drafts) for batch in args.batch for drafts in args.draft_tokens]
    console.print(table(gains))
    if args.json is not None:
        figures = {
            "command": f"python -m evals.bench_drafting {' '.join(arguments or sys.argv[1:])}",
            "machine": machine,
            "load_average_after": describe()["load_average"],
            "gains": [asdict(one) for one in gains],
            "turns": [{name: value for name, value in asdict(one).items() if name != "texts"} for one in turns],
            "net_speed_by_the_servers": own,
        }
        write_file("--json", args.json, json.dumps(figures, indent=1).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(ended("bench_drafting", main))
