"""The flags of `serve`: one for every field of ServeConfig, with the line that --help has for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import msgspec
import typer

from rocm_serve.config import aliases, load
from rocm_serve.config.schema import ServeConfig

HELP: Mapping[str, str] = MappingProxyType(
    {
        "model": "Folder of the checkpoint.",
        "served_model_name": "Name in the API; else the path given.",
        "host": "Address to listen on.",
        "port": "Port to listen on; 0 takes a free one.",
        "tp": "Tensor-parallel ranks of a stage.",
        "pp": "Pipeline stages.",
        "ep": "Ranks that share the experts of a stage; divides --tp.",
        "expert_exchange": "How rows come to experts on other ranks; auto: local, all-reduced.",
        "expert_capacity": "Rows a rank may send to experts in a step; else what a step can need.",
        "expert_placement": "File of which expert is where; made by `rocm-serve experts`.",
        "expert_counts": "File for how often each expert is chosen; else nothing is counted.",
        "speculative": "off, mtp: the model's draft layer guesses ahead; auto: only where that is faster.",
        "draft_tokens": "Most tokens guessed ahead for a request in a step, 1..4; 3 if not given.",
        "speculative_expert_exchange": "Exchange of the draft layer; inherit: that of the others.",
        "allow_unvalidated": "Also exchanges that no test has run with this model.",
        "nnodes": "Hosts; start the same command on each.",
        "node_rank": "This host's place among them; 0 has the HTTP server.",
        "dist_init_addr": "HOST:PORT of node 0; PORT..PORT+3 are used.",
        "dist_timeout": "Seconds that ranks wait for each other.",
        "watchdog_timeout": "Seconds without progress; then a rank is dead.",
        "device": "Where the model runs.",
        "dtype": "Of activations and of weights that are not FP8.",
        "kv_cache_dtype": "Of cached keys and values.",
        "fp8_activation": "What FP8 weights meet; auto: bf16 on a CPU, fp8_1x128 on GPUs.",
        "page_size": "Tokens of a KV page.",
        "chunked_prefill_size": "Prompt rows of a step; by card, model and memory if not given.",
        "max_running_requests": "Requests computed at a time.",
        "max_queued_requests": "Requests that may wait; then 429.",
        "max_model_len": "Longest sequence; else what the model allows.",
        "max_total_tokens": "Cap on cached tokens of all requests.",
        "mem_fraction": "Share of GPU memory (else 0.9; CPU: of free RAM over all workers, else 0.5).",
        "load_format": "dummy: random weights, nothing is read.",
        "enforce_eager": "No device graphs.",
        "graph_max_batch": "Largest decode batch replayed as a device graph; 0: none; else up to 256.",
        "plan_ahead": "Start a step before the last one's tokens are known; auto: with graphs and --pp 1.",
        "all_reduce": "library: RCCL's, gloo's; aiter: AITER's own kernels for small sums.",
        "attention_backend": "Provider to prefer where the device has it.",
        "op": "Provider of an op.",
        "seed": "Of requests that give none, and of dummy weights.",
        "reasoning_parser": "Tells reasoning from answer in a chat.",
        "tool_call_parser": "Finds the tool calls in a chat answer.",
        "log_level": "How much is logged.",
        "trace": "Folder for a line per step of the engine core, and of each rank that is a process of its own.",
    }
)
_KINDS: tuple[type, ...] = (bool, int, float)  # what is none of them is text on a command line


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(ctx, config, **given)` its signature: a flag for every field, and --config.

    Every default is None, so that a flag that was not given can be told apart.
    """
    kinds: dict[str, Any] = {"ctx": typer.Context}
    kinds |= {field: Annotated[_kind(field), _option(field)] for field in load.FIELDS}
    kinds["config"] = Annotated[
        Path | None, typer.Option("--config", metavar="FILE.toml", help="Flags as TOML keys.", show_default=False)
    ]
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if name == "ctx" else None,
            annotation=kind,
        )
        for name, kind in kinds.items()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = kinds | {"return": None}
    return command


def _kind(field: str) -> Any:
    if field == "op":
        return list[str] | None
    of_field = get_type_hints(ServeConfig)[field]
    return next((kind for kind in _KINDS if of_field in (kind, kind | None)), str) | None


def _option(field: str) -> Any:
    others = aliases.others(field)
    also = f" Also {', '.join(others)}." if others else ""
    default = load.FIELDS[field].default
    plain = default in (None, msgspec.NODEFAULT, False) or field == "op"
    shown = "" if plain else f" [default: {default}]"
    words = load.choices(field)
    metavar = "OP=PROVIDER" if field == "op" else "{" + ",".join(words) + "}" if words else None
    return typer.Option(load.flag_name(field), help=HELP[field] + also + shown, metavar=metavar, show_default=False)
