"""The rules: each of them can fail, and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rocm_serve.diagnostics.gate.reference import Acceptance, Published, read_reference, write_reference
from rocm_serve.diagnostics.gate.samples import prompts_sha256
from rocm_serve.diagnostics.gate.verdict import Drafts, Run, judge
from tests.diagnostics.gate import made

N = 200
SOME_WRONG = range(0, 200, 40)  # five: 0.975


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "reference.jsonl"


def test_the_same_answers_pass(path: Path) -> None:
    verdict = judge(made.run(N, SOME_WRONG), made.paired(path, N, SOME_WRONG))
    assert verdict.outcome == "pass"
    assert verdict.paired is not None and verdict.paired.lost == [] and verdict.paired.same_text == N
    assert verdict.scores["strict-match"].right == 195


def test_a_score_far_below_the_published_one_fails_by_the_floor_without_a_rerun(path: Path) -> None:
    verdict = judge(made.run(N, range(40)), made.floor_only(path, 0.9507))
    assert verdict.outcome == "fail" and not verdict.wants_rerun
    assert verdict.failed == [
        "160 of 200 right (strict-match), below the floor of 182 (exact binomial at 0.01 from the reference's 0.9507)"
    ]


def test_losses_above_the_floor_fail_by_mcnemar_alone(path: Path) -> None:
    reference = made.paired(path, N, range(20))
    verdict = judge(made.run(N, range(18, 30)), reference)
    assert verdict.outcome == "pass", "fewer wrong than the reference"
    reference = made.paired(path, N, range(10))
    verdict = judge(made.run(N, range(10, 20)), reference)
    assert verdict.outcome == "pass", "ten lost, ten gained: as likely as not"
    verdict = judge(made.run(N, range(17)), reference)
    assert verdict.outcome == "fail"
    (why,) = verdict.failed
    assert "7 lost, 0 gained" in why and "p = 0.00781" in why


def test_six_losses_are_not_enough_for_one_percent(path: Path) -> None:
    assert judge(made.run(N, range(16)), made.paired(path, N, range(10))).outcome == "pass"


def test_a_score_just_below_the_floor_asks_for_one_rerun_and_both_are_judged(path: Path) -> None:
    reference = made.floor_only(path, 0.9507)
    first = made.run(1319, range(87))  # 1232: between 1228 and 1235
    verdict = judge(first, reference)
    assert verdict.outcome == "fail" and verdict.wants_rerun
    good = judge(first, reference, second=made.run(1319, range(65)))
    assert good.outcome == "pass" and not good.wants_rerun
    assert "both runs together: 1232 + 1254 of 2638 right" in good.passed[0]
    bad = judge(first, reference, second=made.run(1319, range(80)))
    assert bad.outcome == "fail" and "there is no third run" in bad.failed[0] and not bad.wants_rerun


def test_an_invalid_run_or_a_second_failure_asks_for_no_rerun(path: Path) -> None:
    reference = made.floor_only(path, 0.9507)
    run = made.run(1319, range(87))
    assert not judge(msgspec.structs.replace(run, problems=["the server was restarted"]), reference).wants_rerun
    assert not judge(msgspec.structs.replace(run, drafts=Drafts(1000.0, 10.0)), reference).wants_rerun


def test_an_invalid_rerun_is_no_pass(path: Path) -> None:
    second = made.run(1319, range(65), problems=["the server was restarted"])
    verdict = judge(made.run(1319, range(87)), made.floor_only(path, 0.9507), second=second)
    assert verdict.invalid == ["in the rerun, the server was restarted"]


def change(run: Run, doc_ids: range, **changed: Any) -> Run:
    """Change some samples of a run."""
    made_ = [msgspec.structs.replace(s, **changed) if s.doc_id in doc_ids else s for s in run.samples]
    return msgspec.structs.replace(run, samples=made_)


def truncated(run: Run, count: int) -> Run:
    cut = {s.prompt_hash: made.answer(s, finish_reason="length") for s in run.samples[:count]}
    return msgspec.structs.replace(run, answers=run.answers | cut)


PLAIN = made.run(N)
INVALID = [
    (msgspec.structs.replace(PLAIN, problems=["lm-eval ended"]), "lm-eval ended"),
    (msgspec.structs.replace(PLAIN, samples=PLAIN.samples[:150]), "150 questions were judged and not 200: missing 150"),
    (msgspec.structs.replace(PLAIN, expected=199), "questions that do not belong here: 199"),
    (change(PLAIN, range(5), doc_hash="x"), "5 questions are not the reference's (doc_hash): 0, 1, 2, 3, 4"),
    (change(PLAIN, range(9, 10), prompt_hash="x"), "1 prompts are not the reference's (prompt_hash): 9;"),
    (change(PLAIN, range(3), answer=" \n"), "3 of 200 answers are empty; 2 are allowed"),
    (change(PLAIN, range(3), answer="!" * 40), "3 of 200 answers are one token or phrase repeated; 2 are allowed"),
    (truncated(PLAIN, 11), "11 of 200 answers are cut off at the token limit; 10 are allowed"),
    (msgspec.structs.replace(PLAIN, answers={}), "200 of 200 questions have no recorded answer: 0, 1, 2"),
    (
        msgspec.structs.replace(PLAIN, answers=dict([*PLAIN.answers.items()][:199])),
        "1 of 200 questions have no recorded answer: 199; lm-eval took what the recorder could not read",
    ),
    (
        change(PLAIN, range(1), generation={**made.PROTOCOL.generation(), "max_gen_toks": 64}),
        "lm-eval asked with max_gen_toks = 64; the protocol says 256",
    ),
    (
        change(PLAIN, range(1), generation={**made.PROTOCOL.generation(), "top_p": 0.9}),
        "lm-eval asked with top_p = 0.9; the protocol says None",
    ),
]


@pytest.mark.parametrize(("run", "why"), INVALID)
def test_runs_that_say_nothing(path: Path, run: Run, why: str) -> None:
    verdict = judge(run, made.paired(path, N))
    assert verdict.outcome == "invalid"
    assert any(sentence.startswith(why) for sentence in verdict.invalid), verdict.invalid


def test_answers_that_do_not_say_why_they_ended_are_counted(path: Path) -> None:
    told = made.run(N)
    untold = {key: msgspec.structs.replace(one, finish_reason=None) for key, one in [*told.answers.items()][:7]}
    verdict = judge(msgspec.structs.replace(told, answers=told.answers | untold), made.paired(path, N))
    assert any(note.startswith("7 answers came without a finish reason") for note in verdict.notes)
    assert not any("finish reason" in note for note in judge(told, made.paired(path, N)).notes)


def test_the_allowed_shares_are_not_exceeded_by_reaching_them(path: Path) -> None:
    run = truncated(change(PLAIN, range(2), answer=""), 10)
    assert judge(run, made.paired(path, N)).outcome == "pass"


def test_what_the_reference_does_itself_is_allowed(path: Path) -> None:
    reference = made.paired(path, N)
    own = {i: msgspec.structs.replace(reference.questions[i], answer="", truncated=True) for i in range(30)}
    reference = msgspec.structs.replace(reference, questions=reference.questions | own)
    run = truncated(change(PLAIN, range(30), answer=""), 30)
    assert judge(run, reference).outcome == "pass"
    assert judge(truncated(run, 41), reference).outcome == "invalid"


def test_a_whole_run_is_held_against_the_prompts_of_a_published_score(path: Path) -> None:
    published = Published(N, {"strict-match": 0.95}, "tests")
    own = prompts_sha256(one.prompt_hash for one in PLAIN.samples)
    for digest, outcome in ((own, "pass"), ("0" * 64, "invalid"), (None, "pass")):
        write_reference(path, made.header(published=published, prompts_sha256=digest))
        assert judge(PLAIN, read_reference(path)).outcome == outcome
        assert judge(made.run(50), read_reference(path)).outcome == "pass", "a part of them cannot be compared"


def test_questions_that_the_reference_lacks_cannot_be_compared(path: Path) -> None:
    verdict = judge(made.run(N), made.paired(path, 150))
    assert verdict.invalid == ["the reference has no question 150, 151, 152, 153, 154, 155, 156, 157 and 42 more"]


def test_without_samples_the_verdict_is_invalid_and_nothing_breaks(path: Path) -> None:
    run = Run(expected=N, samples=[], problems=["lm-eval ended with exit code 1"], answers={})
    verdict = judge(run, made.paired(path, N))
    assert verdict.outcome == "invalid" and verdict.scores == {}
    assert (verdict.failed, verdict.passed) == ([], []), "nothing was judged"


def test_the_filter_of_the_protocol_is_the_one_that_is_judged(path: Path) -> None:
    """Right under flexible-extract, and half of it wrong under strict-match."""
    run = change(PLAIN, range(100), verdicts={"strict-match": False, "flexible-extract": True})
    for name, outcome in (("strict-match", "fail"), ("flexible-extract", "pass")):
        protocol = msgspec.structs.replace(made.PROTOCOL, filter=name)
        write_reference(path, made.header(protocol=protocol, num_questions=N), map(made.question, PLAIN.samples))
        verdict = judge(run, read_reference(path))
        assert verdict.outcome == outcome and set(verdict.scores) == {"strict-match", "flexible-extract"}
        assert verdict.paired is not None and len(verdict.paired.lost) == (100 if outcome == "fail" else 0)


@pytest.mark.parametrize(
    ("drafts", "stated", "outcome"),
    [
        (None, None, "pass"),
        (Drafts(1000.0, 855.0), None, "pass"),
        (Drafts(1000.0, 499.0), None, "fail"),
        (Drafts(0.0, 0.0), None, "fail"),
        (Drafts(1000.0, 855.0), Acceptance(0.855, 0.7, 0.95), "pass"),
        (Drafts(1000.0, 699.0), Acceptance(0.855, 0.7, 0.95), "fail"),
        (Drafts(1000.0, 1000.0), Acceptance(0.855, 0.7, 0.95), "fail"),
    ],
)
def test_acceptance(path: Path, drafts: Drafts | None, stated: Acceptance | None, outcome: str) -> None:
    run = made.run(N, drafts=drafts)
    assert judge(run, made.paired(path, N, acceptance=stated)).outcome == outcome


def test_a_dead_drafter_is_named(path: Path) -> None:
    (why,) = judge(made.run(N, drafts=Drafts(0.0, 0.0)), made.paired(path, N)).failed
    assert "the drafter is dead" in why


def test_how_large_a_fault_this_many_questions_notice_is_said(path: Path) -> None:
    (note,) = [n for n in judge(made.run(1319), made.floor_only(path, 0.9507)).notes if "questions:" in n]
    assert "true share is 0.927" in note and "2.4 points below" in note, note
