"""Fixtures and plugins for every test."""

from __future__ import annotations

pytest_plugins = ["pytester", "tests.made", "tests.skip_gate"]
