"""What MORI takes in silence and the stand-in refuses: naive code runs into each, the exchange does not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_serve.errors import UserError
from rocm_serve.parallel.comm import SoloComm, ThreadComm, run_ranks
from rocm_serve.parallel.exchange.make import Exchanges
from rocm_serve.parallel.exchange.mori import MoriSetup, MoriWorld
from rocm_serve.parallel.exchange.mori_limits import check_heap
from tests.parallel.dense import Batch, build, draw, make_layer, quantised, spec_of
from tests.parallel.fake_mori import ContractError
from tests.parallel.mori_package import installed, write_package

LAYER = make_layer(6)
LAUNCH = {"block_num": 80, "rdma_block_num": 0, "warp_per_block": 16}


@pytest.fixture
def mori(tmp_path: Path) -> Iterator[Path]:
    with installed(tmp_path) as folder:
        yield folder


@contextmanager
def started(comm: ThreadComm, *, fp8: bool = False) -> Iterator[Any]:
    """An op as naive code would have one: built for 64 rows of a rank."""
    spec = spec_of("mori", comm.size, fp8=fp8)
    world = MoriWorld(MoriSetup(comm, gpus_per_node=8, compute_units=304), [spec])
    yield world.build(spec)[0][1]
    world.close()


def own(comm: ThreadComm, n: int = 4) -> Batch:
    return draw(n, seed=400 + comm.rank)


Naive = Callable[[Any, Batch], Any]


def refused(naive: Naive, *, fp8: bool = False) -> list[str]:
    """Run naive code on two ranks; return what the stand-in said to each."""

    def body(comm: ThreadComm) -> str:
        with started(comm, fp8=fp8) as op:
            try:
                naive(op, own(comm))
            except (ContractError, ValueError) as error:
                return str(error)
            return "nothing"

    return run_ranks(2, body)


def dispatched(op: Any, batch: Batch) -> Any:
    return op.dispatch(batch.x, batch.weights, None, batch.ids, **LAUNCH)


def naive_with_int64_ids(op: Any, batch: Batch) -> None:
    op.dispatch(batch.x, batch.weights, None, batch.ids.long(), **LAUNCH)


def naive_beyond_the_capacity(op: Any, batch: Batch) -> None:
    more = draw(65, seed=1)
    op.dispatch(more.x, more.weights, None, more.ids, **LAUNCH)


def naive_with_scales_of_another_width(op: Any, batch: Batch) -> None:
    op.dispatch(batch.x, batch.weights, torch.ones(4, 2), batch.ids, **LAUNCH)


def naive_by_position(op: Any, batch: Batch) -> None:
    op.dispatch(batch.x, batch.weights, None, batch.ids, 80, 16)


def naive_combine_by_position(op: Any, batch: Batch) -> None:
    rows = dispatched(op, batch)[0]
    op.combine(rows, None, batch.ids, 80, 16)


def naive_with_the_grid_of_the_configuration(op: Any, batch: Batch) -> None:
    op.dispatch(batch.x, batch.weights, None, batch.ids)


def naive_with_the_returned_ids(op: Any, batch: Batch) -> None:
    rows, _, _, ids, _ = dispatched(op, batch)
    op.combine(rows, None, ids, **LAUNCH)


def naive_with_other_ids_of_the_same_number(op: Any, batch: Batch) -> None:
    rows, _, _, ids, _ = dispatched(op, batch)
    op.combine(rows, None, ids[:4].flip(0), **LAUNCH)


def naive_with_two_batches_in_flight(op: Any, batch: Batch) -> None:
    dispatched(op, batch)
    dispatched(op, batch)


def naive_combine_twice(op: Any, batch: Batch) -> None:
    rows = dispatched(op, batch)[0]
    op.combine(rows, None, batch.ids, **LAUNCH)
    op.combine(rows, None, batch.ids, **LAUNCH)


def naive_with_trimmed_rows(op: Any, batch: Batch) -> None:
    rows, _, _, _, count = dispatched(op, batch)
    op.combine(rows[: int(count) - 1].contiguous(), None, batch.ids, **LAUNCH)


def naive_with_strided_rows(op: Any, batch: Batch) -> None:
    op.dispatch(batch.x.t().contiguous().t(), batch.weights, None, batch.ids, **LAUNCH)


@pytest.mark.parametrize(
    ("naive", "words"),
    [
        (naive_with_int64_ids, "indices of torch.int64"),
        (naive_beyond_the_capacity, "65 rows over max_num_inp_token_per_rank"),
        (naive_with_scales_of_another_width, "2 scales a row, built for 0"),
        (naive_by_position, "dispatch: launch arguments by position"),
        (naive_combine_by_position, "combine: launch arguments by position"),
        (naive_with_the_grid_of_the_configuration, "256 blocks"),
        (naive_with_the_returned_ids, "128 rows of indices, dispatch had 4"),
        (naive_with_other_ids_of_the_same_number, "not the routing that this rank gave"),
        (naive_with_two_batches_in_flight, "dispatch while a dispatch has not been combined"),
        (naive_combine_twice, "combine without a dispatch"),
        (naive_with_trimmed_rows, "fewer rows than came"),
        (naive_with_strided_rows, "not contiguous"),
    ],
)
def test_naive_code_is_refused(mori: Path, naive: Naive, words: str) -> None:
    for said in refused(naive):
        assert words in said


def test_rows_without_their_scales_are_refused(mori: Path) -> None:
    for said in refused(dispatched, fp8=True):
        assert "0 scales a row, built for 2" in said


def through(comm: ThreadComm, batch: Batch, *, fp8: bool = False) -> torch.Tensor:
    """Bring a rank's rows to experts and home by our exchange."""
    spec = spec_of("mori", comm.size, fp8=fp8)
    exchange = build(spec, comm).of(spec)
    rows, scales = quantised(batch.x) if fp8 else (batch.x, None)
    sent = exchange.dispatch(rows, scales, batch.ids, batch.weights, len(batch.x))
    return exchange.combine(LAYER.held(comm, comm.size, sent), sent)


