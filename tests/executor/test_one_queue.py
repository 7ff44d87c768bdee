"""Stages that plan ahead on devices that run steps and transfers in one queue: nothing waits in a circle (0017).

Loops and edges are the real ones; devices, transfers and the core are simulated, in turns that a seed chooses.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from rocm_serve.executor import edges
from rocm_serve.executor.edges import Receiver, Sender
from rocm_serve.executor.launched import Launched
from rocm_serve.executor.newest import Coming, NewestTokens
from rocm_serve.executor.worker import StageLoop, ToldToFail
from rocm_serve.messages import Plan, StepResult, Work
from rocm_serve.parallel.groups import EdgeGroup
from rocm_serve.parallel.mesh import Mesh

PLANS = 12
STILL = 40  # rounds; each takes half of all turns


@dataclass(eq=False)
class Operation:
    """`begun`: it is the first of its queue, and what it comes after is over; `ends` says whether it is over then."""

    after: Sequence[Operation]
    ends: Callable[[], bool] = lambda: True
    begun: bool = False
    over: bool = False


class Device:
    def __init__(self, one_queue: bool) -> None:
        self._one_queue = one_queue
        self._queues: dict[str, deque[Operation]] = {}
        self._last_step: list[Operation] = []
        self.put_in = 0

    def put(self, stream: str, operation: Operation) -> Operation:
        self._queues.setdefault("all" if self._one_queue else stream, deque()).append(operation)
        self.put_in += 1
        return operation

    def step(self, *after: Operation) -> Operation:
        """Put something into the stream of steps."""
        self._last_step = [self.put("steps", Operation(after))]
        return self._last_step[0]

    def transfer(self, stream: str, ends: Callable[[], bool]) -> Operation:
        return self.put(stream, Operation(tuple(self._last_step), ends))

    def run(self) -> int:
        """Run what can be run, and return how many operations that were."""
        ran = 0
        for queue in self._queues.values():
            while queue and all(one.over for one in queue[0].after):
                queue[0].begun = True
                if not queue[0].ends():
                    break
                queue.popleft().over = True
                ran += 1
        return ran


@dataclass
class Channel:
    """A message has left when its receive has begun, or when it is one of the `room` oldest not yet received."""

    room: int
    sent: list[Operation] = field(default_factory=list)
    received: list[Operation] = field(default_factory=list)


@dataclass
class End:
    """What stands for a process group: isend and irecv, whose `wait` holds up later steps, not the host."""

    device: Device
    stream: str
    channel: Channel
    asked: Operation | None = None

    def wait(self, limit: object) -> None:
        assert self.asked is not None
        self.device.step(self.asked)

    def isend(self) -> End:
        channel, at = self.channel, len(self.channel.sent)

        def ends() -> bool:
            free = at - sum(one.over for one in channel.received) < channel.room
            return free or (at < len(channel.received) and channel.received[at].begun)

        channel.sent.append(self.device.transfer(self.stream, ends))
        return End(self.device, self.stream, channel, channel.sent[-1])

    def irecv(self) -> End:
        channel, at = self.channel, len(self.channel.received)
        ends: Callable[[], bool] = lambda: at < len(channel.sent) and channel.sent[at].begun  # noqa: E731
        channel.received.append(self.device.transfer(self.stream, ends))
        return End(self.device, self.stream, channel, channel.received[-1])


class Rank:
    """Runner, link and thread of one stage. The thread runs from one look at the link, or at a step, to the next."""

    def __init__(self, stage: int, stages: int, device: Device) -> None:
        self.coord = Mesh(1, stages).coord(stage)
        self.device = torch.device("cpu")
        self.simulated = device
        self.plans: deque[Plan] = deque()
        self.results: list[StepResult] = []
        self.ending = False
        self._failed: Exception | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)

    def start(self, loop: StageLoop) -> None:
        def serve() -> None:
            try:
                loop.serve()
            except Exception as error:
                self._failed = error
            self._back.release()

        self.thread = threading.Thread(target=serve, daemon=True)
        self.thread.start()
        self._back.acquire()

    def turn(self) -> None:
        """Let the thread run to its next pause, or to its end. Errors: the thread's own."""
        self._go.release()
        self._back.acquire()
        if self._failed is not None and not isinstance(self._failed, ToldToFail):
            raise self._failed

    def _pause(self) -> None:
        self._back.release()
        self._go.acquire()
        if self.ending:
            raise ToldToFail

    def receive(self, *, wait: bool) -> Plan | None:
        self._pause()
        while wait and not self.plans:
            self._pause()
        return self.plans.popleft() if self.plans else None

    def send(self, result: StepResult) -> None:
        self.results.append(result)

    def rows(self, plan: Plan) -> int:
        return 1

    def draws_ahead(self, plan: Plan) -> bool:
        return True

    def launch(self, plan: Plan, hidden_TH: torch.Tensor | None) -> torch.Tensor | Launched:
        step, rank = self.simulated.step(), self
        if not self.coord.last_stage:
            return torch.zeros(1, 1)

        class Fetched:
            @property
            def there(self) -> bool:
                return step.over

            def wait(self) -> None:
                while not step.over:
                    rank._pause()

        fetched: Any = Fetched()
        return Launched(plan.seq, tuple, fetched, torch.zeros(1, 3))


