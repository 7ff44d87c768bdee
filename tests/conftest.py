"""Fixtures and plugins for every test."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no-clock", deadline=None)  # a busy machine is no failure
settings.load_profile("no-clock")

pytest_plugins = ["pytester", "tests.made", "tests.skip_gate"]
