"""Continuous batching as a pure state machine: requests and results in, plans (planner.py) and outputs out.

No torch, clock, socket or thread; lists, deques and dicts by insertion only, so equal events give equal plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from rocm_serve.engine.holdings import Holdings, InFlight
from rocm_serve.engine.planner import Planner
from rocm_serve.engine.request import Request, check_outcome, extend, longest, refusal
from rocm_serve.messages import AddRequest, DraftSpeed, EffectiveLimits, Output, Plan, Sampled, Stats, StepResult, Work
from rocm_serve.types import FinishReason, TokenLogprob


class Scheduler:
    """Decide what the workers compute next.

    Errors: `add` raises ValueError, in the user's words, for a request that can never run.
    """

    def __init__(self, limits: EffectiveLimits, depth: int) -> None:
        self.limits = limits
        self.depth = depth
        self.held = Holdings(limits)
        self._planner = Planner(limits, depth, self.held)
        self._next_rid = 0
        self._counts: dict[str, int] = dict.fromkeys(
            ("peak_running", "steps", "prefill_steps", "decode_steps", "mixed_steps")
            + ("prompt_tokens", "generation_tokens", "aborted", "finished")
            + ("decode_forwards", "decode_tokens"),
            0,
        )
        self._drafted = [0] * limits.draft_tokens  # by position
        self._accepted = [0] * limits.draft_tokens

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return not self.held.by_rid and not self.held.in_flight

    @property
    def open_requests(self) -> tuple[str, ...]:
        return tuple(self.held.by_id)

    @property
    def running(self) -> Mapping[int, Request]:
        """By rid, in order of arrival."""
        return self.held.running

    @property
    def in_flight(self) -> deque[InFlight]:
        """Oldest first."""
        return self.held.in_flight

    def add(self, request: AddRequest) -> None:
        if request.request_id in self.held.by_id:
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
        self.held.add(state)

    def abort(self, request_ids: Iterable[str], *, finished: bool = False) -> None:
        """Forget these requests at once; what is in flight for them is dropped when it comes back.

        `finished` says how to count them: the answer was complete, or it was cut off.
        """
        for request_id in request_ids:
            request = self.held.by_id.get(request_id)
            if request is not None:
                self.held.forget(request)
                self._counts["finished" if finished else "aborted"] += 1

    def schedule(self, drafting: bool = True) -> Plan | None:
        """Make the next plan, or None: `depth` plans are in flight, or nothing can be computed before a result.

        Without `drafting` it verifies no drafts and asks for none.
        """
        plan = self._planner.plan(drafting)
        if plan is not None:
            self._counts["peak_running"] = max(self._counts["peak_running"], len(self.held.running))
        return plan

    def commit(self, result: StepResult) -> list[Output]:
        """Take the result of the oldest plan in flight; say what is new about each request it has news of."""
        assert self.held.in_flight, f"result {result.seq} without a plan in flight"
        record = self.held.in_flight.popleft()
        plan = record.plan
        assert plan.seq == result.seq, f"result {result.seq} came, {plan.seq} is the oldest plan in flight"
        outcomes = {sampled.rid: sampled for sampled in result.sampled}
        outputs: list[Output] = []
        prompt_rows = 0
        for work in plan.work:
            if not work.recurrent:
                prompt_rows += work.num_rows
            outcome = outcomes.pop(work.rid, None)
            request = self.held.by_rid.get(work.rid)
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
            self.held.ready[request.rid] = request
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

    def _finish(self, request: Request) -> None:
        self.held.forget(request)
        self._counts["finished"] += 1

    def stats(self, draft_speeds: tuple[DraftSpeed, ...] = ()) -> Stats:
        return Stats(
            running=len(self.held.running),
            waiting=len(self.held.waiting),
            pages_used=self.held.pages.num_used,
            pages_total=self.held.pages.count,
            slots_used=self.held.slots.num_used,
            slots_total=self.held.slots.count,
            draft_tokens=sum(self._drafted),
            accepted_draft_tokens=sum(self._accepted),
            draft_tokens_by_position=tuple(self._drafted),
            accepted_draft_tokens_by_position=tuple(self._accepted),
            draft_speeds=draft_speeds,
            preemptions=self.held.preemptions,
            **self._counts,
        )

    def check(self) -> None:
        """Assert what must hold between any two calls. For tests; linear in all that is held."""
        self.held.check()
        assert len(self.held.in_flight) <= self.depth
