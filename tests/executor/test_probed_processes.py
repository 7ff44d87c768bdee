"""Two stages of two worker processes agree on providers over their store: one probes, all bind the same.

That nobody probes where all are bound to the reference is in test_processes.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rocm_serve.executor.api import ExecutorFailed
from rocm_serve.platform.probe import free_port
from rocm_serve.types import SamplingParams
from tests.executor.generate import session
from tests.executor.processes import world
from tests.executor.simulated import SimulatedExecutor
from tests.executor.wishes import resolved

pytestmark = pytest.mark.multirank
REQUESTS = {"a": ((5, 7, 11), SamplingParams(max_tokens=3, temperature=0.0))}


def test_one_rank_probes_and_all_bind_the_same(checkpoint: Path, tmp_path: Path) -> None:
    wish = resolved(
        model=str(checkpoint),
        tp=2,
        pp=2,
        op={"layers.3.rms_norm": "good", "rms_norm": "good"},
        run_dir=str(tmp_path),
        dist_init_addr=f"127.0.0.1:{free_port()}",
    )
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with world(wish, tmp_path, worker="tests.executor.probed_worker", variables=variables) as running:
        answers = running.session.generate(REQUESTS)
        assert [running.log(rank).count("probe of rms_norm by good") for rank in range(4)] == [1, 0, 0, 0]
        assert "op rms_norm: good" in running.log(0)
    with session(SimulatedExecutor(resolved(model=str(checkpoint), tp=2, pp=2))) as simulated:
        assert answers == simulated.generate(REQUESTS), "those of the reference"


def test_a_failed_probe_ends_every_rank_with_the_same_sentence(checkpoint: Path, tmp_path: Path) -> None:
    wish = resolved(
        model=str(checkpoint),
        tp=2,
        op={"rms_norm": "one_percent"},
        run_dir=str(tmp_path),
        dist_init_addr=f"127.0.0.1:{free_port()}",
    )
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    sentence = "--op rms_norm=one_percent: one_percent failed its probe: 1 x 256: relative L2"
    with (
        pytest.raises(ExecutorFailed, match=f"failed during loading: {sentence}"),
        world(wish, tmp_path, worker="tests.executor.probed_worker", variables=variables),
    ):
        raise AssertionError("it has started")
    for rank in range(2):
        log = (tmp_path / f"rank-{rank}.log").read_text()
        assert sentence in log, f"rank {rank}"
        assert "GB/s" not in log, "no weight was read"
