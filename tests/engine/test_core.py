"""Core and client over a real ZeroMQ link, in one process; the workers are a stand-in."""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager

import pytest
import zmq

from rocm_serve.engine.client import EngineClient, EngineDead
from rocm_serve.engine.link import VERSION_FRAME, ClientLink, CoreLink, WireError, endpoint
from rocm_serve.engine.thread import CoreThread
from rocm_serve.errors import UserError
from rocm_serve.executor.api import Executor, ExecutorFailed
from rocm_serve.messages import AddRequest, Drain, Output
from rocm_serve.trace import StepTrace
from rocm_serve.types import FinishReason, SamplingParams
from tests.engine.simulation import Answer, FakeExecutor, alone, make_limits, make_prompt, make_request

LIMITS = make_limits(num_pages=400, max_running_requests=64, chunked_prefill_size=64)


@pytest.fixture
def run_dir() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="core-") as path:  # pytest's own are too deep for a socket
        yield path


def run(story: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), timeout=30))


@asynccontextmanager
async def engine(
    run_dir: str, make: Callable[[], Executor], trace: list[StepTrace] | None = None
) -> AsyncIterator[tuple[EngineClient, CoreThread]]:
    """A client and a core that is not ready yet."""
    client = EngineClient(run_dir)
    thread = CoreThread(run_dir, make, None if trace is None else trace.append)
    thread.start()
    try:
        yield client, thread
    finally:
        if thread.is_alive():
            await client.drain()
        await client.close()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()


async def collect(client: EngineClient, request: AddRequest) -> Answer:
    answer = Answer()
    async for output in client.generate(request):
        answer.tokens += output.tokens
        answer.logprobs += output.logprobs
        answer.prompt_logprobs += output.prompt_logprobs
        answer.finish_reason = output.finish_reason
        answer.stop_token = output.stop_token
    return answer


async def last(client: EngineClient, request: AddRequest) -> Output:
    *_, output = [output async for output in client.generate(request)]
    return output


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds; a loaded machine makes each of the looks slower, and so the patience longer."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("waited in vain")


@pytest.mark.parametrize(("depth", "drafts", "ahead"), [(1, 0, False), (2, 0, False), (2, 3, False), (2, 0, True)])
def test_200_concurrent_requests_each_get_the_answer_of_their_alone_run(
    run_dir: str, depth: int, drafts: int, ahead: bool
) -> None:
    limits = make_limits(
        num_pages=140, max_running_requests=48, chunked_prefill_size=256, draft_tokens=drafts, plan_ahead=ahead
    )
    rng = random.Random()
    hosted = 0.02 if ahead else 0.5  # share of those behind which nothing is planned
    requests = [
        AddRequest(
            f"r{number}",
            make_prompt(number, rng.randint(1, 20)),
            SamplingParams(
                max_tokens=rng.randint(50, 60) if number < 40 else rng.randint(0, 60),  # so that pages run out
                eos_token_ids=() if number < 40 else rng.choice([(), (0,)]),
                logprobs=2 if rng.random() < hosted else None,
                prompt_logprobs=0 if rng.random() < hosted else None,
            ),
        )
        for number in range(200)
    ]

    async def story() -> None:
        all_are_there = threading.Event()  # a core faster than this loop would never be crowded
        executor = FakeExecutor(limits, depth, goes_on=all_are_there)
        async with engine(run_dir, lambda: executor) as (client, _):
            assert await client.start() == limits
            tasks = [asyncio.create_task(collect(client, request)) for request in requests]
            await until(lambda: client.stats.running + client.stats.waiting + client.stats.finished == 200)
            all_are_there.set()
            answers = await asyncio.gather(*tasks)
            for request, answer in zip(requests, answers, strict=True):
                assert answer == alone(request.prompt, request.params, limits)
            stats = client.stats
            assert (stats.finished, stats.running, stats.waiting) == (200, 0, 0)
            assert (stats.pages_used, stats.slots_used) == (0, 0)
            assert stats.peak_running > 15 and stats.mixed_steps and stats.preemptions
            assert (stats.decode_tokens > 1.5 * stats.decode_forwards) == (drafts > 0)
            assert bool(stats.accepted_draft_tokens) == bool(stats.draft_speeds) == (drafts > 0)
            assert client.num_open == 0
        assert executor.shut_down

    run(story)


