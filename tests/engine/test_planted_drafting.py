"""Plant one fault of drafting at a time in the engine, in this process: the tests beside this file must see it.

A faulty module takes the place of the good one in these tests, which are then called as functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

import rocm_serve.engine
from tests.engine import driver, test_core_loop, test_drafting, test_scheduler_drafting, test_scheduler_scenarios
from tests.engine.driver import drive
from tests.engine.test_scheduler import judge_answers

ENGINE = Path(rocm_serve.engine.__file__).parent
NAMES = {"request.py": "Request", "scheduler.py": "Scheduler", "drafting.py": "DraftPolicy", "core.py": "EngineCore"}
USERS = (driver, test_core_loop, test_drafting, test_scheduler_drafting, test_scheduler_scenarios)
STORIES = 300

# file -> (as it is, with the fault, what the fault is)
FAULTS = {
    "scheduler.py": [
        ("            request.accepted,\n", "            request.accepted + 1,\n", "one more than the accepted count"),
        (
            "            request.accepted,\n",
            "            (request.accepted and self.limits.draft_tokens + 1),\n",
            "K + 1 instead of the accepted count",
        ),
        ("            request.accepted,\n", "            0,\n", "the accepted count is not told"),
        ("            request.planned += outcome.accepted\n", "", "accepted rows computed again"),
        ("victim.planned = victim.accepted = 0", "victim.planned = 0", "accepted rows taken into a cleared state"),
        ("        victim.drafts = ()\n", "", "drafts kept over preemption"),
        ("        request.accepted, request.drafts = 0, ()\n", "        request.accepted = 0\n", "old drafts again"),
        ("        request.accepted, request.drafts = 0, ()\n", "        request.drafts = ()\n", "accepted told twice"),
        (
            "        elif request.slot and request.awaits is None:\n            request.planned",
            "        else:\n            request.planned",
            "a victim drafts",
        ),
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
        ("outcome.logprobs[: len(tokens)]", "outcome.logprobs", "log-probs behind the end"),
        (
            "Output(request.request_id, tokens, outcome",
            "Output(request.request_id, outcome.tokens, outcome",
            "tokens behind the end",
        ),
        ('["generation_tokens"] += tokens', '["generation_tokens"] += accepted + 1', "tokens behind the end counted"),
        ("position < accepted", "position <= accepted", "one accepted too many counted"),
        ("        check_outcome(request, work, outcome)\n", "", "results are believed"),
        ("pages_for(1 + 2 * limits.draft_tokens, limits.page_size)", "1", "no room to grow by drafts"),
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
CASES = [(file, *fault) for file, faults in FAULTS.items() for fault in faults]


def crowded_stories() -> None:
    for seed in range(STORIES):
        story = test_scheduler_drafting.crowded_drafting_story(seed)
        judge_answers(story, drive(story))


def made_up(name: str) -> bool:
    """Whether a test makes up stories of its own: other ones each time, and slow to fail."""
    return "replays_identically" in name or "rare_states" in name


def calls_of(module: ModuleType) -> Iterator[Callable[[], None]]:
    """Yield the tests of a module as calls, one for each set of arguments."""
    for name, test in list(vars(module).items()):
        if not name.startswith("test_") or made_up(name) or not callable(test):
            continue
        calls: list[Callable[[], None]] = [test]
        for mark in getattr(test, "pytestmark", []):
            names = (mark.args[0],) if isinstance(mark.args[0], str) else mark.args[0]
            values = [value if len(names) > 1 else (value,) for value in mark.args[1]]
            calls = [partial(call, **dict(zip(names, value, strict=True))) for call in calls for value in values]
        yield from calls


def judges(file: str) -> Iterator[Callable[[], None]]:
    if file in ("scheduler.py", "request.py"):
        yield from calls_of(test_scheduler_drafting)
        yield crowded_stories
    yield from calls_of(test_drafting if file == "drafting.py" else test_core_loop)


@contextmanager
def planted(file: str, old: str, new: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the modules from the faulty one upwards anew, each with the one below it."""
    files = list(NAMES)
    first = files.index(file) if file != "drafting.py" else 2
    for one in files[first:]:
        if file in ("request.py", "scheduler.py") and one == "drafting.py":
            continue
        text = (ENGINE / one).read_text()
        if one == file:
            assert text.count(old) == 1, f"{file} has changed: plant {old!r} anew"
            text = text.replace(old, new)
        name = f"rocm_serve.engine.{one[:-3]}"
        module = ModuleType(name)
        patch.setitem(sys.modules, name, module)
        exec(compile(text, f"{one} with a fault", "exec"), vars(module))
        for user in USERS:
            if hasattr(user, NAMES[one]):
                patch.setattr(user, NAMES[one], getattr(module, NAMES[one]))
    yield


@pytest.mark.parametrize(("file", "old", "new", "what"), CASES, ids=[case[3].replace(" ", "-") for case in CASES])
def test_a_planted_fault_of_drafting_is_seen(
    file: str, old: str, new: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with planted(file, old, new, monkeypatch):
        for judge in judges(file):
            try:
                judge()
            except (Exception, pytest.fail.Exception) as seen:
                print(f"{what}: {judge} says {type(seen).__name__}: {seen}"[:600])
                return
    raise AssertionError(f"no test sees: {what}")


@pytest.mark.parametrize("file", ["request.py", "drafting.py"])
def test_planting_nothing_breaks_nothing(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = (ENGINE / file).read_text().splitlines()[0]
    with planted(file, first, first, monkeypatch):
        for judge in judges(file):
            if judge is not crowded_stories:
                judge()
