"""A whole model on AITER's adapters: what layers pass (views, dtypes, parameters) is what the adapters take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rocm_serve.checkpoint.ledger import stage_catalogue
from rocm_serve.checkpoint.load import load_stage
from rocm_serve.checkpoint.reader import CheckpointReader, read_config
from rocm_serve.models.qwen3_5.spec import parse_config, stage_params
from rocm_serve.models.registry import build_model
from rocm_serve.ops.bind import OPS, BoundOps, bind_ops
from rocm_serve.ops.contract import layout_tag
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh
from tests.made import small_checkpoint
from tests.models.harness import Chunk, Pipeline, Stage, caches, prefill, text
from tests.ops.aiter_standin.conftest import Install
from tests.ops.aiter_standin.package import releases
from tests.ops.aiter_standin.test_adapters import BOUND
from tests.ops.test_references import error

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FP8 experts and FP8 dense layers, bf16 for the rest."""
    return small_checkpoint(tmp_path_factory.mktemp("fp8"), "text-fp8", "bf16", seed=3)


def stage(path: Path, ops: BoundOps, dtype: torch.dtype = BF16) -> Stage:
    facts = parse_config(*read_config(path))
    coord = Mesh(1, 1).coord(0)
    with CheckpointReader(path) as reader:
        formats = stage_catalogue(reader, facts, coord, mtp=False)
        params = stage_params(facts, coord, formats=formats, mtp=False)
        model = build_model(facts, coord, params, SoloComm(), ops, device="cpu", dtype=dtype, mtp=False)
        load_stage(reader, facts, coord, params, dict(model.named_parameters()), lambda news: None)
    model.prepare()
    return Stage(model, caches(facts, coord, dtype=dtype))


def bound(*by_aiter: str) -> BoundOps:
    """Bind the named ops to AITER and all others to the reference, as on gfx950."""
    return bind_ops({name: "aiter" if name in by_aiter else "reference" for name in OPS}, "gfx950")


def rows(run: Stage) -> torch.Tensor:
    """Return the logits of a prompt in two chunks, then of steps that hold two texts, one of them past its prompt."""
    pipeline = Pipeline([run])
    tokens = torch.randint(0, 2048, (60,), generator=torch.Generator().manual_seed(4)).tolist()
    first, second = text(1), text(2)
    out = [prefill(pipeline, first, tokens[:40], chunk=23)]
    for i in (40, 41):
        out += pipeline.step(Chunk(first, [tokens[i]], recurrent=True), Chunk(second, tokens[i : i + 9]))
    out += pipeline.step(Chunk(first, tokens[42:45], recurrent=True), Chunk(second, tokens[45:46], recurrent=True))
    return torch.cat(out).double()


@pytest.fixture(scope="module")
def exact(checkpoint: Path) -> torch.Tensor:
    return rows(stage(checkpoint, bound(), torch.float32))


@pytest.fixture(scope="module")
def noise(checkpoint: Path, exact: torch.Tensor) -> float:
    """How far the references are in bf16 from float32: relative L2 of all logits."""
    return error(rows(stage(checkpoint, bound())), exact)


@pytest.mark.parametrize("release", [releases()[1], releases()[-1]])
def test_a_model_on_aiter_is_as_near_to_float32_as_on_the_references(
    install: Install, checkpoint: Path, exact: torch.Tensor, noise: float, release: str
) -> None:
    install(release)
    got = error(rows(stage(checkpoint, bound(*BOUND))), exact)
    print(f"by aiter {got:.1e}, by the references {noise:.1e}")
    assert got <= 1.5 * noise


def test_one_layer_alone_takes_prepared_weights(
    install: Install, checkpoint: Path, exact: torch.Tensor, noise: float
) -> None:
    install(releases()[-1])
    made = stage(checkpoint, bind_ops({**dict.fromkeys(OPS, "reference"), "layers.2.moe_experts": "aiter"}, "gfx950"))
    weights = {n: w for n, w in made.model.named_parameters() if n.endswith("experts.gate_up_proj")}
    assert [layout_tag(w) == "aiter_16x16" for w in weights.values()] == [i == 2 for i in range(len(weights))]
    assert error(rows(made), exact) <= 1.5 * noise
