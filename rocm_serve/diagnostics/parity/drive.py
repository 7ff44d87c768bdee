"""Run sequences through an executor under the server's own scheduler, the answers given beforehand or left to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rocm_serve.diagnostics.parity.prompts import Prompt
from rocm_serve.engine.scheduler import Scheduler
from rocm_serve.executor.api import Executor, ExecutorFailed
from rocm_serve.messages import AddRequest, EffectiveLimits, Sampled, StepResult
from rocm_serve.types import SamplingParams, TokenLogprob

TOP = 20  # alternatives of each position that a side reports
_STEP_S = 600.0
RUN_SEEDS = 1_000_000  # seeds of one run: they tell requests apart in the workers

Row = dict[int, float]  # id -> log-prob


class Scored(msgspec.Struct):
    """One sequence: its ids, and what a side says of every position from 1 on (`rows[i]` is of position i + 1)."""

    prompt_len: int
    ids: list[int]
    rows: list[Row]


class Driver:
    """Feeds one started executor, run after run. The requests of run `n` have seeds from n * RUN_SEEDS on."""

    def __init__(self, executor: Executor, limits: EffectiveLimits) -> None:
        self._executor = executor
        self._scheduler = Scheduler(limits, executor.depth)
        self._seeds: dict[int, int] = {}
        self.runs = 0
        self.tick: Callable[[int, int], None] = lambda done, rows: None  # after every step: rows computed, and of all

    def seed(self, index: int) -> int:
        """Return the seed that request `index` of the next run will have."""
        return self.runs * RUN_SEEDS + index

    def run(
        self, prompts: Sequence[Prompt], new_tokens: int, forced: Sequence[Sequence[int]] | None = None
    ) -> list[Scored]:
        """Score prompts and `new_tokens` after each: greedy ones, or those of `forced` (whole sequences).

        Errors: ExecutorFailed.
        """
        ids = [prompt.ids for prompt in prompts]
        if forced is None:
            return self._run(ids, [new_tokens] * len(ids), None)
        whole = [list(one) for one in forced]
        return self._run(ids, [len(all_ids) - len(one) for all_ids, one in zip(whole, ids, strict=True)], whole)

    def stepwise(self, sequences: Sequence[Scored]) -> list[Scored]:
        """Score whole sequences token by token: all but the first token are given as if they had been generated."""
        firsts = [(one.ids[0],) for one in sequences]
        return self._run(firsts, [len(one.ids) - 1 for one in sequences], [one.ids for one in sequences])

    def _run(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], whole: list[list[int]] | None
    ) -> list[Scored]:
        scored = [Scored(len(ids), list(ids), []) for ids in prompts]
        by_id: dict[str, Scored] = {}
        first = self.seed(0)
        reach: dict[int, int] = {}  # seed -> rows that are there; a preempted request computes some again
        planned: deque[list[tuple[int, int]]] = deque()
        total = sum(len(ids) + length - 1 for ids, length in zip(prompts, lengths, strict=True))
        for i, (ids, length) in enumerate(zip(prompts, lengths, strict=True)):
            name = f"{self.runs}-{i}"
            by_id[name] = scored[i]
            params = SamplingParams(
                max_tokens=length, temperature=0.0, seed=self.seed(i), logprobs=TOP, prompt_logprobs=TOP
            )
            self._scheduler.add(AddRequest(name, tuple(ids), params))
        while not self._scheduler.idle:
            while (plan := self._scheduler.schedule()) is not None:
                self._seeds.update((new.rid, new.params.seed) for new in plan.new)
                self._executor.submit(plan)
                planned.append([(self._seeds[work.rid], work.start + work.num_rows) for work in plan.work])
            result = self._force(self._result(), scored, whole, first)
            for output in self._scheduler.commit(result):
                one = by_id[output.request_id]
                one.rows += [_row(entry) for entry in (*output.prompt_logprobs, *output.logprobs)]
                one.ids += output.tokens
            for seed, end in planned.popleft():
                reach[seed] = max(reach.get(seed, 0), end)
            self.tick(sum(reach.values()), total)
        self.runs += 1
        return scored

    def _result(self) -> StepResult:
        result = self._executor.poll(_STEP_S)
        if result is None:
            raise ExecutorFailed(f"a step has no result after {_STEP_S:.0f} s")
        return result

    def _force(
        self, result: StepResult, scored: Sequence[Scored], whole: list[list[int]] | None, first: int
    ) -> StepResult:
        """Put the given tokens in the place of those that were drawn."""
        if whole is None:
            return result
        changed: list[Sampled] = []
        for one in result.sampled:
            if one.tokens:
                i = self._seeds[one.rid] - first
                one = msgspec.structs.replace(one, tokens=(whole[i][len(scored[i].ids)],))
            changed.append(one)
        return StepResult(result.seq, tuple(changed))


def _row(entry: TokenLogprob) -> Row:
    return {entry.token: entry.logprob} | dict(zip(entry.top_ids, entry.top_logprobs, strict=True))


def wish(rows: Mapping[int, Sequence[int]], driver: Driver) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
    """Say by seed which rows of the next run to record: request index -> positions, and router rows up to the last."""
    chosen = {driver.seed(i): tuple(positions) for i, positions in rows.items()}
    return chosen, {driver.seed(i): max(positions) + 1 for i, positions in rows.items()}
