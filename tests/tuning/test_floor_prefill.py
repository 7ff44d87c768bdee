"""Floors of prefill against figures that were worked out apart, by hand."""

from __future__ import annotations

import pytest

from rocm_serve.tuning import floor, floor_prefill
from rocm_serve.tuning.floor import Ceilings
from rocm_serve.tuning.floor_prefill import Mixed, visible
from rocm_serve.tuning.shapes import SHAPES

_BY_HAND = Ceilings(bytes_s=4.3e12, bf16_s=788e12, fp8_s=1576e12)


def _ms(name: str, shape: Mixed, ceilings: Ceilings) -> float:
    dims = SHAPES[name]
    uniform = floor.expected_distinct(dims.experts, dims.top_k, shape.num_rows)
    return floor.seconds(floor_prefill.step(dims, shape, [uniform] * dims.layers), ceilings) * 1e3


@pytest.mark.parametrize(("rows", "layers_ms"), [(2048, 10.385), (8192, 24.079), (16384, 43.560)])
def test_one_rank_of_the_2_4t_model(rows: int, layers_ms: float) -> None:
    """By hand: eight layers, the rows between both products of experts written and read, as bytes."""
    dims = SHAPES["q38tp8"]
    between = rows * dims.top_k * (dims.hidden + 3 * dims.expert_width + 2 * dims.hidden)
    experts = floor.experts(dims, rows, floor.expected_distinct(dims.experts, dims.top_k, rows))
    joined = max((experts.nbytes + between) / _BY_HAND.bytes_s, experts.fp8 / _BY_HAND.fp8_s)
    more = (joined - experts.seconds(_BY_HAND)) * dims.layers * 1e3
    head = floor.head(dims, 1).seconds(_BY_HAND) * 1e3
    assert _ms("q38tp8", Mixed(rows), _BY_HAND) + more - head == pytest.approx(layers_ms, rel=0.02)


@pytest.mark.parametrize(("rows", "ms"), [(2048, 15.9), (8192, 49.3)])
def test_the_whole_35b_model(rows: int, ms: float) -> None:
    """Figures worked out without norms and lm_head."""
    dims = SHAPES["q35tp1"]
    apart = floor.norm(dims.hidden, rows, residual=True, op="norms").times(2 * dims.layers), floor.head(dims, 1)
    ours = _ms("q35tp1", Mixed(rows), Ceilings()) - floor.seconds(apart, Ceilings()) * 1e3
    assert ours == pytest.approx(ms, rel=0.01)


def test_rows_see_the_context_themselves_and_what_is_before_them() -> None:
    assert [visible(1, 0), visible(3, 0), visible(2, 10)] == [1, 6, 11 + 12]


def test_attention_of_one_row_is_a_decode_steps() -> None:
    dims = SHAPES["q35tp1"]
    one, step = floor_prefill.attention(dims, 1, 1023), floor.attention(dims, 1, 1024)
    assert (one.nbytes, one.bf16) == (step.nbytes, step.bf16)
    two = floor_prefill.attention(dims, 1, 1023, prompts=2)
    assert (two.nbytes, two.bf16) == (2 * one.nbytes, 2 * one.bf16)


def test_delta_rule_of_one_row_is_a_decode_steps() -> None:
    dims = SHAPES["q38tp8"]
    assert floor_prefill.gdn(dims, 1).nbytes == floor.gdn_state(dims, 1).nbytes
    assert floor_prefill.gdn_with_conv(dims, 1).nbytes == floor.gdn_with_conv(dims, 1).nbytes
    many = floor_prefill.gdn(dims, 100)
    assert many.bf16 == 100 * floor.gdn_state(dims, 1).bf16
    assert many.nbytes < 10 * floor.gdn_state(dims, 1).nbytes, "a prompt's state is read and written once"


def test_decodes_beside_a_prompt_cost_what_is_theirs_alone() -> None:
    dims = SHAPES["q35tp1"]
    alone, mixed = (
        {cost.op: cost for cost in floor_prefill.step(dims, one, [256.0] * dims.layers)}
        for one in (Mixed(2112), Mixed(2048, decodes=64, decode_context=1024))
    )
    for op in ("GDN projections", "attention projections", "moe_experts", "norms", "kv_write"):
        assert mixed[op] == alone[op], "the same number of rows"
    assert mixed["attention_decode"].nbytes == 10 * floor.attention(dims, 64, 1024).nbytes
    assert mixed["lm_head"].bf16 == 65 * alone["lm_head"].bf16
    assert "attention_decode" not in alone
