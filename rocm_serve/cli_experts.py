"""The command `experts`: from how often experts were chosen to where they had better be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from rocm_serve.diagnostics.experts.flow import placement_of, plan_experts
from rocm_serve.diagnostics.experts.plot import svg
from rocm_serve.diagnostics.experts.show import show, to_json
from rocm_serve.errors import UserError


def experts(
    counts: Annotated[
        list[Path],
        typer.Option(
            "--from", metavar="FILE", help="As given to serve --expert-counts, or one rank's; again for more."
        ),
    ],
    ep: Annotated[int, typer.Option(help="Expert-parallel ranks to place for.")],
    redundant: Annotated[int, typer.Option(help="Copies of hot experts that a layer may have.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for serve --expert-placement.", show_default=False)
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Checkpoint, or a config.json: what copies take.", show_default=False),
    ] = None,
    tp: Annotated[int | None, typer.Option(help="With --model; else as counted.", show_default=False)] = None,
    pp: Annotated[int | None, typer.Option(help="With --model; else as counted.", show_default=False)] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Picture of every layer.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON; sizes in bytes.")] = False,
) -> None:
    """Say how unevenly the ranks' experts were chosen, and place them better.

    Exit code 2: files that will not do, or slots that cannot be shared equally.
    """
    if model is None and (tp is not None or pp is not None):
        raise UserError("--tp and --pp say whose memory is meant; they need --model")
    planned = plan_experts(counts, ep, redundant, model=model, tp=tp, pp=pp)
    try:
        if out is not None:
            placement_of(planned).write(out)
        if plot is not None:
            plot.write_text(svg(planned), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from None
    if as_json:
        typer.echo(msgspec.json.encode(to_json(planned)).decode())
        return
    console = Console(soft_wrap=True, highlight=False, markup=False)
    show(planned, console)
    if out is not None:
        console.print(f"{out}: for serve --ep {ep} --expert-placement {out}")
