"""Ranks as processes over gloo: who is in which group, and the same bits as simulated ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from rocm_serve.executor.edges import Arrival, Receiver, Sender
from rocm_serve.parallel.comm import Comm, run_ranks
from rocm_serve.parallel.groups import Groups, make_groups
from rocm_serve.parallel.mesh import Coord, Mesh
from tests.parallel.ranks import run_processes

pytestmark = pytest.mark.multirank

H = 33
MESSAGES = 9


def share(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(64, H, generator=torch.Generator().manual_seed(rank)) * 100).to(dtype)


def message(source: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * source + number)
    return torch.randn(number * 7 + 1, H, generator=generator).to(torch.bfloat16)


UNEVEN = {"a2a": torch.float32, "a2a fp8": torch.float8_e4m3fn, "a2a bool": torch.bool}


def uneven(comm: Comm, dtype: torch.dtype) -> torch.Tensor:
    """Send rank r's first rows to rank 0, so that it sends r rows to each rank: rank 0 none."""
    x = share(comm.rank)[: comm.rank * comm.size].to(dtype)
    return comm.all_to_all(x, [comm.rank] * comm.size, list(range(comm.size)))


def collectives(coord: Coord, groups: Groups) -> dict[str, object]:
    comm, x = groups.tp, share(coord.tp_rank)
    return {
        "place": (comm.rank, comm.size),
        "sum": comm.all_reduce(x).numpy(),
        "bf16": comm.all_reduce(x.bfloat16()).float().numpy(),
        "rows": comm.all_reduce(x[17:40].clone()).numpy(),
        "strided": comm.all_reduce(x.t()[3:5]).numpy(),
        "gathered": comm.all_gather(x[:3]).numpy(),
        "ids": comm.all_gather(torch.tensor([coord.tp_rank, 1 << 40])).numpy(),
        "empty": comm.all_reduce(x[:0]).shape,
        "bytes": comm.all_gather(x[:2].to(torch.float8_e4m3fn)).float().numpy(),
        **{name: uneven(comm, kind).float().numpy() for name, kind in UNEVEN.items()},
        "none": comm.all_to_all(x[:0], [0] * comm.size, [0] * comm.size).shape,
        "host": groups.host is comm,
        "input": x.numpy(),
    }


def pipeline(coord: Coord, groups: Groups) -> dict[str, object]:
    """The first stage sends its messages, every later one passes on what it got; the last returns it.

    Behind each message the last one sends tokens to the first, which asks for them when the message has left.
    """
    assert (groups.from_previous is None) == coord.first_stage and (groups.to_next is None) == coord.last_stage
    got: list[torch.Tensor] = []
    arrivals = []
    if groups.from_previous is not None:
        receiver = Receiver(groups.from_previous, hidden_size=H, dtype=torch.bfloat16, device=torch.device("cpu"))
        arrivals = [receiver.post(message(coord.tp_rank, n).shape[0]) for n in range(MESSAGES)]
    sender = None if groups.to_next is None else Sender(groups.to_next, slots=3)
    assert (groups.from_last is not None) == (coord.first_stage and not coord.last_stage)
    assert (groups.to_first is not None) == (coord.last_stage and not coord.first_stage)
    newest, back, tokens = None, None, []
    if groups.from_last is not None:
        newest = Receiver(groups.from_last, hidden_size=1, dtype=torch.int64, device=torch.device("cpu"))
    if groups.to_first is not None:
        back = Sender(groups.to_first, slots=3)
    for number in range(MESSAGES):
        x = arrivals[number].wait() if arrivals else message(coord.tp_rank, number)
        got.append(x)
        if sender is not None:
            sender.send(x)
        if newest is not None:
            tokens.append(newest.post(number + 1))
        if back is not None:
            back.send(torch.full((number + 1, 1), 100 * coord.tp_rank + number))
    came = [one.wait().flatten().tolist() for one in tokens]
    for one in (sender, back):
        if one is not None:
            one.flush()
    summed = groups.tp.all_reduce(torch.ones(1))
    return {"got": [x.float().numpy() for x in got], "tokens": came, "tp": float(summed)}


