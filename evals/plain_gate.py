"""Gate a checkpoint on a machine without lm-eval: the same questions, the same judgement of answers, the same tests.

    python -m evals.plain_gate --model DIR --data DATA --reference FILE --out FOLDER [--limit N] [--serve-args "..."]

Starts a server, asks it the questions of a reference (DATA from `python -m evals.tiny.generator --out DATA`), and
writes each answer to FOLDER/answers.jsonl and the verdict to FOLDER/verdict.json. It is no `rocm-serve gate`: lm-eval
takes no part, and only floor and paired test are judged. Prompts are put together as lm-eval does it and held to the
reference's hashes. Exit code: 0 pass, 1 fail.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from evals.program import at_least, ended
from evals.references.hf_reference import STOPS, Item, items_of, sha256
from evals.smoke import served
from evals.tiny.hf_answers import verdicts
from rocm_serve.diagnostics.gate.reference import Reference, read_reference
from rocm_serve.diagnostics.gate.statistics import ALPHA, Floor, floor_chance, mcnemar_worse
from rocm_serve.diagnostics.gate.tasks import check_data
from rocm_serve.errors import UserError
from rocm_serve.outputs import check_folder

FILTER, REFERENCES = "strict", "strict-match"  # the same filter in the two places that name it
ANSWER_S = 600.0
CONCURRENT = 128


def ask(base_url: str, item: Item, max_tokens: int) -> str:
    """Return the greedy answer to one question."""
    body = {"prompt": item.prompt, "max_tokens": max_tokens, "temperature": 0, "stop": list(STOPS)}
    request = urllib.request.Request(
        f"{base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        return str(json.load(response)["choices"][0]["text"])


def ask_all(
    base_url: str, items: Sequence[Item], max_tokens: int, *, say: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Return the answers to all questions, many in flight; `say` gets a line now and then."""
    began = time.monotonic()
    texts = []
    with ThreadPoolExecutor(CONCURRENT) as pool:
        for text in pool.map(lambda item: ask(base_url, item, max_tokens), items):
            texts.append(text)
            if len(texts) % 100 == 0:
                say(f"{len(texts)} of {len(items)} answers, {time.monotonic() - began:.0f} s")
    return texts


def check_prompts(items: Sequence[Item], reference: Reference) -> None:
    """Hold the prompts to those that the reference answered. Errors: UserError."""
    for item in items:
        if sha256(item.prompt) != reference.questions[item.doc_id].prompt_hash:
            raise UserError(f"question {item.doc_id}: its prompt is not the one of {reference.header.name!r}")


def judge(items: Sequence[Item], texts: Sequence[str], reference: Reference) -> dict[str, Any]:
    """Count, and test floor and pairs at the gate's own levels."""
    mine = [verdicts(text, item.doc["answer"])[FILTER] for item, text in zip(items, texts, strict=True)]
    theirs = [reference.questions[item.doc_id].verdicts[REFERENCES] for item in items]
    lost = [item.doc_id for item, a, b in zip(items, mine, theirs, strict=True) if b and not a]
    gained = [item.doc_id for item, a, b in zip(items, mine, theirs, strict=True) if a and not b]
    floor = Floor(floor_chance(*reference.count(REFERENCES)), len(items))
    p = mcnemar_worse(len(lost), len(gained))
    return {
        "questions": len(items),
        "right": sum(mine),
        "least": floor.least,
        "lost": lost,
        "gained": gained,
        "p": p,
        "same_text": sum(
            text == reference.questions[item.doc_id].answer for item, text in zip(items, texts, strict=True)
        ),
        "outcome": "pass" if sum(mine) >= floor.least and p >= ALPHA else "fail",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="train.jsonl and test.jsonl")
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=at_least(1))
    parser.add_argument("--serve-args", default="")
    args = parser.parse_args()
    check_folder("--out", args.out)
    reference = read_reference(args.reference)
    check_data(reference.header.protocol.task, args.data)
    protocol = reference.header.protocol
    items = items_of(args.data, protocol.num_fewshot, args.limit)
    check_prompts(items, reference)
    began = time.monotonic()
    with served(args.model, f"--served-model-name tiny {args.serve_args}") as url:
        ready = time.monotonic()
        texts = ask_all(url, items, protocol.max_gen_toks, say=print)
        asked = time.monotonic() - ready
    with (args.out / "answers.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(
            json.dumps({"doc_id": item.doc_id, "answer": text}) + "\n" for item, text in zip(items, texts, strict=True)
        )
    verdict = judge(items, texts, reference) | {"ready_s": round(ready - began, 1), "asked_s": round(asked, 1)}
    (args.out / "verdict.json").write_text(json.dumps(verdict), encoding="utf-8")
    print(json.dumps(verdict))
    return 0 if verdict["outcome"] == "pass" else 1


if __name__ == "__main__":
    sys.exit(ended("plain_gate", main))
