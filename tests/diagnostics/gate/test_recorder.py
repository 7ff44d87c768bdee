"""Between lm-eval and the server: all goes through as it is, is kept, and is held to the protocol."""

from __future__ import annotations

import errno
import http.client
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocm_serve.diagnostics.gate.recorder import Journal, Recorder
from rocm_serve.errors import UserError
from tests.diagnostics.gate.made import PROTOCOL, hashed
from tests.diagnostics.gate.oracle import Oracle, Serving, write_data

BODY = {"model": "oracle", **PROTOCOL.on_the_wire()}


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(Oracle(write_data(tmp_path / "data", 6))) as running:
        yield running


def prompt_of(oracle: Oracle, number: int) -> str:
    return f"Question: {[*oracle.known][number]}\nAnswer:"


def post(recorder: Recorder, body: Any, path: str = PROTOCOL.endpoint) -> tuple[int, bytes]:
    host, port = recorder.url.removeprefix("http://").partition("/")[0].split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json", "Authorization": "Bearer x"})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


def test_a_request_and_its_answer_go_through_and_are_kept(serving: Serving, tmp_path: Path) -> None:
    body = BODY | {"prompt": prompt_of(serving.oracle, 2)}
    with Recorder(serving.url, PROTOCOL, tmp_path / "j", 30) as recorder:
        status, content = post(recorder, body)
        assert status == 200 and "#### 19" in json.loads(content)["choices"][0]["text"]
        (answer,) = recorder.answers().values()
    assert serving.oracle.asked == [body], "not a field more or less"
    assert answer.prompt_hash == hashed(body["prompt"]) and answer.finish_reason == "stop"
    assert answer.completion_tokens and answer.latency_s > 0
    assert recorder.departures == {} and not recorder.errors


def test_what_is_in_the_journal_is_not_asked_again(serving: Serving, tmp_path: Path) -> None:
    bodies = [BODY | {"prompt": prompt_of(serving.oracle, number)} for number in range(3)]
    with Recorder(serving.url, PROTOCOL, tmp_path / "j", 30) as recorder:
        first = [json.loads(post(recorder, body)[1]) for body in bodies[:2]]
    with Recorder(serving.url, PROTOCOL, tmp_path / "j", 30) as recorder:
        assert (recorder.kept, recorder.new) == (2, 0)
        assert [json.loads(post(recorder, body)[1]) for body in bodies[:2]] == first
        assert len(serving.oracle.asked) == 2
        post(recorder, bodies[2])
        assert recorder.new == 1 and len(recorder.answers()) == 3
    assert len(serving.oracle.asked) == 3


def test_another_body_with_the_same_prompt_is_another_request(serving: Serving, tmp_path: Path) -> None:
    body = BODY | {"prompt": prompt_of(serving.oracle, 0)}
    with Recorder(serving.url, PROTOCOL, tmp_path / "j", 30) as recorder:
        post(recorder, body)
        post(recorder, body | {"max_tokens": 1})
    assert len(serving.oracle.asked) == 2


def test_a_journal_whose_last_line_was_cut_off_loses_that_line_only(serving: Serving, tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Recorder(serving.url, PROTOCOL, path, 30) as recorder:
        for number in range(3):
            post(recorder, BODY | {"prompt": prompt_of(serving.oracle, number)})
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    journal = Journal(path)
    journal.close()
    assert len(journal.answers) == 2
    assert path.read_bytes() == b"".join(line + b"\n" for line in whole.split(b"\n")[:2])


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"temperature": 0.7}, "requests had temperature = 0.7; the protocol says 0.0"),
        ({"top_p": 0.9}, "requests had top_p = 0.9; the protocol says None"),
        ({"stop": ["x"]}, "requests had stop = ['x']; the protocol says"),
        ({"seed": None}, "requests had seed = None; the protocol says 1234"),
        ({"prompt": [1, 2]}, "prompts were no strings"),
    ],
)
def test_a_body_that_departs_from_the_protocol_is_noted(
    serving: Serving, tmp_path: Path, changed: dict[str, Any], sentence: str
) -> None:
    with Recorder(serving.url, PROTOCOL, tmp_path / "j", 30) as recorder:
        recorder.answer(json.dumps(BODY | {"prompt": "Question: ?\nAnswer:"} | changed).encode(), {})
        (found,) = recorder.departures
    assert found.startswith(sentence)


def test_errors_are_passed_on_counted_and_not_kept(tmp_path: Path) -> None:
    with (
        Serving(Oracle(write_data(tmp_path / "data", 2), fail_every=1)) as serving,
        Recorder(serving.url, PROTOCOL, tmp_path / "j", 30) as recorder,
    ):
        status, content = post(recorder, BODY | {"prompt": prompt_of(serving.oracle, 0)})
        assert status == 503 and b"too busy" in content
    assert recorder.errors == {"HTTP 503": 1} and "too busy" in recorder.last_error and recorder.answers() == {}


def test_a_server_that_is_gone_and_bodies_that_are_none(serving: Serving, tmp_path: Path) -> None:
    with Recorder("http://127.0.0.1:9", PROTOCOL, tmp_path / "j", 5) as recorder:
        assert post(recorder, BODY | {"prompt": "x"})[0] == 502
        assert post(recorder, b"no json")[0] == 400
        assert post(recorder, BODY, "/v1/embeddings")[0] == 404


