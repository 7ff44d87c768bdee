"""Every topology gives the same answers: the same bits over pipeline stages, hardly others over tensor parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocm_serve.executor.local import LocalExecutor
from rocm_serve.types import SamplingParams
from tests.executor.generate import Answer, Requests, session
from tests.executor.simulated import SimulatedExecutor
from tests.executor.wishes import resolved

CLOSE = 1e-4


@pytest.fixture(scope="module")
def alone(checkpoint: Path, mixed_requests: Requests) -> dict[str, Answer]:
    with session(LocalExecutor(resolved(model=str(checkpoint)))) as local:
        return local.generate(mixed_requests)


def check_close(answers: dict[str, Answer], expected: dict[str, Answer], requests: Requests) -> None:
    for name, answer in answers.items():
        want = expected[name]
        same = answer.tokens == want.tokens
        if requests[name][1].temperature == 0.0 and not same:
            first = next(i for i, pair in enumerate(zip(answer.tokens, want.tokens, strict=True)) if len({*pair}) > 1)
            gap = want.logprobs[first].top_logprobs[0] - want.logprobs[first].top_logprobs[1]
            assert gap < CLOSE, f"{name}: token {first} differs where the best two are {gap} apart"
        pairs = list(zip(answer.prompt_logprobs, want.prompt_logprobs, strict=True))
        if same:
            pairs += zip(answer.logprobs, want.logprobs, strict=True)
        for one, other in pairs:
            assert one.token == other.token and abs(one.logprob - other.logprob) < CLOSE


@pytest.mark.parametrize("tp", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_stages_change_no_bit_and_tensor_parallelism_hardly_any(
    checkpoint: Path, mixed_requests: Requests, alone: dict[str, Answer], tp: int
) -> None:
    answers = {}
    for pp in (1, 2) if tp > 1 else (2, 3):
        wish = resolved(model=str(checkpoint), tp=tp, pp=pp)
        with session(SimulatedExecutor(wish)) as ranks:
            answers[pp] = ranks.generate(mixed_requests)
            assert ranks.deepest == pp, "as many plans in flight as stages"
    first, second = answers.values()
    assert first == second
    if tp == 1:
        assert first == alone
    else:
        check_close(first, alone, mixed_requests)


def test_each_layer_reduces_twice(checkpoint: Path) -> None:
    """And nothing else reduces but the embedding on the first stage, once a step."""
    requests = {"x": ((1, 2, 3), SamplingParams(max_tokens=3, temperature=0.0))}
    executor = SimulatedExecutor(resolved(model=str(checkpoint), tp=2, pp=2))
    with session(executor) as ranks:
        before = {rank: comm.calls["all_reduce"] for rank, comm in executor.comms.items()}
        ranks.generate(requests)
        steps = ranks.stats.steps
    assert steps == 3
    for rank, comm in executor.comms.items():
        embedding = 1 if rank in (0, 1) else 0
        assert comm.calls["all_reduce"] - before[rank] == steps * (2 * 2 + embedding)
