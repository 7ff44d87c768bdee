"""The report of a gate: one HTML file that holds everything it shows, and one JSON file with everything it knows."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import msgspec

from rocm_serve.diagnostics.gate import plots
from rocm_serve.diagnostics.gate.flow import Gated
from rocm_serve.diagnostics.gate.folder import DONE, now
from rocm_serve.diagnostics.gate.reference import Question
from rocm_serve.diagnostics.gate.samples import Sample, prompts_sha256
from rocm_serve.diagnostics.gate.verdict import Verdict, discordant
from rocm_serve.version import VERSION

PAGE: Final = "report.html"
OUTCOMES: Final = {"pass": "PASS", "fail": "FAIL", "invalid": "INVALID"}


def sentences(verdict: Verdict, notes: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (kind, sentence) in the order they are to be read."""
    yield from (("invalid", one) for one in verdict.invalid)
    yield from (("fail", one) for one in verdict.failed)
    yield from (("pass", one) for one in verdict.passed)
    yield from (("note", one) for one in notes)


def write(gated: Gated) -> tuple[Path, Path]:
    """Write both files into the run's folder; return their paths. The JSON last: it marks the run as done."""
    page, result = gated.folder / PAGE, gated.folder / DONE
    page.write_text(html(gated), encoding="utf-8")
    result.write_bytes(msgspec.json.format(msgspec.json.encode(as_json(gated)), indent=1) + b"\n")
    return page, result


def as_json(gated: Gated) -> dict[str, Any]:
    """Return the whole result; seconds and tokens as they are, shares from 0 to 1."""
    verdict, header = gated.verdict, gated.reference.header
    return {
        "outcome": verdict.outcome,
        "invalid": verdict.invalid,
        "failed": verdict.failed,
        "passed": verdict.passed,
        "notes": gated.notes,
        "scores": verdict.scores,
        "least_right": verdict.least,
        "paired": verdict.paired,
        "acceptance": verdict.acceptance,
        "gate": VERSION,
        "at": now(),
        "begun": {name: getattr(gated.begun, name) for name in gated.begun.__struct_fields__ if name != "metrics"},
        "protocol": header.protocol,
        "reference": {"name": header.name, "sha256": gated.reference.sha256, "provenance": header.provenance},
        "lm_eval": [
            {
                "version": gated.harness.version,
                "argv": one.argv,
                "exit_code": one.code,
                "samples": None if one.samples is None else str(one.samples),
                "task_hashes": None if one.results is None else one.results.task_hashes,
            }
            for one in gated.finished
        ],
        "prompts_sha256": prompts_sha256(one.prompt_hash for one in gated.runs[0].samples),
        "runs": [[_question(gated, one, number) for one in run.samples] for number, run in enumerate(gated.runs)],
    }


def _question(gated: Gated, sample: Sample, number: int) -> dict[str, Any]:
    answer = gated.runs[number].answers.get(sample.prompt_hash)
    reference = gated.reference.questions.get(sample.doc_id)
    return {
        "doc_id": sample.doc_id,
        "doc_hash": sample.doc_hash,
        "prompt_hash": sample.prompt_hash,
        "verdicts": sample.verdicts,
        "reference": None if reference is None else reference.verdicts,
        "answer": sample.answer,
        "tokens": None if answer is None else answer.completion_tokens,
        "finish_reason": None if answer is None else answer.finish_reason,
        "latency_s": None if answer is None else round(answer.latency_s, 4),
    }


def html(gated: Gated) -> str:
    """Return the page. Nothing in it is fetched from anywhere."""
    verdict, header = gated.verdict, gated.reference.header
    style = files("rocm_serve.diagnostics.gate").joinpath("style.css").read_text(encoding="utf-8")
    title = f"{header.protocol.task} gate: {OUTCOMES[verdict.outcome]}"
    listed = "".join(
        f'<li class="{kind}"><b>{kind}</b>{escape(sentence)}</li>' for kind, sentence in sentences(verdict, gated.notes)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f"<h1>{escape(header.protocol.task)} "
        f'<span class="badge {verdict.outcome}">{OUTCOMES[verdict.outcome]}</span></h1>'
        f'<p class="quiet">{escape(gated.begun.identity.model)} at {escape(gated.begun.base_url)}, begun'
        f" {escape(gated.begun.at)}, against {escape(header.name)}</p>"
        f'<ul class="sentences">{listed}</ul>'
        f"{''.join(_sections(gated))}</body></html>\n"
    )


