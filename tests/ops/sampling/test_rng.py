"""Random numbers: known answers, integers equal to plain Python's, uniform and independent along every key."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rocm_serve.ops.sampling import rng

CPU = torch.device("cpu")
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
SEEDS = st.integers(0, 2**64 - 1)


def plain_mix(z: int) -> int:
    """SplitMix64's output function once more, from its definition modulo 2**64."""
    z %= 2**64
    z = (z ^ (z // 2**30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z // 2**27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z // 2**31)


def noise(seed: int, choice: int, position: int, ids: int) -> torch.Tensor:
    keys = torch.tensor([[rng.as_signed(rng.row_key(seed, choice, position))]])
    return rng.gumbel(keys, rng.id_offsets(0, ids, CPU))[0]


def uniforms(keys: list[tuple[int, int, int]], ids: int) -> torch.Tensor:
    signed = torch.tensor([[rng.as_signed(rng.row_key(*key))] for key in keys])
    return rng.uniform(rng.random_bits(signed, rng.id_offsets(0, ids, CPU))).double()


def test_known_answers_of_splitmix64() -> None:
    """First outputs for seed 1234567, as published with Vigna's splitmix64.c (rosettacode.org)."""
    known = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [rng.stream_output(1234567, i) for i in range(5)] == known
    bits = rng.random_bits(torch.tensor([[1234567]]), rng.id_offsets(0, 5, CPU))
    assert bits.tolist() == [[rng.as_signed(k) for k in known]]


@pytest.mark.parametrize("device", DEVICES)
@given(seed=SEEDS, choice=st.integers(0, 200), position=st.integers(0, 2**20), first=st.integers(0, 248319))
def test_tensor_bits_equal_plain_python_integers(
    device: str, seed: int, choice: int, position: int, first: int
) -> None:
    gamma = 0x9E3779B97F4A7C15
    start = plain_mix(plain_mix(plain_mix(seed) + (choice + 1) * gamma) + (position + 1) * gamma)
    expected = [rng.as_signed(plain_mix(start + (i + 1) * gamma)) for i in range(first, first + 5)]
    key = torch.tensor([[rng.as_signed(rng.row_key(seed, choice, position))]], device=device)
    assert rng.random_bits(key, rng.id_offsets(first, 5, torch.device(device))).tolist() == [expected]


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_outside_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="not in 0"):
        rng.row_key(seed, 0, 0)


def test_uniform_stays_inside_the_open_interval_at_both_ends() -> None:
    ends = torch.tensor([[0, -1, 2**63 - 1, -(2**63), 4095, 4096]])
    u = rng.uniform(ends)
    assert bool((u > 0).all()) and bool((u < 1).all())
    assert bool(torch.isfinite(rng.gumbel(ends, torch.zeros(6, dtype=torch.int64))).all())
    assert u[0, 0].item() == 2.0**-53 and u[0, 1].item() == 1 - 2.0**-24


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_noise_of_an_id_does_not_depend_on_shard_row_or_threads(threads: int) -> None:
    ids = 99_990
    keys = torch.tensor([[rng.as_signed(rng.row_key(2**64 - 1, 3, p))] for p in range(5)])
    before = torch.get_num_threads()
    whole = rng.gumbel(keys, rng.id_offsets(0, ids, CPU))
    try:
        torch.set_num_threads(threads)
        for shards in (1, 2, 3, 6):
            width = ids // shards
            parts = [rng.gumbel(keys.flip(0), rng.id_offsets(s * width, width, CPU)) for s in range(shards)]
            assert torch.equal(torch.cat(parts, -1).flip(0), whole)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(rng.gumbel(keys[2:3], rng.id_offsets(77, 13, CPU))[0], whole[2, 77:90])


@pytest.mark.parametrize("device", DEVICES)
def test_uniforms_are_the_same_bits_on_every_device(device: str) -> None:
    keys = torch.tensor([[rng.as_signed(rng.row_key(3, 1, p))] for p in range(9)])
    here = rng.uniform(rng.random_bits(keys, rng.id_offsets(0, 5001, CPU)))
    there = rng.uniform(rng.random_bits(keys.to(device), rng.id_offsets(0, 5001, torch.device(device))))
    assert torch.equal(there.cpu(), here)
    exact = [[int(bits) % 2**64 for bits in row] for row in rng.random_bits(keys, rng.id_offsets(0, 50, CPU))]
    expected = torch.tensor([[((bits >> 12) + 0.5) / 2**52 for bits in row] for row in exact], dtype=torch.float64)
    assert torch.equal(here[:, :50], expected.float())


def test_noise_follows_the_gumbel_distribution() -> None:
    x = noise(12345, 0, 17, 200_000).double().sort().values
    cdf = torch.exp(-torch.exp(-x))
    steps = torch.arange(1, x.numel() + 1, dtype=torch.float64) / x.numel()
    distance = torch.maximum((cdf - steps).abs(), (cdf - steps + 1 / x.numel()).abs()).max().item()
    assert distance * math.sqrt(x.numel()) < 1.95, "Kolmogorov-Smirnov, one in a thousand"
    assert abs(x.mean().item() - 0.5772156649) < 4 * math.sqrt(math.pi**2 / 6 / x.numel())


AXES = {
    "seed": [(s, 0, 5) for s in range(400)],
    "high seed": [(2**64 - 1 - s, 0, 5) for s in range(400)],
    "choice": [(7, c, 5) for c in range(400)],
    "position": [(7, 0, p) for p in range(400)],
}


@pytest.mark.parametrize("axis", AXES)
def test_uniform_along_every_key(axis: str) -> None:
    """Chi-square over 256 cells of 160,000 numbers, and of the numbers of each single id along the axis."""
    u = uniforms(AXES[axis], 400)
    counts = torch.bincount((u.flatten() * 256).long(), minlength=256).double()
    expected = u.numel() / 256
    assert abs(((counts - expected) ** 2 / expected).sum().item() - 255) < 4.5 * math.sqrt(2 * 255)
    means_of_ids = (u.mean(0) - 0.5) * math.sqrt(12 * u.shape[0])
    assert means_of_ids.abs().max().item() < 5.0


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbours_along_every_key_are_independent(axis: str, lag: int) -> None:
    """Pairs fall evenly into 16 x 16 cells, between neighbouring keys and between neighbouring ids."""
    u = uniforms(AXES[axis], 400)
    for a, b in ((u[:-lag], u[lag:]), (u[:, :-lag], u[:, lag:])):
        cells = (a * 16).long() * 16 + (b * 16).long()
        counts = torch.bincount(cells.flatten(), minlength=256).double()
        expected = cells.numel() / 256
        assert abs(((counts - expected) ** 2 / expected).sum().item() - 255) < 4.5 * math.sqrt(2 * 255)


def test_no_two_keys_share_their_numbers() -> None:
    """Keys that add or swap to the same sum are apart: (1, 2, 3), (3, 2, 1), (2, 2, 2), (0, 3, 3) ..."""
    keys = [rng.row_key(*key) for key in itertools.product(range(12), range(12), range(12))]
    assert len(set(keys)) == 12**3


def test_flipping_one_seed_bit_changes_half_of_the_bits() -> None:
    base = rng.row_key(0x0123456789ABCDEF, 0, 9)
    changed = [(base ^ rng.row_key(0x0123456789ABCDEF ^ (1 << bit), 0, 9)).bit_count() for bit in range(64)]
    assert min(changed) > 12 and max(changed) < 52
    assert abs(sum(changed) / 64 - 32) < 3


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 200), st.integers(0, 2**31)), max_size=9))
def test_keys_of_many_rows_are_those_of_each(rows: list[tuple[int, int, int]]) -> None:
    streams = np.array([rng.choice_stream(seed, choice) for seed, choice, _ in rows], dtype=np.uint64)
    positions = np.array([position for _, _, position in rows], dtype=np.uint64)
    assert rng.row_keys(streams, positions).tolist() == [rng.as_signed(rng.row_key(*row)) for row in rows]
