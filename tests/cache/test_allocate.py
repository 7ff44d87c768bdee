"""What a stage allocates: only its own layers, in the documented shapes, all zero."""

from __future__ import annotations

import pytest
import torch

from rocm_serve.cache.allocate import allocate_stage_cache, clear_slots
from rocm_serve.cache.layout import stage_layout
from rocm_serve.ops.batch import StageCache
from rocm_serve.parallel.mesh import Mesh
from tests.executor.wishes import facts


def allocate(tp: int = 1, pp: int = 1, rank: int = 0) -> StageCache:
    return allocate_stage_cache(
        stage_layout(facts(), Mesh(tp, pp).coord(rank), page_size=4),
        num_pages=6,
        num_slots=3,
        kv_dtype=torch.float8_e4m3fn,
        conv_dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("pp", [1, 2, 3, 8])
def test_stages_hold_every_layer_once_and_only_their_kind_of_state(pp: int) -> None:
    seen: list[int] = []
    for rank in range(pp):
        cache = allocate(pp=pp, rank=rank)
        assert cache.k_pages.keys() == cache.v_pages.keys() and cache.conv.keys() == cache.ssm.keys()
        assert all(facts().layer_types[i] == "full_attention" for i in cache.k_pages)
        assert all(facts().layer_types[i] == "linear_attention" for i in cache.ssm)
        seen += [*cache.k_pages, *cache.ssm]
    assert sorted(seen) == list(range(facts().num_layers))


def test_shapes_and_dtypes_are_the_documented_ones() -> None:
    cache = allocate(tp=4, rank=1)
    f = facts()
    assert all(x.shape == (6, 4, 1, f.head_dim) for x in (*cache.k_pages.values(), *cache.v_pages.values()))
    assert all(x.dtype == torch.float8_e4m3fn for x in cache.k_pages.values())
    channels = (2 * f.key_dim + f.value_dim) // 4
    assert all(x.shape == (4, 3, channels) and x.dtype == torch.bfloat16 for x in cache.conv.values())
    heads, dv, dk = f.linear_num_value_heads // 4, f.linear_value_head_dim, f.linear_key_head_dim
    assert all(x.shape == (4, heads, dv, dk) and x.dtype == torch.float32 for x in cache.ssm.values())


def test_everything_starts_at_zero_and_is_memory_of_its_own() -> None:
    cache = allocate()
    tensors = [x for group in (cache.k_pages, cache.v_pages, cache.conv, cache.ssm) for x in group.values()]
    assert all(not x.float().any() for x in tensors)
    for value, x in enumerate(tensors):
        x.copy_(torch.full_like(x, value + 1, dtype=torch.float32).to(x.dtype))
    for value, x in enumerate(tensors):
        assert (x.float() == torch.tensor(value + 1.0).to(x.dtype).float()).all()


def test_clearing_a_slot_touches_no_other() -> None:
    cache = allocate()
    for group in (cache.conv, cache.ssm):
        for x in group.values():
            x.fill_(1.0)
    clear_slots(cache, (2,))
    for group in (cache.conv, cache.ssm):
        for x in group.values():
            assert not x[2].any() and (x[[0, 1, 3]] == 1).all()
