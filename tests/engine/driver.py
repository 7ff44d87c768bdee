"""Drive a scheduler through a story of arrivals, aborts and late results, and judge every step of it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rocm_serve.engine.scheduler import Scheduler
from rocm_serve.messages import AddRequest, EffectiveLimits, Output, Plan, Sampled, StepResult, Work
from rocm_serve.types import FinishReason, SamplingParams
from tests.engine.simulation import Answer, Drafter, FakeWorker, make_prompt


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
    drafter: Drafter = Drafter()
    drafting: tuple[bool, ...] = (True,)  # per tick, repeated: whether a plan may draft


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
        self.worker = FakeWorker(story.limits, story.drafter)
        self.results: deque[StepResult] = deque()
        self.log = Log()
        self.ended: set[str] = set()
        self.rids: dict[int, str] = {}
        self.params: dict[int, SamplingParams] = {}
        self.forwards = self.tokens_of_forwards = 0
        self.drafted: Counter[int] = Counter()
        self.accepted: Counter[int] = Counter()

    def run(self, max_ticks: int = 5_000) -> Log:
        jobs = self.story.jobs
        last = max(max(job.arrives, job.aborted_at or 0) for job in jobs)
        tick = self.tick = 0
        while tick <= last or not self.scheduler.idle:
            for number, job in enumerate(jobs):
                if job.arrives == tick:
                    self.scheduler.add(AddRequest(f"r{number}", job.prompt, job.params))
                    self.log.answers[f"r{number}"] = Answer()
            self._abort([f"r{n}" for n, job in enumerate(jobs) if job.aborted_at == tick and job.arrives <= tick])
            planned = self._schedule()
            comes = tick % 3 == 0 if self._full else not planned
            if self.results and (comes or self.story.patience[tick % len(self.story.patience)]):
                self._commit()
            self.tick = tick = tick + 1
            assert tick < max_ticks, "no progress"
        self._leave_nothing()
        return self.log

    @property
    def _ahead(self) -> bool:
        return self.story.limits.plan_ahead

    @property
    def _full(self) -> bool:
        return len(self.results) == self.story.depth

    def _abort(self, ids: Sequence[str]) -> None:
        census = self.log.census
        for name in ids:
            if name in self.ended:
                continue
            (request,) = [r for r in self.scheduler.held.by_rid.values() if r.request_id == name]
            census["abort in flight"] += request.in_flight > 0
            census["abort while waiting"] += request.slot == 0
            census["abort with drafts in flight"] += any(
                w.rid == request.rid and bool(w.drafts) for r in self.scheduler.in_flight for w in r.plan.work
            )
            census["abort with drafts kept"] += bool(request.drafts)
            census["abort with a row planned ahead"] += request.in_flight > 1 and self._ahead
            census["abort of a victim in flight"] += request.slot == 0 and request.in_flight > 0
            self.ended.add(name)
        self.scheduler.abort(ids)
        self.scheduler.check()

    def _schedule(self) -> bool:
        before = self.scheduler.stats().preemptions
        victims = {rid: r for rid, r in self.scheduler.running.items() if r.in_flight}
        kept = {rid: (r, r.drafts) for rid, r in self.scheduler.held.ready.items() if r.drafts}
        drafting = self.story.drafting[self.tick % len(self.story.drafting)]
        plan = self.scheduler.schedule(drafting)
        self.scheduler.check()
        census = self.log.census
        preempted = self.scheduler.stats().preemptions > before
        if preempted:
            census["preemption"] += self.scheduler.stats().preemptions - before
            census["preemption in flight"] += any(r.slot == 0 for r in victims.values())
            census["drafts dropped at preemption"] += any(r.slot == 0 for r, _ in kept.values())
            census["prompt preempted"] += any(r.slot == 0 and r.awaits is None for r in victims.values())
        if self.scheduler.held.waiting and self.scheduler.held.slots.num_free and not self._full:
            census["exhaustion: pages keep a request waiting"] += 1
        if not self.scheduler.held.slots.num_free and self.scheduler.held.waiting:
            census["exhaustion: slots keep a request waiting"] += 1
        doomed = [r.request_id for r in victims.values() if r.slot == 0 and self._job(r.request_id).dies_as_victim]
        if plan is None:
            self._abort(doomed)
            return False
        self._judge(plan)
        self._judge_ahead(plan)
        full = preempted or self.scheduler.held.pages.num_free == 0
        self._judge_drafts(plan, {rid: drafts for rid, (_, drafts) in kept.items()}, drafting, full)
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
        decodes = [w for w in plan.work if w.recurrent and w.num_rows == 1 + len(w.drafts) and w.samples]
        assert sum(w.num_rows for w in plan.work if w not in decodes) <= limits.chunked_prefill_size
        assert len(plan.work) <= min(limits.max_running_requests, limits.num_slots)
        cut = min(64, limits.chunked_prefill_size)
        for work in plan.work:
            request = self.scheduler.held.by_rid[work.rid]
            self.rids[work.rid] = request.request_id
            end = work.start + work.num_rows
            if not work.recurrent:
                assert work.start % cut == 0 and (end % cut == 0 or end == request.prompt_len)
            self.log.census["output computed again in several rows"] += work.recurrent and work not in decodes
            self.log.census["resumed"] += work.start == 0 and bool(request.out)

    def _judge_ahead(self, plan: Plan) -> None:
        """A row may come before its token is known, behind one plan in flight that draws it and asks no host.

        As many plans behind as there are stages; nearer only in a plan that would be empty, and of the oldest group.
        """
        census, before = self.log.census, [record.plan for record in self.scheduler.in_flight][:-1]
        stages = self.story.depth - self._ahead
        hosted = {one.seq for one in before if any(self.params[w.rid].hosted for w in one.work)}
        assert not hosted or len(before) < stages, "planned behind a step of the host"
        drawn = {w.rid: (w, one.seq) for one in before for w in one.work if w.samples}
        alive = {r.rid for r in self.scheduler.running.values()}
        assert plan.reads == max((drawn[w.rid][1] for w in plan.work if w.pending), default=-1)
        for work in plan.work:
            request = self.scheduler.held.by_rid[work.rid]
            self.params[work.rid] = request.params
            assert work.pending == (work.rid in drawn), "a row of a token that nobody draws"
            if work.pending:
                was, seq = drawn[work.rid]
                assert self._ahead and seq not in hosted, "its token is drawn by the host"
                if plan.seq - seq < stages:
                    older = {w.rid for one in before if one.seq < seq for w in one.work if w.samples}
                    again = {w.rid for one in before if one.seq >= seq for w in one.work if w.samples}
                    assert all(w.pending for w in plan.work), "the first stage waits with work to do"
                    assert not (older - again) & alive, "not the oldest group"
                    census["planned ahead of a near plan"] += 1
                assert work.recurrent and work.samples and work.num_rows == 1 and work.slot == was.slot
                assert work.start == was.start + was.num_rows < request.longest, "a row that nobody can want"
                census["planned ahead"] += 1
                census["planned ahead of a prompt's token"] += not was.recurrent
                census["planned ahead, with a new page"] += bool(work.new_pages)

    def _judge_drafts(self, plan: Plan, kept: dict[int, tuple[int, ...]], drafting: bool, full: bool) -> None:
        """Drafts are what was proposed last, as long as they can be wanted and pages hold them: fewer when `full`."""
        census, limits = self.log.census, self.story.limits
        for work in plan.work:
            request, proposed = self.scheduler.held.by_rid[work.rid], kept.get(work.rid, ())
            assert work.drafts == proposed[: len(work.drafts)] and (drafting or not (work.drafts or work.proposals))
            assert work.proposals <= limits.draft_tokens
            end = work.start + work.num_rows
            wanted = min(limits.max_model_len, request.prompt_len + request.params.max_tokens) - 1
            assert not work.proposals or end + work.proposals < wanted, "drafts that nobody can want"
            if drafting and work.samples and limits.draft_tokens:
                cut = len(work.drafts) < len(proposed)
                assert not cut or full, "drafts left out for nothing"
                least = min(limits.draft_tokens, wanted - end - 1)
                assert full or work.proposals >= least, "fewer asked for, and for nothing"
                census["drafts cut by pages"] += cut
                census["fewer proposals by pages"] += work.proposals < least
            census["drafts in a mixed plan"] += bool(work.drafts) and not plan.work[-1].recurrent
            census["accepted, and now no drafts"] += work.accepted > 0 and not work.drafts
            census["drafts dropped by a plan without"] += bool(proposed) and not drafting

    def _compare_tables(self) -> None:
        for rid, request in self.scheduler.running.items():
            known = self.worker.requests[rid]
            assert known.pages == request.pages, "the worker's page table differs from the scheduler's"
            assert known.cached + request.accepted == request.planned and len(known.output) <= len(request.out)

    def _commit(self) -> None:
        census = self.log.census
        waiting = {r.request_id for r in self.scheduler.held.waiting}
        result, work = self.results.popleft(), {w.rid: w for w in self.scheduler.in_flight[0].plan.work}
        ahead = {w.rid for record in list(self.scheduler.in_flight)[1:] for w in record.plan.work if w.pending}
        runs = {self.rids[s.rid]: (s, work[s.rid]) for s in result.sampled if s.tokens}
        outputs = self.scheduler.commit(result)
        self.scheduler.check()
        names = [output.request_id for output in outputs]
        assert len(names) == len(set(names)), "two outputs of one request in one step"
        for output in outputs:
            census["token of a victim kept"] += output.request_id in waiting and bool(output.tokens)
            over = output.finish_reason is not None
            if any(self.rids[rid] == output.request_id for rid in ahead):
                census["end with a row planned ahead"] += over
                assert not over or output.finish_reason is FinishReason.STOP, "a length is known before"
            census["victim ends before it resumes"] += output.request_id in waiting and over
            if output.tokens:
                self._judge_run(output, *runs[output.request_id], output.request_id in waiting)
            self._collect(output)

    def _judge_run(self, output: Output, sampled: Sampled, work: Work, victim: bool) -> None:
        census, drafted = self.log.census, len(work.drafts)
        self.forwards += work.recurrent
        self.tokens_of_forwards += len(output.tokens) * work.recurrent
        self.drafted.update(range(drafted))
        self.accepted.update(range(sampled.accepted))
        census["all drafts accepted"] += 0 < drafted == sampled.accepted
        census["some drafts accepted"] += 0 < sampled.accepted < drafted
        census["no draft accepted"] += 0 == sampled.accepted < drafted
        census["fewer drafts than asked for"] += len(sampled.drafts) < work.proposals
        census["accepted drafts of a victim"] += victim and sampled.accepted > 0
        census["stop inside a run"] += len(output.tokens) < len(sampled.tokens)
        census["stop at the end of a run"] += output.tokens == sampled.tokens and bool(
            sampled.accepted and output.finish_reason is FinishReason.STOP
        )
        census["length ends a run"] += sampled.accepted > 0 and output.finish_reason is FinishReason.LENGTH

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
        assert (stats.decode_forwards, stats.decode_tokens) == (self.forwards, self.tokens_of_forwards)
        positions = range(self.story.limits.draft_tokens)
        assert stats.draft_tokens_by_position == tuple(self.drafted[n] for n in positions)
        assert stats.accepted_draft_tokens_by_position == tuple(self.accepted[n] for n in positions)
        assert stats.draft_tokens == self.drafted.total() and stats.accepted_draft_tokens == self.accepted.total()
        self.scheduler.add(AddRequest("last", (1,), SamplingParams(max_tokens=0)))
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.commit(self.worker.execute(plan))
        assert list(self.worker.requests) == [plan.work[0].rid], "a request was not released"


def drive(story: Story) -> Log:
    return Driver(story).run()
