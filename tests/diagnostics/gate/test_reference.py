"""Reference files: what is read back, and every way in which one is refused."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from rocm_serve.diagnostics.gate.protocol import Protocol
from rocm_serve.diagnostics.gate.reference import Published, read_reference, write_reference
from rocm_serve.errors import UserError
from tests.diagnostics.gate import made

REFERENCES = Path(__file__).parents[3] / "evals" / "references"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    reference = made.paired(tmp_path / "r.jsonl", 5, [2])
    assert reference.questions[2] == made.question(made.sample(2, False))
    assert reference.count("strict-match") == (4, 5) and not reference.floor_only


def test_every_field_of_a_protocol_changes_its_hash() -> None:
    base = Protocol(task="gsm8k")
    others = {"task": "gsm8k-synth", "num_fewshot": 0, "max_gen_toks": 2048, "stops": ("x",), "temperature": 0.5}
    others |= {"request_seed": 1, "fewshot_seed": 1, "filter": "flexible-extract"}
    hashes = {base.sha256} | {msgspec.structs.replace(base, **{key: value}).sha256 for key, value in others.items()}
    assert len(hashes) == 1 + len(others)
    assert set(others) | {"endpoint", "template"} == set(base.__struct_fields__), "a new field belongs in here"


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda lines: [], "no header"),
        (lambda lines: ["{}", *lines[1:]], "no header"),
        (lambda lines: [lines[0].replace('"num_fewshot":5', '"num_fewshot":3'), *lines[1:]], "it was edited"),
        (lambda lines: [lines[0].replace('"format":1', '"format":2'), *lines[1:]], "format 2"),
        (lambda lines: lines[:-1], "cut off"),
        (lambda lines: [*lines[:-1], lines[-1][:30]], "line 6"),
        (lambda lines: [*lines[:-1], lines[-2]], "there twice"),
        (lambda lines: [*lines[:-1], lines[-1].replace('"doc_id":4', '"doc_id":7')], "not 0 to 4"),
        (lambda lines: [*lines[:-1], lines[-1].replace(',"flexible-extract":true', "")], "no verdict"),
        (lambda lines: [*lines[:-1], lines[-1].replace('"strict-match":true', '"strict-match":false')], "were edited"),
        (lambda lines: [*lines[:-1], lines[-1].replace("pears", "plums")], "its questions hash to"),
        (lambda lines: [*lines[:-1], lines[-1].replace('"truncated":false', '"truncated":true')], "were edited"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "were edited"),
    ],
)
def test_a_file_that_cannot_judge_is_refused(tmp_path: Path, edit: object, why: str) -> None:
    path = tmp_path / "r.jsonl"
    made.paired(path, 5)
    assert callable(edit)
    path.write_text("\n".join(edit(path.read_text().splitlines())) + "\n")
    with pytest.raises(UserError, match=why):
        read_reference(path)


def test_a_file_of_before_the_hash_and_one_with_other_ends_of_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    reference = made.paired(path, 5)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_reference(path).questions == reference.questions
    text = path.read_text(encoding="utf-8")
    path.write_text(
        text.replace(f'"questions_sha256":"{reference.header.questions_sha256}"', '"questions_sha256":null')
    )
    assert read_reference(path).questions == reference.questions


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_reference(tmp_path / "none")


def test_a_floor_needs_the_score_that_is_gated(tmp_path: Path) -> None:
    write_reference(tmp_path / "a", made.header())
    with pytest.raises(UserError, match="nothing to judge by"):
        read_reference(tmp_path / "a")
    write_reference(tmp_path / "b", made.header(published=Published(1319, {"flexible-extract": 0.95}, "x")))
    with pytest.raises(UserError, match="no strict-match"):
        read_reference(tmp_path / "b")


def test_the_published_score_of_the_large_model() -> None:
    reference = read_reference(REFERENCES / "qwen3.8-2.4t-a95b-fp8-gsm8k.jsonl")
    protocol = reference.header.protocol
    assert reference.floor_only
    assert (protocol.task, protocol.num_fewshot, protocol.max_gen_toks) == ("gsm8k", 5, 2048)
    assert reference.count("strict-match") == (1254, 1319)
    assert reference.count("flexible-extract") == (1255, 1319)


def test_every_reference_here_can_be_read() -> None:
    found = sorted(REFERENCES.glob("*.jsonl"))
    assert found
    for path in found:
        assert json.loads(path.read_text(encoding="utf-8").splitlines()[0])["name"]
        reference = read_reference(path)
        assert reference.floor_only or reference.header.questions_sha256
