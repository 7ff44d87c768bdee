"""The command `report`: one file about a server, without secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rocm_serve.config import load
from rocm_serve.diagnostics.collect import find_run_dir, write_report


def report(
    out: Annotated[Path, typer.Option(metavar="FILE.tar.gz", help="Archive to write.")],
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run directory of the server; else this host's newest.", show_default=False),
    ] = None,
) -> None:
    """Pack logs, plan, resolved configuration, versions and the variables that matter, without secrets."""
    found = find_run_dir(run_dir)
    names = write_report(found, out, load.environment())
    typer.echo(f"{out}: {len(names)} files about {found}: {', '.join(names)}")