class AtOnce(NewestTokens):
    """Asks for a step's tokens right behind its rows."""

    def __init__(self, post: Callable[[int], Coming], keep: Callable[..., None], most: int) -> None:
        self._asked: deque[Coming] = deque()
        self._ask = post
        super().__init__(lambda count: self._asked.popleft(), keep, most)

    def expect(self, plan: Plan) -> None:
        self._asked.append(self._ask(1))
        super().expect(plan)


def served(
    reads: Sequence[int], seed: int, stages: int, *, one_queue: bool = True, room: int, kind: type[NewestTokens]
) -> int:
    """Return how many of the plans that read these ones come to their end. `room`: as of `Channel`, for tokens."""
    chance, cpu = random.Random(seed), torch.device("cpu")
    devices = [Device(one_queue) for _ in range(stages)]
    ranks = [Rank(stage, stages, device) for stage, device in enumerate(devices)]
    rows, tokens = [Channel(0) for _ in range(stages - 1)], Channel(room)

    def edge(stage: int, stream: str, channel: Channel) -> EdgeGroup:
        group: Any = End(devices[stage], stream, channel)
        return EdgeGroup(group, 0)

    def receiver(stage: int, stream: str, channel: Channel, dtype: torch.dtype) -> Receiver:
        return Receiver(edge(stage, stream, channel), hidden_size=1, dtype=dtype, device=cpu)

    for stage, rank in enumerate(ranks):
        into = receiver(stage, "rows in", rows[stage - 1], torch.float32) if stage else None
        out = Sender(edge(stage, "rows out", rows[stage]), slots=stages + 1) if stage < stages - 1 else None
        anything: Any = rank
        loop = StageLoop(anything, into, out, anything, ahead=True)
        if stage == 0:
            post = receiver(0, "tokens", tokens, torch.int64).post
            loop.newest = kind(post, lambda *_: devices[0].step() and None, stages + 1)
        if out is None:
            loop.to_first = Sender(edge(stage, "tokens", tokens), slots=stages + 1)
        rank.start(loop)

    seq = still = 0
    results = ranks[-1].results
    while len(results) < len(reads) and still < STILL:
        before = seq + len(results) + sum(one.put_in for one in devices)
        if seq < len(reads) and seq - len(results) <= stages and chance.random() < 0.5:
            for rank in ranks:
                rank.plans.append(Plan(seq, (Work(1, 0, 1, True, True, 1),), reads=reads[seq]))
            seq += 1
        for rank in chance.sample(ranks, stages):
            if chance.random() < 0.5:
                rank.turn()
        ran = sum(one.run() for one in chance.sample(devices, stages) if chance.random() < 0.5)
        moved = ran or seq + len(results) + sum(one.put_in for one in devices) > before
        still = 0 if moved else still + 1
    for rank in ranks:
        rank.ending = True
        rank.turn()
        rank.thread.join()
    return len(results)


@pytest.fixture(autouse=True)
def transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges.dist, "isend", lambda x, peer, group: group.isend())
    monkeypatch.setattr(edges.dist, "irecv", lambda x, peer, group: group.irecv())


def read(how: str, stages: int, seed: int) -> list[int]:
    """Say which plan each one reads: that of its group, the one before, none, or any of these."""
    chance = random.Random(seed)
    nearest = {"its group": [stages], "the one before": [1], "none": [PLANS], "any": [*range(1, stages + 2), PLANS]}
    return [max(-1, seq - chance.choice(nearest[how])) for seq in range(PLANS)]


@pytest.mark.parametrize("how", ["its group", "the one before", "none", "any"])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_device_that_runs_all_in_one_queue_comes_to_an_end(stages: int, how: str) -> None:
    """Where as many messages leave before they are asked for as there are stages."""
    for seed in range(6):
        assert served(read(how, stages, seed), seed, stages, room=stages, kind=NewestTokens) == PLANS, seed


def test_tokens_asked_for_right_behind_their_rows_would_stop_it() -> None:
    ends = [served(read("none", 2, seed), seed, 2, room=2, kind=AtOnce) for seed in range(6)]
    assert min(ends) < PLANS


def test_tokens_that_leave_only_when_they_are_asked_for_would_stop_it_unless_each_stream_has_a_queue() -> None:
    for one_queue in (True, False):
        ends = [
            served(read("any", 2, seed), seed, 2, one_queue=one_queue, room=0, kind=NewestTokens) for seed in range(6)
        ]
        assert (min(ends) < PLANS) == one_queue
