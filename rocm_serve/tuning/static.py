"""From a model, or a shape by name, to what is tuned: decided by the functions of a start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rocm_serve.checkpoint.reader import read_config
from rocm_serve.config.resolve import resolve
from rocm_serve.config.schema import ServeConfig
from rocm_serve.errors import UserError
from rocm_serve.executor.binding import op_facts
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, parse_config, stage_params
from rocm_serve.ops.bind import OPS, choose
from rocm_serve.ops.facts import OpFacts
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.platform.facts import fp8_dialect
from rocm_serve.platform.gpus import GPUS
from rocm_serve.tuning.shapes import SHAPES, facts_of
from rocm_serve.tuning.wish import Wish, sizes_of


def model_of(model: Path | None, shape: str | None) -> ModelFacts:
    """Parse the configuration of a folder, or make that of a shape. Errors: UserError."""
    if (model is None) == (shape is None):
        raise UserError(f"give one of --model DIR and --shape; shapes are {', '.join(SHAPES)}")
    if model is not None:
        return parse_config(*read_config(model))
    assert shape is not None
    if shape not in SHAPES:
        raise UserError(f"--shape {shape}: no such shape; legal: {', '.join(SHAPES)}")
    return facts_of(shape)


def facts_on(model: ModelFacts, arch: str, tp: int, op: Mapping[str, str]) -> OpFacts:
    """Say what is static on one of `tp` ranks of a card. Errors: UserError for one that is not known."""
    card = next((gpu for gpu in GPUS.values() if gpu.arch == arch), None)
    if card is None:
        raise UserError(f"--arch {arch}: not known; legal: {', '.join(dict.fromkeys(g.arch for g in GPUS.values()))}")
    config = ServeConfig(model="tuned", tp=tp, op=dict(op))
    resolved = resolve(config, model, card.hosts(tp), vocab_used=model.vocab_size, run_dir="", free_port=lambda: 0)
    coord = Mesh(tp, 1).coord(0)
    params = stage_params(model, coord, formats=ConfigFormats(model), mtp=False)
    return op_facts(
        model,
        params,
        coord,
        resolved,
        arch=arch,
        compute_units=card.compute_units,
        dialect=fp8_dialect(card.device, arch),
        activation=resolved.fp8_activation,
    )


def wish_of(facts: OpFacts, op: Mapping[str, str], seed: int) -> Wish:
    """Choose Triton wherever it can, bound by a start or not; else what a start would choose. Errors: UserError."""
    chosen = choose(op, facts.arch, facts=facts.mapping(), preferred=dict.fromkeys(OPS, "triton"))
    return Wish(
        dims=sizes_of(facts),
        providers={line.op: line.provider for line in chosen if "." not in line.op},
        arch=facts.arch,
        dtype=facts.dtype,
        dialect=facts.fp8_dialect if facts.expert_fp8 else None,
        activation=facts.activation,
        seed=seed,
    )
