"""The tuner with a kernel of plain torch and a clock that is made up: what it tries, judges and keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache

import msgspec
import pytest
import torch

from rocm_serve.ops import tiles
from rocm_serve.tuning import flow
from rocm_serve.tuning.bench import bench_of
from rocm_serve.tuning.cases import Case, experts
from rocm_serve.tuning.flow import Group, groups_of, tune_group
from rocm_serve.tuning.operands import Bench, relative, worst_piece
from rocm_serve.tuning.outcome import words
from rocm_serve.tuning.shapes import SHAPES
from rocm_serve.tuning.static import facts_on, model_of, wish_of
from rocm_serve.tuning.wish import Point, Wish, points

KERNEL = "stand_in"
SHAPE = {"rows": 4}
US = {16: 10.0, 32: 7.0, 64: 9.0, 128: 10.5}  # by BM: the rule's is 16
SOON = 60.0


@cache
def _wish() -> Wish:
    made = wish_of(facts_on(model_of(None, "tiny"), "sm_90", 1, {}), {}, 0)
    return Wish(
        dims=made.dims,
        providers=dict.fromkeys(made.providers, "reference"),
        arch="sm_90",
        dtype="float32",
        dialect="fn",
        activation="bf16",
        seed=3,
    )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A bench whose experts ask for a tile: a wrong one with BM 13, none at all with 99."""
    monkeypatch.setitem(tiles.RULES, KERNEL, lambda shape, arch: {"BM": 16})
    monkeypatch.setitem(tiles.CANDIDATES, KERNEL, lambda shape, arch: [{"BM": m} for m in (13, 99, 32, 64, 128)])
    made = bench_of(_wish(), torch.device("cpu"))
    right = made.ops.moe_experts

    def experts(x_TH: torch.Tensor, *arguments: object, **more: object) -> torch.Tensor:
        tile = tiles.tile(KERNEL, {"rows": len(x_TH)}, "sm_90")
        if tile["BM"] == 99:
            raise ValueError("out of resource: shared memory")
        return right(x_TH, *arguments, **more) * (1.01 if tile["BM"] == 13 else 1.0)

    object.__setattr__(made.ops, "moe_experts", experts)
    yield made


def _timer(case: Case) -> float:
    """Time a call by the tile that it asks for."""
    del case
    return US[tiles.tile(KERNEL, SHAPE, "sm_90")["BM"]]


def _group() -> Group:
    seen = {0: [(KERNEL, {"rows": 4})], 1: [(KERNEL, {"rows": 4})], 2: [("no_choice", {"rows": 4})]}
    tiles.RULES["no_choice"] = lambda shape, arch: {"BM": 1}
    try:
        groups = groups_of([Point("experts", {"rows": n}) for n in (3, 4, 4)], seen, "sm_90")
    finally:
        del tiles.RULES["no_choice"]
    assert len(groups) == 1, "a kernel with one candidate has nothing to choose"
    return groups[0]


def test_calls_that_ask_for_the_same_tile_are_tuned_together(bench: Bench) -> None:
    group = _group()
    assert group.key == (KERNEL, "rows=4")
    assert [str(point) for point in group.points] == ["experts rows 3", "experts rows 4"]
    assert group.tiles[0] == {"BM": 16} and len(group.tiles) == 6


def test_the_fastest_right_tile_wins_over_the_rule(bench: Bench) -> None:
    one = tune_group(bench, _group(), _timer, time.monotonic() + SOON)
    assert one.best.tile == {"BM": 32}
    assert one.gain == pytest.approx(10 / 7)
    whys = {tried.tile["BM"]: tried.why for tried in one.tried}
    assert whys[13].startswith("wrong: relative L2 1.0e-02")
    assert whys[99] == "ValueError: out of resource: shared memory"
    assert "6 of 6 tried, 2 not fit, 1 of them WRONG" in words(one)
    assert "1.43x" in words(one)


