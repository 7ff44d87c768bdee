"""The process of one rank: `python -m rocm_serve.executor.worker --resolved FILE --rank R`."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from rocm_serve.config.experts import meets_on_host
from rocm_serve.config.schema import Resolved
from rocm_serve.errors import UserError
from rocm_serve.executor.edges import Arrival, Receiver, Sender
from rocm_serve.executor.expert_counts import ExpertCounter, counter_of
from rocm_serve.executor.heartbeat import Heartbeat, Phase, heartbeat_file
from rocm_serve.executor.launched import Launched
from rocm_serve.executor.link import WorkerLink, channels
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.loading import load_stage_model
from rocm_serve.executor.newest import NewestTokens
from rocm_serve.executor.runner import StageRunner, phase_of, start_up_plans, watch_layers
from rocm_serve.lifeline import die_with_parent, show_stacks_on_signal
from rocm_serve.messages import (
    WIRE_VERSION,
    AllocateCache,
    Plan,
    Shutdown,
    WorkerFailed,
    WorkerLoaded,
    WorkerReady,
)
from rocm_serve.parallel.groups import Groups, leave_groups, make_groups
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.trace import StageTrace, tracing

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_PEER_LOST = 3
EXIT_SENT_AWAY = 4
Loader = Callable[..., LoadedStage]  # as `load_stage_model`
# gloo has no exception of its own.
_OF_A_PEER = re.compile(r"by peer|Broken pipe|Connection refused|Timed out waiting|Connect timeout|Application timeout")


class ToldToFail(Exception):
    """Something else has failed, and everything ends."""


def _leave(message: Shutdown) -> None:
    """Errors: ToldToFail."""
    if message.failed:
        raise ToldToFail


@dataclass(frozen=True, slots=True)
class _Running:
    plan: Plan
    left: Launched
    started_ns: int


@dataclass(slots=True)
class StageLoop:
    """Feeds one rank's runner from the plan channel and its edges.

    `ahead`: a plan that comes while another runs is begun before that one's result is there. With one stage the
    scheduler sends none behind a step whose result takes the device once more; behind other stages such a step, which
    is ready at once, is brought to its end here before the next one begins. `newest` and `to_first`: the ends of the
    way of tokens from the last of several stages to the first, where steps are planned before the host knows them.
    """

    runner: StageRunner
    receiver: Receiver | None
    sender: Sender | None
    link: WorkerLink
    trace: Callable[[StageTrace], None] | None = None
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    counter: ExpertCounter | None = None
    ahead: bool = False
    newest: NewestTokens | None = None
    to_first: Sender | None = None
    step: int = -1  # plan that runs now, for the failure report
    launched: deque[_Running] = field(default_factory=deque)

    def warm_up(self, plans: list[Plan], capture: Callable[[], WorkerReady]) -> WorkerReady:
        """Run `plans` through runner and edges and tell nobody; then capture what can be, and return the news."""
        if self.to_first is not None:
            self.to_first.send(torch.zeros((1, 1), dtype=torch.int64, device=self.runner.device))
        if self.newest is not None:
            self.newest.warm_up()
        for plan in plans:
            arrival = self._post(plan)
            self.heartbeat.enter(Phase.WARMING_UP if arrival is None else Phase.WAITING_FOR_ROWS)
            left = self._begin(plan, None if arrival is None else arrival.wait())
            if left is not None:
                left.result()
            if self.newest is not None:
                self.newest.bring_all()
        self.heartbeat.enter(Phase.WARMING_UP)
        ready = capture()
        if self.counter is not None:
            self.counter.reset()
        return ready

    def serve(self) -> None:
        """Run plans until Shutdown. Returns with nothing on its way; raises ToldToFail when something has failed.

        Every plan that has come is given its receive before the oldest one runs, so that the previous stage never
        waits for this one to look. One that reads tokens is given it when all plans before it have been launched, and
        the first stage asks for tokens when a step reads them: a device that runs transfers and steps in one queue
        would never come to what stands behind (docs/decisions/0017). With a step on the device the loop turns until
        that is over or a plan comes.
        """
        coming: deque[Plan] = deque()
        waiting: deque[tuple[Plan, Arrival | None]] = deque()
        next_seq = 0
        while True:
            idle = not coming and not waiting and not self.launched
            if idle:
                self.heartbeat.enter(Phase.IDLE)
            while (message := self.link.receive(wait=idle)) is not None:
                if isinstance(message, Shutdown):
                    return _leave(message)
                assert isinstance(message, Plan), f"unexpected while serving: {message}"
                assert message.seq == next_seq, f"plan {message.seq} came where {next_seq} is next: one is lost"
                next_seq += 1
                coming.append(message)
                idle = False
            while coming and (coming[0].reads < 0 or not waiting):
                plan = coming.popleft()
                waiting.append((plan, self._post(plan)))
            while self.receiver is not None and self.launched and self.launched[0].left.ready:
                self._report(self.launched.popleft())
            if waiting and len(self.launched) <= self.ahead:
                self._launch(*waiting.popleft())
            full = len(self.launched) > self.ahead
            if self.launched and (full or self.launched[0].left.ready):
                self._report(self.launched.popleft())

    def _launch(self, plan: Plan, arrival: Arrival | None) -> None:
        self.step = plan.seq
        self.heartbeat.enter(Phase.IDLE if arrival is None else Phase.WAITING_FOR_ROWS, plan.seq)
        hidden_TH = None if arrival is None else arrival.wait()
        if self.newest is not None:
            self.heartbeat.enter(Phase.WAITING_FOR_TOKENS)
            self.newest.bring(plan)
        started_ns = time.monotonic_ns()
        left = self._begin(plan, hidden_TH)
        if left is not None:
            self.launched.append(_Running(plan, left, started_ns))
        else:
            self._over(plan, started_ns)

    def _report(self, oldest: _Running) -> None:
        """Wait for a step's tokens and send them."""
        self.step = oldest.plan.seq
        if self.launched:  # the next one has begun, but is not what is waited for
            self.heartbeat.enter(phase_of(oldest.plan), oldest.plan.seq)
        result = oldest.left.result()
        if self.runner.coord.tp_rank == 0:
            self.link.send(result)
        self._over(oldest.plan, oldest.started_ns)

    def _over(self, plan: Plan, started_ns: int) -> None:
        if self.counter is not None:
            self.counter.after_step()
        if self.trace is not None:
            self.trace(StageTrace(plan.seq, len(plan.work), started_ns, time.monotonic_ns()))

    def _post(self, plan: Plan) -> Arrival | None:
        return self.receiver.post(self.runner.rows(plan)) if self.receiver is not None and plan.work else None

    def _begin(self, plan: Plan, hidden_TH: torch.Tensor | None) -> Launched | None:
        if plan.seq == self.step:
            self.heartbeat.enter(phase_of(plan))
        out = self.runner.launch(plan, hidden_TH)
        if isinstance(out, Launched):
            if self.to_first is not None and self.runner.draws_ahead(plan):
                assert out.drawn_R3 is not None
                self.to_first.send(out.drawn_R3[:, 2:].long())
            return out
        if plan.work:
            assert self.sender is not None
            self.sender.send(out)
        if self.newest is not None and self.runner.draws_ahead(plan):
            self.newest.expect(plan)
        return None


