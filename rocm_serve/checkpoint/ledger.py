"""Both sides of the books, from headers alone: every tensor is used once, every parameter is filled. No torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod

from rocm_serve.checkpoint.reader import CheckpointReader, TensorInfo
from rocm_serve.checkpoint.rules import Catalogue, catalogue, orphan_scales, weight_keys
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import ModelFacts, promised_fp8, scale_key, stage_layers, stage_params
from rocm_serve.parallel.expert_map import ExpertPlan
from rocm_serve.parallel.layout import Param, Place, copies, shape_at
from rocm_serve.parallel.mesh import Coord, Mesh

log = logging.getLogger(__name__)

_FLOATS = ("BF16", "F16", "F32")
_SHOWN = 3


def stage_catalogue(reader: CheckpointReader, facts: ModelFacts, coord: Coord, *, mtp: bool) -> Catalogue:
    """Sort the checkpoint's names for this rank's stage; the result also says how each tensor is stored."""
    return catalogue(
        reader.names,
        stage_layers(facts, coord),
        first=coord.first_stage,
        last=coord.last_stage,
        mtp=mtp,
        tied=facts.tie_word_embeddings,
    )


def check_stage(
    reader: CheckpointReader, facts: ModelFacts, params: Mapping[str, Param], found: Catalogue
) -> dict[str, TensorInfo]:
    """Compare a stage's parameters with the headers of the shards that hold its tensors.

    Returns where each canonical tensor lies. Reads headers only.
    Errors: UserError, one line: orphan scale, precision against the configuration, missing, extra, wrong shape or
    dtype, truncated shard.
    """
    _check_precision(facts, found)
    wanted = {part.key: (part.source, param.dtype) for param in params.values() for part in param.parts}
    missing = [key for key in wanted if key not in found.tensors]
    if missing:
        drafts = all(key.startswith("mtp.") for key in missing)
        advice = ", of the draft layer that --speculative asks for; legal: --speculative off" if drafts else ""
        raise UserError(f"{reader.path} lacks {_some(missing)}{advice}")
    extra = [name for key, name in found.tensors.items() if key not in wanted]
    if extra:
        raise UserError(f"{reader.path} holds what this model has no use for: {_some(extra)}")
    reader.check_shards({reader.names[name] for name in found.tensors.values()})
    infos = {}
    for key, (shape, dtype) in wanted.items():
        info = reader.info(found.tensors[key])
        if info.shape != shape:
            asked = f"the configuration asks for {list(shape)}"
            raise UserError(f"{info.file}: {info.name} has shape {list(info.shape)}; {asked}")
        legal = ("F8_E4M3",) if dtype == "fp8" else _FLOATS
        if info.dtype not in legal:
            why = " with a scale" if dtype == "fp8" else " without a scale" if info.dtype == "F8_E4M3" else ""
            raise UserError(f"{info.file}: {info.name} is {info.dtype}{why}; legal: {', '.join(legal)}")
        infos[key] = info
    return infos


def check_filled(params: Mapping[str, Param], place: Place) -> None:
    """Assert that the copies of every parameter fill its share exactly: a mistake of ours if not."""
    for param in params.values():
        filled = sum(copy.elements for copy in copies(param, place))
        shape = shape_at(param, place)
        assert filled == prod(shape), f"{param.name}: {filled} elements of {shape} filled"


def validate(
    reader: CheckpointReader,
    facts: ModelFacts,
    mesh: Mesh,
    *,
    mtp: bool,
    stages: range | None = None,
    experts: ExpertPlan | None = None,
) -> None:
    """Check the checkpoint for every rank of `mesh` from its headers, before anything big is read.

    `experts`: how they lie; None: in order.

    With `stages`, those of one node, files of other stages need not be there. Without it, shards of which nothing is
    used are checked, too: one that is truncated says that the download is not complete.
    Errors: UserError, one line.
    """
    for stage in stages or range(mesh.pp):
        coord = mesh.coord(stage * mesh.tp)
        found = stage_catalogue(reader, facts, coord, mtp=mtp)
        _check_precision(facts, found)
        params = stage_params(facts, coord, formats=found, mtp=mtp, experts=experts or ExpertPlan(mesh.ep))
        check_stage(reader, facts, params, found)
        if coord.last_stage and facts.tie_word_embeddings and not found.tied:
            log.warning(
                "config.json says tie_word_embeddings, but the files hold lm_head.weight: it is used, as it is by HF"
                " Transformers where its values differ"
            )
    if stages is None or len(stages) == mesh.pp:
        reader.check_shards(set(reader.names.values()))
    beyond = [name for name in reader.names if _beyond(name, facts)]
    if beyond:
        raise UserError(f"{reader.path} holds layers beyond num_hidden_layers {facts.num_layers}: {_some(beyond)}")


def _beyond(name: str, facts: ModelFacts) -> bool:
    words = name.removeprefix("model.").removeprefix("language_model.").split(".", 2)
    return words[0] == "layers" and len(words) > 1 and words[1].isdigit() and int(words[1]) >= facts.num_layers


def _check_precision(facts: ModelFacts, found: Catalogue) -> None:
    orphans = orphan_scales(found.tensors)
    if orphans:
        raise UserError(f"scale without its weight: {_some(orphans)}")
    for key in weight_keys(found.tensors):
        scaled, promised = found.fp8(key), promised_fp8(facts, key)
        if scaled == promised:
            continue
        name = found.tensors[key]
        if scaled:
            raise UserError(f"{name} has a scale, but by config.json (modules_to_not_convert) it is not FP8")
        raise UserError(f"{name} has no scale {scale_key(name)}, but by config.json (quantization_config) it is FP8")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
