"""What may see a fault: parity, the ledger, seeded requests among others (R7), and the gate."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from evals import plain_gate
from evals.planted.faults import FAULTS, Fault
from evals.planted.worker import FAULT, TAPS
from rocm_serve.checkpoint.ledger import validate
from rocm_serve.checkpoint.reader import CheckpointReader, read_config
from rocm_serve.cli_parity import prepare
from rocm_serve.config import load
from rocm_serve.diagnostics.gate.reference import Reference
from rocm_serve.diagnostics.gate.statistics import ALPHA, mcnemar_worse
from rocm_serve.diagnostics.parity import flow, prompts
from rocm_serve.diagnostics.parity.spec import parse_side
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import parse_config
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.tokens.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
WORKER = "evals.planted.worker"
READY_S, STOP_S, ANSWER_S = 300.0, 60.0, 600.0
NEIGHBOURS = (1, 7, 31)
FIRST = 32  # questions that the gate is asked before the rest


def parity(
    fault: Fault | None,
    model: Path,
    folder: Path,
    *,
    spec: str = "",
    b: str = "hf",
    lengths: Sequence[int] = prompts.LENGTHS,
) -> flow.Parity:
    """Run `rocm-serve parity` with the fault in side A. `spec`: of A, else the fault's. Errors: UserError.

    `lengths`: which of the drawn prompts.
    """
    tokenizer = Tokenizer.from_dir(model)
    asked, new_tokens = [prompt for prompt in prompts.drawn(tokenizer) if len(prompt.ids) in lengths], 8
    longest = max(len(prompt.ids) for prompt in asked) + new_tokens
    text = spec or (fault.spec if fault is not None else "tp=1,dtype=float32")
    planted = {} if fault is None else {FAULT: fault.name, TAPS: "1"}
    given = flow.Comparison(
        model=model,
        a=parse_side(text, model, "--a", longest=longest),
        b=parse_side(b, model, "--b", longest=longest),
        prompts=asked,
        new_tokens=new_tokens,
        vocab_used=tokenizer.vocab_used,
        prepare=lambda config, run_dir: prepare(config, tokenizer.vocab_used, run_dir),
        env=load.environment() | {"PYTHONPATH": str(ROOT)} | planted,
        folder=folder,
        workers={} if fault is None else {"A": WORKER},
    )
    return flow.run(given, lambda line: None)


def named(fault: Fault, found: flow.Parity) -> bool:
    """Say whether parity named the layer and the op of the fault."""
    if fault.site is None or found.divergence is None:
        return fault.site is None and found.agree
    layer, pattern = fault.site
    first = found.divergence.first
    if first is None:
        return re.search(pattern, found.divergence.how) is not None
    return first.layer == layer and re.search(pattern, first.site) is not None


def ledger(fault: Fault, model: Path, folder: Path) -> str | None:
    """Take the fault's tensors out of a copy of the checkpoint; return the refusal, or None when nothing is said."""
    if not fault.missing:
        return None
    copy = folder / "checkpoint"
    shutil.copytree(model, copy)
    index = copy / "model.safetensors.index.json"
    held = json.loads(index.read_text(encoding="utf-8"))
    gone = [name for name in held["weight_map"] if any(re.search(pattern, name) for pattern in fault.missing)]
    assert gone, f"{fault.name}: the checkpoint has no such tensors"
    for name in gone:
        del held["weight_map"][name]
    index.write_text(json.dumps(held), encoding="utf-8")
    try:
        with CheckpointReader(copy) as reader:
            validate(reader, parse_config(*read_config(copy)), Mesh(1, 1), mtp=False)
    except UserError as error:
        return str(error)
    return None


