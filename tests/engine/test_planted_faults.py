"""Plant one fault at a time in the engine; the tests beside this file must see it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine import test_client, test_core_loop, test_plan_ahead, test_scheduler_scenarios
from tests.engine.driver import drive
from tests.engine.planting import ENGINE, STORIES, Judge, calls_of, cases, must_be_seen, planted
from tests.engine.test_scheduler import crowded_story, judge_answers

# file -> (as it is, with the fault, what the fault is)
FAULTS = {
    "holdings.py": [
        ("        request.pages.clear()\n", "", "pages kept after release"),
        ("victim.planned = victim.accepted = 0", "victim.accepted = 0", "a victim keeps its progress"),
        ("self.waiting.appendleft(victim)", "self.waiting.append(victim)", "a victim queues last"),
        (
            "            del request.awaits.members[request.rid]\n",
            "            pass\n",
            "groups count the gone",
        ),
        ("        if request.mentioned:\n", "        if True:\n", "release of the unmentioned"),
        ("            self.released.append(request.rid)\n", "            pass\n", "never released"),
    ],
    "planner.py": [
        (
            "next(reversed(self._held.running.values()))",
            "next(iter(self._held.running.values()))",
            "the oldest is the victim",
        ),
        ("if request.in_flight or pages_for", "if pages_for", "a victim resumes too early"),
        ("            spare -= self.growth + max(", "            spare -= max(", "no page of growth"),
        ("spare -= pages_for(request.known, size) + self.growth", "pass", "pages promised twice"),
        ("return max(0, end // self.cut * self.cut - request.planned)", "return budget", "cut anywhere"),
        ("min(GDN_CHUNK, limits.chunked_prefill_size)", "GDN_CHUNK", "cuts wider than the budget"),
        ("GDN_CHUNK = 64", "GDN_CHUNK = 32", "cuts in the middle of a chunk"),
        (
            "if request.planned >= request.prompt_len:\n            return min",
            "if request.known > request.prompt_len:\n            return min",
            "prompt and output rows in one Work",
        ),
        ("recurrent = start >= request.prompt_len", "recurrent = bool(request.out)", "wrong form"),
        ("samples = end >= request.known and", "samples = end >= request.prompt_len and", "samples early"),
        ("        request.told = len(request.out)\n", "", "tokens told twice"),
        ("                sketch.budget -= rows\n", "", "running prompts ignore the budget"),
        ("            sketch.budget -= rows\n            spare", "            spare", "new ones do"),
        ("(*sketch.recurrent, *sketch.prompts)", "(*sketch.prompts, *sketch.recurrent)", "prompts first"),
        ("sum(count > base for", "sum(count < base for", "groups uneven"),
        ("        self._held.released.clear()\n", "", "released again and again"),
        ("request.planned == request.known < request.longest", "True", "a row ahead behind two, or behind the length"),
        ("request.known < request.longest", "request.known", "a row ahead behind the length"),
        (" if record.plan.seq <= last]", "]", "a row ahead of a near plan"),
        ("first is None or first.hosted", "first is None", "a near row ahead of what the host draws"),
        ("self.stages if hosted else self.depth", "self.depth", "a plan more behind the host"),
        ("divmod(len(mine) + sum(others), self.stages)", "divmod(len(mine) + sum(others), 1)", "no groups"),
        ("        sketch.record.hosted |= request.hosted\n", "", "planned ahead of the host"),
        ("pending = end > request.known", "pending = False", "a row ahead reads an old token"),
        ("if len(self._held.in_flight) >= (", "if self._held.in_flight or 0 >= (", "one plan in flight"),
    ],
    "scheduler.py": [
        ("elif request.slot and request.awaits", "elif request.awaits", "a waiting victim is ready"),
        (" and request.awaits is None:\n", ":\n", "ready while a second token is drawn"),
        ("if request.awaits is record:", "if True:", "a second token is forgotten"),
        ("before = max(work.start, request.scored)", "before = work.start", "scores counted twice"),
        ("request.prompt_len - 1))", "request.prompt_len))", "one score too many"),
    ],
    "request.py": [
        ("count > request.params.min_tokens", "count > 0", "min_tokens ignored"),
        (" or request.prompt_len + count >= max_model_len", "", "context overrun"),
        ("min(prompt_len + params.max_tokens, max_model_len) - 1", "prompt_len", "too large let in"),
        ("min(params.max_tokens, 1)", "0", "a full prompt let in"),
    ],
    "blocks.py": [
        ("self._free.extend(ids)", "self._free.extend(list(ids)[1:])", "a page lost"),
        (
            "self._free.extend(ids)",
            "import random; ids = list(ids); random.shuffle(ids); self._free.extend(ids)",
            "plans differ from run to run",
        ),
    ],
    "core.py": [
        ("IDLE_WAIT_S if resting else 0.0", "0.0", "the idle loop spins"),
        ("self._link.send(CoreFailed(sentence))", "pass", "the server is not told"),
        (
            "        room = len(scheduler.in_flight)",
            "        if not scheduler.in_flight:\n            return\n        room = len(scheduler.in_flight)",
            "a worker dead while idle",
        ),
        ("            self._outputs.clear()\n", "", "outputs sent again"),
        (" and not self._outputs\n", "\n", "the last outputs wait for the sleep"),
        ("if self._draining:\n            error", "if False:\n            error", "drain takes new ones"),
    ],
    "client.py": [
        (
            "            if not over and request_id not in self._complete:\n",
            "            if False:\n",
            "closing does not abort",
        ),
        ("            del self._open[request_id]\n", "            pass\n", "requests stay open"),
        (
            '        if self.state != "dead":\n            self._die(reason)',
            "        self._die(reason)",
            "the last reason wins",
        ),
    ],
}


def crowded_stories() -> None:
    for seed in range(STORIES):
        for ahead in (False, True):
            story = crowded_story(seed, ahead)
            judge_answers(story, drive(story))


def judges(file: str) -> Iterator[Judge]:
    if file == "client.py":
        yield from calls_of(test_client)
        return
    if file == "core.py":
        yield from calls_of(test_core_loop)
        return
    yield from calls_of(test_scheduler_scenarios)
    yield from calls_of(test_plan_ahead)
    yield crowded_stories


@cases(FAULTS)
def test_a_planted_fault_is_seen(file: str, old: str, new: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with planted(file, old, new, monkeypatch):
        must_be_seen(what, judges(file))


@pytest.mark.parametrize("file", ["blocks.py", "core.py", "client.py"])
def test_planting_nothing_breaks_nothing(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = (ENGINE / file).read_text().splitlines()[0]
    with planted(file, first, first, monkeypatch):
        for judge in judges(file):
            if judge is not crowded_stories:
                judge()
