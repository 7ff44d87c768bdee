"""The control link: member 0 and every other supervisor, one TCP connection each. No torch, no pickle.

Frames are msgpack behind a magic word, the wire version and a length. A connection that closes is the fastest news of
a death that there is, and a refused one has a name: hence plain TCP. Beats find what closes nothing: a cut cable, a
frozen host. One thread uses a link; nothing here waits longer than it says.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from typing import Final, Protocol

from rocm_serve.agreement import difference
from rocm_serve.config.launcher import join_address
from rocm_serve.doors import CONTROL_PORT, Doors, PortTaken, drop_a_letter, say_by_another_door
from rocm_serve.frames import Connection, GroupLost, readable
from rocm_serve.messages import Beat, ControlMessage, GroupDown, Hello

SILENCE_S: Final = 6.0  # twelve beats; with the kills that follow a group ends within 15 s of a cut link
UNANSWERED_S: Final = 5.0  # for member 0's host to answer, be it with a refusal, or for its control port to open
_REACH_S: Final = 3.0
_RETRY_S: Final = 1.0
_OPENING_S: Final = 0.3  # for member 0 to open its four doors
_MAX_STRANGERS: Final = 16
_PADDING: Final = bytes(1 << 16)  # of a Hello, so that it takes packets as large as the network takes


class Link(Protocol):
    """One member's end of the control link."""

    complete: bool  # everybody is there and agrees

    @property
    def connected(self) -> bool:
        """Whether there is anybody to speak to."""
        ...

    def poll(self, timeout_s: float) -> list[tuple[int, ControlMessage]]:
        """Return what members have said. Errors: GroupLost."""
        ...

    def send(self, message: ControlMessage) -> None:
        """Tell every member at the other end."""
        ...

    def waiting_for(self) -> str:
        """Say what the start waits for."""
        ...

    def await_end(self, timeout_s: float) -> None:
        """Wait until the other ends have closed."""
        ...

    def close(self) -> None: ...


