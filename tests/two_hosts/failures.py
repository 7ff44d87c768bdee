"""A failure at a known moment on two hosts, and what must follow from it within which time."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from rocm_serve.control import SILENCE_S
from rocm_serve.executor.heartbeat import Phase, Progress
from tests.two_hosts.nodes import TwoHostNodes

DEADLINE_S = 4  # --watchdog-timeout of these scenes
NO_PREFLIGHT = dict.fromkeys((0, 1), {"PREFLIGHT": "off"})  # by node: it has scenes of its own
MOMENT_S = 0.005  # how often a rank is looked at for its moment
NOTICED_S = 2.0  # from a kill to 503
ENDED_S = 15.0  # from a death, or from the deadline of a stop, to the end of every process
SLACK_S = 3.0  # of a machine with two cores on which other tests run: sums of the above are held to that much more

_STEPS = (Phase.PREFILL, Phase.DECODE)
MOMENTS: dict[str, Callable[[Progress], bool]] = {
    "load": lambda seen: seen.phase is Phase.LOADING,
    "warm-up": lambda seen: seen.step < 0 and (seen.phase is Phase.WARMING_UP or seen.phase in _STEPS),
    "prefill": lambda seen: seen.step >= 0 and seen.phase is Phase.PREFILL,
    "decode": lambda seen: seen.step >= 0 and seen.phase is Phase.DECODE,
}
WORDS = {"load": "loading", "warm-up": "warming up", "prefill": "prefill", "decode": "decode"}  # of the logs


@dataclass(frozen=True)
class Failure:
    """`how`: kill or stop `who`; cut or silence its host's link. It happens when rank `at` is in `moment`."""

    how: str
    who: str
    moment: str
    at: str = ""

    def __str__(self) -> str:
        return f"{self.how}-{self.who}-{self.moment}"

    @property
    def noticed_s(self) -> float:
        return {"kill": NOTICED_S, "stop": DEADLINE_S}.get(self.how, SILENCE_S) + SLACK_S

    @property
    def ended_s(self) -> float:
        return ENDED_S + SLACK_S + (DEADLINE_S if self.how == "stop" else 0)

    def happen(self, nodes: TwoHostNodes) -> None:
        """Wait for the moment, and do it. Errors: AssertionError when the moment does not come, or was missed."""
        moment = MOMENTS[self.moment]
        nodes.until(lambda: found(nodes, self.at or self.who) is not None, 120, "the ranks do not start")
        if self.who.startswith("rank-"):
            process = nodes.process(self.who)  # looked for now: that takes longer than a moment may last
            nodes.until(
                lambda: hold(nodes, self.who, process, moment),
                120,
                f"{self.who} was never caught in {self.moment}",
                every_s=MOMENT_S,
            )
            if self.how == "kill":
                process.kill()
            return

        def there() -> bool:
            seen = nodes.progress(self.at)
            return seen is not None and moment(seen)

        nodes.until(there, 120, f"{self.at} was never seen in {self.moment}", every_s=MOMENT_S)
        if self.how == "kill":
            nodes.process(self.who).kill()
        elif self.how == "cut":
            nodes.hosts.cut(int(self.who[-1]))
        else:
            nodes.hosts.silence()


def found(nodes: TwoHostNodes, name: str) -> psutil.Process | None:
    return next((one for node in nodes.nodes if (one := node.child(name)) is not None), None)


def hold(nodes: TwoHostNodes, name: str, process: psutil.Process, moment: Callable[[Progress], bool]) -> bool:
    """Stop a process when it is at the moment; True if it was still there once it stood."""
    seen = nodes.progress(name)
    if seen is None or not moment(seen):
        return False
    process.suspend()
    seen = nodes.progress(name)
    if seen is not None and moment(seen):
        return True
    process.resume()
    return False


