"""Stands between lm-eval and the server: passes every request on as it is, and keeps what lm-eval throws away.

lm-eval reads `text` and nothing else. The recorder keeps finish reason, tokens and latency of each answer, holds every
body against the protocol, and writes each answer to a journal as it comes. A run that was interrupted finds its answers
there; lm-eval asks again for all of them, in the same words, and only the missing ones reach the server.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from rocm_serve.diagnostics.gate.protocol import Protocol
from rocm_serve.diagnostics.gate.reasons import message_of, reason
from rocm_serve.errors import UserError

_PASSED_ON = ("Content-Type", "Authorization")
_ASKED_WITH = ("prompt", "model")  # of a body, beside what the protocol states
_NO_COMPLETION = "no completion"
_MANY = 2**63  # what the journal's numbers hold
_POLL_S = 0.05  # how long the end of a run may wait for the server to see it


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request."""

    key: str  # sha256 of the request body
    prompt_hash: str  # as lm-eval hashes prompts
    latency_s: float
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    response: str  # as it came: what lm-eval reads of it (NaN, half a surrogate pair) need not be strict JSON


class Journal:
    """Answers of one run by the hash of their request, in a file of one JSON line each."""

    def __init__(self, path: Path) -> None:
        """Read what is there. A last line that was cut off by a crash is dropped, from the file too.

        Errors: UserError for any other line that is no answer; OSError.
        """
        self.answers: dict[str, Answer] = {}
        lines = path.read_bytes().split(b"\n") if path.is_file() else []
        for number, line in enumerate(lines[:-1], 1):
            try:
                answer = msgspec.json.decode(line, type=Answer)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number}: {error}; --fresh begins a new run") from None
            self.answers[answer.key] = answer
        if lines and lines[-1]:
            path.write_bytes(b"".join(line + b"\n" for line in lines[:-1]))
        self._lock, self._path = threading.Lock(), path
        self._file = path.open("ab", buffering=0)  # a buffer would try again, at the end, what did not fit on the disk

    def add(self, answer: Answer) -> None:
        """Write an answer through to the file. One that comes after the end is nobody's any more.

        Errors: OSError; nothing is written after it, so that a line that was cut off stays the last.
        """
        with self._lock:
            if self._file.closed:
                return
            line = msgspec.json.encode(answer) + b"\n"
            try:
                while line:
                    line = line[self._file.write(line) :]
            except OSError as error:
                self._file.close()
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            self.answers[answer.key] = answer

    def close(self) -> None:
        with self._lock:
            self._file.close()


