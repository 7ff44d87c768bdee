"""`make bench-host` at tiny sizes: its figures belong together. No time is judged."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
from pathlib import Path

import pytest

from evals.bench_host.__main__ import STREAM_TOKENS, main
from evals.bench_host.load import _Counts, _read, _Stream, request_of
from evals.bench_host.machine import cpu_seconds
from evals.bench_host.steps import WARM_STEPS

STEPS = 500  # so many that all requests run at once for a while, however late the last of them is read
ANSWER = b"".join(
    [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        b'2b\r\ndata: {"choices":[{"text":"one"}],"usage":null}\n\n\r\n',
        b'56\r\ndata: {"choices":[{"text":"two"}],"usage":null}\n\ndata: {"choices":[{"text":"data: "}]}\n\n\r\n',
        b'30\r\ndata: {"choices":[],"usage":{"completion_tokens":7}}\n\n\r\n',
        b"e\r\ndata: [DONE]\n\n\r\n",
        b"0\r\n\r\n",
    ]
)


@pytest.mark.multirank
def test_every_token_that_was_asked_for_is_counted_once(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    wish = {"--model": checkpoints["text-bf16"], "--running": 3, "--steps": STEPS, "--streams": 2, "--tokens": 1}
    assert main([*(str(word) for pair in wish.items() for word in pair), "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    (step,) = figures["steps"]
    assert step["running"] == 3 and step["tokens"] == 3 * (STEPS + WARM_STEPS)
    assert 0 < step["steps"] <= STEPS and 0 < step["median_ms"] <= step["p99_ms"]
    assert step["core_cpu_ms"] > 0 and step["worker_cpu_ms"] > 0
    (stream,) = figures["streams"]
    assert stream["streams"] == 2 and stream["usage_tokens"] == 2 * STREAM_TOKENS
    assert 0 < stream["events"] <= stream["usage_tokens"] + 2 * stream["streams"], "an event a token, and usage"
    assert stream["tokens_per_s"] == pytest.approx(stream["usage_tokens"] / stream["wall_s"])
    assert min(stream["server_cpu_s"], stream["engine_cpu_s"], stream["client_cpu_s"]) > 0
    assert figures["machine"]["cores"] and figures["vllm_cpu_0_32"]["tokens_per_s"]


@pytest.mark.parametrize("size", [1, 2, 7, 40, 4096])
def test_the_load_counts_the_same_however_the_answer_is_cut(size: int) -> None:
    ours, theirs = socket.socketpair()
    counts, stream = _Counts(), _Stream(ours, left=0)
    with selectors.DefaultSelector() as selector, theirs:
        selector.register(ours, selectors.EVENT_READ, stream)
        for start in range(0, len(ANSWER), size):
            theirs.sendall(ANSWER[start : start + size])
            _read(stream, b"", counts, selector)
    assert (counts.streams, counts.tokens, counts.events) == (1, 7, 4)


def test_a_refusal_is_no_stream() -> None:
    ours, theirs = socket.socketpair()
    with selectors.DefaultSelector() as selector, ours, theirs:
        theirs.sendall(b"HTTP/1.1 429 Too Many Requests\r\n\r\n")
        with pytest.raises(ConnectionError, match="429 Too Many"):
            _read(_Stream(ours, left=0), b"", _Counts(), selector)


def test_the_request_is_whole() -> None:
    head, _, body = request_of("h", 5).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head and json.loads(body)["max_tokens"] == 5


def test_cpu_time_counts_the_work_of_all_threads() -> None:
    before = cpu_seconds([os.getpid()])
    sum(range(10**6))
    assert 0 < cpu_seconds([os.getpid()]) - before < 60
    with pytest.raises(FileNotFoundError):
        cpu_seconds([signal.SIGRTMAX + 10**7])
