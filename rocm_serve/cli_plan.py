"""The command `plan`: whether a launch can work, before anything is downloaded or started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rocm_serve.cli_words import notes_of
from rocm_serve.config import load
from rocm_serve.config.experts import plan_of
from rocm_serve.config.schema import ServeConfig
from rocm_serve.diagnostics.launch import plan_launch
from rocm_serve.diagnostics.plan import checkpoint_totals, survey
from rocm_serve.diagnostics.plan import plan as plan_weights
from rocm_serve.diagnostics.show import show, to_json
from rocm_serve.errors import UserError
from rocm_serve.platform.gpus import gpu_of

DOES_NOT_FIT = 1
# Wishes that bear on a GPU's memory, not on what weights a rank holds.
_OF_A_GPU = (
    *("max_model_len", "kv_cache_dtype", "mem_fraction", "page_size", "chunked_prefill_size", "max_running_requests"),
    *("max_total_tokens", "dtype", "enforce_eager", "fp8_activation", "expert_capacity", "allow_unvalidated"),
    *("speculative", "draft_tokens", "graph_max_batch"),
)
_OF_WEIGHTS = ("tp", "pp", "ep", "expert_exchange", "expert_placement")

Text = str | None
Number = int | None
Share = float | None


def plan(
    ctx: typer.Context,
    model: Annotated[Path, typer.Option(metavar="DIR", help="Checkpoint, or a config.json without weights.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of a stage.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    nnodes: Annotated[Number, typer.Option(help="Hosts; else one for every eight GPUs.", show_default=False)] = None,
    gpu: Annotated[
        Text, typer.Option(metavar="{mi300x,mi308x,mi325x,mi355x,h200}", help="Kind of GPU.", show_default=False)
    ] = None,
    hbm_gib: Annotated[Share, typer.Option(help="GiB of one GPU, if it is another.", show_default=False)] = None,
    max_model_len: Annotated[
        Number, typer.Option(help="Longest sequence; also --context-len.", show_default=False)
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="As for serve.")] = "auto",
    mem_fraction: Annotated[Share, typer.Option(help="As for serve.", show_default=False)] = None,
    page_size: Annotated[Number, typer.Option(help="As for serve.", show_default=False)] = None,
    chunked_prefill_size: Annotated[Number, typer.Option(help="As for serve.", show_default=False)] = None,
    max_running_requests: Annotated[Number, typer.Option(help="As for serve.", show_default=False)] = None,
    max_total_tokens: Annotated[Number, typer.Option(help="As for serve.", show_default=False)] = None,
    ep: Annotated[Number, typer.Option(help="As for serve.", show_default=False)] = None,
    expert_exchange: Annotated[Text, typer.Option(help="As for serve.", show_default=False)] = None,
    expert_capacity: Annotated[Number, typer.Option(help="As for serve.", show_default=False)] = None,
    expert_placement: Annotated[Text, typer.Option(help="As for serve.", show_default=False)] = None,
    allow_unvalidated: Annotated[bool, typer.Option("--allow-unvalidated", help="As for serve.")] = False,
    fp8_activation: Annotated[Text, typer.Option(help="As for serve.", show_default=False)] = None,
    dtype: Annotated[Text, typer.Option(help="As for serve.", show_default=False)] = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="As for serve.")] = False,
    graph_max_batch: Annotated[Number, typer.Option(help="As for serve.", show_default=False)] = None,
    speculative: Annotated[Text, typer.Option(help="As for serve.", show_default=False)] = None,
    draft_tokens: Annotated[Number, typer.Option(help="As for serve.", show_default=False)] = None,
    rank: Annotated[Number, typer.Option(help="Weights of one rank only; without a GPU.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON; sizes in bytes.")] = False,
) -> None:
    """Say what each rank would hold and whether it fits, from the configuration and headers alone.

    Exit code 0: it fits (or no GPU was named); 1: it does not; 2: no launch of this model can be like that.
    """
    given = locals()
    wishes = {"model": str(model)} | {name: given[name] for name in (*_OF_WEIGHTS, *_OF_A_GPU)}
    for note in notes_of(ctx):
        typer.echo(note, err=True)
    config = load.load({name: value for name, value in wishes.items() if value is not None}, None, {})
    target = gpu_of(gpu, hbm_gib, or_else=", or --hbm-gib N")
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if target is None:
        if as_json or nnodes is not None:
            raise UserError("--json and --nnodes need to know the GPU: --gpu NAME or --hbm-gib N")
        _say_what_is_not_looked_at(wishes)
        _weights(config, rank, console)
        return
    if rank is not None:
        raise UserError("--rank goes without --gpu and --hbm-gib: whether a launch fits is said for all ranks")
    launch = plan_launch(config, target, nnodes=nnodes)
    if as_json:
        typer.echo(to_json(launch).decode())
    else:
        show(launch, console)
    raise typer.Exit(0 if launch.fits else DOES_NOT_FIT)


def _say_what_is_not_looked_at(wishes: Mapping[str, object]) -> None:
    unread = [load.flag_name(name) for name in _OF_A_GPU if wishes[name] not in (None, False, "auto")]
    if unread:
        typer.echo(f"only weights are counted without --gpu or --hbm-gib; not looked at: {', '.join(unread)}", err=True)


def _weights(config: ServeConfig, rank: Number, console: Console) -> None:
    facts = survey(config.model).facts
    exchange = "local" if config.expert_exchange == "auto" else config.expert_exchange
    experts = plan_of(facts, config.ep, exchange, exchange, placement=config.expert_placement)
    made = plan_weights(config.model, config.tp, config.pp, rank, experts=experts)
    totals = checkpoint_totals(made.facts)
    console.print(
        f"{made.facts.architecture}: {totals.parameters:,} parameters in {totals.tensors:,} tensors,"
        f" {totals.payload_bytes:,} bytes as published"
    )
    for line in made.lines():
        console.print(line)
