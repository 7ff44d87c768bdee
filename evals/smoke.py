"""Run the real lm_eval against a served checkpoint: gsm8k (generation) and weekday_order (log-likelihoods).

    python evals/smoke.py --model DIR --data GSM8K_DIR        starts a server, evaluates, stops it
    python evals/smoke.py --base-url URL --data GSM8K_DIR     evaluates a server that is already there

Nothing is fetched: the task data are local files and the hub is switched off.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from program import at_least, ended
from tasks import write_tasks

from rocm_serve.diagnostics.gate.tasks import check_data
from rocm_serve.errors import UserError

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
EXIT_USER_ERROR = 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", type=Path, help="checkpoint to serve for this run")
    where.add_argument("--base-url", help="a running server, such as http://127.0.0.1:8000")
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--limit", type=at_least(1), default=20, help="gsm8k questions (default: 20)")
    parser.add_argument("--num-fewshot", type=at_least(0), default=5, help="shots of gsm8k (default: 5)")
    parser.add_argument("--max-gen-toks", type=at_least(1), default=32, help="tokens per answer (default: 32)")
    parser.add_argument("--num-concurrent", type=at_least(1), default=8, help="requests in flight (default: 8)")
    parser.add_argument("--serve-args", default="", help="more flags for `rocm-serve serve`, in one string")
    return parser.parse_args()


@contextlib.contextmanager
def served(model: Path, more: str) -> Iterator[str]:
    """Serve `model` on a free port until the block ends; yields the base URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "rocm_serve", "serve", "--model", str(model), "--port", str(port)]
    command += ["--log-level", "warning", *more.split()]
    server = subprocess.Popen(command)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, server)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            code = server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
            raise SystemExit(f"the server was still there {STOP_TIMEOUT_S:.0f} s after SIGTERM") from None
    if code != 0:
        raise SystemExit(f"the server exited with {code} after SIGTERM")


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            if server.returncode == EXIT_USER_ERROR:
                raise SystemExit(EXIT_USER_ERROR)  # it has said why
            raise SystemExit(f"the server exited with {server.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"{url}/ready did not answer within {READY_TIMEOUT_S:.0f} s")


def model_name(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as response:
            return str(json.load(response)["data"][0]["id"])
    except (OSError, ValueError) as error:  # no server, no URL, or a server of something else
        raise UserError(f"--base-url {url}: {error}") from None


def run_lm_eval(task: str, model_args: dict[str, object], tasks_dir: Path, out: Path, *more: str) -> dict[str, object]:
    """Run one task with lm_eval's command line; its table goes to stdout. Returns its results file."""
    joined = ",".join(f"{key}={value}" for key, value in model_args.items())
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", joined]
    command += ["--tasks", task, "--include_path", str(tasks_dir), "--output_path", str(out / task), *more]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out / "hf"), "TQDM_DISABLE": "1"}
    code = subprocess.run(command, check=False, env=os.environ | offline, cwd=out).returncode
    if code != 0:
        raise SystemExit(f"lm_eval exited with {code} on {task}")
    (results,) = (out / task).rglob("results_*.json")
    return dict(json.loads(results.read_text(encoding="utf-8")))


def evaluate(url: str, arguments: argparse.Namespace, folder: Path) -> None:
    tasks_dir = folder / "tasks"
    tasks_dir.mkdir()
    write_tasks(["gsm8k", "weekday_order"], tasks_dir, arguments.data)
    common = {"model": model_name(url), "base_url": f"{url}/v1/completions", "max_retries": 3, "timeout": 900}
    common["num_concurrent"] = arguments.num_concurrent
    gsm8k_args = common | {"tokenizer_backend": None, "max_gen_toks": arguments.max_gen_toks}
    limit = ("--limit", str(arguments.limit), "--num_fewshot", str(arguments.num_fewshot))
    gsm8k = run_lm_eval("gsm8k", gsm8k_args, tasks_dir, folder, *limit)
    choice_args = common | {"tokenizer_backend": "remote"}
    choice = run_lm_eval("weekday_order", choice_args, tasks_dir, folder)
    for results, task in ((gsm8k, "gsm8k"), (choice, "weekday_order")):
        samples = results["n-samples"][task]["effective"]  # type: ignore[index]
        print(f"{task}: {samples} questions answered by {common['model']}")
    print("A tiny checkpoint scores about 0 on gsm8k and about 1/3 on weekday_order (three choices):")
    print("these runs show that the whole chain works, not that a model is good.")


def main() -> int:
    arguments = parse_arguments()
    check_data("gsm8k", arguments.data)
    with tempfile.TemporaryDirectory(prefix="rocm-serve-eval-") as folder:
        if arguments.base_url:
            evaluate(arguments.base_url.rstrip("/"), arguments, Path(folder))
            return 0
        with served(arguments.model, arguments.serve_args) as url:
            evaluate(url, arguments, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(ended("smoke", main))
