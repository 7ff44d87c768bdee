"""The worker's loop: receives are posted early, a lost plan is fatal, one rank reports, a failure is told."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_serve.executor.launched import Launched
from rocm_serve.executor.link import CoreLink, channels
from rocm_serve.executor.runner import prompts_of_every_size, start_up_plans, warm_up_plans
from rocm_serve.executor.worker import EXIT_FAILED, EXIT_USER_ERROR, StageLoop, ToldToFail, run_worker
from rocm_serve.messages import FromWorker, Plan, Sampled, Shutdown, StepResult, ToWorker, Work, WorkerFailed
from rocm_serve.parallel.mesh import Mesh
from tests.executor.wishes import resolved


class Scripted:
    """Runner, edges and link in one: writes down the order in which the loop uses them."""

    def __init__(self, messages: list[ToWorker | None], *, rank: int, stages: int = 2, tp: int = 1) -> None:
        self.coord = Mesh(tp, stages).coord(rank)
        self.messages = deque(messages)
        self.events: list[str] = []
        self.sent: list[FromWorker] = []
        self.posted = 0

    def loop(self) -> StageLoop:
        anything: Any = self
        receiver = None if self.coord.first_stage else anything
        sender = None if self.coord.last_stage else Sending(self.events)
        return StageLoop(anything, receiver, sender, anything)  # type: ignore[arg-type]

    def receive(self, *, wait: bool) -> ToWorker | None:
        message = self.messages.popleft()
        assert message is not None or not wait, "the loop would block with work to do"
        return message

    def send(self, message: FromWorker) -> None:
        self.sent.append(message)

    def rows(self, plan: Plan) -> int:
        return sum(work.num_rows for work in plan.work)

    def post(self, rows: int) -> Scripted:
        self.events.append(f"post {rows}")
        return self

    def wait(self) -> torch.Tensor:
        self.events.append("arrived")
        return torch.zeros(1)

    def launch(self, plan: Plan, hidden: torch.Tensor | None) -> torch.Tensor | Launched:
        self.events.append(f"step {plan.seq}")
        return Launched(plan.seq, tuple) if self.coord.last_stage else torch.zeros(1)


class Sending:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def send(self, x_TH: torch.Tensor) -> None:
        self._events.append("sent")


def plan(seq: int, rows: int, reads: int = -1) -> Plan:
    return Plan(seq, (Work(0, 0, rows, False, False, 1),) if rows else (), reads=reads)


def test_every_plan_that_came_has_its_receive_posted_before_the_oldest_runs() -> None:
    script = Scripted([plan(0, 5), plan(1, 7), None, None, plan(2, 3), None, Shutdown()], rank=1)
    script.loop().serve()
    expected = ["post 5", "post 7", "arrived", "step 0", "arrived", "step 1", "post 3", "arrived", "step 2"]
    assert script.events == expected
    assert script.sent == [StepResult(seq, ()) for seq in range(3)]


def test_a_plan_that_reads_tokens_has_its_receive_posted_when_they_are_on_their_way() -> None:
    """Behind all plans before it, and nothing behind it before it: rows come in the order of the posts."""
    plans = (plan(0, 5), plan(1, 7), plan(2, 3, reads=0), plan(3, 2))
    script = Scripted([*plans, None, None, None, None, Shutdown()], rank=1)
    script.loop().serve()
    first = ["post 5", "post 7", "arrived", "step 0", "arrived", "step 1", "post 3", "post 2"]
    assert script.events == [*first, "arrived", "step 2", "arrived", "step 3"]


def test_a_first_stage_expects_tokens_when_its_rows_have_left_and_takes_them_before_a_step_that_reads_them() -> None:
    class Script(Scripted):
        """And the tokens' way."""

        def draws_ahead(self, plan: Plan) -> bool:
            return plan.seq < 2

        def expect(self, plan: Plan) -> None:
            self.events.append(f"expect {plan.seq}")

        def bring(self, plan: Plan) -> None:
            self.events.append(f"bring {plan.reads}")

    script = Script([plan(0, 5), plan(1, 7), plan(2, 3, reads=0), None, None, None, Shutdown()], rank=0)
    loop = script.loop()
    loop.newest = script  # type: ignore[assignment]
    loop.serve()
    first = ["bring -1", "step 0", "sent", "expect 0", "bring -1", "step 1", "sent", "expect 1"]
    assert script.events == [*first, "bring 0", "step 2", "sent"]


def test_a_first_stage_passes_on_and_reports_nothing() -> None:
    script = Scripted([plan(0, 5), None, plan(1, 0), None, Shutdown()], rank=0)
    script.loop().serve()
    assert script.events == ["step 0", "sent", "step 1"], "a plan without rows crosses no edge"
    assert script.sent == []


