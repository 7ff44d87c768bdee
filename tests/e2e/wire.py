"""A client that speaks HTTP/1.1 by hand, so that it can go away at any place and in either way."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self
from urllib.parse import urlsplit

How = Literal["fin", "rst"]


def request_bytes(path: str, body: Mapping[str, Any] | bytes, *headers: str) -> bytes:
    """Return a whole POST request."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: test", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


@dataclass(frozen=True)
class Reply:
    """One whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value

    @property
    def events(self) -> list[dict[str, Any]]:
        """The chunks of a stream, which must end with [DONE]."""
        lines = self.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


class Wire:
    """One connection. Errors of reading: ConnectionError or asyncio.IncompleteReadError when the server has gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, url: str, **options: Any) -> Self:
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port, **options))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read the status and the headers, their names in lower case."""
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
        fields = (line.partition(":") for line in lines)
        return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in fields}

    async def chunk(self) -> bytes:
        """Read one chunk of a chunked body; empty at its end."""
        size = int(await self._reader.readuntil(b"\r\n"), 16)
        return (await self._reader.readexactly(size + 2))[:-2]

    async def reply(self) -> Reply:
        """Read one whole answer."""
        status, headers = await self.head()
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while chunk := await self.chunk():
                body += chunk
        elif "content-length" in headers:
            body = await self._reader.readexactly(int(headers["content-length"]))
        else:
            body = await self._reader.read()
        return Reply(status, headers, body)

    async def ended(self) -> bool:
        """Wait until the server has closed; True if it has said nothing more."""
        return not await self._reader.read()

    def half_close(self) -> None:
        self._writer.write_eof()

    def close(self) -> None:
        self.cut("fin")

    def cut(self, how: How) -> None:
        """Go away at once: by a FIN, as a process that closes its socket, or by a RST, as one that wants no more."""
        sock = self._writer.get_extra_info("socket")
        if how == "rst":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()
