"""Building a stage: which class, which parameters, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import ConfigFormats, stage_params
from rocm_serve.models.registry import MODELS, build_model
from rocm_serve.ops.bind import bind_ops
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh
from tests.models.harness import Chunk, Pipeline, build_stage, facts_of, hf_model, pipeline, random_tokens, text


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("moe", [True, False])
def test_parameters_are_those_of_the_table_with_its_shapes_and_dtypes(moe: bool, pp: int) -> None:
    facts = facts_of(hf_model(moe=moe), mtp_num_hidden_layers=1)
    for rank in range(pp):
        coord = Mesh(1, pp).coord(rank)
        params = stage_params(facts, coord, formats=ConfigFormats(facts), mtp=True)
        model = build_model(
            facts, coord, params, SoloComm(), bind_ops({}, "cpu"), device="cpu", dtype=torch.bfloat16, mtp=True
        )
        named = dict(model.named_parameters())
        assert named.keys() == params.keys()
        for name, p in named.items():
            assert tuple(p.shape) == params[name].shape
            assert p.dtype == {"model": torch.bfloat16, "float32": torch.float32}[params[name].dtype]
            assert not p.requires_grad
        assert (model.mtp is not None) == coord.last_stage


def test_a_parameter_that_the_table_has_and_the_model_has_not_is_caught() -> None:
    facts = facts_of(hf_model())
    coord = Mesh(1, 1).coord(0)
    params = stage_params(facts, coord, formats=ConfigFormats(facts), mtp=False)
    more = params | {"model.layers.9.input_layernorm.weight": params["model.norm.weight"]}
    with pytest.raises(AssertionError, match=r"layers\.9"):
        build_model(facts, coord, more, SoloComm(), bind_ops({}, "cpu"), device="cpu", dtype=torch.float32, mtp=False)


@pytest.mark.parametrize("name", MODELS)
def test_an_architecture_is_run_by_the_class_of_its_name(name: str) -> None:
    moe = "Moe" in name
    hf = hf_model(moe=moe)
    text_config = {k: v for k, v in hf.config.to_dict().items() if k != "architectures"}
    nested = {"text_config": text_config} if "Conditional" in name else {}
    kind = ("qwen3_5_moe" if moe else "qwen3_5") + ("" if nested else "_text")
    facts = facts_of(hf, name, model_type=kind, **nested)
    run = Pipeline([build_stage(facts, hf.state_dict())])
    assert type(run.stages[0].model).__name__ == name
    same = pipeline(facts_of(hf), hf.state_dict())
    tokens = random_tokens(9, 1)
    assert torch.equal(run.step(Chunk(text(), tokens))[0], same.step(Chunk(text(), tokens))[0])


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    facts = replace(facts_of(hf_model()), architecture="Qwen4ForCausalLM")
    coord = Mesh(1, 1).coord(0)
    with pytest.raises(UserError, match="Qwen4ForCausalLM is not supported; architectures are Qwen3_5ForCausalLM, "):
        build_model(facts, coord, {}, SoloComm(), bind_ops({}, "cpu"), device="cpu", dtype=torch.float32, mtp=False)
