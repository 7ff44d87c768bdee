"""Counter-based random numbers: a pure function of (seed, choice, position, token id), the same integers everywhere.

Source: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of
Vigna's public-domain splitmix64.c). Output i of the stream that starts at state s is mix64(s + (i + 1) * GAMMA), so
any output is reached without the ones before it. Three streams stand on one another: output `choice` of the stream
of the seed starts the stream of the choice, its output `position` starts the stream of the position, and that
stream's output `token id` is the number of the token. No state is kept, hence nothing depends on batch mates, row
order, shard layout or the number of steps taken.

Letters: R rows, W ids per row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rocm_serve.ops.rows import steady_

Uint64 = np.ndarray[Any, np.dtype[np.uint64]]

MASK64 = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def as_signed(value: int) -> int:
    """Reinterpret an unsigned 64-bit integer as a signed one: torch computes with int64, modulo 2**64."""
    return value - (1 << 64) if value >> 63 else value


def mix64(state: int) -> int:
    """Mix one unsigned 64-bit state (the output function of SplitMix64)."""
    z = state & MASK64
    z = ((z ^ (z >> 30)) * MIX_1) & MASK64
    z = ((z ^ (z >> 27)) * MIX_2) & MASK64
    return z ^ (z >> 31)


def stream_output(start: int, index: int) -> int:
    """Return output `index` (from 0) of the SplitMix64 stream that starts at `start`."""
    return mix64(start + (index + 1) * GAMMA)


def choice_stream(seed: int, choice: int) -> int:
    """Return the start state of the stream whose outputs are indexed by position.

    Errors: ValueError when the seed is not an unsigned 64-bit integer.
    """
    if not 0 <= seed <= MASK64:
        raise ValueError(f"seed {seed} is not in 0..2**64-1")
    return stream_output(mix64(seed), choice)


def row_key(seed: int, choice: int, position: int) -> int:
    """Return the start state of the stream whose outputs are indexed by token id.

    `position` is the index of the new token in its sequence (prompt tokens count).
    Errors: as of `choice_stream`.
    """
    return stream_output(choice_stream(seed, choice), position)


def row_keys(streams_R: Uint64, positions_R: Uint64) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return `row_key` of many rows at once, as signed integers. `streams_R`: of `choice_stream`."""
    z_R = streams_R + (positions_R + np.uint64(1)) * np.uint64(GAMMA)
    for shift, factor in ((30, MIX_1), (27, MIX_2), (31, 1)):
        z_R = (z_R ^ (z_R >> np.uint64(shift))) * np.uint64(factor)
    return z_R.view(np.int64)


def id_offsets(first_id: int, count: int, device: torch.device) -> torch.Tensor:
    """Return (id + 1) * GAMMA modulo 2**64 for `count` consecutive ids: the part of the state that no row changes."""
    return (torch.arange(first_id, first_id + count, dtype=torch.int64, device=device) + 1) * as_signed(GAMMA)


def random_bits(keys_R1: torch.Tensor, offsets_W: torch.Tensor) -> torch.Tensor:
    """Return 64 random bits for every row and id, as int64.

    Shapes: keys_R1 (int64, from `row_keys`), offsets_W or offsets_RW (from `id_offsets`) -> RW.
    """
    z_RW = keys_R1 + offsets_W
    for shift, factor in ((30, MIX_1), (27, MIX_2), (31, None)):
        # int64 has arithmetic shifts only; the mask takes the copies of the sign bit away
        z_RW ^= (z_RW >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            z_RW *= as_signed(factor)
    return z_RW


def uniform(bits_RW: torch.Tensor) -> torch.Tensor:
    """Map 64 random bits to float32 strictly inside (0, 1): the upper 52 bits, plus a half, over 2**52.

    Small values keep 24 significant bits down to 2**-53. The largest float32 below one takes what would round to one.
    """
    odd_RW = (bits_RW >> 12).bitwise_and_((1 << 52) - 1).mul_(2).add_(1)
    return odd_RW.float().mul_(2.0**-53).clamp_(max=1.0 - 2.0**-24)


def gumbel(keys_R1: torch.Tensor, offsets_W: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise in float32 for every row and id.

    -log(-log1p(-u)): the largest values, which decide an arg max, come from small u, where float32 is finest; ties
    between two ids of one row are then as rare as between 52-bit numbers.
    """
    return steady_(lambda u: u.neg_().log1p_().neg_().log_().neg_(), uniform(random_bits(keys_R1, offsets_W)))
