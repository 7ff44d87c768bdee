"""References: a header line, then one line a question. Floor-only ones have a published score and no questions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from rocm_serve.diagnostics.gate.protocol import FILTERS, Filter, Protocol
from rocm_serve.errors import UserError

FORMAT = 1


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scores somebody else measured, for a floor alone."""

    num_questions: int
    scores: dict[Filter, float]
    source: str


class Acceptance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Share of first drafts that were accepted: what was measured, and between what a server's may lie."""

    measured: float
    low: float
    high: float = 1.0


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the reference is of, how it was asked, and how it was made."""

    format: int
    name: str
    protocol: Protocol
    protocol_sha256: str
    provenance: dict[str, str]  # of the answers or the published number: program, versions, device, command
    data_sha256: dict[str, str] = {}  # of train.jsonl and test.jsonl
    num_questions: int = 0  # lines that follow
    questions_sha256: str | None = None  # of those lines, an LF between two of them; older files have none
    prompts_sha256: str | None = None  # of all prompt hashes in order, for a reference without questions
    published: Published | None = None
    acceptance: Acceptance | None = None


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question's answer. `doc_hash` and `prompt_hash` are lm-eval's, so they can be held against its samples."""

    doc_id: int
    doc_hash: str
    prompt_hash: str
    answer: str
    verdicts: dict[Filter, bool]
    tokens: int | None = None
    truncated: bool = False


class Reference(msgspec.Struct, frozen=True):
    """A header and its questions by doc_id."""

    header: Header
    questions: dict[int, Question]
    sha256: str  # of the file

    @property
    def floor_only(self) -> bool:
        return not self.questions

    def count(self, name: Filter) -> tuple[int, int]:
        """Return right answers and questions behind the floor; of a published score the nearest count."""
        if self.questions:
            return sum(question.verdicts[name] for question in self.questions.values()), len(self.questions)
        published = self.header.published
        assert published is not None, "read_reference refuses a file with neither"
        return round(published.scores[name] * published.num_questions), published.num_questions


def read_reference(path: Path) -> Reference:
    """Read and check a reference file. Errors: UserError that says what is wrong with it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"--reference {path}: {error.strerror}") from None
    lines = data.splitlines()
    try:
        header = msgspec.json.decode(lines[0] if lines else b"", type=Header)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UserError(f"--reference {path}: its first line is no header of a reference: {error}") from None
    questions: dict[int, Question] = {}
    for number, line in enumerate(lines[1:], 2):
        try:
            question = msgspec.json.decode(line, type=Question)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise UserError(f"--reference {path}, line {number}: {error}") from None
        if question.doc_id in questions:
            raise UserError(f"--reference {path}, line {number}: question {question.doc_id} is there twice")
        questions[question.doc_id] = question
    problem = _problem(header, questions)
    if problem is None and header.questions_sha256 not in (None, found := lines_sha256(lines[1:])):
        problem = f"its questions hash to {found}, not to its questions_sha256: they were edited"
    if problem:
        raise UserError(f"--reference {path}: {problem}")
    return Reference(header, questions, hashlib.sha256(data).hexdigest())


def _problem(header: Header, questions: dict[int, Question]) -> str | None:
    """Say in one sentence why no server may be judged by it, or None."""
    if header.format != FORMAT:
        return f"it has format {header.format}; this program reads {FORMAT}"
    if header.protocol_sha256 != header.protocol.sha256:
        return f"its protocol hashes to {header.protocol.sha256}, not to its protocol_sha256: it was edited"
    if len(questions) != header.num_questions:
        return f"{len(questions)} questions, and the header says {header.num_questions}: it is cut off or not finished"
    if sorted(questions) != list(range(len(questions))):
        return f"its questions are not 0 to {len(questions) - 1}"
    if not questions and header.published is None:
        return "no questions and no published score: nothing to judge by"
    needed = header.protocol.filter
    if not questions and header.published is not None and needed not in header.published.scores:
        return f"its published scores have no {needed}, which its protocol gates"
    for question in questions.values():
        if set(question.verdicts) != set(FILTERS):
            return f"question {question.doc_id} has no verdict for one of {', '.join(FILTERS)}"
    return None


def lines_sha256(lines: Sequence[bytes]) -> str:
    """Hash the lines of the questions, whatever their ends are."""
    return hashlib.sha256(b"\n".join(lines)).hexdigest()


def write_reference(path: Path, header: Header, questions: Iterable[Question] = ()) -> None:
    """Write a reference, the hash of its questions too; keys in the order of the fields."""
    lines = [*map(msgspec.json.encode, questions)]
    if lines:
        header = msgspec.structs.replace(header, questions_sha256=lines_sha256(lines))
    lines = [msgspec.json.encode(header), *lines]
    path.write_bytes(b"\n".join(lines) + b"\n")


def doc_hash(doc: dict[str, object]) -> str:
    """Return lm-eval's hash of a document."""
    return hashlib.sha256(json.dumps(doc, indent=2, ensure_ascii=False).encode()).hexdigest()
