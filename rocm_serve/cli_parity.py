"""The command `parity`: whether two ways of computing the same tokens agree, and where they first part."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from rocm_serve.checkpoint.ledger import validate
from rocm_serve.checkpoint.reader import CheckpointReader, read_config
from rocm_serve.cli_verdict import progress_of, verdict_or_2
from rocm_serve.config import load
from rocm_serve.config.experts import expert_plan
from rocm_serve.config.op_forms import ruled_out
from rocm_serve.config.ops import check_called
from rocm_serve.config.resolve import resolve
from rocm_serve.config.schema import Resolved, ServeConfig
from rocm_serve.diagnostics.parity import flow, prompts
from rocm_serve.diagnostics.parity.show import show
from rocm_serve.diagnostics.parity.spec import HF, parse_side
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import parse_config
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.platform import probe
from rocm_serve.run_directory import run_directory
from rocm_serve.tokens.tokenizer import Tokenizer

DIFFER = 1


def parity(
    model: Annotated[Path, typer.Option(metavar="DIR", help="Checkpoint.")],
    a: Annotated[str, typer.Option(metavar="SPEC", help="tp=2,pp=2,dtype=float32,chunk=16,op.OP=PROVIDER and so on.")],
    b: Annotated[
        str | None, typer.Option(metavar="SPEC", help="As --a, or hf: Transformers, float32.", show_default=False)
    ] = None,
    against: Annotated[str | None, typer.Option(metavar="{hf}", help="The same as --b hf.", show_default=False)] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="FILE", help="A JSON text or list of ids a line; else drawn.", show_default=False
        ),
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens after each prompt: A's greedy ones, for both.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """Compute the same tokens in two ways; where log-probs differ, name the first layer, op and rank that does.

    A is run twice first, all at once and token by token: what it differs from itself by is its noise. Exit code 0:
    the sides agree; 1: they differ; 2: the wish cannot be met, or this program failed; 130: interrupted.
    """
    with verdict_or_2(Path(tempfile.gettempdir()), lambda: _note("interrupted: nothing was judged, nothing is kept")):
        found = _compare(model, a, _other(b, against), prompts_file, new_tokens)
        if as_json:
            typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        else:
            show(found, _console())
    raise typer.Exit(0 if found.agree else DIFFER)


def _compare(model: Path, a: str, b: str, prompts_file: Path | None, new_tokens: int) -> flow.Parity:
    tokenizer = Tokenizer.from_dir(model)
    asked = prompts.drawn(tokenizer) if prompts_file is None else prompts.read(prompts_file, tokenizer)
    longest = prompts.check_lengths(asked, new_tokens, parse_config(*read_config(model)).max_position)
    sides = [parse_side(text, model, flag, longest=longest) for text, flag in ((a, "--a"), (b, "--b"))]
    with run_directory() as keep:
        given = flow.Comparison(
            model=model,
            a=sides[0],
            b=sides[1],
            prompts=asked,
            new_tokens=new_tokens,
            vocab_used=tokenizer.vocab_used,
            prepare=lambda config, folder: prepare(config, tokenizer.vocab_used, folder),
            env=load.environment(),
            folder=keep.path,
            progress=_progress,
        )
        try:
            return flow.run(given, _note)
        except Exception:
            keep.keep = any(keep.path.glob("*/logs/*.log"))
            raise


def _console(*, stderr: bool = False) -> Console:
    return Console(soft_wrap=True, highlight=False, markup=False, stderr=stderr)


def _note(line: str) -> None:
    _console(stderr=True).print(line)


@contextmanager
def _progress(what: str) -> Iterator[flow.Tick]:
    with progress_of(_console(stderr=True), f"tokens, {what}") as ticker:
        yield lambda done, tokens: ticker(done, tokens, done)


def _other(b: str | None, against: str | None) -> str:
    if against is not None and against != HF:
        raise UserError(f"--against {against}: legal: {HF}; a topology is --b")
    if (b is None) == (against is None):
        raise UserError(f"parity needs one other side: --b SPEC, --b {HF} or --against {HF}")
    return b or HF


def prepare(config: ServeConfig, vocab_used: int, run_dir: Path) -> Resolved:
    """Decide what a side left open, and check the checkpoint's headers for every rank. Errors: UserError."""
    facts = parse_config(*read_config(config.model))
    platform = probe.probe(config.device)
    free_port = probe.free_port
    resolved = resolve(config, facts, platform, vocab_used=vocab_used, run_dir=str(run_dir), free_port=free_port)
    check_called(resolved, facts)
    for idle in ruled_out(resolved, facts):
        raise UserError(f"{idle}, so nothing would be compared; leave one of them out")
    with CheckpointReader(resolved.model) as reader:
        mesh = Mesh(resolved.tp, resolved.pp, resolved.ep)
        validate(reader, facts, mesh, mtp=False, experts=expert_plan(resolved, facts))
    return resolved
