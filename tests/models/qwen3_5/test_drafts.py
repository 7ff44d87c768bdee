"""Drafts through a whole model, over stages and ranks: what true rows give has the bits of decoding token by token.

Drafts are made up here, right ones and wrong ones; nothing proposes them yet.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F

from rocm_serve.ops.replay import replay_of
from tests.models import harness
from tests.models.harness import Chunk, Pipeline, Text

MOST = 4


@dataclass
class Story:
    """A text whose tokens are given: its prompt, and what plain decoding says of each later row."""

    text: Text
    tokens: list[int]
    prompt: int
    logits: torch.Tensor = field(init=False)
    accepted: int = 0  # of its last drafts

    @property
    def left(self) -> int:
        return len(self.tokens) - self.text.cached


@torch.inference_mode()
def step(run: Pipeline, stories: Sequence[Story], chunks: Sequence[Chunk], drafts: Sequence[int]) -> list[torch.Tensor]:
    """Run a step with drafts through every stage; return each chunk's logits."""
    stream: torch.Tensor | None = None
    for stage in run.stages:
        batch = harness.make_batch(chunks, stage.cache, run.page_size)
        replay = replay_of(batch.sequences, [s.accepted for s in stories], drafts, MOST)
        stream = stage.model.forward(replace(batch, replay=replay), stream)
    assert stream is not None
    counts = [len(c.tokens) for c in chunks]
    rows = stream[: sum(counts)]
    logits = run.stages[-1].model.logits(F.pad(rows, (0, 0, 0, -len(rows) % 32)))
    return list(logits[: len(rows)].split(counts))


def with_pending(run: Pipeline) -> Pipeline:
    for stage in run.stages:
        for i, state in stage.cache.conv.items():
            heads = stage.cache.ssm[i].shape[1]
            stage.cache.pending_u[i] = torch.full((len(state), MOST, state.shape[2]), float("nan"))
            stage.cache.pending_ba[i] = torch.full((len(state), MOST, 2 * heads), float("nan"))
    return run


def told(run: Pipeline, stories: Sequence[Story], g: torch.Generator) -> list[torch.Tensor]:
    """Tell the stories with drafts, some of them at a time; return rows of drafted and of plain logits by turns."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    with_pending(run)
    compared: list[torch.Tensor] = []
    while any(s.left for s in stories):
        live = [s for s in stories if s.left and number(0, 3)]
        live.sort(key=lambda s: s.text.cached == 0)
        chunks, drafts, right = [], [], []
        for s in live:
            at, first = s.text.cached, s.text.cached == 0
            known = s.prompt if first else min(number(1, 2), s.left)
            d = 0 if first else number(0, MOST)
            m = number(0, min(d, s.left - known))
            true = s.tokens[at : at + known + m]
            wrong = [(t + 1) % 160 for t in s.tokens[at + known + m :][: d - m]]  # each another than the true one
            wrong += [5] * (d - m - len(wrong))
            chunks.append(Chunk(s.text, true + wrong, recurrent=not first))
            drafts.append(d)
            right.append(m)
        if not live:
            continue
        for s, chunk, d, m, logits in zip(live, chunks, drafts, right, step(run, live, chunks, drafts), strict=True):
            taken = len(chunk.tokens) - d + m
            at = s.text.cached
            compared += [logits[:taken], s.logits[at : at + taken]]
            s.text.cached, s.accepted = at + taken, m
    return compared


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1)])
def test_true_rows_have_the_logits_of_plain_decoding(tp: int, pp: int) -> None:
    seed = secrets.randbits(31)
    print(f"seed {seed}")
    hf = harness.hf_model(seed=seed % 1000)
    facts, tensors = harness.facts_of(hf), dict(hf.state_dict())

    def body(run: Pipeline) -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(seed)
        stories = [
            Story(harness.text(slot), harness.random_tokens(prompt + 14, seed + slot), prompt)
            for slot, prompt in ((1, 9), (3, 2), (2, 17))
        ]
        for s in stories:
            before = harness.prefill(run, s.text, s.tokens[: s.prompt])
            s.logits = torch.cat([before, harness.decode(run, s.text, s.tokens[s.prompt :])])
            s.text.tokens, s.text.cached = [], 0
        for stage in run.stages:  # what the plain run has left; a slot begins cleared
            for state in (*stage.cache.conv.values(), *stage.cache.ssm.values()):
                state.zero_()
        return told(run, stories, g)

    if tp == 1:
        compared = body(harness.pipeline(facts, tensors, pp=pp))
    else:
        compared = harness.on_ranks(facts, tensors, tp, body)
    assert len(compared) > 20
    for got, expected in zip(compared[::2], compared[1::2], strict=True):
        assert torch.equal(got, expected)
