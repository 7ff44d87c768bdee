"""Who is stuck: only a rank that owes progress, makes none for the whole timeout, and is not merely waiting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rocm_serve.executor.heartbeat import Heartbeat, Phase
from rocm_serve.messages import RankBeat
from rocm_serve.watchdog import InProcessWatch, Watch


def beat(
    rank: int,
    count: int,
    *,
    step: int = 0,
    owes: bool = True,
    waiting: bool = False,
    stopped: bool = False,
    layer: int = -1,
    phase: str = "decode",
) -> RankBeat:
    return RankBeat(rank, count, phase, step, layer, owes, waiting, stopped)


def names(watch: Watch, beats: list[RankBeat], now: float, submitted: int = 0) -> list[int]:
    return [stuck.beat.rank for stuck in watch.look(beats, submitted, now)]


def test_a_rank_that_stands_still_is_stuck_after_the_timeout_and_not_before() -> None:
    watch = Watch(10)
    assert names(watch, [beat(0, 5)], 0.0) == []
    assert names(watch, [beat(0, 5)], 9.9) == []
    assert names(watch, [beat(0, 5)], 10.0) == [0]


@given(st.lists(st.floats(0.1, 9.9), min_size=1, max_size=30))
def test_a_rank_that_moves_within_the_timeout_is_never_stuck_however_long_its_step(pauses: list[float]) -> None:
    watch = Watch(10)
    now = 0.0
    for count, pause in enumerate(pauses):
        assert names(watch, [beat(0, count, layer=count)], now) == []
        now += pause
        assert names(watch, [beat(0, count, layer=count)], now) == []


def test_an_idle_rank_owes_nothing_until_a_plan_is_sent_and_then_has_the_whole_timeout() -> None:
    watch = Watch(10)
    idle = beat(0, 7, step=3, owes=False)
    assert names(watch, [idle], 0.0, submitted=3) == []
    assert names(watch, [idle], 1000.0, submitted=3) == []
    assert names(watch, [idle], 1000.5, submitted=4) == []
    assert names(watch, [idle], 1009.9, submitted=4) == []
    assert names(watch, [idle], 1010.0, submitted=4) == [0]


def test_a_rank_that_waits_is_not_to_blame_while_anybody_moves() -> None:
    watch = Watch(10)
    for now in range(100):
        assert names(watch, [beat(0, now), beat(1, 1, waiting=True)], float(now)) == []


def test_a_rank_whose_wait_has_just_ended_is_not_to_blame_for_how_long_it_was() -> None:
    watch = Watch(3)
    for now in range(9):
        assert names(watch, [beat(0, now), beat(1, 1, waiting=True)], float(now)) == []
    done, old_news = beat(0, 9, owes=False), beat(1, 1, waiting=True)
    assert names(watch, [done, old_news], 8.5) == [], "the rows are there; rank 1's next beat is not"
    assert names(watch, [done, old_news], 11.4) == []
    assert names(watch, [done, old_news], 11.5) == [1], "they never came"


def test_a_stopped_rank_is_found_also_where_it_waits_while_others_move() -> None:
    watch = Watch(3)
    for now in range(3):
        assert names(watch, [beat(0, now), beat(1, 1, waiting=True, stopped=True)], float(now)) == []
    assert names(watch, [beat(0, 3), beat(1, 1, waiting=True, stopped=True)], 3.0) == [1]


def test_when_nobody_moves_those_that_wait_are_named_after_the_one_they_wait_for() -> None:
    watch = Watch(10)
    still = [beat(1, 1, waiting=True), beat(0, 1)]
    names(watch, still, 0.0)
    assert names(watch, still, 10.0) == [0, 1]
    everybody_waits = Watch(10)
    waiting = [beat(0, 1, waiting=True), beat(1, 1, waiting=True)]
    names(everybody_waits, waiting, 0.0)
    assert names(everybody_waits, waiting, 10.0) == [0, 1], "what they wait for is lost"


def test_a_rank_stopped_by_a_signal_is_named_first_and_said_to_be() -> None:
    watch = Watch(10)
    still = [beat(0, 1), beat(3, 1, step=17, layer=2, stopped=True)]
    watch.look(still, 17, 0.0)
    stuck = watch.look(still, 17, 12.0)
    assert [one.beat.rank for one in stuck] == [3, 0]
    assert stuck[0].sentence() == "rank 3 has made no progress for 12 s: step 17, layer 2 (decode), stopped by a signal"


def test_a_neighbour_that_stopped_moving_a_moment_later_is_named_with_the_culprit() -> None:
    watch = Watch(10)
    watch.look([beat(0, 1), beat(1, 1)], 0, 0.0)
    watch.look([beat(0, 1), beat(1, 2)], 0, 0.5)
    assert names(watch, [beat(0, 1), beat(1, 2)], 10.0) == [0, 1]


def test_a_rank_in_this_process_that_stands_still_in_a_step_is_told_once_and_an_idle_one_never() -> None:
    heart = Heartbeat()
    told: list[str] = []
    watch = InProcessWatch(heart, 0.2, told.append)
    watch.start()
    heart.enter(Phase.DECODE, 5)
    watch.join(30)
    assert len(told) == 1 and told[0].startswith("rank 0 has made no progress for ") and "step 5 (decode)" in told[0]
    heart.enter(Phase.IDLE)
    idle = InProcessWatch(heart, 0.2, told.append)
    idle.start()
    idle.join(1.5)
    assert idle.is_alive() and len(told) == 1
    idle.end()
    idle.join(30)
    assert not idle.is_alive()
