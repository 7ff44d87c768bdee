"""The committed checkpoint: the published layout, small, legal where it must be, equal to HF, and it can count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from evals.tiny.documents import SEPARATOR, few_shot_prompt, shots_of_lm_eval
from evals.tiny.evaluate import Runner, item_of
from evals.tiny.export import fill, read
from evals.tiny.generator import POOL_SHOTS, pool
from evals.tiny.modules import build
from evals.tiny.shape import DIMS, LAYOUT, MTP
from evals.tiny.train import special_ids
from rocm_serve.checkpoint.ledger import validate
from rocm_serve.checkpoint.reader import CheckpointReader, read_config
from rocm_serve.checkpoint.synthetic_configs import model_config
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import ConfigFormats, parse_config, stage_params
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.layout import check_degrees
from rocm_serve.parallel.mesh import Mesh
from tests.checkpoint import published
from tests.checkpoint.holes import headers_of
from tests.checkpoint.test_synthetic import pattern
from tests.models.harness import Pipeline, difference, hf_logits, prefill, text
from tests.models.qwen3_5.test_layouts import hf_of, loaded

CHECKPOINT = Path(__file__).parents[3] / "evals" / "tiny" / "checkpoint"
MB = 1_000_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def asked() -> list[tuple[str, str]]:
    """Prompt and gold answer of the first test questions, 5-shot as lm-eval asks them.

    Chains are left out: they have more than one wording of a right answer.
    """
    shots = pool("train", POOL_SHOTS)
    tests = pool("test", 16)
    drawn = shots_of_lm_eval(5, len(tests), POOL_SHOTS)
    return [
        (few_shot_prompt([shots[i] for i in those], p.question), f" {p.answer}{SEPARATOR}")
        for those, p in zip(drawn, tests, strict=True)
        if not p.template.startswith("chain")
    ]


def test_the_files_are_small() -> None:
    sizes = {p.name: p.stat().st_size for p in CHECKPOINT.iterdir()}
    assert max(sizes.values()) <= 15 * MB and sum(sizes.values()) <= 32 * MB, sizes
    assert {"config.json", "generation_config.json", "tokenizer.json", "README.md"} <= sizes.keys()


def test_the_layout_is_the_published_one() -> None:
    config, generation = read_config(CHECKPOINT)
    assert config.keys() == published.config().keys()
    assert generation is not None and published.generation_config().keys() <= generation.keys()
    ours = {(pattern(name), dtype, len(shape)) for name, (dtype, shape) in headers_of(CHECKPOINT).items()}
    assert ours == {(pattern(name), dtype, len(shape)) for name, dtype, shape in published.entries()}


def test_the_config_is_the_recipe_s(tokenizer: Tokenizer) -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config == model_config(LAYOUT, MTP, DIMS, special_ids(tokenizer))


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (2, 8)])
def test_the_ledger_is_even_on_every_mesh_that_is_promised(tp: int, pp: int) -> None:
    with CheckpointReader(CHECKPOINT) as reader:
        validate(reader, parse_config(*reader.config()), Mesh(tp, pp), mtp=True)


def test_at_four_ranks_nothing_but_the_columns_of_experts_is_in_the_way() -> None:
    facts = parse_config(*read_config(CHECKPOINT))
    params = stage_params(facts, Mesh(1, 1).coord(0), formats=ConfigFormats(facts), mtp=True)
    splits = [split for param in params.values() for split in param.splits]
    for ep in (2, 4):
        check_degrees(splits, 4, ep)
    for name, param in params.items():
        if ".mlp.experts." not in name:
            check_degrees(param.splits, 4)
    with pytest.raises(
        UserError, match=r"ep 1 it does not divide 2 FP8 blocks \(128 wide\) of expert columns; legal: 1, 2$"
    ):
        check_degrees(splits, 4)


def test_every_trait_of_the_large_model_is_there() -> None:
    facts = parse_config(*read_config(CHECKPOINT))
    assert facts.layer_types == ("linear_attention",) * 3 + ("full_attention",) + facts.layer_types[:4]
    assert facts.top_k > 1 and facts.mtp_layers == 1 and facts.shared_intermediate_size > 0
    assert facts.linear_num_value_heads > facts.linear_num_key_heads and facts.num_heads > facts.num_kv_heads > 1
    assert facts.rotary_dim < facts.head_dim and facts.attn_output_gate


def test_log_probs_equal_hf_and_the_answers_are_right(tokenizer: Tokenizer, asked: list[tuple[str, str]]) -> None:
    """Prompt and gold answer in one piece: every answer token is the best of its row, in HF and here."""
    hf = hf_of(CHECKPOINT)
    run = Pipeline([loaded(CHECKPOINT, Mesh(1, 1), 0, SoloComm())])
    for slot, (prompt, answer) in enumerate(asked[:2], start=1):
        question, worked = tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids
        ids = (question + worked)[:-1]
        expected = hf_logits(hf, ids)
        got = prefill(run, text(slot, pages=40), ids, chunk=128)
        assert difference(got, expected) <= 1e-4
        assert got[len(question) - 1 :].argmax(-1).tolist() == worked


def test_drafts_are_accepted_often_but_not_always(tokenizer: Tokenizer, asked: list[tuple[str, str]]) -> None:
    model, mtp = build(DIMS, special_ids(tokenizer), 0)
    fill(model, mtp, read(CHECKPOINT))
    runner = Runner(model, mtp, frozenset(tokenizer.encode(SEPARATOR).ids), batch=2)
    items = [item_of(tokenizer, prompt, answer) for prompt, answer in asked[:8]]
    for item in items:
        item.answer = item.draft  # that these are the model's own answers is the test above
    served, anywhere = runner.acceptance(items)
    assert 0.7 <= served < 1 and 0.7 <= anywhere < 1, (served, anywhere)
