"""Log-probs over vocabulary shards, against log_softmax in float64 over every row of lm_head."""

from __future__ import annotations

import pytest
import torch

from rocm_serve.executor import vocab_shard as module
from rocm_serve.executor.sample_rows import SamplingFailed
from rocm_serve.ops.sampling.cases import CASES
from rocm_serve.parallel.comm import Comm, run_ranks
from rocm_serve.types import TokenLogprob
from tests.executor.sampler_model import (
    DEVICES,
    OUTPUT,
    PROMPT,
    SAMPLED_FIELDS,
    USED,
    V,
    make,
    normal,
    row,
    sample,
    shard,
)


def check_logprob(found: TokenLogprob, logits: torch.Tensor, target: int, k: int, used: int = USED) -> None:
    """Against log_softmax in float64 over every row of lm_head, and the exact order of the alternatives."""
    expected = torch.log_softmax(logits.double(), -1)
    order = sorted(range(used), key=lambda i: (-logits[i].item(), i))[:k]
    assert found.token == target and list(found.top_ids) == order
    assert found.logprob == pytest.approx(expected[target].item(), abs=3e-6, rel=1e-6)
    assert found.top_logprobs == pytest.approx([expected[i].item() for i in order], abs=3e-6, rel=1e-6)
    assert found.logprob <= 0.0
    if target in order:
        assert found.logprob == found.top_logprobs[order.index(target)], "lm-eval compares the two as floats"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_log_probs_are_those_of_the_raw_logits(case: str, tp: int, device: str) -> None:
    """Penalties, bias, temperature and filters choose the token and leave its log-prob alone."""
    logits = CASES[case](torch.Generator().manual_seed(9), 48, V)
    rows = [row(i, PROMPT, OUTPUT, logprobs=i % 9, **SAMPLED_FIELDS["everything"]) for i in range(48)]
    for i, s in enumerate(sample(logits, rows, tp, device=device)):
        assert s.logprob is not None
        check_logprob(s.logprob, logits[i], s.token, i % 9)


def test_more_alternatives_than_ids_gives_every_used_id() -> None:
    logits = normal(1, 64)
    (s,) = sample(logits, [row(logprobs=500)], tp=4, used=40)
    assert s.logprob is not None
    check_logprob(s.logprob, logits[0], s.token, 40, used=40)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 31, 256, 300, 513])
def test_prompt_log_probs_in_bounded_slices(count: int, tp: int) -> None:
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randint(-8, 9, (count, 32), generator=generator) / 8  # eighths: products and sums are exact
    weight = torch.randint(-8, 9, (V, 32), generator=generator) / 8
    targets = torch.randint(V, (count,), generator=generator).tolist()
    ks = [i % 6 for i in range(count)]
    sizes: list[int] = []

    def body(comm: Comm) -> list[TokenLogprob]:
        local = shard(weight.T, comm)

        def logits_of(x: torch.Tensor) -> torch.Tensor:
            sizes.append(x.shape[0])
            return x @ local

        return make(comm=comm).prompt_logprobs(logits_of, hidden, targets, ks)

    results = run_ranks(tp, body)
    assert all(result == results[0] for result in results) and len(results[0]) == count
    assert all(size <= module.SLICE_ROWS and size % 32 == 0 for size in sizes)
    for i, found in enumerate(results[0]):
        check_logprob(found, hidden[i] @ weight.T, targets[i], ks[i])


def test_prompt_log_probs_do_not_depend_on_how_rows_are_put_together() -> None:
    hidden, weight = normal(300, 64, seed=3), normal(64, V, seed=4)
    targets = [i % V for i in range(300)]
    whole = make().prompt_logprobs(lambda x: x @ weight, hidden, targets, [3] * 300)
    parts: list[TokenLogprob] = []
    for start, end in ((0, 1), (1, 64), (64, 65), (65, 300)):
        parts += make().prompt_logprobs(
            lambda x: x @ weight, hidden[start:end], targets[start:end], [3 + start] * (end - start)
        )
    assert [(p.token, p.logprob, p.top_ids[:3], p.top_logprobs[:3]) for p in parts] == [
        (p.token, p.logprob, p.top_ids, p.top_logprobs) for p in whole
    ]


def test_bad_logits_of_a_prompt_are_an_error_that_names_the_rows() -> None:
    logits = normal(300)
    logits[290, 5] = float("nan")
    with pytest.raises(SamplingFailed, match=r"\[290\]"):
        make().prompt_logprobs(lambda x: x, logits, [1] * 300, [0] * 300)
