"""Many requests of every kind, a third of them given up at random: what is asked, and what must come back.

    python -m tests.e2e.soak MODEL --requests 2000 [--seed N] [--null]

serves the checkpoint with TP2 x PP2 workers, with `--null` workers without a model, and prints what it saw.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.harness import Server
from tests.e2e.leftovers import Held, at_rest, back_to
from tests.e2e.wire import How, Reply, Wire, request_bytes

Json = dict[str, Any]

AT_ONCE = 64
ABORTED = 1 / 3
MALFORMED = 0.06
LONGEST = 200  # tokens of a prompt
LIMIT = 256
WORDS = ("one", "two", "naïve", "café", "🙂", "def", "return", "x1", "Question:", "\n")
# Pages for a third of what runs, so that requests are preempted; places for fewer answers than come at once.
FLAGS = (
    *("--tp", "2", "--pp", "2", "--dtype", "float32", "--page-size", "4", "--max-total-tokens", "640"),
    *("--max-model-len", str(LIMIT), "--chunked-prefill-size", "64"),
    *("--max-running-requests", "32", "--max-queued-requests", "100"),
)
NULL_PROGRAM = ("tests.e2e.null_server",)
NULL, REAL = (30, 0.5), (12, 2.0)  # most tokens of an answer; seconds until a request is given up, at most
MB = 2**20


@dataclass(frozen=True)
class Wish:
    """One request. `choices`: how many answers it asks for; `made`: tokens of each, where that is certain."""

    data: bytes
    kind: str
    choices: int = 1
    made: int | None = None
    status: int = 200


@dataclass
class Seen:
    """What came back."""

    statuses: Counter[str] = field(default_factory=Counter)
    given_up: int = 0
    faults: list[str] = field(default_factory=list)


def completion(rng: random.Random, most_tokens: int) -> Wish:
    n, num_prompts = rng.choice((1, 1, 1, 2, 3)), rng.choice((1, 1, 1, 2))
    lengths = [rng.randint(1, 16) if rng.random() < 0.8 else rng.randint(60, LONGEST) for _ in range(num_prompts)]
    exact = rng.random() < 0.6
    body: Json = {
        "prompt": [[rng.randrange(300) for _ in range(length)] for length in lengths],
        "max_tokens": rng.randint(1, most_tokens),
        "n": n,
        "temperature": rng.choice((0, 0.8, 1.5)),
        "seed": rng.choice((None, rng.randrange(100))),
        "ignore_eos": exact,
        "logprobs": rng.choice((None, None, 0, 5)),
        "echo": rng.random() < 0.2,
    }
    if not exact:
        body["stop"] = rng.choice((["e"], "the", ["a", "zz"], None))
    if rng.random() < 0.3:
        body |= {"top_p": 0.9, "top_k": 30, "repetition_penalty": 1.1, "frequency_penalty": 0.5}
    return finished(rng, "/v1/completions", body, n * num_prompts, body["max_tokens"] if exact else None)


def chat(rng: random.Random, most_tokens: int) -> Wish:
    exact = rng.random() < 0.6
    body: Json = {
        "messages": [{"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(1, 30)))}],
        "max_tokens": rng.randint(1, most_tokens),
        "n": rng.choice((1, 1, 2)),
        "ignore_eos": exact,
        "stop": None if exact else rng.choice((["e"], "the")),
        "logprobs": rng.random() < 0.3,
    }
    return finished(rng, "/v1/chat/completions", body, body["n"], body["max_tokens"] if exact else None)


def finished(rng: random.Random, path: str, body: Json, choices: int, made: int | None) -> Wish:
    stream = rng.random() < 0.5
    body |= {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
    kind = path.split("/")[2] + (" streamed" if stream else " whole")
    return Wish(request_bytes(path, body), kind, choices, made)


def malformed(rng: random.Random) -> Wish:
    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/tokenize"))
    data, status = rng.choice(
        [
            (request_bytes(path, b'{"prompt": '), 400),
            (request_bytes(path, b"\xff\xfe"), 400),
            (request_bytes(path, {"no_such_field": 1}), 400),
            (request_bytes("/v1/completions", {"prompt": [1] * (LIMIT + 1)}), 400),
            (request_bytes("/v1/completions", {"prompt": "a", "stop": ["x"] * 1000}), 400),
            (request_bytes("/v1/nothing", {}), 404),
            (b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
            (b"\x16\x03\x01\x02\x00\x01\x00 no HTTP at all\r\n\r\n", 400),
        ]
    )
    return Wish(data, "malformed", status=status)


def tokenize(rng: random.Random) -> Wish:
    return Wish(
        request_bytes("/tokenize", {"prompt": " ".join(rng.choices(WORDS, k=rng.randint(1, 5000)))}), "tokenize"
    )


def wish(rng: random.Random, most_tokens: int) -> Wish:
    if rng.random() < MALFORMED:
        return malformed(rng)
    kind = rng.random()
    if kind < 0.65:
        return completion(rng, most_tokens)
    return chat(rng, most_tokens) if kind < 0.96 else tokenize(rng)


class Soak:
    """One crowd. `longest_wait_s`: the latest moment at which a request is given up."""

    def __init__(self, url: str, seed: int, most_tokens: int, longest_wait_s: float) -> None:
        self.seen = Seen()
        self._url, self._most_tokens, self._longest_wait_s = url, most_tokens, longest_wait_s
        self._rng = random.Random(seed)

    async def run(self, count: int) -> None:
        """Send `count` requests, AT_ONCE of them at a time, and wait for all ends."""
        places = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                await places.acquire()
                one = wish(self._rng, self._most_tokens)
                give_up = self._give_up() if self._rng.random() < ABORTED else None
                group.create_task(self._one(one, give_up)).add_done_callback(lambda _: places.release())

    def _give_up(self) -> tuple[float, float, How]:
        """Draw the share of the request that is sent, the seconds until it is given up, and the way."""
        share = 1.0 if self._rng.random() < 0.85 else self._rng.random()
        return share, self._rng.random() ** 2 * self._longest_wait_s, "fin" if self._rng.random() < 0.5 else "rst"

    async def _one(self, one: Wish, give_up: tuple[float, float, How] | None) -> None:
        wire = await Wire.open(self._url)
        how: How = "fin"
        try:
            if give_up is None:
                await wire.send(one.data)
                self._judge(one, await wire.reply())
                return
            share, seconds, how = give_up
            self.seen.given_up += 1
            await wire.send(one.data[: int(len(one.data) * share)])
            async with asyncio.timeout(seconds):
                await wire.reply()
        except TimeoutError:
            assert give_up is not None
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            self.seen.faults.append(f"{one.kind}: the server closed: {error!r} ({one.data[:300]!r})")
        finally:
            wire.cut(how)

    def _judge(self, one: Wish, reply: Reply) -> None:
        self.seen.statuses[f"{one.kind} {reply.status}"] += 1
        if reply.status == 429 and one.choices and one.kind != "tokenize":
            return
        fault = None
        if reply.status != one.status:
            fault = f"status {reply.status} instead of {one.status}: {reply.body[:300]!r}"
        elif reply.status == 200 and one.kind != "tokenize":
            fault = fault_of(one, reply)
        if fault is not None:
            self.seen.faults.append(f"{one.kind}: {fault} ({one.data[:300]!r})")


def fault_of(one: Wish, reply: Reply) -> str | None:
    """Say what is wrong with an answer, whole or streamed: choices, ends, and tokens that are counted."""
    answers = reply.events if "streamed" in one.kind else [reply.json]
    if any("error" in answer for answer in answers):
        return f"an error: {reply.body[-300:]!r}"
    ends = [choice["index"] for answer in answers for choice in answer["choices"] if choice["finish_reason"]]
    if sorted(ends) != list(range(one.choices)):
        return f"choices {ends} have ended, not {one.choices}"
    made = answers[-1]["usage"]["completion_tokens"]
    if one.made is not None and made != one.made * one.choices:
        return f"{made} tokens instead of {one.made} x {one.choices}"
    return None


@dataclass(frozen=True)
class Outcome:
    """What a soak left: looks at rest before it, after a quarter of it, and after all."""

    seen: Seen
    first: Held
    quarter: Held
    last: Held
    seconds: float
    preemptions: float

    @property
    def growth(self) -> list[float]:
        """MiB that each process has grown by since the quarter, the server's own first."""
        return [(self.last.rss[pid] - rss) / MB for pid, rss in self.quarter.rss.items()]


