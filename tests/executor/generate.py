"""Run requests through a scheduler and an executor to the end, without server, core loop or sockets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rocm_serve.engine.scheduler import Scheduler
from rocm_serve.executor.api import Executor
from rocm_serve.messages import AddRequest, Stats
from rocm_serve.types import FinishReason, SamplingParams, TokenLogprob

Requests = Mapping[str, tuple[tuple[int, ...], SamplingParams]]


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Session:
    """A started executor with its scheduler; `deepest` is the largest number of plans that were in flight."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.limits = executor.start()
        self.scheduler = Scheduler(self.limits, executor.depth)
        self.deepest = 0

    @property
    def stats(self) -> Stats:
        return self.scheduler.stats()

    def generate(self, requests: Requests) -> dict[str, Answer]:
        """Serve `requests`, all there from the beginning, to the end."""
        answers = {request_id: Answer() for request_id in requests}
        self.add(requests)
        while not self.scheduler.idle:
            self.step(answers)
        return answers

    def add(self, requests: Requests) -> None:
        for request_id, (prompt, params) in requests.items():
            self.scheduler.add(AddRequest(request_id, prompt, params))

    def step(self, answers: dict[str, Answer]) -> None:
        """Fill the pipeline and take one result."""
        while (plan := self.scheduler.schedule()) is not None:
            self.executor.submit(plan)
        self.deepest = max(self.deepest, len(self.scheduler.in_flight))
        result = self.executor.poll(60)
        assert result is not None, "no result within a minute"
        for output in self.scheduler.commit(result):
            answer = answers[output.request_id]
            answer.tokens += output.tokens
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs
            answer.finish_reason = output.finish_reason or answer.finish_reason
        self.scheduler.check()


@contextmanager
def session(executor: Executor) -> Iterator[Session]:
    try:
        yield Session(executor)
    finally:
        executor.shutdown()
