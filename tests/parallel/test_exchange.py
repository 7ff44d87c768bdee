"""Every exchange against a dense layer in float64, on simulated ranks: whose rows go where, and what comes home."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rocm_serve.errors import UserError
from rocm_serve.parallel.comm import Comm, CountingComm, SoloComm, ThreadComm, run_ranks
from rocm_serve.parallel.exchange.contract import Dispatched
from rocm_serve.parallel.exchange.make import make_exchange
from tests.parallel.dense import (
    Batch,
    E,
    H,
    K,
    build,
    dequantised,
    draw,
    make_layer,
    padded,
    quantised,
    spec_of,
    step,
)
from tests.parallel.mori_package import installed

NAMES = ["local", "torch", "all_gather", "mori"]
SENDERS = NAMES[1:]
DEGREES = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]  # t, ep
CELLS = [(name, t, ep) for name in NAMES for t, ep in DEGREES if name != "mori" or t == ep]
FULL = [(name, 4, 4) for name in SENDERS]
LAYER = make_layer(5)


@pytest.fixture(autouse=True, scope="module")
def mori(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with installed(tmp_path_factory.mktemp("mori")) as folder:
        yield folder


def run_step(
    name: str, t: int, ep: int, batch: Batch, count: int | torch.Tensor, *, fp8: bool = False, multiple: int = 1
) -> list[torch.Tensor]:
    """Run a layer's step on simulated ranks; return what each has in the end."""
    spec = spec_of(name, ep, fp8=fp8, dtype=batch.x.dtype)

    def body(comm: ThreadComm) -> torch.Tensor:
        exchanges = build(spec, comm, row_multiple=multiple)
        out = step(exchanges.of(spec), comm, LAYER, batch, count, ep, fp8=fp8)
        exchanges.close()
        return out

    return run_ranks(t, body)


def error_of(out: torch.Tensor, batch: Batch) -> float:
    expected = LAYER.whole(batch.x, batch.ids, batch.weights)
    return float((out.double() - expected).abs().max()) if out.numel() else 0.0


@pytest.mark.parametrize("n", [0, 1, 3, 13])
@pytest.mark.parametrize(("name", "t", "ep"), CELLS)
def test_a_step_equals_the_dense_layer(name: str, t: int, ep: int, n: int) -> None:
    """Steps with fewer rows than ranks included, and padding that must not be seen."""
    batch = draw(n, seed=100 + n)
    for out in run_step(name, t, ep, padded(batch, n + 3), n, multiple=4):
        assert out.shape == (n + 3, H)
        assert error_of(out[:n], batch) < 2e-6
        assert name == "local" or not out[n:].any()


@pytest.mark.parametrize(("name", "t", "ep"), [cell for cell in CELLS if cell[0] in ("all_gather", "mori")])
def test_a_number_of_rows_that_only_the_device_knows(name: str, t: int, ep: int) -> None:
    for n in (0, 5, 8):
        batch = draw(n, seed=200 + n)
        for out in run_step(name, t, ep, padded(batch, 8), torch.tensor(n)):
            assert error_of(out[:n], batch) < 2e-6
            assert not out[n:].any(), "padding comes home as zeros"


