"""The side that Hugging Face Transformers computes: a program of its own, which shares no code with the server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from rocm_serve.diagnostics.parity.drive import TOP, Row, Scored
from rocm_serve.diagnostics.parity.tap_files import TapWish
from rocm_serve.errors import UserError

PROGRAM = Path(__file__).resolve().parents[3] / "evals" / "references" / "hf_states.py"
_SHOWN_LINES = 4


class _Sequence(msgspec.Struct):
    seed: int
    ids: list[int]


class _Question(msgspec.Struct):
    model: str
    top: int
    vocab_used: int  # ids from here on are known to no tokenizer and reported by no server
    sequences: list[_Sequence]
    wish: TapWish | None


class _Answer(msgspec.Struct):
    noise: list[float]
    rows: list[list[Row]]


def check() -> None:
    """Refuse at once where HF cannot be run. Errors: UserError."""
    if not PROGRAM.is_file():
        raise UserError(f"hf needs {PROGRAM.name} of the source tree, which is not at {PROGRAM}")
    if find_spec("transformers") is None:
        raise UserError("hf needs the package transformers in this environment: pip install -e '.[test]'")


def run(
    model: Path,
    sequences: Sequence[Scored],
    folder: Path,
    env: Mapping[str, str],
    *,
    vocab_used: int,
    tick: Callable[[int, int], None],
    wish: TapWish | None = None,
) -> tuple[list[Scored], list[float]]:
    """Score sequences in float32; with `wish`, leave recorded rows in `folder`. Also returns HF's own noise on each.

    `tick` is told after each sequence how many tokens are done, of all.
    Errors: UserError when the program fails, with its last words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked = [_Sequence(i, one.ids) for i, one in enumerate(sequences)]
    question, answer = folder / "question.json", folder / "answer.json"
    question.write_bytes(msgspec.json.encode(_Question(str(model), TOP, vocab_used, asked, wish)))
    command = [sys.executable, str(PROGRAM), "--question", str(question), "--out", str(folder)]
    log = folder / "hf.log"
    with log.open("wb") as err, subprocess.Popen(command, env=dict(env), stdout=subprocess.PIPE, stderr=err) as running:
        try:
            assert running.stdout is not None
            for line in running.stdout:
                counts = line.split()
                if len(counts) == 2 and all(map(bytes.isdigit, counts)):  # else it is a library that speaks
                    tick(int(counts[0]), int(counts[1]))
        except BaseException:
            running.kill()
            raise
    if running.returncode != 0:
        words = "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_SHOWN_LINES:])
        raise UserError(f"side B, {PROGRAM.name}, ended with exit code {running.returncode}: {words or 'no word'}")
    found = msgspec.json.decode(answer.read_bytes(), type=_Answer)
    scored = [Scored(one.prompt_len, list(one.ids), rows) for one, rows in zip(sequences, found.rows, strict=True)]
    return scored, found.noise
