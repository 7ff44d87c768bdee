"""The link between server and engine core: two ZeroMQ pipes over ipc, msgpack inside, the wire version before it.

Each receiving end binds and each sending end connects, so nothing is lost or refused while the other side starts, and
no queue is bounded. Nobody restarts: a side that is gone is noticed by the supervisor, not here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import zmq

from rocm_serve.errors import UserError
from rocm_serve.messages import WIRE_VERSION, FromCore, ToCore

VERSION_FRAME: Final = WIRE_VERSION.to_bytes(2, "little")
LONGEST_NAME: Final = "from_core.sock"
AT_ONCE: Final = 64  # messages that are taken before others have a turn on the event loop
FLUSH_MS: Final = 2000  # the last message (why the core died) has this long to leave

_encoder: Final = msgspec.msgpack.Encoder()
_to_core: Final[msgspec.msgpack.Decoder[ToCore]] = msgspec.msgpack.Decoder(ToCore)
_from_core: Final[msgspec.msgpack.Decoder[FromCore]] = msgspec.msgpack.Decoder(FromCore)

T = TypeVar("T")


class WireError(RuntimeError):
    """The other end speaks another version, or not our language."""


def endpoint(run_dir: str, name: str) -> str:
    """Name one socket of this run. Errors: UserError if the operating system has no room for the path."""
    path = str(Path(run_dir).absolute() / name)
    if len(path.encode()) > zmq.IPC_PATH_MAX_LEN:
        raise UserError(
            f"{path} is too long for a socket: at most {zmq.IPC_PATH_MAX_LEN} bytes; TMPDIR may name a shorter place"
        )
    return f"ipc://{path}"


class CoreLink:
    """The core's end. Used by one thread."""

    def __init__(self, run_dir: str) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.bind(endpoint(run_dir, "to_core.sock"))
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(0)
        self._outbox.connect(endpoint(run_dir, "from_core.sock"))

    @property
    def inbox(self) -> zmq.Socket[bytes]:
        """What can be read from when a message has come."""
        return self._inbox

    def receive(self, timeout_s: float) -> list[ToCore]:
        """Take all that has come; wait up to `timeout_s` for a first message."""
        messages: list[ToCore] = []
        if timeout_s > 0 and not self._inbox.poll(round(timeout_s * 1000)):
            return messages
        while True:
            try:
                frames = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(_decode(_to_core, frames))

    def send(self, message: FromCore) -> None:
        self._outbox.send_multipart((VERSION_FRAME, _encoder.encode(message)))

    def close(self) -> None:
        self._context.destroy(linger=FLUSH_MS)


class ClientLink:
    """The server's end, on its event loop.

    The loop watches the descriptor of a plain socket: zmq.asyncio takes several turns of the loop and a future for each
    message. That descriptor speaks when something has changed, not as long as something is there, so whoever reads it
    reads until nothing is left.
    """

    def __init__(self, run_dir: str) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.bind(endpoint(run_dir, "from_core.sock"))
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(0)
        self._outbox.connect(endpoint(run_dir, "to_core.sock"))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._take: Callable[[FromCore], None]
        self._fail: Callable[[str], None]

    def listen(self, take: Callable[[FromCore], None], fail: Callable[[str], None]) -> None:
        """Call `take` for every message from now on; `fail`, and nothing more, for what is none."""
        self._take, self._fail = take, fail
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inbox.fileno(), self._read)
        self._loop.call_soon(self._read)

    def send(self, message: ToCore) -> None:
        """Never blocks: the queue is not bounded."""
        self._outbox.send_multipart((VERSION_FRAME, _encoder.encode(message)), zmq.NOBLOCK)

    def close(self) -> None:
        self._stop_listening()
        self._context.destroy(linger=0)

    def _read(self) -> None:
        for _ in range(AT_ONCE):
            if self._loop is None:
                return
            try:
                message = _decode(_from_core, self._inbox.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            except WireError as error:
                self._stop_listening()
                self._fail(str(error))
                return
            self._take(message)
        if self._loop is not None:
            self._loop.call_soon(self._read)

    def _stop_listening(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._inbox.fileno())
            self._loop = None


def _decode(decoder: msgspec.msgpack.Decoder[T], frames: list[bytes]) -> T:
    if len(frames) != 2 or frames[0] != VERSION_FRAME:
        raise WireError(f"the other end does not speak wire version {WIRE_VERSION}: both must be of one installation")
    try:
        return decoder.decode(frames[1])
    except msgspec.DecodeError as error:
        raise WireError(f"the other end sent what is no message: {error}") from None
