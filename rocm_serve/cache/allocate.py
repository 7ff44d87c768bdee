"""Allocate a stage's KV pages and GDN state slots, and clear slots that change hands."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import torch

from rocm_serve.cache.layout import StageLayout
from rocm_serve.ops.batch import StageCache

KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


def allocate_stage_cache(
    layout: StageLayout,
    *,
    num_pages: int,
    num_slots: int,
    kv_dtype: torch.dtype,
    conv_dtype: torch.dtype,
    device: torch.device,
) -> StageCache:
    """Make the caches of this stage's layers, all zero. Slot 0 is the dummy: real slots are 1..num_slots."""

    def pages() -> torch.Tensor:
        return _zeros((num_pages, *layout.page_shape), kv_dtype, device)

    def slots(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return _zeros((num_slots + 1, *shape), dtype, device)

    return StageCache(
        page_size=layout.page_size,
        k_pages={i: pages() for i in layout.kv_layers},
        v_pages={i: pages() for i in layout.kv_layers},
        conv={i: slots(layout.conv_shape, conv_dtype) for i in layout.gdn_layers},
        ssm={i: slots(layout.ssm_shape, torch.float32) for i in layout.gdn_layers},
    )


def clear_slots(cache: StageCache, slots: Sequence[int]) -> None:
    """Zero the conv and SSM state of these slots: they are about to belong to another request."""
    for states in (cache.conv, cache.ssm):
        for state in states.values():
            for slot in slots:
                state[slot].zero_()


def cache_bytes(cache: StageCache) -> int:
    """Bytes of all tensors of the cache."""
    groups = (cache.k_pages, cache.v_pages, cache.conv, cache.ssm)
    return sum(x.numel() * x.element_size() for group in groups for x in group.values())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros whose memory, on the CPU, the kernel hands out page by page as it is first written.

    `torch.zeros` writes the zeros itself, so an idle server on a laptop would hold its whole budget.
    """
    nbytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).view(dtype).view(shape)
