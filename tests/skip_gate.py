"""A pytest plugin: with --allowed-skips FILE, a skipped test that FILE does not name fails the run.

FILE has one fnmatch pattern of node ids a line; text after " # " is the reason. Blank lines and lines of comment are
left out. A pattern that matched nothing is reported but no failure: what is skipped differs between machines.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest


def read_patterns(text: str) -> list[str]:
    """Take the patterns out of the file's text."""
    lines = (line.split(" # ")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--allowed-skips", metavar="FILE", help="fail when a test is skipped that FILE does not name")


def skipped_ids(reporter: pytest.TerminalReporter) -> list[str]:
    return [report.nodeid for report in reporter.stats.get("skipped", [])]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    allowed = session.config.getoption("--allowed-skips")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not allowed or reporter is None or hasattr(session.config, "workerinput"):
        return
    patterns = read_patterns(Path(allowed).read_text(encoding="utf-8"))
    unlisted = [nodeid for nodeid in skipped_ids(reporter) if not any(fnmatchcase(nodeid, p) for p in patterns)]
    session.config.stash[UNLISTED] = (allowed, unlisted)
    if unlisted and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


UNLISTED = pytest.StashKey[tuple[str, list[str]]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    allowed, unlisted = config.stash.get(UNLISTED, ("", []))
    for nodeid in unlisted:
        terminalreporter.write_line(f"skipped, but not named in {allowed}: {nodeid}", red=True)