def test_closing_the_iterator_aborts_before_and_after_the_first_token(run_dir: str) -> None:
    async def story() -> None:
        executor = FakeExecutor(LIMITS, step_s=0.005)
        async with engine(run_dir, lambda: executor) as (client, _):
            await client.start()
            async with aclosing(client.generate(make_request("a", 5, max_tokens=200))) as outputs:
                await anext(outputs)
            await until(lambda: client.stats.aborted == 1)
            task = asyncio.create_task(collect(client, make_request("b", 200, max_tokens=50)))
            await until(lambda: client.num_open == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: client.stats.aborted == 2)
            await until(lambda: client.stats.running == client.stats.pages_used == 0)
            assert await collect(client, make_request("c", 5, max_tokens=3))
            assert executor.worker.requests.keys() == {2}, "the workers were told to forget the aborted ones"

    run(story)


def test_what_has_come_is_handed_over_at_once_and_nothing_after_the_end(run_dir: str) -> None:
    async def story() -> None:
        async with engine(run_dir, lambda: FakeExecutor(LIMITS, step_s=0.005)) as (client, _):
            await client.start()
            async with aclosing(client.batches(make_request("a", 5, max_tokens=12))) as batches:
                got = [await anext(batches)]
                await until(lambda: client.stats.finished == 1)
                client.abort(["a"])
                got += [outputs async for outputs in batches]
            assert len(got) <= 2, "what waited was handed over piece by piece"
            outputs = [output for outputs in got for output in outputs]
            tokens = [token for output in outputs for token in output.tokens]
            assert tokens == alone(make_prompt(1, 5), SamplingParams(max_tokens=12), LIMITS).tokens
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert client.num_open == 0

    run(story)


def test_an_iterator_that_has_ended_aborts_nothing(run_dir: str) -> None:
    async def story() -> None:
        async with engine(run_dir, lambda: FakeExecutor(LIMITS)) as (client, _):
            await client.start()
            async with aclosing(client.generate(make_request("a", 5, max_tokens=1))) as outputs:
                assert (await anext(outputs)).finish_reason is FinishReason.LENGTH
            await collect(client, make_request("b", 5, max_tokens=1))
            assert client.stats.aborted == 0 and client.stats.finished == 2

    run(story)


def test_a_complete_answer_counts_as_finished_and_stops_its_work(run_dir: str) -> None:
    async def story() -> None:
        async with engine(run_dir, lambda: FakeExecutor(LIMITS, step_s=0.005)) as (client, _):
            await client.start()
            async with aclosing(client.generate(make_request("a", 5, max_tokens=200))) as outputs:
                await anext(outputs)
                client.complete("a")
            client.complete("unknown")
            await until(lambda: client.stats.finished == 1)
            assert client.stats.running == client.stats.pages_used == client.stats.aborted == client.num_open == 0
            assert await collect(client, make_request("a", 5, max_tokens=3))
            assert (client.stats.finished, client.stats.aborted) == (2, 0)

    run(story)


def test_abort_by_id_ends_the_iterator_of_somebody_else(run_dir: str) -> None:
    async def story() -> None:
        async with engine(run_dir, lambda: FakeExecutor(LIMITS, step_s=0.005)) as (client, _):
            await client.start()
            task = asyncio.create_task(last(client, make_request("a", 5, max_tokens=200)))
            await until(lambda: client.num_open == 1)
            client.abort(("a", "unknown"))
            assert (await task).finish_reason is FinishReason.ABORT
            await until(lambda: client.stats.aborted == 1)

    run(story)


def test_drain_finishes_what_runs_and_waits_and_takes_nothing_new(run_dir: str) -> None:
    limits = make_limits(max_running_requests=2)

    async def story() -> None:
        executor = FakeExecutor(limits, step_s=0.002)
        async with engine(run_dir, lambda: executor) as (client, thread):
            await client.start()
            requests = [make_request(f"r{number}", 5, max_tokens=20) for number in range(6)]
            tasks = [asyncio.create_task(collect(client, request)) for request in requests]
            await until(lambda: client.stats.running == 2)
            drained = asyncio.create_task(client.drain())
            await until(lambda: client.state == "draining")
            refused = await last(client, make_request("late", 5, max_tokens=1))
            assert refused.finish_reason is FinishReason.ERROR and "shutting down" in (refused.error or "")
            answers = await asyncio.gather(*tasks)
            await drained
            assert all(len(answer.tokens) == 20 for answer in answers)
            assert client.state == "dead" and client.error is None
            await asyncio.to_thread(thread.join)
            assert thread.exit_code == 0 and executor.shut_down

    run(story)