@pytest.mark.parametrize(("rank", "reports"), [(2, True), (3, False)])
def test_one_rank_of_the_last_stage_reports(rank: int, reports: bool) -> None:
    script = Scripted([plan(0, 1), None, Shutdown()], rank=rank, tp=2)
    script.loop().serve()
    assert bool(script.sent) == reports


def test_a_rank_that_is_sent_away_because_of_a_failure_does_not_leave_as_if_all_were_well() -> None:
    script = Scripted([plan(0, 1), Shutdown(failed=True)], rank=0)
    with pytest.raises(ToldToFail):
        script.loop().serve()


@pytest.mark.parametrize("seqs", [(1,), (0, 2), (0, 0)])
def test_a_lost_or_doubled_plan_is_fatal(seqs: tuple[int, ...]) -> None:
    script = Scripted([message for seq in seqs for message in (plan(seq, 1), None)], rank=1)
    with pytest.raises(AssertionError, match="one is lost"):
        script.loop().serve()


def told(link: CoreLink) -> WorkerFailed:
    while (message := link.receive(10)) is None:
        pass
    assert isinstance(message, WorkerFailed)
    return message


def test_a_users_error_is_told_as_its_sentence_and_exits_2(tmp_path: Path) -> None:
    link = CoreLink(channels(resolved(run_dir=str(tmp_path))))
    code = run_worker(resolved(run_dir=str(tmp_path), model=str(tmp_path / "nothing-here")), rank=0)
    failure = told(link)
    link.close()
    assert code == EXIT_USER_ERROR and failure.rank == 0 and failure.phase == "loading"
    assert "nothing-here" in failure.error and "Error" not in failure.error


def test_any_other_error_is_told_with_its_kind_and_exits_1(tmp_path: Path) -> None:
    link = CoreLink(channels(resolved(run_dir=str(tmp_path))))
    code = run_worker(resolved(run_dir=str(tmp_path), tp=2, dist_init_addr="no-port", dist_timeout=1), rank=0)
    failure = told(link)
    link.close()
    assert code == EXIT_FAILED and failure.phase == "joining the other ranks"
    assert failure.error.startswith("ValueError: ")


