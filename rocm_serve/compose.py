"""Puts the parts together: the only file that knows server, engine and executor at once. No torch with workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console

from rocm_serve.checkpoint.ledger import validate
from rocm_serve.checkpoint.reader import CheckpointReader, read_config
from rocm_serve.config import load
from rocm_serve.config.launcher import membership
from rocm_serve.config.resolve import check_wishes, resolve
from rocm_serve.config.schema import Resolved, ServeConfig
from rocm_serve.diagnostics.collect import RUN_DIR_PREFIX
from rocm_serve.diagnostics.record import record_start
from rocm_serve.engine.client import EngineClient
from rocm_serve.engine.link import LONGEST_NAME, endpoint
from rocm_serve.engine.thread import CoreThread, run_core_in_thread
from rocm_serve.errors import UserError
from rocm_serve.executor.api import Executor
from rocm_serve.executor.heartbeat import Heartbeat
from rocm_serve.lifeline import show_stacks_now, show_stacks_on_signal
from rocm_serve.messages import EffectiveLimits
from rocm_serve.models.qwen3_5.spec import parse_config
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.platform import probe
from rocm_serve.report import curl_line, limit_lines, ready_line, start_up_lines
from rocm_serve.server.info import ServerInfo
from rocm_serve.server.run import bind, run
from rocm_serve.stop import ToldToStop
from rocm_serve.supervisor import Supervisor
from rocm_serve.tokens.template import ChatTemplate
from rocm_serve.tokens.tokenizer import Tokenizer
from rocm_serve.trace import check_folder, tracing
from rocm_serve.watchdog import InProcessWatch

log = logging.getLogger("rocm_serve")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
_LEAVE_S = 10.0


def serve(config: ServeConfig) -> int:
    """Serve until told to stop; return the exit code.

    Errors: UserError, one line, before any big read wherever headers and configuration can tell.
    """
    check_wishes(config)
    place = membership(config, load.environment())
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    show_stacks_on_signal()
    if place.member > 0:
        return follow(config)
    with run_directory() as keep, contextlib.closing(bind(config.host, config.port)) as sock:
        resolved, tokenizer = prepare(config, keep.path)
        serve_world = serve_in_one_process if resolved.tp * resolved.pp == 1 else serve_with_workers
        code = serve_world(resolved, tokenizer, sock)
        keep.keep = code == EXIT_FAILED
        return code


def follow(config: ServeConfig) -> int:
    """Run this member's ranks for the server of member 0 until that ends, or anything fails."""
    with run_directory() as keep:
        resolved, _ = prepare(config, keep.path)
        supervisor = Supervisor(resolved, load.environment(), on_failure=log.error, echo=_echo)
        asked = 0

        def on_signal(number: int, frame: FrameType | None) -> None:
            nonlocal asked
            asked += 1
            if asked == 1:
                supervisor.ask_to_stop()
            else:
                supervisor.over.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
        supervisor.start()
        try:
            supervisor.over.wait()
        finally:
            supervisor.stop(supervisor.leave_grace_s)
        if supervisor.failure is not None and supervisor.exit_code == EXIT_USER_ERROR:
            raise UserError(supervisor.failure)
        keep.keep = supervisor.failure is not None or asked > 1
        return EXIT_FAILED if keep.keep else EXIT_OK


def prepare(config: ServeConfig, run_dir: Path) -> tuple[Resolved, Tokenizer]:
    """Read configuration, tokenizer and headers, ask the machine, decide everything, say it."""
    facts = parse_config(*read_config(config.model))
    tokenizer = Tokenizer.from_dir(config.model)
    if tokenizer.chat_template is not None:
        ChatTemplate(tokenizer.chat_template, {})  # the server compiles it again, when all of this has started
    if config.trace is not None:
        check_folder(config.trace)
    platform = probe.probe(config.device)
    resolved = resolve(
        config,
        facts,
        platform,
        vocab_used=tokenizer.vocab_used,
        run_dir=str(run_dir),
        free_port=probe.free_port,
        environ=load.environment(),
        find_network=probe.find_network,
    )
    record_start(resolved, platform, load.environment(), sys.argv, run_dir)
    if resolved.load_format == "auto":
        with CheckpointReader(resolved.model) as reader:
            mesh = Mesh(resolved.tp, resolved.pp)
            validate(reader, facts, mesh, mtp=False, stages=mesh.stages_of(resolved.node_rank, resolved.nnodes))
    for line in start_up_lines(resolved, platform, everything=config.log_level == "debug"):
        log.info("%s", line)
    return resolved, tokenizer


