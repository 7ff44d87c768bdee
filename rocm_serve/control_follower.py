"""Another member's end of the control link (see control.py): it comes to member 0, or says why it cannot. No torch."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from typing import Final

from rocm_serve.agreement import difference
from rocm_serve.config.launcher import join_address
from rocm_serve.control import PADDING, REACH_S, SILENCE_S, small_packets_only
from rocm_serve.doors import CONTROL_PORT, drop_a_letter, say_by_another_door
from rocm_serve.frames import Connection, GroupLost, readable
from rocm_serve.messages import Beat, ControlMessage, GroupDown, Hello

UNANSWERED_S: Final = 5.0  # for member 0's host to answer, be it with a refusal, or for its control port to open
_RETRY_S: Final = 1.0
_OPENING_S: Final = 0.3  # for member 0 to open its four doors


class FollowerLink:
    """Another member's end."""

    def __init__(
        self, kind: str, member: int, members: int, host: str, port: int, address: str, checks: Mapping[str, str]
    ) -> None:
        self.complete = False
        self._kind = kind
        self._member = member
        self._members = members
        self._where = (host, port)
        self._checks = dict(checks)
        self._leader: Connection | None = None
        self._tried = 0.0
        self._silent_since: float | None = None  # as long as nothing answers, not even with a refusal
        self._refused_since: float | None = None
        self._error = "not tried yet"
        self._reach = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        self._reach.bind((address, 0))
        self._reach.listen()

    @property
    def connected(self) -> bool:
        return self._leader is not None

    def poll(self, timeout_s: float) -> list[tuple[int, ControlMessage]]:
        if self._leader is None:
            self._connect(timeout_s)
            return []
        leader = self._leader
        ready = readable([leader.sock], timeout_s)
        said: list[tuple[int, ControlMessage]] = []
        try:
            messages = leader.read() if ready else []
        except (EOFError, OSError):
            how = "" if leader.answered else " before it had said anything; or another program has that port"
            raise GroupLost(self._lost(f"has gone: the connection to its supervisor closed{how}")) from None
        for message in messages:
            if isinstance(message, Hello):
                self._begin(message)
            else:
                said.append((0, message))
        if leader.stalled and leader.answered and not self.complete:
            wrong = small_packets_only(leader.address, self._reach.getsockname()[0])
            self.send(GroupDown(wrong, 2))
            raise GroupLost(wrong, wish=True)
        if time.monotonic() - leader.heard > SILENCE_S:
            if not leader.answered:
                silent = (
                    f"{join_address(*self._where)} takes connections and says nothing: another program has that port,"
                    f" or {self._kind} 0 is of another version"
                )
                raise GroupLost(say_by_another_door(*self._where, lambda _: silent) or silent, wish=True)
            raise GroupLost(self._lost(f"has been silent for {SILENCE_S:.0f} s: its host or the link is down"))
        return said

    def send(self, message: ControlMessage) -> None:
        if self._leader is not None:
            with contextlib.suppress(OSError):  # reading finds it gone and says so
                self._leader.send(message)

    def waiting_for(self) -> str:
        me = f"{self._kind} {self._member} of {self._members}"
        if self._leader is None:
            return f"{me} waits for {self._kind} 0 at {join_address(*self._where)}: {self._error}"
        return f"{me} is connected to {self._kind} 0 at {self._leader.address}, which waits for others"

    def await_end(self, timeout_s: float) -> None:
        """Nobody to wait for: this end closes first."""

    def close(self) -> None:
        self._reach.close()
        if self._leader is not None:
            self._leader.close()

    def _lost(self, how: str) -> str:
        return f"{self._kind} 0 at {join_address(*self._where)} {how}"

    def _connect(self, timeout_s: float) -> None:
        wait = self._tried + _RETRY_S - time.monotonic()
        if wait > 0:
            time.sleep(min(wait, timeout_s))
            return
        self._tried = time.monotonic()
        try:
            sock = socket.create_connection(self._where, timeout=_RETRY_S)
        except OSError as error:
            self._error = error.strerror or str(error)
            self._no_connection(refused=isinstance(error, ConnectionRefusedError))
            return
        if sock.getsockname() == sock.getpeername():  # both ends on one host: a socket that has met itself
            sock.close()
            return
        self._leader = Connection(sock, join_address(*self._where))
        self._try_doors(str(sock.getsockname()[0]))
        address, port = self._reach.getsockname()[:2]
        self.send(Beat())  # a small packet: if this comes and the next does not, it is the size
        self.send(Hello(self._member, self._checks, address, port, PADDING))

    def _no_connection(self, *, refused: bool) -> None:
        """Take note; errors: GroupLost once it is sure that waiting does not help.

        A refusal is an answer: member 0 has not started yet, or a firewall rejects. No answer is a firewall that
        drops, a wrong address, a way with no way back.
        """
        now = time.monotonic()
        if refused:
            self._silent_since, self._refused_since = None, self._refused_since or self._tried
            since = self._refused_since
        else:
            self._silent_since, self._refused_since = self._silent_since or self._tried, None
            since = self._silent_since
        if now - since < UNANSWERED_S:
            return
        host, port = self._where
        if refused and not _front_alone_is_shut(host, port):
            return
        me, ports = f"{self._kind} {self._member}", f"{port - CONTROL_PORT} to {port}"

        def one_door_is_shut(other: int) -> str:
            return _one_is_shut(me, host, other, port, self._error, ports)

        told = say_by_another_door(host, port, one_door_is_shut)
        if told is not None:
            raise GroupLost(told, wish=True)
        self._refused_since = None if refused else self._refused_since
        if not refused:
            address = self._reach.getsockname()[0]
            told = (
                f"{me} at {address} calls {host} and has had no answer for {now - since:.0f} s, not even a refusal"
                f" ({self._error}): --dist-init-addr may be a wrong address, a firewall may drop ports {ports}, or"
                f" {self._kind} 0 has no route back to {address}"
            )
            drop_a_letter(host, port, told)
            raise GroupLost(told, wish=True)

    def _begin(self, hello: Hello) -> None:
        wrong = difference(hello.checks, f"{self._kind} 0", self._checks, f"{self._kind} {self._member}")
        if wrong is not None:
            raise GroupLost(wrong, wish=True)
        self.complete = True

    def _try_doors(self, source: str) -> None:
        """Go through the other three doors, which are open until all are there; later, queues only try on in silence.

        `source`: this end's address at the control port. Errors: GroupLost, after member 0 was told.
        """
        host, port = self._where
        me, wrong = f"{self._kind} {self._member}", None
        for other in range(port - CONTROL_PORT, port):
            try:
                with socket.create_connection((host, other), timeout=REACH_S) as door:
                    here = str(door.getsockname()[0])
            except OSError as error:
                why, ports = error.strerror or str(error), f"{port - CONTROL_PORT} to {port}"
                wrong = _one_is_shut(me, host, port, other, why, ports)
                break
            if here != source:
                wrong = (
                    f"{me} reaches {host} from {source} on port {port} but from {here} on port {other}: a rule (ip"
                    " rule) sends that port out by another interface; remove it, or give an address in the network of"
                    f" {here}"
                )
                break
        if wrong is not None:
            self.send(GroupDown(wrong, 2))
            raise GroupLost(wrong, wish=True)


def _one_is_shut(me: str, host: str, opened: int, shut: int, why: str, ports: str) -> str:
    return (
        f"{me} reaches {host} on port {opened} but not on {shut} ({why}): a firewall, or another program on {opened}?"
        f" Ports {ports} must be open"
    )


def _front_alone_is_shut(host: str, port: int) -> bool:
    """Whether another door is open and, a moment later, the control port still is not: member 0 opens it last."""
    if not any(_opens(host, other) for other in range(port - CONTROL_PORT, port)):
        return False
    time.sleep(_OPENING_S)
    return not _opens(host, port)


def _opens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_RETRY_S).close()
    except OSError:
        return False
    return True
