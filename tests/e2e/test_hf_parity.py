"""The server over HTTP against HF Transformers in float32 on the same checkpoint.

Bar: |difference of log-probs| <= max(1e-4, twice HF's own difference between one-shot and token-by-token).
Greedy tokens are identical, or first differ where HF's two best logits or a router's k-th and next logit lie closer
than 1e-4; such places are printed, and are at most one in a thousand tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from tests.e2e.harness import Scored, Server, score
from tests.e2e.hf import NEAR_TIE, Decoded, Reference

LONGEST = 130
LENGTHS = (1, 3, 63, 64, 65, 130)
FEW_LENGTHS = (1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130)
NEW_TOKENS = 32
# Chunk size -> prompt lengths, new tokens. What a chunk size leaves behind shows in the first tokens, so one size goes
# all the way. With one row a step every prompt row is a chunk of its own: no length is an edge, each costs a step.
CHUNKS = {1: ((3, 65), 16), 7: ((1, 64, 130), 16), 16: ((3, 63, 65), 16), 64: (LENGTHS, NEW_TOKENS)}

pytestmark = pytest.mark.slow  # a minute on two idle cores, most of it HF and the start of servers

ReferenceOf = Callable[[str], Reference]
ServerOf = Callable[..., Server]


def prompt_of(reference: Reference, length: int, seed: int) -> list[int]:
    """Draw ids until no router of the reference is near a tie: there, two right answers would differ."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(50):
        ids = torch.randint(reference.vocab_used, (length,), generator=generator).tolist()
        if reference.router_gap(ids) > NEAR_TIE:
            return ids
    raise AssertionError("every prompt drawn has a router near a tie")


def worst_difference(answer: Scored, expected: torch.Tensor, first: int = 1) -> float:
    """Compare entries from `first` on, own value and alternatives: entry i with row i - 1 of `expected`."""
    worst = 0.0
    for i in range(first, len(answer.tokens)):
        own, top = answer.logprobs[i], answer.top[i]
        assert own is not None and top is not None and len(top) in (5, 6)
        row = expected[i - 1]
        assert own == top[answer.tokens[i]]
        worst = max(worst, *(abs(value - row[token].item()) for token, value in top.items()))
    return worst


def check_prompts(server: Server, reference: Reference, lengths: Sequence[int]) -> None:
    """Score every prefix and the token after it against one prefill of the longest."""
    ids = prompt_of(reference, LONGEST, seed=17)
    expected = reference.one_shot(ids)
    bar = max(1e-4, 2 * reference.noise(ids))
    worst = 0.0
    for length, answer in zip(lengths, score(server, [ids[:n] for n in lengths], max_tokens=1), strict=True):
        assert answer.tokens[:-1] == ids[:length] and answer.logprobs[0] is None and answer.top[0] is None
        last = expected[length - 1, : reference.vocab_used]
        assert last.max() - last[answer.tokens[-1]] <= NEAR_TIE, f"length {length}: not HF's best token"
        worst = max(worst, worst_difference(answer, expected))
    print(f"{len(lengths)} prompts up to {LONGEST}: largest difference of log-probs {worst:.2e}, bar {bar:.2e}")
    assert worst <= bar


@dataclass(frozen=True)
class Greedy:
    """HF's answer to one prompt: log-probs of the prompt's rows, the continuation, the bar for both."""

    prompt: list[int]
    prompt_log_probs: torch.Tensor
    decoded: Decoded
    bar: float

    @classmethod
    def of(cls, reference: Reference, length: int) -> Greedy:
        prompt = prompt_of(reference, length, seed=length)
        decoded = reference.greedy(prompt, NEW_TOKENS)
        one_shot = reference.one_shot(prompt + decoded.tokens[:-1])
        noise = (one_shot[length - 1 :] - torch.stack(decoded.log_probs)).abs().max().item()
        return cls(prompt, one_shot[: length - 1], decoded, max(1e-4, 2 * noise))

    def check(self, answer: Scored, new_tokens: int = NEW_TOKENS) -> str | None:
        """Compare; return a sentence on the near tie where the tokens part, or None when they are identical."""
        prompt, decoded = self.prompt, self.decoded
        new = answer.tokens[len(prompt) :]
        assert answer.tokens[: len(prompt)] == prompt and len(new) == new_tokens
        expected = decoded.tokens[:new_tokens]
        parts = next((i for i, (a, b) in enumerate(zip(new, expected, strict=True)) if a != b), None)
        rows = torch.cat([self.prompt_log_probs, torch.stack(decoded.log_probs)])
        equal = len(prompt) + (new_tokens if parts is None else parts)
        shown = Scored(answer.tokens[:equal], answer.logprobs[:equal], answer.top[:equal], answer.finish_reason)
        worst = worst_difference(shown, rows)
        assert worst <= self.bar, f"prompt of {len(prompt)}: log-probs differ by {worst:.2e}, bar {self.bar:.2e}"
        if parts is None:
            return None
        gap, router_gap = decoded.gaps[parts], decoded.router_gaps[parts]
        place = f"prompt of {len(prompt)}, new token {parts}: gap of logits {gap:.1e}, of routers {router_gap:.1e}"
        assert min(gap, router_gap) < NEAR_TIE, f"{place}: HF says {decoded.tokens[parts]}, the server {new[parts]}"
        return place


@pytest.mark.timeout(900)
def test_prompts_of_every_length_equal_one_prefill(server_of: ServerOf, reference_of: ReferenceOf) -> None:
    with server_of("text-bf16", "--dtype", "float32") as server:
        check_prompts(server, reference_of("text-bf16"), range(1, LONGEST + 1))


@pytest.mark.timeout(900)
def test_greedy_decode_equals_hf_for_every_chunk_size(server_of: ServerOf, reference_of: ReferenceOf) -> None:
    by_length = {length: Greedy.of(reference_of("text-bf16"), length) for length in LENGTHS}
    near_ties: list[str] = []
    tokens = 0
    for chunk, (lengths, new_tokens) in CHUNKS.items():
        expected = [by_length[length] for length in lengths]
        with server_of("text-bf16", "--dtype", "float32", "--chunked-prefill-size", chunk) as server:
            answers = score(server, [greedy.prompt for greedy in expected], max_tokens=new_tokens)
            found = [greedy.check(answer, new_tokens) for greedy, answer in zip(expected, answers, strict=True)]
            near_ties += [f"chunk {chunk}, {place}" for place in found if place]
        tokens += len(lengths) * new_tokens
    print(f"{tokens} greedy tokens, near ties: {near_ties or 'none'}")
    assert len(near_ties) <= tokens / 1000


@pytest.mark.timeout(900)
# vl-fp8 is held against HF by tests/test_cli_parity.py, too.
@pytest.mark.parametrize("layout", ["text-fp8", pytest.param("vl-fp8", marks=pytest.mark.by_hand), "dense"])
def test_other_layouts_equal_hf_on_dequantised_weights(
    layout: str, server_of: ServerOf, reference_of: ReferenceOf
) -> None:
    reference = reference_of(layout)
    expected = [Greedy.of(reference, length) for length in (3, 65)]
    with server_of(layout, "--dtype", "float32", "--chunked-prefill-size", 128) as server:
        check_prompts(server, reference, FEW_LENGTHS)
        answers = score(server, [greedy.prompt for greedy in expected], max_tokens=NEW_TOKENS)
        near_ties = [greedy.check(answer) for greedy, answer in zip(expected, answers, strict=True)]
    print(f"{layout}: near ties {[place for place in near_ties if place] or 'none'}")
    assert not any(near_ties), "64 tokens have room for none"
