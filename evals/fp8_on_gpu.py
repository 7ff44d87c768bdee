"""Where FP8 products on a GPU differ from the reference, part by part: `python -m evals.fp8_on_gpu`, under a minute.

On an H200 (2026-11-29) Triton's experts with FP8 rows were 0.8e-2 to 2.4e-2 from the reference on the same GPU, and
nothing was wrong on a CPU. Each line compares one step with the same step done otherwise, so one run tells which of the
suspects it was: the division of multipliers, the division of rows, the cast to e4m3, TF32, or how matrix instructions
sum. "expected" is what holds where the cause is the division by a Python number, as simulated on a CPU; on an H200
(2026-11-30) every line was as expected.
Exit 0: every line is as expected. 1: one is not. 2: there is no GPU here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from rocm_serve.ops.bind import OPS
from rocm_serve.ops.fp8 import AMAX_FLOOR, BLOCK, FP8_DTYPES, fp8_max, multiply_1x128, quantise_rows
from rocm_serve.ops.judging import bound_of, own_bound
from rocm_serve.ops.moe_experts.reference import moe_experts
from rocm_serve.platform.facts import fp8_dialect
from rocm_serve.platform.probe import gpus_seen_by_torch


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison. `found` is a share of elements, or a relative L2; it should lie in [least, most]."""

    what: str
    found: float
    least: float
    most: float

    @property
    def as_expected(self) -> bool:
        return self.least <= self.found <= self.most

    def __str__(self) -> str:
        mark = "" if self.as_expected else "   <- not as expected"
        return f"{self.what:78} {self.found:9.2e}   expected {self.least:.0e} to {self.most:.0e}{mark}"


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |a - b| / |b|, in float64 on the CPU."""
    g, e = got.cpu().double(), expected.cpu().double()
    return float((g - e).norm() / e.norm())


def differing(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the share of elements whose bits differ."""
    g, e = (x.cpu().contiguous().view(torch.uint8).view(*x.shape, -1) for x in (got, expected))
    return float((g != e).any(-1).float().mean())


