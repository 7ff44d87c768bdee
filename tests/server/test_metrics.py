"""What /metrics says of drafting. The rest of the page is asked for over HTTP beside this."""

from __future__ import annotations

import asyncio

from rocm_serve.messages import DraftSpeed, Stats
from rocm_serve.server.limits import Gate
from rocm_serve.server.metrics import Metrics
from tests.server.fake_engine import FakeEngine
from tests.server.http import make_info
from tests.server.test_admin import sample


def page(stats: Stats) -> str:
    class Engine(FakeEngine):
        @property
        def stats(self) -> Stats:
            return stats

    engine = Engine(100)
    return Metrics(engine, Gate(engine, make_info())).render().decode()


async def drafting_page() -> str:
    return page(
        Stats(
            decode_forwards=50,
            decode_tokens=92,
            draft_tokens=70,
            accepted_draft_tokens=42,
            draft_tokens_by_position=(40, 30),
            accepted_draft_tokens_by_position=(30, 12),
            draft_speeds=(
                DraftSpeed(1, True, 0.002, 0.003, 128, 9),
                DraftSpeed(16, False, 0.5, 0.25),
                DraftSpeed(64, True, 1, 0, 3, 0),
            ),
        )
    )


def test_drafts_are_counted_and_by_position_and_tokens_per_forward_can_be_had() -> None:
    text = asyncio.run(drafting_page())
    assert sample(text, "rocm_serve_draft_tokens_total") == 70
    assert sample(text, "rocm_serve_accepted_draft_tokens_total") == 42
    for position, drafted, accepted in ((1, 40, 30), (2, 30, 12)):
        label = f'{{position="{position}"}}'
        assert sample(text, f"rocm_serve_draft_tokens_by_position_total{label}") == drafted
        assert sample(text, f"rocm_serve_accepted_draft_tokens_by_position_total{label}") == accepted
    assert sample(text, "rocm_serve_decode_tokens_total") / sample(text, "rocm_serve_decode_forwards_total") == 1.84
    assert "# TYPE rocm_serve_draft_tokens_total counter" in text


def test_net_speed_is_shown_where_it_was_measured() -> None:
    text = asyncio.run(drafting_page())
    assert sample(text, 'rocm_serve_draft_net_speed{requests="1"}') == 1.5
    assert sample(text, 'rocm_serve_draft_net_speed{requests="16"}') == 0.5
    assert text.count("rocm_serve_draft_net_speed{") == 2
    assert [sample(text, f'rocm_serve_drafting{{requests="{n}"}}') for n in (1, 16, 64)] == [1, 0, 1]
    assert sample(text, 'rocm_serve_decode_seconds_per_token{drafting="off",requests="16"}') == 0.25
    assert sample(text, 'rocm_serve_decode_seconds_per_token{drafting="on",requests="64"}') == 1
    assert text.count("rocm_serve_decode_seconds_per_token{") == 5


def test_how_many_steps_a_net_speed_rests_on_is_shown_for_every_size() -> None:
    text = asyncio.run(drafting_page())
    for size, on, off in ((1, 128, 9), (16, 0, 0), (64, 3, 0)):
        for way, steps in (("on", on), ("off", off)):
            name = f'rocm_serve_draft_net_speed_samples{{drafting="{way}",requests="{size}"}}'
            assert sample(text, name) == steps


def test_a_server_that_does_not_draft_has_no_counter_of_drafts() -> None:
    async def plain() -> str:
        return page(Stats(decode_forwards=3, decode_tokens=3))

    text = asyncio.run(plain())
    assert "draft" not in text
    assert sample(text, "rocm_serve_decode_forwards_total") == sample(text, "rocm_serve_decode_tokens_total") == 3
