"""The command line. Flags of `serve` come from config/schema.py; what the commands do is in compose.py."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from rocm_serve import cli_plan, cli_report
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


def _flag(field: str, help_text: str) -> Any:
    """Make the option of one ServeConfig field. Its default is None, so that a flag not given can be told apart."""
    default = load.FIELDS[field].default
    words = load.choices(field)
    shown = "" if default in (None, msgspec.NODEFAULT) else f" [default: {default}]"
    metavar = "{" + ",".join(words) + "}" if words else None
    return typer.Option(load.flag_name(field), help=help_text + shown, metavar=metavar, show_default=False)


Text = str | None
Number = int | None


@app.command()
def serve(
    model: Annotated[Text, _flag("model", "Folder of the checkpoint.")] = None,
    served_model_name: Annotated[Text, _flag("served_model_name", "Name in the API; else the path given.")] = None,
    host: Annotated[Text, _flag("host", "Address to listen on.")] = None,
    port: Annotated[Number, _flag("port", "Port to listen on; 0 takes a free one.")] = None,
    tp: Annotated[Number, _flag("tp", "Tensor-parallel ranks of a stage.")] = None,
    pp: Annotated[Number, _flag("pp", "Pipeline stages.")] = None,
    ep: Annotated[Number, _flag("ep", "Expert-parallel ranks; above 1 is refused until that path lands.")] = None,
    nnodes: Annotated[Number, _flag("nnodes", "Hosts; start the same command on each.")] = None,
    node_rank: Annotated[Number, _flag("node_rank", "This host's place among them; 0 has the HTTP server.")] = None,
    dist_init_addr: Annotated[Text, _flag("dist_init_addr", "HOST:PORT of node 0; PORT..PORT+3 are used.")] = None,
    dist_timeout: Annotated[Number, _flag("dist_timeout", "Seconds that ranks wait for each other.")] = None,
    watchdog_timeout: Annotated[
        Number, _flag("watchdog_timeout", "Seconds without progress; then a rank is dead.")
    ] = None,
    device: Annotated[Text, _flag("device", "Where the model runs.")] = None,
    dtype: Annotated[Text, _flag("dtype", "Of activations and of weights that are not FP8.")] = None,
    kv_cache_dtype: Annotated[Text, _flag("kv_cache_dtype", "Of cached keys and values.")] = None,
    page_size: Annotated[Number, _flag("page_size", "Tokens of a KV page.")] = None,
    chunked_prefill_size: Annotated[Number, _flag("chunked_prefill_size", "Prompt rows of a step.")] = None,
    max_running_requests: Annotated[Number, _flag("max_running_requests", "Requests computed at a time.")] = None,
    max_queued_requests: Annotated[Number, _flag("max_queued_requests", "Requests that may wait; then 429.")] = None,
    max_model_len: Annotated[Number, _flag("max_model_len", "Longest sequence; else what the model allows.")] = None,
    max_total_tokens: Annotated[Number, _flag("max_total_tokens", "Cap on cached tokens of all requests.")] = None,
    mem_fraction: Annotated[
        float | None,
        _flag("mem_fraction", "Share of GPU memory (else 0.9; CPU: of free RAM over all workers, else 0.5)."),
    ] = None,
    load_format: Annotated[Text, _flag("load_format", "dummy: random weights, nothing is read.")] = None,
    enforce_eager: Annotated[bool | None, typer.Option("--enforce-eager", help="No device graphs.")] = None,
    op: Annotated[list[str] | None, typer.Option("--op", metavar="OP=PROVIDER", help="Provider of an op.")] = None,
    seed: Annotated[Number, _flag("seed", "Of requests that give none, and of dummy weights.")] = None,
    log_level: Annotated[Text, _flag("log_level", "How much is logged.")] = None,
    trace: Annotated[Text, _flag("trace", "Folder for a line per step of the engine core and of each rank.")] = None,
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE.toml", help="Flags as TOML keys.")] = None,
) -> None:
    """Serve a checkpoint over HTTP until SIGTERM or Ctrl-C."""
    given = {name: value for name, value in locals().items() if name in load.FIELDS and value is not None}
    if "op" in given:
        given["op"] = load.parse_ops(op or [])
    code = 0
    with until_told_to_stop():
        wishes = load.load(given, config, load.environment())
        from rocm_serve.compose import serve as run_server

        code = run_server(wishes)
    raise typer.Exit(code)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        _say(f"rocm-serve {VERSION}")
        raise typer.Exit


app.command()(cli_plan.plan)
app.command()(cli_report.report)


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