@contextlib.contextmanager
def served(fault: Fault | None, model: Path, flags: Sequence[str]) -> Iterator[str]:
    """Serve `model` with the fault in every rank; yields the base URL. Ends the server whatever happens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = ["rocm_serve", "serve"] if fault is None else ["evals.planted.serve", fault.name]
    common = ["--model", str(model), "--port", str(port), "--log-level", "warning"]
    server = subprocess.Popen([sys.executable, "-m", *program, *common, *flags], cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(url, server)
        yield url
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"{url}/ready did not answer within {READY_S:.0f} s")


def serve_flags(fault: Fault) -> list[str]:
    """Return the flags of `serve` under which the fault shows."""
    return flags_of(fault.flags)


def flags_of(topology: Mapping[str, int | str]) -> list[str]:
    """Write the keys of a SPEC as flags of `serve`, float32."""
    names = {"chunk": "--chunked-prefill-size", "running": "--max-running-requests"}
    pairs = [(names.get(key, f"--{key.replace('_', '-')}"), str(value)) for key, value in topology.items()]
    return [word for pair in pairs for word in pair] + ["--dtype", "float32"]


def seeded(base_url: str) -> list[str]:
    """Probe R7: a seeded request alone, then among 1, 7 and 31 unseeded ones in another order. Returns what differs."""
    with urllib.request.urlopen(f"{base_url}/v1/models", timeout=30) as response:
        name = json.load(response)["data"][0]["id"]
    asked = {"model": name, "temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    fixed = asked | {"prompt": "Question: Ann has 12 apples and buys 7 more. How many?\nAnswer:", "seed": 7}
    alone = _complete(base_url, fixed)
    found = []
    order = random.Random(7)
    for count in NEIGHBOURS:
        others = [asked | {"prompt": f"Question: {i} and {3 * i}?\nAnswer:"} for i in range(count)]
        place = order.randrange(count + 1)
        bodies = [*others[:place], fixed, *others[place:]]
        with ThreadPoolExecutor(len(bodies)) as pool:
            texts = list(pool.map(lambda body: _complete(base_url, body), bodies))
        if texts[place] != alone:
            found.append(f"among {count} others: {texts[place]!r}, alone: {alone!r}")
    if (last := _complete(base_url, fixed)) != alone:
        found.append(f"alone again: {last!r}, before: {alone!r}")
    return found


def _complete(base_url: str, body: dict[str, object]) -> str:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{base_url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        return str(json.load(response)["choices"][0]["text"])


GateOutcome = tuple[str, str]  # pass, fail or invalid, and in which words
Judge = Callable[[int], dict[str, Any]]  # the gate's result on the first N questions


def gate(reference: Reference, limit: int, judge: Judge) -> GateOutcome:
    """Gate `limit` questions, or the first few where these decide already.

    They do when even with every question of the rest as the reference answers it, or better, the paired test fails.
    """
    if limit > FIRST:
        lost = len(judge(FIRST)["paired"]["lost"])
        p = mcnemar_worse(lost, most_gained(reference, limit))
        if p < ALPHA:
            return "fail", f"{lost} of the first {FIRST} questions lost: at {limit}, p is at most {p:.1e}"
    found = judge(limit)
    paired = found["paired"]
    words = f"{limit} questions: {len(paired['lost'])} lost, {len(paired['gained'])} gained, p {paired['p']:.1e}"
    return found["outcome"], "; ".join([words, *found["invalid"]])


def by_command(base_url: str, reference: Path, out: Path) -> Judge:
    """Judge by `rocm-serve gate gsm8k`. Errors: SystemExit when it leaves no result."""

    def judge(limit: int) -> dict[str, Any]:
        folder = out / str(limit)
        command = [sys.executable, "-m", "rocm_serve", "gate", "gsm8k", "--base-url", base_url]
        command += ["--reference", str(reference), "--limit", str(limit), "--out", str(folder), "--fresh"]
        ended = subprocess.run(command, cwd=ROOT, check=False)
        results = sorted(folder.glob("run-*/result.json"))
        if not results:
            raise SystemExit(f"the gate ended with {ended.returncode} and left no result")
        result: dict[str, Any] = json.loads(results[-1].read_text(encoding="utf-8"))
        return result

    return judge


def without_lm_eval(base_url: str, reference: Reference, data: Path) -> Judge:
    """Judge by evals/plain_gate.py: the same questions, floor and paired test, no look at the form of answers."""
    protocol = reference.header.protocol

    def judge(limit: int) -> dict[str, Any]:
        items = plain_gate.items_of(data, protocol.num_fewshot, limit)
        plain_gate.check_prompts(items, reference)
        found = plain_gate.judge(items, plain_gate.ask_all(base_url, items, protocol.max_gen_toks), reference)
        return {
            "outcome": found["outcome"],
            "invalid": [],
            "paired": {key: found[key] for key in ("lost", "gained", "p")},
        }

    return judge


def most_gained(reference: Reference, limit: int) -> int:
    """Return how many of the first `limit` questions the reference answers wrongly: no server gains more."""
    judged = reference.header.protocol.filter
    return sum(not question.verdicts[judged] for question in list(reference.questions.values())[:limit])


def chosen(name: str | None) -> list[Fault]:
    """Return one fault by name, or all. Errors: UserError with the names."""
    if name is None:
        return list(FAULTS.values())
    if name not in FAULTS:
        raise UserError(f"--fault {name}: legal: {', '.join(FAULTS)}")
    return [FAULTS[name]]
