"""A stand-in for workers and network, and what one request alone must give, written without any scheduler.

The stand-in keeps a memory of its own, filled from plans alone: tokens in KV pages, a digest in each state slot. The
next token is a digest of both. A page given to two requests, a stale slot, a prompt cut elsewhere, a prompt row taken
step by step: each changes tokens, as it would change bits in the real network.
"""

from __future__ import annotations

import random
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rocm_serve.executor.api import ExecutorFailed
from rocm_serve.messages import EffectiveLimits, NewRequest, Plan, Sampled, StepResult, Work
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
) -> EffectiveLimits:
    return EffectiveLimits(
        max_model_len=max_model_len,
        max_running_requests=max_running_requests,
        chunked_prefill_size=chunked_prefill_size,
        page_size=page_size,
        num_pages=num_pages,
        num_slots=max_running_requests if num_slots is None else num_slots,
    )


def make_prompt(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCABULARY) for _ in range(length))


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

    def __init__(self, limits: EffectiveLimits) -> None:
        self.limits = limits
        self.requests: dict[int, _Known] = {}
        self.cells: dict[tuple[int, int], int] = {}
        self.states: dict[int, int] = {}
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
        known.pages += work.new_pages
        assert work.start == known.cached, "rows out of order"
        end = work.start + work.num_rows
        everything = [*known.prompt, *known.output]
        assert end <= len(everything), "rows of tokens that nobody has sampled"
        rows = everything[work.start : end]
        for position, token in enumerate(rows, work.start):
            self.cells[self._cell(known, position)] = token
        known.cached = end
        state = self.states[work.slot]
        if work.recurrent:
            assert work.start >= len(known.prompt)
            self.states[work.slot] = fold_output(state, rows)
        else:
            assert end <= len(known.prompt), "prompt and output rows in one Work"
            self.states[work.slot] = fold_prompt(state, rows, 64)
        return self._outcome(known, work, end, len(everything))

    def _cell(self, known: _Known, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self.limits.page_size)
        return known.pages[page], offset

    def _outcome(self, known: _Known, work: Work, end: int, length: int) -> Sampled | None:
        scores: list[TokenLogprob] = []
        if known.params.prompt_logprobs is not None and not work.recurrent:
            for row in range(max(work.start, known.scored), min(end, len(known.prompt) - 1)):
                scores.append(score(known.prompt[: row + 1], known.prompt[row + 1]))
                known.scored = row + 1
        assert work.samples == (end == length and known.params.max_tokens > 0)
        if not work.samples:
            return Sampled(work.rid, prompt_logprobs=tuple(scores)) if scores else None
        context = [self.cells[self._cell(known, position)] for position in range(end)]
        token = next_token(context, self.states[work.slot])
        logprobs = (score(context, token),) if known.params.logprobs is not None else ()
        return Sampled(work.rid, (token,), logprobs, tuple(scores), 1)


class FakeExecutor:
    """The stand-in behind the executor's contract. A step takes `step_s` in each of `depth` stages.

    `fail_at`: the plan that kills it. `start_error`: what `start` raises.
    """

    def __init__(
        self,
        limits: EffectiveLimits,
        depth: int = 1,
        *,
        step_s: float = 0.0,
        fail_at: int | None = None,
        start_error: Exception | None = None,
    ) -> None:
        self.depth = depth
        self.worker = FakeWorker(limits)
        self.plans: list[Plan] = []
        self.shut_down = False
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

    def poll(self, timeout_s: float) -> StepResult | None:
        assert not self.shut_down
        if not self._results:
            return None
        at, result = self._results[0]
        wait = at - time.monotonic()
        if wait > 0:
            time.sleep(min(wait, timeout_s))
        if wait > timeout_s:
            return None
        if self._fail_at == result.seq:
            raise ExecutorFailed("rank 1 failed during forward: a planted fault")
        self._results.popleft()
        return result

    def shutdown(self) -> None:
        self.shut_down = True


def subchunks(work: Sequence[Work], prompt_len: int) -> Iterator[tuple[int, int]]:
    """Row ranges that the chunked form takes together while these works compute a prompt from position 0."""
    for one in work:
        if not one.recurrent:
            for start in range(one.start, one.start + one.num_rows, 64):
                yield start, min(start + 64, one.start + one.num_rows)
