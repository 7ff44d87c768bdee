"""The independent reference: nothing of the server in it, and a file the gate can read."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from evals.references import hf_reference
from evals.references.hf_reference import Item, StopAtText, cut_at_stop, items_of, make, parse
from evals.tiny.documents import few_shot_prompt, shots_of_lm_eval
from evals.tiny.generator import POOL_SHOTS, pool, write_pool
from rocm_serve.diagnostics.gate.protocol import Protocol
from rocm_serve.diagnostics.gate.reference import doc_hash, read_reference

CHECKPOINT = Path(__file__).parents[3] / "evals" / "tiny" / "checkpoint"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pool")
    write_pool(folder)
    return folder


def arguments(data: Path, out: Path, *more: str) -> Any:
    return parse(["--model", str(CHECKPOINT), "--data", str(data), "--out", str(out), *more])


def pretend(asked: list[int]) -> Any:
    """Stand in for the model: the gold answer of every question."""

    def answer(model: object, items: Sequence[Item]) -> list[tuple[str, int, bool]]:
        asked.extend(item.doc_id for item in items)
        return [(f" {item.doc['answer']}\n\n", 50, False) for item in items]

    return answer


def test_it_imports_nothing_of_the_server() -> None:
    for module in (hf_reference.__file__, Path(hf_reference.__file__).parents[1] / "tiny" / "hf_answers.py"):
        nodes = list(ast.walk(ast.parse(Path(module).read_text(encoding="utf-8"))))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not [name for name in names if name.split(".")[0] in ("rocm_serve", "tests")]


def test_it_asks_what_the_generator_says_in_the_order_of_lm_eval(data: Path) -> None:
    shots, tests = pool("train", POOL_SHOTS), pool("test", 4)
    drawn = shots_of_lm_eval(5, 4, POOL_SHOTS)
    expected = [few_shot_prompt([shots[i] for i in those], p.question) for those, p in zip(drawn, tests, strict=True)]
    items = items_of(data, 5, 4)
    assert [item.prompt for item in items] == expected
    assert [hf_reference.doc_hash(item.doc) for item in items] == [doc_hash(dict(item.doc)) for item in items]


def test_the_gate_reads_what_it_writes(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_reference, "open_model", lambda *_: None)
    monkeypatch.setattr(hf_reference, "answer", pretend([]))
    out = tmp_path / "r.jsonl"
    make(arguments(data, out, "--limit", "6", "--batch", "4", "--acceptance", "0.855:0.7:0.95"))
    reference = read_reference(out)
    assert reference.header.protocol == Protocol(task="gsm8k-synth")
    assert reference.count("strict-match") == reference.count("flexible-extract") == (6, 6)
    assert reference.header.acceptance is not None and reference.header.acceptance.low == 0.7
    assert reference.header.questions_sha256, "and reading it back has held the questions against it"
    assert not out.with_name("r.jsonl.partial").exists()


def test_an_interrupted_run_goes_on(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(hf_reference, "open_model", lambda *_: None)
    answer = pretend(asked)

    def interrupted(model: object, items: Sequence[Item]) -> list[tuple[str, int, bool]]:
        if len(asked) >= 4:
            raise KeyboardInterrupt
        return list(answer(model, items))

    monkeypatch.setattr(hf_reference, "answer", interrupted)
    out = tmp_path / "r.jsonl"
    args = arguments(data, out, "--limit", "8", "--batch", "2")
    with pytest.raises(KeyboardInterrupt):
        make(args)
    partial = out.with_name("r.jsonl.partial")
    partial.write_bytes(partial.read_bytes()[:-10])  # the last line was being written
    monkeypatch.setattr(hf_reference, "answer", answer)
    make(args)
    assert len(asked) == 9 and set(asked) == set(range(8)), "the cut line is asked again, nothing else"
    assert read_reference(out).count("strict-match") == (8, 8)
    partial.write_text(json.dumps({"format": 1, "name": "another"}) + "\n")
    make(args)
    assert len(asked) == 17, "what another header began is not taken over"


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        (" 4.\n#### 4\n\nQuestion: And", (" 4.\n#### 4\n\n", True)),
        ("a</s>b<|im_end|>", ("a", True)),
        ("a<|im_end|>b</s>", ("a", True)),
        ("no Question here", ("no Question here", False)),
    ],
)
def test_stops(text: str, cut: tuple[str, bool]) -> None:
    assert cut_at_stop(text) == cut


def test_a_row_ends_by_its_own_text_alone() -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    prompt = tokenizer.encode("Question: one?\nAnswer:").ids
    rows = [tokenizer.encode(text).ids for text in (" 4\n\nQuestion:", " She has four pears, and")]
    length = min(map(len, rows))
    batch = torch.tensor([prompt + row[-length:] for row in rows])
    stop = StopAtText(tokenizer, len(prompt))
    assert stop(batch, None).tolist() == [True, False], "the prompt's own `Question:` does not count"


def test_the_checkpoint_answers(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    done = make(arguments(data, out, "--limit", "4", "--batch", "3"))
    assert sum(line["verdicts"]["strict-match"] for line in done.values()) >= 3
    assert all(line["answer"].endswith("\n\n") and not line["truncated"] for line in done.values())
    alone = make(arguments(data, tmp_path / "s.jsonl", "--limit", "4", "--batch", "1"))
    assert {i: line["answer"] for i, line in done.items()} == {i: line["answer"] for i, line in alone.items()}
