"""What comes before anything serves: kernels compiled ahead, and what the link carries."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import msgspec

from evals.bench_gpu import pair_floor, stage
from evals.bench_gpu.pair_floor import LAYOUTS
from evals.bench_gpu.pair_records import LinkRecord, link_line
from evals.bench_gpu.pair_run import Measuring
from rocm_serve.checkpoint.synthetic_configs import Dims
from rocm_serve.children import end_processes, wait_for
from rocm_serve.config.graphs import PROMPT_DECODES
from rocm_serve.config.load import environment
from rocm_serve.executor.device import dialect_of
from rocm_serve.platform.probe import free_port, usable_cores
from rocm_serve.tuning.compiling import Compilers
from rocm_serve.tuning.floor import BF16
from rocm_serve.tuning.wish import Point, Wish

_LARGE = 1 << 26  # bytes of a message that fills a link of GPUs
_LINK_S = 45.0
SMALL_PROMPTS = (64, 64 + PROMPT_DECODES)  # rows of the first requests, alone and beside others
_MOST_COMPILERS = 24


def compile_ahead(run: Measuring) -> None:
    """Compile what ranks will launch, in several processes: one rank would compile one kernel after the other."""
    a = run.arguments
    began = time.monotonic()
    rank = stage.rank_of(a.shape, running=max(a.batch), longest=a.ctx * 2, op=a.op)
    points = list(_launched(sorted({1 << i for i in range(max(a.batch).bit_length())}), a.chunk, a.ctx))
    shares = sorted({LAYOUTS[name].tp for name in a.layouts})
    jobs = max(1, min(usable_cores(), _MOST_COMPILERS) // len(shares))
    with ThreadPoolExecutor() as pool:
        wishes = [_wish(rank, pair_floor.share(run.dims, tp)) for tp in shares]
        failed = pool.map(lambda one: _compile(one, points, jobs, a.compile_s), wishes)
        lines = [f"a rank of tp{tp}: {line}" for tp, found in zip(shares, failed, strict=True) for line in found]
    seconds = time.monotonic() - began
    run.say("\n  ".join([f"{len(points)} calls of {len(shares)} ranks compiled in {seconds:.0f} s", *lines]))


def _launched(batches: Sequence[int], chunk: int, length: int) -> Iterator[Point]:
    """Name the calls of decode steps of these sizes and of a chunk of prompts whose kernels take long to compile."""
    for rows in batches:
        yield Point("experts", {"rows": rows})
        yield Point("attention", {"rows": rows, "context": 1024})
        yield Point("norms", {"rows": rows, "residual": True})
        for case in ("step", "route", "qk", "shared_add", "head"):
            yield Point(case, {"rows": rows})
        for name in ("in_proj_qkvz", "in_proj_ba", "out_proj", "qkv_proj", "o_proj", "gate", "shared down"):
            yield Point("linear", {"rows": rows, "name": name})
    for rows in sorted({*SMALL_PROMPTS, chunk, chunk + PROMPT_DECODES, chunk + batches[-1] - 1}):
        yield Point("experts", {"rows": rows})
        yield Point("norms", {"rows": rows, "residual": True})
        for case in ("route", "qk", "shared_add"):
            yield Point(case, {"rows": rows})
    for rows, prompts in sorted({(SMALL_PROMPTS[0], 1), (chunk, 1), (min(chunk, length), max(1, chunk // length))}):
        for case in ("attention_prefill", "gdn_chunk", "prompt_conv"):
            yield Point(case, {"rows": rows, "count": prompts})


def _wish(rank: stage.Rank, dims: Dims) -> Wish:
    return Wish(
        dims={field: getattr(dims, field) for field in dims.__dataclass_fields__},
        providers={op: provider.name for op, provider in rank.ops.providers.items()},
        arch=rank.arch,
        dtype=rank.resolved.dtype,
        dialect=dialect_of(rank.device),
        activation=rank.resolved.fp8_activation,
        seed=0,
    )


def _compile(wish: Wish, points: Sequence[Point], jobs: int, timeout_s: float) -> list[str]:
    """Return what could not be compiled in that time: it is, or fails, when it is called."""
    compilers = Compilers(wish, jobs)
    try:
        futures = {str(point): compilers.compile(point) for point in points}
        wait(futures.values(), timeout_s)
        return [f"{name}: {one.result() if one.done() else 'late'}" for name, one in futures.items() if _bad(one)]
    finally:
        compilers.stop()


def _bad(one: Future[str]) -> bool:
    return not one.done() or one.result() != ""


def measure_link(run: Measuring) -> None:
    """Have two processes measure what crosses between them."""
    a, row = run.arguments, run.dims.hidden * BF16
    sizes = sorted({rows * row for rows in (*a.batch, *(max(1, b // 2) for b in a.batch), a.chunk)})
    if run.device.type == "cuda":
        sizes.append(_LARGE)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "link.json"
        command = [sys.executable, "-m", "evals.bench_gpu.pair_link", "--device", run.device.type, "--out", str(out)]
        command += ["--sizes", *map(str, sizes), "--addresses", *(f"127.0.0.1:{free_port()}" for _ in range(2))]
        env = {**environment(), "GLOO_SOCKET_IFNAME": "lo"}
        logs = [Path(folder) / f"rank-{rank}.log" for rank in range(pair_floor.RANKS)]
        with ExitStack() as held:
            ranks = [
                subprocess.Popen([*command, "--rank", str(rank)], env=env, stderr=held.enter_context(log.open("wb")))
                for rank, log in enumerate(logs)
            ]
            wait_for(ranks, _LINK_S)
            end_processes(ranks, grace_s=0.0)
        if any(one.returncode for one in ranks):
            raise RuntimeError("\n".join(f"{log.name}: {log.read_text(errors='replace')[-600:]}" for log in logs))
        run.run.links += msgspec.json.decode(out.read_bytes(), type=list[LinkRecord])
    run.say("\n".join(["link", *(link_line(one) for one in run.run.links)]))
