"""The command `tune`: the best tiles of this machine's GPU for a model's shapes."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rocm_serve.config import load
from rocm_serve.errors import UserError
from rocm_serve.ops.tiles import read_table
from rocm_serve.outputs import check_file, check_folder
from rocm_serve.platform.gpus import gpu_of

if TYPE_CHECKING:
    from rocm_serve.tuning.command import Request


def tune(
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of a checkpoint: its shapes.", show_default=False)
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="{q35tp1,q38tp8}", help="A published shape, in its place.", show_default=False)
    ] = None,
    tp: Annotated[int, typer.Option(help="As for serve: shapes are those of one rank.")] = 1,
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows of a decode step, above 256 of a prompt; several times.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Calls to tune, as experts or attention.")] = None,
    arch: Annotated[
        str | None, typer.Option(help="With --dry-run: a card that is not here.", show_default=False)
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="{mi300x,mi308x,mi325x,mi355x,h200}", help="The same, by its name.", show_default=False),
    ] = None,
    op: Annotated[list[str] | None, typer.Option("--op", metavar="OP=PROVIDER", help="As for serve.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Table to extend; by default this installation's.")
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Everything that was tried, as JSON.")] = None,
    budget_s: Annotated[float, typer.Option(help="Begin nothing after so many seconds.")] = 1e9,
    jobs: Annotated[int | None, typer.Option(help="Processes that compile; by default one a core.")] = None,
    seed: Annotated[int, typer.Option(help="Of the operands.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be tried; needs no GPU.")] = False,
) -> None:
    """Time tiles of Triton kernels on this GPU, judge each, and keep those that beat the rule.

    Where nothing was tuned a rule chooses, and all works. Winners are read at the next start.
    """
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs {jobs}: legal: 1 or more")
    if not 0 <= budget_s < math.inf:
        raise UserError(f"--budget-s {budget_s:g}: legal: 0 or more seconds")
    arch = _arch(arch, gpu)
    if arch is not None and not dry_run:
        raise UserError("--gpu and --arch are for --dry-run: tiles are timed on the GPU that is here")
    _check_files(out, report, dry_run)
    request: Request = importlib.import_module("rocm_serve.tuning.command").Request(
        model=model,
        shape=shape,
        tp=tp,
        rows=tuple(rows or ()),
        only=tuple(only or ()),
        arch=arch,
        op=load.parse_ops(op or []),
        out=out,
        report=report,
        budget_s=budget_s,
        jobs=jobs,
        seed=seed,
    )
    console = Console(soft_wrap=True, highlight=False, markup=False)
    raise typer.Exit(request.list_candidates(console.print) if dry_run else request.run(console.print))


def _arch(arch: str | None, gpu: str | None) -> str | None:
    named = gpu_of(gpu)
    if named is None:
        return arch
    if arch not in (None, named.arch):
        raise UserError(f"--gpu {gpu} is {named.arch}, and --arch says {arch}; give one of them")
    return named.arch


def _check_files(out: Path | None, report: Path | None, dry_run: bool) -> None:
    for flag, file in (("--out", out), ("--report", report)):
        if file is not None and not dry_run:
            check_folder(flag, file.parent)
            check_file(flag, file)
    if out is not None:
        read_table(out)
