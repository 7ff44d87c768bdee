"""Fixtures and plugins for every test."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from rocm_serve.config.load import set_library_defaults

set_library_defaults()  # before torch is loaded, as the server does
settings.register_profile("no-clock", deadline=None)  # a busy machine is no failure
settings.load_profile("no-clock")

pytest_plugins = ["pytester", "tests.made", "tests.skip_gate", "tests.spread"]

_TESTS = Path(__file__).parent
# Processes, signals and deadlines of seconds: what another process on the machine does can fail these, once.
_TIMED = ("two_hosts", "e2e", "test_supervisor.py", "test_control.py", "test_doors.py")
_LONGEST = ("two_hosts", "e2e")  # come first: workers that share out files end together when the last ones are short


def _is_in(item: pytest.Item, names: tuple[str, ...]) -> bool:
    return item.path.is_relative_to(_TESTS) and item.path.relative_to(_TESTS).parts[0] in names


def _is_timed(item: pytest.Item) -> bool:
    return _is_in(item, _TIMED) or item.get_closest_marker("slow") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--by-hand", action="store_true", help="run tests marked by_hand, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked by_hand unless asked for; put the longest first; give some a second try.

    Those of several processes, and slow ones. The summary names each; failing twice fails.
    """
    if not config.getoption("--by-hand"):
        left = [item for item in items if item.get_closest_marker("by_hand")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    items.sort(key=lambda item: not _is_in(item, _LONGEST))
    if not config.pluginmanager.hasplugin("rerunfailures"):  # `make test-gpu` runs with what an image holds
        return
    for item in items:
        if _is_timed(item):
            item.add_marker(pytest.mark.flaky(reruns=1))
