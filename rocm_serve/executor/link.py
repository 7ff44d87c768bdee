"""The two channels between core and workers: plans go out over XPUB/SUB, news comes back over PUSH/PULL.

Plain PUB/SUB loses what is sent before a subscriber has joined and what overflows a queue; here subscriptions are
counted before the first message, and queues are unbounded. A worker also subscribes to a topic of its own, so that
the core learns from the transport which rank came and which one went.

With one member the channels are sockets in the run's folder; with several they are TCP on member 0's address, on the
two ports after that of --dist-init-addr.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path

import msgspec
import zmq

from rocm_serve.config.launcher import join_address, split_address
from rocm_serve.config.schema import Resolved
from rocm_serve.messages import FromWorker, ToWorker

_RANK_TOPIC = b"\xffrank:"
_JOINED = 1  # first byte of what XPUB reads; 0 is a leave
_PLANS_PORT = 1  # after that of the store
_NEWS_PORT = 2

_ENCODER = msgspec.msgpack.Encoder()
_TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


@dataclass(frozen=True, slots=True)
class Channels:
    """Where plans are published and where workers report."""

    plans: str
    news: str

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(Path(one.removeprefix("ipc://")) for one in (self.plans, self.news) if one.startswith("ipc://"))


def channels(resolved: Resolved) -> Channels:
    """Say where core and workers of this configuration meet."""
    if resolved.members == 1:
        return Channels(_ipc(resolved.run_dir, "plans.sock"), _ipc(resolved.run_dir, "news.sock"))
    host, port = split_address(resolved.dist_init_addr)
    return Channels(
        f"tcp://{join_address(host, port + _PLANS_PORT)}",
        f"tcp://{join_address(host, port + _NEWS_PORT)}",
    )


def _ipc(run_dir: str, name: str) -> str:
    path = Path(run_dir) / name
    assert len(str(path)) < zmq.IPC_PATH_MAX_LEN, f"{path} is too long for a socket"
    return f"ipc://{path}"


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    if address.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    return socket


class CoreLink:
    """The core's ends: binds both channels. Use from one thread."""

    def __init__(self, where: Channels) -> None:
        self._context = zmq.Context()
        self._where = where
        self._plans = _socket(self._context, zmq.XPUB, where.plans)
        self._plans.setsockopt(zmq.XPUB_VERBOSER, 1)  # every join and leave, also when topics are shared
        self._plans.bind(where.plans)
        self._news = _socket(self._context, zmq.PULL, where.news)
        self._news.bind(where.news)
        self._poller = zmq.Poller()
        self._poller.register(self._plans, zmq.POLLIN)
        self._poller.register(self._news, zmq.POLLIN)
        self._wake: zmq.Socket[bytes] | None = None
        self.joined: set[int] = set()
        self.left: set[int] = set()

    def publish(self, message: ToWorker) -> None:
        """Send to every worker that has joined."""
        self._plans.send(_ENCODER.encode(message))

    def receive(self, timeout_s: float, wake: zmq.Socket[bytes] | None = None) -> FromWorker | None:
        """Return the next report, or None when there is none in `timeout_s`, only joins and leaves came, or `wake` can
        be read from.

        Reports are read before leaves: what a worker said last is known before it is known to be gone.
        """
        if wake is not self._wake:
            if self._wake is not None:
                self._poller.unregister(self._wake)
            if wake is not None:
                self._poller.register(wake, zmq.POLLIN)
            self._wake = wake
        ready = dict(self._poller.poll(max(0, ceil(timeout_s * 1000))))  # rounding down would spin below 1 ms
        if self._news in ready:
            return _FROM_WORKER.decode(self._news.recv())
        while self._plans in ready and self._plans.poll(0):
            self._note(self._plans.recv())
        return None

    def _note(self, frame: bytes) -> None:
        topic = frame[1:]
        if topic.startswith(_RANK_TOPIC):
            rank = int(topic.removeprefix(_RANK_TOPIC))
            (self.joined if frame[0] == _JOINED else self.left).add(rank)

    def close(self) -> None:
        """Close both channels; what was published is still delivered to live workers, for at most a second."""
        self._context.destroy(linger=1000)
        for path in self._where.files:
            path.unlink(missing_ok=True)


class WorkerLink:
    """A worker's ends of the same channels."""

    def __init__(self, where: Channels, rank: int) -> None:
        self._context = zmq.Context()
        self._news = _socket(self._context, zmq.PUSH, where.news)
        self._news.connect(where.news)
        self._plans = _socket(self._context, zmq.SUB, where.plans)
        self._plans.setsockopt(zmq.SUBSCRIBE, b"")
        self._plans.setsockopt(zmq.SUBSCRIBE, _RANK_TOPIC + str(rank).encode())
        self._plans.connect(where.plans)

    def receive(self, *, wait: bool) -> ToWorker | None:
        """Return the next message; without `wait`, None when there is none yet."""
        try:
            return _TO_WORKER.decode(self._plans.recv(0 if wait else zmq.NOBLOCK))
        except zmq.Again:
            return None

    def send(self, message: FromWorker) -> None:
        self._news.send(_ENCODER.encode(message))

    def close(self) -> None:
        """Deliver what was sent, for at most two seconds, and close."""
        self._context.destroy(linger=2000)