@pytest.mark.parametrize(
    ("arch", "provider", "activation", "rows", "limit"),
    [
        ("sm_90", "triton", "fp8_1x128", 257, 1.8e-2),
        ("sm_90", "triton", "fp8_1x128", 256, 5e-3),
        ("sm_90", "triton", "bf16", 257, 5e-3),
        ("sm_90", "reference", "fp8_1x128", 257, 5e-3),
        ("sm_100", "triton", "fp8_1x128", 257, 5e-3),
        ("gfx942", "triton", "fp8_1x128", 257, 5e-3),
    ],
)
def test_a_tile_is_held_to_the_bound_of_its_provider(
    arch: str, provider: str, activation: str, rows: int, limit: float
) -> None:
    bench = _bench_as(arch, provider, activation)
    assert bench.limit("moe_experts", rows) == limit
    assert bench.limit("gdn_step", rows) == 8e-3, "that of the op, which is looser"


def _bench_as(arch: str, provider: str, activation: str = "fp8_1x128") -> Bench:
    """Return a bench whose experts are said to be of this provider on this card; the reference computes them."""
    bench = bench_of(msgspec.structs.replace(_wish(), dtype="bfloat16"), torch.device("cpu"))
    bench.__dict__["arch"] = arch
    chosen = bench.ops.table["moe_experts"].providers[provider]
    bench.ops = replace(bench.ops, providers={**bench.ops.providers, "moe_experts": chosen}, fp8_activation=activation)
    return bench


@pytest.mark.parametrize(("arch", "rows"), [("sm_90", 300), ("sm_90", 40), ("gfx950", 300)])
@pytest.mark.parametrize("cut", [False, True])
def test_a_tile_that_is_within_the_bound_of_its_provider_but_less_right_is_wrong(
    arch: str, rows: int, cut: bool
) -> None:
    bench = _bench_as(arch, "triton")
    off = 1.0
    right = bench.ops.moe_experts
    object.__setattr__(bench.ops, "moe_experts", lambda *given, **more: right(*given, **more) * off)
    case = experts(bench, rows)
    check = case.check_cut if cut else case.check
    assert check is not None and check() == 0.0
    off = 1.01
    error = check()
    if (arch, rows) == ("sm_90", 300):
        assert error == float("inf"), "near enough for the bound, but not as right"
    else:
        assert bench.limit("moe_experts", rows) < error < 1.2e-2, "the bound of all refuses it"


