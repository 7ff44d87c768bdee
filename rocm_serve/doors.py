"""How members reach each other while they meet: node 0's doors, and word of a member that will not come. No torch.

Until all are there node 0 listens on all four ports, not on the control port alone, and for datagrams: a member that a
firewall keeps from the control port, or that no answer reaches, can still say so. A member that cannot start (a wrong
interface, a missing checkpoint) says why in the same way, so that the others end too instead of waiting for it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable
from typing import Final

from rocm_serve.config.launcher import PORTS, join_address, split_address
from rocm_serve.frames import Connection, Frames, GroupLost, frame, readable
from rocm_serve.messages import ControlMessage, GroupDown, Hello

CONTROL_PORT: Final = PORTS - 1  # after that of the store
TELL_S: Final = 60.0  # for the others to come and hear why this member will not
_CONNECT_S: Final = 0.5
_ANSWER_S: Final = 2.0
_PAUSE_S: Final = 0.5
_SILENT_S: Final = 5.0
_USER_ERROR: Final = 2
_MAX_DATAGRAM: Final = 60_000


class PortTaken(OSError):
    """One of the four ports cannot be listened on."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"cannot listen on {address}: {why}; --dist-init-addr PORT to PORT+{PORTS - 1} must be free")


class Doors:
    """Member 0's listening sockets. `port` is the control port; the other three are below it.

    Errors: PortTaken; with `all_of_them` False only when none is free.
    """

    def __init__(self, host: str, port: int, *, all_of_them: bool = True) -> None:
        self._front = port
        self._host = host
        self.mail: socket.socket | None = None
        self.listening: list[socket.socket] = []
        taken: PortTaken | None = None
        for one in range(port - CONTROL_PORT, port + 1):  # the front last: who gets in there finds the others open
            try:
                self.listening.append(_listen(host, one))
            except OSError as error:
                taken = taken or PortTaken(join_address(host, one), error.strerror or str(error))
        if taken is not None and (all_of_them or not self.listening):
            self.close()
            raise taken
        with contextlib.suppress(OSError):  # somebody else's datagrams: then nobody's word comes that way
            self.mail = socket.socket(_family(host), socket.SOCK_DGRAM)
            self.mail.bind((host, port))
            self.mail.setblocking(False)

    @property
    def sockets(self) -> list[socket.socket]:
        return [*self.listening, *([self.mail] if self.mail is not None else [])]

    def accept(self, listening: socket.socket) -> Connection:
        accepted, address = listening.accept()
        return Connection(accepted, join_address(*address[:2]))

    def open_mail(self) -> GroupDown | None:
        """Read a datagram; None when it is not one of ours."""
        assert self.mail is not None
        with contextlib.suppress(OSError, EOFError, GroupLost):
            data, address = self.mail.recvfrom(_MAX_DATAGRAM)
            for message in Frames(address[0]).feed(data):
                if isinstance(message, GroupDown):
                    return message
        return None

    def shut_all_but_the_front(self) -> None:
        """Leave the control port open only: the others are for the store and the channels now."""
        front = [one for one in self.listening if one.getsockname()[1] == self._front]
        for one in self.sockets:
            if one not in front:
                one.close()
        self.listening, self.mail = front, None

    def close(self) -> None:
        for one in self.sockets:
            one.close()


def busy_port(host: str, first: int) -> str | None:
    """Say which of the four ports from `first` member 0 cannot listen on; None when all are free."""
    try:
        Doors(host, first + CONTROL_PORT).close()
    except PortTaken as taken:
        return str(taken)
    return None


def say_by_another_door(host: str, port: int, sentence: Callable[[int], str]) -> str | None:
    """Tell member 0 something by another door than the control port `port`; `sentence` gets the door's number.

    Returns why the group is over, in member 0's words: ours again, or its own reason when it is not starting. None when
    there is no door behind which member 0 answers.
    """
    for other in range(port - CONTROL_PORT, port):
        with contextlib.suppress(OSError):
            for answer in _say(host, other, GroupDown(sentence(other), _USER_ERROR)):
                if isinstance(answer, GroupDown):
                    return answer.error
    return None


