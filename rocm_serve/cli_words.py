"""Lets a command of the command line take the flags of SGLang and vLLM beside ours."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from rocm_serve.config import load
from rocm_serve.config.spelling import CommandLine, in_our_words
from rocm_serve.config.whereabouts import whereabouts
from rocm_serve.doors import tell
from rocm_serve.errors import UserError

EPILOG = (
    "Flags of SGLang and vLLM are taken too: as another name, with a line that says what they mean here, or refused"
    " with what replaces them; docs/coming_from.md lists them."
)
_META = "rocm_serve.command_line"
_BEGUN = "rocm_serve.begun"
_UsageError: type[Any] = typer.BadParameter.__bases__[0]  # click's, which newer typers carry inside
_EXIT_USER_ERROR = 2


class AnySpelling(TyperCommand):
    """A command whose arguments are brought into our words before they are parsed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate, then parse. Errors: UserError."""
        known = {flag: not param.is_flag for param in self.params for flag in param.opts if hasattr(param, "is_flag")}
        line = ctx.meta[_META] = in_our_words(args, known, command=ctx.info_name)
        return super().parse_args(ctx, line.words)

    def invoke(self, ctx: Any) -> Any:
        """Run; an error about one of our flags also names the one that was given."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise UserError(_line(ctx).in_their_words(str(error))) from None


class ServeCommand(AnySpelling):
    """The command of one node of several: whatever it is refused for, the others are told and do not wait for it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate and parse. Errors: UserError, click's UsageError, or SystemExit when the others were told."""
        words = ctx.meta[_META + ".words"] = list(args)
        try:
            return super().parse_args(ctx, args)
        except UserError as error:
            _tell(words, str(error))
            raise
        except _UsageError as error:
            _tell(words, error.format_message(), error.show)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run. What is refused after `has_begun` is told by the launch itself."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            if _BEGUN not in ctx.meta:
                _tell(ctx.meta[_META + ".words"], str(error))
            raise


def has_begun(ctx: typer.Context) -> None:
    """Note that the launch knows its place, and tells the others itself."""
    ctx.meta[_BEGUN] = True


def _tell(args: list[str], why: str, show: Callable[[], None] | None = None) -> None:
    """Say why here and on the other nodes, and end; return when the words do not say that there are any."""
    place = whereabouts(args, load.environment())
    if place is None or place.init_addr is None:
        return
    if show is None:
        _echo(f"rocm-serve: {why}")
    else:
        show()
    tell("node", place.member, place.members, place.init_addr, why, _echo)
    raise SystemExit(_EXIT_USER_ERROR) from None


def _echo(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def notes_of(ctx: typer.Context) -> tuple[str, ...]:
    """Return a line about each flag that was taken and has no effect."""
    return tuple(_line(ctx).notes)


def _line(ctx: Any) -> CommandLine:
    line: CommandLine = ctx.meta[_META]
    return line
