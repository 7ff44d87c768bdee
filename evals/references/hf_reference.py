"""Answer a gate's questions with HF Transformers alone, and write the reference that `rocm-serve gate` compares with.

    python -m evals.tiny.generator --out DATA
    python -m evals.references.hf_reference --model evals/tiny/checkpoint --task gsm8k-synth --data DATA \\
        --out evals/references/tiny-gsm8k-synth.jsonl [--device cuda] [--batch 64]

Nothing of the server is imported: weights are dequantised by evals/tiny/hf_answers.py and run in float32 by HF's own
`generate`, greedily; prompts and shots are put together here as lm-eval does it (the gate holds their hashes against
lm-eval's own). Run again after an interruption, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from evals.tiny.hf_answers import load, verdicts

FORMAT = 1
LM_EVAL = "0.4.13"  # whose way to draw shots and to hash is followed here
STOPS = ("Question:", "</s>", "<|im_end|>")
SEED = 1234
_TAIL_TOKENS = 24  # that are decoded to look for a stop: more than the longest stop has


@dataclass(frozen=True)
class Item:
    """One question with its prompt."""

    doc_id: int
    doc: dict[str, str]
    prompt: str


def items_of(data: Path, shots: int, limit: int | None) -> list[Item]:
    """Put the prompts together as lm-eval's gsm8k does: one generator draws the shots of every question in turn."""
    train, test = (read_rows(data / f"{name}.jsonl") for name in ("train", "test"))
    rng = random.Random(SEED)
    found = []
    for doc_id, doc in enumerate(test[:limit]):
        drawn = rng.sample(train, shots)
        before = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in drawn)
        found.append(Item(doc_id, doc, f"{before}Question: {doc['question']}\nAnswer:"))
    return found


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sha256(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def doc_hash(doc: dict[str, str]) -> str:
    """lm-eval's hash of a document."""
    return sha256(json.dumps(doc, indent=2, ensure_ascii=False))


def cut_at_stop(text: str) -> tuple[str, bool]:
    """Return the text before the first stop, and whether there was one."""
    places = [place for stop in STOPS if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


class StopAtText(StoppingCriteria):
    """Ends a row of a batch once its new text has a stop in it."""

    def __init__(self, tokenizer: Tokenizer, width: int) -> None:
        self.tokenizer, self.width = tokenizer, width

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        tails = input_ids[:, self.width :][:, -_TAIL_TOKENS:].tolist()
        texts = self.tokenizer.decode_batch(tails, skip_special_tokens=True)
        return torch.tensor([cut_at_stop(text)[1] for text in texts], device=input_ids.device)


@dataclass
class Model:
    """What answers: HF's model, its tokenizer, and the ids that end an answer."""

    hf: Any
    tokenizer: Tokenizer
    ends: list[int]
    longest: int


def open_model(path: Path, device: str, longest: int) -> Model:
    ends = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    return Model(load(path, device), tokenizer, ends if isinstance(ends, list) else [ends], longest)


@torch.inference_mode()
def answer(model: Model, items: Sequence[Item]) -> list[tuple[str, int, bool]]:
    """Answer a batch. Returns of each item: text before the stop, tokens, whether the limit cut it off."""
    ids = [model.tokenizer.encode(item.prompt, add_special_tokens=False).ids for item in items]
    width = max(map(len, ids))
    pad = model.ends[0]
    padded = torch.tensor([[pad] * (width - len(row)) + row for row in ids], device=model.hf.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=model.hf.device)
    out = model.hf.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=model.longest,
        do_sample=False,
        eos_token_id=model.ends,
        pad_token_id=pad,
        stopping_criteria=StoppingCriteriaList([StopAtText(model.tokenizer, width)]),
    )
    return [finish(model, row) for row in out[:, width:].tolist()]


def finish(model: Model, row: list[int]) -> tuple[str, int, bool]:
    """Cut one row of ids at its end and at a stop."""
    end = next((place for place, token in enumerate(row) if token in model.ends), None)
    ids = row if end is None else row[:end]
    text, stopped = cut_at_stop(model.tokenizer.decode(ids, skip_special_tokens=True))
    return text, len(ids), end is None and not stopped


def protocol_of(args: argparse.Namespace) -> dict[str, Any]:
    """The protocol, field by field as the gate writes it: its hash depends on the order."""
    return {
        "task": args.task,
        "endpoint": "/v1/completions",
        "template": "none",
        "num_fewshot": args.num_fewshot,
        "max_gen_toks": args.max_gen_toks,
        "stops": list(STOPS),
        "temperature": 0.0,
        "request_seed": SEED,
        "fewshot_seed": SEED,
        "filter": "strict-match",
    }


def header_of(args: argparse.Namespace, questions: int) -> dict[str, Any]:
    protocol = protocol_of(args)
    weights = sha256("".join(sha256(path.read_bytes()) for path in sorted(args.model.glob("*.safetensors"))))
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or "cpu"
    header: dict[str, Any] = {
        "format": FORMAT,
        "name": args.name or f"{args.model.name} by HF Transformers",
        "protocol": protocol,
        "protocol_sha256": sha256(json.dumps(protocol, separators=(",", ":"), ensure_ascii=False)),
        "provenance": {
            "program": "evals/references/hf_reference.py",
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "device": device,
            "dtype": "float32",
            "batch": str(args.batch),
            "lm_eval": LM_EVAL,
            "weights_sha256": weights,
            "made": datetime.now(UTC).strftime("%Y-%m-%d"),
        },
        "data_sha256": {name: sha256((args.data / name).read_bytes()) for name in ("train.jsonl", "test.jsonl")},
        "num_questions": questions,
    }
    if args.acceptance:
        measured, low, high = map(float, args.acceptance.split(":"))
        header["acceptance"] = {"measured": measured, "low": low, "high": high}
    return header


def line_of(item: Item, text: str, tokens: int, truncated: bool) -> dict[str, Any]:
    judged = verdicts(text, item.doc["answer"])
    return {
        "doc_id": item.doc_id,
        "doc_hash": doc_hash(item.doc),
        "prompt_hash": sha256(item.prompt),
        "answer": text,
        "verdicts": {"strict-match": judged["strict"], "flexible-extract": judged["flexible"]},
        "tokens": tokens,
        "truncated": truncated,
    }


def already(partial: Path, header: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the questions that an interrupted run of the same header answered; a line that was cut off is dropped."""
    if not partial.is_file():
        return {}
    whole = [json.loads(line) for line in partial.read_text(encoding="utf-8").split("\n")[:-1]]
    same = [value for value in (whole[:1] or [None]) if value == header]
    return {line["doc_id"]: line for line in whole[1:]} if same else {}


def batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Batches of like lengths, the longest first: memory is short at once or never."""
    ordered = sorted(items, key=lambda item: -len(item.prompt))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def dump(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


def make(args: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Answer every question, writing each batch to OUT.partial, then write OUT in order."""
    items = items_of(args.data, args.num_fewshot, args.limit)
    header = header_of(args, len(items))
    partial = args.out.with_name(args.out.name + ".partial")
    done = already(partial, header)
    partial.write_text(dump(header) + "".join(map(dump, done.values())), encoding="utf-8")
    model, start = open_model(args.model, args.device, args.max_gen_toks), time.perf_counter()
    with partial.open("a", encoding="utf-8") as file:
        for these in batches([item for item in items if item.doc_id not in done], args.batch):
            for item, (text, tokens, truncated) in zip(these, answer(model, these), strict=True):
                done[item.doc_id] = line_of(item, text, tokens, truncated)
                file.write(dump(done[item.doc_id]))
            file.flush()
            print(f"{len(done)} of {len(items)} after {time.perf_counter() - start:.0f} s", flush=True)
    lines = [dump(done[item.doc_id]) for item in items]
    header["questions_sha256"] = sha256("".join(lines).removesuffix("\n"))
    args.out.write_text(dump(header) + "".join(lines), encoding="utf-8")
    partial.unlink()
    return done


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="text-fp8 checkpoint")
    parser.add_argument("--task", choices=("gsm8k", "gsm8k-synth"), default="gsm8k-synth")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="reference file to write")
    parser.add_argument("--name", help="of the reference, in reports")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--limit", type=int, help="the first N questions only")
    parser.add_argument("--num-fewshot", type=int, default=5)
    parser.add_argument("--max-gen-toks", type=int, default=256)
    parser.add_argument("--acceptance", metavar="MEASURED:LOW:HIGH", help="share of accepted drafts, where drafting")
    return parser.parse_args(argv)


def main() -> None:
    torch.set_float32_matmul_precision("highest")
    done = make(parse())
    for name in ("strict-match", "flexible-extract"):
        right = sum(line["verdicts"][name] for line in done.values())
        print(f"{name}: {right} of {len(done)} = {right / len(done):.4f}", file=sys.stderr)


if __name__ == "__main__":
    main()