def test_drain_ends_an_idle_engine(run_dir: str) -> None:
    async def story() -> None:
        async with engine(run_dir, lambda: FakeExecutor(LIMITS)) as (client, thread):
            await client.start()
            await client.drain()
            await asyncio.to_thread(thread.join)
            assert thread.exit_code == 0

    run(story)


def test_a_dead_worker_ends_every_request_with_its_sentence(run_dir: str) -> None:
    async def story() -> None:
        executor = FakeExecutor(make_limits(max_running_requests=2), depth=2, fail_at=7)
        async with engine(run_dir, lambda: executor) as (client, thread):
            await client.start()
            requests = [make_request(f"r{number}", 5, max_tokens=30) for number in range(5)]
            for output in await asyncio.gather(*(last(client, request) for request in requests)):
                assert output.finish_reason is FinishReason.ERROR
                assert output.error == "rank 1 failed during forward: a planted fault"
            await until(lambda: client.state == "dead")
            assert client.error == "rank 1 failed during forward: a planted fault"
            late = await last(client, make_request("late", 5, max_tokens=1))
            assert late.finish_reason is FinishReason.ERROR and late.error == client.error
            await client.drain()
            await asyncio.to_thread(thread.join)
            assert thread.exit_code == 1 and executor.shut_down

    run(story)


def test_a_worker_that_dies_while_nothing_runs_is_noticed(run_dir: str) -> None:
    class Sick(FakeExecutor):
        def poll(self, timeout_s: float, wake: zmq.Socket[bytes] | None = None) -> None:
            raise ExecutorFailed("rank 3 died without a word")

    async def story() -> None:
        async with engine(run_dir, lambda: Sick(LIMITS)) as (client, _):
            await client.start()
            await until(lambda: client.state == "dead")
            assert client.error == "rank 3 died without a word"

    run(story)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ExecutorFailed("rank 0 failed during loading: no such tensor"), 1),
        (UserError("--mem-fraction is too small"), 2),
    ],
)
def test_an_engine_that_does_not_come_up_says_why(run_dir: str, error: Exception, code: int) -> None:
    async def story() -> None:
        async with engine(run_dir, lambda: FakeExecutor(LIMITS, start_error=error)) as (client, thread):
            with pytest.raises(EngineDead, match=str(error)):
                await client.start()
            await asyncio.to_thread(thread.join)
            assert thread.exit_code == code

    run(story)


def test_an_executor_that_cannot_be_made_reaches_the_client_and_the_starter(run_dir: str) -> None:
    def make() -> Executor:
        raise UserError("--model /nowhere: no such directory")

    async def story() -> None:
        async with engine(run_dir, make) as (client, thread):
            with pytest.raises(EngineDead, match="no such directory"):
                await client.start()
            await asyncio.to_thread(thread.join)
            assert thread.exit_code == 2 and isinstance(thread.error, UserError)

    run(story)


def test_the_supervisor_can_declare_the_engine_dead(run_dir: str) -> None:
    async def story() -> None:
        async with engine(run_dir, lambda: FakeExecutor(LIMITS, step_s=0.01)) as (client, thread):
            await client.start()
            task = asyncio.create_task(last(client, make_request("a", 5, max_tokens=200)))
            await until(lambda: client.stats.running == 1)
            client.fail("the engine core was killed by signal 9")
            client.fail("a second reason")
            output = await task
            assert output.error == client.error == "the engine core was killed by signal 9"
            link = ClientLink(run_dir)
            link.send(Drain())
            await asyncio.to_thread(thread.join)
            link.close()

    run(story)


def test_a_refused_request_ends_with_the_sentence_and_hurts_nobody(run_dir: str) -> None:
    async def story() -> None:
        async with engine(run_dir, lambda: FakeExecutor(LIMITS)) as (client, _):
            await client.start()
            output = await last(client, make_request("long", 1000, max_tokens=1))
            assert output.finish_reason is FinishReason.ERROR and "1000 tokens" in (output.error or "")
            assert len((await collect(client, make_request("ok", 5, max_tokens=4))).tokens) == 4

    run(story)


def test_an_id_in_use_is_refused_by_the_client(run_dir: str) -> None:
    async def story() -> None:
        async with engine(run_dir, lambda: FakeExecutor(LIMITS, step_s=0.005)) as (client, _):
            await client.start()
            async with aclosing(client.generate(make_request("a", 5, max_tokens=200))) as outputs:
                await anext(outputs)
                with pytest.raises(ValueError, match="already in use"):
                    await collect(client, make_request("a", 5, max_tokens=1))
                assert (await anext(outputs)).finish_reason is None

    run(story)


