"""What an earlier run found, drawn or written out again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from rocm_serve.errors import UserError
from rocm_serve.outputs import check_file, write_file

R = TypeVar("R")


def show(
    program: str,
    part: str,
    results: Path | None,
    plot: Path | None,
    kind: type[R],
    drawn: Callable[[R], str],
    written: Callable[[R], list[str]],
) -> int:
    """Write the picture of `results` to `plot` (part "plot"), or print its tables. Returns the exit code."""
    if results is None or (part == "plot" and plot is None):
        print(f"{program}: plot and table read --json FILE, and plot writes --plot FILE", file=sys.stderr)
        return 2
    try:
        run = msgspec.json.decode(results.read_bytes(), type=kind)
        if part == "plot":
            assert plot is not None
            check_file("--plot", plot)
            write_file("--plot", plot, drawn(run).encode())
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{program}: --json {results}: {error.strerror}; legal: a file that this program wrote", file=sys.stderr)
        return 2
    except (msgspec.DecodeError, RecursionError) as error:
        print(f"{program}: --json {results}: {error}", file=sys.stderr)
        return 2
    if part != "plot":
        print("\n".join(written(run)))
    return 0