@dataclass
class OpenRequests:
    """A plain and a streaming request, open at once; what came of them is there once the block is left."""

    nodes: TwoHostNodes
    body: dict[str, object]
    plain: Any = None  # the object, or the exception of a connection that broke
    streamed: Any = None  # the last event, likewise
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._threads = [threading.Thread(target=ask) for ask in (self._ask, self._stream)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for thread in self._threads:
            thread.join(timeout=60)

    def _ask(self) -> None:
        try:
            with self.nodes.client() as client:
                self.plain = client.post("/v1/completions", json=self.body).json()
        except httpx.TransportError as broken:
            self.plain = broken

    def _stream(self) -> None:
        try:
            asked = self.body | {"stream": True}
            with self.nodes.client() as client, client.stream("POST", "/v1/completions", json=asked) as response:
                lines = [line for line in response.iter_lines() if line not in ("", "data: [DONE]")]
        except httpx.TransportError as broken:
            self.streamed = broken
        else:
            self.streamed = json.loads(lines[-1].removeprefix("data: "))

    def check_errors(self, sentence: str) -> None:
        """Both are told `sentence`; one may have come when it was over already, where the first step was caught."""
        types = set()
        for answer in (self.plain, self.streamed):
            assert isinstance(answer, dict) and sentence in answer["error"]["message"], answer
            types.add(answer["error"]["type"])
        assert "server_error" in types and types <= {"server_error", "service_unavailable"}, types

    def check_broken(self) -> None:
        """Who served them is gone."""
        for answer in (self.plain, self.streamed):
            assert isinstance(answer, httpx.TransportError), answer


def check_death(nodes: TwoHostNodes, failure: Failure) -> None:
    """Hold everything after `failure`, which has just happened, to what was promised; print how long it took.

    503, the end of both supervisors with code 1, no process left on either host, and logs that name rank, phase and
    stacks.
    """
    began = time.monotonic()
    took = {}
    if failure.who != "node-0" or failure.how != "kill":
        nodes.until(lambda: nodes.health() == 503, failure.noticed_s, "/health is not 503")
        took["503"] = time.monotonic() - began
    codes = dict(enumerate(nodes.end(failure.ended_s - (time.monotonic() - began))))
    took["end"] = time.monotonic() - began
    if failure.how == "kill" and failure.who.startswith("node-"):
        assert codes.pop(int(failure.who[-1])) == -signal.SIGKILL
    assert all(code == 1 for code in codes.values()), codes
    nodes.until(lambda: not any(map(nodes.hosts.pids, (0, 1))), 5, "processes are left on a host")
    for rank in codes:
        _check_log(nodes, rank, failure)
    print(f"{failure}: " + ", ".join(f"{what} after {seconds:.2f} s" for what, seconds in took.items()))


def _check_log(nodes: TwoHostNodes, rank: int, failure: Failure) -> None:
    log, name = nodes.nodes[rank].log, failure.who
    if name.startswith("rank-") and failure.how == "kill":
        assert f"{name} ended with signal SIGKILL in " in log
        assert WORDS[failure.moment] in log.partition(" ended with signal SIGKILL in ")[2].partition(";")[0]
    elif name.startswith("rank-"):
        sentence = f"rank {name[-1]} has made no progress for {DEADLINE_S} s: "
        assert sentence in log
        assert WORDS[failure.moment] in log.partition(sentence)[2].partition(" s ")[0].partition("(--")[0]
        assert "stopped by a signal" in log
        shown = log.partition(f"[{name}] stacks")[2]
        if rank == 0 or nodes.nodes[rank].child(name) is not None:
            assert "most recent call first" in shown and "worker.py" in shown, "who is stuck shows where"
    elif failure.how == "kill":
        assert f"node {name[-1]} at {nodes.hosts.hosts[int(name[-1])].address}" in log
        assert "has gone: the connection to its supervisor closed" in log
    else:
        other = nodes.hosts.hosts[1 - rank]
        assert f"node {other.rank} at {other.address}" in log
        assert f"has been silent for {SILENCE_S:.0f} s: its host or the link is down" in log
    _check_survivors(nodes, rank, failure)


def _check_survivors(nodes: TwoHostNodes, rank: int, failure: Failure) -> None:
    """Who ended with the others: its supervisor says in which phase, its own log has its stacks."""
    node = nodes.nodes[rank]
    for log in sorted(Path(node.run_dir, "logs").glob("rank-*.log")):
        if log.stem != failure.who:
            assert re.search(rf"\[{log.stem}\] (had ended with .*|ended by its supervisor) in ", node.log)
            text = log.read_text(errors="replace")
            assert re.search("most recent call (first|last)|the engine core ends everything", text), log.stem
            assert not re.search(rf"\[{log.stem}\] .* exit code 0 ", node.log)
