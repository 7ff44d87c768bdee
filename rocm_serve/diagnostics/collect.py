"""`rocm-serve report`: one file about a live or failed server, fit to be sent to others."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from rocm_serve.config.experts import expert_plan
from rocm_serve.config.schema import Resolved
from rocm_serve.diagnostics.launch_result import mesh_of
from rocm_serve.diagnostics.plan import stage_table, survey
from rocm_serve.diagnostics.record import RESOLVED, STARTED, Redactor, versions
from rocm_serve.errors import UserError
from rocm_serve.executor import budget, stage_memory, step_memory

RUN_DIR_PREFIX = "rocm-serve-"
MOST_OF_A_LOG = 4 << 20  # bytes, from its end
_TOP = "rocm-serve-report"


def find_run_dir(given: Path | None) -> Path:
    """Return the run directory that was given, else the newest one of this host.

    Errors: UserError when there is none.
    """
    if given is not None:
        if not (given / RESOLVED).is_file() and not (given / "logs").is_dir():
            raise UserError(f"--run-dir {given} is no run directory: the server prints its own at the start")
        return given
    parent = Path(tempfile.gettempdir())
    found = [path for path in parent.glob(f"{RUN_DIR_PREFIX}*") if (path / RESOLVED).is_file()]
    if not found:
        raise UserError(
            f"no run directory {parent / RUN_DIR_PREFIX}* here: a server that ended well has removed its own;"
            " legal: --run-dir DIR"
        )
    return max(found, key=lambda path: path.stat().st_mtime)


def write_report(run_dir: Path, out: Path, environ: Mapping[str, str]) -> list[str]:
    """Pack the report of `run_dir` into `out` and return the names of its files.

    Secrets are taken out of every file; the archive is readable by its owner only.
    Errors: UserError when `out` cannot be written.
    """
    redactor = Redactor(environ)
    names: list[str] = []
    try:
        fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    with os.fdopen(fd, "wb") as stream, tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, text in _files(run_dir, redactor, environ):
            data = text.encode()
            entry = tarfile.TarInfo(f"{_TOP}/{name}")
            entry.size, entry.mode = len(data), 0o600
            tar.addfile(entry, io.BytesIO(data))
            names.append(name)
    return names


def _files(run_dir: Path, redactor: Redactor, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    here = {"run_dir": str(run_dir), "versions": versions(), "environment": redactor.environment(environ)}
    yield "report.json", _pretty(here)

    def redacted(path: Path) -> str:
        return _pretty(redactor.json(msgspec.json.decode(path.read_bytes())))

    for name in (RESOLVED, STARTED):
        if (run_dir / name).exists():
            yield name, _or_why(run_dir / name, redacted)
    if (run_dir / RESOLVED).exists():
        yield "plan.txt", redactor.text(_or_why(run_dir / RESOLVED, _plan))
    for log in sorted((run_dir / "logs").glob("*.log")):
        yield f"logs/{log.name}", redactor.text(_or_why(log, _end_of))


def _or_why(path: Path, read: Callable[[Path], str]) -> str:
    """Say of a broken file what is wrong with it: a report is wanted most where something broke."""
    try:
        return read(path)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        return f"{path.name} cannot be read: {error}\n"


def _plan(path: Path) -> str:
    resolved = msgspec.json.decode(path.read_bytes(), type=Resolved)
    return "\n".join(plan_lines(resolved)) + "\n"


def _pretty(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()


def plan_lines(resolved: Resolved) -> Iterator[str]:
    """Say what the ranks of each stage were to hold; one line when the model is not there any more."""
    try:
        seen = survey(resolved.model)
        mesh, experts = mesh_of(resolved), expert_plan(resolved, seen.facts)
        for stage in range(mesh.pp):
            coord = mesh.coord(stage * mesh.tp)
            params = stage_table(seen, coord, mtp=resolved.draft_tokens > 0, experts=experts).params
            weights = budget.human(stage_memory.weight_bytes(params, coord, resolved))
            step = budget.human(step_memory.step_bytes(params, seen.facts, coord, resolved))
            page = budget.human(stage_memory.page_bytes(seen.facts, coord, resolved))
            slot = budget.human(stage_memory.slot_bytes(seen.facts, coord, resolved))
            ranks = f"{coord.rank}..{coord.rank + mesh.tp - 1}"
            yield f"ranks {ranks} (stage {stage}): weights {weights}, step {step}, page {page}, slot {slot}"
    except UserError as error:
        yield f"no plan: {error}"


def _end_of(log: Path) -> str:
    size = log.stat().st_size
    with log.open("rb") as stream:
        stream.seek(max(0, size - MOST_OF_A_LOG))
        text = stream.read(MOST_OF_A_LOG).decode(errors="replace")
    return text if size <= MOST_OF_A_LOG else f"[the first {size - MOST_OF_A_LOG} bytes are left out]\n{text}"
