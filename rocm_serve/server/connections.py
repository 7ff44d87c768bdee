"""Connections that hold something and do nothing: descriptors have an end, and so has the patience of a drain."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Collection
from typing import Final, Protocol

STALLED_S: Final = 60  # that a client may leave what was sent to it unread, or its host unreachable
SILENT_S: Final = 90.0  # that a connection may stay without a request; those that had one are closed after 75 s
_PROBE_S: Final = 30  # without a byte either way; then the system asks whether the other host is still there
_DESCRIPTORS: Final = 2**16
_OWN_DESCRIPTORS: Final = 256  # sockets to the engine, logs, libraries

_log = logging.getLogger("rocm_serve.server")


class Cycle(Protocol):
    """One request and its response, as uvicorn knows it."""

    response_complete: bool


class Connection(Protocol):
    """One connection of uvicorn, by either of its parsers."""

    cycle: Cycle | None
    transport: asyncio.Transport


def guard(listener: socket.socket) -> None:
    """Have the system end connections whose clients are gone or do not read. Accepted sockets inherit it.

    What such a client would have read is kept for that long only, and its answer is aborted as at any disconnect.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_USER_TIMEOUT": STALLED_S * 1000, "TCP_KEEPIDLE": _PROBE_S, "TCP_KEEPINTVL": _PROBE_S}
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has them all
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def allow_descriptors(num_clients: int) -> None:
    """Raise this process's soft limit of open files as far as it may; warn if `num_clients` do not fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < num_clients + _OWN_DESCRIPTORS:
        _log.warning(
            "this process may open %d files (ulimit -Hn), too few for the %d clients that --max-running-requests and "
            "--max-queued-requests admit: later ones will not be connected",
            *(soft, num_clients),
        )


async def close_silent(connections: Collection[Connection], silent_s: float) -> None:
    """Close, until cancelled, what has brought no new request for `silent_s`: not a byte, or half a head."""
    seen: dict[Connection, tuple[Cycle | None, float]] = {}
    while True:
        await asyncio.sleep(silent_s / 4)
        now = asyncio.get_running_loop().time()
        known, seen = seen, {}
        for connection in list(connections):
            cycle = connection.cycle
            if cycle is not None and not cycle.response_complete:
                continue
            before, since = known.get(connection, (cycle, now))
            seen[connection] = cycle, since if before is cycle else now
            if before is cycle and now - since >= silent_s:
                connection.transport.close()


def hang_up(connections: Collection[Connection]) -> None:
    """Close connections whose request has not been answered; what has been answered is still sent."""
    for connection in list(connections):
        if connection.cycle is not None and not connection.cycle.response_complete:
            connection.transport.close()
