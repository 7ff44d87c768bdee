"""Parts of sampling against numpy in float64: selections with ties, kept prefixes, penalties, log-sum-exp."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rocm_serve.ops.rows import ROW_MULTIPLE
from rocm_serve.ops.sampling import reference
from rocm_serve.ops.sampling.cases import CASES


def by_value_then_id(row: np.ndarray) -> np.ndarray:
    return np.lexsort((np.arange(row.size), -row))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("k", [0, 1, 5, 48, 96, 97, 200])
def test_top_of_shard_orders_by_value_then_id(name: str, k: int) -> None:
    logits = CASES[name](torch.Generator().manual_seed(k), 9, 97)
    values, ids = reference.top_of_shard(logits, k)
    for row, got_values, got_ids in zip(logits.numpy(), values.numpy(), ids.numpy(), strict=True):
        expected = by_value_then_id(row)[:k]
        assert got_ids.tolist() == expected.tolist()
        assert np.array_equal(got_values, row[expected])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("k", [1, 5, 97])
def test_ids_by_keys_as_a_gpu_picks_them_are_the_same(name: str, k: int) -> None:
    logits = CASES[name](torch.Generator().manual_seed(k), 9, 97)
    for row, ids in zip(logits.numpy(), reference.best_ids_by_keys(logits, k).numpy(), strict=True):
        assert sorted(ids.tolist()) == sorted(by_value_then_id(row)[:k].tolist())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_shards_merge_to_the_selection_of_the_whole_row(name: str, shards: int) -> None:
    logits = CASES[name](torch.Generator().manual_seed(shards), 7, 128)
    width = 128 // shards
    parts = [logits[:, s * width : (s + 1) * width] for s in range(shards)]
    tops = [reference.top_of_shard(part, 20) for part in parts]
    values, ids = reference.top_of_all(
        torch.stack([v for v, _ in tops]), torch.stack([i + s * width for s, (_, i) in enumerate(tops)]), 20
    )
    whole_values, whole_ids = reference.top_of_shard(logits, 20)
    assert torch.equal(ids, whole_ids) and torch.equal(values, whole_values)
    bests = [reference.best_of_shard(part) for part in parts]
    score, token = reference.best_of_all(
        torch.stack([v for v, _ in bests]), torch.stack([i + s * width for s, (_, i) in enumerate(bests)])
    )
    assert torch.equal(token, whole_ids[:, 0]) and torch.equal(score, whole_values[:, 0])


def kept(logits: list[float], *, t: float = 1.0, k: int = 0, p: float = 1.0, min_p: float = 0.0) -> int:
    t_1, p_1, min_p_1 = (torch.tensor([x], dtype=torch.float64) for x in (t, p, min_p))
    return int(reference.kept_prefix(torch.tensor([logits]), t_1, torch.tensor([k]), p_1, min_p_1))


def test_kept_prefix_on_numbers_to_check_by_hand() -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8: every mass is exact in binary up to rounding of the logs."""
    logits = [float(np.float32(np.log(x))) for x in (0.5, 0.25, 0.125, 0.125)]
    assert kept(logits) == 4
    assert [kept(logits, k=k) for k in (1, 2, 3, 4, 9)] == [1, 2, 3, 4, 4]
    masses = (0.0, 0.3, 0.49, 0.51, 0.74, 0.76, 0.874, 0.876, 0.999)
    assert [kept(logits, p=p) for p in masses] == [1, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [kept(logits, min_p=m) for m in (0.0, 0.24, 0.26, 0.49, 0.51, 1.0)] == [4, 4, 2, 2, 1, 1]
    assert kept(logits, k=2, p=0.66) == 1, "top_p works on what top_k left: 1/2 of 3/4 is 2/3"
    assert kept(logits, k=2, p=0.67) == 2
    assert kept(logits, t=0.5, min_p=0.2) == 2, "temperature comes first: ratios 1, 1/4, 1/16"


def test_mass_exactly_at_p_needs_no_further_token() -> None:
    """Equal logits have masses that float64 holds exactly: 1/4, 2/4, 3/4."""
    assert [kept([0.0] * 4, p=p) for p in (0.25, 0.5, 0.75)] == [1, 2, 3]
    assert [kept([0.0] * 4, p=float(np.nextafter(p, 1))) for p in (0.25, 0.5, 0.75)] == [2, 3, 4]
    assert kept([0.0, 0.0, -1.0], min_p=1.0) == 2


def test_extreme_temperatures_keep_numbers_finite() -> None:
    assert kept([1.0, 0.999, -50.0], t=1e-30, p=0.999) == 1
    assert kept([1.0, 1.0, -50.0], t=1e-30, p=0.9) == 2
    assert kept([1.0, 0.0, -50.0], t=1e6, p=0.9) == 3
    assert kept([3.0, float("-inf"), float("-inf")], p=0.9) == 1


@pytest.mark.parametrize("name", CASES)
def test_trailing_candidates_do_not_change_a_top_k_row(name: str) -> None:
    logits, _ = reference.top_of_shard(CASES[name](torch.Generator().manual_seed(5), 8, 640), 640)
    ones = torch.ones(8)
    arguments = (ones * 0.8, torch.full((8,), 20), ones * 0.93, ones * 0.001)
    narrow = reference.kept_prefix(logits[:, :20].contiguous(), *arguments)
    assert torch.equal(narrow, reference.kept_prefix(logits, *arguments))


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"), [(1.0, 0.5, 0.0), (1.0, 0.0, -0.7), (1.3, 0.0, 0.0), (0.8, -1.5, 0.9)]
)
def test_penalties_follow_their_formulas(repetition: float, presence: float, frequency: float) -> None:
    row = torch.randn(50, generator=torch.Generator().manual_seed(1))
    ids, counts = torch.tensor([3, 4, 10, 49]), torch.tensor([0.0, 1.0, 5.0, 2.0])
    expected = row.double().numpy().copy()
    for i, count in zip(ids.tolist(), counts.tolist(), strict=True):
        expected[i] = expected[i] / repetition if expected[i] > 0 else expected[i] * repetition
        expected[i] -= presence * (count > 0) + frequency * count
    untouched = [i for i in range(50) if i not in ids.tolist()]
    before = row.clone()
    reference.apply_penalties(row, ids, counts, repetition=repetition, presence=presence, frequency=frequency)
    assert np.abs(row.double().numpy() - expected).max() < 1e-5
    assert torch.equal(row[untouched], before[untouched])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_log_sum_exp_over_shards(name: str, shards: int) -> None:
    logits = CASES[name](torch.Generator().manual_seed(3), ROW_MULTIPLE, 1000)
    parts = [reference.log_sum_exp_parts(part.contiguous()) for part in logits.chunk(shards, -1)]
    lse = reference.combine_log_sum_exp(torch.stack([m for m, _ in parts]), torch.stack([s for _, s in parts]))
    expected = torch.logsumexp(logits.double(), -1)
    assert (lse - expected).abs().max() < 2e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_finite_rows_finds_one_bad_logit(bad: float) -> None:
    logits = torch.randn(5, 70, generator=torch.Generator().manual_seed(2))
    logits[3, 69] = bad
    assert reference.finite_rows(logits).tolist() == [True, True, True, False, True]


def test_a_sum_that_overflows_is_not_taken_for_a_bad_logit() -> None:
    assert reference.finite_rows(torch.full((2, 64), 3e38)).tolist() == [True, True]
