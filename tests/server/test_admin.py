from __future__ import annotations

import asyncio

import httpx
import pytest

from rocm_serve.server.app import create_app
from rocm_serve.server.info import ServerInfo
from tests.executor.wishes import resolved
from tests.server.fake_engine import FakeEngine
from tests.server.http import TOKENIZER, complete, error_of, events, make_info, with_client


def sample(text: str, name: str) -> float:
    """One value of a /metrics page."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[-1])


def test_models_lists_the_served_name() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["object"], card["owned_by"], card["root"]) == (
            "org/tiny",
            "model",
            "rocm_serve",
            "models/tiny",
        )
        assert card["max_model_len"] == 200 and isinstance(card["created"], int)
        assert (await client.get("/v1/models/org/tiny")).json() == card
        response = await client.get("/v1/models/other")
        assert response.status_code == 404 and error_of(response)["code"] == "model_not_found"

    with_client(talk, info=make_info(served_model_name="org/tiny"))


def test_models_says_how_the_model_is_cut() -> None:
    info = ServerInfo.from_resolved(resolved(tp=4, ep=2, expert_exchange="all_gather"))

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert card["parallel"] == {"tp": 4, "pp": 1, "ep": 2, "expert_exchange": "all_gather"}

    with_client(talk, info=info)


@pytest.mark.parametrize(
    ("state", "health", "code"),
    [("starting", 200, "starting"), ("draining", 200, "draining"), ("dead", 503, "engine_dead")],
)
def test_an_engine_that_is_not_ready_refuses_work_and_says_why(state: str, health: int, code: str) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.state = state  # type: ignore[assignment]
        engine.error = "rank 3 died in step 7"
        assert (await client.get("/health")).status_code == (await client.get("/ping")).status_code == health
        for response in (
            await client.get("/ready"),
            await client.post("/v1/completions", json={"prompt": "a"}),
            await client.post("/v1/completions", json={"prompt": "a", "stream": True}),
        ):
            assert response.status_code == 503 and error_of(response)["code"] == code
            assert ("rank 3 died" in error_of(response)["message"]) == (state == "dead")
        assert (await client.get("/metrics")).status_code == 200
        assert not engine.seen

    with_client(talk)


def test_a_ready_engine_is_healthy_and_ready() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        assert (await client.get("/health")).json() == {"status": "ready"}
        assert (await client.get("/ready")).status_code == 200
        for path in ("/health", "/ready"):
            assert (await client.head(path)).status_code == 200
        assert (await client.get("/version")).json()["version"]

    with_client(talk)


def test_metrics_count_error_answers_by_status_but_not_probes() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        text = (await client.get("/metrics")).text
        assert sample(text, 'rocm_serve_http_errors_total{status="429"}') == 0
        assert sample(text, 'rocm_serve_http_errors_total{status="503"}') == 0
        await client.post("/v1/completions", json={"prompt": "a", "nonsense": 1})
        await client.post("/v1/completions", content=b"[")
        await client.get("/v1/nothing")
        engine.state = "starting"  # type: ignore[assignment]
        await client.post("/v1/completions", json={"prompt": "a"})
        await client.get("/ready")
        text = (await client.get("/metrics")).text
        for status, count in (("400", 2), ("404", 1), ("429", 0), ("503", 1)):
            assert sample(text, f'rocm_serve_http_errors_total{{status="{status}"}}') == count

    with_client(talk)


def test_metrics_show_the_engines_counters_and_the_requests_latencies() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        await complete(client, prompt="a", n=2, max_tokens=5, ignore_eos=True)
        await events(client, prompt="a", max_tokens=3, ignore_eos=True)
        text = (await client.get("/metrics")).text
        assert sample(text, "rocm_serve_running") == sample(text, "rocm_serve_open") == 0
        assert sample(text, "rocm_serve_peak_running") == 3
        assert sample(text, 'rocm_serve_steps_total{kind="mixed"}') == 3
        assert sample(text, 'rocm_serve_requests_total{finish_reason="length"}') == 3
        assert sample(text, "rocm_serve_time_to_first_token_seconds_count") == 3
        assert sample(text, "rocm_serve_inter_token_seconds_count") == 4 + 4 + 2
        assert sample(text, "rocm_serve_request_seconds_count") == 3
        for name in ("waiting", "pages_used", "pages_total", "slots_used", "slots_total", "preemptions_total"):
            assert sample(text, f"rocm_serve_{name}") == 0

    with_client(talk)


def test_metrics_count_the_tasks_of_the_event_loop() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        name = "rocm_serve_server_tasks"
        before = sample((await client.get("/metrics")).text, name)
        engine.release.clear()
        ask = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "n": 3, "max_tokens": 2}))
        while len(engine.running) < 3:
            await asyncio.sleep(0)
        assert sample((await client.get("/metrics")).text, name) >= before + 4, "the request and its three answers"
        engine.release.set()
        await ask
        assert sample((await client.get("/metrics")).text, name) == before

    with_client(talk)


def test_two_apps_in_one_process_do_not_share_metrics() -> None:
    async def main() -> None:
        apps = [create_app(FakeEngine(10), TOKENIZER, make_info()) for _ in range(2)]
        assert len({id(app.state.context.metrics) for app in apps}) == 2

    asyncio.run(main())


def test_a_full_queue_answers_429_and_the_accepted_ones_finish() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.release.clear()
        asks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(50)]
        while len(engine.seen) < 12:
            await asyncio.sleep(0)
        for _ in range(200):
            await asyncio.sleep(0)
        engine.release.set()
        answers = await asyncio.gather(*asks)
        codes = [answer.status_code for answer in answers]
        assert codes.count(200) == 12 and codes.count(429) == 38
        for answer in answers:
            if answer.status_code == 429:
                assert error_of(answer)["code"] == "queue_full" and int(answer.headers["retry-after"]) > 0
        assert (await client.post("/v1/completions", json=body)).status_code == 200

    body = {"prompt": "a", "max_tokens": 2}
    with_client(talk, info=make_info(max_running_requests=4, max_queued_requests=8), max_running=4)


def test_1024_waiting_requests_all_finish_with_the_default_queue() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = {"prompt": "a", "max_tokens": 1}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(1100)))
        assert {answer.status_code for answer in answers} == {200}

    with_client(talk, max_running=4)


def test_one_request_with_more_answers_than_the_queue_holds_is_a_400() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        for body, param in (({"prompt": "a", "n": 7}, "n"), ({"prompt": ["a"] * 7}, "prompt")):
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 400 and error_of(response)["param"] == param
        assert not engine.seen

    with_client(talk, info=make_info(max_running_requests=2, max_queued_requests=4))


def test_the_schema_page_shows_the_request_fields() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        schema = (await client.get("/openapi.json")).json()
        body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert {"prompt", "max_tokens", "logit_bias", "stop"} <= set(body["properties"])

    with_client(talk)
