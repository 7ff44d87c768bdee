"""Frames of the control link: msgpack behind a magic word, the wire version and a length. No torch, no pickle."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from rocm_serve.messages import WIRE_VERSION, ControlMessage

_SEND_S: Final = 3.0
STALLED_S: Final = 5.0  # between what a member says while all meet
_MAGIC: Final = b"rsrv"
_HEAD: Final = struct.Struct("<4sHI")
_MAX_FRAME: Final = 64 << 20

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[ControlMessage]] = msgspec.msgpack.Decoder(ControlMessage)


class GroupLost(RuntimeError):
    """The group cannot go on. `wish`: somebody has to change a setting; else something broke."""

    def __init__(self, sentence: str, *, wish: bool = False) -> None:
        super().__init__(sentence)
        self.wish = wish


def frame(message: ControlMessage) -> bytes:
    """Return a message as it goes over the wire."""
    body = _encoder.encode(message)
    return _HEAD.pack(_MAGIC, WIRE_VERSION, len(body)) + body


class Frames:
    """Puts frames together from the bytes that come from `address`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._data = b""

    def feed(self, data: bytes) -> list[ControlMessage]:
        """Return the messages that are whole now. Errors: EOFError when these are no frames of ours; GroupLost."""
        self._data += data
        return list(self._whole())

    def _whole(self) -> Iterator[ControlMessage]:
        while len(self._data) >= _HEAD.size:
            magic, version, length = _HEAD.unpack_from(self._data)
            if magic != _MAGIC or length > _MAX_FRAME:
                raise EOFError
            if version != WIRE_VERSION:
                raise GroupLost(
                    f"the supervisor at {self._address} speaks wire version {version}, this one {WIRE_VERSION}:"
                    " install the same rocm-serve on all hosts",
                    wish=True,
                )
            if len(self._data) < _HEAD.size + length:
                break
            body, self._data = self._data[_HEAD.size : _HEAD.size + length], self._data[_HEAD.size + length :]
            try:
                yield _decoder.decode(body)
            except msgspec.DecodeError:
                raise EOFError from None


class Connection:
    """A stream of frames."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        sock.settimeout(_SEND_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.address = address
        self.heard = time.monotonic()
        self.answered = False  # has said anything at all
        self._frames = Frames(address)

    def send(self, message: ControlMessage) -> None:
        """Errors: OSError."""
        self.sock.sendall(frame(message))

    def read(self) -> list[ControlMessage]:
        """Read what is there. Call it when `readable` says so. Errors: EOFError, OSError, GroupLost."""
        data = self.sock.recv(1 << 16)
        if not data:
            raise EOFError
        self.heard = time.monotonic()
        messages = self._frames.feed(data)
        self.answered = self.answered or bool(messages)
        return messages

    @property
    def stalled(self) -> bool:
        """Whether nothing more has come for too long, of a frame or at all."""
        return time.monotonic() - self.heard > STALLED_S

    def close(self) -> None:
        self.sock.close()


def readable(socks: Sequence[socket.socket], timeout_s: float) -> list[socket.socket]:
    """Wait for any of them. Not `select`: the HTTP server beside it may have thousands of connections."""
    poller = select.poll()
    by_fd = {sock.fileno(): sock for sock in socks}
    for fd in by_fd:
        poller.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poller.poll(max(0, round(timeout_s * 1000)))]
