"""The control link: member 0 and every other supervisor, one TCP connection each. No torch, no pickle.

Frames are msgpack behind a magic word, the wire version and a length. A connection that closes is the fastest news of
a death that there is, and a refused one has a name: hence plain TCP. Beats find what closes nothing: a cut cable, a
frozen host. One thread uses a link; nothing here waits longer than it says.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Final, Protocol

import msgspec

from rocm_serve.agreement import difference
from rocm_serve.config.launcher import PORTS, join_address
from rocm_serve.messages import WIRE_VERSION, ControlMessage, GroupDown, Hello

CONTROL_PORT: Final = PORTS - 1  # after that of the store
SILENCE_S: Final = 6.0  # twelve beats; with the kills that follow a group ends within 15 s of a cut link
_REACH_S: Final = 3.0
_RETRY_S: Final = 1.0
_SEND_S: Final = 3.0
_MAGIC: Final = b"rsrv"
_HEAD: Final = struct.Struct("<4sHI")
_MAX_STRANGERS: Final = 16
_MAX_FRAME: Final = 64 << 20

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[ControlMessage]] = msgspec.msgpack.Decoder(ControlMessage)


class GroupLost(RuntimeError):
    """The group cannot go on. `wish`: somebody has to change a setting; else something broke."""

    def __init__(self, sentence: str, *, wish: bool = False) -> None:
        super().__init__(sentence)
        self.wish = wish


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


class Connection:
    """A stream of frames."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        sock.settimeout(_SEND_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.address = address
        self.heard = time.monotonic()
        self._data = b""

    def send(self, message: ControlMessage) -> None:
        """Errors: OSError."""
        body = _encoder.encode(message)
        self.sock.sendall(_HEAD.pack(_MAGIC, WIRE_VERSION, len(body)) + body)

    def read(self) -> list[ControlMessage]:
        """Read what is there. Call it when `select` says so. Errors: EOFError, OSError, GroupLost."""
        data = self.sock.recv(1 << 16)
        if not data:
            raise EOFError
        self.heard = time.monotonic()
        self._data += data
        return list(self._frames())

    def _frames(self) -> Iterator[ControlMessage]:
        while len(self._data) >= _HEAD.size:
            magic, version, length = _HEAD.unpack_from(self._data)
            if magic != _MAGIC or length > _MAX_FRAME:
                raise EOFError  # not one of us
            if version != WIRE_VERSION:
                raise GroupLost(
                    f"the supervisor at {self.address} speaks wire version {version}, this one {WIRE_VERSION}:"
                    " install the same rocm-serve on all hosts",
                    wish=True,
                )
            if len(self._data) < _HEAD.size + length:
                return
            body, self._data = self._data[_HEAD.size : _HEAD.size + length], self._data[_HEAD.size + length :]
            yield _decoder.decode(body)

    def close(self) -> None:
        self.sock.close()


class LeaderLink:
    """Member 0's end: waits for all others, compares, and then hears each of them.

    `kind` is what a member is called: "node", or "rank" when every rank has a process.
    """

    def __init__(self, kind: str, members: int, host: str, port: int, checks: Mapping[str, str]) -> None:
        self.complete = False
        self._kind = kind
        self._members = members
        self._checks = dict(checks)
        self._address = join_address(host, port)
        self._listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listening.bind((host, port))
        except OSError as error:
            self._listening.close()
            raise GroupLost(
                f"cannot listen on {self._address}: {error.strerror or error}; --dist-init-addr PORT to"
                f" PORT+{PORTS - 1} must be free on {kind} 0",
                wish=True,
            ) from None
        self._listening.listen()
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
        for sock in _readable([self._listening, *by_socket, *strangers], timeout_s):
            if sock is self._listening:
                accepted, address = self._listening.accept()
                self._strangers.append(Connection(accepted, join_address(*address[:2])))
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
        self._listening.close()

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
            wrong = _unreachable(hello, name, f"{self._kind} 0")
        if wrong is not None:
            _refuse(one, wrong)
            raise GroupLost(wrong, wish=True)
        self._peers[hello.member] = one
        if len(self._peers) == self._members - 1:
            self.complete = True
            self.send(Hello(0, self._checks))


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
        ready = _readable([leader.sock], timeout_s)
        said: list[tuple[int, ControlMessage]] = []
        try:
            messages = leader.read() if ready else []
        except (EOFError, OSError):
            raise GroupLost(self._lost("has gone: the connection to its supervisor closed")) from None
        for message in messages:
            if isinstance(message, Hello):
                self._begin(message)
            else:
                said.append((0, message))
        if time.monotonic() - leader.heard > SILENCE_S:
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
            return
        if sock.getsockname() == sock.getpeername():  # both ends on one host: a socket that has met itself
            sock.close()
            return
        self._leader = Connection(sock, join_address(*self._where))
        address, port = self._reach.getsockname()[:2]
        self.send(Hello(self._member, self._checks, address, port))

    def _begin(self, hello: Hello) -> None:
        wrong = difference(hello.checks, f"{self._kind} 0", self._checks, f"{self._kind} {self._member}")
        if wrong is not None:
            raise GroupLost(wrong, wish=True)
        host, port = self._where
        for other in range(port - CONTROL_PORT, port):
            why = _blocked(host, other)
            if why is not None:
                raise GroupLost(
                    f"{self._kind} {self._member} reaches {host} on port {port} but not on {other} ({why}): a firewall?"
                    f" Ports {port - CONTROL_PORT} to {port} must be open",
                    wish=True,
                )
        self.complete = True


def _readable(socks: list[socket.socket], timeout_s: float) -> list[socket.socket]:
    """Wait for any of them. Not `select`: the HTTP server beside it may have thousands of connections."""
    poller = select.poll()
    by_fd = {sock.fileno(): sock for sock in socks}
    for fd in by_fd:
        poller.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poller.poll(max(0, round(timeout_s * 1000)))]


def _refuse(one: Connection, sentence: str) -> None:
    with contextlib.suppress(OSError):
        one.send(GroupDown(sentence, 2))
    one.close()


def _unreachable(hello: Hello, name: str, me: str) -> str | None:
    """Try the way back: gloo and NCCL connect in both directions, and hang where only one is open."""
    try:
        socket.create_connection((hello.address, hello.port), timeout=_REACH_S).close()
    except OSError as error:
        return (
            f"{me} cannot reach {name} at {hello.address} ({error.strerror or error}), the address from which {name}"
            f" reaches {me}: a firewall, or another route back"
        )
    return None


def _blocked(host: str, port: int) -> str | None:
    """Tell a port that nobody answers for from one that merely has no listener yet."""
    try:
        socket.create_connection((host, port), timeout=_REACH_S).close()
    except ConnectionRefusedError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None


def _read_to_end(peer: Connection, end: float) -> None:
    with contextlib.suppress(EOFError, OSError, GroupLost):
        while (left := end - time.monotonic()) > 0:
            if _readable([peer.sock], left):
                peer.read()
