"""What a stage allocates: only its own layers, in the documented shapes, all zero."""

from __future__ import annotations

import pytest
import torch

from rocm_serve.cache import allocate as allocate_module
from rocm_serve.cache.allocate import allocate_stage_cache, cache_bytes, clear_slots
from rocm_serve.cache.layout import stage_layout
from rocm_serve.ops.batch import StageCache
from rocm_serve.parallel.mesh import Mesh
from tests.executor.wishes import facts


def allocate(tp: int = 1, pp: int = 1, rank: int = 0, draft_tokens: int = 0) -> StageCache:
    return allocate_stage_cache(
        stage_layout(facts(), Mesh(tp, pp).coord(rank), page_size=4, draft_tokens=draft_tokens),
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
        assert not cache.pending_u and not cache.pending_ba
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


@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_with_drafts_the_last_stage_has_their_pages_and_every_gdn_layer_their_rows(draft_tokens: int) -> None:
    f, tp, pp = facts(), 2, 2
    for rank in range(tp * pp):
        cache, plain = allocate(tp, pp, rank, draft_tokens), allocate(tp, pp, rank)
        last = rank >= tp
        assert cache.k_pages.keys() - plain.k_pages.keys() == ({-1} if last else set())
        assert cache.v_pages.keys() == cache.k_pages.keys()
        assert cache.pending_u.keys() == cache.pending_ba.keys() == cache.ssm.keys() == plain.ssm.keys()
        channels, heads = (2 * f.key_dim + f.value_dim) // tp, f.linear_num_value_heads // tp
        assert {(x.shape, x.dtype) for x in cache.pending_u.values()} == {((4, draft_tokens, channels), torch.bfloat16)}
        assert {(x.shape, x.dtype) for x in cache.pending_ba.values()} == {
            ((4, draft_tokens, 2 * heads), torch.bfloat16)
        }


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_the_layout_counts_every_byte_that_is_allocated(draft_tokens: int) -> None:
    for rank in range(2):
        layout = stage_layout(facts(), Mesh(1, 2).coord(rank), page_size=4, draft_tokens=draft_tokens)
        held = cache_bytes(allocate(1, 2, rank, draft_tokens))
        assert held == 6 * layout.page_bytes(1) + 4 * layout.slot_bytes(2)


def test_everything_starts_at_zero_and_is_memory_of_its_own() -> None:
    cache = allocate(draft_tokens=2)
    groups = (cache.k_pages, cache.v_pages, cache.conv, cache.ssm, cache.pending_u, cache.pending_ba)
    tensors = [x for group in groups for x in group.values()]
    assert all(not x.float().any() for x in tensors)
    for value, x in enumerate(tensors):
        x.copy_(torch.full_like(x, value + 1, dtype=torch.float32).to(x.dtype))
    for value, x in enumerate(tensors):
        assert (x.float() == torch.tensor(value + 1.0).to(x.dtype).float()).all()


def test_clearing_a_slot_touches_no_other() -> None:
    cache = allocate(draft_tokens=2)
    groups = (cache.conv, cache.ssm, cache.pending_u, cache.pending_ba)
    for group in groups:
        for x in group.values():
            x.fill_(1.0)
    clear_slots(cache, (2,))
    for group in groups:
        assert group
        for x in group.values():
            assert not x[2].any() and (x[[0, 1, 3]] == 1).all()


@pytest.mark.parametrize("most", [2**31 - 1, 9000, 1])
def test_layers_lie_as_kernels_expect_memory_to_lie(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Kernels are compiled for pointers to whole 16 bytes, and for offsets into what a tensor is part of: as for a
    tensor of its own. A group of layers is no larger than that, but for a layer that is by itself."""
    monkeypatch.setattr(allocate_module, "_MOST_OF_A_GROUP", most)
    cache = allocate(tp=4, draft_tokens=3)
    groups = (cache.conv, cache.ssm, cache.pending_u, cache.pending_ba)
    assert sum(len(words) for words in cache.by_slot) == sum(len(group) for group in groups)
    for group in groups:
        layers = list(group.values())
        assert len(layers) > 1
        for x in layers:
            storage = x.untyped_storage()
            assert x.is_contiguous() and (x.data_ptr() - storage.data_ptr()) % 512 == 0
            assert storage.nbytes() <= max(most, x.nbytes + 511)
        pieces = {x.untyped_storage().data_ptr() for x in layers}
        at_once = max(1, most // (layers[0].nbytes + -layers[0].nbytes % 512))
        assert len(pieces) == -(-len(layers) // at_once)
    for words in cache.by_slot:
        words[:, 2] = 0x55
    for group in groups:
        for x in group.values():
            assert not x[[0, 1, 3]].any() and x[2].view(torch.uint8).any()
    clear_slots(cache, (2,))
    assert not any(x.any() for group in groups for x in group.values())


def test_a_stage_without_such_layers_has_nothing_to_clear() -> None:
    cache = next(cache for cache in (allocate(pp=8, rank=i) for i in range(8)) if not cache.ssm)
    clear_slots(cache, (1,))
    assert not cache.by_slot