class LeaderLink:
    """Member 0's end: waits for all others, compares, and then hears each of them.

    `kind` is what a member is called: "node", or "rank" when every rank has a process.
    """

    def __init__(self, kind: str, members: int, host: str, port: int, checks: Mapping[str, str]) -> None:
        self.complete = False
        self._kind = kind
        self._members = members
        self._checks = dict(checks)
        self._host = host
        self._address = join_address(host, port)
        try:
            self._doors = Doors(host, port)
        except PortTaken as taken:
            raise GroupLost(f"{taken} on {kind} 0", wish=True) from None
        self._strangers: list[Connection] = []
        self._peers: dict[int, Connection] = {}
        self._lost: GroupLost | None = None

    @property
    def connected(self) -> bool:
        return bool(self._peers)

    def poll(self, timeout_s: float) -> list[tuple[int, ControlMessage]]:
        said: list[tuple[int, ControlMessage]] = []
        by_socket = {peer.sock: (member, peer) for member, peer in self._peers.items()}
        strangers = {one.sock: one for one in self._strangers}
        for sock in readable([*self._doors.sockets, *by_socket, *strangers], timeout_s):
            if sock is self._doors.mail:
                self._read_letter()
            elif sock in self._doors.listening:
                self._strangers.append(self._doors.accept(sock))
                for one in self._strangers[:-_MAX_STRANGERS]:
                    one.close()
                del self._strangers[:-_MAX_STRANGERS]
            elif sock in strangers:
                self._hear_stranger(strangers[sock])
            else:
                member, peer = by_socket[sock]
                try:
                    said += [(member, message) for message in peer.read()]
                except (EOFError, OSError):
                    self._lose(member, peer, "has gone: the connection to its supervisor closed")
        self._check_stalled()
        for member, peer in list(self._peers.items()):
            if time.monotonic() - peer.heard > SILENCE_S:
                self._lose(member, peer, f"has been silent for {SILENCE_S:.0f} s: its host or the link is down")
        if self._lost is not None and not said:  # what was said before is heard first: it may be the reason
            raise self._lost
        return said

    def send(self, message: ControlMessage) -> None:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # reading finds it gone and says so
                peer.send(message)

    def waiting_for(self) -> str:
        missing = [member for member in range(1, self._members) if member not in self._peers]
        which = ", ".join(map(str, missing))
        plural = "s" if len(missing) > 1 else ""
        nobody = "nothing has connected yet" if not self._peers else f"{len(self._peers)} connected so far"
        return f"waiting for {self._kind}{plural} {which} of {self._members} at {self._address}: {nobody}"

    def await_end(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        for peer in self._peers.values():
            _read_to_end(peer, end)

    def close(self) -> None:
        for one in (*self._peers.values(), *self._strangers):
            one.close()
        self._doors.close()

    def _lose(self, member: int, peer: Connection, how: str) -> None:
        peer.close()
        del self._peers[member]
        self._lost = self._lost or GroupLost(f"{self._kind} {member} at {peer.address} {how}")

    def _hear_stranger(self, one: Connection) -> None:
        try:
            messages = one.read()
        except (EOFError, OSError):  # a port scan, or a supervisor that changed its mind
            one.close()
            if one in self._strangers:
                self._strangers.remove(one)
            return
        for message in messages:
            if isinstance(message, Hello):
                self._strangers.remove(one)
                self._welcome(message, one)
                return
            if isinstance(message, GroupDown) and not self.complete:  # a member that will not come
                _refuse(one, message.error)
                raise GroupLost(message.error, wish=True)

    def _read_letter(self) -> None:
        word = self._doors.open_mail()
        if word is not None:
            raise GroupLost(word.error, wish=True)

    def _check_stalled(self) -> None:
        """Errors: GroupLost when a member has begun to speak and its large packets do not come."""
        for one in self._strangers:
            if one.stalled and one.answered and not readable([one.sock], 0):
                wrong = _small_packets_only(one.address, self._address)
                _refuse(one, wrong)
                raise GroupLost(wrong, wish=True)

    def _welcome(self, hello: Hello, one: Connection) -> None:
        if not 0 < hello.member < self._members or hello.member in self._peers:
            taken = self._peers.get(hello.member)
            why = f"{self._kind} {hello.member} is already there, at {taken.address}" if taken else "there is no such"
            legal = ", ".join(str(m) for m in range(1, self._members) if m not in self._peers) or "none is left"
            _refuse(one, f"--node-rank {hello.member}: {why}; legal: {legal}")
            return
        name = f"{self._kind} {hello.member}"
        wrong = difference(self._checks, f"{self._kind} 0", hello.checks, name)
        if wrong is None:
            wrong = _unreachable(hello, name, f"{self._kind} 0", self._host)
        if wrong is not None:
            _refuse(one, wrong)
            raise GroupLost(wrong, wish=True)
        self._peers[hello.member] = one
        if len(self._peers) == self._members - 1:
            self.complete = True
            self._doors.shut_all_but_the_front()
            self.send(Hello(0, self._checks, padding=_PADDING))


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
            wrong = _small_packets_only(leader.address, self._reach.getsockname()[0])
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
        self.send(Hello(self._member, self._checks, address, port, _PADDING))

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
                with socket.create_connection((host, other), timeout=_REACH_S) as door:
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


def _refuse(one: Connection, sentence: str) -> None:
    with contextlib.suppress(OSError):
        one.send(GroupDown(sentence, 2))
    one.close()


def _unreachable(hello: Hello, name: str, me: str, host: str) -> str | None:
    """Try the way back: gloo and NCCL connect in both directions, and hang where only one is open.

    It must leave from `host`, this member's own address: that interface is the one that gloo and NCCL are told.
    """
    try:
        with socket.create_connection((hello.address, hello.port), timeout=_REACH_S) as back:
            source = str(back.getsockname()[0])
            if source != host and ":" not in host and not (_is_loopback(source) and _is_loopback(host)):
                return (
                    f"{me} reaches {name} at {hello.address} from {source}, not from {host}, the address in"
                    f" --dist-init-addr: give {source} there, or a route that leaves by the interface of {host}"
                )
    except OSError as error:
        return (
            f"{me} cannot reach {name} at {hello.address} ({error.strerror or error}), the address from which {name}"
            f" reaches {me}: a firewall, or another route back"
        )
    return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def _one_is_shut(me: str, host: str, opened: int, shut: int, why: str, ports: str) -> str:
    return (
        f"{me} reaches {host} on port {opened} but not on {shut} ({why}): a firewall, or another program on {opened}?"
        f" Ports {ports} must be open"
    )


def _small_packets_only(there: str, here: str) -> str:
    return (
        f"a connection from {there} to {here} stands and its small packets come, but large ones do not: the MTU of an"
        " interface is larger than what the network between takes (or that host has just stopped);"
        " ip link set dev NAME mtu 1500 on all hosts"
    )


def _read_to_end(peer: Connection, end: float) -> None:
    with contextlib.suppress(EOFError, OSError, GroupLost):
        while (left := end - time.monotonic()) > 0:
            if readable([peer.sock], left):
                peer.read()


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
