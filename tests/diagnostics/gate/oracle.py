"""A server that knows the answers: an OpenAI-style endpoint with a chosen share of right answers and chosen faults.

python -m tests.diagnostics.gate.oracle --data DIR --wrong 0,3,9 --port 0      prints the URL
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN_CHARS = 4
DRAFTS_OF_AN_ANSWER = 20


@dataclass
class Oracle:
    """What the server knows and how it misbehaves. Questions are named by their line in test.jsonl."""

    data: Path
    wrong: frozenset[int] = frozenset()  # answered with another number
    empty: frozenset[int] = frozenset()
    bang: frozenset[int] = frozenset()  # answered with !!!!
    endless: frozenset[int] = frozenset()  # answered up to the token limit
    restart_after: int | None = None  # answers; then it says it was started anew
    fail_every: int = 0  # every n-th request gets 503
    delay_s: float = 0.0
    api_key: str = ""
    accepted: float | None = None  # share of first drafts; None: no counters of drafts
    asked: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        rows = [json.loads(line) for line in (self.data / "test.jsonl").read_text(encoding="utf-8").splitlines()]
        self.known = {row["question"]: (number, row["answer"]) for number, row in enumerate(rows)}
        self.answered = 0

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            self.asked.append(body)
            count = len(self.asked)
        time.sleep(self.delay_s)
        if self.fail_every and count % self.fail_every == 0:
            return 503, {"error": {"message": "too busy", "type": "server_error", "param": None, "code": None}}
        text, reason = self.text_of(body["prompt"])
        with self.lock:
            self.answered += 1
        usage = {"prompt_tokens": len(body["prompt"]) // TOKEN_CHARS, "completion_tokens": len(text) // TOKEN_CHARS}
        choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
        return 200, {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage}

    def text_of(self, prompt: str) -> tuple[str, str]:
        question = prompt.rpartition("Question: ")[2].removesuffix("\nAnswer:")
        number, answer = self.known[question]
        if number in self.empty:
            return "", "stop"
        if number in self.bang:
            return "!" * 60, "stop"
        if number in self.endless:
            return f" {answer} and so on", "length"
        if number in self.wrong:
            steps, _, value = answer.rpartition("#### ")
            return f" {steps}#### {int(value) + 1}\n\n", "stop"
        return f" {answer}\n\n", "stop"

    def page(self, path: str) -> tuple[int, bytes]:
        created = 1 if self.restart_after is None or self.answered < self.restart_after else 2
        card = {"id": "oracle", "root": "none", "owned_by": "rocm_serve", "created": created, "max_model_len": 4096}
        pages: dict[str, Any] = {
            "/v1/models": {"object": "list", "data": [card]},
            "/health": {"status": "ready"},
            "/ready": {"status": "ready"},
            "/version": {"version": "oracle"},
        }
        if path == "/metrics":
            return 200, self.metrics().encode()
        if path in pages:
            return 200, json.dumps(pages[path]).encode()
        return 404, b"{}"

    def metrics(self) -> str:
        lines = ["# TYPE rocm_serve_finished_requests_total counter"]
        lines += [f"rocm_serve_finished_requests_total {self.answered}"]
        if self.accepted is not None:
            drafts = DRAFTS_OF_AN_ANSWER * self.answered
            for place, share in ((1, self.accepted), (2, self.accepted / 4)):
                label = f'{{position="{place}"}}'
                lines.append(f"rocm_serve_draft_tokens_by_position_total{label} {drafts}")
                lines.append(f"rocm_serve_accepted_draft_tokens_by_position_total{label} {drafts * share}")
        return "\n".join(lines) + "\n"


class Serving:
    """An oracle on a free port until the block ends."""

    def __init__(self, oracle: Oracle, port: int = 0) -> None:
        self.oracle = oracle
        self._server = _Server(("127.0.0.1", port), _handler(oracle))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Serving:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024


def _handler(oracle: Oracle) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if oracle.api_key and self.headers["Authorization"] != f"Bearer {oracle.api_key}":
                self._send(401, b"{}")
                return
            self._send(*oracle.page(self.path))

        def do_POST(self) -> None:
            status, reply = oracle.complete(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._send(status, json.dumps(reply).encode())

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                self.close_connection = True

    return Handler


def write_data(folder: Path, questions: int, shots: int = 30) -> Path:
    """Write small train.jsonl and test.jsonl in GSM8K's form."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, start in (("train", shots, 1000), ("test", questions, 10)):
        rows = []
        for number in range(start, start + count):
            question = f"Ann has {number} pears and buys {number % 7 + 2} more. How many pears has she?"
            total = number + number % 7 + 2
            answer = f"She has {number} + {number % 7 + 2} = <<{number}+{number % 7 + 2}={total}>>{total} pears.\n"
            rows.append(json.dumps({"question": question, "answer": f"{answer}#### {total}"}))
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--wrong", default="")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    wrong = frozenset(int(number) for number in args.wrong.split(",") if number)
    with Serving(Oracle(args.data, wrong=wrong, delay_s=args.delay), args.port) as serving:
        print(serving.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
