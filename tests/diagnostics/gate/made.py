"""Samples, answers and references of invented questions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from rocm_serve.diagnostics.gate.protocol import Protocol
from rocm_serve.diagnostics.gate.recorder import Answer
from rocm_serve.diagnostics.gate.reference import (
    FORMAT,
    Acceptance,
    Header,
    Published,
    Question,
    Reference,
    read_reference,
    write_reference,
)
from rocm_serve.diagnostics.gate.samples import Sample
from rocm_serve.diagnostics.gate.verdict import Run

PROTOCOL = Protocol(task="gsm8k-synth")


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sample(doc_id: int, right: bool = True, **changed: Any) -> Sample:
    value = doc_id if right else doc_id + 1
    made = Sample(
        doc_id=doc_id,
        doc_hash=hashed(f"doc {doc_id}"),
        prompt_hash=hashed(f"prompt {doc_id}"),
        question=f"How many pears are {doc_id} pears?",
        target=f"{doc_id} pears.\n#### {doc_id}",
        answer=f" These are {value} pears.\n#### {value}\n\n",
        verdicts={"strict-match": right, "flexible-extract": right},
        generation=PROTOCOL.generation(),
    )
    return msgspec.structs.replace(made, **changed)


def samples(count: int, wrong: Iterable[int] = ()) -> list[Sample]:
    bad = set(wrong)
    return [sample(i, i not in bad) for i in range(count)]


def run(count: int, wrong: Iterable[int] = (), **changed: Any) -> Run:
    these = samples(count, wrong)
    made = Run(expected=count, samples=these, problems=[], answers={one.prompt_hash: answer(one) for one in these})
    return msgspec.structs.replace(made, **changed)


def answer(of: Sample, **changed: Any) -> Answer:
    made = Answer(
        key=hashed(f"key {of.doc_id}"),
        prompt_hash=of.prompt_hash,
        latency_s=0.5 + 0.01 * (of.doc_id % 37),
        finish_reason="stop",
        prompt_tokens=500,
        completion_tokens=30 + of.doc_id * 7 % 60,
        response="{}",
    )
    return msgspec.structs.replace(made, **changed)


def header(**changed: Any) -> Header:
    protocol = changed.get("protocol", PROTOCOL)
    made = Header(
        format=FORMAT,
        name="invented",
        protocol=protocol,
        protocol_sha256=protocol.sha256,
        provenance={"program": "tests"},
    )
    return msgspec.structs.replace(made, **changed)


def question(of: Sample, **changed: Any) -> Question:
    made = Question(
        doc_id=of.doc_id,
        doc_hash=of.doc_hash,
        prompt_hash=of.prompt_hash,
        answer=of.answer,
        verdicts=of.verdicts,
        tokens=30 + of.doc_id * 7 % 60,
    )
    return msgspec.structs.replace(made, **changed)


def paired(path: Path, count: int, wrong: Iterable[int] = (), acceptance: Acceptance | None = None) -> Reference:
    """Write and read a reference of `count` questions, some of them wrong."""
    questions = [question(one) for one in samples(count, wrong)]
    write_reference(path, header(num_questions=count, acceptance=acceptance), questions)
    return read_reference(path)


def floor_only(path: Path, score: float, count: int = 1319) -> Reference:
    published = Published(count, {"strict-match": score, "flexible-extract": score}, "tests")
    write_reference(path, header(published=published))
    return read_reference(path)
