"""The policy of drafting against a machine whose times are known: what it measures, and what it makes of that."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

import pytest

from rocm_serve.engine.drafting import GAINS, LEAST, LOSES, PERIOD, WINDOW, DraftPolicy
from rocm_serve.messages import DraftSpeed

OFF_S = 0.010


@dataclass
class Machine:
    """A pipeline of `depth` stages; a step takes `seconds(requests, drafting)` in each, and waits for those ahead.

    After a switch, the first plan of each of `depth` groups has nothing to verify yet, and costs `wasted_s`.
    """

    depth: int
    adaptive: bool
    seconds: Callable[[int, bool], float]
    tokens: Callable[[bool], float] = lambda drafting: 2.0 if drafting else 1.0
    wasted_s: float = 0.5
    now_s: float = 0.0
    ways: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = DraftPolicy(self.depth, adaptive=self.adaptive)
        self.flying: deque[tuple[int, float, int]] = deque()
        self.fresh = 0
        self.ahead: deque[float] = deque(maxlen=self.depth)

    def plan(self, requests: int, decodes: bool = True, extra_s: float = 0.0) -> bool:
        """Plan one, and take the oldest result when the pipeline is full."""
        seq, drafting = len(self.ways), self.policy.wants(requests)
        self.fresh = self.depth if self.ways and self.ways[-1] != drafting else max(0, self.fresh - 1)
        self.policy.planned(seq, requests, drafting, decodes)
        self.ways.append(drafting)
        cost = self.seconds(requests, drafting) + extra_s + self.wasted_s * (self.fresh > 0)
        tokens = requests // self.depth * self.tokens(drafting and not self.fresh)
        self.ahead.append(cost)
        self.flying.append((seq, max(self.ahead), round(tokens)))
        if len(self.flying) == self.depth:
            self.commit()
        return drafting

    def commit(self) -> None:
        seq, cost, tokens = self.flying.popleft()
        self.now_s += cost
        self.policy.committed(seq, tokens, self.now_s)

    def speed(self, size: int) -> DraftSpeed:
        (found,) = [speed for speed in self.policy.speeds() if speed.requests == size]
        return found


def gain(net: float) -> Callable[[int, bool], float]:
    """Times with which drafting, at two tokens a step, has this net speed."""
    return lambda requests, drafting: 2 * OFF_S / net if drafting else OFF_S


@pytest.mark.parametrize("depth", [1, 2, 8])
@pytest.mark.parametrize("adaptive", [True, False])
def test_one_decoding_plan_in_32_runs_the_other_way_in_runs_that_fill_the_pipeline(depth: int, adaptive: bool) -> None:
    machine = Machine(depth, adaptive, gain(1.5))
    run = 2 * depth + 2
    for _ in range(4 * PERIOD * run):
        machine.plan(16)
    assert [way for way, _ in groupby(machine.ways)] == [True, False] * 4
    assert {len(list(plans)) for way, plans in groupby(machine.ways) if not way} == {run}
    assert machine.ways.count(False) == len(machine.ways) / PERIOD
    speed = machine.speed(16)
    assert speed.drafting and speed.net == pytest.approx(1.5, rel=1e-6), "a step of the switch was measured"
    assert speed.off_steps == 4 * 3 - min(depth - 1, 3), "three of each run, but for those of the last on their way"
    assert speed.on_steps == WINDOW
    assert speed.off_s == pytest.approx(OFF_S / (16 // depth), rel=1e-6)


def test_auto_stops_above_the_size_at_which_drafting_loses_and_goes_on_below() -> None:
    def seconds(requests: int, drafting: bool) -> float:
        return OFF_S * (1 + requests / 16) if drafting else OFF_S

    machine = Machine(1, True, seconds)
    visits = [1, 2, 4, 8, 32, 64] * 8  # at 16 it would make no difference
    random.Random().shuffle(visits)
    for requests in visits:
        for _ in range(300):
            machine.plan(requests)
    assert {speed.requests: speed.drafting for speed in machine.policy.speeds()} == {
        1: True, 2: True, 4: True, 8: True, 32: False, 64: False,
    }  # fmt: skip
    assert machine.speed(64).net == pytest.approx(2 / 5, rel=1e-6)
    assert machine.speed(4).net == pytest.approx(2 / 1.25, rel=1e-6)
    assert machine.policy.wants(3) and not machine.policy.wants(33)


def test_mtp_measures_a_loss_and_drafts_on() -> None:
    machine = Machine(1, False, gain(0.5))
    for _ in range(2000):
        machine.plan(4)
    assert machine.ways.count(False) <= 2000 / PERIOD + 4
    assert machine.speed(4).drafting
    assert machine.speed(4).net == pytest.approx(0.5, rel=1e-6)


def test_a_size_that_stopped_is_tested_again_and_comes_back() -> None:
    machine = Machine(1, True, gain(0.7))
    for _ in range(1000):
        machine.plan(4)
    assert not machine.speed(4).drafting
    machine.seconds = gain(1.4)
    first = len(machine.ways)
    for _ in range(PERIOD * WINDOW * 2):
        machine.plan(4)
    assert machine.speed(4).drafting, "drafting pays again, and nobody noticed"
    again = machine.ways[first:]
    until = len(again) - 1 - again[::-1].index(False)
    before = again[: again.index(True)]
    assert len(before) <= PERIOD * 4 and until > len(before)


@pytest.mark.parametrize(("net", "start", "stays"), [(0.98, 1.5, True), (1.02, 0.7, False)])
def test_near_one_nothing_is_changed(net: float, start: float, stays: bool) -> None:
    assert LOSES < 0.98 and GAINS > 1.02
    machine = Machine(1, True, gain(start))
    for _ in range(1000):
        machine.plan(4)
    assert machine.speed(4).drafting == stays
    machine.seconds = gain(net)
    for _ in range(PERIOD * WINDOW * 2):
        machine.plan(4)
        assert machine.speed(4).drafting == stays
    assert machine.speed(4).net == pytest.approx(net, rel=1e-3)


def test_nothing_is_judged_by_a_few_steps() -> None:
    machine = Machine(1, True, gain(0.1))
    trials = 0
    while not trials or machine.speed(4).drafting:
        machine.plan(4)
        trials = machine.ways.count(False)
    assert trials >= LEAST


def test_prompts_compilers_and_rests_do_not_count() -> None:
    machine = Machine(1, True, gain(1.25))
    rng = random.Random()
    for number in range(6000):
        if rng.random() < 0.05:
            machine.plan(4, decodes=False, extra_s=1.0)
        if rng.random() < 0.02:
            machine.now_s += 100.0
            machine.plan(4, decodes=False)
        machine.plan(4, extra_s=30.0 * (number % 301 == 0))
    speed = machine.speed(4)
    assert speed.drafting and speed.net == pytest.approx(1.25, rel=1e-6)
    assert speed.off_s == pytest.approx(OFF_S / 4, rel=1e-6)


@pytest.mark.parametrize("depth", [1, 2])
def test_nor_do_they_when_most_plans_have_prompts(depth: int) -> None:
    machine = Machine(depth, False, gain(1.25))
    for number in range(12000):
        prompts = number % 11 >= 5
        machine.plan(4, not prompts, extra_s=1.0 * prompts)
    assert machine.speed(4).net == pytest.approx(1.25, rel=1e-6)


def test_a_step_behind_one_of_another_size_is_not_measured() -> None:
    machine = Machine(2, False, lambda requests, drafting: OFF_S * requests * (1.5 if drafting else 1.0))
    for number in range(300):
        machine.plan(4 if number % 6 < 3 else 64)
    assert machine.speed(4).on_s == machine.speed(64).on_s == 0.0
    for number in range(12000):
        machine.plan(4 if number % 9 < 4 else 64)
    for size in (4, 64):
        assert machine.speed(size).off_s == pytest.approx(2 * OFF_S, rel=1e-6)
        assert machine.speed(size).net == pytest.approx(2 / 1.5, rel=1e-6)


def test_uneven_acceptance_is_averaged() -> None:
    rng = random.Random()
    machine = Machine(1, False, lambda requests, drafting: OFF_S * (1.2 if drafting else 1.0))
    machine.tokens = lambda drafting: rng.choice([1, 3]) if drafting else 1
    for _ in range(4000):
        machine.plan(8)
    mean, spread = 2.0, 1.0 / WINDOW**0.5
    assert abs(machine.speed(8).net * 1.2 - mean) < 5 * spread


def test_a_run_ends_even_when_no_plan_only_decodes() -> None:
    machine = Machine(1, True, gain(1.5))
    while machine.plan(4):
        pass
    for _ in range(40):
        machine.plan(4, decodes=False)
    assert machine.ways[-1], "it waits for decoding plans, and drafts for nobody"
    assert machine.ways.count(False) <= 16


def test_sizes_are_powers_of_two() -> None:
    machine = Machine(1, False, gain(1.0))
    for requests in range(65):
        machine.plan(requests)
    assert [speed.requests for speed in machine.policy.speeds()] == [1, 2, 4, 8, 16, 32, 64]


def test_nothing_is_known_before_something_is_measured() -> None:
    machine = Machine(1, False, gain(1.0))
    machine.plan(1)
    assert machine.policy.speeds() == (DraftSpeed(1, True, 0.0, 0.0),) and machine.speed(1).net == 0.0
