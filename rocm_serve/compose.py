"""Puts the parts together: the only file that knows server, engine and executor at once. No torch with workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console

from rocm_serve.checkpoint.ledger import validate
from rocm_serve.checkpoint.reader import CheckpointReader, read_config
from rocm_serve.config import load
from rocm_serve.config.experts import expert_plan
from rocm_serve.config.launcher import Membership, membership, split_address
from rocm_serve.config.op_forms import ruled_out
from rocm_serve.config.ops import check_called
from rocm_serve.config.resolve import check_wishes, resolve
from rocm_serve.config.schema import Resolved, ServeConfig
from rocm_serve.diagnostics.experts.counts import check_free
from rocm_serve.diagnostics.record import record_start
from rocm_serve.doors import TELL_S, busy_port, tell
from rocm_serve.engine.client import EngineClient
from rocm_serve.engine.thread import CoreThread, run_core_in_thread
from rocm_serve.errors import UserError
from rocm_serve.executor.api import Executor
from rocm_serve.executor.experts_memory import check_mori
from rocm_serve.executor.heartbeat import Heartbeat
from rocm_serve.lifeline import show_stacks_now, show_stacks_on_signal
from rocm_serve.messages import EffectiveLimits
from rocm_serve.models.qwen3_5.spec import parse_config
from rocm_serve.outputs import check_folder
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.platform import probe
from rocm_serve.report import curl_line, fallback_line, limit_lines, ready_line, start_up_lines
from rocm_serve.run_directory import run_directory
from rocm_serve.server.info import ServerInfo
from rocm_serve.server.parsers import check_tags_are_seen
from rocm_serve.server.run import bind, run
from rocm_serve.stop import ToldToStop
from rocm_serve.supervisor import WORKER, Supervisor
from rocm_serve.tokens.template import ChatTemplate
from rocm_serve.tokens.tokenizer import Tokenizer
from rocm_serve.trace import tracing
from rocm_serve.watchdog import InProcessWatch

log = logging.getLogger("rocm_serve")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
_LEAVE_S = 10.0


def place_of(config: ServeConfig) -> Membership:
    """Say where this process stands, once nothing in `config` is illegal. Errors: UserError."""
    check_wishes(config)
    return membership(config, load.environment())


def serve(config: ServeConfig, place: Membership, notes: tuple[str, ...] = ()) -> int:
    """Serve until told to stop; return the exit code. `notes`: what the command line has to say in the report.

    Errors: UserError, one line, before any big read wherever headers and configuration can tell.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    show_stacks_on_signal()
    if place.member > 0:
        return follow(config, place, notes)
    with run_directory() as keep, contextlib.ExitStack() as held:
        with telling_the_others(place, config.dist_timeout):
            sock = held.enter_context(contextlib.closing(bind(config.host, config.port)))
            resolved, tokenizer = prepare(config, keep.path, notes)
            check_ports(resolved)
        serve_world = serve_in_one_process if resolved.tp * resolved.pp == 1 else serve_with_workers
        code = serve_world(resolved, tokenizer, sock)
        keep.keep = code == EXIT_FAILED
        return code


def follow(config: ServeConfig, place: Membership, notes: tuple[str, ...] = ()) -> int:
    """Run this member's ranks for the server of member 0 until that ends, or anything fails."""
    with run_directory() as keep:
        with telling_the_others(place, config.dist_timeout):
            resolved, _ = prepare(config, keep.path, notes)

        def on_failure(sentence: str) -> None:
            if supervisor.exit_code != EXIT_USER_ERROR:  # which the last line of all tells
                log.error("%s", sentence)

        supervisor = Supervisor(resolved, load.environment(), on_failure=on_failure, echo=_echo)
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


@contextlib.contextmanager
def telling_the_others(place: Membership, dist_timeout: int) -> Iterator[None]:
    """Have the other members know why this one does not start, if it does not: they would wait for it for an hour."""
    try:
        yield
    except UserError as error:
        if place.members == 1 or place.init_addr is None:
            raise
        _echo(f"rocm-serve: {error}")
        kind = "node" if place.members == place.nnodes else "rank"
        within_s = min(TELL_S, float(dist_timeout))
        tell(kind, place.member, place.members, place.init_addr, str(error), _echo, within_s)
        raise SystemExit(EXIT_USER_ERROR) from None


