"""Continuous batching as a pure state machine: requests and results in, plans and outputs out.

No torch, clock, socket or thread; lists, deques and dicts by insertion only, so equal events give equal plans.

What goes into a plan, in this order of precedence:

* Requests run in order of arrival. A request that finds no free page takes those of the newest running one, itself
  last; the victim goes back to the head of the queue, so it resumes first, and is computed again from position 0.
* Decoding requests (one output row left to compute) always go: their rows do not count against the budget. With
  several stages they are split into as many groups of equal size +- 1, one group a plan, so that every stage has work.
* All other rows (prompts; output rows of a preempted request, computed again) share `chunked_prefill_size` rows a plan.
  A plan therefore never has more than max_running_requests x (1 + draft_tokens) + chunked_prefill_size rows.
* The queue is strictly first come, first served. Its head enters when a slot is free and the pages that are left cover
  all its known tokens, all known tokens of those that run, and what each of these can grow by in one step.
* Drafts of a request follow its newest token, as many as fit into pages that the known rows of all running requests
  leave free: drafts preempt nobody. No more are asked for than can come out before its end. They are kept for the next
  plan that names it; preemption and a plan that does not draft drop them. An accepted draft is a row done: the next
  Work starts behind it.
* With `limits.plan_ahead` (no drafts) one plan more than there are stages may be in flight: a request whose token is
  being drawn gets the row of that token already, unless its length ends it there, and one such row at a time. It goes
  into the plan that its group's turn is next, as many plans behind the one that draws as there are stages: the first
  stage would wait for a nearer one to come out of the last. Where a plan would be empty, the oldest group has its turn.
  An end token, a stop string or an abort is seen late; the row behind it was computed for nothing, and what came of it
  is dropped. Behind a plan that names a `hosted` request no such row is planned before its result, and with one in
  flight no more plans are than there are stages.

Plans run in order on the device, so slots and pages are given back at once, whatever is in flight: their next owner's
plan comes after the plan that writes them last.

Prompts are cut only at multiples of min(64, chunked_prefill_size) from position 0, or at their end, and a Work never
has rows of both prompt and output: a request's numbers do not depend on what runs beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from rocm_serve.engine.blocks import Pool, pages_for
from rocm_serve.engine.request import Request, check_outcome, extend, longest, refusal
from rocm_serve.messages import (
    AddRequest,
    DraftSpeed,
    EffectiveLimits,
    NewRequest,
    Output,
    Plan,
    Sampled,
    Stats,
    StepResult,
    Work,
)
from rocm_serve.types import FinishReason, TokenLogprob

GDN_CHUNK = 64  # rows that the chunked GDN form takes together; a cut elsewhere would change bits


@dataclass(slots=True, eq=False)
class InFlight:
    """A plan that has not been committed. `members`: running requests whose newest token it brings, by rid."""

    plan: Plan
    members: dict[int, Request] = field(default_factory=dict)
    hosted: bool = False  # its results have a part of the host in them


@dataclass(slots=True)
class _Sketch:
    """The plan being built."""

    budget: int
    record: InFlight
    recurrent: list[Work]
    prompts: list[Work]
    new: list[NewRequest]
    drafting: bool
    preempted: bool = False
    reads: int = -1


class Scheduler:
    """Decide what the workers compute next.

    Errors: `add` raises ValueError, in the user's words, for a request that can never run.
    """

    def __init__(self, limits: EffectiveLimits, depth: int) -> None:
        assert depth >= 1 and limits.chunked_prefill_size >= 1 and limits.page_size >= 1
        assert not limits.plan_ahead or (depth > 1 and not limits.draft_tokens), "one step ahead, and no drafts"
        self.limits = limits
        self.depth = depth
        self.stages = depth - limits.plan_ahead
        self.cut = min(GDN_CHUNK, limits.chunked_prefill_size)
        self.growth = pages_for(1 + 2 * limits.draft_tokens, limits.page_size)  # a row, drafts, room to propose more
        self.pages = Pool(0, limits.num_pages)
        self.slots = Pool(1, min(limits.num_slots, limits.max_running_requests))
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # by rid, in order of arrival
        self.ready: dict[int, Request] = {}  # running ones whose next Work is a decode row, longest ready first
        self.in_flight: deque[InFlight] = deque()
        self._by_id: dict[str, Request] = {}
        self._by_rid: dict[int, Request] = {}
        self._released: list[int] = []
        self._next_rid = 0
        self._next_seq = 0
        self._counts: dict[str, int] = dict.fromkeys(
            ("peak_running", "steps", "prefill_steps", "decode_steps", "mixed_steps")
            + ("prompt_tokens", "generation_tokens", "preemptions", "aborted", "finished")
            + ("decode_forwards", "decode_tokens"),
            0,
        )
        self._drafted = [0] * limits.draft_tokens  # by position
        self._accepted = [0] * limits.draft_tokens

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return not self._by_rid and not self.in_flight

    @property
    def open_requests(self) -> tuple[str, ...]:
        return tuple(self._by_id)

    def add(self, request: AddRequest) -> None:
        if request.request_id in self._by_id:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        sentence = refusal(len(request.prompt), request.params, self.limits)
        if sentence is not None:
            raise ValueError(sentence)
        state = Request(
            rid=self._next_rid,
            request_id=request.request_id,
            prompt=request.prompt,
            params=request.params,
            prompt_len=len(request.prompt),
            end_ids=request.params.end_token_ids,
            longest=longest(len(request.prompt), request.params, self.limits.max_model_len),
            hosted=request.params.hosted,
        )
        self._next_rid += 1
        self._by_id[state.request_id] = self._by_rid[state.rid] = state
        self.waiting.append(state)

    def abort(self, request_ids: Iterable[str], *, finished: bool = False) -> None:
        """Forget these requests at once; what is in flight for them is dropped when it comes back.

        `finished` says how to count them: the answer was complete, or it was cut off.
        """
        for request_id in request_ids:
            request = self._by_id.get(request_id)
            if request is not None:
                self._forget(request)
                self._counts["finished" if finished else "aborted"] += 1

    # A plan is made: schedule -> _plan_running, _admit -> _emit

    def schedule(self, drafting: bool = True) -> Plan | None:
        """Make the next plan, or None: `depth` plans are in flight, or nothing can be computed before a result.

        Without `drafting` it verifies no drafts and asks for none.
        """
        hosted = any(record.hosted for record in self.in_flight)
        if len(self.in_flight) >= (self.stages if hosted else self.depth):
            return None
        record = InFlight(Plan(seq=self._next_seq, work=()))
        drafting = drafting and self.limits.draft_tokens > 0
        sketch = _Sketch(self.limits.chunked_prefill_size, record, [], [], [], drafting)
        self._plan_running(sketch, self._turn(self._due()))
        if self.waiting and not sketch.preempted:
            self._admit(sketch)
        if self.limits.plan_ahead and not sketch.recurrent and not sketch.prompts:
            self._plan_running(sketch, self._turn(self._oldest_group()))
        work = (*sketch.recurrent, *sketch.prompts)
        if not work:
            return None
        record.plan = Plan(self._next_seq, work, tuple(sketch.new), tuple(self._released), sketch.reads)
        self._next_seq += 1
        self._released.clear()
        self.in_flight.append(record)
        self._counts["peak_running"] = max(self._counts["peak_running"], len(self.running))
        return record.plan

    def _plan_running(self, sketch: _Sketch, turn: dict[int, Request]) -> None:
        placed = []
        for request in list(self.running.values()):
            if request.slot == 0:
                continue
            if request.rid in turn:
                rows = 1
            elif request.awaits is not None or request.rid in self.ready:
                continue
            else:
                rows = self._rows(request, sketch.budget)
                sketch.budget -= rows
            if rows == 0:
                continue
            pages = self._grow(request, request.planned + rows, sketch)
            if pages is not None:
                placed.append((request, rows, pages))
        for request, rows, pages in placed:  # those that gave way were newer, and are not among them
            self._emit(request, rows, pages, sketch)

    def _turn(self, drawing: list[InFlight]) -> dict[int, Request]:
        """Return the decoding requests of this plan: those that are ready, and those whose token `drawing` brings.

        No more than keep the groups even: of D requests that decode or bring a token soon, D mod `stages` groups have
        one more than the others.
        """
        mine = self.ready.copy()
        for record in drawing:
            for rid, request in record.members.items():
                if request.planned == request.known < request.longest:
                    mine[rid] = request
        others = [len(record.members) for record in self.in_flight if record not in drawing]
        base, more = divmod(len(mine) + sum(others), self.stages)
        size = base + (sum(count > base for count in others) < more)
        return dict(list(mine.items())[:size])

    def _due(self) -> list[InFlight]:
        """Return the plans whose tokens come out of the last stage before the first one begins the next plan."""
        if not self.limits.plan_ahead:
            return []
        last = self._next_seq - self.stages  # none of them has a part of the host: fewer would be in flight
        return [record for record in self.in_flight if record.plan.seq <= last]

    def _oldest_group(self) -> list[InFlight]:
        first = next((record for record in self.in_flight if record.members), None)
        return [] if first is None or first.hosted else [first]

    def _rows(self, request: Request, budget: int) -> int:
        """Rows of the next Work of a request that is not decoding, cut where cutting is allowed."""
        if request.planned >= request.prompt_len:
            return min(request.known - request.planned, budget)
        end = request.planned + budget
        if end >= request.prompt_len:
            return request.prompt_len - request.planned
        return max(0, end // self.cut * self.cut - request.planned)

    def _grow(self, request: Request, upto: int, sketch: _Sketch) -> list[int] | None:
        """Give it pages for `upto` tokens; None if it became a victim itself. Plans run in order, so a victim's pages
        may be given away while an older plan still reads them."""
        need = pages_for(upto, self.limits.page_size) - len(request.pages)
        if need <= 0:
            return []
        while need > self.pages.num_free:
            victim = next(reversed(self.running.values()))
            self._preempt(victim)
            sketch.preempted = True
            if victim is request:
                return None
        new = self.pages.take(need)
        request.pages += new
        return new

    def _preempt(self, victim: Request) -> None:
        self._leave(victim)
        victim.planned = victim.accepted = 0
        victim.drafts = ()
        self.waiting.appendleft(victim)
        self._counts["preemptions"] += 1

    def _admit(self, sketch: _Sketch) -> None:
        size = self.limits.page_size
        spare = self.pages.num_free
        for request in self.running.values():
            spare -= self.growth + max(0, pages_for(request.known, size) - len(request.pages))
        while self.waiting and self.slots.num_free:
            request = self.waiting[0]
            # A victim whose last plan is still in flight: what it has to compute is known when that is back.
            if request.in_flight or pages_for(request.known, size) > spare:
                return
            rows = self._rows(request, sketch.budget)
            if rows == 0:
                return
            sketch.budget -= rows
            spare -= pages_for(request.known, size) + self.growth
            self.waiting.popleft()
            (request.slot,) = self.slots.take(1)
            self.running[request.rid] = request
            pages = self._grow(request, rows, sketch)
            assert pages is not None and not sketch.preempted, "admission promised pages that were not there"
            self._emit(request, rows, pages, sketch)

    def _emit(self, request: Request, rows: int, pages: list[int], sketch: _Sketch) -> None:
        start = request.planned
        end = start + rows
        recurrent = start >= request.prompt_len
        pending = end > request.known
        if pending and request.awaits is not None:
            sketch.reads = max(sketch.reads, request.awaits.plan.seq)
        samples = end >= request.known and request.params.max_tokens > 0
        if not request.mentioned:
            request.mentioned = True
            sketch.new.append(NewRequest(request.rid, request.prompt, request.params))
        drafts, proposals = self._look_ahead(request, end, pages) if samples and sketch.drafting else ((), 0)
        work = Work(
            request.rid,
            start,
            rows + len(drafts),
            recurrent,
            samples,
            request.slot,
            tuple(pages),
            tuple(request.out[request.told :]),
            request.accepted,
            drafts,
            proposals,
            pending,
        )
        (sketch.recurrent if recurrent else sketch.prompts).append(work)
        request.told = len(request.out)
        request.planned = end
        request.accepted, request.drafts = 0, ()
        request.in_flight += 1
        sketch.record.hosted |= request.hosted
        if samples:
            self._await_nothing(request)
            request.awaits = sketch.record
            sketch.record.members[request.rid] = request
            self.ready.pop(request.rid, None)
        elif request.decodes:
            self.ready[request.rid] = request

    def _look_ahead(self, request: Request, end: int, pages: list[int]) -> tuple[tuple[int, ...], int]:
        """Return the drafts to verify in the rows from `end` on, and how many to ask for; add the pages for both.

        A row whose token nobody can want, because max_tokens or the context ends before it, is never computed: should
        all `drafts` be accepted, the newest token takes one row more, and what is asked for comes after that.
        """
        size = self.limits.page_size
        room = (len(request.pages) + self.pages.num_free) * size - end
        drafts = request.drafts[:room]
        last = end + len(drafts)
        assert last <= max(request.longest, end), f"request {request.rid} has drafts beyond its end"
        proposals = max(0, min(self.limits.draft_tokens, room - len(drafts), request.longest - last - 1))
        new = self.pages.take(max(0, pages_for(last + proposals, size) - len(request.pages)))
        request.pages += new
        pages += new
        return drafts, proposals

    # A result comes back: commit -> _settle

    def commit(self, result: StepResult) -> list[Output]:
        """Take the result of the oldest plan in flight; say what is new about each request it has news of."""
        assert self.in_flight, f"result {result.seq} without a plan in flight"
        record = self.in_flight.popleft()
        plan = record.plan
        assert plan.seq == result.seq, f"result {result.seq} came, {plan.seq} is the oldest plan in flight"
        outcomes = {sampled.rid: sampled for sampled in result.sampled}
        outputs: list[Output] = []
        prompt_rows = 0
        for work in plan.work:
            if not work.recurrent:
                prompt_rows += work.num_rows
            outcome = outcomes.pop(work.rid, None)
            request = self._by_rid.get(work.rid)
            if request is None:
                continue
            request.in_flight -= 1
            output = self._settle(request, work, outcome, record)
            if output is not None:
                outputs.append(output)
        assert not outcomes, f"result {result.seq} has outcomes of requests that the plan does not name"
        kind = "decode_steps" if prompt_rows == 0 else "mixed_steps" if plan.work[0].recurrent else "prefill_steps"
        self._counts["steps"] += 1
        self._counts[kind] += 1
        self._counts["prompt_tokens"] += prompt_rows
        return outputs

    def _settle(self, request: Request, work: Work, outcome: Sampled | None, record: InFlight) -> Output | None:
        scores = self._new_scores(request, work, outcome)
        if not work.samples:
            over = request.params.max_tokens == 0 and work.start + work.num_rows == request.prompt_len
            if over:
                self._finish(request)
            elif not scores:
                return None
            reason = FinishReason.LENGTH if over else None
            return Output(request.request_id, prompt_logprobs=scores, finish_reason=reason)
        assert outcome is not None, f"no token for request {request.rid}"
        check_outcome(request, work, outcome)
        if request.awaits is record:
            request.awaits = None
        tokens, reason = extend(request, outcome.tokens, self.limits.max_model_len)
        self._count(work, outcome.accepted, len(tokens))
        if reason is not None:
            self._finish(request)
        elif request.slot and request.awaits is None:
            request.planned += outcome.accepted
            request.accepted, request.drafts = outcome.accepted, outcome.drafts
            self.ready[request.rid] = request
        stop = tokens[-1] if reason is FinishReason.STOP else None
        return Output(request.request_id, tokens, outcome.logprobs[: len(tokens)], scores, reason, stop)

    def _count(self, work: Work, accepted: int, tokens: int) -> None:
        self._counts["generation_tokens"] += tokens
        if work.recurrent:
            self._counts["decode_forwards"] += 1
            self._counts["decode_tokens"] += tokens
        for position in range(len(work.drafts)):
            self._drafted[position] += 1
            self._accepted[position] += position < accepted

    def _new_scores(self, request: Request, work: Work, outcome: Sampled | None) -> tuple[TokenLogprob, ...]:
        """Prompt log-probs of this Work. Row p scores the token at p + 1; workers leave out what they reported before
        (a preempted request computes its prompt again)."""
        if work.recurrent or request.params.prompt_logprobs is None:
            return ()
        before = max(work.start, request.scored)
        request.scored = max(before, min(work.start + work.num_rows, request.prompt_len - 1))
        scores = outcome.prompt_logprobs if outcome is not None else ()
        expected = request.scored - before
        assert len(scores) == expected, f"{len(scores)} prompt log-probs for request {request.rid}, not {expected}"
        return scores

    # A request leaves

    def _leave(self, request: Request) -> None:
        """Take pages, slot and its place among the running from it."""
        del self.running[request.rid]
        self.ready.pop(request.rid, None)
        self._await_nothing(request)
        self.pages.give_back(reversed(request.pages))
        self.slots.give_back((request.slot,))
        request.pages.clear()
        request.slot = 0

    def _await_nothing(self, request: Request) -> None:
        if request.awaits is not None:
            del request.awaits.members[request.rid]

    def _forget(self, request: Request) -> None:
        if request.slot:
            self._leave(request)
        else:
            self.waiting.remove(request)
        del self._by_id[request.request_id]
        del self._by_rid[request.rid]
        if request.mentioned:
            self._released.append(request.rid)

    def _finish(self, request: Request) -> None:
        self._forget(request)
        self._counts["finished"] += 1

    # What others may ask

    def stats(self, draft_speeds: tuple[DraftSpeed, ...] = ()) -> Stats:
        return Stats(
            running=len(self.running),
            waiting=len(self.waiting),
            pages_used=self.pages.num_used,
            pages_total=self.pages.count,
            slots_used=self.slots.num_used,
            slots_total=self.slots.count,
            draft_tokens=sum(self._drafted),
            accepted_draft_tokens=sum(self._accepted),
            draft_tokens_by_position=tuple(self._drafted),
            accepted_draft_tokens_by_position=tuple(self._accepted),
            draft_speeds=draft_speeds,
            **self._counts,
        )

    def check(self) -> None:
        """Assert what must hold between any two calls. For tests; linear in all that is held."""
        running = list(self.running.values())
        self.pages.check(page for r in running for page in r.pages)
        self.slots.check(r.slot for r in running)
        order = [r.rid for r in (*running, *self.waiting)]
        assert order == sorted(order), "a request has overtaken an older one"
        assert order == sorted(self._by_rid), "a request is lost"
        assert list(self.running) == [r.rid for r in running]
        assert len(self._by_id) == len(self._by_rid)
        named = [w.rid for record in self.in_flight for w in record.plan.work]
        for r in (*running, *self.waiting):
            assert r.in_flight == named.count(r.rid)
            drawn = sum(w.rid == r.rid and w.samples for record in self.in_flight for w in record.plan.work)
            assert r.planned <= r.known + max(0, drawn - 1) and r.told <= len(r.out)
            assert not r.drafts or r.rid in self.ready, "drafts that follow no newest token"
            assert not r.accepted or (r.rid in self.ready and r.accepted == len(r.out) - r.told - 1)
        for r in self.waiting:
            assert not r.pages and not r.slot and not r.planned, "a waiting request holds something"
        for r in running:
            reach = min(r.planned + 2 * self.limits.draft_tokens, max(r.planned, r.longest))
            size = self.limits.page_size
            assert pages_for(r.planned, size) <= len(r.pages) <= pages_for(reach, size)
            assert (r.rid in self.ready) == (r.awaits is None and r.decodes), "ready and not decoding, or the reverse"
        assert all(rid in self.running for rid in self.ready)
        for record in self.in_flight:
            assert record.members == {r.rid: r for r in running if r.awaits is record}
        assert not set(self._released) & set(self._by_rid)
        assert len(self.in_flight) <= self.depth
