"""How the programs of this folder take words and end: what is not legal is one line and exit code 2, at once."""

from __future__ import annotations

import math
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from rocm_serve.errors import UserError
from rocm_serve.outputs import check_file

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def at_least(least: int) -> Callable[[str], int]:
    """Return a type of argparse: whole numbers from `least` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise ArgumentTypeError(f"{text}: legal: {least} or more")
        return value

    return number


def seconds(text: str) -> float:
    """Take a time, as a type of argparse; not infinity, and not what is no number."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"{text}: legal: 0 or more seconds")
    return value


def to_write(text: str) -> Path:
    """Take a file that is to be written, as a type of argparse."""
    path = Path(text)
    try:
        check_file("file", path)
    except UserError as error:
        raise ArgumentTypeError(str(error)) from None
    return path


def ended(program: str, main: Callable[[], int]) -> int:
    """Run `main` and return the exit code: its own, or what follows from a wish that cannot be met, or from Ctrl-C."""
    try:
        return main()
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
