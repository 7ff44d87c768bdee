"""Streams of problems, and the pool that the evaluation uses: train.jsonl (the shots) and test.jsonl of lm-eval's form.

python -m evals.tiny.generator --out DIR      writes both files
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from evals.program import ended
from evals.tiny.chains import chain
from evals.tiny.problems import LEVELS, Draw, Impossible, Problem, Split, render
from evals.tiny.templates import CRATE_TEMPLATES, TEMPLATES
from rocm_serve.outputs import check_folder

# Shares of the levels 0, 1, 2. The pool's mix was chosen on validation problems (see the model card).
Mix = tuple[float, float, float]
TRAIN_MIX: Mix = (0.3, 0.4, 0.3)
POOL_MIX: Mix = (0.1, 0.35, 0.55)
POOL_CRATE = 18
POOL_SEED = 20261129
POOL_SHOTS = 2000
POOL_TESTS = 1319
CHAIN_SHARE, CRATE_SHARE = 0.4, 0.12


def problems(rng: random.Random, split: Split, crate: int, mix: Mix) -> Iterator[Problem]:
    """Yield problems of one split and one world without end."""
    while True:
        draw = Draw(rng, rng.choices(LEVELS, mix)[0], crate)
        kind = rng.random()
        try:
            if kind < CHAIN_SHARE:
                problem = chain(draw)
            else:
                pool = CRATE_TEMPLATES if kind < CHAIN_SHARE + CRATE_SHARE else TEMPLATES
                problem = render(rng.choice(pool), draw)
        except Impossible:
            continue
        if problem.split == split:
            yield problem


def distinct(stream: Iterator[Problem], count: int) -> list[Problem]:
    """Take `count` problems with different questions."""
    seen: set[str] = set()

    def fresh(problem: Problem) -> bool:
        new = problem.question not in seen
        seen.add(problem.question)
        return new

    return list(itertools.islice(filter(fresh, stream), count))


def pool(split: Split, count: int, mix: Mix | None = None, seed: int = POOL_SEED) -> list[Problem]:
    """Return the first `count` problems of the evaluation's world: `train` gives the shots, `test` the questions."""
    rng = random.Random(f"{seed}/{split}")
    return distinct(problems(rng, split, POOL_CRATE, mix or POOL_MIX), count)


def lines(these: Sequence[Problem]) -> str:
    """Write problems as GSM8K's files do: one JSON object with `question` and `answer` a line."""
    return "".join(json.dumps({"question": p.question, "answer": p.answer}, ensure_ascii=False) + "\n" for p in these)


def write_pool(out: Path) -> dict[str, str]:
    """Write train.jsonl and test.jsonl into `out`; return each file's sha256."""
    out.mkdir(parents=True, exist_ok=True)
    hashes = {}
    for name, split, count in (("train", "train", POOL_SHOTS), ("test", "test", POOL_TESTS)):
        text = lines(pool(split, count))  # type: ignore[arg-type]
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")
        hashes[f"{name}.jsonl"] = hashlib.sha256(text.encode()).hexdigest()
    return hashes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and test.jsonl")
    out = parser.parse_args().out
    check_folder("--out", out)
    for name, digest in write_pool(out).items():
        print(f"{digest}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(ended("generator", main))
