"""The command `plan`: whether a launch can work, before anything is downloaded or started."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rocm_serve.config import load
from rocm_serve.diagnostics.launch import plan_launch
from rocm_serve.diagnostics.plan import checkpoint_totals
from rocm_serve.diagnostics.plan import plan as plan_weights
from rocm_serve.diagnostics.show import show, to_json
from rocm_serve.errors import UserError
from rocm_serve.platform.gpus import gpu_of

DOES_NOT_FIT = 1

Text = str | None
Number = int | None
Share = float | None


def plan(
    model: Annotated[Path, typer.Option(metavar="DIR", help="Checkpoint, or a config.json without weights.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of a stage.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    nnodes: Annotated[Number, typer.Option(help="Hosts; else one for every eight GPUs.", show_default=False)] = None,
    gpu: Annotated[
        Text, typer.Option(metavar="{mi300x,mi308x,mi325x,mi355x,h200}", help="Kind of GPU.", show_default=False)
    ] = None,
    hbm_gib: Annotated[Share, typer.Option(help="GiB of one GPU, if it is another.", show_default=False)] = None,
    max_model_len: Annotated[
        Number, typer.Option("--max-model-len", "--context-len", help="Longest sequence.", show_default=False)
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="As for serve.")] = "auto",
    mem_fraction: Annotated[Share, typer.Option(help="As for serve.", show_default=False)] = None,
    page_size: Annotated[Number, typer.Option(help="As for serve.", show_default=False)] = None,
    chunked_prefill_size: Annotated[Number, typer.Option(help="As for serve.", show_default=False)] = None,
    max_running_requests: Annotated[Number, typer.Option(help="As for serve.", show_default=False)] = None,
    mtp: Annotated[bool, typer.Option("--mtp", help="As if the draft layer were loaded, too.")] = False,
    rank: Annotated[Number, typer.Option(help="Weights of one rank only; without a GPU.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON; sizes in bytes.")] = False,
) -> None:
    """Say what each rank would hold and whether it fits, from the configuration and headers alone.

    Exit code 0: it fits (or no GPU was named); 1: it does not; 2: no launch of this model can be like that.
    """
    wishes = {
        "model": str(model),
        "tp": tp,
        "pp": pp,
        "kv_cache_dtype": kv_cache_dtype,
        "max_model_len": max_model_len,
        "mem_fraction": mem_fraction,
        "page_size": page_size,
        "chunked_prefill_size": chunked_prefill_size,
        "max_running_requests": max_running_requests,
    }
    target = gpu_of(gpu, hbm_gib)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if target is None:
        if as_json or nnodes is not None:
            raise UserError("--json and --nnodes need to know the GPU: --gpu NAME or --hbm-gib N")
        _weights(model, tp, pp, rank, console)
        return
    if rank is not None:
        raise UserError("--rank goes without --gpu and --hbm-gib: whether a launch fits is said for all ranks")
    config = load.load({name: value for name, value in wishes.items() if value is not None}, None, {})
    launch = plan_launch(config, target, nnodes=nnodes, mtp=mtp)
    if as_json:
        typer.echo(to_json(launch).decode())
    else:
        show(launch, console)
    raise typer.Exit(0 if launch.fits else DOES_NOT_FIT)


def _weights(model: Path, tp: int, pp: int, rank: Number, console: Console) -> None:
    made = plan_weights(model, tp, pp, rank)
    totals = checkpoint_totals(made.facts)
    console.print(
        f"{made.facts.architecture}: {totals.parameters:,} parameters in {totals.tensors:,} tensors,"
        f" {totals.payload_bytes:,} bytes as published"
    )
    for line in made.lines():
        console.print(line)