def by_python_number(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise as the reference did until 2026-11-30: the divisor 448 is no tensor."""
    top = fp8_max(dtype)
    values, scales = [], []
    for block in x.float().split(BLOCK, dim=1):
        scale = block.abs().amax(1, keepdim=True).clamp_min(AMAX_FLOOR) / top
        values.append((block / scale).clamp(-top, top).to(dtype))
        scales.append(scale)
    return torch.cat(values, 1), torch.cat(scales, 1)


def torch_lines(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> Iterator[Line]:
    """Compare torch on the device with torch on the CPU, a step at a time. On a CPU nothing differs."""
    gpu = device.type != "cpu"
    x = torch.randn(512, 8192, generator=g).to(torch.bfloat16)
    there = x.to(device)
    top = fp8_max(dtype)
    amax = x.float().view(512, -1, BLOCK).abs().amax(-1)
    low, high = (0.3, 0.9) if gpu else (0.0, 0.0)
    yield Line(
        "amax / 448, a Python number: multipliers that differ", differing(amax.to(device) / top, amax / top), low, high
    )
    full = torch.full((1,), top)
    yield Line("amax / 448, a tensor", differing(amax.to(device) / full.to(device), amax / full), 0, 0)
    scale = (amax / full).repeat_interleave(BLOCK, 1)
    scaled = x.float() / scale
    yield Line("row / multiplier", differing(there.float() / scale.to(device), scaled), 0, 0)
    wide = torch.cat([scaled.flatten(), torch.linspace(-top, top, 1 << 20), _midway(dtype)]).clamp(-top, top)
    yield Line(
        "cast of float32 to e4m3, midway values too: codes that differ",
        differing(wide.to(device).to(dtype), wide.to(dtype)),
        0,
        0,
    )
    low, high = (2e-4, 4e-3) if gpu else (0.0, 0.0)
    yield Line(
        "codes by the old reference",
        differing(by_python_number(there, dtype)[0], quantise_rows(x, dtype)[0]),
        low,
        high,
    )
    yield Line("codes by the reference", differing(quantise_rows(there, dtype)[0], quantise_rows(x, dtype)[0]), 0, 0)
    q, w = (torch.randn(n, 8192, generator=g).mul_(60).clamp(-top, top).to(dtype).float() for n in (64, 256))
    exact = q.double() @ w.double().T
    before = torch.backends.cuda.matmul.allow_tf32
    for allowed in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        got = q.to(device) @ w.to(device).T
        yield Line(
            f"e4m3 values multiplied in float32, TF32 {'allowed' if allowed else 'not allowed'}",
            relative(got, exact),
            0,
            1e-5,
        )
    torch.backends.cuda.matmul.allow_tf32 = before
    yield Line("TF32 is allowed in this process (1: yes, 0: no)", float(before), 0, 1)


def _midway(dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers midway between two codes, and their neighbours in float32."""
    codes = torch.arange(1, 0x7E, dtype=torch.uint8).view(dtype).float()
    middle = (codes[1:] + codes[:-1]) / 2
    ulp = torch.tensor(float("inf"))
    return torch.cat([middle, torch.nextafter(middle, ulp), torch.nextafter(middle, -ulp)])


def triton_lines(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> Iterator[Line]:
    """Compare Triton's kernels with the references on the same GPU."""
    common = importlib.import_module("rocm_serve.ops.triton_common.triton")
    linear = importlib.import_module("rocm_serve.ops.fp8_linear.triton")
    experts = importlib.import_module("rocm_serve.ops.moe_experts.triton")
    x = torch.randn(300, 8192, generator=g).to(device, torch.bfloat16)
    for part, got, expected in zip(
        ("codes", "multipliers"), common.quantise_rows(x, dtype), quantise_rows(x, dtype), strict=True
    ):
        yield Line(f"Triton's quantisation: {part} that differ", differing(got, expected), 0, 0)
    w, s = _weight(device, dtype, g, 2560, 8192)
    by_rule, choice = (common.dot_dtype, linear.reads), importlib.import_module("triton.language")
    fp8 = {torch.float8_e4m3fn: choice.float8e4nv, torch.float8_e4m3fnuz: choice.float8e4b8}[dtype]
    for name, dot, reads in (
        ("multiplied as bf16", lambda *_, **__: choice.bfloat16, lambda *_: False),  # in the form for all rows
        ("multiplied as FP8", lambda *_, **__: fp8, lambda *_: False),
        ("by rule", *by_rule),
    ):
        vars(linear).update(dot_dtype=dot, reads=reads)
        for rows in (1, 300):
            got = linear.fp8_linear(x[:rows], w, s, activation="fp8_1x128")
            expected = multiply_1x128(x[:rows], w, s).to(torch.bfloat16)
            yield Line(f"Triton's product, {rows} rows, {name}", relative(got, expected), 0, 2e-3)
    w13, s13 = _weight(device, dtype, g, 16, 512, 8192)
    w2, s2 = _weight(device, dtype, g, 16, 8192, 256)
    told = {"dtype": "bfloat16", "activation": "fp8_1x128", "expert_fp8": True}
    for rows in (1, 37, 200, 300):
        most = bound_of(own_bound(OPS["moe_experts"].providers["triton"], gpus_seen_by_torch().arch, told, rows))
        ids = torch.stack([torch.randperm(16, generator=g)[:10] for _ in range(rows)]).to(device, torch.int32)
        weights = torch.rand(rows, 10, generator=g).to(device)
        call = (x[:rows], ids, weights, rows, w13, w2, s13, s2)
        got = experts.moe_experts(*call, activation="fp8_1x128")
        yield Line(f"Triton's experts, {rows} rows", relative(got, moe_experts(*call, activation="fp8_1x128")), 0, most)


def _weight(
    device: torch.device, dtype: torch.dtype, g: torch.Generator, *shape: int
) -> tuple[torch.Tensor, torch.Tensor]:
    top = fp8_max(dtype)
    weight = (torch.randn(shape, generator=g) * (top / 4.5)).clamp(-top, top).to(dtype)
    blocks = (*shape[:-2], shape[-2] // BLOCK, shape[-1] // BLOCK)
    scale = (torch.rand(blocks, generator=g) * 1.5 + 0.5) * (shape[-1] ** -0.5 * 4.5 / top)
    return weight.to(device), scale.to(device)


def main() -> int:
    """Print the table."""
    found = gpus_seen_by_torch()
    if found.kind == "none":
        print(f"fp8_on_gpu: torch {torch.__version__} finds no GPU here", file=sys.stderr)
        return 2
    device, dtype = torch.device("cuda"), FP8_DTYPES[fp8_dialect(found.kind, found.arch)]
    print(f"{found.name} ({found.arch}), torch {torch.__version__}, {dtype}")
    parts: tuple[Callable[[torch.device, torch.dtype, torch.Generator], Iterator[Line]], ...] = (
        torch_lines,
        triton_lines,
    )
    g, strange = torch.Generator().manual_seed(0), 0
    for part in parts:
        for line in part(device, dtype, g):
            print(line, flush=True)
            strange += not line.as_expected
    return 1 if strange else 0


if __name__ == "__main__":
    sys.exit(main())
