"""The command line. Flags of `serve` come from config/schema.py; what the commands do is in compose.py."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rocm_serve import cli_doctor, cli_experts, cli_gate, cli_parity, cli_plan, cli_preflight, cli_report, cli_tune
from rocm_serve.cli_flags import with_flags
from rocm_serve.cli_words import EPILOG, AnySpelling, ServeCommand, has_begun, notes_of
from rocm_serve.config import load
from rocm_serve.errors import UserError
from rocm_serve.stop import end, until_told_to_stop
from rocm_serve.version import VERSION

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="rocm-serve",
    help="Serve Qwen3.8 and its Qwen3.5-family siblings behind an OpenAI endpoint.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command(cls=ServeCommand, epilog=EPILOG)
@with_flags
def serve(ctx: typer.Context, config: Path | None, **flags: Any) -> None:
    """Serve a checkpoint over HTTP until SIGTERM or Ctrl-C."""
    given = {name: value for name, value in flags.items() if value is not None}
    if "op" in given:
        given["op"] = load.parse_ops(given["op"])
    code = 0
    with until_told_to_stop():
        wishes = load.load(given, config, load.environment())
        from rocm_serve import compose

        place = compose.place_of(wishes)
        has_begun(ctx)
        code = compose.serve(wishes, place, notes_of(ctx))
    raise typer.Exit(code)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        _say(f"rocm-serve {VERSION}")
        raise typer.Exit


app.command(cls=AnySpelling, epilog=EPILOG)(cli_plan.plan)
app.command()(cli_report.report)
app.command()(cli_preflight.preflight)
app.command()(cli_doctor.doctor)
app.command()(cli_experts.experts)
app.command()(cli_parity.parity)
app.command()(cli_tune.tune)
app.add_typer(cli_gate.app)


@app.command()
def make_checkpoint(
    layout: Annotated[str, typer.Option(help="text-fp8, text-bf16, vl-fp8 or dense, as published.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to.")],
    mtp: Annotated[str, typer.Option(help="Format of the draft layer: fp8, bf16 or none.")] = "bf16",
    seed: Annotated[int, typer.Option(help="The same seed writes the same bytes.")] = 0,
    dims: Annotated[str, typer.Option(help="default, or narrow: refused at --tp 2, for tests.")] = "default",
) -> None:
    """Write a small random checkpoint in a published layout."""
    from rocm_serve.checkpoint.synthetic import make_checkpoint as write

    path = write(out, layout, mtp, seed, dims=dims)
    size = sum(file.stat().st_size for file in path.iterdir())
    _say(f"{path}: {layout}, mtp {mtp}, seed {seed}, {size / 1e6:.1f} MB")


@app.command()
def version() -> None:
    """Print the version."""
    _say(f"rocm-serve {VERSION}")


def _say(line: str) -> None:
    Console(soft_wrap=True, highlight=False, markup=False).print(line)


def main() -> None:
    """Run the command line. A wish that cannot be met is one line and exit code 2, never a traceback."""
    try:
        app()
    except SystemExit as ended:
        end(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    except UserError as error:
        sys.stderr.write(f"rocm-serve: {error}\n")
        end(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        end(EXIT_INTERRUPTED)
    except Exception:
        traceback.print_exc()
        end(EXIT_FAILED)
