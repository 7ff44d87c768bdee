"""Runs lm-eval's command line in a process of its own and finds what it wrote."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from rocm_serve.diagnostics.gate.protocol import Protocol, task_name
from rocm_serve.errors import UserError

OUTPUT: Final = "output"  # not "lm_eval": the folder is on that process's path of modules
_POLL_S: Final = 0.2
_STOP_S: Final = 10.0
_TAIL_CHARS: Final = 1500
_FIND_S: Final = 120.0
_LINE_CHARS: Final = 200
# Asks an interpreter for lm-eval without importing it: that takes seconds.
_FIND = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("lm_eval")
where = spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else None
print(json.dumps({"where": where, "version": importlib.metadata.version("lm_eval") if where else None}))
"""
# The data are local files: a stray look at the hub fails at once instead of hanging.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, slots=True)
class Harness:
    """An interpreter with lm-eval in it."""

    python: str
    version: str
    tasks: Path  # its task files


@dataclass(frozen=True, slots=True)
class Client:
    """How requests are sent; none of it changes an answer."""

    num_concurrent: int = 64
    max_retries: int = 5
    timeout_s: int = 3600


class _Number(msgspec.Struct):
    effective: int


class Results(msgspec.Struct):
    """What the gate reads of lm-eval's results file."""

    results: dict[str, dict[str, Any]]
    lm_eval_version: str
    n_samples: dict[str, _Number] = msgspec.field(name="n-samples")
    task_hashes: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Finished:
    """A run of lm-eval that came to its end. `samples` and `results` are None when it failed."""

    argv: list[str]
    code: int
    table: str
    tail: str  # of its log
    samples: Path | None
    results: Results | None


def find_harness(python: str, environ: Mapping[str, str]) -> Harness:
    """Ask `python` for its lm-eval. Errors: UserError with how to get it."""
    try:
        run = subprocess.run(
            [python, "-c", _FIND], env=dict(environ), capture_output=True, check=False, timeout=_FIND_S
        )
    except OSError as error:
        raise UserError(f"--lm-eval-python {python}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"--lm-eval-python {python} said nothing within {_FIND_S:.0f} s; is it a Python?") from None
    try:
        found = json.loads(run.stdout)
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.keys() != {"where", "version"}:
        words = (run.stderr or run.stdout).decode(errors="replace").strip().splitlines() or ["nothing"]
        raise UserError(
            f"--lm-eval-python {python} is no Python that can be asked for its lm-eval: it ended with exit code"
            f" {run.returncode} and said: {words[-1][-_LINE_CHARS:]}"
        )
    if found["where"] is None:
        raise UserError(
            f"lm-eval is not installed for {python}: pip install 'lm-eval[api]==0.4.13', or --lm-eval-python PYTHON"
            " of an environment that has it"
        )
    return Harness(python, found["version"], Path(found["where"]) / "tasks")


def command(
    harness: Harness, protocol: Protocol, model: str, url: str, client: Client, folder: Path, limit: int | None
) -> list[str]:
    """Return lm-eval's command line. String prompts, so it needs no tokenizer and cuts nothing."""
    model_args = {
        "model": model,
        "base_url": url,
        "tokenizer_backend": None,
        "tokenized_requests": False,
        "num_concurrent": client.num_concurrent,
        "max_retries": client.max_retries,
        "timeout": client.timeout_s,
        "seed": protocol.request_seed,
    }
    argv = [harness.python, "-m", "lm_eval", "run", "--model", "local-completions"]
    argv += ["--model_args", json.dumps(model_args), "--tasks", task_name(protocol.task)]
    argv += ["--include_path", str(folder / "tasks"), "--num_fewshot", str(protocol.num_fewshot)]
    argv += ["--gen_kwargs", json.dumps(protocol.generation()), "--seed", f"0,1234,1234,{protocol.fewshot_seed}"]
    argv += ["--output_path", str(folder / OUTPUT), "--log_samples"]
    return argv + ([] if limit is None else ["--limit", str(limit)])


def run(argv: list[str], task: str, folder: Path, environ: Mapping[str, str], tick: Callable[[], None]) -> Finished:
    """Run lm-eval to its end, calling `tick` several times a second. It is ended when `tick` raises.

    Its output goes to files of `folder`: lm_eval.out has the table, lm_eval.err its log.
    """
    out, err = folder / "lm_eval.out", folder / "lm_eval.err"
    environ = {**environ, **_OFFLINE, "HF_HOME": str(folder / "hf"), "TQDM_DISABLE": "1"}
    with out.open("wb") as out_file, err.open("wb") as err_file:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=err_file,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                tick()
                time.sleep(_POLL_S)
        finally:
            _end(process)
    log = err.read_text(encoding="utf-8", errors="replace")
    table = _table(out.read_text(encoding="utf-8", errors="replace"))
    samples, results = _newest(folder / OUTPUT, f"samples_{task}_*.jsonl"), None
    path = _newest(folder / OUTPUT, "results_*.json")
    with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):  # what cannot be read is not there
        results = None if path is None else msgspec.json.decode(path.read_bytes(), type=Results)
    if process.returncode != 0:
        samples = results = None
    return Finished(argv, process.returncode, table, log[-_TAIL_CHARS:], samples, results)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End lm-eval and what it started, if it is still there."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _newest(folder: Path, pattern: str) -> Path | None:
    found = sorted(folder.rglob(pattern), key=lambda path: path.stat().st_mtime_ns)
    return found[-1] if found else None


def _table(text: str) -> str:
    """Return lm-eval's table, of all it printed."""
    return "\n".join(line for line in text.splitlines() if line.startswith("|"))