def error_of(out: torch.Tensor, batch: Batch) -> float:
    return float((out.double() - LAYER.whole(batch.x, batch.ids, batch.weights)).abs().max())


def test_the_exchange_takes_int64_ids_and_strided_rows(mori: Path) -> None:
    def body(comm: ThreadComm) -> float:
        batch = own(comm)
        strided = batch.x.t().contiguous().t()
        return error_of(through(comm, Batch(strided, batch.ids.long(), batch.weights)), batch)

    assert max(run_ranks(2, body)) < 2e-6


def test_the_exchange_refuses_a_second_batch_in_flight_and_goes_on(mori: Path) -> None:
    def body(comm: ThreadComm) -> float:
        spec, batch = spec_of("mori", 2), own(comm)
        exchange = build(spec, comm).of(spec)
        sent = exchange.dispatch(batch.x, None, batch.ids, batch.weights, 4)
        with pytest.raises(RuntimeError, match="dispatch before are not combined"):
            exchange.dispatch(batch.x, None, batch.ids, batch.weights, 4)
        return error_of(exchange.combine(LAYER.held(comm, 2, sent), sent), batch)

    assert max(run_ranks(2, body)) < 2e-6


def test_what_came_home_stays_when_the_next_batch_comes(mori: Path) -> None:
    """MORI returns its own memory; naive code that keeps it finds the next batch there."""

    def naive(comm: ThreadComm) -> bool:
        with started(comm) as op:
            kept = []
            for seed in (1, 2):
                batch = draw(4, seed=seed)
                rows = dispatched(op, batch)[0]
                kept.append(op.combine(rows.clone(), None, batch.ids, **LAUNCH)[0][:4])
            return torch.equal(kept[0], kept[1])

    def ours(comm: ThreadComm) -> float:
        spec, errors = spec_of("mori", 2), []
        exchange = build(spec, comm).of(spec)
        batches, outs = [draw(4, seed=1 + comm.rank), draw(3, seed=5 + comm.rank)], []
        for batch in batches:
            sent = exchange.dispatch(batch.x, None, batch.ids, batch.weights, len(batch.x))
            outs.append(exchange.combine(LAYER.held(comm, 2, sent), sent))
        errors = [error_of(out, batch) for out, batch in zip(outs, batches, strict=True)]
        return max(errors)

    assert all(run_ranks(2, naive))
    assert max(run_ranks(2, ours)) < 2e-6


