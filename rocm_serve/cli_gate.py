"""The command `gate`: whether a running server answers as well as its reference."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

from rocm_serve.cli_verdict import progress_of, verdict_or_2
from rocm_serve.config import load
from rocm_serve.diagnostics.gate import flow, page, statistics
from rocm_serve.diagnostics.gate.lm_eval import Client
from rocm_serve.diagnostics.gate.protocol import Task
from rocm_serve.diagnostics.gate.reference import read_reference
from rocm_serve.diagnostics.gate.verdict import Outcome
from rocm_serve.errors import UserError

EXIT_CODES = {"pass": 0, "fail": 1, "invalid": 2}

app = typer.Typer(name="gate", no_args_is_help=True, help="Gate a running server on accuracy.")


@app.callback()
def _group() -> None:
    """Gate a running server on accuracy."""


@app.command()
def gsm8k(
    base_url: Annotated[str, typer.Option(metavar="URL", help="The running server, as http://HOST:PORT.")],
    reference: Annotated[Path, typer.Option(metavar="FILE", help="Its reference; brings the protocol.")],
    task: Annotated[
        str | None, typer.Option(metavar="{gsm8k,gsm8k-synth}", help="Else the reference's.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="train.jsonl and test.jsonl; else gsm8k-synth is made.", show_default=False),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="The first N questions only.", show_default=False)] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="For results; else ./gate-TASK.", show_default=False)
    ] = None,
    num_concurrent: Annotated[int, typer.Option(help="Requests in flight.")] = 64,
    max_retries: Annotated[int, typer.Option(help="Times a request is sent before lm-eval gives up.")] = 5,
    timeout: Annotated[int, typer.Option(help="Seconds that an answer may take.")] = 3600,
    alpha: Annotated[float, typer.Option(help="False alarms of each test.")] = statistics.ALPHA,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not continue an interrupted run.")] = False,
    lm_eval_python: Annotated[
        Path | None, typer.Option(metavar="PYTHON", help="Else the one that runs this.", show_default=False)
    ] = None,
) -> None:
    """Run lm-eval's gsm8k against a server and judge the answers against a reference.

    Exit code 0: pass; 1: fail; 2: the run says nothing (or a wish cannot be met, or this program failed); 130:
    interrupted, and the same command continues.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False)
    begun: list[Path] = []

    def interrupted() -> None:
        kept = f"the answers so far are in {begun[0]}" if begun else "nothing was asked yet"
        sys.stderr.write(f"interrupted: {kept}; the same command continues\n")

    with verdict_or_2(out or Path(), interrupted):
        given = read_reference(reference)
        wish = flow.Wish(
            base_url=base_url,
            reference=given,
            out=(out or Path(f"gate-{given.header.protocol.task}")).resolve(),
            task=_task(task),
            data=data,
            limit=limit,
            client=_client(num_concurrent, max_retries, timeout),
            python=str(lm_eval_python or sys.executable),
            alpha=_share(alpha),
            fresh=fresh,
        )
        with flow.prepared(wish, load.environment()) as gate:
            begun.append(gate.folder)
            outcome = _judge(gate, console)
    raise typer.Exit(EXIT_CODES[outcome])


def _judge(gate: flow.Gate, console: Console) -> Outcome:
    """Run a gate, leave its report and say all of it."""
    for line in (f"protocol: {gate.protocol.sentence()}", *gate.notes):
        console.print(line)
    with progress_of(console, "answers") as progress:
        gated = gate.run(progress, console.print)
    paths = page.write(gated)
    for kind, sentence in page.sentences(gated.verdict, gated.notes):
        console.print(f"{kind:<8} {sentence}")
    console.print(f"result: {paths[1]}, page: {paths[0]}")
    console.print(page.OUTCOMES[gated.verdict.outcome])
    return gated.verdict.outcome


def _task(name: str | None) -> Task | None:
    for task in get_args(Task):
        if task == name:
            return task  # type: ignore[no-any-return]
    if name is None:
        return None
    raise UserError(f"--task {name}: legal: {', '.join(get_args(Task))}")


def _client(num_concurrent: int, max_retries: int, timeout: int) -> Client:
    for flag, value in (
        ("num-concurrent", num_concurrent),
        ("max-retries", max_retries),
        ("timeout", timeout),
    ):
        if value < 1:
            raise UserError(f"--{flag} {value}: legal: 1 or more")
    return Client(num_concurrent, max_retries, timeout)


def _share(alpha: float) -> float:
    if not 0 < alpha < 0.5:
        raise UserError(f"--alpha {alpha:g}: legal: above 0, below 0.5")
    return alpha