def soak(server: Server, count: int, seed: int, most_tokens: int, longest_wait_s: float) -> Outcome:
    """Run a soak against a live server, and wait after each part until nothing is left behind."""
    crowd = Soak(server.base_url, seed, most_tokens, longest_wait_s)
    asyncio.run(crowd.run(AT_ONCE))  # threads, caches and code paths that come with the first of each kind
    first = at_rest(server)
    began = time.monotonic()
    asyncio.run(crowd.run(count // 4))
    quarter = back_to(server, first)
    asyncio.run(crowd.run(count - count // 4))
    seconds = time.monotonic() - began
    last = back_to(server, first)
    return Outcome(crowd.seen, first, quarter, last, seconds, server.metrics()["rocm_serve_preemptions_total"])


def report(outcome: Outcome, show: Callable[[str], object]) -> None:
    seen = outcome.seen
    show(f"{sum(seen.statuses.values())} answered, {seen.given_up} given up, in {outcome.seconds:.0f} s")
    show(json.dumps(dict(sorted(seen.statuses.items()))))
    show(f"preemptions {outcome.preemptions:.0f}; MiB grown since the quarter {[round(g, 1) for g in outcome.growth]}")
    show(f"at rest before: {outcome.first.gauges}, descriptors {list(outcome.first.descriptors.values())}")
    show(f"at rest after:  {outcome.last.gauges}, descriptors {list(outcome.last.descriptors.values())}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--null", action="store_true", help="workers without a model")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        server = Server(args.model, Path(folder), FLAGS)
        if args.null:
            server.program = NULL_PROGRAM
        with server:
            outcome = soak(server, args.requests, args.seed, *(NULL if args.null else REAL))
            report(outcome, lambda line: sys.stdout.write(line + "\n"))
    sys.stdout.write("".join(f"FAULT {fault}\n" for fault in outcome.seen.faults))
    return 1 if outcome.seen.faults else 0


if __name__ == "__main__":
    sys.exit(main())
