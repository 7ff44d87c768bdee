"""Plant a fault in a module of the engine, in this process, and call the tests that must see it as functions.

A faulty module takes the place of the good one in these tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

import rocm_serve.engine
from tests.engine import (
    driver,
    test_client,
    test_core_loop,
    test_drafting,
    test_plan_ahead,
    test_scheduler_drafting,
    test_scheduler_scenarios,
)

ENGINE = Path(rocm_serve.engine.__file__).parent
# From below: a module is run anew with the faulty ones below it.
NAMES = {
    "blocks.py": "Pool",
    "request.py": "Request",
    "holdings.py": "Holdings",
    "planner.py": "Planner",
    "scheduler.py": "Scheduler",
    "drafting.py": "DraftPolicy",
    "core.py": "EngineCore",
    "client.py": "EngineClient",
}
ALONE = ("drafting.py", "client.py")  # run anew for faults of their own only
USERS = (
    driver,
    test_client,
    test_core_loop,
    test_drafting,
    test_plan_ahead,
    test_scheduler_drafting,
    test_scheduler_scenarios,
)
STORIES = 300

Judge = Callable[[], None]
Faults = dict[str, list[tuple[str, str, str]]]  # file -> (as it is, with the fault, what the fault is)


def cases(faults: Faults) -> pytest.MarkDecorator:
    """Parametrise a test by `file, old, new, what`."""
    values = [(file, *fault) for file, some in faults.items() for fault in some]
    return pytest.mark.parametrize(
        ("file", "old", "new", "what"), values, ids=[case[3].replace(" ", "-") for case in values]
    )


def calls_of(module: ModuleType) -> Iterator[Judge]:
    """Yield the tests of a module as calls, one for each set of arguments.

    Those that make up stories of their own are left out: other ones each time, and slow to fail.
    """
    for name, test in list(vars(module).items()):
        made_up = "replays_identically" in name or "rare_states" in name
        if not name.startswith("test_") or made_up or not callable(test):
            continue
        calls: list[Judge] = [test]
        for mark in getattr(test, "pytestmark", []):
            names = (mark.args[0],) if isinstance(mark.args[0], str) else mark.args[0]
            values = [value if len(names) > 1 else (value,) for value in mark.args[1]]
            calls = [partial(call, **dict(zip(names, value, strict=True))) for call in calls for value in values]
        yield from calls


@contextmanager
def planted(file: str, old: str, new: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the modules from the faulty one upwards anew, each with the one below it."""
    files = list(NAMES)
    for one in files[files.index(file) :]:
        if one != file and one in ALONE:
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


def must_be_seen(what: str, judges: Iterable[Judge]) -> None:
    """Call judges until one fails. Errors: AssertionError if none does."""
    for judge in judges:
        try:
            judge()
        except (Exception, pytest.fail.Exception) as seen:
            print(f"{what}: {judge} says {type(seen).__name__}: {seen}"[:600])
            return
    raise AssertionError(f"no test sees: {what}")
