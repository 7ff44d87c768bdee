"""Who the server is, and what shows that it is another one now."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import msgspec
import pytest

from rocm_serve.diagnostics.gate.server import (
    Identity,
    NoAnswer,
    Server,
    Watch,
    base_of,
    changes,
    counters_of,
    drafted,
    fallen,
    filled,
    parse_metrics,
)
from rocm_serve.diagnostics.gate.verdict import Drafts
from rocm_serve.errors import UserError
from tests.diagnostics.gate.oracle import Oracle, Serving, write_data

RESTARTED = "the server was restarted during the run: its start was 'created 1' and became 'created 2'"


@pytest.mark.parametrize(
    "end", ["", "/", "/v1", "/v1/", "/v1/completions", "/v1/chat/completions/", "/v1/models", "/metrics"]
)
def test_the_root_of_a_url(end: str) -> None:
    assert base_of(f"http://h:8000{end}") == "http://h:8000"
    assert base_of(f"https://h/models/a{end}") == "https://h/models/a"


@pytest.mark.parametrize(
    "url",
    ["h:8000", "ftp://h", "http://", "http://a b", "http://h:port", "http://h:99999", "http://h:0", "http://:80"]
    + ["http://h:80?x=1", "http://h/#a", "http://me:secret@h:80", "http://[::1"],
)
def test_no_url(url: str) -> None:
    with pytest.raises(UserError, match="legal: http://HOST:PORT"):
        base_of(url)


def test_a_server_tells_who_it_is_and_a_restart_shows(tmp_path: Path) -> None:
    oracle = Oracle(write_data(tmp_path, 2), restart_after=1)
    with Serving(oracle) as serving:
        server = Server(serving.url)
        metrics = server.metrics()
        identity = server.identity(metrics)
        assert identity == Identity(
            model="oracle",
            root="none",
            owned_by="rocm_serve",
            max_model_len=4096,
            version="oracle",
            started="created 1",
        )
        watch = Watch(server, identity, metrics)
        watch.look()
        assert watch.problems == []
        oracle.answered = 1
        watch.look()
        watch.look()
    assert watch.problems == [RESTARTED]


def test_a_restart_is_one_sentence_though_a_starting_server_leaves_things_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its counters begin anew, its gauges too, and until the model is loaded it has no limits."""
    oracle = Oracle(write_data(tmp_path, 2))
    pages = [(1, 4096, 90, 500), (2, None, 0, 0), (2, None, 0, 0), (2, 4096, 0, 400), (2, 4096, 3, 400)]
    monkeypatch.setattr(oracle, "page", lambda path: page_of(path, *pages[0]))
    with Serving(oracle) as serving:
        server = Server(serving.url)
        metrics = server.metrics()
        identity = server.identity(metrics)
        assert identity is not None
        watch = Watch(server, identity, metrics)
        while pages:
            watch.look()
            pages.pop(0)
    assert watch.problems == [RESTARTED] and watch.unanswered == 0


def page_of(path: str, created: int, longest: int | None, finished: int, places: int) -> tuple[int, bytes]:
    card = {"id": "m", "owned_by": "rocm_serve", "created": created, "max_model_len": longest}
    text = f"# TYPE finished_total counter\nfinished_total {finished}\n# TYPE pages_total gauge\npages_total {places}\n"
    pages = {"/metrics": text.encode(), "/v1/models": msgspec.json.encode({"data": [card]})}
    return 200, pages.get(path, b"{}")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:9", "GET http://127.0.0.1:9/v1/models: connection refused"),
        ("http://no-such-host.invalid", "GET http://no-such-host.invalid/v1/models: unknown host"),
    ],
)
def test_what_was_asked_and_why_it_failed_is_said(url: str, words: str) -> None:
    with pytest.raises(NoAnswer) as why:
        Server(url).known({})
    assert str(why.value) == words


def test_pages_that_are_not_there_or_not_what_they_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle(write_data(tmp_path, 2))
    with Serving(oracle) as serving:
        with pytest.raises(NoAnswer, match=f"GET {serving.url}/nowhere/v1/models: HTTP 404"):
            Server(f"{serving.url}/nowhere").known({})
        monkeypatch.setattr(oracle, "page", lambda path: (200, b'{"data": []}'))
        with pytest.raises(NoAnswer, match="this is no list of models"):
            Server(serving.url).known({})


