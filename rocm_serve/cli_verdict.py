"""What the commands share whose exit code 1 is a verdict: how they end else, and how they show their progress."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rocm_serve.errors import UserError
from rocm_serve.stop import until_told_to_stop

NO_VERDICT = 2
INTERRUPTED = 130
_LINE_S = 30.0  # between lines of progress where there is no terminal
_FIRST_LINE_S = 5.0

Ticker = Callable[[int, int, int], None]  # how many there are, are wanted, and came in this session


@contextmanager
def verdict_or_2(where: Path, interrupted: Callable[[], None]) -> Iterator[None]:
    """Run a block whose exit code 1 is a verdict, so that nothing else ends in it.

    SIGTERM and Ctrl-C end the block, cleaning up on the way, and then in INTERRUPTED, after `interrupted`. What nobody
    foresaw ends in NO_VERDICT with its traceback. Errors: UserError, also for a file that cannot be written or read;
    `where` is named for one that does not say which.
    """
    finished = False
    with until_told_to_stop():
        try:
            yield
        except (UserError, typer.Exit):
            raise
        except OSError as error:
            raise UserError(f"{error.filename or where}: {error.strerror or error}") from None
        except Exception:
            traceback.print_exc()
            raise typer.Exit(NO_VERDICT) from None
        finished = True
    if not finished:
        interrupted()
        raise typer.Exit(INTERRUPTED)


@contextmanager
def progress_of(console: Console, noun: str) -> Iterator[Ticker]:
    """Show how far it is: a bar on a terminal, else a line now and then."""
    pace = Pace()
    if not console.is_terminal:
        said = [time.monotonic() + _FIRST_LINE_S - _LINE_S, -1.0]

        def line(there: int, wanted: int, new: int) -> None:
            now = time.monotonic()
            rate = pace.rate(new, now)
            if there != said[1] and (now - said[0] >= _LINE_S or there == wanted):
                said[:] = [now, there]
                console.print(progress_line(there, wanted, rate, noun))

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as shown:
        task = shown.add_task(noun, total=None)

        def bar(there: int, wanted: int, new: int) -> None:
            rate = pace.rate(new, time.monotonic())
            shown.update(task, total=wanted, completed=there, description=noun + (f", {rate:.1f}/s" if rate else ""))

        yield bar


class Pace:
    """How fast they come, from the first that came: what comes before it, and what was kept, do not count."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def rate(self, new: int, now: float) -> float:
        """Return how many a second; 0 while nothing can be said."""
        if not new:
            return 0.0
        if self._first is None:
            self._first = (new, now)
        count, since = self._first
        return (new - count) / (now - since) if now > since else 0.0


def progress_line(there: int, wanted: int, rate: float, noun: str = "answers") -> str:
    """Say in one line how many there are, how fast they come and how long the rest will take."""
    line = f"{there} of {wanted} {noun}"
    return f"{line}, {rate:.2f}/s, {(wanted - there) / rate / 60:.1f} min left" if rate else line
