"""The real server over null workers: `python -m evals.bench_host.serve MODEL RUNNING`. Prints its URL when ready."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path

import msgspec

from rocm_serve.compose import prepare, run_directory, serve_with_workers
from rocm_serve.config.schema import Resolved, ServeConfig
from rocm_serve.server.run import bind
from rocm_serve.tokens.tokenizer import Tokenizer

WORKER = "evals.bench_host.null_worker"


def bench_config(model: str, running: int) -> ServeConfig:
    """Return the configuration of both halves of the benchmark."""
    return ServeConfig(
        model=model,
        served_model_name="null",
        port=0,
        device="cpu",
        max_running_requests=running,
        chunked_prefill_size=2048,
        max_model_len=2048,
        load_format="dummy",
        log_level="warning",
    )


def prepare_bench(config: ServeConfig, run_dir: Path) -> tuple[Resolved, Tokenizer]:
    """Prepare as the product does. One thread a worker: there is nothing to compute that a second could share."""
    resolved, tokenizer = prepare(config, run_dir)
    return msgspec.structs.replace(resolved, torch_threads=1), tokenizer


def main() -> int:
    model, running = sys.argv[1], int(sys.argv[2])
    config = bench_config(model, running)
    logging.basicConfig(level=config.log_level.upper())
    with run_directory() as keep, contextlib.closing(bind(config.host, config.port)) as sock:
        resolved, tokenizer = prepare_bench(config, keep.path)
        return serve_with_workers(resolved, tokenizer, sock, worker=WORKER)


if __name__ == "__main__":
    sys.exit(main())
