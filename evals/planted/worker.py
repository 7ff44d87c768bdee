"""A rank of the real worker with one fault, named by the variable PLANTED_FAULT. With PLANTED_TAPS=1 it is tapped."""

from __future__ import annotations

import os
from collections.abc import Callable

import rocm_serve.executor.taps as taps
from evals.planted.faults import FAULTS, Fault
from rocm_serve.config.schema import Resolved
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.loading import load_stage_model
from rocm_serve.executor.worker import main
from rocm_serve.parallel.board import Board
from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.mesh import Coord

FAULT, TAPS = "PLANTED_FAULT", "PLANTED_TAPS"


def faulty_loader(fault: Fault) -> Callable[..., LoadedStage]:
    """Return a stand-in for `load_stage_model`."""

    def load(
        resolved: Resolved,
        coord: Coord,
        comm: Comm,
        *,
        moved: Callable[[], None] = lambda: None,
        board: Board | None = None,
        host: Comm | None = None,
    ) -> LoadedStage:
        fault.before()
        stage = load_stage_model(resolved, coord, comm, moved=moved, board=board, host=host)
        fault.after(stage)
        return stage

    return load


if __name__ == "__main__":
    faulty = faulty_loader(FAULTS[os.environ[FAULT]])
    if os.environ.get(TAPS) == "1":
        taps.load_stage_model = faulty
        faulty = taps.load_tapped_stage
    main(faulty)
