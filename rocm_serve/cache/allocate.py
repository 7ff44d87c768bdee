"""Allocate a stage's KV pages and GDN state slots, and clear slots that change hands."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import torch

from rocm_serve.cache.layout import StageLayout
from rocm_serve.ops.batch import StageCache
from rocm_serve.ops.fp8 import FP8_DTYPES

_ALIGN = 512  # bytes, as torch's own allocator for a GPU
_MOST_OF_A_GROUP = 2**31 - 1  # bytes of several layers' states in one piece
KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


def kv_dtype_of(name: str, dialect: str) -> torch.dtype:
    """Return the dtype of the pages: FP8 ones are in the dialect of the device."""
    return FP8_DTYPES[dialect] if name == "fp8_e4m3" else KV_DTYPES[name]


def allocate_stage_cache(
    layout: StageLayout,
    *,
    num_pages: int,
    num_slots: int,
    kv_dtype: torch.dtype,
    conv_dtype: torch.dtype,
    device: torch.device,
) -> StageCache:
    """Make the caches of this stage's layers, all zero. Slot 0 is the dummy: real slots are 1..num_slots.

    `conv_dtype` is the dtype of the model's rows: pending rows are kept in it too.
    """

    def pages() -> torch.Tensor:
        return _zeros((num_pages, *layout.page_shape), kv_dtype, device)

    pending_u, pending_ba = layout.pending_shapes
    drafting = layout.gdn_layers if layout.draft_tokens else ()
    kinds = (
        (layout.gdn_layers, layout.conv_shape, conv_dtype),
        (layout.gdn_layers, layout.ssm_shape, torch.float32),
        (drafting, pending_u, conv_dtype),
        (drafting, pending_ba, conv_dtype),
    )
    made = [_slots(layers, (num_slots + 1, *shape), dtype, device) for layers, shape, dtype in kinds]
    conv, ssm, u, ba = (of_layer for of_layer, _ in made)
    return StageCache(
        page_size=layout.page_size,
        k_pages={i: pages() for i in layout.kv_layers},
        v_pages={i: pages() for i in layout.kv_layers},
        conv=conv,
        ssm=ssm,
        pending_u=u,
        pending_ba=ba,
        draft_tokens=layout.draft_tokens,
        by_slot=tuple(words for _, groups in made for words in groups),
    )


def clear_slots(cache: StageCache, slots: Sequence[int] | torch.Tensor) -> None:
    """Zero what these slots hold: they are about to belong to another request. On a GPU one launch for 2 GiB of a kind.

    Where numbers are given that are not on the device yet (int64), it is waited for.
    """
    if not len(slots) or not cache.ssm:
        return
    assert cache.by_slot, "states that were not allocated here"
    picked = torch.as_tensor(slots).to(cache.by_slot[0].device)
    for words in cache.by_slot:
        words.index_fill_(1, picked, 0)


def cache_bytes(cache: StageCache) -> int:
    """Bytes of all tensors of the cache."""
    groups = (cache.k_pages, cache.v_pages, cache.conv, cache.ssm, cache.pending_u, cache.pending_ba)
    return sum(x.numel() * x.element_size() for group in groups for x in group.values())


def _slots(
    layers: Sequence[int], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
    """Return zeros of `shape`, slots first, for each layer, and the same memory as words by layer and slot, in groups.

    Each layer's begin where memory of their own would: kernels are compiled for pointers to whole 16 bytes. A group is
    as many layers as 32-bit offsets reach: for ROCm, Triton reads the size of the whole memory that a tensor is part
    of, and compiles longer addresses where it is larger.
    """
    slots, nbytes = shape[0], prod(shape) * dtype.itemsize
    word = torch.int64 if nbytes // slots % torch.int64.itemsize == 0 else torch.uint8
    each = nbytes + -nbytes % _ALIGN
    at_once = max(1, _MOST_OF_A_GROUP // max(each, 1))
    of_layer, groups = {}, []
    for first in range(0, len(layers), at_once):
        group = layers[first : first + at_once]
        held = _zeros((len(group), each), torch.uint8, device)
        of_layer |= {i: own[:nbytes].view(dtype).view(shape) for i, own in zip(group, held, strict=True)}
        groups.append(held[:, :nbytes].view(word).unflatten(1, (slots, -1)))
    return of_layer, groups


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros whose memory, on the CPU, the kernel hands out page by page as it is first written.

    `torch.zeros` writes the zeros itself, so an idle server on a laptop would hold its whole budget.
    """
    nbytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).view(dtype).view(shape)
