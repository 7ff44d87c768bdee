"""Starts the processes of this member, watches them, and ends them: ranks, and on member 0 the engine core. No torch.

Children are fresh interpreters with a log file each; each dies with this process (see `lifeline`). With several
members the supervisors meet first (see `control`), compare what must be equal, and then live and die together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rocm_serve.agreement import agreement, identity
from rocm_serve.children import SUFFERED, USER_ERROR, Child, child_environment, end_processes, stacks_of, wait_for
from rocm_serve.config.launcher import split_address
from rocm_serve.config.schema import Resolved
from rocm_serve.control import Link
from rocm_serve.control_follower import FollowerLink
from rocm_serve.control_leader import LeaderLink
from rocm_serve.doors import CONTROL_PORT
from rocm_serve.executor.heartbeat import Phase
from rocm_serve.frames import GroupLost
from rocm_serve.messages import AskToStop, Beat, ControlMessage, DumpStacks, GroupDown, Leave, RankBeat, Stacks
from rocm_serve.watchdog import BEAT_S, Stuck, Watch, rank_beat

_TICK_S = 0.1
_SIBLINGS_S = 1.0  # where processes have only suffered, the cause is seen within this time
_PROGRESS_S = 5.0  # between lines that say what the start waits for
_STACKS_S = 2.5  # for other members to send theirs
_STALE_S = 3 * BEAT_S  # a member's beats that are older say nothing about its ranks
_TERM_S = 1.0
_LAST_WORDS_S = 2.0  # for other members to close, once it is over
_START_LINES_S = 10.0
WORKER = "rocm_serve.executor.worker"
_CORE = -1  # among ranks
_NOT_THERE_YET = (Phase.STARTING.words, Phase.JOINING.words)


class _Over(Exception):
    """Something failed, here or (`elsewhere`) at another member, whose name the sentence bears then."""

    def __init__(self, sentence: str, exit_code: int, *, elsewhere: bool = False) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code
        self.elsewhere = elsewhere


@dataclass(slots=True)
class Callbacks:
    """Whom the supervisor tells, from its own thread."""

    on_failure: Callable[[str], None]
    echo: Callable[[str], None]
    on_stop_wish: Callable[[], None] = lambda: None


class Supervisor:
    """The children of one `rocm-serve serve`.

    `env` is the environment that children start from. `on_failure` is called once, from the watching thread, with
    the sentence that says who ended and why; by then the other children are being ended. `echo` gets start-up lines.
    `on_stop_wish` is called when another member was asked to stop. `worker` is the module that a rank runs.
    """

    def __init__(
        self,
        resolved: Resolved,
        env: Mapping[str, str],
        *,
        on_failure: Callable[[str], None],
        echo: Callable[[str], None],
        on_stop_wish: Callable[[], None] = lambda: None,
        worker: str = WORKER,
    ) -> None:
        self._resolved = resolved
        self._worker = worker
        self._run_dir = Path(resolved.run_dir)
        self._env = env
        self._tell = Callbacks(on_failure, echo, on_stop_wish)
        self._children: list[Child] = []
        self._link: Link | None = None
        self._watch = Watch(resolved.watchdog_timeout)
        self._core_watch = Watch(resolved.watchdog_timeout)
        self._shown: set[str] = set()  # children whose stacks are in their logs already
        self._remote: dict[int, tuple[RankBeat, ...]] = {}
        self._heard: dict[int, float] = {}  # when they came
        self._last_beat = 0.0
        self._last_start_line = time.monotonic()
        self._stopping = threading.Event()
        self._stop_wish = threading.Event()
        self._quiet = threading.Event()
        self._watcher: threading.Thread | None = None
        self.over = threading.Event()  # failed, or told to leave
        self.failure: str | None = None
        self.exit_code = 0
        self.leave_grace_s = 0.0  # as member 0 has said

    def start(self) -> None:
        """Meet the other members, if there are any, start the children, and watch. Returns at once."""
        (self._run_dir / "logs").mkdir(parents=True, exist_ok=True)
        if self._resolved.members == 1:
            self._spawn_all()
        self._watcher = threading.Thread(target=self._live, name="supervisor", daemon=True)
        self._watcher.start()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name: "core", "rank-0" and so on."""
        return {child.name: child.process.pid for child in self._children}

    @property
    def exit_codes(self) -> dict[str, int | None]:
        """Exit codes by name; None while a child runs, negative for a signal."""
        return {child.name: child.process.poll() for child in self._children}

    def quiet(self) -> None:
        """Stop echoing: the server is ready, what follows is in the logs."""
        self._quiet.set()

    def ask_to_stop(self) -> None:
        """Wish for an orderly end, which member 0 arranges. `over` says when it is done."""
        self._stop_wish.set()

    def stop(self, grace_s: float = 10.0, *, because: str | None = None) -> None:
        """Let drained children leave on their own, then end the rest; remove sockets. Idempotent.

        A child that failed while nobody watched any more still sets `failure` and `exit_code`, unless it was given no
        time: then it was cut off in whatever it did. `because`: this is no
        orderly end, and the other members are told why.
        """
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join()
        if because is not None and self.failure is None:
            self.failure, self.exit_code = because, 1
            if self._link is not None:
                self._link.send(GroupDown(f"{self._name()}: {because}", 1))
        if self._link is not None and self.failure is None and self._resolved.member == 0:
            self._link.send(Leave(grace_s))
        wait_for([child.process for child in self._children], grace_s)
        if self.failure is None and grace_s > 0 and self._ended_badly():
            self.failure, self.exit_code = self._cause()
            if self._link is not None:
                self._link.send(GroupDown(self.failure, self.exit_code))
        end_processes([child.process for child in self._children], grace_s=0.0)
        if self._link is not None:
            self._link.await_end(grace_s if self.failure is None else min(grace_s, _LAST_WORDS_S))
            self._link.close()
        self._remove_files()

    def _live(self) -> None:
        try:
            if self._resolved.members > 1:
                self._link = self._open_link()
                if not self._meet(self._link):
                    return
                self._spawn_all()
            while not self._stopping.wait(_TICK_S):
                if self._look():
                    return
        except _Over as over:
            self._fail(str(over), over.exit_code, elsewhere=over.elsewhere)
        except GroupLost as lost:
            self._fail(str(lost), USER_ERROR if lost.wish else 1)
        except Exception as error:
            self._fail(f"the supervisor failed: {type(error).__name__}: {error}", 1)
            raise
        finally:
            self.over.set()

    def _open_link(self) -> Link:
        resolved = self._resolved
        kind = "node" if resolved.members == resolved.nnodes else "rank"
        host, port = split_address(resolved.dist_init_addr)
        port += CONTROL_PORT
        checks = agreement(resolved, self._env)
        self._tell.echo(f"{self._name()} at {resolved.address} on {resolved.interface}: {identity(checks)}")
        if resolved.member == 0:
            return LeaderLink(kind, resolved.members, host, port, checks)
        return FollowerLink(kind, resolved.member, resolved.members, host, port, resolved.address, checks)

    def _meet(self, link: Link) -> bool:
        """Wait until everybody is there; False if told to leave before that."""
        began = said = time.monotonic()
        while not self._stopping.is_set():
            for _, message in link.poll(_TICK_S):
                if self._take(message):
                    return False
            if link.complete:
                self._tell.echo(f"all {self._resolved.members} supervisors have met and agree")
                return True
            if self._stop_wish.is_set():
                self._stop_wish.clear()
                if not link.connected:
                    return False
                link.send(AskToStop())
            now = time.monotonic()
            self._beat(link, now)
            if now - began > self._resolved.dist_timeout:
                raise _Over(f"{link.waiting_for()}; gave up after --dist-timeout {self._resolved.dist_timeout} s", 1)
            if now - said >= _PROGRESS_S:
                said = now
                self._tell.echo(f"{link.waiting_for()} for {now - began:.0f} s")
        return False

    def _spawn_all(self) -> None:
        resolved, run_dir = self._resolved, self._resolved.run_dir
        file = self._run_dir / "resolved.json"
        file.write_bytes(msgspec.json.encode(resolved))
        common = ("--resolved", str(file))
        if resolved.member == 0:
            env = child_environment(resolved, self._env)
            self._children.append(Child.spawn("core", None, ("rocm_serve.engine.main", *common), run_dir, env))
        for rank in resolved.local_ranks:
            env = child_environment(resolved, self._env, rank)
            command = (self._worker, *common, "--rank", str(rank))
            self._children.append(Child.spawn(f"rank-{rank}", rank, command, run_dir, env))

    def _look(self) -> bool:
        """One look at everything; True when told to leave. Errors: _Over, GroupLost."""
        self._echo_new_lines()
        if self._ended_badly() and self._hear_siblings():
            return True
        if self._link is not None:
            for member, message in self._link.poll(0):
                if isinstance(message, Beat):
                    self._remote[member] = message.ranks
                    self._heard[member] = time.monotonic()
                elif self._take(message):
                    return True
            if self._stop_wish.is_set():
                self._stop_wish.clear()
                self._link.send(AskToStop())
        now = time.monotonic()
        if now - self._last_beat >= BEAT_S:
            mine = self._beat(self._link, now)
            self._say_who_starts(mine, now)
            if self._resolved.member == 0:
                self._find_stuck(mine, now)
        return False

    def _take(self, message: ControlMessage) -> bool:
        """React to another member's word; True when told to leave."""
        if isinstance(message, GroupDown):
            raise _Over(message.error, message.exit_code, elsewhere=True)
        if isinstance(message, DumpStacks):
            self._dump(message.ranks)
        if isinstance(message, AskToStop):
            self._tell.echo("another node was told to stop, so this one stops too")
            self._tell.on_stop_wish()
        if isinstance(message, Leave):
            self._tell.echo("node 0 stops, so this one ends")
            self.leave_grace_s = message.grace_s
            return True
        return False

    def _beat(self, link: Link | None, now: float) -> tuple[RankBeat, ...]:
        """Say that this member lives and where its ranks are."""
        mine = tuple(_beat_of(child) for child in self._children)
        if link is not None and now - self._last_beat >= BEAT_S:
            link.send(Beat(mine))
        self._last_beat = now
        return mine

    def _say_who_starts(self, mine: tuple[RankBeat, ...], now: float) -> None:
        """Name the ranks that are not there yet: they owe no progress, and torch waits for them in silence."""
        if now - self._last_start_line < _START_LINES_S:
            return
        self._last_start_line = now
        late = [beat for beat in mine if beat.rank != _CORE and beat.phase in _NOT_THERE_YET]
        if late and not self._quiet.is_set():
            told = (f"rank {beat.rank} {beat.phase}{', stopped by a signal' if beat.stopped else ''}" for beat in late)
            self._tell.echo(f"still: {'; '.join(told)}")

    def _find_stuck(self, mine: tuple[RankBeat, ...], now: float) -> None:
        submitted = max((beat.step for beat in mine if beat.rank == _CORE), default=-1)
        ranks = [beat for beats in (mine, *self._remote.values()) for beat in beats if beat.rank != _CORE]
        stuck = self._watch.look(ranks, submitted, now)
        stuck += self._core_watch.look([beat for beat in mine if beat.rank == _CORE], -1, now)
        silent = any(now - heard > _STALE_S for heard in self._heard.values())
        if stuck and not silent:  # of who is silent nothing is known: the link finds that, within SILENCE_S
            self._give_up(stuck)

    def _give_up(self, stuck: list[Stuck]) -> None:
        """Have the stuck show their stacks, then end everything. Errors: _Over, always."""
        ranks = tuple(one.beat.rank for one in stuck)
        local = {rank for rank in ranks if rank in self._resolved.local_ranks or rank == _CORE}
        if self._link is not None:
            self._link.send(DumpStacks(ranks))
        stacks = self._dump(ranks)
        end = time.monotonic() + _STACKS_S
        while self._link is not None and len(stacks) < len(ranks) - len(local) + len(local & stacks.keys()):
            if time.monotonic() > end:
                break
            for _, message in self._link.poll(_TICK_S):
                if isinstance(message, Stacks):
                    stacks[message.rank] = message.text
                    self._tell.echo(f"[rank-{message.rank}] stacks:\n{message.text}")
        sentence = f"{stuck[0].sentence()} (--watchdog-timeout {self._resolved.watchdog_timeout})"
        others = [one.sentence() for one in stuck[1:]]
        raise _Over("; ".join([sentence, *others]), 1)

    def _dump(self, ranks: tuple[int, ...]) -> dict[int, str]:
        """Show the stacks of those of `ranks` that are children, and send them to member 0."""
        asked = {_CORE if child.rank is None else child.rank: child for child in self._children}
        asked = {rank: child for rank, child in asked.items() if rank in ranks}
        texts = stacks_of(list(asked.values()))
        self._shown |= texts.keys()
        for rank, child in asked.items():
            text = texts[child.name] or "it did not answer"
            child.new_lines()
            self._tell.echo(f"[{child.name}] stacks (also in {child.log}):\n{text}")
            if self._link is not None and self._resolved.member != 0:
                self._link.send(Stacks(rank, text))
        return {rank: texts[child.name] for rank, child in asked.items()}

    def _hear_siblings(self) -> bool:
        """Name the cause among all that have ended, here and elsewhere; True when it was told to leave after all.

        Errors: _Over.
        """
        end = time.monotonic() + _SIBLINGS_S
        while time.monotonic() < end and all(child.guilt >= SUFFERED for child in self._ended_badly()):
            if self._link is None:
                time.sleep(_TICK_S)
                continue
            for _, message in self._link.poll(_TICK_S):
                if self._take(message):
                    return True
        self._echo_new_lines()
        raise _Over(*self._cause())

    def _fail(self, sentence: str, exit_code: int, *, elsewhere: bool = False) -> None:
        self.failure, self.exit_code = sentence, exit_code
        if self._link is not None and (self._resolved.member == 0 or not elsewhere):
            named = elsewhere or exit_code == USER_ERROR
            self._link.send(GroupDown(sentence if named else f"{self._name()}: {sentence}", exit_code))
        self._tell.on_failure(sentence)
        if exit_code != USER_ERROR:  # into their logs
            stacks_of([child for child in self._children if child.name not in self._shown])
        for child in self._children:
            if child.process.poll() != 0:
                self._tell.echo(child.fate())
        end_processes([child.process for child in self._children], grace_s=0.0, term_s=_TERM_S)
        self._remove_files()

    def _name(self) -> str:
        kind = "node" if self._resolved.members == self._resolved.nnodes else "rank"
        return f"{kind} {self._resolved.member}"

    def _echo_new_lines(self) -> None:
        for child in self._children:
            for line in child.new_lines():
                if not self._quiet.is_set():
                    self._tell.echo(f"[{child.name}] {line}")

    def _ended_badly(self) -> list[Child]:
        return [child for child in self._children if child.ended_badly]

    def _cause(self) -> tuple[str, int]:
        cause = min(self._ended_badly(), key=lambda child: child.guilt)
        return cause.how_it_ended(), USER_ERROR if cause.process.returncode == USER_ERROR else 1

    def _remove_files(self) -> None:
        for path in self._run_dir.glob("*"):
            if path.is_socket() or path.suffix == ".beat":
                path.unlink(missing_ok=True)


def _beat_of(child: Child) -> RankBeat:
    if child.rank is not None:
        beat = rank_beat(child.rank, child.progress, stopped=child.stopped)
    else:
        beat = msgspec.structs.replace(rank_beat(_CORE, child.progress, stopped=child.stopped), owes=True)
    return msgspec.structs.replace(beat, owes=False) if child.process.poll() is not None else beat