class Worker:
    """One rank from start to end; `phase` says where it is. `load` makes its stage."""

    def __init__(self, resolved: Resolved, rank: int, link: WorkerLink, load: Loader = load_stage_model) -> None:
        self.resolved = resolved
        self.coord = Mesh(tp=resolved.tp, pp=resolved.pp, ep=resolved.ep).coord(rank)
        self.link = link
        self._load = load
        self.heartbeat = Heartbeat(heartbeat_file(resolved.run_dir, f"rank-{rank}"))
        self._phase = Phase.STARTING
        self._loop: StageLoop | None = None

    @property
    def phase(self) -> str:
        if self._loop is not None and self._loop.step >= 0:
            return f"step {self._loop.step}"
        return self._phase.words

    def run(self) -> None:
        """Join, load, allocate, warm up, serve until told to stop."""
        resolved, coord = self.resolved, self.coord
        torch.set_num_threads(resolved.torch_threads)
        self._enter(Phase.JOINING)
        groups = make_groups(
            coord,
            gpu=resolved.device != "cpu",
            init_addr=resolved.dist_init_addr,
            timeout_s=resolved.dist_timeout,
            host=meets_on_host(resolved) or resolved.all_reduce == "aiter",
            tokens=resolved.plan_ahead != "off",
        )
        self._enter(Phase.LOADING)
        stage = self._load(resolved, coord, groups.tp, moved=self.heartbeat.tick, board=groups.board, host=groups.host)
        watch_layers(stage.model, self.heartbeat)
        self.heartbeat.enter(Phase.LOADED)
        self.link.send(WorkerLoaded(coord.rank, WIRE_VERSION, stage.cache_bytes, stage.page_bytes, stage.slot_bytes))
        message = self.link.receive(wait=True)
        if isinstance(message, Shutdown):
            return _leave(message)
        assert isinstance(message, AllocateCache), f"unexpected after loading: {message}"
        self._enter(Phase.ALLOCATING)
        runner = stage.runner(num_pages=message.num_pages, num_slots=message.num_slots)
        counter = counter_of(resolved, coord, stage.facts, stage.model)
        edges = self._edges(groups, stage)
        self._loop = StageLoop(
            replace(runner, prompts=None), *edges, self.link, heartbeat=self.heartbeat, counter=counter
        )
        self._loop.newest, self._loop.to_first = self._token_ends(groups, runner)
        self._enter(Phase.WARMING_UP)
        plans = start_up_plans(resolved, message.num_pages, message.num_slots)
        ready = self._loop.warm_up(plans, lambda: stage.capture(runner, self.heartbeat.tick))
        self._loop.runner = stage.after_capture(runner, ready)
        # The last of several stages knows all tokens of a plan that comes: it need not read the result before first.
        self._loop.ahead = self._loop.runner.ahead or (coord.last_stage and not coord.first_stage)
        self.link.send(ready)
        self._enter(Phase.IDLE)
        with tracing(resolved.trace, f"rank-{coord.rank}") as self._loop.trace:
            self._loop.serve()
        if counter is not None:
            counter.write()
        stage.experts.close()
        leave_groups()

    def _edges(self, groups: Groups, stage: LoadedStage) -> tuple[Receiver | None, Sender | None]:
        receiver = sender = None
        if groups.from_previous is not None:
            hidden_size = stage.facts.hidden_size
            receiver = Receiver(groups.from_previous, hidden_size=hidden_size, dtype=stage.dtype, device=stage.device)
        if groups.to_next is not None:
            sender = Sender(groups.to_next, slots=self.resolved.pp + 1)
        return receiver, sender

    def _token_ends(self, groups: Groups, runner: StageRunner) -> tuple[NewestTokens | None, Sender | None]:
        newest = to_first = None
        most = self.resolved.pp + 1
        if groups.from_last is not None:
            receiver = Receiver(groups.from_last, hidden_size=1, dtype=torch.int64, device=runner.device)
            newest = NewestTokens(receiver.post, runner.keep_newest, most)
        if groups.to_first is not None:
            to_first = Sender(groups.to_first, slots=most)
        return newest, to_first

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self.heartbeat.enter(phase)
        log.info("rank %d (stage %d, tensor-parallel %d): %s", self.coord.rank, *_place(self), phase.words)


