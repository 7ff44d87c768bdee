"""The reference launch and evaluation, as they are written for two nodes of eight MI300X, on this machine.

    python evals/reference.py --data GSM8K_DIR

Starts two supervisors on the loopback with every flag of the launch, runs lm_eval's gsm8k with 256 requests in flight
against 16 running, watches /metrics meanwhile, and fails unless the queue got 200 deep and no request was answered 429
or 503. Changed: paths, sizes and ports; fewer questions, shorter answers, and local files instead of the hub's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from program import at_least, ended
from smoke import STOP_TIMEOUT_S, wait_until_ready
from tasks import write_tasks

from rocm_serve.checkpoint.synthetic import make_checkpoint
from rocm_serve.diagnostics.gate.tasks import check_data

LAUNCH = (
    "--model-path {model} --tp-size {tp} --pp-size 2 --nnodes 2 --node-rank {rank} --dist-init-addr {address}"
    " --dist-timeout 3600 --attention-backend aiter --chunked-prefill-size 8192 --watchdog-timeout 1200"
    " --mem-fraction-static 0.95 --host 0.0.0.0 --port {port} --disable-radix-cache --disable-custom-all-reduce"
    " --page-size 16 --kv-cache-dtype fp8_e4m3 --cuda-graph-max-bs 8 --max-running-requests 16"
    " --reasoning-parser qwen3 --tool-call-parser qwen3_coder"
)
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_HCA": "ionic_", "NCCL_IB_GID_INDEX": "1", "RCCL_AINIC_ROCE": "1"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
IN_FLIGHT, RUNNING, DEEP = 256, 16, 200
NODE_0 = "127.0.0.2"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--model", type=Path, help="checkpoint (default: a random one of four layers, made here)")
    parser.add_argument("--tp", type=at_least(1), default=2, help="--tp-size of the launch (default: 2)")
    parser.add_argument(
        "--limit", type=at_least(1), default=272, help="questions; fewer than 256 cannot pass (default: 272)"
    )
    parser.add_argument(
        "--max-gen-toks", type=at_least(1), default=16, help="tokens per answer, 2048 there (default: 16)"
    )
    return parser.parse_args()


def free_port(host: str, more: int = 0) -> int:
    """Find a port that is free together with the next `more`."""
    while True:
        with contextlib.ExitStack() as held, socket.socket() as first:
            first.bind((host, 0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                for other in range(port + 1, port + 1 + more):
                    held.enter_context(socket.socket()).bind((host, other))
                return port


@contextlib.contextmanager
def launched(model: Path, tp: int, folder: Path) -> Iterator[str]:
    """Both nodes of the launch until the block ends; yields the base URL."""
    port, address = free_port("0.0.0.0"), f"{NODE_0}:{free_port(NODE_0, 3)}"
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in (0, 1):
            flags = LAUNCH.format(model=model, tp=tp, rank=rank, address=address, port=port).split()
            with (folder / f"node-{rank}.log").open("wb") as log:
                command = [sys.executable, "-m", "rocm_serve", "serve", *flags]
                nodes.append(subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log))
        wait_until_ready(f"http://127.0.0.1:{port}", nodes[0])
        yield f"http://localhost:{port}"
        nodes[0].send_signal(signal.SIGTERM)
        codes = [node.wait(STOP_TIMEOUT_S) for node in nodes]
        if codes != [0, 0]:
            raise SystemExit(f"the nodes ended with {codes} after SIGTERM")
    except BaseException:
        for rank in range(len(nodes)):
            sys.stderr.write(f"--- node {rank}\n{(folder / f'node-{rank}.log').read_text(errors='replace')[-4000:]}\n")
        raise
    finally:
        for node in nodes:
            node.kill()
            node.wait()


class Watch(threading.Thread):
    """Reads /metrics five times a second and keeps the highest value of each sample."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.highest: dict[str, float] = {}
        self._url = f"{url}/metrics"
        self._over = threading.Event()

    def look(self) -> None:
        with urllib.request.urlopen(self._url, timeout=60) as page:
            for name, value in re.findall(r"^(rocm_serve_\S+) (\S+)$", page.read().decode(), re.MULTILINE):
                self.highest[name] = max(float(value), self.highest.get(name, 0.0))

    def run(self) -> None:
        while not self._over.wait(0.2):
            self.look()

    def end(self) -> None:
        self._over.set()
        self.join()
        self.look()


def run_lm_eval(url: str, model: Path, arguments: argparse.Namespace, folder: Path) -> None:
    """Run the line of the reference; its table goes to stdout."""
    tasks = folder / "tasks"
    tasks.mkdir()
    write_tasks(["gsm8k"], tasks, arguments.data)
    model_args = {
        "base_url": f"{url}/v1/completions",
        "model": str(model),
        "num_concurrent": IN_FLIGHT,
        "max_retries": 10,
        "max_gen_toks": arguments.max_gen_toks,
        "max_length": 8192,
        "tokenized_requests": False,
        "timeout": 3600,
    }
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", json.dumps(model_args)]
    command += ["--tasks", "gsm8k", "--num_fewshot", "5"]
    command += ["--include_path", str(tasks), "--limit", str(arguments.limit)]
    environment = os.environ | OFFLINE | {"HF_HOME": str(folder / "hf")}
    code = subprocess.run(command, check=False, env=environment, cwd=folder).returncode
    if code != 0:
        raise SystemExit(f"lm_eval exited with {code}")


def check(highest: dict[str, float], questions: int) -> None:
    """Say what the server saw, and fail unless it was what the reference asks for."""
    refused = {status: highest[f'rocm_serve_http_errors_total{{status="{status}"}}'] for status in ("429", "503")}
    finished = highest["rocm_serve_finished_requests_total"]
    running, waiting, open_ = (highest[f"rocm_serve_{name}"] for name in ("peak_running", "waiting", "open"))
    print(f"in flight {open_:.0f} at most, running {running:.0f}, waiting {waiting:.0f}; answered {finished:.0f};")
    print(f"429: {refused['429']:.0f}, 503: {refused['503']:.0f}")
    if not (open_ == IN_FLIGHT and running == RUNNING and waiting >= DEEP and finished == questions):
        raise SystemExit(f"expected {IN_FLIGHT} in flight, {RUNNING} running, {DEEP} waiting, {questions} answered")
    if any(refused.values()):
        raise SystemExit("requests were refused")


def main() -> int:
    arguments = parse_arguments()
    check_data("gsm8k", arguments.data)
    with tempfile.TemporaryDirectory(prefix="rocm-serve-reference-") as name:
        folder = Path(name)
        model = arguments.model or make_checkpoint(folder / "model", "text-fp8", "bf16", seed=0, layers=4)
        with launched(model.resolve(), arguments.tp, folder) as url:
            watch = Watch(url)
            watch.start()
            began = time.monotonic()
            run_lm_eval(url, model.resolve(), arguments, folder)
            watch.end()
            print(f"{arguments.limit} questions in {time.monotonic() - began:.0f} s; random weights score about 0")
        check(watch.highest, arguments.limit)
    return 0


if __name__ == "__main__":
    sys.exit(ended("reference", main))