@pytest.mark.parametrize(("page_size", "length"), [(1, 1), (1, 4), (2, 3), (4, 5), (16, 256)])
def test_warming_up_stays_within_one_request_of_full_length(page_size: int, length: int) -> None:
    plans = list(warm_up_plans(page_size, length))
    pages = [page for one in plans for work in one.work for page in work.new_pages]
    rows = [(work.start, work.num_rows, work.recurrent) for one in plans for work in one.work]
    assert pages == list(range(len(pages))) and len(pages) <= -(-length // page_size)
    assert sum(num for _, num, _ in rows) <= length
    assert rows[0][0] == 0 and (length == min(4, length) or any(recurrent for _, _, recurrent in rows))
    assert plans[-1].released and not plans[-1].work


@pytest.mark.parametrize(
    ("most_rows", "length", "pages", "slots", "first", "left_out"),
    [
        (64, 256, 64, 8, [2, 4, 8, 16, 32, 64, 16, 16], ""),
        (100, 256, 64, 3, [2, 4, 8, 16, 32, 64, 100], ""),
        # a prompt is not longer than a request may be
        (64, 16, 64, 2, [2, 4, 8, 16, 32], "2 x 4 behind 16, 2 x 32"),
        # as many rows as there are pages for
        (64, 256, 2, 2, [2, 4, 8, 16, 32], "2 x 4 behind 16, 2 x 32"),
        (64, 256, 64, 1, [], ""),
        (1, 256, 64, 8, [], ""),
    ],
)
def test_prompts_of_every_size_stay_within_the_caches(
    most_rows: int,
    length: int,
    pages: int,
    slots: int,
    first: list[int],
    left_out: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    plans = list(prompts_of_every_size(16, length, most_rows, pages, slots))
    begun = [one for one in plans if one.new]
    assert [sum(work.num_rows for work in one.work) for one in begun] == first
    assert (f"may compile: {left_out};" in caplog.text) if left_out else not caplog.text
    table: dict[int, list[int]] = {}
    ended: dict[int, int] = {}
    for one in plans:
        for work in one.work:
            own = table.setdefault(work.rid, [])
            assert work.start == (0 if one.new else ended[work.rid]) and work.slot in range(1, slots + 1)
            own += work.new_pages
            assert -(-(work.start + work.num_rows) // 16) == len(own) and work.start + work.num_rows <= length
        assert sum(work.num_rows for work in one.work) <= most_rows
        ended = {work.rid: work.start + work.num_rows for work in one.work}
        held = [page for own in table.values() for page in own]
        assert len(set(held)) == len(held) and set(held) <= set(range(pages))
        if one.released:
            assert not one.work and set(one.released) == set(table)
            table.clear()
    assert not table


def test_a_gpu_compiles_for_prompts_of_every_size_before_it_is_ready() -> None:
    cpu, gpu = (start_up_plans(resolved(device=device, max_model_len=256), 64, 8) for device in ("cpu", "cuda"))
    assert gpu[: len(cpu)] == cpu and len(gpu) > len(cpu)
    assert max(sum(work.num_rows for work in one.work) for one in gpu) == resolved().chunked_prefill_size


class OnDevice(Scripted):
    """A runner whose steps are over when the script says so: a number of looks after they began."""

    def __init__(self, messages: list[ToWorker | None], looks: int, stages: int = 1) -> None:
        super().__init__(messages, rank=stages - 1, stages=stages)
        self.looks = looks

    def receive(self, *, wait: bool) -> ToWorker | None:
        """The last message comes when nothing is left to do."""
        return super().receive(wait=wait) if wait or len(self.messages) > 1 else None

    def launch(self, plan: Plan, hidden: torch.Tensor | None) -> torch.Tensor | Launched:
        self.events.append(f"step {plan.seq}")
        return Running(plan.seq, self.events, self.looks)

    def send(self, message: FromWorker) -> None:
        super().send(message)
        assert isinstance(message, StepResult)
        self.events.append(f"result {message.seq}")


class Running(Launched):
    def __init__(self, seq: int, events: list[str], looks: int) -> None:
        super().__init__(seq, self.read)
        self.events, self.looks = events, looks

    @property
    def ready(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def read(self) -> tuple[Sampled, ...]:
        self.events.append(f"wait {self.seq}")
        return ()


def ahead(messages: list[ToWorker | None], looks: int) -> OnDevice:
    script = OnDevice(messages, looks)
    loop = script.loop()
    loop.ahead = True
    loop.serve()
    return script


def test_a_plan_that_comes_while_a_step_runs_begins_before_that_is_read() -> None:
    script = ahead([plan(0, 1), None, plan(1, 1), None, plan(2, 1), None, Shutdown()], looks=9)
    assert script.events == [
        *("step 0", "step 1", "wait 0", "result 0", "step 2", "wait 1", "result 1"),
        *("wait 2", "result 2"),
    ]


def test_no_third_step_begins_before_the_first_is_read() -> None:
    script = ahead([plan(0, 1), plan(1, 1), plan(2, 1), None, Shutdown()], looks=2)
    assert script.events.index("result 0") < script.events.index("step 2")
    assert [message.seq for message in script.sent if isinstance(message, StepResult)] == [0, 1, 2]


def test_without_another_plan_a_result_leaves_as_soon_as_it_is_there() -> None:
    script = ahead([plan(0, 1), None, Shutdown()], looks=2)
    assert script.events == ["step 0", "wait 0", "result 0"]


def test_the_last_of_two_stages_begins_a_step_before_the_one_before_is_read() -> None:
    script = OnDevice([plan(0, 1), plan(1, 1), None, plan(2, 1), None, Shutdown()], looks=9, stages=2)
    loop = script.loop()
    loop.ahead = True
    loop.serve()
    steps = [event for event in script.events if event.split()[0] in ("step", "wait")]
    assert steps == ["step 0", "step 1", "wait 0", "step 2", "wait 1", "wait 2"]


def test_behind_another_stage_a_step_that_is_ready_at_once_ends_before_the_next_begins() -> None:
    """Its result is made from memory that the next one writes to. The second of three is such a step."""

    class Script(OnDevice):
        def launch(self, plan: Plan, hidden: torch.Tensor | None) -> torch.Tensor | Launched:
            self.events.append(f"step {plan.seq}")
            return Running(plan.seq, self.events, 0 if plan.seq == 1 else 9)

    script = Script([plan(0, 1), plan(1, 1), plan(2, 1), None, Shutdown()], looks=9, stages=2)
    loop = script.loop()
    loop.ahead = True
    loop.serve()
    steps = [event for event in script.events if event.split()[0] in ("step", "wait")]
    assert steps == ["step 0", "step 1", "wait 0", "wait 1", "step 2", "wait 2"]


def test_a_step_that_fails_when_it_is_read_is_the_one_that_is_named() -> None:
    class Failing(Running):
        def read(self) -> tuple[Sampled, ...]:
            raise RuntimeError("not finite")

    class Script(OnDevice):
        def launch(self, plan: Plan, hidden: torch.Tensor | None) -> torch.Tensor | Launched:
            return (Failing if plan.seq == 0 else Running)(plan.seq, self.events, 9)

    loop = Script([plan(0, 1), None, plan(1, 1), None, Shutdown()], looks=9).loop()
    loop.ahead = True
    with pytest.raises(RuntimeError, match="not finite"):
        loop.serve()
    assert loop.step == 0 and loop.heartbeat.progress.step == 0
