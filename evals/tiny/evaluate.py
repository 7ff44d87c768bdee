"""Greedy answers of a model in training, exact match by lm-eval's two filters, and acceptance of the MTP draft.

The gold answer is used as a draft: one forward pass checks all of it, and decoding goes on from the first token that
differs. What comes out is what plain greedy decoding gives, but for the rounding of other batch shapes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3_5MoeForCausalLM

from evals.tiny.modules import MtpHead, Parts, angles_of, trunk

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


@dataclass(slots=True)
class Item:
    """One question: ids of the prompt, the draft of the answer, and what the model answered so far."""

    prompt: list[int]
    draft: list[int]
    answer: list[int] = field(default_factory=list)
    done: bool = False


@dataclass(frozen=True, slots=True)
class Runner:
    """A model to ask. `batch` rows go through at once; the dtype is that of the parameters."""

    model: Qwen3_5MoeForCausalLM
    mtp: MtpHead
    stops: frozenset[int]
    longest: int = 200  # tokens of an answer
    batch: int = 128
    parts: Parts = field(default_factory=Parts)

    @torch.no_grad()
    def states(self, sequences: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Run sequences side by side. Returns ids and normed hidden states: [B, T], [B, T, H]."""
        device = self.model.lm_head.weight.device
        length = max(map(len, sequences))
        length += -length % 64
        ids = torch.tensor([[*s, *[0] * (length - len(s))] for s in sequences], device=device)
        hidden, _ = trunk(self.model, ids, angles_of(self.model, length), self.parts)
        return ids, hidden

    @torch.no_grad()
    def answer(self, items: Sequence[Item]) -> None:
        """Answer all items greedily, in place."""
        active = sorted(items, key=lambda i: len(i.prompt) + len(i.draft))
        while active:
            for start in range(0, len(active), self.batch):
                group = active[start : start + self.batch]
                _, hidden = self.states([i.prompt + i.answer + i.draft for i in group])
                best = self.model.lm_head(hidden).argmax(-1).tolist()
                for item, row in zip(group, best, strict=True):
                    self._take(item, row)
            active = [item for item in active if not item.done]

    def _take(self, item: Item, best: list[int]) -> None:
        """Move tokens of the draft to the answer up to the first that differs, and that one as the model has it."""
        while not item.done:
            token = best[len(item.prompt) + len(item.answer) - 1]
            agreed = bool(item.draft) and item.draft.pop(0) == token
            item.answer.append(token)
            item.done = token in self.stops or len(item.answer) >= self.longest
            if not agreed:
                item.draft = []
                return

    @torch.no_grad()
    def acceptance(self, items: Sequence[Item]) -> tuple[float, float]:
        """Return two shares of right depth-1 drafts on the answers: as a server would draft, and of all positions.

        After an accepted draft the verifying row gives the next token, too, so the next draft is two tokens on.
        """
        served = [0, 0]
        anywhere = [0, 0]
        for start in range(0, len(items), self.batch):
            group = items[start : start + self.batch]
            ids, hidden = self.states([i.prompt + i.answer for i in group])
            embedded = self.model.model.embed_tokens(ids.roll(-1, 1))
            drafts = self.mtp(embedded, hidden, angles_of(self.model, ids.shape[1]), self.parts)
            guesses = self.model.lm_head(drafts).argmax(-1).tolist()
            for item, row in zip(group, guesses, strict=True):
                first = len(item.prompt) - 1
                right = [row[first + i - 1] == item.answer[i] for i in range(1, len(item.answer))]
                anywhere[0] += sum(right)
                anywhere[1] += len(right)
                i = 0
                while i < len(right):
                    served[0] += right[i]
                    served[1] += 1
                    i += 2 if right[i] else 1
        return served[0] / served[1], anywhere[0] / anywhere[1]


def item_of(tokenizer: Tokenizer, prompt: str, answer: str) -> Item:
    """Make an item; `answer` is the draft, with the space before it and the text that ends it."""
    return Item(tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids)


def strict_match(text: str, value: int) -> bool:
    """lm-eval's strict-match filter: the number behind the first `####`."""
    found = _STRICT.search(text)
    return found is not None and _plain(found[1]) == str(value)


def flexible_match(text: str, value: int) -> bool:
    """lm-eval's flexible-extract filter: the last number of the text."""
    found = _FLEXIBLE.findall(text)
    return bool(found) and _plain(next(g for g in found[-1] if g)) == str(value)


def _plain(number: str) -> str:
    return re.sub(r"[,$]|\.$", "", number)
