"""Plant one fault at a time in a copy of the engine; the tests beside this file must see it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCHEDULER = ("test_scheduler_scenarios.py", "test_plan_ahead.py", "test_scheduler.py")
CORE = ("test_core_loop.py", "test_core.py")
TESTS = {"core.py": CORE, "client.py": CORE}

# file -> (as it is, with the fault, what the fault is)
FAULTS = {
    "scheduler.py": [
        ("        request.pages.clear()\n", "", "pages kept after release"),
        ("victim.planned = victim.accepted = 0", "victim.accepted = 0", "a victim keeps its progress"),
        ("self.waiting.appendleft(victim)", "self.waiting.append(victim)", "a victim queues last"),
        ("next(reversed(self.running.values()))", "next(iter(self.running.values()))", "the oldest is the victim"),
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
        (
            "            del request.awaits.members[request.rid]\n",
            "            pass\n",
            "groups count the gone",
        ),
        ("        self._released.clear()\n", "", "released again and again"),
        ("        if request.mentioned:\n", "        if True:\n", "release of the unmentioned"),
        ("            self._released.append(request.rid)\n", "            pass\n", "never released"),
        ("elif request.slot and request.awaits", "elif request.awaits", "a waiting victim is ready"),
        (" and request.awaits is None:\n", ":\n", "ready while a second token is drawn"),
        ("if request.awaits is record:", "if True:", "a second token is forgotten"),
        ("request.planned == request.known < request.longest", "True", "a row ahead behind two, or behind the length"),
        ("request.known < request.longest", "request.known", "a row ahead behind the length"),
        (" if record.plan.seq <= last]", "]", "a row ahead of a near plan"),
        ("first is None or first.hosted", "first is None", "a near row ahead of what the host draws"),
        ("self.stages if hosted else self.depth", "self.depth", "a plan more behind the host"),
        ("divmod(len(mine) + sum(others), self.stages)", "divmod(len(mine) + sum(others), 1)", "no groups"),
        ("        sketch.record.hosted |= request.hosted\n", "", "planned ahead of the host"),
        ("pending = end > request.known", "pending = False", "a row ahead reads an old token"),
        ("before = max(work.start, request.scored)", "before = work.start", "scores counted twice"),
        ("request.prompt_len - 1))", "request.prompt_len))", "one score too many"),
        ("if len(self.in_flight) >= (", "if self.in_flight or 0 >= (", "one plan in flight"),
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

CASES = [(file, *fault) for file, faults in FAULTS.items() for fault in faults]


def copy_of_engine(root: Path) -> Path:
    """Copy what these tests import, compiled files too; return the engine's folder."""
    leave = shutil.ignore_patterns("*.pyc.*", "test_planted_faults.py")  # the former: files that are being written
    shutil.copytree(ROOT / "rocm_serve", root / "rocm_serve", ignore=leave)
    shutil.copytree(ROOT / "tests" / "engine", root / "tests" / "engine", ignore=leave)
    return root / "rocm_serve" / "engine"


def run_tests(root: Path, files: tuple[str, ...]) -> tuple[int, str]:
    """Return pytest's exit code (0 all passed, 1 a test failed) and the end of what it printed."""
    options = ["-x", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
    # A base folder of its own: forty runs side by side would number, and clear away, each other's.
    alone = ["-c", os.devnull, "--rootdir", str(root), f"--basetemp={tempfile.mkdtemp(prefix='planted')}"]
    paths = [str(root / "tests" / "engine" / file) for file in files]
    env = {**os.environ, "PYTHONPATH": str(root), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # half of a run is its start
    command = [sys.executable, "-m", "pytest", *options, *alone, *paths]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=240, check=False)
    shutil.rmtree(alone[-1].partition("=")[2], ignore_errors=True)
    return done.returncode, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.slow
def test_the_copy_passes_without_a_fault(tmp_path: Path) -> None:
    copy_of_engine(tmp_path)
    code, printed = run_tests(tmp_path, (*SCHEDULER[:2], *CORE))
    assert code == 0, printed


@pytest.mark.slow
@pytest.mark.parametrize(("file", "old", "new", "what"), CASES, ids=[case[3].replace(" ", "-") for case in CASES])
def test_a_planted_fault_is_seen(file: str, old: str, new: str, what: str, tmp_path: Path) -> None:
    path = copy_of_engine(tmp_path) / file
    text = path.read_text()
    assert text.count(old) == 1, f"{file} has changed: plant {what!r} anew"
    path.write_text(text.replace(old, new))
    code, printed = run_tests(tmp_path, TESTS.get(file, SCHEDULER))
    assert code == 1, f"no test sees: {what}\n{printed}"