def drop_a_letter(host: str, port: int, sentence: str) -> None:
    """Send member 0 datagrams; they need no way back. Nobody knows whether they arrive."""
    with contextlib.suppress(OSError), socket.socket(_family(host), socket.SOCK_DGRAM) as letters:
        for _ in range(3):
            letters.sendto(frame(GroupDown(sentence[:_MAX_DATAGRAM], _USER_ERROR)), (host, port))


def tell(
    kind: str,
    member: int,
    members: int,
    init_addr: str,
    why: str,
    echo: Callable[[str], None],
    within_s: float = TELL_S,
) -> None:
    """Have the other members end as well, as member `member` does not start. `init_addr` is HOST:PORT as given."""
    host, port = split_address(init_addr)
    whom = f"{kind} 0" if member else f"the other {kind}s"
    echo(f"telling {whom} by {init_addr}, for up to {within_s:.0f} s; Ctrl-C ends it")
    sentence = f"{kind} {member} does not start: {why}"
    if member:
        told = tell_leader(host, port + CONTROL_PORT, sentence, within_s)
    else:
        told = tell_followers(host, port + CONTROL_PORT, members - 1, sentence, within_s)
    echo(f"{whom}: {'told' if told else 'not told, nobody was there to hear it'}")


def tell_leader(host: str, port: int, sentence: str, within_s: float = TELL_S) -> bool:
    """Tell member 0, whose control port is `port`, why this member does not come; False when it cannot be told.

    It is waited for as long as its host refuses connections, and given up soon when nothing answers at all.
    """
    now = time.monotonic()
    end, silence_ends = now + within_s, now + _SILENT_S
    while now < min(end, silence_ends) and not _is_own(host):
        for door in (port, *range(port - CONTROL_PORT, port)):
            try:
                if _say(host, door, GroupDown(sentence, _USER_ERROR)):
                    return True
            except ConnectionRefusedError:  # its host answers: member 0 may still come
                silence_ends = time.monotonic() + _SILENT_S
            except OSError:
                continue
        drop_a_letter(host, port, sentence)
        time.sleep(_PAUSE_S)
        now = time.monotonic()
    return False


def tell_followers(host: str, port: int, count: int, sentence: str, within_s: float = TELL_S) -> bool:
    """Tell `count` members as they come to the control port `port` of this one; False when not all have come."""
    end = time.monotonic() + within_s
    try:
        doors = Doors(host, port, all_of_them=False)
    except OSError:
        return False
    told: set[object] = set()
    with contextlib.closing(doors):
        while len(told) < count and time.monotonic() < end:
            for sock in readable(doors.sockets, _PAUSE_S):
                if sock is doors.mail:
                    doors.open_mail()
                    continue
                told |= _answer(doors.accept(sock), sentence)
    return len(told) >= count


def _answer(one: Connection, sentence: str) -> set[object]:
    """Hear a member out and tell it; the empty set when it was none of ours."""
    with contextlib.closing(one), contextlib.suppress(EOFError, OSError, GroupLost):
        for message in _next(one):
            one.send(GroupDown(sentence, _USER_ERROR))
            return {message.member if isinstance(message, Hello) else one.sock.getpeername()[0]}
    return set()


def _say(host: str, port: int, message: GroupDown) -> list[ControlMessage]:
    """Say it by one door, return what member 0 has answered. Errors: OSError when there is no connection."""
    sock = socket.create_connection((host, port), timeout=_CONNECT_S)
    with (
        contextlib.closing(Connection(sock, join_address(host, port))) as one,
        contextlib.suppress(EOFError, OSError, GroupLost),
    ):
        if sock.getsockname() != sock.getpeername():  # both ends on one host: a socket that has met itself
            one.send(message)
            return _next(one)
    return []


def _is_own(host: str) -> bool:
    """Whether this host bears that address, and no other one can mean it, as it can 127.0.0.2."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((host, 0))
        except OSError:
            return False
        return not ipaddress.ip_address(trial.getsockname()[0].partition("%")[0]).is_loopback


def _next(one: Connection) -> list[ControlMessage]:
    """Wait for a whole message. Errors: EOFError, OSError, GroupLost."""
    end = time.monotonic() + _ANSWER_S
    while (left := end - time.monotonic()) > 0:
        if readable([one.sock], left):
            messages = one.read()
            if messages:
                return messages
    return []


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _listen(host: str, port: int) -> socket.socket:
    listening = socket.socket(_family(host), socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening
