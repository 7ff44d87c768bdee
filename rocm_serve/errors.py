"""What the user did wrong, said in one line."""

from __future__ import annotations


class UserError(ValueError):
    """A wish that cannot be met. The message names what was wrong and what is legal; the CLI exits with 2."""
