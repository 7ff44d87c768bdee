"""Probe providers on this node: in a child process, with a deadline for every call, and remembering what passed.

Only a pass is remembered. A failure may have been the machine's of that day; it is looked at again at every start.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlparse

import msgspec
import torch

from rocm_serve.agreement import source_hash
from rocm_serve.config.load import environment
from rocm_serve.ops.contract import Op
from rocm_serve.ops.facts import OpFacts
from rocm_serve.ops.probe_child import PRODUCT_TABLE, Began, Line, Request, Verdict

log = logging.getLogger(__name__)

START_S = 180.0
CALL_S = 300.0  # one call may have to compile its kernel first
Task = tuple[str, str]  # op, provider
_TICK_S = 0.2
_END_S = 30.0
_SOURCES = frozenset(
    (*(".py", ".csv", ".json", ".yaml", ".jinja", ".s", ".co"), *(".hip", ".cu", ".cuh", ".h", ".hpp", ".cpp", ".cc"))
)
_NO_SOURCES = frozenset(("build", "__pycache__", ".git"))
_CHILD = "rocm_serve.ops.probe_child"
_LINE: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


@dataclass(slots=True)
class NodeProber:
    """Probes on one device for all ranks of this node.

    `device` is torch's name of it, `machine` what its results hold for: architecture, compute units, torch's build.
    """

    ops: Mapping[str, Op]
    facts: OpFacts
    device: str
    machine: str
    run_dir: Path
    threads: int = 1
    seed: int = 0
    table: str = PRODUCT_TABLE
    cache_dir: Path | None = None  # None: nothing is remembered
    call_s: float = CALL_S
    moved: Callable[[], None] = lambda: None
    children: int = field(default=0, init=False)  # started so far
    verdicts: dict[Task, Verdict] = field(default_factory=dict, init=False)  # all that were given
    _hashes: dict[str, str] = field(default_factory=dict, init=False)  # by package; a second each for large ones

    def probe(self, tasks: Sequence[Task]) -> dict[Task, Verdict]:
        """Return a verdict for every task; those that once passed under the same key are not run again."""
        verdicts = {task: seen for task in tasks if (seen := self._remembered(task)) is not None}
        waiting = [task for task in tasks if task not in verdicts]
        while waiting:
            verdicts |= self._child(waiting)
            waiting = [task for task in tasks if task not in verdicts]
        for task, verdict in verdicts.items():
            passed = f"{verdict.calls} calls, relative L2 up to {verdict.error:.1e}"
            how = f"refused: {verdict.refused}" if verdict.refused else passed
            log.info("probe of %s by %s on %s: %s", *task, self.device, how)
        self.verdicts |= verdicts
        return verdicts

    def _child(self, tasks: Sequence[Task]) -> dict[Task, Verdict]:
        """Start one process for as many tasks as it gets through; at least one verdict comes back."""
        self.children += 1
        request = Request(tuple(tasks), self.facts, self.device, self.seed, self.threads, self.table)
        folder = Path(tempfile.mkdtemp(prefix="probe-", dir=self.run_dir if self.run_dir.is_dir() else None))
        question, errors = folder / "request.json", folder / "stderr.log"
        question.write_bytes(msgspec.json.encode(request))
        package = str(Path(__file__).parents[2])
        env = environment()
        env["PYTHONPATH"] = os.pathsep.join(p for p in (package, env.get("PYTHONPATH", "")) if p)
        with errors.open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", _CHILD, str(question)],
                stdin=subprocess.PIPE,  # never written to: it closes when this process ends, see lifeline
                stdout=subprocess.PIPE,
                stderr=err,
                env=env,
                start_new_session=True,  # with the compilers that it starts
            )
        try:
            return self._listen(process, tasks[0], errors)
        finally:
            _end(process)

    def _listen(self, process: subprocess.Popen[bytes], first: Task, errors: Path) -> dict[Task, Verdict]:
        verdicts: dict[Task, Verdict] = {}
        at = Began(*first, "starting")
        for line in _lines(process, self.call_s, self.moved):
            if line is None:
                why = f"{at.case}: no sign of life for {self.call_s:.0f} s; the probe was ended"
                return verdicts | {(at.op, at.provider): Verdict(at.op, at.provider, why)}
            news = _LINE.decode(line)
            if isinstance(news, Began):
                at = news
                continue
            verdicts[news.op, news.provider] = news
            if news.refused is None:
                self._remember(news)
        if not verdicts or (at.op, at.provider) not in verdicts:
            why = f"{at.case}: the probe's process {_how_it_ended(process)}{_last_line(errors)}"
            verdicts[at.op, at.provider] = Verdict(at.op, at.provider, why)
        return verdicts

    def key(self, task: Task) -> str:
        """Name what a pass holds for: our sources, the provider's packages, the machine, the shapes."""
        packages = self.ops[task[0]].providers[task[1]].packages
        parts = {
            "task": task,
            "table": self.table,
            "machine": self.machine,
            "sources": self._hash("rocm_serve", _own_sources),
            "packages": {name: self._hash(name, partial(package_hash, name)) for name in packages},
            "facts": msgspec.to_builtins(self.facts),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def _hash(self, name: str, compute: Callable[[], str]) -> str:
        if name not in self._hashes:
            self._hashes[name] = compute()
        return self._hashes[name]

    def _remembered(self, task: Task) -> Verdict | None:
        if self.cache_dir is None:
            return None
        with contextlib.suppress(OSError, msgspec.DecodeError):  # not there, or half written: it is probed again
            return msgspec.json.decode((self.cache_dir / f"{self.key(task)}.json").read_bytes(), type=Verdict)
        return None

    def _remember(self, verdict: Verdict) -> None:
        if self.cache_dir is None:
            return
        path = self.cache_dir / f"{self.key((verdict.op, verdict.provider))}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(msgspec.json.encode(verdict))
            part.replace(path)
        except OSError as error:
            log.warning("probes are not remembered: %s: %s", self.cache_dir, error.strerror)
            self.cache_dir = None


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Say where passes are remembered: $XDG_CACHE_HOME/rocm_serve/probes, ~/.cache by default."""
    home = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or tempfile.gettempdir()) / ".cache")
    return Path(home) / "rocm_serve" / "probes"


def machine_key(device: torch.device, arch: str, compute_units: int) -> str:
    """Name what results of a probe depend on beside sources and shapes."""
    card = f"{arch} {compute_units} units" if device.type == "cuda" else "cpu"
    return f"{card}, torch {torch.__version__}"  # which names its ROCm or CUDA


def package_hash(name: str) -> str:
    """Hash a distribution as it is installed: its record, and size and time of its files; "absent" without it.

    An editable installation is the source files of its folder, what it builds there left out.
    """
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return _tree_hash(Path(unquote(urlparse(origin["url"]).path)))
    whole = hashlib.sha256((distribution.read_text("RECORD") or distribution.version).encode())
    for file in distribution.files or ():
        if file.suffix == ".py":
            whole.update(_stamp(Path(str(distribution.locate_file(file)))))
    return whole.hexdigest()[:16]


def _own_sources() -> str:
    return f"{source_hash()} {_tree_hash(Path(__file__).parents[2] / 'kernels_hip')}"


def _tree_hash(folder: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.suffix in _SOURCES and _NO_SOURCES.isdisjoint(inside.parts):
            whole.update(inside.as_posix().encode() + b"\0" + _stamp(path))
    return whole.hexdigest()[:16]


def _stamp(path: Path) -> bytes:
    try:
        seen = path.stat()
    except OSError:
        return b"gone"
    return f"{seen.st_size} {seen.st_mtime_ns}\n".encode()


def _lines(process: subprocess.Popen[bytes], patience_s: float, moved: Callable[[], None]) -> Iterator[bytes | None]:
    """Give whole lines as they come, until the process closes its end; None when none came for `patience_s`.

    The first one may take START_S: torch and a GPU's driver have to be loaded.
    """
    assert process.stdout is not None
    fd = process.stdout.fileno()
    held, last, patience = b"", time.monotonic(), max(patience_s, START_S)
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while True:
            moved()
            if selector.select(_TICK_S):
                some = os.read(fd, 1 << 16)
                if not some:
                    return
                *whole, held = (held + some).split(b"\n")
                last, patience = time.monotonic(), patience_s
                yield from whole
            elif time.monotonic() - last > patience:
                yield None
                return


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of the child and of what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:  # its driver does not let go of it
        log.warning("the probe's process %d does not end %.0f s after SIGKILL", process.pid, _END_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return f"fell silent and did not end within {_END_S:.0f} s"
    return f"ended with exit code {code}" if code >= 0 else f"ended with signal {signal.Signals(-code).name}"


def _last_line(errors: Path) -> str:
    lines = errors.read_text(errors="replace").strip().splitlines()
    return f"; its last line: {lines[-1].strip()}" if lines else ""
