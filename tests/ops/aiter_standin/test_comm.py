"""AITER's sums over ranks against the plain composition, on simulated ranks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rocm_serve.errors import UserError
from rocm_serve.ops.comm.choice import summing
from rocm_serve.ops.comm.reference import all_reduce_add_rms_norm
from rocm_serve.parallel.comm import CountingComm, GlooComm, ThreadComm, run_ranks
from rocm_serve.platform.aiter_abi import NEEDS
from tests.ops.aiter_standin.conftest import Install
from tests.ops.aiter_standin.package import releases

BF16 = torch.bfloat16


def rank_inputs(rank: int, shape: tuple[int, int], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return this rank's addend, and the stream and the weight that all ranks share."""
    own, shared = torch.Generator().manual_seed(seed + 1 + rank), torch.Generator().manual_seed(seed)
    x, stream = (torch.randn(shape, generator=g).to(BF16) for g in (own, shared))
    return x, stream, (torch.randn(shape[1], generator=shared) * 0.3).to(BF16)


def on_ranks(size: int, body: Callable[[Any, CountingComm], Any], **options: Any) -> list[Any]:
    """Run `body` with an AiterComm and the comm inside it, which counts what AITER did not take."""
    aiter_comm = importlib.import_module("rocm_serve.ops.comm.aiter").AiterComm

    def one(rank: ThreadComm) -> Any:
        inner = CountingComm(rank)
        return body(aiter_comm(inner, rank, torch.device("cpu"), **options), inner)

    return run_ranks(size, one)


@pytest.mark.parametrize("release", releases()[1:])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_sums_are_aiters_and_the_same_on_every_rank(install: Install, release: str, size: int) -> None:
    install(release)

    def body(comm: Any, inner: CountingComm) -> tuple[torch.Tensor, int]:
        return comm.all_reduce(rank_inputs(comm.rank, (5, 64), 3)[0]), inner.calls.total()

    results = on_ranks(size, body)
    exact = sum(rank_inputs(rank, (5, 64), 3)[0].double() for rank in range(size))
    for total, taken_by_inner in results:
        assert taken_by_inner == 0
        assert torch.equal(total, results[0][0])
        assert (total.double() - exact).norm() / exact.norm() < 4e-3


@pytest.mark.parametrize(
    ("shape", "options"),
    [((3, 1), {}), ((0, 64), {}), ((9, 64), {"max_bytes": 1024})],
    ids=["not a multiple of 16 bytes", "no rows", "larger than its buffers"],
)
def test_what_aiter_does_not_sum_goes_to_the_comm_inside(
    install: Install, shape: tuple[int, int], options: dict[str, int]
) -> None:
    install(releases()[-1])

    def body(comm: Any, inner: CountingComm) -> tuple[torch.Tensor, int]:
        return comm.all_reduce(rank_inputs(comm.rank, shape, 4)[0]), inner.calls["all_reduce"]

    for total, calls in on_ranks(2, body, **options):
        assert calls == 1 and total.shape == shape


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize(("size", "fused"), [(2, True), (4, True), (6, False), (8, True)])
def test_the_sum_with_the_norm_is_the_composition(install: Install, size: int, fused: bool, plus_one: bool) -> None:
    install(releases()[1])
    how: dict[str, Any] = {"eps": 1e-5, "plus_one": plus_one}

    def by_aiter(comm: Any, inner: CountingComm) -> tuple[torch.Tensor, torch.Tensor]:
        x, stream, weight = rank_inputs(comm.rank, (7, 128), 5)
        return comm.all_reduce_add_rms_norm(x, stream, weight, **how), stream

    def plain(comm: ThreadComm) -> tuple[torch.Tensor, torch.Tensor]:
        x, stream, weight = rank_inputs(comm.rank, (7, 128), 5)
        return all_reduce_add_rms_norm(comm, x, stream, weight, **how), stream

    calls: list[set[str]] = []
    custom = importlib.import_module("aiter.dist.device_communicators.custom_all_reduce").CustomAllreduce
    whole = custom.custom_fused_ar_rms
    custom.custom_fused_ar_rms = lambda *args, **kwargs: calls.append(set(kwargs)) or whole(*args, **kwargs)
    got, expected = on_ranks(size, by_aiter), run_ranks(size, plain)
    needs = {need.function: set(need.passes) for need in NEEDS["all_reduce"]}
    assert calls == [needs["CustomAllreduce.custom_fused_ar_rms"]] * (size if fused else 0)
    for (y, stream), (y_plain, stream_plain) in zip(got, expected, strict=True):
        for a, b in ((y, y_plain), (stream, stream_plain)):
            assert (a.double() - b.double()).norm() / b.double().norm() < 4e-3


def test_gathers_go_to_the_comm_inside(install: Install) -> None:
    install(releases()[-1])
    gathered = on_ranks(2, lambda comm, inner: comm.all_gather(torch.full((3,), float(comm.rank))))
    assert all(torch.equal(x, torch.tensor([[0.0] * 3, [1.0] * 3])) for x in gathered)


def test_a_number_of_ranks_without_a_kernel_is_refused_with_the_legal_ones(install: Install) -> None:
    install(releases()[-1])
    with pytest.raises(UserError, match=r"no custom all-reduce for 3 of these GPUs \(2, 4, 6 or 8"):
        on_ranks(3, lambda comm, inner: None)


class Host(GlooComm):
    """Simulated ranks are their own group of processes."""

    def __init__(self, rank: ThreadComm) -> None:
        self.rank, self.size = rank.rank, rank.size
        self.group: Any = rank


def chosen(name: str, size: int = 2) -> list[Any]:
    def one(rank: ThreadComm) -> Any:
        comm = summing(name, rank, Host(rank), torch.device("cpu"))
        return type(comm).__name__, comm.all_reduce(torch.full((8,), 1.0 + rank.rank, dtype=BF16)).tolist()

    return run_ranks(size, one)


def test_aiter_sums_where_it_was_asked_for_and_the_library_elsewhere(install: Install) -> None:
    install(releases()[-1])
    assert chosen("aiter") == [("AiterComm", [3.0] * 8)] * 2
    assert chosen("library") == [("ThreadComm", [3.0] * 8)] * 2
    assert chosen("aiter", size=1) == [("ThreadComm", [1.0] * 8)], "one rank has nothing to sum"


@pytest.mark.parametrize(
    ("release", "why"),
    [(None, "is not installed; .*"), (releases()[0], ".*gemma_norm.*")],
    ids=["none", "too old"],
)
def test_an_aiter_that_cannot_sum_is_refused(install: Install, release: str | None, why: str) -> None:
    if release is not None:
        install(release)
    with pytest.raises(UserError, match=f"--all-reduce aiter: aiter {why}; legal: library"):
        chosen("aiter")


def test_an_aiter_that_cannot_be_imported_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(releases()[-1])
    monkeypatch.setitem(sys.modules, "rocm_serve.ops.comm.aiter", None)
    with pytest.raises(UserError, match="importing it fails: ModuleNotFoundError: .*; legal: library"):
        chosen("aiter")
