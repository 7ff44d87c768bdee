"""The norms of kernels_hip on this GPU: right, and how near the bandwidth of a copy.

    python -m evals.bench_norms            a table of both; exit 1 when a kernel is wrong or too slow
    python -m evals.bench_norms --check    only whether they are right, in few launches: for compute-sanitizer

A kernel's bytes are what it must read and write once. The copy is torch's, of the same rows in the same run. Both are
timed as replays of a graph of calls that go through several buffers in turn, so that neither host nor cache shows. What
the host takes for one call that is not replayed stands in its own column.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rocm_serve.ops.bind import OPS, bind_ops, binding_lines
from rocm_serve.ops.contract import OpFunction
from rocm_serve.ops.fp8 import quantise_rows
from rocm_serve.ops.hip_library import loaded_library
from rocm_serve.ops.rms_norm.hip import rms_norm_fp8
from rocm_serve.platform.probe import gpus_seen_by_torch
from rocm_serve.tuning.timing import time_calls

NORMS = ("rms_norm", "add_rms_norm", "gated_rms_norm", "qk_norm_rope")
ERROR_LIMIT = 2e-3  # relative L2
COPY_SHARE = 0.85  # of the bandwidth of a copy, at 4096 rows of 8192 and more
JUDGED = (4096, 8192)
BF16, EPS = torch.bfloat16, 1e-6
_ENQUEUED = 32  # calls at a time, fewer than a stream holds
SHAPES = ((1, 8192), (64, 8192), (1024, 8192), (4096, 8192), (8192, 8192), (16384, 8192), (8192, 4096), (8192, 2048))


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison with the reference on the CPU."""

    what: str
    error: float
    differing: int
    elements: int

    @property
    def ok(self) -> bool:
        return self.error <= ERROR_LIMIT


def _compared(what: str, got: torch.Tensor, expected: torch.Tensor) -> Finding:
    g, e = got.cpu().double(), expected.double()
    size = float(e.norm())
    error = float((g - e).norm()) / size if size else float((g - e).abs().sum())
    error = error if torch.equal(g.isnan(), e.isnan()) else float("inf")
    return Finding(what, error, int((g != e).sum()), g.numel())


def _rows(g: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=g) * scale).to(BF16)


def comparisons(g: torch.Generator) -> Iterator[Finding]:
    """Run every kernel at the edges of its widths, rows strided and odd in number, against the reference."""
    norm, add, gated, rotated = (OPS[name].providers["hip"].load() for name in NORMS)
    dialect = torch.float8_e4m3fnuz if gpus_seen_by_torch().arch == "gfx942" else torch.float8_e4m3fn
    for rows, width in (
        (0, 64),
        (1, 8),
        (37, 128),
        (9, 136),
        (5, 512),
        (3, 520),
        (9, 2048),
        (5, 4096),
        (33, 8192),
        (2, 8200),
        (3, 16384),
    ):
        x, weight = _rows(g, rows, width + 8)[:, :width], _rows(g, width, scale=0.3)
        more = {"eps": EPS, "plus_one": True}
        got = norm(x.cuda(), weight.cuda(), **more)
        yield _compared(f"rms_norm {rows} x {width}", got, OPS["rms_norm"].reference(x, weight, **more))
        stream = _rows(g, rows, width, scale=30.0)
        on_gpu = stream.cuda()
        got = add(x.cuda(), on_gpu, weight.cuda(), **more)
        expected = OPS["add_rms_norm"].reference(x, stream, weight, **more)
        yield _compared(f"add_rms_norm {rows} x {width}", got, expected)
        yield _compared(f"add_rms_norm {rows} x {width}, residual", on_gpu, stream)
        values, scales, y = rms_norm_fp8(
            loaded_library(), x.cuda(), weight.cuda(), eps=EPS, plus_one=True, dtype=dialect, with_norm=True
        )
        assert y is not None
        if rows:
            wanted, factors = quantise_rows(y.cpu(), dialect)
            yield _compared(f"rms_norm_fp8 {rows} x {width}, codes", values.cpu().float(), wanted.float())
            yield _compared(f"rms_norm_fp8 {rows} x {width}, scales", scales, factors)
    for shape in ((0, 4, 128), (7, 3, 128), (5, 1, 40), (2, 3, 512)):
        x, gate, weight = _rows(g, *shape), _rows(g, *shape, scale=4.0), torch.rand(shape[-1], generator=g) + 0.5
        for activation in ("silu", "sigmoid"):
            got = gated(x.cuda(), gate.cuda(), weight.cuda(), eps=EPS, activation=activation)
            expected = OPS["gated_rms_norm"].reference(x, gate, weight, eps=EPS, activation=activation)
            yield _compared(f"gated_rms_norm {list(shape)} {activation}", got, expected)
    for name, case in OPS["qk_norm_rope"].cases.items():
        made = case(g, BF16)
        if made["q_THD"].shape[-1] % 8 == 0:  # type: ignore[attr-defined]
            moved = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in made.items()}
            expected_pair = OPS["qk_norm_rope"].reference(**made)
            for which, got, expected in zip("qk", rotated(**moved), expected_pair, strict=True):
                yield _compared(f"qk_norm_rope {name}, {which}", got, expected)


