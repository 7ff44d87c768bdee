"""What lm-eval wrote about every question, and whether it can be judged at all."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rocm_serve.diagnostics.gate.protocol import FILTERS, Filter, Protocol
from rocm_serve.diagnostics.gate.reference import Reference


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One question as it was asked, answered and judged."""

    doc_id: int
    doc_hash: str
    prompt_hash: str
    question: str
    target: str
    answer: str
    verdicts: dict[Filter, bool]
    generation: dict[str, Any]  # the settings lm-eval asked with


class _Line(msgspec.Struct):
    """A line of samples_*.jsonl: one question under one filter."""

    doc_id: int
    doc: dict[str, Any]
    target: str
    arguments: dict[str, dict[str, Any]]
    resps: list[list[str]]
    filter: str
    doc_hash: str
    prompt_hash: str
    exact_match: float


def read_samples(path: Path) -> tuple[list[Sample], list[str]]:
    """Return the questions in order of doc_id, and what is wrong with the file, a sentence each."""
    found: dict[int, dict[str, _Line]] = {}
    problems: list[str] = []
    for number, data in enumerate(path.read_bytes().splitlines(), 1):
        try:
            line = msgspec.json.decode(data, type=_Line)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            problems.append(f"{path.name}, line {number}: {error}")
            continue
        if line.filter in found.setdefault(line.doc_id, {}):
            problems.append(f"question {line.doc_id} is there twice under {line.filter}")
        found[line.doc_id][line.filter] = line
    samples = []
    for doc_id in sorted(found):
        lines = found[doc_id]
        if set(lines) != set(FILTERS):
            problems.append(f"question {doc_id} was judged by {', '.join(sorted(lines))}, not by {', '.join(FILTERS)}")
            continue
        try:
            samples.append(_sample(doc_id, lines))
        except (LookupError, TypeError) as error:
            problems.append(f"question {doc_id}: its sample lacks what lm-eval 0.4.13 writes: {error!r}")
    return samples, problems


def _sample(doc_id: int, lines: dict[str, _Line]) -> Sample:
    one = lines[FILTERS[0]]
    return Sample(
        doc_id=doc_id,
        doc_hash=one.doc_hash,
        prompt_hash=one.prompt_hash,
        question=str(one.doc.get("question", "")),
        target=one.target,
        answer=one.resps[0][0],
        verdicts={name: bool(lines[name].exact_match) for name in FILTERS},
        generation=one.arguments["gen_args_0"]["arg_1"],
    )


def prompts_sha256(hashes: Iterator[str]) -> str:
    """Return one hash for the prompts of a run, in order."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def count_problems(samples: list[Sample], expected: int) -> Iterator[str]:
    """Yield what is wrong with the number of questions: missing ones are named."""
    ids = [sample.doc_id for sample in samples]
    missing = sorted(set(range(expected)) - set(ids))
    surplus = sorted(set(ids) - set(range(expected)))
    if missing:
        yield f"{len(ids)} questions were judged and not {expected}: missing {_some(missing)}"
    if surplus:
        yield f"questions that do not belong here: {_some(surplus)}"


def unrecorded(samples: list[Sample], recorded: Container[str]) -> Iterator[str]:
    """Yield which questions lm-eval has an answer to that the recorder does not know by its prompt's hash."""
    ids = [one.doc_id for one in samples if one.prompt_hash not in recorded]
    if ids:
        yield (
            f"{len(ids)} of {len(samples)} questions have no recorded answer: {_some(ids)}; lm-eval took what the"
            " recorder could not read, or did not ask through it"
        )


def reference_problems(samples: list[Sample], reference: Reference) -> Iterator[str]:
    """Yield what makes a comparison by question impossible: other questions, or other prompts for them."""
    if reference.floor_only:
        yield from _whole_problems(samples, reference)
        return
    absent = [one.doc_id for one in samples if one.doc_id not in reference.questions]
    known = [(one, reference.questions[one.doc_id]) for one in samples if one.doc_id in reference.questions]
    docs = [one.doc_id for one, ref in known if one.doc_hash != ref.doc_hash]
    prompts = [one.doc_id for one, ref in known if one.doc_hash == ref.doc_hash and one.prompt_hash != ref.prompt_hash]
    if absent:
        yield f"the reference has no question {_some(absent)}"
    if docs:
        yield f"{len(docs)} questions are not the reference's (doc_hash): {_some(docs)}"
    if prompts:
        yield (
            f"{len(prompts)} prompts are not the reference's (prompt_hash): {_some(prompts)};"
            " shots, their seed, their order or the template differ"
        )


def _whole_problems(samples: list[Sample], reference: Reference) -> Iterator[str]:
    """Yield whether a whole run asked other prompts than a reference without questions was asked."""
    header = reference.header
    whole = header.published is not None and len(samples) == header.published.num_questions
    if whole and header.prompts_sha256 not in (None, prompts_sha256(one.prompt_hash for one in samples)):
        yield (
            "the prompts are not the reference's (prompts_sha256); data, shots, their seed, their order or the template"
            " differ"
        )


def protocol_problems(samples: list[Sample], protocol: Protocol) -> Iterator[str]:
    """Yield the generation settings that lm-eval asked with and the protocol does not state."""
    stated = protocol.generation()
    seen = {key: value for one in samples for key, value in one.generation.items() if value != stated.get(key)}
    for key, value in seen.items():
        yield f"lm-eval asked with {key} = {value!r}; the protocol says {stated.get(key)!r}"


def _some(ids: list[int], shown: int = 8) -> str:
    return ", ".join(map(str, ids[:shown])) + (f" and {len(ids) - shown} more" if len(ids) > shown else "")
