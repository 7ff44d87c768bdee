"""The making of plans: who computes what next. No torch, clock, socket or thread.

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

Prompts are cut only at multiples of min(64, chunked_prefill_size) from position 0, or at their end, and a Work never
has rows of both prompt and output: a request's numbers do not depend on what runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rocm_serve.engine.blocks import pages_for
from rocm_serve.engine.holdings import Holdings, InFlight
from rocm_serve.engine.request import Request
from rocm_serve.messages import EffectiveLimits, NewRequest, Plan, Work

GDN_CHUNK = 64  # rows that the chunked GDN form takes together; a cut elsewhere would change bits


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


class Planner:
    """Make plans for the requests that `held` has. `depth`: plans in flight at most."""

    def __init__(self, limits: EffectiveLimits, depth: int, held: Holdings) -> None:
        assert depth >= 1 and limits.chunked_prefill_size >= 1 and limits.page_size >= 1
        assert not limits.plan_ahead or (depth > 1 and not limits.draft_tokens), "one step ahead, and no drafts"
        self.limits = limits
        self.depth = depth
        self.stages = depth - limits.plan_ahead
        self.cut = min(GDN_CHUNK, limits.chunked_prefill_size)
        self.growth = pages_for(1 + 2 * limits.draft_tokens, limits.page_size)  # a row, drafts, room to propose more
        self._held = held
        self._next_seq = 0

    def plan(self, drafting: bool = True) -> Plan | None:
        """Make the next plan and put it in flight, or None: as `Scheduler.schedule` says."""
        hosted = any(record.hosted for record in self._held.in_flight)
        if len(self._held.in_flight) >= (self.stages if hosted else self.depth):
            return None
        record = InFlight(Plan(seq=self._next_seq, work=()))
        drafting = drafting and self.limits.draft_tokens > 0
        sketch = _Sketch(self.limits.chunked_prefill_size, record, [], [], [], drafting)
        self._plan_running(sketch, self._turn(self._due()))
        if self._held.waiting and not sketch.preempted:
            self._admit(sketch)
        if self.limits.plan_ahead and not sketch.recurrent and not sketch.prompts:
            self._plan_running(sketch, self._turn(self._oldest_group()))
        work = (*sketch.recurrent, *sketch.prompts)
        if not work:
            return None
        record.plan = Plan(self._next_seq, work, tuple(sketch.new), tuple(self._held.released), sketch.reads)
        self._next_seq += 1
        self._held.released.clear()
        self._held.in_flight.append(record)
        return record.plan

    def _plan_running(self, sketch: _Sketch, turn: dict[int, Request]) -> None:
        placed = []
        for request in list(self._held.running.values()):
            if request.slot == 0:
                continue
            if request.rid in turn:
                rows = 1
            elif request.awaits is not None or request.rid in self._held.ready:
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
        mine = self._held.ready.copy()
        for record in drawing:
            for rid, request in record.members.items():
                if request.planned == request.known < request.longest:
                    mine[rid] = request
        others = [len(record.members) for record in self._held.in_flight if record not in drawing]
        base, more = divmod(len(mine) + sum(others), self.stages)
        size = base + (sum(count > base for count in others) < more)
        return dict(list(mine.items())[:size])

    def _due(self) -> list[InFlight]:
        """Return the plans whose tokens come out of the last stage before the first one begins the next plan."""
        if not self.limits.plan_ahead:
            return []
        last = self._next_seq - self.stages  # none of them has a part of the host: fewer would be in flight
        return [record for record in self._held.in_flight if record.plan.seq <= last]

    def _oldest_group(self) -> list[InFlight]:
        first = next((record for record in self._held.in_flight if record.members), None)
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
        while need > self._held.pages.num_free:
            victim = next(reversed(self._held.running.values()))
            self._held.preempt(victim)
            sketch.preempted = True
            if victim is request:
                return None
        new = self._held.pages.take(need)
        request.pages += new
        return new

    def _admit(self, sketch: _Sketch) -> None:
        size = self.limits.page_size
        spare = self._held.pages.num_free
        for request in self._held.running.values():
            spare -= self.growth + max(0, pages_for(request.known, size) - len(request.pages))
        while self._held.waiting and self._held.slots.num_free:
            request = self._held.waiting[0]
            # A victim whose last plan is still in flight: what it has to compute is known when that is back.
            if request.in_flight or pages_for(request.known, size) > spare:
                return
            rows = self._rows(request, sketch.budget)
            if rows == 0:
                return
            sketch.budget -= rows
            spare -= pages_for(request.known, size) + self.growth
            self._held.admit()
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
            self._held.await_nothing(request)
            request.awaits = sketch.record
            sketch.record.members[request.rid] = request
            self._held.ready.pop(request.rid, None)
        elif request.decodes:
            self._held.ready[request.rid] = request

    def _look_ahead(self, request: Request, end: int, pages: list[int]) -> tuple[tuple[int, ...], int]:
        """Return the drafts to verify in the rows from `end` on, and how many to ask for; add the pages for both.

        A row whose token nobody can want, because max_tokens or the context ends before it, is never computed: should
        all `drafts` be accepted, the newest token takes one row more, and what is asked for comes after that.
        """
        size = self.limits.page_size
        room = (len(request.pages) + self._held.pages.num_free) * size - end
        drafts = request.drafts[:room]
        last = end + len(drafts)
        assert last <= max(request.longest, end), f"request {request.rid} has drafts beyond its end"
        proposals = max(0, min(self.limits.draft_tokens, room - len(drafts), request.longest - last - 1))
        new = self._held.pages.take(max(0, pages_for(last + proposals, size) - len(request.pages)))
        request.pages += new
        pages += new
        return drafts, proposals
