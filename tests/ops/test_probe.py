"""What the probe sees, in this process: right providers pass at a model's shapes, and no kind of wrong one does."""

from __future__ import annotations

import re

import pytest
import torch

from rocm_serve.ops.bind import OPS
from rocm_serve.ops.contract import Provider
from rocm_serve.ops.facts import LinearShape
from rocm_serve.ops.judging import BOUND
from rocm_serve.ops.probe import Refused, probe
from rocm_serve.ops.probe_cases import probe_cases
from tests.ops.probing import providers
from tests.ops.probing.facts import tiny_facts

CPU = torch.device("cpu")


def refusal(op: str, name: str, seed: int = 1, **facts: object) -> str:
    made = providers.OPS[op]
    with pytest.raises(Refused) as refused:
        probe(made, made.providers[name], tiny_facts(**facts), CPU, seed=seed)
    return str(refused.value)


@pytest.mark.parametrize(
    "facts",
    [
        {"fp8_dispatch": True, "draft_tokens": 3},
        {"fp8_dialect": "fnuz", "kv_dtype": "fp8_e4m3", "fp8_dispatch": True},
        {"dtype": "float32", "activation": "bf16", "kv_dtype": "float32", "expert_fp8": False},
        {"tp": 2, "gate_activation": "sigmoid", "renormalise": False, "page_size": 1, "max_model_len": 40},
    ],
    ids=["bf16", "fnuz", "float32", "others"],
)
@pytest.mark.parametrize("name", OPS)
def test_the_reference_passes_its_own_probe(name: str, facts: dict[str, object]) -> None:
    op = OPS[name]
    began: list[str] = []
    made = tiny_facts(**facts)
    passed = probe(op, op.providers["reference"], made, CPU, seed=3, began=began.append)
    assert began == ["loading it", *probe_cases(name, made)]
    assert passed.calls == len(began) - 1
    wanted = {"quantise_rows": made.fp8_dispatch, "gdn_extend": made.draft_tokens > 0}
    assert (passed.calls > 0) == wanted.get(name, True)
    assert passed.error <= 1e-3, "sampled rows are the rows themselves"


def test_the_shapes_are_those_that_will_run() -> None:
    facts = tiny_facts(max_rows=700, num_experts=512, top_k=10)
    assert [name.split()[0] for name in probe_cases("moe_experts", facts)] == [
        *("0", "1", "16", "32", "33", "64", "128", "304", "512", "700")
    ]
    assert all("10 of 512 experts of 128" in name for name in probe_cases("moe_experts", facts))
    shapes = tuple(LinearShape(rows, 256, True) for rows in (128, 384))
    names = list(probe_cases("fp8_linear", tiny_facts(linears=shapes, max_rows=20)))
    assert names == [f"{t} x [{rows}, 256]" for rows in (128, 384) for t in (0, 1, 16, 20)]


def test_logits_have_as_many_rows_as_drafts_ask_for() -> None:
    for drafts, most in ((0, 5), (3, 20)):
        facts = tiny_facts(max_running=5, vocab=96, draft_tokens=drafts)
        assert list(probe_cases("log_sum_exp", facts)) == [f"{r} x 96" for r in (0, 1, most)]


def test_a_dense_model_calls_no_experts_and_a_bf16_one_no_fp8_product() -> None:
    facts = tiny_facts(num_experts=0, expert_fp8=False, linears=(LinearShape(8, 8, False),))
    assert not probe_cases("moe_experts", facts) and not probe_cases("moe_route", facts)
    assert not probe_cases("fp8_linear", facts)
    assert any("to float32" in name for name in probe_cases("linear", facts))


def test_experts_are_probed_with_quantised_rows_where_rows_are_sent_so() -> None:
    names = list(probe_cases("moe_experts", tiny_facts(fp8_dispatch=True)))
    assert len(names) == 2 * len(probe_cases("moe_experts", tiny_facts()))
    assert sum(name.endswith("sent as FP8") for name in names) == len(names) // 2
    assert not probe_cases("quantise_rows", tiny_facts()) and probe_cases(
        "quantise_rows", tiny_facts(fp8_dispatch=True)
    )


@pytest.mark.parametrize("name", ["causal_conv", "gdn_decode"])
def test_a_provider_that_keeps_no_state_from_before_drafts_serves_where_nothing_drafts(name: str) -> None:
    op = providers.OPS[name]
    assert probe(op, op.providers["commits_all"], tiny_facts(), CPU, seed=1).error == 0
    assert "rows (1, 4, 7), (1, 1, 4) committed" in refusal(name, "commits_all", draft_tokens=3)


