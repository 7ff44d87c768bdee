"""Drive a scheduler through a story of arrivals, aborts and late results, and judge every step of it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rocm_serve.engine.scheduler import Scheduler
from rocm_serve.messages import AddRequest, EffectiveLimits, Output, Plan, StepResult
from rocm_serve.types import SamplingParams
from tests.engine.simulation import Answer, FakeWorker, make_prompt


@dataclass(frozen=True)
class Job:
    prompt_seed: int
    prompt_len: int
    params: SamplingParams
    arrives: int  # tick
    aborted_at: int | None = None  # tick
    dies_as_victim: bool = False  # aborted when it is preempted while a plan that names it is in flight

    @property
    def prompt(self) -> tuple[int, ...]:
        return make_prompt(self.prompt_seed, self.prompt_len)


@dataclass(frozen=True)
class Story:
    limits: EffectiveLimits
    depth: int
    jobs: tuple[Job, ...]
    patience: tuple[bool, ...] = (True,)  # per tick, repeated: where False, a result waits while more can be planned


@dataclass
class Log:
    """What happened. `census` counts the rare states that the story went through."""

    plans: list[Plan] = field(default_factory=list)
    answers: dict[str, Answer] = field(default_factory=dict)
    census: Counter[str] = field(default_factory=Counter)
    in_flight_after: list[tuple[int, ...]] = field(default_factory=list)  # sizes of the plans in flight


class Driver:
    def __init__(self, story: Story) -> None:
        self.story = story
        self.scheduler = Scheduler(story.limits, story.depth)
        self.worker = FakeWorker(story.limits)
        self.results: deque[StepResult] = deque()
        self.log = Log()
        self.ended: set[str] = set()
        self.rids: dict[int, str] = {}

    def run(self, max_ticks: int = 5_000) -> Log:
        jobs = self.story.jobs
        last = max(max(job.arrives, job.aborted_at or 0) for job in jobs)
        tick = 0
        while tick <= last or not self.scheduler.idle:
            for number, job in enumerate(jobs):
                if job.arrives == tick:
                    self.scheduler.add(AddRequest(f"r{number}", job.prompt, job.params))
                    self.log.answers[f"r{number}"] = Answer()
            self._abort([f"r{n}" for n, job in enumerate(jobs) if job.aborted_at == tick and job.arrives <= tick])
            planned = self._schedule()
            if self.results and (not planned or self._full or self.story.patience[tick % len(self.story.patience)]):
                self._commit()
            tick += 1
            assert tick < max_ticks, "no progress"
        self._leave_nothing()
        return self.log

    @property
    def _full(self) -> bool:
        return len(self.results) == self.story.depth

    def _abort(self, ids: Sequence[str]) -> None:
        census = self.log.census
        for name in ids:
            if name in self.ended:
                continue
            (request,) = [r for r in self.scheduler._by_rid.values() if r.request_id == name]
            census["abort in flight"] += request.in_flight > 0
            census["abort while waiting"] += request.slot == 0
            census["abort of a victim in flight"] += request.slot == 0 and request.in_flight > 0
            self.ended.add(name)
        self.scheduler.abort(ids)
        self.scheduler.check()

    def _schedule(self) -> bool:
        before = self.scheduler.stats().preemptions
        victims = {rid: r for rid, r in self.scheduler.running.items() if r.in_flight}
        plan = self.scheduler.schedule()
        self.scheduler.check()
        census = self.log.census
        if self.scheduler.stats().preemptions > before:
            census["preemption"] += self.scheduler.stats().preemptions - before
            census["preemption in flight"] += any(r.slot == 0 for r in victims.values())
            census["prompt preempted"] += any(r.slot == 0 and r.awaits is None for r in victims.values())
        if self.scheduler.waiting and self.scheduler.slots.num_free and not self._full:
            census["exhaustion: pages keep a request waiting"] += 1
        if not self.scheduler.slots.num_free and self.scheduler.waiting:
            census["exhaustion: slots keep a request waiting"] += 1
        doomed = [r.request_id for r in victims.values() if r.slot == 0 and self._job(r.request_id).dies_as_victim]
        if plan is None:
            self._abort(doomed)
            return False
        self._judge(plan)
        self.log.plans.append(plan)
        self.results.append(self.worker.execute(plan))
        self._compare_tables()
        self.log.in_flight_after.append(tuple(len(r.plan.work) for r in self.scheduler.in_flight))
        census["depth 2"] += len(self.results) >= 2
        census["mixed"] += plan.work[0].recurrent and not plan.work[-1].recurrent
        both = [w.rid for r in self.scheduler.in_flight for w in r.plan.work]
        census["one request in two plans in flight"] += len(both) > len(set(both))
        self._abort(doomed)
        return True

    def _job(self, name: str) -> Job:
        return self.story.jobs[int(name[1:])]

    def _judge(self, plan: Plan) -> None:
        """Budgets, cuts and order of one plan, from the contract alone."""
        limits = self.story.limits
        decodes = [w for w in plan.work if w.recurrent and w.num_rows == 1 and w.samples]
        assert sum(w.num_rows for w in plan.work) - len(decodes) <= limits.chunked_prefill_size
        assert len(plan.work) <= min(limits.max_running_requests, limits.num_slots)
        cut = min(64, limits.chunked_prefill_size)
        for work in plan.work:
            request = self.scheduler._by_rid[work.rid]
            self.rids[work.rid] = request.request_id
            end = work.start + work.num_rows
            if not work.recurrent:
                assert work.start % cut == 0 and (end % cut == 0 or end == request.prompt_len)
            self.log.census["output computed again in several rows"] += work.recurrent and work.num_rows > 1
            self.log.census["resumed"] += work.start == 0 and bool(request.out)

    def _compare_tables(self) -> None:
        for rid, request in self.scheduler.running.items():
            known = self.worker.requests[rid]
            assert known.pages == request.pages, "the worker's page table differs from the scheduler's"
            assert known.cached == request.planned and len(known.output) <= len(request.out)

    def _commit(self) -> None:
        census = self.log.census
        waiting = {r.request_id for r in self.scheduler.waiting}
        outputs = self.scheduler.commit(self.results.popleft())
        self.scheduler.check()
        names = [output.request_id for output in outputs]
        assert len(names) == len(set(names)), "two outputs of one request in one step"
        for output in outputs:
            census["token of a victim kept"] += output.request_id in waiting and bool(output.tokens)
            over = output.finish_reason is not None
            census["victim ends before it resumes"] += output.request_id in waiting and over
            self._collect(output)

    def _collect(self, output: Output) -> None:
        assert output.request_id not in self.ended, "an output after the end"
        answer = self.log.answers[output.request_id]
        answer.tokens += output.tokens
        answer.logprobs += output.logprobs
        answer.prompt_logprobs += output.prompt_logprobs
        answer.finish_reason = output.finish_reason
        answer.stop_token = output.stop_token
        if output.finish_reason is not None:
            self.ended.add(output.request_id)
        else:
            assert output.tokens or output.prompt_logprobs, "an output without news"

    def _leave_nothing(self) -> None:
        """All is given back, and one more plan makes the workers forget everything but its own request."""
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.pages_used, stats.slots_used) == (0, 0, 0, 0)
        assert stats.finished + stats.aborted == len(self.story.jobs) == len(self.log.answers)
        assert stats.steps == len(self.log.plans) == stats.prefill_steps + stats.decode_steps + stats.mixed_steps
        rows = sum(w.num_rows for p in self.log.plans for w in p.work if not w.recurrent)
        assert stats.prompt_tokens == rows
        assert stats.generation_tokens == sum(len(a.tokens) for a in self.log.answers.values())
        self.scheduler.add(AddRequest("last", (1,), SamplingParams(max_tokens=0)))
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.commit(self.worker.execute(plan))
        assert list(self.worker.requests) == [plan.work[0].rid], "a request was not released"


def drive(story: Story) -> Log:
    return Driver(story).run()