def peer_lost(error: Exception) -> bool:
    """Tell whether the error only says that another rank is gone: its supervisor knows why."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError | dist.DistBackendError):
        return True
    return isinstance(error, RuntimeError) and bool(_OF_A_PEER.search(str(error)))


def _place(worker: Worker) -> tuple[int, int]:
    return worker.coord.stage, worker.coord.tp_rank


def run_worker(resolved: Resolved, rank: int, load: Loader = load_stage_model) -> int:
    """Run one rank and return the exit code of its process; a failure is told to the core first."""
    link = WorkerLink(channels(resolved), rank)
    worker = Worker(resolved, rank, link, load)
    code = 0
    try:
        worker.run()
    except UserError as error:
        log.error("error: %s", error)
        link.send(WorkerFailed(rank, worker.phase, str(error)))
        code = EXIT_USER_ERROR
    except ToldToFail:
        log.error("rank %d leaves in %s: the engine core ends everything because of a failure", rank, worker.phase)
        code = EXIT_SENT_AWAY
    except Exception as error:
        log.exception("rank %d failed during %s", rank, worker.phase)
        sentence = f"{type(error).__name__}: {error}".partition("\n")[0]
        link.send(WorkerFailed(rank, worker.phase, sentence))
        code = EXIT_PEER_LOST if peer_lost(error) else EXIT_FAILED
    link.close()
    return code


def main(load: Loader = load_stage_model) -> None:
    """Be the process of one rank. `load`: a program of its own may bring another stage (benchmarks: a null model)."""
    show_stacks_on_signal()
    die_with_parent()
    parser = argparse.ArgumentParser(description="One rank of rocm-serve; started by its supervisor.")
    parser.add_argument("--resolved", type=Path, required=True, help="JSON of the resolved configuration")
    parser.add_argument("--rank", type=int, required=True)
    args = parser.parse_args()
    resolved = msgspec.json.decode(args.resolved.read_bytes(), type=Resolved)
    logging.basicConfig(level=resolved.log_level.upper(), format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    code = run_worker(resolved, args.rank, load)
    logging.shutdown()
    sys.stdout.flush()
    # Destructors of broken process groups wait for peers that are gone.
    os._exit(code)


if __name__ == "__main__":
    main()
