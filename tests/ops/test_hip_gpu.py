"""The norms of kernels_hip on this machine's GPU, where the table of cases does not reach. Run by hand where a GPU is.

The cases themselves, for every provider: test_providers_gpu.py. Speed: python -m evals.bench_norms.
"""

from __future__ import annotations

import secrets

import pytest
import torch

from rocm_serve.ops.bind import bind_ops
from rocm_serve.ops.fp8 import quantise_rows
from rocm_serve.ops.hip_library import loaded_library
from rocm_serve.ops.rms_norm import reference
from rocm_serve.ops.rms_norm.hip import rms_norm_fp8
from rocm_serve.platform.probe import gpus_seen_by_torch

NORMS = ("rms_norm", "add_rms_norm", "gated_rms_norm", "qk_norm_rope")
BF16 = torch.bfloat16
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.fixture
def g() -> torch.Generator:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def rows(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=g).to(BF16).cuda()


def test_every_norm_is_bound_to_hip_when_it_is_asked_for() -> None:
    ops = bind_ops(dict.fromkeys(NORMS, "hip"), gpus_seen_by_torch().arch)
    assert {line.op: line.provider for line in ops.report if line.op in NORMS} == dict.fromkeys(NORMS, "hip")


@pytest.mark.parametrize("width", [8, 128, 136, 256, 512, 520, 2048, 2056, 4096, 5120, 8192, 8200, 16384])
def test_a_row_has_the_same_bits_alone_and_among_many(g: torch.Generator, width: int) -> None:
    ops = bind_ops({"rms_norm": "hip", "add_rms_norm": "hip"}, gpus_seen_by_torch().arch)
    count = 8192 if width <= 8192 else 1024
    x, residual, weight = rows(g, count, width), rows(g, count, width), rows(g, width) * 0.3
    stream = residual.clone()
    plain = ops.rms_norm(x, weight, eps=1e-6, plus_one=True)
    added = ops.add_rms_norm(x, stream, weight, eps=1e-6, plus_one=True)
    assert torch.equal(stream, residual + x)
    for at in (0, 1, count // 2, count - 1):
        one = slice(at, at + 1)
        assert torch.equal(ops.rms_norm(x[one], weight, eps=1e-6, plus_one=True), plain[one])
        alone = residual[one].clone()
        assert torch.equal(ops.add_rms_norm(x[one], alone, weight, eps=1e-6, plus_one=True), added[one])


def test_rows_that_begin_where_no_16_bytes_do(g: torch.Generator) -> None:
    ops = bind_ops(dict.fromkeys(NORMS[:2], "hip"), gpus_seen_by_torch().arch)
    wide, weight = rows(g, 6, 300), rows(g, 264) * 0.3
    x, stream = wide[:, 3:267], rows(g, 6, 265)[:, 1:]
    before = stream.clone()
    expected = reference.rms_norm(x.cpu(), weight.cpu(), eps=1e-6, plus_one=True).double()
    got = ops.rms_norm(x, weight, eps=1e-6, plus_one=True).cpu().double()
    assert (got - expected).norm() <= 2e-3 * expected.norm()
    ops.add_rms_norm(x, stream, weight, eps=1e-6, plus_one=True)
    assert torch.equal(stream, before + x)


@pytest.mark.parametrize("shape", [(1, 8), (37, 392), (3, 8192), (2, 8328), (5, 128)])
@pytest.mark.parametrize("scale", [1.0, 0.0, 1e4])
def test_quantised_rows_are_the_norm_quantised_bit_for_bit(
    g: torch.Generator, shape: tuple[int, int], scale: float
) -> None:
    x, weight = rows(g, *shape) * scale, rows(g, shape[1]) * 0.3
    dtype = torch.float8_e4m3fnuz if gpus_seen_by_torch().arch == "gfx942" else torch.float8_e4m3fn
    values, scales, y = rms_norm_fp8(loaded_library(), x, weight, eps=1e-6, plus_one=True, dtype=dtype, with_norm=True)
    assert y is not None
    ops = bind_ops({"rms_norm": "hip"}, gpus_seen_by_torch().arch)
    assert torch.equal(y, ops.rms_norm(x, weight, eps=1e-6, plus_one=True))
    wanted, factors = quantise_rows(y.cpu(), dtype)
    assert torch.equal(values.cpu().view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales.cpu(), factors)