def test_attention_for_one_row_a_request_serves_where_nothing_drafts() -> None:
    op = providers.OPS["attention_decode"]
    assert probe(op, op.providers["one_row_each"], tiny_facts(), CPU, seed=1).error == 0
    assert "rows (4, 1, 4) after (0, 127, " in refusal("attention_decode", "one_row_each", draft_tokens=3)


def test_no_two_logits_of_a_row_are_equal() -> None:
    facts = tiny_facts(num_experts=512, top_k=10)
    case = probe_cases("moe_route", facts)["33 x 512, 10 chosen"]
    logits = case(torch.Generator().manual_seed(4), torch.bfloat16)["logits_TE"]
    assert isinstance(logits, torch.Tensor)
    assert all(len(row.unique()) == 512 for row in logits)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one_percent", r"relative L2 (9.\de-03|1.\de-02) to the reference; legal: up to 0.005"),
        ("no_plus_one", "relative L2"),
        ("narrow_plus_one", "relative L2"),
        ("one_row", r"1900 x 128: row 1899 has relative L2 5.\de-02 to the reference; legal: up to 0.02"),
        ("nan", "of 128 numbers are finite on one side only"),
        ("transposed", r"1 x 128: returns torch.bfloat16 \(128, 1\), not torch.bfloat16 \(1, 128\)|0 x 128: returns"),
        ("wide", "returns torch.float64"),
    ],
)
def test_a_wrong_norm_is_refused_with_the_call_and_the_number(name: str, words: str) -> None:
    said = refusal("rms_norm", name, max_rows=1900 if name == "one_row" else 40)
    assert re.search(words, said), said


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("activation", ["bf16", "fp8_1x128"])
def test_a_scale_that_divides_is_refused_whatever_the_rows(activation: str, seed: int) -> None:
    assert "relative L2" in refusal("fp8_linear", "scale_divided", seed, activation=activation)


def test_rows_that_are_not_quantised_where_they_should_be_are_refused() -> None:
    """A kernel is judged against its own semantics: W8A16 is no W8A8."""
    assert "relative L2" in refusal("fp8_linear", "rows_as_they_are")
    op = providers.OPS["fp8_linear"]
    probe(op, op.providers["rows_as_they_are"], tiny_facts(activation="bf16"), CPU, seed=1)


def test_a_provider_that_means_something_else_is_judged_by_what_it_means() -> None:
    op = providers.OPS["fp8_linear"]
    other = op.providers["rows_as_they_are"]
    told = Provider("told", other.load, semantics=other.load())
    assert probe(op, told, tiny_facts(), CPU, seed=1).error <= BOUND


def test_experts_are_judged_at_the_true_count_and_with_rows_of_padding() -> None:
    assert "rows of padding do not come out as zeros" in refusal("moe_experts", "padding_left")
    assert "x 128, 2 of 6 experts" in refusal("moe_experts", "one_expert_less")


def test_weights_are_prepared_before_they_are_judged() -> None:
    op = providers.OPS["linear"]
    assert probe(op, op.providers["turning"], tiny_facts(), CPU, seed=2).calls > 3
    assert "relative L2" in refusal("linear", "turned_plain")


def test_bits_that_change_from_call_to_call_are_refused_where_every_rank_computes_them() -> None:
    said = refusal("rms_norm", "jitters", tp=2)
    assert "1 x 128: a second call with the same numbers gives other bits" in said
    op = providers.OPS["rms_norm"]
    assert 0 < probe(op, op.providers["jitters"], tiny_facts(tp=1), CPU, seed=1).error <= BOUND
    assert probe(op, op.providers["good"], tiny_facts(tp=2), CPU, seed=1).error == 0


def test_what_a_provider_raises_is_not_swallowed() -> None:
    op = providers.OPS["rms_norm"]
    for name, kind in (("raises", RuntimeError), ("unloadable", ImportError)):
        with pytest.raises(kind):
            probe(op, op.providers[name], tiny_facts(), CPU, seed=1)


@pytest.mark.parametrize("name", ["attention_decode", "attention_prefill", "gdn_decode", "gdn_chunk", "causal_conv"])
def test_what_is_written_in_place_is_judged_too(name: str) -> None:
    """A provider that computes the result but leaves its state, or its output rows, as they were."""
    op = OPS[name]
    written = op.mutates[0]

    def lazy(**arguments: object) -> object:
        before = arguments[written]
        assert isinstance(before, torch.Tensor)
        copy = before.clone()
        result = op.reference(**arguments | {written: copy})
        return result if result is not copy else before

    with pytest.raises(Refused):
        probe(op, Provider("lazy", lambda: lazy), tiny_facts(), CPU, seed=5)  # type: ignore[arg-type,return-value]