def test_rows_behind_the_count_are_marked_as_held_nowhere(mori: Path) -> None:
    """Their ids are left over from earlier batches and would name experts of this rank."""

    def body(comm: ThreadComm) -> bool:
        batch, spec = own(comm), spec_of("mori", 2)
        with started(comm) as op:
            _, _, _, ids, count = dispatched(op, batch)
            naive = bool((ids[int(count) :] // 16 == comm.rank).all())
        exchange = build(spec, comm).of(spec)
        sent = exchange.dispatch(batch.x, None, batch.ids, batch.weights, 4)
        assert int(sent.count) < len(sent.ids)
        return naive and bool((sent.ids[int(sent.count) :] == -1).all())

    assert all(run_ranks(2, body))


@pytest.mark.parametrize("setting", [None, "512M"])
def test_a_heap_that_is_too_small_is_refused_before_mori_is_started(mori: Path, setting: str | None) -> None:
    spec = spec_of("mori", 1, capacity=1 << 22 if setting is None else 1 << 19)
    environ = {} if setting is None else {"MORI_SHMEM_HEAP_SIZE": setting}
    said = "MORI_SHMEM_HEAP_SIZE is not set and MORI's own is 4G" if setting is None else "MORI_SHMEM_HEAP_SIZE is 512M"
    setup = MoriSetup(SoloComm(), gpus_per_node=8, compute_units=304, environ=environ)
    with pytest.raises(UserError, match=f"GiB of MORI's heap: {said}; set MORI_SHMEM_HEAP_SIZE=[0-9]+G in the"):
        Exchanges([spec], SoloComm(), row_multiple=1, mori=setup)
    assert "mori.shmem" not in sys.modules


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("MORI_EP_LAUNCH_CONFIG_MODE", "AUTO", "MANUAL"),
        ("MORI_EP_COMM", "cco", "shmem"),
        ("MORI_SHMEM_MODE", "static", "static_heap, vmm_heap"),
    ],
)
def test_a_setting_that_breaks_it_in_silence_is_refused(mori: Path, name: str, value: str, legal: str) -> None:
    def built(value: str) -> None:
        setup = MoriSetup(SoloComm(), gpus_per_node=8, compute_units=304, environ={name: value})
        Exchanges([spec_of("mori", 1)], SoloComm(), row_multiple=1, mori=setup).close()

    with pytest.raises(UserError, match=f"--expert-exchange mori with {name}={value}; legal: {legal}, or unset"):
        built(value)
    built(legal.split(", ")[0])
    built("")


def test_a_larger_default_heap_is_known() -> None:
    check_heap(10 << 30, None, "vmm_heap")
    with pytest.raises(UserError, match="MORI's own is 16G; set MORI_SHMEM_HEAP_SIZE=17G"):
        check_heap(17 << 30, None, "vmm_heap")


@pytest.mark.parametrize(
    ("where", "raises"),
    [
        ("shmem_init_attr", "FileNotFoundError('hipcc not found')"),
        ("EpDispatchCombineOp", "RuntimeError(\"[mori] Kernel 'ep_intranode' not compiled\")"),
    ],
)
def test_a_host_that_cannot_compile_is_told_so(mori: Path, where: str, raises: str) -> None:
    place = mori / ("shmem" if where == "shmem_init_attr" else "ops") / "__init__.py"
    text = place.read_text(encoding="utf-8")
    place.write_text(f"{text}\ndef {where}(**given):\n    raise {raises}\n", encoding="utf-8")
    with pytest.raises(UserError, match="MORI could not compile its kernels .*hipcc"):
        solo()


def test_other_errors_of_mori_pass_through(mori: Path) -> None:
    place = mori / "ops" / "__init__.py"
    text = place.read_text(encoding="utf-8")
    place.write_text(f"{text}\ndef EpDispatchCombineOp(**given):\n    raise RuntimeError('odd')\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match="^odd$"):
        solo()


def solo(spec_name: str = "mori") -> Exchanges:
    return build(spec_of(spec_name, 1), SoloComm())


def test_a_mori_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UserError, match="--expert-exchange mori: mori is not installed; install amd-mori 1.2.4 or"):
        solo()


