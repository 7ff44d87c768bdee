"""The process in which providers are probed: `python -m rocm_serve.ops.probe_child REQUEST`.

What it says, one JSON object a line on the standard output that it was started with: `Began` before each call,
`Verdict` after each provider. Kernels may fault, hang or end the process: its parent knows from the last line whose
fault it was. After an exception it ends too, for a GPU's context may be lost with it; the parent starts another one
for what remains.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import msgspec
import torch

from rocm_serve.errors import UserError
from rocm_serve.lifeline import die_with_parent, show_stacks_on_signal
from rocm_serve.ops.contract import Op
from rocm_serve.ops.facts import OpFacts
from rocm_serve.ops.probe import Refused, probe

PRODUCT_TABLE = "rocm_serve.ops.bind:OPS"
DIED = 4


class Request(msgspec.Struct, frozen=True):
    """What to probe. `table`: "module:name" of the ops, for tests that bring their own."""

    tasks: tuple[tuple[str, str], ...]  # (op, provider)
    facts: OpFacts
    device: str
    seed: int
    threads: int
    table: str = PRODUCT_TABLE


class Began(msgspec.Struct, frozen=True, tag=True):
    op: str
    provider: str
    case: str


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """`refused` None: it passed."""

    op: str
    provider: str
    refused: str | None
    calls: int = 0
    error: float = 0.0
    seconds: float = 0.0


Line = Began | Verdict


def ops_of(table: str) -> Mapping[str, Op]:
    """Return the ops named "module:name"."""
    module, _, name = table.partition(":")
    ops: Mapping[str, Op] = getattr(importlib.import_module(module), name)
    return ops


def run(request: Request, out: TextIO) -> int:
    """Probe one provider after the other; return the exit code."""

    def say(line: Line) -> None:
        out.write(msgspec.json.encode(line).decode() + "\n")
        out.flush()

    torch.set_num_threads(request.threads)
    device = torch.device(request.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ops = ops_of(request.table)
    for name, provider in request.tasks:
        op = ops[name]
        at = ["loading it"]

        def began(case: str, name: str = name, provider: str = provider, at: list[str] = at) -> None:
            at[0] = case
            say(Began(name, provider, case))

        try:
            passed = probe(op, op.providers[provider], request.facts, device, seed=request.seed, began=began)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Refused as refused:
            say(Verdict(name, provider, str(refused)))
        except Exception as error:  # a provider's code may raise anything: the reason is told, the server goes on
            traceback.print_exc()
            words = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            say(Verdict(name, provider, f"{at[0]}: {words.partition(chr(10))[0]}"))
            return DIED
        else:
            say(Verdict(name, provider, None, passed.calls, passed.error, passed.seconds))
    return 0


def main() -> None:
    """Be the child. Libraries that print to standard output print to standard error."""
    show_stacks_on_signal()
    die_with_parent()
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        request = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Request)
        code = run(request, out)
    sys.stderr.flush()
    os._exit(code)  # destructors of a lost GPU context may hang


if __name__ == "__main__":
    main()
