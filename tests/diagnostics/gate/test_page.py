"""The report: everything in one file, nothing of an answer taken for markup, numbers where they belong."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from rocm_serve.diagnostics.gate import page
from rocm_serve.diagnostics.gate.flow import Gated
from rocm_serve.diagnostics.gate.folder import Begun
from rocm_serve.diagnostics.gate.lm_eval import Finished, Harness
from rocm_serve.diagnostics.gate.plots import Axis, round_step
from rocm_serve.diagnostics.gate.reference import Reference
from rocm_serve.diagnostics.gate.server import Identity
from rocm_serve.diagnostics.gate.verdict import Run, judge
from tests.diagnostics.gate import made

VOID = {"meta"}


class Checker(HTMLParser):
    """Keeps the open tags: each has to be closed in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def gated(folder: Path, run: Run, reference: Reference) -> Gated:
    begun = Begun(
        protocol_sha256=reference.header.protocol_sha256,
        data_sha256={"test.jsonl": "0" * 64},
        questions=run.expected,
        base_url="http://host:8000",
        identity=Identity(model="tiny", started="created 1", version="0.4"),
        metrics={},
        at="2026-01-01T00:00:00Z",
    )
    finished = Finished(["python", "-m", "lm_eval"], 0, "|t|", "", folder / "samples.jsonl", None)
    verdict = judge(run, reference)
    harness = Harness("python", "0.4.13", folder)
    return Gated(folder, harness, begun, reference, [run], [finished], verdict, ["a note", *verdict.notes])


@pytest.fixture
def reference(tmp_path: Path) -> Reference:
    return made.paired(tmp_path / "r.jsonl", 100, [1, 2])


def test_the_page_is_well_formed_and_fetches_nothing(tmp_path: Path, reference: Reference) -> None:
    html = page.html(gated(tmp_path, made.run(100, [2, 3, 4]), reference))
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    assert checker.seen.count("svg") == 3 and not {"script", "link", "img", "iframe"} & set(checker.seen)
    assert not re.findall(r"(?:src|href|url\()", html)


def test_lost_and_gained_questions_have_both_answers(tmp_path: Path, reference: Reference) -> None:
    html = page.html(gated(tmp_path, made.run(100, [2, 3, 4]), reference))
    assert "(2)</h2>" in html and "(1)</h2>" in html
    assert html.count("<details>") == 3
    assert "These are 4 pears.\n#### 4</pre>" in html and "These are 3 pears.\n#### 3</pre>" in html


def test_an_answer_is_text_whatever_it_holds(tmp_path: Path, reference: Reference) -> None:
    run = made.run(100, [7])
    bad = [msgspec.structs.replace(s, answer="</pre><script>x</script>") if s.doc_id == 7 else s for s in run.samples]
    html = page.html(gated(tmp_path, msgspec.structs.replace(run, samples=bad), reference))
    assert "<script>" not in html and "&lt;script&gt;" in html


@pytest.mark.parametrize("run", [Run(expected=100, samples=[], problems=["x"], answers={}), made.run(1), made.run(100)])
def test_every_run_has_a_page(tmp_path: Path, reference: Reference, run: Run) -> None:
    for against in (reference, made.floor_only(tmp_path / "f.jsonl", 0.95)):
        checker = Checker()
        checker.feed(page.html(gated(tmp_path, run, against)))
        assert checker.open == []


def test_both_files_are_written_and_the_result_is_whole(tmp_path: Path, reference: Reference) -> None:
    paths = page.write(gated(tmp_path, made.run(100, [2, 3, 4]), reference))
    assert [path.name for path in paths] == ["report.html", "result.json"]
    result = json.loads(paths[1].read_text(encoding="utf-8"))
    assert result["outcome"] == "pass" and result["paired"]["lost"] == [3, 4] and result["paired"]["gained"] == [1]
    assert result["protocol"]["max_gen_toks"] == 256 and result["begun"]["identity"]["model"] == "tiny"
    assert result["runs"][0][3]["verdicts"]["strict-match"] is False
    assert result["runs"][0][3]["reference"]["strict-match"] is True
    assert result["notes"][0] == "a note"


@pytest.mark.parametrize(("rough", "step"), [(0.011, 0.02), (0.02, 0.02), (3.0, 5.0), (7.0, 10.0), (120.0, 200.0)])
def test_steps_are_round(rough: float, step: float) -> None:
    assert round_step(rough) == pytest.approx(step)


def test_ticks_are_inside_and_not_too_many() -> None:
    axis = Axis(0.911, 0.987, 100, 500)
    ticks = axis.ticks()
    assert 3 <= len(ticks) <= 7 and all(0.911 <= tick <= 0.987 for tick in ticks)
    assert axis.at(0.911) == 100 and axis.at(0.987) == pytest.approx(500)