@pytest.mark.parametrize(("name", "t", "ep"), CELLS)
@pytest.mark.parametrize("first", [0, E // 2])
def test_all_rows_choose_the_experts_of_few_ranks(name: str, t: int, ep: int, first: int) -> None:
    batch = draw(11, seed=first, experts=slice(first, first + K))
    for out in run_step(name, t, ep, batch, 11):
        assert error_of(out, batch) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("t", "ep"), [(2, 1), (4, 2), (4, 4)])
def test_all_exchanges_give_the_same_bits(t: int, ep: int, dtype: torch.dtype) -> None:
    """They add the same partial sums in the same order and round once."""
    batch = draw(9, seed=7, dtype=dtype)
    expected = run_step("local", t, ep, batch, 9)[0]
    for name in ("torch", "all_gather"):
        for out in run_step(name, t, ep, batch, 9):
            assert torch.equal(out, expected), name


@pytest.mark.parametrize("name", ["torch", "all_gather"])
def test_the_bits_of_a_row_do_not_depend_on_its_batch_mates(name: str) -> None:
    batch = draw(14, seed=8, dtype=torch.bfloat16)
    whole = run_step(name, 4, 4, batch, 14)[0]
    for rows in (slice(0, 1), slice(5, 12), slice(13, 14)):
        alone = run_step(name, 4, 4, batch.rows(rows), rows.stop - rows.start)[0]
        assert torch.equal(alone, whole[rows])


@pytest.mark.parametrize(("name", "t", "ep"), FULL + [("torch", 4, 2), ("all_gather", 4, 1)])
def test_ranks_with_rows_of_their_own(name: str, t: int, ep: int) -> None:
    """Uneven numbers of rows, none on one rank, choices beyond the slots and below zero."""
    spec, numbers = spec_of(name, ep), [5, 0, 1, 7]
    batches = [draw(n, seed=300 + n) for n in numbers]
    batches[3].ids[2, 4:] = -1
    batches[3].ids[6, 1] = -7

    def body(comm: ThreadComm) -> list[torch.Tensor]:
        exchanges = build(spec, comm)
        exchange = exchanges.of(spec)
        outs = []
        for turn in range(3):
            mine = (comm.rank + turn) % t
            batch = padded(batches[mine], 8)
            sent = exchange.dispatch(batch.x, None, batch.ids, batch.weights, numbers[mine])
            outs.append(exchange.combine(LAYER.held(comm, ep, sent), sent))
        return outs

    for rank, outs in enumerate(run_ranks(t, body)):
        for turn, out in enumerate(outs):
            mine = (rank + turn) % t
            assert out.shape == (8, H) and not out[numbers[mine] :].any()
            assert error_of(out[: numbers[mine]], batches[mine]) < 2e-6


@pytest.mark.parametrize("name", SENDERS)
def test_a_row_goes_once_to_each_rank_that_holds_a_choice(name: str) -> None:
    """With an identity for experts a row comes home as many times as it was sent."""
    spec, batch = spec_of(name, 4), draw(8, seed=9)
    batch.ids[0] = torch.arange(K)  # experts 0-7 are rank 0's, 8 and 9 rank 1's
    batch.ids[1] = torch.arange(E - K, E)

    def body(comm: ThreadComm) -> tuple[torch.Tensor, Dispatched]:
        exchange = build(spec, comm).of(spec)
        own = padded(batch.rows(slice(2 * comm.rank, 2 * comm.rank + 2)), 3)
        sent = exchange.dispatch(own.x, None, own.ids, own.weights, 2)
        assert not sent.weights[: int(sent.count)].isnan().any(), "weights of padding"
        has = (sent.ids >= 0).any(dim=1, keepdim=True)
        return exchange.combine(torch.where(has, sent.rows, 0), sent)[:2], sent

    homes = torch.cat([home for home, _ in run_ranks(4, body)])
    ranks = torch.tensor([len(set((row // 8).tolist())) for row in batch.ids])[:, None]
    assert ranks[:2].flatten().tolist() == [2, 2]
    assert torch.allclose(homes, batch.x * ranks, atol=1e-5)
    for rank, (_, sent) in enumerate(run_ranks(4, body)):
        live = int(sent.count)
        assert sent.ids.dtype == torch.int32
        assert int(sent.ids.min()) >= -1 and int(sent.ids.max()) < E // 4, "slots of this rank, or -1"
        held = (batch.ids // 8 == rank).sum()
        assert (sent.ids[:live] >= 0).sum() == held, f"every choice of rank {rank} came, and once"


@pytest.mark.parametrize("name", SENDERS)
def test_padding_is_not_sent_to_experts(name: str) -> None:
    """Neither a rank's own, whether the host knows their number or the device, nor what is appended to what came."""
    spec, batch = spec_of(name, 2), padded(draw(5, seed=21), 8)

    def body(comm: ThreadComm, count: int | torch.Tensor) -> tuple[int, Dispatched]:
        exchanges = build(spec, comm, row_multiple=4)
        sent = exchanges.of(spec).dispatch(batch.x, None, batch.ids, batch.weights, count)
        exchanges.close()
        return int((sent.ids >= 0).sum()), sent

    for count in (5, torch.tensor(5)):
        results = run_ranks(2, lambda comm, count=count: body(comm, count))
        assert sum(choices for choices, _ in results) == 2 * 5 * K
        for _, sent in results:
            assert len(sent.rows) % 4 == 0 and (sent.ids[int(sent.count) :] == -1).all()
            assert name == "mori" or not sent.rows[int(sent.count) :].any()


def test_a_row_without_a_choice_goes_nowhere() -> None:
    spec, batch = spec_of("torch", 2), draw(3, seed=19)
    batch.ids[0], batch.ids[1] = -3, E + 5

    def body(comm: ThreadComm) -> tuple[int, torch.Tensor]:
        exchange = build(spec, comm).of(spec)
        sent = exchange.dispatch(batch.x, None, batch.ids, batch.weights, 2)
        return int(sent.count), exchange.combine(LAYER.held(comm, 2, sent), sent)

    for count, home in run_ranks(2, body):
        assert count == 0 and home.shape == (3, H) and not home.any()


@pytest.mark.parametrize("name", SENDERS)
def test_fp8_rows_and_their_scales_come_as_they_were_sent(name: str) -> None:
    spec, batch = spec_of(name, 4, fp8=True, dtype=torch.bfloat16), draw(12, seed=10, dtype=torch.bfloat16)
    rows, scales = quantised(batch.x)
    marks = {
        bytes(row.view(torch.uint8).tolist()): bytes(s.view(torch.uint8).tolist())
        for row, s in zip(rows, scales, strict=True)
    }
    assert len(marks) == 12

    def body(comm: ThreadComm) -> int:
        exchange, mine = build(spec, comm).of(spec), slice(3 * comm.rank, 3 * comm.rank + 3)
        sent = exchange.dispatch(rows[mine], scales[mine], batch.ids[mine], batch.weights[mine], 3)
        assert sent.rows.dtype == rows.dtype and sent.scales is not None and sent.scales.dtype == torch.float32
        for row, scale in list(zip(sent.rows, sent.scales, strict=True))[: int(sent.count)]:
            assert marks[bytes(row.view(torch.uint8).tolist())] == bytes(scale.view(torch.uint8).tolist())
        return int(sent.count)

    assert all(run_ranks(4, body))


@pytest.mark.parametrize(("name", "t", "ep"), FULL + [("torch", 2, 1), ("all_gather", 4, 2), ("mori", 1, 1)])
def test_a_step_in_fp8_equals_the_dense_layer_on_quantised_rows(name: str, t: int, ep: int) -> None:
    batch = draw(10, seed=11)
    exact = Batch(dequantised(*quantised(batch.x)), batch.ids, batch.weights)
    for out in run_step(name, t, ep, batch, 10, fp8=True):
        assert error_of(out, exact) < 2e-6


@pytest.mark.parametrize("name", SENDERS)
def test_a_sum_over_ranks_after_combine_is_an_error_that_shows(name: str) -> None:
    batch = draw(8, seed=12)
    spec = spec_of(name, 4)

    def body(comm: ThreadComm) -> torch.Tensor:
        exchange = build(spec, comm).of(spec)
        assert exchange.complete
        return comm.all_reduce(step(exchange, comm, LAYER, batch, 8, 4))

    expected = LAYER.whole(batch.x, batch.ids, batch.weights)
    for out in run_ranks(4, body):
        assert float((out - expected).norm() / expected.norm()) > 2


def test_without_its_sum_over_ranks_local_is_an_error_that_shows() -> None:
    batch = draw(8, seed=13)

    def body(comm: ThreadComm) -> torch.Tensor:
        exchange = make_exchange(spec_of("local", 4), comm, row_multiple=1)
        assert not exchange.complete and not exchange.scattered
        sent = exchange.dispatch(batch.x, None, batch.ids, batch.weights, 8)
        return exchange.combine(LAYER.held(comm, 4, sent), sent)

    for out in run_ranks(4, body):
        assert error_of(out, batch) > 0.1


@pytest.mark.parametrize("name", ["torch", "all_gather"])
def test_two_batches_may_be_in_flight(name: str) -> None:
    batches, spec = [draw(4, seed=14), draw(4, seed=15)], spec_of(name, 2)

    def body(comm: ThreadComm) -> list[torch.Tensor]:
        exchange, mine = build(spec, comm).of(spec), slice(2 * comm.rank, 2 * comm.rank + 2)
        sent = [exchange.dispatch(b.x[mine], None, b.ids[mine], b.weights[mine], 2) for b in batches]
        return [exchange.combine(LAYER.held(comm, 2, one), one) for one in reversed(sent)]

    for rank, outs in enumerate(run_ranks(2, body)):
        for batch, out in zip(reversed(batches), outs, strict=True):
            assert error_of(out, batch.rows(slice(2 * rank, 2 * rank + 2))) < 2e-6


@pytest.mark.parametrize("name", SENDERS)
def test_what_an_exchange_was_not_built_for_is_refused(name: str) -> None:
    spec = spec_of(name, 1)
    exchange, batch = build(spec, SoloComm()).of(spec), draw(65, seed=16)
    with pytest.raises(ValueError, match=f"65 rows, but the exchange {name} takes 64 of a rank"):
        exchange.dispatch(batch.x, None, batch.ids, batch.weights, 65)
    with pytest.raises(ValueError, match="65 rows"):
        exchange.dispatch(batch.x, None, batch.ids, batch.weights, torch.tensor(64))
    with pytest.raises(ValueError, match="2 scales a row, but the exchange .* was built for 0"):
        exchange.dispatch(batch.x, torch.ones(65, 2), batch.ids, batch.weights, 1)
    sent = exchange.dispatch(batch.x, None, batch.ids, batch.weights, 64)
    out = exchange.combine(LAYER.held(SoloComm(), 1, sent), sent)
    assert error_of(out[:64], batch.rows(slice(0, 64))) < 2e-6 and not out[64:].any()


@pytest.mark.parametrize(
    ("name", "t", "ep", "words"),
    [
        ("torch", 4, 3, "--ep 3 does not divide the 4 tensor-parallel ranks"),
        ("local", 2, 4, "--ep 4 does not divide"),
        ("mori", 2, 1, r"mori sends rows to whole experts: --ep 2 \(= --tp\), not --ep 1"),
        ("nvshmem", 2, 2, "no expert exchange 'nvshmem'; legal: local, torch, all_gather, mori"),
    ],
)
def test_an_illegal_exchange_is_refused_in_the_users_words(name: str, t: int, ep: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        run_ranks(t, lambda comm: build(spec_of(name, ep), comm).of(spec_of(name, ep)))


def test_layers_with_equal_specs_share_an_exchange_and_others_do_not() -> None:
    main, draft = spec_of("torch", 1, fp8=True), spec_of("torch", 1)
    comm = SoloComm()
    exchanges = build(main, comm)
    assert exchanges.of(spec_of("torch", 1, fp8=True)) is exchanges.of(main)
    with pytest.raises(KeyError):
        exchanges.of(draft)


def test_a_rank_says_in_one_line_what_it_exchanges() -> None:
    assert spec_of("torch", 4, fp8=True, dtype=torch.bfloat16).describe(8) == (
        "expert exchange torch: 8 ranks, 4 x 8 expert slots, hidden 256, top-10, at most 64 rows a rank, "
        "rows sent as fp8 1x128"
    )
    assert spec_of("local", 1, dtype=torch.bfloat16).describe(1).endswith("no rows are sent")


def test_all_gather_asks_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would wait for a GPU fails here; a tensor's shape is all that the host knows."""

    def waits(*args: object, **kwargs: object) -> None:
        raise AssertionError("this waits for the device")

    def steps(comm: ThreadComm) -> torch.Tensor:
        exchange = make_exchange(spec_of("all_gather", 2), comm, row_multiple=1)
        own, live = exchange.scatter(batch.x, count)
        ids, weights = exchange.scatter(batch.ids, count)[0], exchange.scatter(batch.weights, count)[0]
        sent = exchange.dispatch(own, None, ids, weights, live)
        assert isinstance(sent.count, int)
        return exchange.gather(exchange.combine(torch.zeros_like(sent.rows), sent), 8, count)

    batch, count = draw(8, seed=18), torch.tensor(5)
    for name in ("item", "tolist", "cpu", "nonzero", "__int__", "__bool__", "__index__", "masked_select"):
        monkeypatch.setattr(torch.Tensor, name, waits)
    outs = run_ranks(2, steps)
    with pytest.raises(AssertionError, match="waits for the device"):
        int(count)
    monkeypatch.undo()
    assert all(out.shape == (8, H) for out in outs)


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize(("rows", "n"), [(32, 32), (32, 7), (32, 2), (8, 0), (0, 0), (13, 13)])
def test_shares_come_together_as_they_were(ranks: int, rows: int, n: int) -> None:
    x = torch.randn(rows, 5)
    for count, live in ((n, n), (torch.tensor(n), rows)):

        def body(comm: Comm, count: int | torch.Tensor = count) -> tuple[torch.Tensor, int, int]:
            exchange = make_exchange(spec_of("torch", 1), comm, row_multiple=4)
            own, mine = exchange.scatter(x, count)
            return exchange.gather(own, rows, count), own.shape[0], int(mine)

        results = run_ranks(ranks, body)
        assert sum(mine for _, _, mine in results) == n
        for out, size, mine in results:
            assert torch.equal(out[:live], x[:live]) and not out[live:].any()
            assert size % 4 == 0 and size >= mine and size - -(-live // ranks) < 4


def test_calls_per_step() -> None:
    """One small call for counts and one for rows: payloads are not sent one by one."""
    calls = {}
    for name in ("torch", "all_gather", "local"):
        batch, spec = draw(8, seed=17), spec_of(name, 2)

        def body(comm: ThreadComm, spec=spec, batch=batch) -> dict[str, int]:  # type: ignore[no-untyped-def]
            counting = CountingComm(comm)
            step(make_exchange(spec, counting, row_multiple=1), counting, LAYER, batch, 8, 2)
            return dict(counting.calls)

        calls[name] = run_ranks(2, body)[0]
    assert calls == {
        "torch": {"all_to_all": 3, "all_gather": 1},
        "all_gather": {"all_to_all": 1, "all_gather": 2},
        "local": {"all_reduce": 1},
    }
