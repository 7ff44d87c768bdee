from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rocm_serve.engine.blocks import pages_for
from rocm_serve.engine.request import longest
from rocm_serve.messages import EffectiveLimits
from rocm_serve.types import SamplingParams
from tests.engine.driver import Driver, Job, Log, Story, drive
from tests.engine.simulation import alone, make_limits, subchunks

MAX_MODEL_LEN = 160
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(0, 14),
    min_tokens=st.integers(0, 4),
    eos_token_ids=st.sampled_from([(), (0,), (0, 4)]),
    stop_token_ids=st.sampled_from([(), (), (7,)]),
    logprobs=st.sampled_from([None, None, 1]),
    prompt_logprobs=st.sampled_from([None, 0]),
)
LENGTHS = st.one_of(st.integers(1, 12), st.integers(1, 150), st.sampled_from([1, 63, 64, 65, 128, 129]))


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Any arrivals, limits and pools."""
    jobs = []
    for number in range(draw(st.integers(1, 8))):
        arrives = draw(st.integers(0, 12))
        aborted = draw(st.one_of(st.none(), st.none(), st.integers(0, 25)))
        aborted_at = None if aborted is None else arrives + aborted
        jobs.append(Job(number, draw(LENGTHS), draw(PARAMS), arrives, aborted_at))
    limits = fitting_limits(
        jobs,
        draw(st.sampled_from([1, 4, 16])),
        spare_pages=draw(st.integers(0, 12)),
        max_running_requests=draw(st.integers(1, 8)),
        chunked_prefill_size=draw(st.sampled_from([1, 7, 16, 64, 100, 512])),
        num_slots=draw(st.integers(1, 8)),
        plan_ahead=draw(st.booleans()),
    )
    patience = tuple(draw(st.lists(st.booleans(), min_size=1, max_size=5)))
    return Story(limits, draw(st.integers(1, 3)) + limits.plan_ahead, tuple(jobs), patience)


def fitting_limits(jobs: list[Job], page_size: int, spare_pages: int, **limits: int) -> EffectiveLimits:
    """The smallest pool in which each job fits alone, and `spare_pages` more."""
    largest = max(pages_for(longest(j.prompt_len, j.params, MAX_MODEL_LEN), page_size) for j in jobs)
    return make_limits(max_model_len=MAX_MODEL_LEN, page_size=page_size, num_pages=largest + spare_pages, **limits)


def crowded_story(seed: int, ahead: bool = False) -> Story:
    """Several requests at once in a pool for little more than one: most stories preempt, many in flight."""
    rng = random.Random(seed)
    jobs = []
    for number in range(rng.randint(3, 9)):
        params = SamplingParams(
            max_tokens=rng.choice([0, 1, rng.randint(5, 40), rng.randint(5, 40), rng.randint(5, 40)]),
            eos_token_ids=rng.choice([(), (), (0,)]),
            logprobs=rng.choice([None, 1]) if not ahead or rng.random() < 0.1 else None,
            prompt_logprobs=rng.choice([None, 0]) if not ahead or rng.random() < 0.1 else None,
        )
        arrives = rng.randint(0, 4)
        aborted_at = arrives + rng.randint(0, 40) if rng.random() < 0.2 else None
        length = rng.choice([rng.randint(1, 10), rng.randint(10, 30)])
        jobs.append(Job(seed + number, length, params, arrives, aborted_at, rng.random() < 0.1))
    limits = fitting_limits(
        jobs,
        rng.choice([1, 2, 3]),
        spare_pages=rng.randint(0, 8),
        max_running_requests=rng.randint(2, 8),
        chunked_prefill_size=rng.choice([1, 2, 7, 64]),
        num_slots=rng.randint(2, 8),
        plan_ahead=ahead,
    )
    patience = tuple(rng.random() < 0.5 for _ in range(rng.randint(1, 5)))
    return Story(limits, rng.randint(1, 3) + ahead, tuple(jobs), patience)


def judge_answers(story: Story, log: Log) -> None:
    for number, job in enumerate(story.jobs):
        got = log.answers[f"r{number}"]
        want = alone(job.prompt, job.params, story.limits)
        if got.finish_reason is None:
            assert job.aborted_at is not None or job.dies_as_victim, "a request has no end"
            for field in ("tokens", "logprobs", "prompt_logprobs"):
                assert getattr(got, field) == getattr(want, field)[: len(getattr(got, field))]
        else:
            assert got == want


RARE_STATES = (
    "abort in flight",
    "abort while waiting",
    "abort of a victim in flight",
    "preemption",
    "preemption in flight",
    "prompt preempted",
    "token of a victim kept",
    "victim ends before it resumes",
    "output computed again in several rows",
    "resumed",
    "exhaustion: pages keep a request waiting",
    "exhaustion: slots keep a request waiting",
    "depth 2",
    "one request in two plans in flight",
    "mixed",
)


AHEAD_STATES = (
    "planned ahead",
    "planned ahead of a prompt's token",
    "planned ahead, with a new page",
    "planned ahead of a near plan",
    "end with a row planned ahead",
    "abort with a row planned ahead",
    "abort of a victim in flight",
    "preemption in flight",
    "token of a victim kept",
    "victim ends before it resumes",
    "resumed",
    "mixed",
)


def judge(story: Story, replay: bool = True) -> Log:
    log = drive(story)
    judge_answers(story, log)
    if replay:
        assert msgspec.msgpack.encode(drive(story).plans) == msgspec.msgpack.encode(log.plans), "not a replay"
    return log


@settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(stories())
def test_batching_changes_no_token_leaks_nothing_and_replays_identically(story: Story) -> None:
    judge(story)


def test_nor_does_it_in_the_rare_states_which_crowded_stories_reach() -> None:
    first = random.randrange(2**32)
    print(f"seeds {first}..")
    reach(RARE_STATES, lambda number: crowded_story(first + number))


def test_nor_where_steps_are_planned_ahead_of_their_tokens() -> None:
    first = random.randrange(2**32)
    print(f"seeds {first}..")
    reach(AHEAD_STATES, lambda number: crowded_story(first + number, ahead=True))


def reach(states: tuple[str, ...], story: Callable[[int], Story]) -> None:
    """Judge 200 stories, every fourth also as a replay, and more while one of `states` has not been reached."""
    census: Counter[str] = Counter()
    for number in range(2000):
        if number >= 200 and all(census[name] for name in states):
            break
        log = judge(story(number), replay=number % 4 == 0)
        census.update(name for name, count in log.census.items() if count)
    print(census)
    missed = [name for name in states if not census[name]]
    assert not missed, f"no story reached: {missed}"


@given(st.integers(1, 300), st.integers(1, 130), st.integers(0, 12))
@settings(max_examples=30, deadline=None, database=None)
def test_rows_that_the_chunked_form_takes_together_depend_on_prompt_length_and_chunk_size_only(
    length: int, chunk: int, neighbours: int
) -> None:
    limits = make_limits(max_model_len=400, num_pages=4000, chunked_prefill_size=chunk, max_running_requests=64)
    others = [
        Job(number, 1 + 7 * number % 90, SamplingParams(max_tokens=3), number % 4) for number in range(neighbours)
    ]
    story = Story(limits, 2, (*others, Job(99, length, SamplingParams(max_tokens=1), 3)))
    driver = Driver(story)
    log = driver.run()
    rid = next(rid for rid, name in driver.rids.items() if name == f"r{neighbours}")
    works = [work for plan in log.plans for work in plan.work if work.rid == rid]
    cut = min(64, chunk)
    assert list(subchunks(works, length)) == [(at, min(at + cut, length)) for at in range(0, length, cut)]
