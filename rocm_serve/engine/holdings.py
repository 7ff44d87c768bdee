"""Open requests in order of arrival, and what they hold: pages, slots, places in plans in flight. Pure bookkeeping."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rocm_serve.engine.blocks import Pool, pages_for
from rocm_serve.engine.request import Request
from rocm_serve.messages import EffectiveLimits, Plan


@dataclass(slots=True, eq=False)
class InFlight:
    """A plan that has not been committed. `members`: running requests whose newest token it brings, by rid."""

    plan: Plan
    members: dict[int, Request] = field(default_factory=dict)
    hosted: bool = False  # its results have a part of the host in them


class Holdings:
    """Who waits, who runs, and what is theirs.

    Plans run in order on the device, so slots and pages are given back at once, whatever is in flight: their next
    owner's plan comes after the plan that writes them last.
    """

    def __init__(self, limits: EffectiveLimits) -> None:
        self.pages = Pool(0, limits.num_pages)
        self.slots = Pool(1, min(limits.num_slots, limits.max_running_requests))
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # by rid, in order of arrival
        self.ready: dict[int, Request] = {}  # running ones whose next Work is a decode row, longest ready first
        self.in_flight: deque[InFlight] = deque()
        self.by_id: dict[str, Request] = {}
        self.by_rid: dict[int, Request] = {}
        self.released: list[int] = []  # rids that the workers are still to forget
        self.preemptions = 0
        self._limits = limits

    def add(self, request: Request) -> None:
        self.by_id[request.request_id] = self.by_rid[request.rid] = request
        self.waiting.append(request)

    def admit(self) -> None:
        """Give the head of the queue a slot. The caller has asked for a free one before."""
        request = self.waiting.popleft()
        (request.slot,) = self.slots.take(1)
        self.running[request.rid] = request

    def preempt(self, victim: Request) -> None:
        """Take from it all that it holds; it is the next to be admitted again, and computed from position 0."""
        self._leave(victim)
        victim.planned = victim.accepted = 0
        victim.drafts = ()
        self.waiting.appendleft(victim)
        self.preemptions += 1

    def forget(self, request: Request) -> None:
        """It is over, or nobody wants it any more."""
        if request.slot:
            self._leave(request)
        else:
            self.waiting.remove(request)
        del self.by_id[request.request_id]
        del self.by_rid[request.rid]
        if request.mentioned:
            self.released.append(request.rid)

    def await_nothing(self, request: Request) -> None:
        """Take it out of the plan in flight that brings its newest token, if any does."""
        if request.awaits is not None:
            del request.awaits.members[request.rid]

    def _leave(self, request: Request) -> None:
        """Take pages, slot and its place among the running from it."""
        del self.running[request.rid]
        self.ready.pop(request.rid, None)
        self.await_nothing(request)
        self.pages.give_back(reversed(request.pages))
        self.slots.give_back((request.slot,))
        request.pages.clear()
        request.slot = 0

    def check(self) -> None:
        """Assert what must hold between any two calls. For tests; linear in all that is held."""
        running = list(self.running.values())
        self.pages.check(page for r in running for page in r.pages)
        self.slots.check(r.slot for r in running)
        order = [r.rid for r in (*running, *self.waiting)]
        assert order == sorted(order), "a request has overtaken an older one"
        assert order == sorted(self.by_rid), "a request is lost"
        assert list(self.running) == [r.rid for r in running]
        assert len(self.by_id) == len(self.by_rid)
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
            reach = min(r.planned + 2 * self._limits.draft_tokens, max(r.planned, r.longest))
            size = self._limits.page_size
            assert pages_for(r.planned, size) <= len(r.pages) <= pages_for(reach, size)
            assert (r.rid in self.ready) == (r.awaits is None and r.decodes), "ready and not decoding, or the reverse"
        assert all(rid in self.running for rid in self.ready)
        for record in self.in_flight:
            assert record.members == {r.rid: r for r in running if r.awaits is record}
        assert not set(self.released) & set(self.by_rid)
