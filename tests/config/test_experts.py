"""What of expert parallelism is legal, and what it comes to; each refusal names what would be legal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from rocm_serve.config import experts
from rocm_serve.config.experts import EXCHANGES, VALIDATED, expert_plan, greatest_rows, meets_on_host, moe_shape
from rocm_serve.config.schema import Resolved
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import ModelFacts, Quantization, parse_config
from rocm_serve.parallel.expert_map import DRAFT_LAYER
from rocm_serve.parallel.expert_placement import Placement
from tests.config.test_resolve import LAPTOP, MI300X, TINY_CONFIG, resolved

FP8 = Quantization((128, 128), frozenset())


@pytest.fixture
def facts() -> ModelFacts:
    """8 experts, 3 a token; hidden 256; experts of 4 blocks; a draft layer."""
    return replace(parse_config(TINY_CONFIG | {"mtp_num_hidden_layers": 1}), quantization=FP8)


def refusal(facts: ModelFacts, **wishes: object) -> str:
    with pytest.raises(UserError) as refused:
        resolved(facts, wishes.pop("platform", LAPTOP), **wishes)  # type: ignore[arg-type]
    return str(refused.value)


def test_without_wishes_experts_are_cut_by_columns_and_nothing_is_sent(facts: ModelFacts) -> None:
    out = resolved(facts, tp=2)
    assert (out.expert_exchange, out.expert_capacity, out.speculative_expert_exchange) == ("local", 0, "local")
    assert not {"expert_exchange", "expert_capacity"} & out.reasons.keys() and out.notes == ()


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_auto_is_local_and_says_why_where_experts_are_shared(facts: ModelFacts, tp: int, ep: int) -> None:
    out = resolved(facts, tp=tp, ep=ep)
    assert out.expert_exchange == "local" and ("expert_exchange" in out.reasons) == (ep > 1)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"tp": 4, "ep": 3}, "--ep 3: it does not divide --tp 4; legal: 1, 2, 4"),
        ({"tp": 2, "ep": 4}, "--ep 4: it does not divide --tp 2; legal: 1, 2"),
        ({"ep": 0}, "--ep 0: legal: 1 or more"),
    ],
)
def test_a_degree_that_does_not_go_into_the_stage_names_the_legal_ones(
    facts: ModelFacts, wishes: dict[str, object], words: str
) -> None:
    assert refusal(facts, **wishes) == words


def test_a_degree_that_cuts_an_expert_or_a_scale_block_names_the_legal_ones(facts: ModelFacts) -> None:
    six = replace(facts, num_experts=6)
    assert refusal(six, tp=4, ep=4).endswith("it does not divide 6 experts; legal: 1, 2")
    narrow = replace(facts, moe_intermediate_size=256)  # two blocks of 128
    assert "with ep 2, 4 it could, but with ep 1 it does not divide 2 FP8 blocks" in refusal(narrow, tp=4)
    assert resolved(narrow, tp=4, ep=2).ep == 2


def test_a_model_without_experts_takes_none_of_it(facts: ModelFacts) -> None:
    dense = replace(
        facts, architecture="Qwen3_5ForCausalLM", num_experts=0, top_k=0, intermediate_size=1024, mtp_layers=0
    )
    assert "no experts; legal: 1" in refusal(dense, tp=2, ep=2)
    assert refusal(dense, tp=2, expert_exchange="torch").startswith("--expert-exchange: the model has no experts")
    assert refusal(dense, expert_placement="x.json").startswith("--expert-placement: the model has no experts")
    assert refusal(dense, expert_counts="x.json").startswith("--expert-counts: the model has no experts")
    assert resolved(dense, tp=2).notes == ()


@pytest.mark.parametrize(
    ("chunk", "running", "tp", "rows"), [(512, 64, 8, 72), (1, 1, 8, 1), (8192, 16, 8, 1026), (63, 2, 4, 17)]
)
def test_the_greatest_batch_of_a_rank_is_its_share_of_a_full_step(chunk: int, running: int, tp: int, rows: int) -> None:
    assert greatest_rows(chunk, running, tp) == rows
    assert tp * rows >= chunk + running > tp * (rows - 1)


def test_capacities_cover_a_step_also_with_drafts(facts: ModelFacts) -> None:
    sizes = {"tp": 2, "ep": 2, "expert_exchange": "torch", "chunked_prefill_size": 101, "max_running_requests": 10}
    out = resolved(facts, **sizes)
    assert (out.expert_capacity, out.speculative_expert_capacity) == (56, 56)
    assert (
        "--chunked-prefill-size 101 and --max-running-requests 10 over 2 ranks are 56 rows"
        in (out.reasons["expert_capacity"])
    )
    drafting = resolved(facts, **sizes, speculative="mtp", draft_tokens=2)
    assert (drafting.expert_capacity, drafting.speculative_expert_capacity) == (66, 66)
    assert "--max-running-requests 10 of 3 rows each (--draft-tokens) over 2" in drafting.reasons["expert_capacity"]
    assert refusal(facts, **sizes, speculative="mtp", draft_tokens=2, expert_capacity=56).endswith("legal: 66 or more")
    wished = resolved(facts, tp=2, ep=2, expert_exchange="all_gather", expert_capacity=400)
    assert wished.expert_capacity == 400 and "expert_capacity" not in wished.reasons


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"expert_exchange": "torch", "expert_capacity": 287}, "may need 288 rows; legal: 288 or more"),
        ({"expert_capacity": 512}, "--expert-exchange local sends no rows; legal: torch, all_gather, mori"),
        ({"expert_exchange": "torch", "expert_capacity": 0}, "--expert-capacity 0: legal: 1 or more"),
    ],
)
def test_a_capacity_that_a_step_can_exceed_is_refused(facts: ModelFacts, wishes: dict[str, object], words: str) -> None:
    assert refusal(facts, tp=2, ep=2, **wishes).endswith(words)


MORI = {"platform": MI300X, "tp": 8, "ep": 8, "expert_exchange": "mori", "allow_unvalidated": True}


@pytest.fixture
def wide(facts: ModelFacts) -> ModelFacts:
    """As many heads and blocks as eight ranks need."""
    return replace(
        facts, moe_intermediate_size=1024, num_experts=16, linear_num_key_heads=8, num_kv_heads=8, hidden_size=512
    )


def test_mori_rounds_its_capacity_to_whole_wavefronts_and_never_goes_below_256(wide: ModelFacts) -> None:
    platform, tp = MI300X, 8
    wishes = {"ep": 8, "expert_exchange": "mori", "allow_unvalidated": True}
    small = resolved(wide, platform, tp=tp, **wishes, max_running_requests=1)
    assert small.expert_capacity == 256, "a capacity of 32 was garbage in silence elsewhere"
    large = resolved(wide, platform, tp=tp, **wishes, chunked_prefill_size=8192, max_running_requests=16)
    assert large.expert_capacity == 1088 == -(-1026 // 64) * 64
    assert any("has not been tried with Qwen3_5MoeForCausalLM by any test" in note for note in large.notes)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"expert_capacity": 300}, "legal: multiples of 64 from 256 on"),
        ({"expert_capacity": 128}, "legal: multiples of 64 from 256 on"),
        ({"ep": 4}, "legal: --ep 8, or local, torch, all_gather"),
        ({"tp": 1, "ep": 1}, "--expert-exchange mori with --tp 1; legal: --tp 2, 4, 8"),
        ({"platform": LAPTOP}, "--expert-exchange mori runs on rocm, and this is cpu; legal: local, torch, all_gather"),
        (
            {"allow_unvalidated": False},
            "has not been tried with Qwen3_5MoeForCausalLM; legal: local, torch, all_gather, or --allow-unvalidated",
        ),
    ],
)
def test_what_mori_cannot_is_refused_before_it_is_looked_for(
    wide: ModelFacts, wishes: dict[str, object], words: str
) -> None:
    assert words in refusal(wide, **(MORI | wishes))


def test_a_limit_on_choices_is_held_against_the_models(facts: ModelFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of ours has one; kernels elsewhere stop at 9 or 11, and Qwen3.8 chooses 10."""
    of_nine = dict(EXCHANGES) | {"torch": replace(EXCHANGES["torch"], top_k=9)}
    monkeypatch.setattr(experts, "EXCHANGES", MappingProxyType(of_nine))
    ten = replace(facts, num_experts=32, top_k=10)
    words = "--expert-exchange torch takes up to 9 experts a row, and the model chooses 10"
    assert refusal(ten, tp=2, ep=2, expert_exchange="torch").startswith(words)
    assert resolved(replace(ten, top_k=9), tp=2, ep=2, expert_exchange="torch").expert_exchange == "torch"


