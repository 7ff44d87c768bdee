"""Which run may be continued."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rocm_serve.diagnostics.gate.folder import DONE, Begun, open_run
from rocm_serve.diagnostics.gate.server import Identity
from rocm_serve.errors import UserError

BEGUN = Begun(
    protocol_sha256="p",
    data_sha256={"test.jsonl": "d"},
    questions=10,
    base_url="http://h",
    identity=Identity(model="m", started="1"),
    metrics={"x_total": 1.0},
    at="2026-01-01T00:00:00Z",
)


def test_a_run_without_a_result_is_continued_with_what_it_was_begun_with(tmp_path: Path) -> None:
    first, _, notes = open_run(tmp_path, BEGUN, fresh=False)
    assert notes == []
    later = msgspec.structs.replace(BEGUN, metrics={"x_total": 9.0}, at="later")
    second, begun, notes = open_run(tmp_path, later, fresh=False)
    assert second == first and begun == BEGUN
    assert notes == [f"continues {first}, begun {BEGUN.at}"]


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    first = open_run(tmp_path, BEGUN, fresh=False)[0]
    (first / DONE).write_text("{}")
    second = open_run(tmp_path, BEGUN, fresh=False)[0]
    assert (first.name, second.name) == ("run-001", "run-002")


def test_fresh_begins_anew(tmp_path: Path) -> None:
    first = open_run(tmp_path, BEGUN, fresh=False)[0]
    assert open_run(tmp_path, BEGUN, fresh=True)[0] != first


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"protocol_sha256": "q"}, "the reference has another protocol"),
        ({"data_sha256": {}}, "the data differ"),
        ({"questions": 11}, "another number of questions"),
        ({"base_url": "http://i"}, "another server"),
        ({"identity": Identity(model="m", started="2")}, "the server was restarted"),
    ],
)
def test_a_run_of_something_else_is_not_continued(tmp_path: Path, changed: dict[str, object], why: str) -> None:
    first = open_run(tmp_path, BEGUN, fresh=False)[0]
    second, _, (note,) = open_run(tmp_path, msgspec.structs.replace(BEGUN, **changed), fresh=False)
    assert second != first and why in note


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out"):
        open_run(tmp_path / "file" / "out", BEGUN, fresh=False)
