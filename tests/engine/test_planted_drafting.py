"""Plant one fault of drafting at a time in the engine: the tests beside this file must see it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine import test_core_loop, test_drafting, test_scheduler_drafting
from tests.engine.driver import drive
from tests.engine.planting import ENGINE, STORIES, Judge, calls_of, cases, must_be_seen, planted
from tests.engine.test_scheduler import judge_answers

# file -> (as it is, with the fault, what the fault is)
FAULTS = {
    "holdings.py": [
        ("victim.planned = victim.accepted = 0", "victim.planned = 0", "accepted rows taken into a cleared state"),
        ("        victim.drafts = ()\n", "", "drafts kept over preemption"),
    ],
    "planner.py": [
        ("            request.accepted,\n", "            request.accepted + 1,\n", "one more than the accepted count"),
        (
            "            request.accepted,\n",
            "            (request.accepted and self.limits.draft_tokens + 1),\n",
            "K + 1 instead of the accepted count",
        ),
        ("            request.accepted,\n", "            0,\n", "the accepted count is not told"),
        ("        request.accepted, request.drafts = 0, ()\n", "        request.accepted = 0\n", "old drafts again"),
        ("        request.accepted, request.drafts = 0, ()\n", "        request.drafts = ()\n", "accepted told twice"),
        ("pages_for(last + proposals, size)", "pages_for(last, size)", "no look-ahead page"),
        ("pages_for(last + proposals, size)", "pages_for(end, size)", "no page for drafts"),
        ("room - len(drafts), request.longest - last - 1)", "room - len(drafts))", "drafts beyond the end"),
        ("request.longest - last - 1)", "request.longest - last)", "one draft beyond the end"),
        ("self.limits.draft_tokens, room - len(drafts), ", "self.limits.draft_tokens, ", "pages that are not there"),
        ("drafts = request.drafts[:room]", "drafts = request.drafts", "drafts without a page"),
        (" if samples and sketch.drafting else", " if samples else", "the switch is not heard"),
        (
            "                placed.append((request, rows, pages))\n",
            "                self._emit(request, rows, pages, sketch)\n",
            "drafts before known rows",
        ),
        ("            rows + len(drafts),\n", "            rows,\n", "drafts are no rows"),
        ("pages_for(1 + 2 * limits.draft_tokens, limits.page_size)", "1", "no room to grow by drafts"),
    ],
    "scheduler.py": [
        ("            request.planned += outcome.accepted\n", "", "accepted rows computed again"),
        (
            "        elif request.slot and request.awaits is None:\n            request.planned",
            "        else:\n            request.planned",
            "a victim drafts",
        ),
        ("outcome.logprobs[: len(tokens)]", "outcome.logprobs", "log-probs behind the end"),
        (
            "Output(request.request_id, tokens, outcome",
            "Output(request.request_id, outcome.tokens, outcome",
            "tokens behind the end",
        ),
        ('["generation_tokens"] += tokens', '["generation_tokens"] += accepted + 1', "tokens behind the end counted"),
        ("position < accepted", "position <= accepted", "one accepted too many counted"),
        ("        check_outcome(request, work, outcome)\n", "", "results are believed"),
    ],
    "request.py": [
        (
            "        if reason is not None:\n            return tokens[:count], reason\n    return tokens, None",
            "    return tokens, reason",
            "a stop inside the run ignored",
        ),
        ("return tokens[:count], reason", "return tokens[: count - 1], reason", "the stop token dropped"),
    ],
    "drafting.py": [
        ("if plan.streak >= 2 * self._depth and", "if plan.streak > self._depth and", "a mixed pipeline measured"),
        ("if decodes else 0\n", "\n", "prompts measured"),
        ("median(self._seconds)", "fmean(self._seconds)", "a compiler counts"),
        ("self._run * (PERIOD - 1)", "self._run * PERIOD * 4", "the share is smaller"),
        ("self._trial = not size.speed.drafting", "self._trial = False", "what stopped stays so"),
        ("if adaptive and min", "if min", "mtp stops"),
        (">= LEAST", ">= 1", "judged by a single step"),
        ("net >= LOSES if", "net > GAINS if", "stops without a loss"),
        ("else net > GAINS", "else net >= LOSES", "goes on without a gain"),
        (" or not self._trial_patience", "", "a run without end"),
        ("(max(requests, 1) - 1).bit_length()", "requests.bit_length()", "sizes cut elsewhere"),
        ("self._run = 2 * depth + 2", "self._run = 4", "a run too short for the pipeline"),
        ("same = (newest.size, newest.drafting)", "same = (size.speed.requests, newest.drafting)", "sizes mixed"),
    ],
    "core.py": [
        ("plan = scheduler.schedule(drafting)", "plan = scheduler.schedule()", "the policy is not asked"),
        ("adaptive=self._adaptive)", "adaptive=False)", "auto is mtp"),
        ("self._policy.speeds() if self._policy is not None else ()", "", "speeds not told"),
    ],
}


def crowded_stories() -> None:
    for seed in range(STORIES):
        story = test_scheduler_drafting.crowded_drafting_story(seed)
        judge_answers(story, drive(story))


def judges(file: str) -> Iterator[Judge]:
    if file not in ("drafting.py", "core.py"):
        yield from calls_of(test_scheduler_drafting)
        yield crowded_stories
    yield from calls_of(test_drafting if file == "drafting.py" else test_core_loop)


@cases(FAULTS)
def test_a_planted_fault_of_drafting_is_seen(
    file: str, old: str, new: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with planted(file, old, new, monkeypatch):
        must_be_seen(what, judges(file))


@pytest.mark.parametrize("file", ["request.py", "drafting.py"])
def test_planting_nothing_breaks_nothing(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = (ENGINE / file).read_text().splitlines()[0]
    with planted(file, first, first, monkeypatch):
        for judge in judges(file):
            if judge is not crowded_stories:
                judge()