def test_before_ready_a_request_is_refused_and_limits_are_unknown(run_dir: str) -> None:
    async def story() -> None:
        async with engine(run_dir, lambda: FakeExecutor(LIMITS)) as (client, _):
            with pytest.raises(RuntimeError, match="not said its limits"):
                _ = client.limits
            output = await last(client, make_request("a", 5, max_tokens=1))
            assert "still starting" in (output.error or "")
            await client.start()
            assert client.limits == LIMITS

    run(story)


def test_both_stages_have_work_at_once_when_32_requests_decode(run_dir: str) -> None:
    limits = make_limits(num_pages=800, max_running_requests=32, chunked_prefill_size=512)
    trace: list[StepTrace] = []

    async def story() -> None:
        async with engine(run_dir, lambda: FakeExecutor(limits, depth=2, step_s=0.01), trace) as (client, _):
            await client.start()
            requests = [make_request(f"r{number}", 5, seed=number, max_tokens=30) for number in range(32)]
            await asyncio.gather(*(collect(client, request) for request in requests))

    run(story)
    steady = [step for step in trace if step.num_recurrent == step.num_works]
    assert len(steady) > 40
    full = [step for step in steady if 15 <= step.num_works <= 17]
    assert len(full) >= 0.9 * len(steady)
    overlapped = sum(a.committed_ns > b.submitted_ns for a, b in zip(trace, trace[1:], strict=False))
    assert overlapped >= len(trace) // 2
    assert sum(step.in_flight == 2 for step in steady) >= len(steady) // 2


def test_a_new_request_joins_while_a_plan_is_in_flight_and_depth_allows(run_dir: str) -> None:
    executor = FakeExecutor(LIMITS, depth=2, step_s=0.05)
    trace: list[StepTrace] = []

    async def story() -> None:
        async with engine(run_dir, lambda: executor, trace) as (client, _):
            await client.start()
            first = asyncio.create_task(collect(client, make_request("a", 5, max_tokens=6)))
            await until(lambda: client.stats.running == 1)
            await collect(client, make_request("b", 5, max_tokens=1))
            await first

    run(story)
    b = next(plan.seq for plan in executor.plans for new in plan.new if new.rid == 1)
    assert next(step for step in trace if step.seq == b).in_flight == 2


def test_a_lone_request_is_waited_for_in_one_sleep_a_step_though_depth_has_room(run_dir: str) -> None:
    executor = FakeExecutor(LIMITS, depth=2, step_s=0.03)

    async def story() -> None:
        async with engine(run_dir, lambda: executor) as (client, _):
            await client.start()
            executor.polls = 0
            await collect(client, make_request("a", 5, max_tokens=8))

    run(story)
    assert len(executor.plans) == 8
    assert executor.polls <= 3 * 8, "it looked again and again while a step ran"


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [((b"\xff\xff", b""), "does not speak wire version"), ((VERSION_FRAME, b"\x01"), "sent what is no message")],
)
def test_another_version_or_language_is_refused_at_either_end(
    run_dir: str, frames: tuple[bytes, bytes], sentence: str
) -> None:
    context = zmq.Context()

    def send(name: str) -> None:
        with context.socket(zmq.PUSH) as socket:
            socket.connect(endpoint(run_dir, name))
            socket.send_multipart(frames)

    async def story() -> None:
        client = EngineClient(run_dir)
        send("from_core.sock")
        with pytest.raises(EngineDead, match=sentence):
            await client.start()
        await client.close()

    run(story)
    core = CoreLink(run_dir)
    send("to_core.sock")
    with pytest.raises(WireError, match=sentence):
        while True:
            core.receive(1.0)
    core.close()
    context.term()


def test_a_run_directory_too_long_for_a_socket_is_named() -> None:
    with pytest.raises(ValueError, match="too long for a socket"):
        endpoint("/" + "x" * 120, "to_core.sock")


def test_closing_a_client_ends_what_is_open(run_dir: str) -> None:
    async def story() -> None:
        async with engine(run_dir, lambda: FakeExecutor(LIMITS, step_s=0.01)) as (client, thread):
            await client.start()
            task = asyncio.create_task(last(client, make_request("a", 5, max_tokens=30)))
            await until(lambda: client.stats.running == 1)
            await client.close()
            assert "closed its link" in ((await task).error or "")
            link = ClientLink(run_dir)
            link.send(Drain())
            await asyncio.to_thread(thread.join)
            link.close()

    run(story)