def test_fp8_rows_need_whole_scales(facts: ModelFacts) -> None:
    odd = replace(facts, hidden_size=320)
    wishes = {"tp": 2, "ep": 2, "expert_exchange": "torch"}
    words = "sends FP8 rows with a scale for 128 columns, and rows have 320; legal: local, or --fp8-activation bf16"
    assert refusal(odd, **wishes, fp8_activation="fp8_1x128").endswith(words)
    assert resolved(odd, **wishes).fp8_activation == "bf16", "rows travel in the model's dtype"
    plain = replace(odd, quantization=None)
    assert resolved(plain, **wishes, fp8_activation="fp8_1x128").expert_exchange == "torch", "the weights are not FP8"


def test_the_drafts_exchange_is_judged_by_itself(facts: ModelFacts) -> None:
    out = resolved(facts, tp=2, ep=2, speculative_expert_exchange="torch")
    assert (out.expert_exchange, out.speculative_expert_exchange) == ("local", "torch")
    assert out.notes == ("--speculative-expert-exchange torch has no effect without --speculative mtp or auto",)
    assert resolved(facts, tp=2, ep=2, speculative_expert_exchange="torch", speculative="mtp").notes == ()
    assert out.speculative_expert_capacity > 0 == out.expert_capacity
    words = refusal(facts, tp=2, ep=2, speculative_expert_exchange="mori")
    assert words.startswith("--speculative-expert-exchange mori runs on rocm")
    odd = replace(facts, hidden_size=320)
    wishes = {"tp": 2, "ep": 2, "fp8_activation": "fp8_1x128", "speculative_expert_exchange": "torch"}
    assert "--speculative-expert-exchange torch sends FP8 rows" in refusal(odd, **wishes)
    bf16_draft = replace(odd, quantization=Quantization((128, 128), frozenset({"mtp.layers.0"})))
    assert resolved(bf16_draft, **wishes).speculative_expert_exchange == "torch", "a BF16 draft sends no FP8"