def test_where_the_rule_is_best_it_stays(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(US, 32, 11.0)
    monkeypatch.setitem(US, 64, 10.0)
    one = tune_group(bench, _group(), _timer, time.monotonic() + SOON)
    assert one.gain == pytest.approx(1.0)


def test_a_tile_that_was_fast_by_chance_is_timed_again(bench: Bench) -> None:
    """32 shows 1 us once, and 20 ever after."""
    shown: list[int] = []

    def timer(case: Case) -> float:
        bm = tiles.tile(KERNEL, SHAPE, "sm_90")["BM"]
        shown.append(bm)
        return _timer(case) if bm != 32 else 1.0 if shown.count(32) <= 2 else 20.0

    assert tune_group(bench, _group(), timer, time.monotonic() + SOON).best.tile == {"BM": 64}


def test_a_tile_that_is_wrong_for_cut_rows_or_in_a_replay_is_not_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32, the fastest, is wrong where a device counts the rows; 64 where a graph is replayed, by a bit."""
    whole = bench.ops.moe_experts

    def bm() -> int:
        return tiles.tile(KERNEL, SHAPE, "sm_90")["BM"]

    def experts(x_TH: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, rows: object, **more: object) -> object:
        out = whole(x_TH, ids, shares, rows, **more)
        return out * (1.01 if bm() == 32 and isinstance(rows, torch.Tensor) else 1.0)

    def replayed(calls: Sequence[Callable[[], torch.Tensor]], device: torch.device) -> list[torch.Tensor]:
        made = [call() for call in calls]
        if bm() == 64:
            made[-1].view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
        return made

    object.__setattr__(bench.ops, "moe_experts", experts)
    monkeypatch.setattr(flow, "replayed", replayed)
    one = tune_group(bench, _group(), _timer, time.monotonic() + SOON)
    assert one.best.tile == {"BM": 16} and one.gain == pytest.approx(1.0)
    whys = {tried.tile["BM"]: tried.why for tried in one.tried}
    assert whys[32].startswith("wrong: relative L2") and whys[64] == "wrong: other bits in a replay of a graph"
    assert "4 not fit, 3 of them WRONG" in words(one)


def test_a_rule_that_is_wrong_for_cut_rows_is_named_and_the_next_best_kept(bench: Bench) -> None:
    whole = bench.ops.moe_experts

    def experts(x_TH: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, rows: object, **more: object) -> object:
        wrong = tiles.tile(KERNEL, SHAPE, "sm_90")["BM"] == 16 and bool((ids < 0).any())
        return whole(x_TH, ids, shares, rows, **more) * (1.01 if wrong else 1.0)

    object.__setattr__(bench.ops, "moe_experts", experts)
    one = tune_group(bench, _group(), _timer, time.monotonic() + SOON)
    assert one.rule.us is None and one.rule.why.startswith("wrong") and one.best.tile == {"BM": 32}


def test_a_spent_budget_ends_a_group_after_the_rule(bench: Bench) -> None:
    one = tune_group(bench, _group(), _timer, time.monotonic() - 1)
    assert [tried.tile for tried in one.tried] == [{"BM": 16}]
    assert one.gain == 1.0 and one.candidates == 6


def test_what_could_not_be_compiled_is_not_run(bench: Bench) -> None:
    group = _group()
    group.compiled = [_done("" if tile["BM"] != 32 else "PTXAS error") for tile in group.tiles]
    one = tune_group(bench, group, _timer, time.monotonic() + SOON)
    assert {tried.tile["BM"]: tried.why for tried in one.tried}[32] == "not compiled: PTXAS error"
    assert one.best.tile == {"BM": 64}


def test_a_group_whose_rule_fails_keeps_what_works(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiles.RULES, KERNEL, lambda shape, arch: {"BM": 99})
    one = tune_group(bench, _group(), _timer, time.monotonic() + SOON)
    assert one.rule.us is None and one.best.tile == {"BM": 32}
    assert one.gain == float("inf")


def _done(why: str) -> Future[str]:
    future: Future[str] = Future()
    future.set_result(why)
    return future


def test_calls_come_in_the_order_of_what_matters() -> None:
    todo = list(points((16, 1), ("gate",)))
    assert [str(point) for point in todo[:6]] == [
        "experts rows 16",
        "attention rows 16 context 1024",
        "attention rows 16 context 8192",
        "attention rows 16 context 32768",
        "step rows 16",
        "experts rows 1",
    ]
    assert [point.arguments["context"] for point in points((256,), (), ("attention",))] == [1024, 8192] * 2
    assert {point.case for point in points((1,), ("gate",), ("linear",))} == {"linear"}


def test_more_rows_than_a_decode_step_has_are_rows_of_a_prompt() -> None:
    found = [str(point) for point in points((2048, 4), ("gate", "shared gate"))]
    assert found[:4] == ["experts rows 2048", "attention_prefill rows 2048", "gdn_chunk rows 2048", "experts rows 4"]
    assert "attention rows 4 context 8192 kv fp8" in found and "attention_prefill rows 2048 kv fp8" in found
    assert "gdn_chunk rows 128 count 16" in found
    assert "fp8_linear rows 2048 name gate" in found and not any("shared gate" in point for point in found)


def test_one_wrong_row_among_many_is_seen() -> None:
    expected = torch.randn(1000, 8)
    got = expected.clone()
    assert worst_piece(got, expected, 16) == 0.0
    got[997] *= 1.5
    assert worst_piece(got, expected, 16) > 0.05 > relative(got, expected)
    got[3, 0] = float("nan")
    assert worst_piece(got, expected, 16) == float("inf")


def test_operands_of_a_wish_have_the_models_sizes() -> None:
    assert _wish().sizes.hidden == SHAPES["tiny"].hidden
    big = wish_of(facts_on(model_of(None, "q38tp8"), "gfx942", 1, {}), {}, 0)
    assert (big.dims["experts"], big.dims["expert_width"], big.dims["value_heads"]) == (512, 256, 16)
    assert (big.dialect, big.activation, big.arch) == ("fnuz", "fp8_1x128", "gfx942")
