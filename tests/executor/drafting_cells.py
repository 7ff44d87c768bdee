"""Every setting of drafting, by hand; the ten cells of test_speculative.py are a choice of them.

    python -m tests.executor.drafting_cells [--only WORDS]

K 1..4 x PP 1, 2 x TP 1, 2 x EP 1, 2 (with TP 2, by two exchanges) x chunks of 64 and 16 rows x requests ended on the
way or not x the trained drafter or a random one: short answers, greedy ones and one sampled, in float32 on ranks
simulated in this process. Tokens and log-probs must be those without drafts, bit for bit. Minutes. Exit code: 0 when
all cells are equal, 1 when one is not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from msgspec.structs import replace as changed

from rocm_serve.checkpoint.synthetic import make_checkpoint
from tests.executor.generate import Requests
from tests.executor.test_speculative import TRAINED, Cell, prompts, requests_of, run, same

RANKS = ((1, 1, "local"), (2, 1, "local"), (2, 2, "local"), (2, 2, "torch"))  # TP, EP, how rows come to experts
ASKED = ("r0", "r1", "r2", "r4", "r6")  # r1 and r4 are those that are ended from outside
LONGEST = 10  # tokens of an answer


def groups() -> Iterator[tuple[Cell, ...]]:
    """Yield the cells that have the same answers without drafts."""
    for trained, pp, (tp, ep, exchange), chunk in product((True, False), (1, 2), RANKS, (64, 16)):
        yield tuple(
            Cell(pp, tp, ep, chunk, aborts, drafts, trained, exchange)
            for aborts, drafts in product((False, True), (1, 2, 3, 4))
        )


def requests() -> Requests:
    every = requests_of(prompts(8))
    return {
        name: (prompt, changed(params, max_tokens=min(params.max_tokens, LONGEST)))
        for name, (prompt, params) in every.items()
        if name in ASKED
    }


def judge(cells: tuple[Cell, ...], path: Path, asked: Requests) -> Iterator[tuple[Cell, str]]:
    """Run the cells and, once, the same without drafts; yield what is wrong with each, or nothing."""
    plain, _ = run(replace(cells[0], aborts=False), path, 0, asked)
    for cell in cells:
        answers, session = run(cell, path, cell.drafts, asked)
        stats = session.stats
        try:
            same(answers, plain, cell)
            assert len(stats.draft_tokens_by_position) == cell.drafts and stats.draft_tokens > 4, "it has not drafted"
            assert not cell.trained or stats.accepted_draft_tokens, "nothing was accepted"
            assert stats.pages_used == stats.slots_used == 0, "pages or slots are left"
        except AssertionError as error:
            yield cell, str(error) or "tokens or log-probs differ"
        else:
            yield cell, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cells with these words in their name, such as pp2-tp1")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    began, equal, count = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory(prefix="drafting-cells-") as folder:
        random = make_checkpoint(Path(folder) / "random", "text-fp8", "fp8", seed=7, layers=4)
        asked = requests()
        for group in groups():
            chosen = tuple(cell for cell in group if only in cell.name)
            for cell, wrong in judge(chosen, TRAINED if group[0].trained else random, asked) if chosen else ():
                count += 1
                equal += not wrong
                if wrong:
                    print(f"{cell.name}: {wrong}", flush=True)
            if chosen:
                print(f"{equal} of {count} equal, {time.monotonic() - began:.0f} s", flush=True)
    return 0 if count and equal == count else 1


if __name__ == "__main__":
    sys.exit(main())