class Recorder:
    """The HTTP server that lm-eval talks to, on a free port of the loopback."""

    def __init__(self, base_url: str, protocol: Protocol, journal: Path, timeout_s: float) -> None:
        self.base_url, self.protocol, self.timeout_s = base_url, protocol, timeout_s
        self.journal = Journal(journal)
        self.kept = len(self.journal.answers)  # from an earlier, interrupted run
        self.errors: Counter[str] = Counter()  # what came instead of answers, by its kind; lm-eval asks again
        self.last_error = ""  # what the server said to the last of them
        self.failed: BaseException | None = None  # why nothing can be recorded any more
        self._unanswered: dict[str, str] = {}  # key -> kind of its last error, while it has no answer
        self.departures: dict[str, int] = {}  # from the protocol, a sentence each, with how often
        self.asked: set[str] = set()  # keys lm-eval asked for in this run
        self._lock = threading.Lock()
        self._server = _Server(self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="gate-recorder", daemon=True
        )

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.journal.close()

    @property
    def url(self) -> str:
        """Where lm-eval has to post to."""
        return f"http://127.0.0.1:{self._server.server_address[1]}{self.protocol.endpoint}"

    @property
    def new(self) -> int:
        """Answers that came from the server in this run."""
        return len(self.journal.answers) - self.kept

    def answers(self) -> dict[str, Answer]:
        """Return the answers lm-eval asked for, by the hash of their prompt."""
        found = (self.journal.answers[key] for key in sorted(self.asked) if key in self.journal.answers)
        return {answer.prompt_hash: answer for answer in found}

    def answer(self, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        """Answer one request: from the journal, else from the server."""
        try:
            request = json.loads(body)
        except ValueError:
            request = None
        if not isinstance(request, dict):
            return 400, b'{"error": {"message": "the body is no JSON object"}}'
        self._compare(request)
        key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        with self._lock:
            self.asked.add(key)
        kept = self.journal.answers.get(key)
        if kept is not None:
            return 200, kept.response.encode()
        start = time.perf_counter()
        try:
            status, content = self._ask(body, headers)
        except (OSError, http.client.HTTPException) as error:
            words = f"{self.base_url}: {reason(error)}"
            self._count(key, reason(error), words)
            return 502, json.dumps({"error": {"message": words}}).encode()
        latency_s = time.perf_counter() - start
        if status != 200:
            self._count(key, f"HTTP {status}", message_of(content))
            return status, content
        self._keep(key, request, content, latency_s)
        return status, content

    def cause(self) -> str | None:
        """Say what came instead of answers to requests that never got one, or None."""
        with self._lock:
            kinds = Counter(self._unanswered.values())
        if not kinds:
            return None
        kind = kinds.most_common(1)[0][0]
        count = self.errors[kind]
        times = f"{count} time{'s' * (count != 1)}"
        if kind == _NO_COMPLETION:
            return f"the server answered {times} with what is no completion; last: {self.last_error}"
        if kind.startswith("HTTP "):
            return f"the server answered {kind} {times}; last: {self.last_error}"
        return f"the server is gone: {kind} ({times})"

    def _keep(self, key: str, request: dict[str, Any], content: bytes, latency_s: float) -> None:
        """Write an answer to the journal. Whatever lm-eval does not read may be missing or of any type."""
        found = _completion(content)
        if found is None:
            self._count(key, _NO_COMPLETION, message_of(content))  # lm-eval stumbles over it, too, and asks again
            return
        completion, choice = found
        given = completion.get("usage")
        usage = given if isinstance(given, dict) else {}
        finish_reason = choice.get("finish_reason")
        answer = Answer(
            key=key,
            prompt_hash=hashlib.sha256(str(request.get("prompt")).encode()).hexdigest(),
            latency_s=latency_s,
            finish_reason=finish_reason if _is_text(finish_reason) else None,
            prompt_tokens=_whole(usage.get("prompt_tokens")),
            completion_tokens=_whole(usage.get("completion_tokens")),
            response=content.decode(),
        )
        self.journal.add(answer)
        with self._lock:
            self._unanswered.pop(key, None)

    def _compare(self, request: dict[str, Any]) -> None:
        """Hold a body against the protocol: what is stated is there, and nothing else."""
        stated = self.protocol.on_the_wire()
        others = {key: value for key, value in request.items() if key not in _ASKED_WITH}
        for key in stated.keys() | others.keys():
            if others.get(key) != stated.get(key):
                sentence = f"requests had {key} = {others.get(key)!r}; the protocol says {stated.get(key)!r}"
                with self._lock:
                    self.departures[sentence] = self.departures.get(sentence, 0) + 1
        if not isinstance(request.get("prompt"), str):
            with self._lock:
                self.departures["prompts were no strings"] = self.departures.get("prompts were no strings", 0) + 1

    def _ask(self, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        """Post to the server. Errors: OSError, HTTPException when it cannot be reached."""
        parts = urlsplit(self.base_url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout_s)
        try:
            connection.request("POST", parts.path + self.protocol.endpoint, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _count(self, key: str, kind: str, words: str) -> None:
        with self._lock:
            self.errors[kind] += 1
            self.last_error = words
            self._unanswered[key] = kind


def _completion(content: bytes) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return what lm-eval takes for a completion, and its one choice; None where it would ask again."""
    try:
        completion = json.loads(content.decode())
    except (ValueError, RecursionError):
        return None
    choices = completion.get("choices") if isinstance(completion, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return None
    (choice,) = choices
    index = choice.get("index")
    return (completion, choice) if isinstance(index, int) and index in (0, -1) and "text" in choice else None


def _is_text(value: object) -> bool:
    """Say whether it is a text that a file can hold: half a surrogate pair is none."""
    return isinstance(value, str) and value.isprintable()


def _whole(value: object) -> int | None:
    """Return a number of tokens, or None for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MANY else None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # lm-eval opens all its connections at once

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(("127.0.0.1", 0), _handler(recorder))
        self._recorder = recorder

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep what a handler died of: whoever waits for lm-eval raises it."""
        error = sys.exception()
        if not isinstance(error, ConnectionError):  # lm-eval hung up
            self._recorder.failed = error


def _handler(recorder: Recorder) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path == recorder.protocol.endpoint:
                headers = {name: self.headers[name] for name in _PASSED_ON if name in self.headers}
                self._send(*recorder.answer(body, headers))
            else:
                self._send(404, b'{"error": {"message": "the gate passes on completions only"}}')

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Say nothing: progress is shown elsewhere."""

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                self.close_connection = True  # lm-eval hung up, as it does when it is told to stop

    return Handler
