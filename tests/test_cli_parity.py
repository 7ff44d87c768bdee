"""The command: wishes that cannot be met, and comparisons of real processes on a tiny checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rocm_serve.cli_parity import prepare
from rocm_serve.config.schema import ServeConfig
from rocm_serve.errors import UserError
from rocm_serve.platform import probe
from tests.config.test_resolve import MI300X

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys, typer
from rocm_serve.cli_parity import parity
from rocm_serve.errors import UserError
app = typer.Typer()
app.command()(parity)
try:
    app()
except UserError as error:
    sys.stderr.write(f"{error}\\n")
    sys.exit(2)
"""


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=280)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--a", "tp=1"), "--b SPEC, --b hf or --against hf"),
        (("--a", "tp=1", "--b", "tp=2", "--against", "hf"), "one other side"),
        (("--a", "tp=1", "--against", "vllm"), "legal: hf"),
        (("--a", "hf", "--b", "tp=1"), "legal: a topology"),
        (("--a", "tp=3", "--b", "tp=1"), "--a tp=3: "),
        (("--a", "pp=9", "--b", "tp=1"), "--a pp=9: 4 layers cannot be cut so; legal: 1..4"),
        (("--a", "tp=1", "--b", "pp=9,tp=1"), "--b pp=9,tp=1: pp=9: 4 layers cannot be cut so"),
        (
            ("--a", "tp=1", "--b", "op.layers.3.gdn_chunk=reference"),
            "--b op.layers.3.gdn_chunk=reference: layer 3 does not call gdn_chunk; it runs in layers 0 to 2",
        ),
        (("--a", "tp=1", "--b", "tp=1", "--new-tokens", "100000000"), "--new-tokens 100000000: legal: 1.."),
        (("--a", "tp=1", "--b", "tp=1", "--new-tokens", "0"), "legal: 1 or more"),
        (("--a", "tp=1", "--b", "tp=1", "--prompts", "absent"), "No such file"),
        (("--a", "device=rocm", "--b", "tp=1"), "--a device=rocm: "),
    ],
)
def test_a_wish_that_cannot_be_met_is_one_line(
    words: tuple[str, ...], sentence: str, checkpoints: dict[str, Path]
) -> None:
    ended = run("--model", checkpoints["text-bf16"], *words)
    assert ended.returncode == 2, ended.stderr
    assert sentence in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("op", "sentence"),
    [
        ({"quantise_rows": "triton"}, "--op quantise_rows=triton: quantise_rows runs where rows are sent"),
        (
            {"gdn_step": "triton", "gdn_decode": "triton"},
            "--op gdn_decode=triton has no effect: --op gdn_step=triton has its layers do without gdn_decode, so",
        ),
    ],
)
def test_wishes_of_which_nothing_would_be_compared_are_refused(
    op: dict[str, str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    checkpoints: dict[str, Path],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(probe, "probe", lambda device: MI300X)
    with pytest.raises(UserError) as refused:
        prepare(ServeConfig(model=str(checkpoints["text-bf16"]), op=op), 100, tmp_path)
    assert str(refused.value).startswith(sentence)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_workers_removes_the_folder_and_says_so(
    number: signal.Signals, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """In the middle of chunks of one row. `timeout` sends SIGTERM, which would otherwise leave all of it."""
    spec = "tp=2,dtype=float32,chunk=1"
    words = ("--model", str(checkpoints["text-bf16"]), "--a", spec, "--b", spec, "--new-tokens", "200")
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", PROGRAM, *words], cwd=ROOT, env=env, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        lines = iter(child.stderr.readline, b"")
        assert any(b" tokens, A, all at once" in line for line in lines), "how far it is is shown before its end"
        ranks = workers(child.pid)
        assert len(ranks) == 2
        child.send_signal(number)
        said = child.communicate(timeout=60)[1].decode()
    assert child.returncode == 130 and "interrupted" in said and "Traceback" not in said, said
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()], "no worker is left when it has ended"
    assert not list(tmp_path.glob("rocm-serve-*"))


def workers(parent: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.multirank
def test_stages_and_chunks_agree_and_the_result_says_so(checkpoints: dict[str, Path]) -> None:
    ended = run("--model", checkpoints["text-bf16"], "--a", "tp=1,dtype=float32", "--b", "tp=2,dtype=float32", "--json")
    assert ended.returncode == 0, ended.stderr + ended.stdout
    found = json.loads(ended.stdout)
    assert found["agree"] and found["divergence"] is None and len(found["prompts"]) == 6
    assert max(one["worst"] for one in found["prompts"]) > 0.0, "tensor parallelism adds in another order"
    total = sum(one["prompt_tokens"] + one["new_tokens"] - 1 for one in found["prompts"])
    for what in ("A, all at once", "A, token by token", "B, on the same tokens"):
        assert f"{total} of {total} tokens, {what}" in ended.stderr, "how far it is was shown"


@pytest.mark.slow
# The other layouts are held against HF by tests/e2e/test_hf_parity.py.
@pytest.mark.parametrize("layout", ["vl-fp8", pytest.param("dense", marks=pytest.mark.by_hand)])
def test_every_layout_agrees_with_hf(layout: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A prompt of one chunk, and one of two."""
    asked = tmp_path / "prompts"
    asked.write_text(f"{[7, 8, 9]}\n{list(range(100, 166))}\n")
    ended = run("--model", checkpoints[layout], "--prompts", asked, "--a", "dtype=float32,chunk=64", "--b", "hf")
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert ended.stdout.strip().endswith("agree")
    assert " tokens, B, hf" in ended.stderr, "how far it is was shown"
