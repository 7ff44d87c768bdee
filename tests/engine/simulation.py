"""A stand-in for workers and network, and what one request alone must give, written without any scheduler.

The stand-in keeps a memory of its own, filled from plans alone: tokens in KV pages, a digest in each state slot. The
next token is a digest of both. A page given to two requests, a stale slot, a prompt cut elsewhere, a prompt row taken
step by step: each changes tokens, as it would change bits in the real network. A row that is planned before its token
is known reads what its slot has drawn last. Drafts come from a drafter that knows
the answer, and says it or not; rows of drafts run beside the state, which takes them in when the next Work says so.
"""

from __future__ import annotations

import math
import random
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import zmq

from rocm_serve.executor.api import ExecutorFailed
from rocm_serve.messages import AddRequest, EffectiveLimits, NewRequest, Plan, Sampled, StepResult, Work
from rocm_serve.types import FinishReason, SamplingParams, TokenLogprob

VOCABULARY = 11


def make_limits(
    *,
    max_model_len: int = 256,
    max_running_requests: int = 8,
    chunked_prefill_size: int = 64,
    page_size: int = 4,
    num_pages: int = 64,
    num_slots: int | None = None,
    draft_tokens: int = 0,
    plan_ahead: bool = False,
) -> EffectiveLimits:
    return EffectiveLimits(
        max_model_len=max_model_len,
        max_running_requests=max_running_requests,
        chunked_prefill_size=chunked_prefill_size,
        page_size=page_size,
        num_pages=num_pages,
        num_slots=max_running_requests if num_slots is None else num_slots,
        draft_tokens=draft_tokens,
        plan_ahead=plan_ahead,
    )


def make_prompt(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCABULARY) for _ in range(length))


def make_request(name: str, length: int, seed: int = 1, **params: int) -> AddRequest:
    return AddRequest(name, make_prompt(seed, length), SamplingParams(**params))  # type: ignore[arg-type]


