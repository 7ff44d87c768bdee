"""The load: N connections that each read one stream after the other. Sockets and epoll, no HTTP library.

    python -m evals.bench_host.load HOST PORT CONCURRENCY MAX_TOKENS ROUNDS

Prints one JSON object. It counts events as they come and the tokens that the last event of each stream names.
"""

from __future__ import annotations

import json
import re
import resource
import selectors
import socket
import sys
import time
from array import array
from dataclasses import asdict, dataclass, field

_READ_BYTES = 1 << 16
_SILENCE_S = 60.0
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
_EVENT = b"data: {"
_END = b"\r\n0\r\n\r\n"  # the last chunk of an HTTP/1.1 answer
_KEEP = 1024  # last bytes of a read that are looked at again: a mark may be cut, and usage comes before the end


@dataclass(frozen=True)
class LoadResult:
    """One run of the load. `usage_tokens` is what the server says it made; times between events are of one stream."""

    concurrency: int
    streams: int
    usage_tokens: int
    events: int
    reads: int
    wall_s: float
    client_cpu_s: float
    first_ms_median: float
    gap_ms_median: float
    gap_ms_p99: float


@dataclass(slots=True)
class _Stream:
    """One connection and the stream that it reads now."""

    sock: socket.socket
    left: int
    began: float = 0.0
    last: float = 0.0
    tail: bytes = b""


@dataclass(slots=True)
class _Counts:
    tokens: int = 0
    events: int = 0
    reads: int = 0
    streams: int = 0
    first: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))


def body_of(max_tokens: int) -> bytes:
    fields = {
        "model": "null",
        "prompt": "The quick brown fox",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(fields).encode()


def request_of(host: str, max_tokens: int) -> bytes:
    body = body_of(max_tokens)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def load(host: str, port: int, concurrency: int, max_tokens: int, rounds: int) -> LoadResult:
    """Read `rounds` streams one after the other on each of `concurrency` connections."""
    request = request_of(host, max_tokens)
    counts = _Counts()
    began_cpu = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for _ in range(concurrency):
            sock = socket.create_connection((host, port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = _Stream(sock, rounds)
            selector.register(sock, selectors.EVENT_READ, stream)
            _ask(stream, request)
        while selector.get_map():
            ready = selector.select(_SILENCE_S)
            if not ready:
                raise TimeoutError(f"no stream has said anything for {_SILENCE_S:.0f} s")
            for key, _ in ready:
                _read(key.data, request, counts, selector)
    wall = time.perf_counter() - began
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    gaps = sorted(counts.gaps) or [0.0]
    return LoadResult(
        concurrency=concurrency,
        streams=counts.streams,
        usage_tokens=counts.tokens,
        events=counts.events,
        reads=counts.reads,
        wall_s=wall,
        client_cpu_s=cpu.ru_utime + cpu.ru_stime - began_cpu.ru_utime - began_cpu.ru_stime,
        first_ms_median=sorted(counts.first)[len(counts.first) // 2] * 1e3,
        gap_ms_median=gaps[len(gaps) // 2] * 1e3,
        gap_ms_p99=gaps[len(gaps) * 99 // 100] * 1e3,
    )


def _ask(stream: _Stream, request: bytes) -> None:
    stream.left -= 1
    stream.tail = b""
    stream.began = stream.last = time.perf_counter()
    stream.sock.sendall(request)


def _read(stream: _Stream, request: bytes, counts: _Counts, selector: selectors.BaseSelector) -> None:
    data = stream.sock.recv(_READ_BYTES)
    if not data:
        raise ConnectionError(f"the server has closed a stream; the last it said: {stream.tail!r}")
    now = time.perf_counter()
    seen = stream.tail + data
    if seen.startswith(b"HTTP/1.1 ") and len(seen) >= 12 and seen[9:12] != b"200":
        raise ConnectionError(f"the server has refused: {data[:500]!r}")
    events = seen.count(_EVENT) - stream.tail.count(_EVENT)
    counts.reads += 1
    if events:
        counts.events += events
        first = stream.last == stream.began
        (counts.first if first else counts.gaps).append(now - stream.last)
        counts.gaps.extend([0.0] * (events - 1))  # they came together
        stream.last = now
    if seen.endswith(_END):
        usage = _USAGE.search(seen)
        if usage is None:
            raise ValueError(f"a stream has ended without its usage: {seen[-500:]!r}")
        counts.tokens += int(usage[1])
        counts.streams += 1
        if stream.left:
            _ask(stream, request)
        else:
            selector.unregister(stream.sock)
            stream.sock.close()
        return
    stream.tail = seen[-_KEEP:]


def main() -> None:
    host, port, concurrency, max_tokens, rounds = sys.argv[1], *map(int, sys.argv[2:6])
    print(json.dumps(asdict(load(host, port, concurrency, max_tokens, rounds))))


if __name__ == "__main__":
    main()