def _sections(gated: Gated) -> Iterator[str]:
    verdict, protocol = gated.verdict, gated.reference.header.protocol
    if verdict.scores:
        yield "<h2>Accuracy</h2><p class=quiet>Share of right answers; 95 % Clopper-Pearson interval.</p>"
        yield plots.accuracy(verdict.scores, protocol.filter, verdict.least)
    if verdict.paired is not None:
        yield from _discordant(gated)
    yield from _histograms(gated)
    yield "<h2>How it was measured</h2>"
    yield _table(_facts(gated))


def _discordant(gated: Gated) -> Iterator[str]:
    found = discordant(gated.verdict, gated.runs[0].samples)
    texts = {
        "lost": "Lost: the reference is right, the server is wrong",
        "gained": "Gained: the server is right, the reference is wrong",
    }
    for kind, samples in found.items():
        yield f"<h2>{texts[kind]} ({len(samples)})</h2>"
        if not samples:
            yield '<p class="quiet">None.</p>'
        for sample in samples:
            yield _side_by_side(sample, gated.reference.questions[sample.doc_id])


def _side_by_side(sample: Sample, reference: Question) -> str:
    return (
        f"<details><summary>{sample.doc_id}: {escape(sample.question)}</summary>"
        f'<div class="pair"><div><h3>Server</h3><pre>{escape(sample.answer.strip()) or "(empty)"}</pre></div>'
        f"<div><h3>Reference</h3><pre>{escape(reference.answer.strip()) or '(empty)'}</pre></div>"
        f"<div><h3>Expected</h3><pre>{escape(sample.target.strip())}</pre></div></div></details>"
    )


def _histograms(gated: Gated) -> Iterator[str]:
    run = gated.runs[0]
    answers = [run.answers[one.prompt_hash] for one in run.samples if one.prompt_hash in run.answers]
    tokens = [float(one.completion_tokens) for one in answers if one.completion_tokens is not None]
    known = [gated.reference.questions.get(one.doc_id) for one in run.samples]
    theirs = [float(one.tokens) for one in known if one is not None and one.tokens is not None]
    if tokens:
        key = '<span class="key a"></span>server'
        key += '<span class="key b"></span>reference' if theirs else ""
        yield f'<h2>Length of answers</h2><p class="quiet">Tokens of each answer.{key}</p>'
        yield plots.histogram(tokens, theirs, "tokens", "length of answers")
    if answers:
        yield (
            '<h2>Latency</h2><p class="quiet">Seconds from request to whole answer, as the client saw them; waiting'
            " for a place counts.</p>"
        )
        yield plots.histogram([one.latency_s for one in answers], [], "seconds", "latency of answers")


def _facts(gated: Gated) -> Iterator[tuple[str, str]]:
    header, identity = gated.reference.header, gated.begun.identity
    yield "protocol", header.protocol.sentence()
    yield "protocol sha256", header.protocol.sha256
    for name in identity.__struct_fields__:
        if (value := getattr(identity, name)) is not None:
            yield f"server {name}", str(value)
    yield "reference", header.name
    yield "reference sha256", gated.reference.sha256
    for name, text in header.provenance.items():
        yield f"reference {name}", text
    for name, digest in gated.begun.data_sha256.items():
        yield f"{name} sha256", digest
    yield "rocm-serve", VERSION
    yield "lm-eval", gated.harness.version
    for one in gated.finished:
        yield "command", shlex.join(one.argv)
        yield "samples", str(one.samples)


def _table(facts: Iterator[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in facts)
    return f"<table>{rows}</table>"
