"""Member 0's end of the control link (see control.py): it waits for all others and compares them. No torch."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from typing import Final

from rocm_serve.agreement import difference
from rocm_serve.config.launcher import join_address
from rocm_serve.control import PADDING, REACH_S, SILENCE_S, small_packets_only
from rocm_serve.doors import Doors, PortTaken
from rocm_serve.frames import Connection, GroupLost, readable
from rocm_serve.messages import ControlMessage, GroupDown, Hello

_MAX_STRANGERS: Final = 16


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
                wrong = small_packets_only(one.address, self._address)
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
            self.send(Hello(0, self._checks, padding=PADDING))


def _refuse(one: Connection, sentence: str) -> None:
    with contextlib.suppress(OSError):
        one.send(GroupDown(sentence, 2))
    one.close()


def _unreachable(hello: Hello, name: str, me: str, host: str) -> str | None:
    """Try the way back: gloo and NCCL connect in both directions, and hang where only one is open.

    It must leave from `host`, this member's own address: that interface is the one that gloo and NCCL are told.
    """
    try:
        with socket.create_connection((hello.address, hello.port), timeout=REACH_S) as back:
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


def _read_to_end(peer: Connection, end: float) -> None:
    with contextlib.suppress(EOFError, OSError, GroupLost):
        while (left := end - time.monotonic()) > 0:
            if readable([peer.sock], left):
                peer.read()
