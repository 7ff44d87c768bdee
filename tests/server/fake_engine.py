"""An engine in this process: tokens and log-probs are a function of the sequence so far, or follow a script."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import numpy as np
import numpy.typing as npt

from rocm_serve.messages import AddRequest, EffectiveLimits, Output, Stats
from rocm_serve.server.info import EngineState
from rocm_serve.types import FinishReason, SamplingParams, TokenLogprob

Logits = npt.NDArray[np.float32]


class FakeEngine:
    """Implements EngineClientProtocol.

    `script` gives the tokens of an answer whatever the prompt; without it they are sampled from logits that a hash of
    the sequence decides. `group`: tokens per Output. `hold`: answers wait until `release` is set.
    """

    def __init__(
        self,
        vocab: int,
        *,
        max_model_len: int = 200,
        script: Sequence[int] | None = None,
        group: int = 1,
        fail_after: int | None = None,
        max_running: int = 10**6,
        step_s: float = 0.0,
    ) -> None:
        self.state: EngineState = "ready"
        self.error: str | None = None
        self.limits = EffectiveLimits(max_model_len, 64, 512, 16, 100, 64)
        self.seen: list[AddRequest] = []
        self.aborted: list[str] = []
        self.completed: list[str] = []
        self.running: set[str] = set()
        self.calls: list[str] = []
        self.release = asyncio.Event()
        self.release.set()
        self._vocab = vocab
        self._script = script
        self._group = group
        self._fail_after = fail_after
        self._places = asyncio.Semaphore(max_running)
        self._step_s = step_s
        self._closed = False

    @property
    def stats(self) -> Stats:
        return Stats(running=len(self.running), mixed_steps=3, peak_running=len(self.seen), aborted=len(self.aborted))

    async def start(self) -> EffectiveLimits:
        self.calls.append("start")
        return self.limits

    async def drain(self) -> None:
        self.calls.append("drain")
        self.state = "dead"

    async def close(self) -> None:
        self.calls.append("close")
        self._closed = True
        self.release.set()

    def complete(self, request_id: str) -> None:
        assert request_id in self.running
        self.completed.append(request_id)

    def logits(self, sequence: Sequence[int]) -> Logits:
        seed = zlib.crc32(np.asarray(sequence, np.int64).tobytes())
        return np.random.default_rng(seed).normal(0, 3, self._vocab).astype(np.float32)

    def entry(self, sequence: Sequence[int], token: int, num_top: int) -> TokenLogprob:
        """The log-prob of `token` after `sequence`, from the raw logits."""
        logits = self.logits(sequence).astype(np.float64)
        values = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
        best = np.argsort(-values, kind="stable")[:num_top]
        top = tuple(int(i) for i in best)
        return TokenLogprob(token, float(values[token]), top, tuple(float(values[i]) for i in top))

    async def batches(self, request: AddRequest) -> AsyncGenerator[list[Output], None]:
        """As `generate`, one output a time."""
        async with aclosing(self.generate(request)) as outputs:
            async for output in outputs:
                yield [output]

    async def generate(self, request: AddRequest) -> AsyncGenerator[Output, None]:
        self.seen.append(request)
        over = False
        try:
            async with self._places:
                self.running.add(request.request_id)
                await self.release.wait()
                async for output in self._outputs(request):
                    over = output.finish_reason is not None
                    yield output
        finally:
            self.running.discard(request.request_id)
            if not over and request.request_id not in self.completed:
                self.aborted.append(request.request_id)

    async def _outputs(self, request: AddRequest) -> AsyncGenerator[Output, None]:
        name, params, prompt = request.request_id, request.params, list(request.prompt)
        if params.prompt_logprobs is not None:
            entries = [self.entry(prompt[:i], prompt[i], params.prompt_logprobs) for i in range(1, len(prompt))]
            half = len(entries) // 2
            yield Output(name, prompt_logprobs=tuple(entries[:half]))
            yield Output(name, prompt_logprobs=tuple(entries[half:]))
        if params.max_tokens == 0:
            yield Output(name, finish_reason=FinishReason.LENGTH)
            return
        made: list[int] = []
        batch: list[int] = []
        reason: FinishReason | None = None
        while reason is None:
            if self._closed:
                yield Output(name, finish_reason=FinishReason.ERROR, error="the link is closed")
                return
            if self._fail_after is not None and len(made) >= self._fail_after:
                yield Output(name, finish_reason=FinishReason.ERROR, error="the planted fault")
                return
            token = self._next(prompt + made, len(made), params)
            made.append(token)
            batch.append(token)
            if token in params.end_token_ids and len(made) > params.min_tokens:
                reason = FinishReason.STOP
            elif len(made) >= params.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None or len(batch) == self._group:
                first = len(made) - len(batch)
                yield self._output(name, prompt + made[:first], batch, params, reason)
                batch = []
                await asyncio.sleep(self._step_s)

    def _output(
        self, name: str, before: list[int], batch: list[int], params: SamplingParams, reason: FinishReason | None
    ) -> Output:
        logprobs: tuple[TokenLogprob, ...] = ()
        if params.logprobs is not None:
            logprobs = tuple(self.entry(before + batch[:i], t, params.logprobs) for i, t in enumerate(batch))
        stop = batch[-1] if reason is FinishReason.STOP else None
        return Output(name, tuple(batch), logprobs, finish_reason=reason, stop_token=stop)

    def _next(self, sequence: list[int], made: int, params: SamplingParams) -> int:
        if self._script is not None:
            return self._script[made % len(self._script)]
        logits = self.logits(sequence)
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if made < params.min_tokens:
            logits[list(params.end_token_ids)] = -np.inf
        if params.greedy:
            return int(np.argmax(logits))
        rng = np.random.default_rng((params.seed, params.choice, len(sequence)))
        return int(np.argmax(logits / params.temperature + rng.gumbel(size=self._vocab)))