def serve_in_one_process(resolved: Resolved, tokenizer: Tokenizer, sock: socket.socket) -> int:
    """Run engine and model as a thread beside the server."""
    load.set_library_defaults()
    from rocm_serve.executor.local import LocalExecutor

    leave_s = 1.0  # a core that still loads has nothing to finish; its thread ends with the process
    heartbeat = Heartbeat()
    failures = _FailureLine()

    def make_executor() -> Executor:
        return LocalExecutor(resolved, heartbeat)

    clients: list[EngineClient] = []

    def make_client() -> EngineClient:
        clients.append(EngineClient(resolved.run_dir))
        failures.connect(clients[0])
        return clients[0]

    def on_stuck(sentence: str) -> None:
        nonlocal leave_s
        leave_s = 0.0  # the thread will not come back
        show_stacks_now()
        failures.report(f"{sentence} (--watchdog-timeout {resolved.watchdog_timeout})")

    def on_ready(url: str, limits: EffectiveLimits) -> None:
        nonlocal leave_s
        leave_s = _LEAVE_S
        say_ready(resolved, url, limits)

    with tracing(resolved.trace, "core") as trace:
        watch = InProcessWatch(heartbeat, resolved.watchdog_timeout, on_stuck)
        watch.start()
        core: CoreThread = run_core_in_thread(resolved, make_executor, trace=trace)
        try:
            code = run(make_client, tokenizer, ServerInfo.from_resolved(resolved), sock, on_ready=on_ready)
        finally:
            watch.end()
            core.join(leave_s)
    if core.exit_code == EXIT_USER_ERROR:
        raise UserError(clients[0].error)
    return code


def serve_with_workers(resolved: Resolved, tokenizer: Tokenizer, sock: socket.socket) -> int:
    """Run the engine and each rank as processes of their own, and watch them."""
    failures = _FailureLine()
    supervisor = Supervisor(
        resolved,
        load.environment(),
        on_failure=failures.report,
        echo=_echo,
        on_stop_wish=lambda: os.kill(os.getpid(), signal.SIGTERM),  # as if this node had been asked
    )

    def make_client() -> EngineClient:
        client = EngineClient(resolved.run_dir)
        failures.connect(client)
        return client

    leave_s = 0.0  # nothing to wait for before the engine is ready

    def on_ready(url: str, limits: EffectiveLimits) -> None:
        nonlocal leave_s
        leave_s = _LEAVE_S
        supervisor.quiet()
        say_ready(resolved, url, limits)

    try:
        supervisor.start()
        code = run(make_client, tokenizer, ServerInfo.from_resolved(resolved), sock, on_ready=on_ready)
    except ToldToStop:
        supervisor.stop(0.0)
        raise
    except BaseException as error:
        supervisor.stop(0.0, because=f"the HTTP server failed: {type(error).__name__}: {error}")
        raise
    supervisor.stop(leave_s)
    if supervisor.failure is not None and supervisor.exit_code == EXIT_USER_ERROR:
        raise UserError(supervisor.failure)
    return code if supervisor.failure is None else EXIT_FAILED


def say_ready(resolved: Resolved, url: str, limits: EffectiveLimits) -> None:
    """Print the one line that says it is ready, and a command that works."""
    for line in limit_lines(limits):
        log.info("%s", line)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(ready_line(resolved, limits, url))
    console.print(curl_line(resolved, url))


class _FailureLine:
    """Carries the supervisor's bad news from its thread into the event loop of the client."""

    def __init__(self) -> None:
        self._client: EngineClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reason: str | None = None

    def connect(self, client: EngineClient) -> None:
        """Begin to pass on. Called inside the event loop."""
        self._loop = asyncio.get_running_loop()
        self._client = client
        if self._reason is not None:
            client.fail(self._reason)

    def report(self, reason: str) -> None:
        """Log all of it; clients of the API get the sentence without the end of a log."""
        log.error("%s", reason)
        self._reason = reason.partition("; the end of ")[0]
        if self._loop is not None and self._client is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is left to be told
                self._loop.call_soon_threadsafe(self._client.fail, self._reason)


class RunDirectory:
    """A folder for sockets and logs; removed at the end unless `keep` is set."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keep = False


@contextlib.contextmanager
def run_directory() -> Iterator[RunDirectory]:
    """Make this run's folder, and remove it unless somebody has to read its logs."""
    try:
        directory = RunDirectory(Path(tempfile.mkdtemp(prefix=RUN_DIR_PREFIX)))
    except OSError as error:
        raise UserError(f"no folder for sockets and logs: {error.strerror}; TMPDIR may name one") from None
    node_log = None
    try:
        endpoint(str(directory.path), LONGEST_NAME)
        (directory.path / "logs").mkdir()
        node_log = logging.FileHandler(directory.path / "logs" / "node.log")
        node_log.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logging.getLogger().addHandler(node_log)
        yield directory
    finally:
        if node_log is not None:
            logging.getLogger().removeHandler(node_log)
            node_log.close()
        if directory.keep:
            _echo(f"logs are kept in {directory.path}; rocm-serve report --run-dir {directory.path} packs them")
        else:
            shutil.rmtree(directory.path, ignore_errors=True)


def _echo(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
