"""Outputs that come together: what is made of them, and where they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from rocm_serve.messages import AddRequest, Output, Stats
from rocm_serve.server.answer import Part
from rocm_serve.server.choices import Choice
from rocm_serve.server.errors import ApiError
from rocm_serve.server.limits import Gate
from rocm_serve.server.metrics import Metrics
from rocm_serve.server.runner import Runner
from rocm_serve.tokens.text_stream import TextOptions
from rocm_serve.types import FinishReason, SamplingParams
from tests.server.fake_engine import FakeEngine
from tests.server.http import TOKENIZER, VOCAB, make_info


class Batched(FakeEngine):
    """Says what it was given, batch by batch."""

    batched: Sequence[Sequence[Output]] = ()

    async def batches(self, request: AddRequest) -> AsyncGenerator[list[Output], None]:
        self.running.add(request.request_id)
        for outputs in self.batched:
            yield list(outputs)

    @property
    def stats(self) -> Stats:
        return Stats()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def run(batched: Sequence[Sequence[Output]], stops: tuple[str, ...] = ()) -> tuple[list[list[Part]], Batched, str]:
    engine = Batched(VOCAB)
    engine.batched = batched
    metrics = Metrics(engine, Gate(engine, make_info()))
    runner = Runner(engine, TOKENIZER, metrics)
    request = AddRequest("r-0", tuple(ids("Hello")), SamplingParams(max_tokens=50))
    (answer,) = runner.answers([Choice(0, request, TextOptions(stops=stops))])
    got: list[list[Part]] = []

    async def story() -> str:
        try:
            async for parts in runner.batches([answer]):
                got.append(parts)
        except ApiError as error:
            got.append([Part(0, str(error), finish_reason="error")])
        return metrics.render().decode()

    return got, engine, asyncio.run(story())


def test_a_batch_gives_one_part_per_output() -> None:
    outputs = [Output("r-0", (token,)) for token in ids(" one two three")]
    outputs.append(Output("r-0", tuple(ids(".")), finish_reason=FinishReason.LENGTH))
    got, _, text = run([outputs[:1], outputs[1:]])
    assert [len(parts) for parts in got] == [1, len(outputs) - 1]
    assert "".join(part.text for parts in got for part in parts) == " one two three."
    assert got[-1][-1].finish_reason == "length"
    assert f"rocm_serve_inter_token_seconds_count {len(outputs) - 1:.1f}" in text
    assert "rocm_serve_time_to_first_token_seconds_count 1.0" in text


def test_what_came_before_an_error_is_shown() -> None:
    outputs = [Output("r-0", (token,)) for token in ids(" one two")]
    got, _, _ = run([[*outputs, Output("r-0", finish_reason=FinishReason.ERROR, error="rank 1 died")]])
    assert "".join(part.text for part in got[0]) == " one two"
    assert got[1][0].finish_reason == "error" and "rank 1 died" in got[1][0].text


def test_nothing_is_shown_after_a_stop_string_and_the_engine_is_told() -> None:
    outputs = [Output("r-0", (token,)) for token in ids(" one two three four")]
    got, engine, _ = run([outputs], stops=(" two",))
    assert "".join(part.text for part in got[0]) == " one"
    assert (got[0][-1].finish_reason, got[0][-1].stop_reason) == ("stop", " two")
    assert engine.completed == ["r-0"]


@pytest.mark.parametrize("last", [FinishReason.LENGTH, None])
def test_a_stop_string_in_the_last_output_needs_no_word_to_the_engine(last: FinishReason | None) -> None:
    outputs = [Output("r-0", tuple(ids(" one"))), Output("r-0", tuple(ids(" two")), finish_reason=last)]
    got, engine, _ = run([outputs], stops=(" two",))
    assert got[0][-1].finish_reason == "stop"
    assert engine.completed == ([] if last else ["r-0"])
