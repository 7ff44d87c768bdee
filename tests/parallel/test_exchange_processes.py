"""Exchanges between processes over gloo, two stages of two ranks: named cells, and how MORI must be started."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rocm_serve.parallel.comm import ThreadComm, run_ranks
from rocm_serve.parallel.exchange.make import Exchanges
from rocm_serve.parallel.exchange.mori import MoriSetup
from rocm_serve.parallel.groups import Groups
from rocm_serve.parallel.mesh import Coord, Mesh
from tests.parallel.dense import Batch, build, dequantised, draw, make_layer, padded, quantised, spec_of, step
from tests.parallel.mori_package import installed
from tests.parallel.ranks import run_processes

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

LAYER = make_layer(7)
CELLS = [("local", 2), ("torch", 2), ("torch", 1), ("all_gather", 2), ("all_gather", 1)]
DEADLOCK_S = 4


def batch_of(stage: int) -> Batch:
    return draw(7, seed=500 + stage)


def cells(coord: Coord, groups: Groups) -> dict[str, Any]:
    """Run every cell on this stage's ranks, in FP32 and with FP8 rows."""
    batch = batch_of(coord.stage)
    results = {}
    for name, ep in CELLS:
        for fp8 in (False, True):
            spec = spec_of(name, ep, fp8=fp8)
            exchange = build(spec, groups.tp, row_multiple=4).of(spec)
            out = step(exchange, groups.tp, LAYER, padded(batch, 9), 7, ep, fp8=fp8)
            results[f"{name} {ep} {fp8}"] = out[:7].numpy()
    nothing = step(exchange, groups.tp, LAYER, batch.rows(slice(0, 0)), 0, ep, fp8=True)
    return results | {"nothing": nothing.shape}


def stock_start(coord: Coord) -> str:
    """Start MORI with its own function for a torch group, as code that knows one stage only does."""
    import mori.shmem

    group = next(g for g in (dist.new_group([0, 1]), dist.new_group([2, 3])) if g != dist.GroupMember.NON_GROUP_MEMBER)
    dist.distributed_c10d._register_process_group("experts", group)
    try:
        mori.shmem.shmem_torch_process_group_init("experts")
    except ValueError as error:
        return str(error)
    mori.shmem.shmem_finalize()
    return "started"


def mori_on_both_stages(coord: Coord, groups: Groups) -> float:
    """Build FP8 and BF16 exchanges on every rank before the first row moves; send rows down the pipeline."""
    assert groups.host is not None
    setup = MoriSetup(groups.host, gpus_per_node=8, compute_units=304)
    main, draft = spec_of("mori", 2, fp8=True), spec_of("mori", 2)
    exchanges = Exchanges([main, draft], groups.tp, row_multiple=4, mori=setup)
    worst, batch = 0.0, batch_of(coord.stage)
    exact = Batch(dequantised(*quantised(batch.x)), batch.ids, batch.weights)
    for _ in range(3):
        _relay(coord, groups, "receive")
        for spec, expected in ((main, exact), (draft, batch)):
            fp8 = spec.fp8_rows
            if fp8 or not coord.first_stage:  # the draft is the last stage's
                out = step(exchanges.of(spec), groups.tp, LAYER, padded(batch, 9), 7, 2, fp8=fp8)[:7]
                whole = LAYER.whole(expected.x, expected.ids, expected.weights)
                worst = max(worst, float((out.double() - whole).abs().max()))
        _relay(coord, groups, "send")
    exchanges.close()
    return worst


def _relay(coord: Coord, groups: Groups, what: str) -> None:
    if what == "send" and groups.to_next is not None:
        dist.send(torch.ones(3), groups.to_next.peer, group=groups.to_next.group)
    if what == "receive" and groups.from_previous is not None:
        dist.recv(torch.empty(3), groups.from_previous.peer, group=groups.from_previous.group)


def naive_lazy_build(coord: Coord, groups: Groups) -> str:
    """Build the op when the first rows come: the first stage waits for the second, which waits for rows."""
    for group in (dist.group.WORLD, *(edge.group for edge in (groups.to_next, groups.from_previous) if edge)):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=DEADLOCK_S), group)
    try:
        _relay(coord, groups, "receive")
        assert groups.host is not None
        setup = MoriSetup(groups.host, gpus_per_node=8, compute_units=304)
        Exchanges([spec_of("mori", 2)], groups.tp, row_multiple=1, mori=setup)
        _relay(coord, groups, "send")
    except RuntimeError as error:
        return f"stuck: {error}"
    return "built"


def everything(coord: Coord, groups: Groups) -> dict[str, Any]:
    with installed(Path(tempfile.mkdtemp(prefix="mori-"))):
        results = {"cells": cells(coord, groups), "stock": stock_start(coord)}
        results["mori"] = mori_on_both_stages(coord, groups)
        dist.barrier()
        results["lazy"] = naive_lazy_build(coord, groups)  # the last: it leaves the groups broken
    return results


def test_two_stages_of_two_ranks() -> None:
    """One start of the processes for all of it: it is most of the time."""
    mesh = Mesh(tp=2, pp=2)
    for rank, results in enumerate(run_processes(mesh, everything, host=True)):
        stage = mesh.coord(rank).stage
        cells_give_the_bits_of_simulated_ranks(stage, results["cells"])
        assert results["mori"] < 2e-6
        if stage == 0:
            assert results["stock"] == "started"
        else:
            assert "Global rank 0 is not part of group" in results["stock"]
        assert results["lazy"].startswith("stuck"), results["lazy"]


def cells_give_the_bits_of_simulated_ranks(stage: int, results: dict[str, Any]) -> None:
    batch = batch_of(stage)
    assert results.pop("nothing") == (0, batch.x.shape[1])
    assert len(results) == 2 * len(CELLS)
    for name, ep in CELLS:
        for fp8 in (False, True):
            spec = spec_of(name, ep, fp8=fp8)

            def body(comm: ThreadComm, spec=spec, ep=ep, fp8=fp8) -> torch.Tensor:  # type: ignore[no-untyped-def]
                exchange = build(spec, comm, row_multiple=4).of(spec)
                return step(exchange, comm, LAYER, padded(batch, 9), 7, ep, fp8=fp8)[:7]

            simulated = run_ranks(2, body)[0]
            out = torch.tensor(results[f"{name} {ep} {fp8}"])
            assert torch.equal(out, simulated), (name, ep, fp8)
            x = dequantised(*quantised(batch.x)) if fp8 else batch.x
            assert float((out.double() - LAYER.whole(x, batch.ids, batch.weights)).abs().max()) < 2e-6
