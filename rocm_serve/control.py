"""The control link: member 0 and every other supervisor, one TCP connection each. No torch, no pickle.

Frames are msgpack behind a magic word, the wire version and a length. A connection that closes is the fastest news of
a death that there is, and a refused one has a name: hence plain TCP. Beats find what closes nothing: a cut cable, a
frozen host. One thread uses a link; nothing here waits longer than it says.
"""

from __future__ import annotations

from typing import Final, Protocol

from rocm_serve.messages import ControlMessage

SILENCE_S: Final = 6.0  # twelve beats; with the kills that follow a group ends within 15 s of a cut link
REACH_S: Final = 3.0
PADDING: Final = bytes(1 << 16)  # of a Hello, so that it takes packets as large as the network takes


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


def small_packets_only(there: str, here: str) -> str:
    return (
        f"a connection from {there} to {here} stands and its small packets come, but large ones do not: the MTU of an"
        " interface is larger than what the network between takes (or that host has just stopped);"
        " ip link set dev NAME mtu 1500 on all hosts"
    )
