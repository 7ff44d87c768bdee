"""Named cells of expert parallelism as worker processes over gloo: each says what one rank with all experts says.

Cells that send nothing are also simulated in this process, over stages and over parts of experts. One more of
processes, torch at TP2 x PP2 x EP2 between two hosts, is in tests/two_hosts/test_experts.py. MORI is the stand-in of
tests/parallel, which the ordinary worker finds where a MORI would be installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rocm_serve.checkpoint.reader import read_config
from rocm_serve.config.experts import DRAFT, VALIDATED
from rocm_serve.config.schema import ExchangeName, Resolved
from rocm_serve.executor.local import LocalExecutor
from rocm_serve.models.qwen3_5.spec import parse_config
from rocm_serve.platform.probe import free_port
from tests.executor.generate import Answer, Requests, session
from tests.executor.processes import world
from tests.executor.simulated import SimulatedExecutor
from tests.executor.test_topologies import check_close
from tests.executor.wishes import resolved
from tests.made import small_checkpoint
from tests.parallel.mori_package import write_package

CHUNK, RUNNING = 64, 8


@dataclass(frozen=True)
class Cell:
    """One topology. Its shares come out uneven, and empty in steps of few rows."""

    exchange: ExchangeName
    tp: int
    pp: int
    ep: int
    layout: str = "text-fp8"

    @property
    def name(self) -> str:
        return f"{self.exchange}-tp{self.tp}-pp{self.pp}-ep{self.ep}-{self.layout}"

    @property
    def capacity(self) -> int:
        rows = -(-(CHUNK + RUNNING) // self.tp)
        return {"local": 0, "mori": 256}.get(self.exchange, rows)

    def wish(self, **more: Any) -> Resolved:
        sizes = {"chunked_prefill_size": CHUNK, "max_running_requests": RUNNING, "expert_capacity": self.capacity}
        topology = {"tp": self.tp, "pp": self.pp, "ep": self.ep, "expert_exchange": self.exchange}
        return resolved(**sizes, **topology, **more)


ELSEWHERE = Cell("torch", 2, 2, 2)
IN_ONE_PROCESS = (Cell("local", 2, 2, 2), Cell("local", 4, 1, 2, "vl-fp8"))
CELLS = (
    Cell("local", 2, 1, 2),
    Cell("local", 2, 1, 2, "vl-fp8"),
    Cell("torch", 4, 1, 4),
    Cell("all_gather", 2, 2, 2),
    Cell("mori", 2, 2, 2),
    Cell("mori", 4, 1, 4, "text-bf16"),
)


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Two layers each, made when asked for."""
    made: dict[str, Path] = {}

    def get(layout: str) -> Path:
        if layout not in made:
            folder = tmp_path_factory.mktemp("experts") / layout
            made[layout] = small_checkpoint(folder, layout, "bf16", seed=7, layers=2)
        return made[layout]

    return get


@pytest.fixture(scope="module")
def requests_(mixed_requests: Requests) -> Requests:
    return {name: mixed_requests[name] for name in "abef"}


@pytest.fixture(scope="module")
def alone(checkpoint_of: Callable[[str], Path], requests_: Requests) -> Callable[[str], dict[str, Answer]]:
    given: dict[str, dict[str, Answer]] = {}

    def get(layout: str) -> dict[str, Answer]:
        if layout not in given:
            with session(LocalExecutor(resolved(model=str(checkpoint_of(layout))))) as local:
                given[layout] = local.generate(requests_)
        return given[layout]

    return get


def in_processes(wish: Resolved, tmp_path: Path, requests: Requests) -> tuple[dict[str, Answer], list[str]]:
    """Run them; return answers and logs. `import mori` finds the stand-in."""
    write_package(tmp_path / "site")
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    here = {"run_dir": str(run_dir), "dist_init_addr": f"127.0.0.1:{free_port()}"}
    wish = Resolved(**{name: here.get(name, getattr(wish, name)) for name in Resolved.__struct_fields__})
    with world(wish, run_dir, variables={"PYTHONPATH": os.pathsep.join(paths)}) as running:
        answers = running.session.generate(requests)
    for worker in running.workers:
        assert worker.wait(20) == 0
    return answers, [running.log(rank) for rank in range(wish.tp * wish.pp)]


@pytest.mark.parametrize("cell", IN_ONE_PROCESS, ids=lambda cell: cell.name)
def test_experts_cut_over_neither_columns_nor_rows_answer_as_one_rank_does(
    cell: Cell, checkpoint_of: Callable[[str], Path], alone: Callable[[str], dict[str, Answer]], requests_: Requests
) -> None:
    with session(SimulatedExecutor(cell.wish(model=str(checkpoint_of(cell.layout))))) as simulated:
        check_close(simulated.generate(requests_), alone(cell.layout), requests_)


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=pytest.mark.by_hand if (cell.exchange, cell.tp) == ("mori", 4) else ())
        for cell in CELLS
    ],
    ids=lambda cell: cell.name,
)
def test_a_cell_answers_as_one_rank_does(
    cell: Cell,
    checkpoint_of: Callable[[str], Path],
    alone: Callable[[str], dict[str, Answer]],
    requests_: Requests,
    tmp_path: Path,
) -> None:
    answers, logs = in_processes(cell.wish(model=str(checkpoint_of(cell.layout))), tmp_path, requests_)
    check_close(answers, alone(cell.layout), requests_)
    for rank, log in enumerate(logs):
        (line,) = [line for line in log.splitlines() if "expert exchange" in line]
        assert f"rank {rank}: expert exchange {cell.exchange}: {cell.tp} ranks, {cell.ep} x {8 // cell.ep} " in line
        assert "hidden 256, top-3" in line
        sent = f"at most {cell.capacity} rows a rank, rows sent as float32" if cell.capacity else "no rows are sent"
        assert sent in line


@pytest.mark.multirank
@pytest.mark.slow
def test_rows_sent_as_fp8_by_mori_give_the_bits_of_those_sent_by_torch(
    checkpoint_of: Callable[[str], Path], requests_: Requests, tmp_path: Path
) -> None:
    """The sum of two ranks' terms has one order; quantising before sending changes nothing."""
    fp8 = {"model": str(checkpoint_of("text-fp8")), "fp8_activation": "fp8_1x128"}
    answers, logs = in_processes(Cell("mori", 2, 1, 2).wish(**fp8), tmp_path, requests_)
    with session(SimulatedExecutor(Cell("torch", 2, 1, 2).wish(**fp8))) as simulated:
        assert simulated.generate(requests_) == answers
    assert all("rows sent as fp8 1x128" in log for log in logs)


def test_what_is_called_validated_is_what_runs_here_and_nothing_else(checkpoint_of: Callable[[str], Path]) -> None:
    """As processes: none counts that is simulated. MORI's cells are the stand-in's, and prove nothing of a GPU."""
    pairs = {
        (parse_config(*read_config(checkpoint_of(cell.layout))).architecture, cell.exchange)
        for cell in (*CELLS, ELSEWHERE)
        if cell.exchange != "mori"
    }
    assert {pair for pair in VALIDATED if not pair[0].endswith(DRAFT)} == pairs