def test_a_draft_exchange_without_a_draft_is_refused(facts: ModelFacts) -> None:
    words = refusal(replace(facts, mtp_layers=0), tp=2, ep=2, speculative_expert_exchange="torch")
    assert words == "--speculative-expert-exchange torch: the model has no draft layer; legal: inherit"


def test_a_pair_that_no_test_runs_needs_a_word_and_gets_a_line(facts: ModelFacts) -> None:
    seen = replace(facts, architecture="Qwen3_5MoeForConditionalGeneration", mtp_layers=0)
    wishes = {"tp": 2, "ep": 2, "expert_exchange": "all_gather"}
    assert refusal(seen, **wishes) == (
        "--expert-exchange all_gather has not been tried with Qwen3_5MoeForConditionalGeneration; legal: local,"
        " or --allow-unvalidated"
    )
    (line,) = resolved(seen, **wishes, allow_unvalidated=True).notes
    assert "--allow-unvalidated lets it run" in line
    assert resolved(facts, **wishes, allow_unvalidated=True).notes == (), "a pair that is tried needs no line"


def test_no_pair_of_mori_is_called_tried() -> None:
    """Its kernels have never been run by us on a GPU; the stand-in of the tests proves the contract only."""
    assert not [pair for pair in VALIDATED if pair[1] == "mori"]


@pytest.mark.parametrize(
    ("platform", "wish", "activation"),
    [
        (LAPTOP, "auto", "bf16"),
        (MI300X, "auto", "fp8_1x128"),
        (LAPTOP, "fp8_1x128", "fp8_1x128"),
        (MI300X, "bf16", "bf16"),
    ],
)
def test_the_activation_of_fp8_weights_follows_the_device_or_the_wish(
    facts: ModelFacts, platform: object, wish: str, activation: str
) -> None:
    out = resolved(facts, platform, fp8_activation=wish)  # type: ignore[arg-type]
    assert out.fp8_activation == activation and ("fp8_activation" in out.reasons) == (wish == "auto")


def plan_of(facts: ModelFacts, **wishes: object) -> tuple[Resolved, object]:
    out = resolved(facts, **wishes)
    return out, expert_plan(out, facts)


@pytest.mark.parametrize(("exchange", "whole"), [("local", False), ("torch", True), ("all_gather", True)])
def test_the_shared_expert_is_whole_where_rows_are_sent(facts: ModelFacts, exchange: str, whole: bool) -> None:
    plan = expert_plan(
        resolved(facts, tp=4, ep=2, expert_exchange=exchange, speculative_expert_exchange="torch"), facts
    )
    assert (plan.ep, plan.shared_is_whole(0), plan.shared_is_whole(DRAFT_LAYER)) == (2, whole, True)


def test_ranks_meet_on_the_host_where_the_model_or_its_draft_wants_mori(wide: ModelFacts) -> None:
    rocm = {"tp": 8, "ep": 8, "allow_unvalidated": True}
    assert meets_on_host(resolved(wide, MI300X, **rocm, expert_exchange="mori"))
    assert not meets_on_host(resolved(wide, MI300X, **rocm, expert_exchange="torch"))
    draft = rocm | {"speculative_expert_exchange": "mori"}
    assert not meets_on_host(resolved(wide, MI300X, **draft)) and meets_on_host(
        resolved(wide, MI300X, **draft, speculative="mtp")
    )


def test_a_placement_is_read_for_the_plan_and_refused_for_another_degree(facts: ModelFacts, tmp_path: Path) -> None:
    slots = (7, 6, 5, 4, 3, 2, 1, 0, 0, 7)
    file = tmp_path / "placement.json"
    form = "rocm-serve expert placement"
    Placement(format=form, version=1, model=moe_shape(facts), ep=2, layers={3: slots}).write(file)
    out = resolved(facts, tp=2, ep=2, expert_placement=str(file))
    plan = expert_plan(out, facts)
    assert plan.of_layer(3, 8).experts == slots and plan.of_layer(2, 8).is_plain
    with pytest.raises(UserError, match="was made for --ep 2, not 4"):
        expert_plan(resolved(facts, tp=4, ep=4, expert_placement=str(file)), facts)
