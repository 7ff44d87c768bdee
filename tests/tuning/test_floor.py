"""Floors of decode against figures that were worked out by hand from the published dimensions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocm_serve.tuning import floor
from rocm_serve.tuning.floor import Ceilings, Cost
from rocm_serve.tuning.shapes import SHAPES, facts_of

_BY_HAND = Ceilings(bytes_s=4.3e12, bf16_s=788e12, fp8_s=1576e12)


def _uniform(name: str, rows: int) -> list[float]:
    dims = SHAPES[name]
    return [floor.expected_distinct(dims.experts, dims.top_k, rows)] * dims.layers


@pytest.mark.parametrize(("rows", "experts"), [(1, 10), (8, 75), (16, 139), (64, 367), (256, 509)])
def test_rows_that_choose_10_of_512_at_random_touch_so_many(rows: int, experts: int) -> None:
    assert floor.expected_distinct(512, 10, rows) == pytest.approx(experts, abs=0.5)


@pytest.mark.parametrize(("rows", "layers_us"), [(1, 368), (8, 1181), (16, 1991), (64, 5043), (256, 8265)])
def test_one_rank_of_the_2_4t_model_at_8192_tokens(rows: int, layers_us: float) -> None:
    """By hand: eight layers, two products of experts with rows between them written and read, and 118 us of lm_head."""
    dims = SHAPES["q38tp8"]
    between = rows * dims.top_k * (dims.hidden + 3 * dims.expert_width + 2 * dims.hidden) * dims.layers
    ours = floor.seconds(floor.step(dims, rows, 8192, _uniform("q38tp8", rows)), _BY_HAND) + between / _BY_HAND.bytes_s
    assert ours * 1e6 == pytest.approx(layers_us + 118, rel=0.01)


@pytest.mark.parametrize(("rows", "ms"), [(1, 1.19), (16, 4.49), (64, 9.72), (256, 17.5)])
def test_the_whole_35b_model_at_1024_tokens(rows: int, ms: float) -> None:
    ours = floor.seconds(floor.step(SHAPES["q35tp1"], rows, 1024, _uniform("q35tp1", rows)), Ceilings())
    assert ours * 1e3 == pytest.approx(ms, rel=0.03)


def test_weights_of_one_rank_have_their_bytes() -> None:
    """MB a layer at TP8: GDN projections 109.6, attention 109.1, one routed expert 6.29, lm_head 508.6."""
    dims = SHAPES["q38tp8"]
    sizes = {name: rows * columns * 2 / 1e6 for name, (rows, columns) in floor.linears_of(dims).items()}
    assert sizes["in_proj_qkvz"] + sizes["in_proj_ba"] + sizes["out_proj"] == pytest.approx(109.6, abs=0.1)
    assert sizes["qkv_proj"] + sizes["o_proj"] == pytest.approx(109.1, abs=0.1)
    assert floor.experts(dims, 0, 1.0).nbytes / 1e6 == pytest.approx(6.29, abs=0.01)
    assert floor.head(dims, 0).nbytes / 1e6 == pytest.approx(508.6, abs=0.1)


def test_products_of_several_weights_have_the_rows_that_layers_give_them() -> None:
    """Rows by hand: 35B whole, one rank of eight of it, and one of the 2.4T model; the opener's row is padded to 16."""
    whole = SHAPES["q35tp1"]
    eighth = replace(whole, heads=2, kv_heads=1, key_heads=2, value_heads=4, expert_width=64, shared_width=64)
    for dims, in_proj, router, opened in (
        (whole, 12352, 1280, 1296),
        (eighth, 1544, 384, 400),
        (SHAPES["q38tp8"], 4640, 1024, 1040),
    ):
        for opener, rows in ((False, router), (True, opened)):
            found = floor.readers_of(dims, opener=opener)
            assert found["in_proj"] == (in_proj, dims.hidden)
            assert found["router and shared expert"] == (rows, dims.hidden)


def test_caches_have_their_bytes() -> None:
    """MB of 64 rows, one layer of one rank: states 137 in and out, keys and values of 8192 tokens 537."""
    dims = SHAPES["q38tp8"]
    assert floor.gdn_with_conv(dims, 64).nbytes / 1e6 == pytest.approx(137, abs=0.5)
    assert floor.attention(dims, 64, 8192).nbytes / 1e6 == pytest.approx(537, abs=1)


def test_more_distinct_experts_cost_their_weights() -> None:
    dims = SHAPES["q35tp1"]
    few, many = (floor.experts(dims, 16, distinct).nbytes for distinct in (50, 51))
    assert many - few == pytest.approx(3 * 2048 * 512 * (1 + 4 / 128**2))


def test_what_computes_longer_than_it_moves_is_bound_by_that() -> None:
    cost = Cost("made up", 4.0, bf16=30.0, fp8=20.0)
    assert cost.seconds(Ceilings(1.0, 10.0, 10.0)) == 5.0
    assert cost.seconds(Ceilings(0.5, 10.0, 10.0)) == 8.0


def test_ceilings_are_the_larger_ones() -> None:
    assert Ceilings(1.0, 5.0, 3.0).at_least(Ceilings(2.0, 4.0, 3.5)) == Ceilings(2.0, 5.0, 3.5)


@pytest.mark.parametrize("name", SHAPES)
def test_floor_and_engine_speak_of_the_same_model(name: str) -> None:
    dims, facts = SHAPES[name], facts_of(name)
    kinds = tuple("full_attention" if floor.is_full(i) else "linear_attention" for i in range(dims.layers))
    assert facts.layer_types == kinds
    assert (facts.hidden_size, facts.num_experts, facts.top_k) == (dims.hidden, dims.experts, dims.top_k)
