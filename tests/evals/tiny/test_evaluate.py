"""Answers with a draft are greedy answers; scores are lm-eval's filters; acceptance counts as a server drafts."""

from __future__ import annotations

import pytest
import torch

from evals.tiny.evaluate import Item, Runner, flexible_match, strict_match
from evals.tiny.modules import build
from tests.evals.tiny.test_modules import IDS, SMALL


@pytest.fixture(scope="module")
def runner() -> Runner:
    model, mtp = build(SMALL, IDS, 3)
    torch.manual_seed(4)
    for p in model.parameters():
        p.data += torch.randn_like(p) * 0.1
    return Runner(model, mtp, frozenset((5,)), longest=12, batch=2)


def test_a_draft_changes_no_answer(runner: Runner) -> None:
    prompts = [[7, 8, 9], [11] * 40, [3, 1, 4, 1, 5, 9, 2, 6]]
    plain = [Item(prompt, []) for prompt in prompts]
    runner.answer(plain)
    for prompt, item in zip(prompts, plain, strict=True):
        sequence = list(prompt)
        while len(sequence) - len(prompt) < 12 and sequence[-1] != 5:
            with torch.no_grad():
                sequence.append(int(runner.model(torch.tensor([sequence])).logits[0, -1].argmax()))
        assert item.answer == sequence[len(prompt) :]
    right = plain[0].answer
    drafted = [Item(prompts[0], list(right)), Item(prompts[0], [*right[:4], 2, 2]), Item(prompts[1], [1, 2, 3])]
    runner.answer(drafted)
    assert [item.answer for item in drafted] == [right, right, plain[1].answer]


def test_acceptance_skips_the_token_that_the_verifying_row_gives(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = Item([7, 8, 9], [], [20, 21, 22, 23, 24])
    drafts = [0, 0, 21, 99, 23, 24, 0]  # row t guesses token t + 2: right, wrong, right, right

    def head(hidden: torch.Tensor) -> torch.Tensor:
        rows = torch.tensor(drafts + [0] * (hidden.shape[1] - len(drafts))).clamp(max=SMALL.vocabulary - 1)
        return torch.nn.functional.one_hot(rows, SMALL.vocabulary)[None]

    monkeypatch.setattr(runner.model.lm_head, "forward", head)
    served, anywhere = runner.acceptance([item])
    assert anywhere == 3 / 4
    assert served == 2 / 2  # drafts of tokens 1 (taken, and 2 comes free) and 3 (taken, and 4 comes free)


VERDICTS = [
    (" It is <<2*6=12>>12.\n#### 12\n\n", True, True),
    (" #### 12.", True, True),
    (" #### 1,2", True, True),
    (" It is 12", False, True),
    (" #### 12\nQuestion: 13", True, False),
    (" #### 13", False, False),
    ("", False, False),
]


@pytest.mark.parametrize(("text", "strict", "flexible"), VERDICTS)
def test_filters(text: str, strict: bool, flexible: bool) -> None:
    assert (strict_match(text, 12), flexible_match(text, 12)) == (strict, flexible)