def everything(coord: Coord, groups: Groups) -> tuple[dict[str, object], dict[str, object]]:
    return collectives(coord, groups), pipeline(coord, groups)


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_processes_over_gloo(tp: int, pp: int) -> None:
    """One start of the processes for both: it is most of the time."""
    mesh = Mesh(tp=tp, pp=pp)
    for rank, (collective, piped) in enumerate(run_processes(mesh, everything, host=True)):
        tp_rank = mesh.coord(rank).tp_rank
        collectives_give_the_bits_of_simulated_ranks(tp_rank, tp, collective)
        edges_deliver_in_order(tp_rank, tp, piped)
        came = [[100 * tp_rank + number] * (number + 1) for number in range(MESSAGES)]
        assert piped["tokens"] == (came if pp > 1 and rank < tp else [])


def collectives_give_the_bits_of_simulated_ranks(rank: int, ranks: int, result: dict[str, object]) -> None:
    simulated = run_ranks(ranks, lambda comm: comm.all_reduce(share(comm.rank)))[0]
    rounded = run_ranks(ranks, lambda comm: comm.all_reduce(share(comm.rank).bfloat16()))[0]
    gathered = torch.stack([share(other)[:3] for other in range(ranks)])
    assert result["place"] == (rank, ranks)
    assert torch.equal(torch.tensor(result["sum"]), simulated)
    assert torch.equal(torch.tensor(result["bf16"]), rounded.float())
    assert torch.equal(torch.tensor(result["rows"]), simulated[17:40])
    assert torch.equal(torch.tensor(result["strided"]), simulated.t()[3:5])
    assert torch.equal(torch.tensor(result["gathered"]), gathered)
    assert torch.equal(torch.tensor(result["ids"]), torch.tensor([[other, 1 << 40] for other in range(ranks)]))
    assert result["empty"] == result["none"] == (0, H)
    assert result["host"] is True, "ranks on the CPU have it anyway"
    fp8 = torch.stack([share(other)[:2].to(torch.float8_e4m3fn) for other in range(ranks)])
    assert torch.equal(torch.tensor(result["bytes"]), fp8.float())
    for name, dtype in UNEVEN.items():
        expected = run_ranks(ranks, lambda comm, dtype=dtype: uneven(comm, dtype))[rank]
        assert torch.equal(torch.tensor(result[name]), expected.float()), name
    assert torch.equal(torch.tensor(result["input"]), share(rank))


def edges_deliver_in_order(source: int, tp: int, result: dict[str, object]) -> None:
    got = result["got"]
    assert result["tp"] == tp and isinstance(got, list) and len(got) == MESSAGES
    for number, x in enumerate(got):
        assert torch.equal(torch.tensor(x), message(source, number).float())


def test_one_rank_needs_no_world() -> None:
    groups = make_groups(Mesh(tp=1, pp=1).coord(0), gpu=False, init_addr="", timeout_s=1)
    assert groups.tp.size == 1 and groups.from_previous is None and groups.to_next is None
    assert groups.host is None and groups.from_last is None and groups.to_first is None


class Recorded:
    """A transfer that only remembers how long it may take."""

    def __init__(self) -> None:
        self.limits: list[timedelta | None] = []

    def wait(self, limit: timedelta | None = None) -> None:
        self.limits.append(limit)


@pytest.mark.parametrize(("device", "limited"), [("cpu", False), ("meta", True)])
def test_rows_are_waited_for_longer_than_gloo_would(device: str, limited: bool) -> None:
    work = Recorded()
    Arrival(work, torch.empty(1, H, device=device)).wait()  # type: ignore[arg-type]
    assert [limit is None for limit in work.limits] == [limited]
    assert limited or work.limits[0] > timedelta(days=1)  # type: ignore[operator]