def check_ports(resolved: Resolved) -> None:
    """Refuse before the others come, when member 0 has not all the ports that it needs. Errors: UserError."""
    if resolved.members > 1:
        host, port = split_address(resolved.dist_init_addr)
        taken = busy_port(host, port)
        if taken is not None:
            raise UserError(taken)


def prepare(config: ServeConfig, run_dir: Path, notes: tuple[str, ...] = ()) -> tuple[Resolved, Tokenizer]:
    """Read configuration, tokenizer and headers, ask the machine, decide everything, say it."""
    facts = parse_config(*read_config(config.model))
    tokenizer = Tokenizer.from_dir(config.model)
    if tokenizer.chat_template is not None:
        ChatTemplate(tokenizer.chat_template, {})  # the server compiles it again, when all of this has started
    check_tags_are_seen(tokenizer, config.reasoning_parser, config.tool_call_parser)
    if config.trace is not None:
        check_folder("--trace", Path(config.trace))
    if config.expert_counts is not None:
        check_free(config.expert_counts)
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
        notes=notes,
    )
    check_called(resolved, facts)
    placed = expert_plan(resolved, facts)
    check_mori(facts, placed, resolved, compute_units=platform.compute_units, environ=load.environment())
    record_start(resolved, platform, load.environment(), sys.argv, run_dir)
    if resolved.load_format == "auto":
        with CheckpointReader(resolved.model) as reader:
            mesh = Mesh(resolved.tp, resolved.pp, resolved.ep)
            stages = mesh.stages_of(resolved.node_rank, resolved.nnodes)
            validate(reader, facts, mesh, mtp=resolved.draft_tokens > 0, stages=stages, experts=placed)
    for line in start_up_lines(resolved, platform, everything=config.log_level == "debug"):
        log.info("%s", line)
    for note in (*resolved.notes, *ruled_out(resolved, facts)):
        log.warning("%s", note)
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
        sentence += f" (--watchdog-timeout {resolved.watchdog_timeout})"
        log.error("%s", sentence)
        failures.report(sentence)

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


def serve_with_workers(resolved: Resolved, tokenizer: Tokenizer, sock: socket.socket, *, worker: str = WORKER) -> int:
    """Run the engine and each rank as processes of their own, and watch them. `worker`: the module of a rank."""
    failures = _FailureLine()

    def on_failure(sentence: str) -> None:
        if supervisor.exit_code != EXIT_USER_ERROR:  # which the last line of all tells
            log.error("%s", sentence)
        failures.report(sentence)

    supervisor = Supervisor(
        resolved,
        load.environment(),
        on_failure=on_failure,
        echo=_echo,
        on_stop_wish=lambda: os.kill(os.getpid(), signal.SIGTERM),  # as if this node had been asked
        worker=worker,
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
    if code == EXIT_FAILED and supervisor.failure is None and leave_s == 0.0:
        log.error("the engine has failed: %s", failures.error)
    return code if supervisor.failure is None else EXIT_FAILED


def say_ready(resolved: Resolved, url: str, limits: EffectiveLimits) -> None:
    """Print the one line that says it is ready, one of what makes it slow if anything does, a command that works."""
    for line in limit_lines(limits):
        log.info("%s", line)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(ready_line(resolved, limits, url))
    slow = fallback_line(limits)
    if slow is not None:
        console.print(slow)
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

    @property
    def error(self) -> str | None:
        return self._reason if self._client is None else self._client.error

    def report(self, reason: str) -> None:
        """Tell the clients of the API the sentence, without the end of a log."""
        self._reason = reason.partition("; the end of ")[0]
        if self._loop is not None and self._client is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is left to be told
                self._loop.call_soon_threadsafe(self._client.fail, self._reason)


def _echo(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
