"""Bytes of weights, pages and slots: equal to what torch allocates."""

from __future__ import annotations

import pytest
import torch

from rocm_serve.cache.allocate import KV_DTYPES, allocate_stage_cache, cache_bytes
from rocm_serve.checkpoint.synthetic_configs import DIMS, model_config
from rocm_serve.executor import stage_memory
from rocm_serve.executor.stage_memory import layout_of, page_bytes, slot_bytes
from rocm_serve.models.qwen3_5.spec import ConfigFormats, parse_config, stage_params
from rocm_serve.parallel.layout import bytes_at, shape_at
from rocm_serve.parallel.mesh import Mesh
from tests.executor.wishes import IDS, facts, resolved


@pytest.mark.parametrize("kv", list(KV_DTYPES))
@pytest.mark.parametrize(("tp", "pp", "rank"), [(1, 1, 0), (2, 1, 1), (4, 1, 2), (1, 2, 0), (2, 2, 3), (1, 8, 7)])
def test_page_and_slot_bytes_equal_allocated_ones(tp: int, pp: int, rank: int, kv: str) -> None:
    wish = resolved(tp=tp, pp=pp, kv_cache_dtype=kv, dtype="bfloat16")
    coord = Mesh(tp, pp).coord(rank)
    pages, slots = 7, 3
    cache = allocate_stage_cache(
        layout_of(facts(), coord, wish),
        num_pages=pages,
        num_slots=slots,
        kv_dtype=KV_DTYPES[kv],
        conv_dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    expected = pages * page_bytes(facts(), coord, wish) + (slots + 1) * slot_bytes(facts(), coord, wish)
    assert cache_bytes(cache) == expected


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (4, 2)])
def test_weight_bytes_equal_those_of_tensors_of_the_local_shapes(tp: int, pp: int) -> None:
    wish = resolved(tp=tp, pp=pp)
    total = 0
    for rank in range(tp * pp):
        coord = Mesh(tp, pp).coord(rank)
        params = stage_params(facts(), coord, formats=ConfigFormats(facts()), mtp=False)
        planned = stage_memory.weight_bytes(params, coord, wish)
        shapes = [shape_at(p, coord.place) for p in params.values()]
        assert planned == sum(torch.empty(s, device="meta").nbytes for s in shapes)
        total += planned
    assert total > 0


def test_preparation_takes_the_largest_group_of_weights_that_a_provider_lays_out() -> None:
    wish = resolved(tp=2, dtype="bfloat16")
    coord = Mesh(2, 1).coord(1)
    params = stage_params(facts(), coord, formats=ConfigFormats(facts()), mtp=False)
    sizes = {name: bytes_at(p, coord.place, model_itemsize=2) for name, p in params.items()}

    def preparing(*ops: str) -> int:
        return stage_memory.preparation_bytes(params, coord, wish, ops)

    experts = sizes["model.layers.0.mlp.experts.gate_up_proj"] + sizes["model.layers.0.mlp.experts.down_proj"]
    assert preparing("moe_experts") == experts
    ends = ("proj.weight", "_qkvz.weight", "_ba.weight", "gate.weight", "lm_head.weight")
    matrices = [name for name in sizes if name.endswith(ends)]
    assert preparing("linear") == max(sizes[name] for name in matrices)
    assert preparing("fp8_linear") == 0, "no weight of this checkpoint is FP8"
    assert preparing("moe_experts", "linear") == max(experts, preparing("linear"))
    assert preparing() == 0 == preparing("rms_norm")


def test_preparation_counts_a_weight_together_with_its_scale() -> None:
    fp8 = parse_config(model_config("text-fp8", "none", DIMS["default"], IDS), None)
    coord = Mesh(1, 1).coord(0)
    params = stage_params(fp8, coord, formats=ConfigFormats(fp8), mtp=False)
    sizes = {name: bytes_at(p, coord.place, model_itemsize=4) for name, p in params.items()}
    first = "model.layers.0.mlp.experts."
    assert stage_memory.preparation_bytes(params, coord, resolved(), ["moe_experts"]) == sum(
        size for name, size in sizes.items() if name.startswith(first)
    )
    assert sizes[f"{first}down_proj_scale_inv"] > 0
