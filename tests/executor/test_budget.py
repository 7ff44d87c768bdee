"""What a worker may use, and refusals of what does not fit: one line, with the way out."""

from __future__ import annotations

import pytest

from rocm_serve.errors import UserError
from rocm_serve.executor import budget
from rocm_serve.executor.budget import bytes_for_caches, cpu_memory
from tests.executor.wishes import resolved


def test_a_model_that_does_not_fit_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"rank 3 may use 1 GB .* weights take 900 MB and one step up to 200 MB") as e:
        bytes_for_caches(3, 10**9, 900 * 10**6, 200 * 10**6)
    assert "\n" not in str(e.value)
    assert bytes_for_caches(0, 100, 60, 30) == 10


def test_what_others_hold_of_a_gpu_is_said_instead_of_a_negative_budget() -> None:
    total, free = 150 * 10**9, 12 * 10**9
    allowed = budget.gpu_memory(total, free, resolved(mem_fraction=0.9))
    assert allowed == -3 * 10**9
    words = (
        r"rank 0 may use 0 bytes \(--mem-fraction\) beside 138 GB of its GPU that are in use already, but its weights"
        r" take 20 GB and one step up to 1 GB; without those it might use 135 GB: end what holds them"
    )
    with pytest.raises(UserError, match=words):
        bytes_for_caches(0, allowed, 20 * 10**9, 10**9, held=total - free)


def test_a_model_that_would_not_fit_an_idle_gpu_is_not_blamed_on_others() -> None:
    with pytest.raises(UserError, match=r"may use 134 GB .* beside 1 GB of its GPU .*; raise --mem-fraction, --tp"):
        bytes_for_caches(0, 134 * 10**9, 140 * 10**9, 10**9, held=10**9)


def test_workers_of_a_host_share_its_free_memory() -> None:
    assert cpu_memory(8000, resolved(mem_fraction=0.5)) == 4000
    assert cpu_memory(8000, resolved(mem_fraction=0.5, tp=2, pp=2)) == 1000


def test_weights_that_fit_but_cannot_be_laid_out_are_refused_with_the_way_out() -> None:
    budget.check_preparation(1, allowed=1000, weights=900, preparing=100)
    budget.check_preparation(1, allowed=800, weights=900, preparing=0)  # bytes_for_caches says that
    with pytest.raises(UserError, match="rank 1 may use 1 KB .* 900 bytes, .* 101 bytes more .*--op OP=reference"):
        budget.check_preparation(1, allowed=1000, weights=900, preparing=101)
