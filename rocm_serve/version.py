"""The one place that holds the version; pyproject.toml and `rocm-serve version` read it, CHANGELOG.md is checked."""

from __future__ import annotations

VERSION = "0.1.0"