def test_an_old_mori_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    with (
        installed(tmp_path, "1.0.0"),
        pytest.raises(
            UserError, match="EpDispatchCombineConfig has no field max_total_recv_tokens, so it checks neither"
        ),
    ):
        solo()


@pytest.mark.parametrize(
    ("raises", "words"),
    [
        (
            "OSError('libpci.so.3: cannot open shared object file: No such file or directory')",
            r"libpci\.so\.3.*: install libpci3",
        ),
        ("OSError('libamdhip64.so.7: cannot open shared object file')", "install ROCm 7"),
        ("ImportError('cannot import name cpp')", "cannot import name cpp.*: it needs ROCm's libraries and libpci"),
        ("OSError('libodd.so: no such file')", "libodd.*: it needs ROCm's libraries"),
    ],
)
def test_a_mori_that_does_not_load_is_told_with_the_library_that_is_missing(
    tmp_path: Path, raises: str, words: str
) -> None:
    """Without ROCm its import raises OSError, which `except ImportError` lets through."""
    with installed(tmp_path) as folder:
        (folder / "ops" / "__init__.py").write_text(f"raise {raises}\n", encoding="utf-8")
        with pytest.raises(UserError, match=f"mori is installed but does not load .*{words}"):
            solo()


def test_what_is_built_is_what_was_asked_for(mori: Path) -> None:
    def body(comm: ThreadComm) -> list[Any]:
        specs = [spec_of("mori", 4, fp8=True, dtype=torch.bfloat16, capacity=512), spec_of("mori", 4)]
        world = MoriWorld(MoriSetup(comm, gpus_per_node=2, compute_units=80), specs)
        return [op.config for spec in specs for _, op in world.build(spec)]

    few, many, plain = run_ranks(4, body)[3]
    assert (few.kernel_type.name, many.kernel_type.name) == ("InterNodeV1LL", "InterNodeV1")
    assert (few.max_num_inp_token_per_rank, many.max_num_inp_token_per_rank) == (256, 512)
    assert (many.scale_dim, many.scale_type_size, many.max_token_type_size) == (2, 4, 2)
    assert (plain.scale_dim, plain.scale_type_size, plain.max_token_type_size) == (0, 0, 4)
    assert (many.rank, many.world_size, many.num_experts_per_rank, many.num_experts_per_token) == (3, 4, 8, 10)
    assert (many.gpu_per_node, many.hidden_dim, many.quant_type, many.use_external_inp_buf) == (2, 256, "none", True)
    assert many.rdma_block_num < many.block_num <= 80


@pytest.mark.parametrize("n", [3, 260])
def test_a_group_that_spans_nodes_takes_the_kernel_for_its_number_of_rows(mori: Path, n: int) -> None:
    """One rank may have few rows where another has many: all must launch the same kernel."""
    spec = spec_of("mori", 2, capacity=320)

    def body(comm: ThreadComm) -> tuple[float, str]:
        setup = MoriSetup(comm, gpus_per_node=1, compute_units=304)
        exchange = Exchanges([spec], comm, row_multiple=1, mori=setup).of(spec)
        live = n if comm.rank == 0 else 2
        batch = draw(n, seed=410 + comm.rank)
        sent = exchange.dispatch(batch.x, None, batch.ids, batch.weights, live)
        kernel = sent.context.shape.kernel  # type: ignore[attr-defined]
        out = exchange.combine(LAYER.held(comm, 2, sent), sent)
        assert not out[live:].any()
        return error_of(out[:live], batch.rows(slice(0, live))), kernel

    results = run_ranks(2, body)
    assert max(error for error, _ in results) < 2e-6
    assert {kernel for _, kernel in results} == {"InterNodeV1LL" if n <= 256 else "InterNodeV1"}


def test_shared_memory_is_given_back(mori: Path) -> None:
    """A second model in the same process starts it again, which the stand-in refuses while it is in use."""
    for _ in range(2):
        exchanges = solo()
        with pytest.raises(ContractError, match="started already"):
            solo()
        exchanges.close()


def test_the_package_imports_nothing_by_being_written(tmp_path: Path) -> None:
    write_package(tmp_path)
    assert "mori" not in sys.modules
