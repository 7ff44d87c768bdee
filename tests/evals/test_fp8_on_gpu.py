"""The table of FP8 on a GPU, as far as a CPU can make it."""

from __future__ import annotations

import pytest
import torch

from evals import fp8_on_gpu
from rocm_serve.platform.facts import GpuFacts


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_on_a_cpu_no_step_differs_from_itself(dtype: torch.dtype) -> None:
    lines = list(fp8_on_gpu.torch_lines(torch.device("cpu"), dtype, torch.Generator().manual_seed(1)))
    assert len(lines) == 9 and all(line.as_expected for line in lines), "\n".join(map(str, lines))
    assert all(line.found == 0 for line in lines[:6])


def test_a_line_says_what_is_not_as_expected() -> None:
    assert str(fp8_on_gpu.Line("codes", 0.5, 0, 0)).endswith("expected 0e+00 to 0e+00   <- not as expected")


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fp8_on_gpu, "gpus_seen_by_torch", lambda: GpuFacts(kind="none"))
    assert fp8_on_gpu.main() == 2 and "finds no GPU here" in capsys.readouterr().err
