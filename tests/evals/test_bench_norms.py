"""The benchmark of the norms on a CPU, where it times the references: what it counts and what it leaves behind."""

from __future__ import annotations

import pytest
import torch

from evals import bench_norms
from rocm_serve.ops.bind import OPS
from rocm_serve.platform.facts import GpuFacts
from rocm_serve.tuning.timing import Timing


def test_bytes_are_counted_once_and_shares_are_the_copys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_norms, "_ENQUEUED", 2)
    seen: list[tuple[int, torch.Tensor]] = []

    def norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, plus_one: bool) -> torch.Tensor:
        seen.append((x.data_ptr(), weight))
        return OPS["rms_norm"].reference(x, weight, eps=eps, plus_one=plus_one)

    times = iter((10.0, 20.0, 30.0))
    monkeypatch.setattr(bench_norms, "time_calls", lambda calls, device: Timing(next(times), 0.0, 0.0, "graph"))
    add = OPS["add_rms_norm"].reference
    copy, plain, added = bench_norms.speeds(norm, add, 8, 64, torch.device("cpu"))
    size = 8 * 64 * 2
    assert (copy.share, plain.share, added.share) == pytest.approx((1.0, 0.5, 2 / 3))
    assert copy.reached == pytest.approx(2 * size / 10e-6) and added.reached == pytest.approx(4 * size / 30e-6)
    assert len({at for at, _ in seen}) == 16 and min(copy.host, plain.host, added.host) > 0


def test_without_a_gpu_nothing_is_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_norms, "gpus_seen_by_torch", lambda: GpuFacts(kind="none"))
    assert bench_norms.main(["--check"]) == 2
    assert "no GPU" in capsys.readouterr().err
