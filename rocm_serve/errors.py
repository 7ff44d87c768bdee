"""The error that is the user's to mend. A leaf."""

from __future__ import annotations


class UserError(ValueError):
    """A wish that cannot be met: one line, in the user's words, with the legal values. The CLI exits with code 2."""