def digest(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


def fold_prompt(state: int, tokens: Sequence[int], chunk: int) -> int:
    """State after prompt rows in the chunked form: which rows are taken together matters."""
    for start in range(0, len(tokens), chunk):
        state = digest(state, "chunk", tuple(tokens[start : start + chunk]))
    return state


def fold_output(state: int, tokens: Sequence[int]) -> int:
    for token in tokens:
        state = digest(state, "row", token)
    return state


def next_token(context: Sequence[int], state: int) -> int:
    return digest(tuple(context), state) % VOCABULARY


def score(prefix: Sequence[int], target: int) -> TokenLogprob:
    return TokenLogprob(target, -float(digest(tuple(prefix), target) % 1000))


@dataclass
class Answer:
    """All that came out for one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token: int | None = None


def alone(prompt: tuple[int, ...], params: SamplingParams, limits: EffectiveLimits) -> Answer:
    """What the stand-in must answer to this request whatever else runs."""
    answer = Answer()
    if params.prompt_logprobs is not None:
        answer.prompt_logprobs = [score(prompt[:p], prompt[p]) for p in range(1, len(prompt))]
    state = fold_prompt(0, prompt, min(64, limits.chunked_prefill_size))
    context = list(prompt)
    while len(answer.tokens) < params.max_tokens and len(context) < limits.max_model_len:
        token = next_token(context, state)
        answer.tokens.append(token)
        if params.logprobs is not None:
            answer.logprobs.append(score(context, token))
        if token in params.end_token_ids and len(answer.tokens) > params.min_tokens:
            answer.finish_reason, answer.stop_token = FinishReason.STOP, token
            return answer
        context.append(token)
        state = fold_output(state, (token,))
    answer.finish_reason = FinishReason.LENGTH
    return answer


@dataclass(frozen=True)
class Drafter:
    """Says the right token with a chance by position, and stops early with another. A function of the prefix."""

    right: tuple[float, ...] = (0.9, 0.7, 0.5, 0.3)
    stops: float = 0.1

    def propose(self, context: Sequence[int], state: int, count: int) -> tuple[int, ...]:
        """Draft what follows `context`; `state` is that after its rows but the last one."""
        context, drafts = list(context), []
        for right in self.right[:count]:
            state = fold_output(state, context[-1:])
            token = next_token(context, state)
            luck = random.Random(digest("luck", tuple(context)))
            if luck.random() < self.stops:
                break
            if luck.random() >= right:
                token = (token + luck.randrange(1, VOCABULARY)) % VOCABULARY
            drafts.append(token)
            context.append(token)
        return tuple(drafts)


@dataclass
class _Known:
    prompt: tuple[int, ...]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    scored: int = 0


class FakeWorker:
    """Executes plans in order on its own memory; asserts whatever a real worker relies on."""

    def __init__(self, limits: EffectiveLimits, drafter: Drafter = Drafter()) -> None:
        self.limits = limits
        self.drafter = drafter
        self.requests: dict[int, _Known] = {}
        self.cells: dict[tuple[int, int], int] = {}
        self.states: dict[int, int] = {}
        self.newest: dict[int, int] = {}  # by slot: the token drawn last
        self.pending: dict[int, tuple[int, ...]] = {}  # by slot: drafts whose rows the state has not taken in
        self.next_seq = 0

    def execute(self, plan: Plan) -> StepResult:
        assert plan.seq == self.next_seq, "a gap"
        self.next_seq += 1
        assert plan.work, "an empty plan"
        for rid in plan.released:
            del self.requests[rid]
        for new in plan.new:
            self._learn(new)
        named = [work.rid for work in plan.work]
        assert len(named) == len(set(named)), "a request twice in one plan"
        kinds = [work.recurrent for work in plan.work]
        assert kinds == sorted(kinds, reverse=True), "recurrent rows come first"
        sampled = [self._run(self.requests[work.rid], work) for work in plan.work]
        return StepResult(plan.seq, tuple(one for one in sampled if one is not None))

    def _learn(self, new: NewRequest) -> None:
        assert new.rid not in self.requests
        self.requests[new.rid] = _Known(new.prompt, new.params)

    def _run(self, known: _Known, work: Work) -> Sampled | None:
        assert 1 <= work.slot <= self.limits.num_slots and work.num_rows > 0
        known.output += work.tokens
        if work.start == 0:
            known.pages.clear()
            known.cached = 0
            self.states[work.slot] = 0
            self.pending[work.slot] = ()
        known.pages += work.new_pages
        self._take_in(known, work)
        assert work.start == known.cached, "rows out of order"
        end = work.start + work.num_rows - len(work.drafts)
        everything = [*known.prompt, *known.output]
        if work.pending:
            assert self.limits.plan_ahead and work.num_rows == 1 and work.start == len(everything), "nothing is drawn"
            everything.append(self.newest[work.slot])
        assert work.start < end <= len(everything), "rows of tokens that nobody has sampled"
        rows = everything[work.start : end]
        self._write(known, work.start, rows)
        known.cached = end
        state = self.states[work.slot]
        if work.recurrent:
            assert work.start >= len(known.prompt)
            self.states[work.slot] = fold_output(state, rows)
        else:
            assert end <= len(known.prompt), "prompt and output rows in one Work"
            assert not work.drafts, "drafts behind a prompt"
            self.states[work.slot] = fold_prompt(state, rows, 64)
        return self._outcome(known, work, end, len(everything))

    def _take_in(self, known: _Known, work: Work) -> None:
        """Bring the slot's state behind the accepted drafts of this request's last Work; forget the others."""
        pending = self.pending[work.slot]
        assert work.accepted <= len(pending), "accepted drafts that were never run"
        taken = pending[: work.accepted]
        assert taken == work.tokens[: work.accepted], "accepted drafts are not the tokens"
        self.states[work.slot] = fold_output(self.states[work.slot], taken)
        self.pending[work.slot] = ()
        known.cached += work.accepted

    def _write(self, known: _Known, start: int, rows: Sequence[int]) -> None:
        for position, token in enumerate(rows, start):
            self.cells[self._cell(known, position)] = token

    def _cell(self, known: _Known, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self.limits.page_size)
        return known.pages[page], offset

    def _read(self, known: _Known, count: int) -> list[int]:
        return [self.cells[self._cell(known, position)] for position in range(count)]

    def _outcome(self, known: _Known, work: Work, end: int, length: int) -> Sampled | None:
        scores: list[TokenLogprob] = []
        if known.params.prompt_logprobs is not None and not work.recurrent:
            for row in range(max(work.start, known.scored), min(end, len(known.prompt) - 1)):
                scores.append(score(known.prompt[: row + 1], known.prompt[row + 1]))
                known.scored = row + 1
        assert work.samples == (end == length and known.params.max_tokens > 0)
        if not work.samples:
            assert not work.drafts and not work.proposals, "drafts, and nothing is sampled"
            return Sampled(work.rid, prompt_logprobs=tuple(scores)) if scores else None
        tokens, states = self._sample(known, work, end)
        accepted = 0
        while accepted < len(work.drafts) and work.drafts[accepted] == tokens[accepted]:
            accepted += 1
        logprobs = []
        if known.params.logprobs is not None:
            logprobs = [score(self._read(known, end + n), tokens[n]) for n in range(accepted + 1)]
        proposed = self._propose(known, work, end + accepted, tokens[accepted], states[accepted])
        kept = tuple(tokens[: accepted + 1])
        self.newest[work.slot] = kept[-1]
        return Sampled(work.rid, kept, tuple(logprobs), tuple(scores), accepted, proposed)

    def _sample(self, known: _Known, work: Work, end: int) -> tuple[list[int], list[int]]:
        """Draw the token after the last known row and after each draft; return the states there, too."""
        assert end + len(work.drafts) < self.limits.max_model_len, "a row beyond the context"
        assert end + len(work.drafts) < len(known.prompt) + known.params.max_tokens, "a row that nobody can want"
        self._write(known, end, work.drafts)
        self.pending[work.slot] = work.drafts
        states = [self.states[work.slot]]
        for token in work.drafts:
            states.append(fold_output(states[-1], (token,)))
        return [next_token(self._read(known, end + n), state) for n, state in enumerate(states)], states

    def _propose(self, known: _Known, work: Work, rows: int, token: int, state: int) -> tuple[int, ...]:
        """Draft what follows `token`, drawn after `rows` rows. The draft head keeps KV of its own in the same pages."""
        assert 0 <= work.proposals <= self.limits.draft_tokens
        for position in range(work.start + work.num_rows + work.proposals):
            self._cell(known, position)
        return self.drafter.propose([*self._read(known, rows), token], state, work.proposals)


class FakeExecutor:
    """The stand-in behind the executor's contract. A step takes `step_s` in each of `depth` stages.

    `fail_at`: the plan that kills it. `start_error`: what `start` raises. `goes_on`: no step ends before it is set.
    """

    def __init__(
        self,
        limits: EffectiveLimits,
        depth: int = 1,
        *,
        goes_on: threading.Event | None = None,
        step_s: float = 0.0,
        fail_at: int | None = None,
        start_error: Exception | None = None,
        drafter: Drafter = Drafter(),
    ) -> None:
        self.depth = depth
        self.worker = FakeWorker(limits, drafter)
        self.plans: list[Plan] = []
        self.shut_down = False
        self.polls = 0
        self._goes_on = goes_on
        self._step_s = step_s
        self._fail_at = fail_at
        self._start_error = start_error
        self._results: deque[tuple[float, StepResult]] = deque()
        self._stage_free_at = [0.0] * depth

    def start(self) -> EffectiveLimits:
        if self._start_error is not None:
            raise self._start_error
        return self.worker.limits

    def submit(self, plan: Plan) -> None:
        assert not self.shut_down and len(self._results) < self.depth
        self.plans.append(plan)
        at = time.monotonic()
        for stage, free_at in enumerate(self._stage_free_at):
            at = max(at, free_at) + self._step_s
            self._stage_free_at[stage] = at
        self._results.append((at, self.worker.execute(plan)))

    def poll(self, timeout_s: float, wake: zmq.Socket[bytes] | None = None) -> StepResult | None:
        assert not self.shut_down
        self.polls += 1
        if not self._results:
            return None
        at, result = self._results[0]
        held = self._goes_on is not None and not self._goes_on.is_set()
        wait = math.inf if held else at - time.monotonic()
        if wait > 0:
            if wake is None:
                time.sleep(min(wait, timeout_s))
            elif wake.poll(min(wait, timeout_s) * 1000):
                return None
        if wait > timeout_s:
            return None
        if self._fail_at == result.seq:
            raise ExecutorFailed("rank 1 failed during forward: a planted fault")
        self._results.popleft()
        return result

    def shutdown(self, *, failed: bool = False) -> None:
        self.shut_down = True


def subchunks(work: Sequence[Work], prompt_len: int) -> Iterator[tuple[int, int]]:
    """Row ranges that the chunked form takes together while these works compute a prompt from position 0."""
    for one in work:
        if not one.recurrent:
            for start in range(one.start, one.start + one.num_rows, 64):
                yield start, min(start + 64, one.start + one.num_rows)