def test_what_does_not_speak_http_and_what_hangs_up_early(monkeypatch: pytest.MonkeyPatch) -> None:
    for reply, words in (
        (b"SSH-2.0-x\r\n", "what answers does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "the connection was closed before the end"),
    ):
        with socket.create_server(("127.0.0.1", 0)) as listening:

            def serve(listening: socket.socket = listening, reply: bytes = reply) -> None:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(reply)

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(NoAnswer, match=words):
                Server(f"http://127.0.0.1:{listening.getsockname()[1]}").ask("/v1/models")
            thread.join()


def test_a_server_that_does_not_answer_is_counted_not_blamed(tmp_path: Path) -> None:
    watch = Watch(Server("http://127.0.0.1:9"), Identity(model="x"), {})
    watch.look()
    assert watch.unanswered == 1 and watch.problems == []
    assert Server("http://127.0.0.1:9").identity({}) is None


def test_others_make_up_created_anew_and_are_known_by_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {"data": [{"id": "m", "owned_by": "vllm", "created": 17}]}
    server = Server("u")

    def ask(path: str) -> bytes:
        if path != "/v1/models":
            raise NoAnswer(path)
        return msgspec.json.encode(cards)

    monkeypatch.setattr(server, "ask", ask)
    found = server.identity({"process_start_time_seconds": 5.0})
    assert found is not None and found.started == "process_start_time_seconds 5"
    found = server.identity({})
    assert found is not None and found.started is None


def test_every_field_that_changes_is_named() -> None:
    one = Identity(model="a", version="1")
    assert changes(one, one) == []
    assert len(changes(one, Identity(model="b", version="2"))) == 2


def test_a_counter_that_falls_is_a_restart_and_a_gauge_is_not() -> None:
    """By what the page declares: a gauge may be called _total, too."""
    page = "# HELP x a\n# TYPE x_total counter\n# TYPE gone_total counter\n# TYPE pages_total gauge\n# TYPE y counter\n"
    counters = counters_of(page)
    before = {'x_total{kind="a"}': 5.0, "running": 3.0, "gone_total": 1.0, "pages_total": 7.0, "y_total": 3.0}
    assert fallen(before, {'x_total{kind="a"}': 6.0, "running": 0.0, "pages_total": 1.0}, counters) is None
    assert "x_total" in (fallen(before, {'x_total{kind="a"}': 4.0}, counters) or "")
    assert "y_total" in (fallen(before, {"y_total": 2.0}, counters) or "")
    assert fallen(before, {'x_total{kind="a"}': 4.0}, counters_of("")) is None


def test_what_a_server_does_not_tell_is_no_change() -> None:
    """A page of metrics that did not come in time, a version that is not told while the server starts."""
    known = Identity(model="a", version="1", started="5")
    silent = Identity(model="a")
    assert changes(known, silent) == [] == changes(silent, known)
    assert filled(known, silent) == known
    assert len(changes(filled(known, silent), Identity(model="a", version="2", started="5"))) == 1


def ours(*places: tuple[float, float]) -> dict[str, float]:
    """Counters of drafts that were made and accepted, by place, and over all places as well."""
    page = {}
    for name, counts in zip(("draft_tokens", "accepted_draft_tokens"), zip(*places, strict=True), strict=True):
        page[f"rocm_serve_{name}_total"] = sum(counts)
        page |= {f'rocm_serve_{name}_by_position_total{{position="{i}"}}': n for i, n in enumerate(counts, 1)}
    return page


def vllm(name: str, value: float, labels: str = "") -> dict[str, float]:
    return {f'vllm:spec_decode_num_{name}_total{{engine="0",model_name="m"{labels}}}': value}


def test_first_drafts_of_a_run_alone() -> None:
    """A reference states the acceptance of first drafts; with three a step, that of all of them is another number."""
    before, after = ours((100, 10), (90, 1)), ours((300, 180), (290, 9))
    assert drafted(before, after) == Drafts(200.0, 170.0, first=True)
    sums = vllm("draft_tokens", 21.0) | vllm("accepted_tokens", 8.0)
    assert drafted({}, sums) == Drafts(21.0, 8.0, first=False), "where nothing else is told"
    places = vllm("accepted_tokens_per_pos", 6.0, ',position="0"') | vllm(
        "accepted_tokens_per_pos", 2.0, ',position="1"'
    )
    assert drafted({}, sums | vllm("drafts", 7.0) | places) == Drafts(7.0, 6.0, first=True)
    assert drafted({}, {"rocm_serve_generation_tokens_total": 5.0}) is None


def test_values_that_are_no_number_are_left_out_of_the_metrics() -> None:
    page = '# HELP a b\na_total{x="1 2"} 3\nb NaN\nc_bucket{le="+Inf"} 4e2\nd +Inf\n'
    assert parse_metrics(page) == {'a_total{x="1 2"}': 3.0, 'c_bucket{le="+Inf"}': 400.0}


def test_the_key_goes_with_every_question(tmp_path: Path) -> None:
    oracle = Oracle(write_data(tmp_path, 2), api_key="secret")
    with Serving(oracle) as serving:
        assert Server(serving.url).identity({}) is None
        assert Server(serving.url, "secret").identity({}) is not None
