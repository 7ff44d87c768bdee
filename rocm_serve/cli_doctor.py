"""The command `doctor`: what a start would find on this machine, and what it would do about it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from rocm_serve.config import aliases, load
from rocm_serve.errors import UserError
from rocm_serve.platform.gpus import gpu_of

if TYPE_CHECKING:
    from rocm_serve.executor.kernel_report import KernelReport, OpReport, ShapeReport

_DIALECTS = {
    "fn": "e4m3fn, as in checkpoints",
    "fnuz": "e4m3fnuz: weights are turned from e4m3fn as they are read, scales doubled",
    "none": "stored as e4m3fn, without instructions for it",
}
_NOT_HERE = ", which is not here: what follows is what this machine's packages and devices allow"
_MOST_COUNTS = 12


def doctor(
    kernels: Annotated[bool, typer.Option("--kernels", help="Which provider every op gets, and why.")] = False,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of a checkpoint: its shapes.", show_default=False),
    ] = None,
    tp: Annotated[int, typer.Option(help="As for serve: shapes are those of one rank.")] = 1,
    ep: Annotated[int, typer.Option(help="As for serve.")] = 1,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="{mi300x,mi308x,mi325x,mi355x,h200}", help="Ask about one that is not here.", show_default=False
        ),
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="As for serve.")] = "auto",
    speculative: Annotated[
        str,
        typer.Option(metavar="{off,mtp,auto}", help="As for serve: the draft layer, and the rows of drafts."),
    ] = "off",
    draft_tokens: Annotated[int | None, typer.Option(help="As for serve.", show_default=False)] = None,
    op: Annotated[list[str] | None, typer.Option("--op", metavar="OP=PROVIDER", help="As for serve.")] = None,
    run: Annotated[bool, typer.Option("--run/--no-run", help="Run the kernels on the GPU that is here.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """Say which kernels would run here: provider, tuned or by rule, refused ones and why, FP8 dialect, versions.

    Runs on any machine; what it cannot see here it says at the end.
    """
    if not kernels:
        raise UserError("doctor needs to know what to look at; legal: --kernels")
    stored = aliases.WORDS["kv_cache_dtype"].get(kv_cache_dtype, kv_cache_dtype)
    drafts = aliases.WORDS["speculative"].get(speculative, speculative)
    wishes: dict[str, object] = {"tp": tp, "ep": ep, "kv_cache_dtype": stored, "op": load.parse_ops(op or [])}
    wishes |= {"speculative": drafts} | ({} if draft_tokens is None else {"draft_tokens": draft_tokens})
    if model is None and (tp != 1 or ep != 1 or op or stored != "auto" or drafts != "off" or draft_tokens is not None):
        raise UserError(
            "--tp, --ep, --op, --kv-cache-dtype, --speculative and --draft-tokens are about the shapes of a model;"
            " give --model DIR too"
        )
    config = None if model is None else load.load(wishes | {"model": str(model)}, None, {})
    made: KernelReport = importlib.import_module("rocm_serve.executor.kernel_report").kernel_report(
        config, gpu_of(gpu), run=run
    )
    if as_json:
        typer.echo(msgspec.json.encode(made).decode())
        return
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for line in lines_of(made):
        console.print(line)


def lines_of(report: KernelReport) -> list[str]:
    """Write the report for people."""
    name = f"{report.gpu or report.arch} ({report.arch}, {report.compute_units} CUs)" if report.gpu else report.arch
    out = [
        f"kernels on {name}{'' if report.seen or not report.gpu else _NOT_HERE}",
        f"fp8: {_DIALECTS[report.fp8_dialect]}; products by default with rows as {report.fp8_activation}",
        "versions: " + ", ".join(f"{library} {version}" for library, version in report.versions.items()),
    ]
    told: dict[tuple[str, str], str] = {}
    for one in report.ops:
        out += _op_lines(one, told)
    out += ["not seen:", *(f"  {what}" for what in report.not_seen)]
    return out


def _op_lines(one: OpReport, told: dict[tuple[str, str], str]) -> list[str]:
    """Write one op. `told`: the op at which a provider was refused for a reason already; it is not told again."""
    if not one.called:
        return [f"{one.op}: not called by this model"]
    how = f" ({one.tuning})" if one.tuning else ""
    shown = "" if one.provider == "reference" else f"; probe {one.probe}"
    lines = [f"{one.op}: {one.provider}{how}{shown}"]
    for provider, why in one.refused:
        first = told.setdefault((provider, why), one.op)
        lines.append(f"  refused: {provider} {why if first == one.op else f'as for {first}'}")
    return lines + [f"  {_shape_words(shape)}" for shape in one.shapes]


def _shape_words(shape: ShapeReport) -> str:
    rows = f", rows {_some(shape.rows)}" if shape.rows else ""
    if shape.tuned_rows is None:
        return f"{shape.shape}{rows}"
    tuned = f"tuned for rows {_some(shape.tuned_rows)}" if shape.tuned_rows else "by rule: no tuned row"
    return f"{shape.shape}{rows}: {tuned}"


def _some(counts: tuple[int, ...]) -> str:
    shown = " ".join(map(str, counts[:_MOST_COUNTS]))
    return f"{shown} ... {counts[-1]}" if len(counts) > _MOST_COUNTS else shown