def alone_and_among(g: torch.Generator, rows: int, width: int) -> Finding:
    """Compare the bits of one row alone with those among `rows`."""
    norm = OPS["rms_norm"].providers["hip"].load()
    x, weight = _rows(g, rows, width).cuda(), _rows(g, width, scale=0.3).cuda()
    together = norm(x, weight, eps=EPS, plus_one=True)
    at = rows // 3
    alone = norm(x[at : at + 1], weight, eps=EPS, plus_one=True)
    return _compared(f"a row of {width} alone and among {rows}", together[at : at + 1], alone.cpu())


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one call: bytes a second on the device, their share of the copy's, and the host's time in microseconds."""

    what: str
    reached: float
    share: float
    host: float
    how: str  # as timing.Timing


def _host(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Return the median of what the host takes for one call, while the device follows behind."""
    times = []
    for _ in range(9):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for i in range(_ENQUEUED):
            calls[i % len(calls)]()
        times.append((time.perf_counter() - start) / _ENQUEUED * 1e6)
    return statistics.median(times)


def speeds(norm: OpFunction, add: OpFunction, rows: int, width: int, device: torch.device) -> Iterator[Speed]:
    """Time a copy, then the norms over the hidden width."""
    size = rows * width * 2
    count = max(2, min(16, -(-(400 << 20) // (2 * size))))  # several times any cache
    xs = [torch.randn(rows, width, dtype=BF16, device=device) for _ in range(count)]
    residuals = [torch.randn_like(x) for x in xs]
    ys = [torch.empty_like(x) for x in xs]
    kept: list[torch.Tensor] = [torch.empty(0)] * count  # results stay, so that each call writes to another place
    weight = torch.randn(width, device=device).to(BF16)

    def copied(i: int) -> None:
        ys[i].copy_(xs[i])

    def plain(i: int) -> None:
        kept[i] = norm(xs[i], weight, eps=EPS, plus_one=True)

    def added(i: int) -> None:
        kept[i] = add(xs[i], residuals[i], weight, eps=EPS, plus_one=True)

    copy = 0.0
    for what, passes, step in (("copy", 2, copied), ("rms_norm", 2, plain), ("add_rms_norm", 4, added)):
        calls = [lambda i=i, step=step: step(i) for i in range(count)]
        for call in calls:
            call()
        host = _host(calls, device)
        timing = time_calls(calls, device)
        reached = passes * size / (timing.median * 1e-6)
        copy = copy or reached
        yield Speed(what, reached, reached / copy, host, timing.how)


def _print_speeds(device: torch.device) -> list[str]:
    """Print the table of times and return what is slower than it should be."""
    norm, add = (OPS[name].providers["hip"].load() for name in NORMS[:2])
    slow = []
    for rows, width in SHAPES:
        for one in speeds(norm, add, rows, width, device):
            judged = rows >= JUDGED[0] and width == JUDGED[1] and one.what != "copy"
            word = "" if not judged else "ok" if one.share >= COPY_SHARE else "SLOW"
            slow += [one.what] if word == "SLOW" else []
            numbers = f"{one.reached / 1e9:>8.0f} GB/s  {one.share:>5.2f} of the copy  host {one.host:>5.1f} us a call"
            print(f"{one.what:14} {rows:>6} x {width:<6} {numbers}  {one.how:6} {word}")
    return slow


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; 0 when all is right and fast enough, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m evals.bench_norms", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only whether the kernels are right")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    arguments = parser.parse_args(argv)
    gpu = gpus_seen_by_torch()
    if gpu.kind == "none":
        print("bench_norms: torch sees no GPU on this machine, so nothing was run", file=sys.stderr)
        return 2
    print(f"{gpu.name} ({gpu.arch}), torch {gpu.torch_build}, seed {arguments.seed}")
    ops = bind_ops(dict.fromkeys(NORMS, "hip"), gpu.arch)
    print("\n".join(line for line in binding_lines(ops.report) if line.split(":")[0].removeprefix("op ") in NORMS))
    g = torch.Generator().manual_seed(arguments.seed)
    findings = list(comparisons(g))
    findings += [alone_and_among(g, 64 if arguments.check else 8192, width) for width in (8, 256, 8192, 16384)]
    bad = [f for f in findings if not f.ok or ("alone" in f.what and f.differing)]
    for f in findings:
        if f in bad or not arguments.check:
            word = "WRONG" if f in bad else "ok"
            print(f"{f.what:48} relative L2 {f.error:.1e}  {f.differing:>6} of {f.elements:<9} bits differ  {word}")
    slow = [] if arguments.check else _print_speeds(torch.device("cuda"))
    print(f"{len(findings) - len(bad)} of {len(findings)} right, {len(slow)} too slow")
    return 1 if bad or slow else 0


if __name__ == "__main__":
    sys.exit(main())
