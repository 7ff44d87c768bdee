"""The text models against HF Transformers on the same weights, in float32 unless said otherwise.

The bar: |difference of log-probabilities| <= max(1e-4, twice HF's own difference between one shot and token by token).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.models.harness import (
    Chunk,
    Pipeline,
    Text,
    allowed,
    decode,
    difference,
    facts_of,
    hf_logits,
    hf_model,
    pipeline,
    prefill,
    random_tokens,
    text,
)

LENGTHS = (1, 3, 63, 64, 65, 130)
NEW_TOKENS = {1: 8, 7: 8, 16: 8, 64: 64}  # by chunk: what a size leaves behind shows in the first; one goes all the way
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_interleaved": True,
    "mrope_section": [3, 3, 2],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "moe": {},
    "dense": {"moe": False},
    "yarn": {"rope": YARN},
    "head sizes differ": {"linear_key_head_dim": 64, "linear_value_head_dim": 96, "head_dim": 64},
    "no heads shared": {"num_key_value_heads": 8, "linear_num_key_heads": 8},
}


@pytest.fixture(scope="module")
def hf() -> nn.Module:
    return hf_model()


@pytest.fixture(scope="module")
def long(hf: nn.Module) -> tuple[list[int], torch.Tensor, float]:
    """A text of 130 tokens, HF's logits of all rows (causal: those of every shorter prompt too), and the bar."""
    tokens = random_tokens(130, 1)
    return tokens, hf_logits(hf, tokens), allowed(hf, tokens)


def ours(hf: nn.Module, **options: Any) -> Pipeline:
    return pipeline(facts_of(hf), hf.state_dict(), **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_decode_equal_hf(variant: str) -> None:
    hf = hf_model(**VARIANTS[variant], seed=3)
    run = ours(hf)
    tokens = random_tokens(100, 11)
    bar = allowed(hf, tokens)
    t = text()
    got = torch.cat([prefill(run, t, tokens[:70]), decode(run, t, tokens[70:])])
    assert difference(got, hf_logits(hf, tokens)) <= bar
    assert difference(got[70:], hf_logits(hf, tokens, 70)[70:]) <= bar


def test_every_prompt_length_gives_the_bits_of_one_long_prefill_which_equals_hf(
    hf: nn.Module, long: tuple[list[int], torch.Tensor, float]
) -> None:
    tokens, expected, bar = long
    whole = prefill(ours(hf), text(1), tokens)
    assert difference(whole, expected) <= bar
    for first in range(1, 130, 7):
        lengths = range(first, min(first + 7, 130))
        fresh = ours(hf, pages=7 * 20)
        chunks = [Chunk(text(i + 1), tokens[:n]) for i, n in enumerate(lengths)]
        for n, got in zip(lengths, fresh.step(*chunks), strict=True):
            assert torch.equal(got, whole[:n]), n


@pytest.mark.parametrize("length", [65, 130])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunked_prefill_equals_hf(
    hf: nn.Module, long: tuple[list[int], torch.Tensor, float], chunk: int, length: int
) -> None:
    tokens, expected, bar = long
    got = prefill(ours(hf), text(), tokens[:length], chunk)
    assert difference(got, expected[:length]) <= bar


def greedy(run: Pipeline, texts: list[Text], prompts: list[list[int]], chunk: int, count: int) -> list[list[int]]:
    """Prefill each prompt in chunks, then decode all of them together; return `count` tokens each."""
    out: list[list[int]] = []
    for t, prompt in zip(texts, prompts, strict=True):
        out.append([int(prefill(run, t, prompt, chunk)[-1].argmax())])
    while len(out[0]) < count:
        rows = run.step(*(Chunk(t, [o[-1]], recurrent=True) for t, o in zip(texts, out, strict=True)))
        for o, row in zip(out, rows, strict=True):
            o.append(int(row[-1].argmax()))
    return out


@pytest.mark.parametrize("chunk", [pytest.param(n, marks=pytest.mark.slow) for n in NEW_TOKENS if n < 64] + [64])
def test_greedy_answers_are_hf_s_or_part_where_its_best_two_are_level(hf: nn.Module, chunk: int) -> None:
    prompts = [random_tokens(n, 20 + n) for n in LENGTHS]
    texts = [text(i + 1) for i in range(len(prompts))]
    answers = greedy(ours(hf, pages=20 * len(prompts)), texts, prompts, chunk, NEW_TOKENS[chunk])
    level_places = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        best = hf_logits(hf, prompt + answer, len(prompt))[len(prompt) - 1 : -1].log_softmax(-1).topk(2)
        for i, token in enumerate(answer):
            if token != int(best.indices[i, 0]):
                assert best.values[i, 0] - best.values[i, 1] < 1e-4, (len(prompt), i)
                level_places += 1
                break
    assert level_places <= 1, "at most one level place in these tokens"


@pytest.mark.parametrize("moe", [True, False])
def test_bf16_is_as_far_from_float32_as_hf_s_bf16(moe: bool) -> None:
    model = hf_model(moe=moe, seed=2)
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
    tokens = random_tokens(90, 5)
    truth = hf_logits(model, tokens).log_softmax(-1)
    run, t = ours(model, dtype=torch.bfloat16), text()
    got = torch.cat([prefill(run, t, tokens[:60]), decode(run, t, tokens[60:])])
    theirs = hf_logits(model.bfloat16(), tokens).float()
    assert got.dtype == torch.float32
    # the median row: now and then rounding sends a row to another expert, in either implementation
    own, other = ((x.log_softmax(-1) - truth).square().mean(-1).sqrt().median() for x in (got, theirs))
    assert 1e-4 < own <= 1.15 * other


@pytest.mark.parametrize(("kv", "bound"), [(torch.bfloat16, 0.1), (torch.float8_e4m3fn, 0.7)])
def test_a_narrow_kv_cache_moves_log_probs_a_little(hf: nn.Module, kv: torch.dtype, bound: float) -> None:
    tokens = random_tokens(80, 6)
    run = ours(hf, kv_dtype=kv)
    t = text()
    got = torch.cat([prefill(run, t, tokens[:60]), decode(run, t, tokens[60:])])
    assert 1e-4 < difference(got, hf_logits(hf, tokens)) < bound


def test_logits_are_of_the_rows_asked_for(hf: nn.Module) -> None:
    run, tokens = ours(hf), random_tokens(9, 7)
    (hidden,) = run.hidden(Chunk(text(), tokens))
    model = run.stages[-1].model
    whole = model.logits(hidden)
    assert whole.shape == (9, 160)
    assert torch.equal(model.logits(hidden[[8, 2]]), whole[[8, 2]])
    assert model.logits(hidden[:0]).shape == (0, 160)