def test_an_answer_without_a_choice_is_passed_on_and_not_kept(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving.oracle, "complete", lambda body: (200, {"choices": []}))
    with Recorder(serving.url, PROTOCOL, tmp_path / "j", 30) as recorder:
        assert json.loads(post(recorder, BODY | {"prompt": "x"})[1]) == {"choices": []}
        assert recorder.errors == {"no completion": 1} and recorder.new == 0


def whole(content: str) -> str:
    """A completion around what is given."""
    return f'{{"choices": [{{"index": 0, "text": " 7", "finish_reason": "stop"}}], {content}}}'


@pytest.mark.parametrize(
    ("reply", "reason", "tokens"),
    [
        (whole('"usage": {"prompt_tokens": 1.5, "completion_tokens": 3}'), "stop", 3),
        (whole('"usage": {"completion_tokens": true}'), "stop", None),
        (whole('"usage": {"completion_tokens": NaN}'), "stop", None),
        (whole(f'"usage": {{"completion_tokens": {"9" * 40}}}'), "stop", None),
        (whole('"usage": "none", "score": -Infinity'), "stop", None),
        (whole(r'"id": "\ud800"'), "stop", None),
        (r'{"choices": [{"index": 0, "text": "\ud800", "finish_reason": 5}]}', None, None),
        (r'{"choices": [{"index": 0, "text": null, "finish_reason": "\ud800"}]}', None, None),
    ],
)
def test_what_lm_eval_takes_for_an_answer_is_kept_as_it_came(
    serving: Serving,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reply: str,
    reason: str | None,
    tokens: int | None,
) -> None:
    """It reads choices[0].index and .text, by Python's json; the types of all else are the server's affair."""
    body = json.dumps(BODY | {"prompt": "x"}).encode()
    with Recorder(serving.url, PROTOCOL, tmp_path / "j", 30) as recorder:
        monkeypatch.setattr(recorder, "_ask", lambda body, headers: (200, reply.encode()))
        assert recorder.answer(body, {}) == (200, reply.encode())
        (answer,) = recorder.answers().values()
        assert (answer.finish_reason, answer.completion_tokens) == (reason, tokens)
        assert not recorder.errors and recorder.cause() is None
    with Recorder("http://127.0.0.1:9", PROTOCOL, tmp_path / "j", 30) as recorder:
        assert recorder.answer(body, {}) == (200, reply.encode()), "an interrupted run goes on with it"


@pytest.mark.parametrize("choices", ["[]", "[5]", '[{"text": "x"}]', '[{"index": 1, "text": "x"}]', '[{"index": 0}]'])
def test_what_lm_eval_asks_again_for_is_not_kept(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choices: str
) -> None:
    with Recorder(serving.url, PROTOCOL, tmp_path / "j", 30) as recorder:
        monkeypatch.setattr(recorder, "_ask", lambda body, headers: (200, f'{{"choices": {choices}}}'.encode()))
        recorder.answer(json.dumps(BODY | {"prompt": "x"}).encode(), {})
        assert recorder.errors == {"no completion": 1} and recorder.new == 0
        assert (recorder.cause() or "").startswith("the server answered 1 time with what is no completion")


def test_the_cause_is_what_the_server_said_until_it_answered(serving: Serving, tmp_path: Path) -> None:
    body = BODY | {"prompt": prompt_of(serving.oracle, 1)}
    with Recorder(serving.url, PROTOCOL, tmp_path / "j", 30) as recorder:
        serving.oracle.fail_every = 1
        for _ in range(3):
            post(recorder, body)
        assert recorder.cause() == "the server answered HTTP 503 3 times; last: too busy"
        serving.oracle.fail_every = 0
        post(recorder, body)
        assert recorder.cause() is None and recorder.errors["HTTP 503"] == 3
    with Recorder("http://127.0.0.1:9", PROTOCOL, tmp_path / "k", 5) as recorder:
        post(recorder, body)
        assert recorder.cause() == "the server is gone: connection refused (1 time)"


@pytest.mark.parametrize("line", [b'{"key": "x", "prom\n', b"\xff\xfe\n", b'{"key": 5}\n', b"\n"])
def test_a_journal_that_is_broken_in_the_middle_is_refused_by_line(
    serving: Serving, tmp_path: Path, line: bytes
) -> None:
    path = tmp_path / "j"
    with Recorder(serving.url, PROTOCOL, path, 30) as recorder:
        for number in range(2):
            post(recorder, BODY | {"prompt": prompt_of(serving.oracle, number)})
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line + second)
    with pytest.raises(UserError, match="line 2: .*; --fresh begins a new run"):
        Journal(path)


def test_a_full_disk_is_kept_for_whoever_waits_and_cuts_one_line_at_most(serving: Serving, tmp_path: Path) -> None:
    """A handler's exception would otherwise end in its thread, and lm-eval would ask again and again."""

    class Full(io.RawIOBase):
        taken = 0

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            if self.taken:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.taken = len(data) // 2
            return self.taken

    with Recorder(serving.url, PROTOCOL, tmp_path / "j", 30) as recorder:
        recorder.journal._file.close()
        recorder.journal._file = Full()  # type: ignore[assignment]
        with pytest.raises(http.client.RemoteDisconnected):
            post(recorder, BODY | {"prompt": prompt_of(serving.oracle, 0)})
        assert isinstance(recorder.failed, OSError) and recorder.failed.errno == errno.ENOSPC
        assert recorder.new == 0 and recorder.journal._file.closed
