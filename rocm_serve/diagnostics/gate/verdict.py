"""From samples and facts to a verdict: valid at all, above the floor, no worse than the reference, drafting. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

import msgspec

from rocm_serve.diagnostics.gate import samples as checks
from rocm_serve.diagnostics.gate import statistics
from rocm_serve.diagnostics.gate.degenerate import is_degenerate
from rocm_serve.diagnostics.gate.protocol import Filter
from rocm_serve.diagnostics.gate.recorder import Answer
from rocm_serve.diagnostics.gate.reference import Reference
from rocm_serve.diagnostics.gate.samples import Sample

Outcome = Literal["pass", "fail", "invalid"]
# Shares of answers that a working server may have beside those the reference has itself.
_EMPTY_SHARE: Final = 0.01
_DEGENERATE_SHARE: Final = 0.01
_TRUNCATED_SHARE: Final = 0.05
_LEAST_ACCEPTANCE: Final = (
    0.5  # of a reference that states none: a drafter below it is broken, or costs more than it brings
)
_LEAST_DRAFTS: Final = 100  # fewer say nothing about acceptance
_POWER: Final = 0.9


class Drafts(msgspec.Struct, frozen=True):
    """Drafts that were verified in a run, and how many of them were accepted.

    `first`: of each verification only the first draft, which is what references state; later ones are seldom right.
    """

    made: float
    accepted: float
    first: bool = True

    @property
    def words(self) -> str:
        return "first drafts" if self.first else "drafted tokens"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run's questions and what was seen beside them."""

    expected: int
    samples: list[Sample]
    problems: list[str]  # that were found on the way
    answers: dict[str, Answer]  # by prompt_hash
    drafts: Drafts | None = None  # None for a server that does not draft


class Paired(msgspec.Struct, frozen=True):
    """Question by question against the reference."""

    lost: list[int]
    gained: list[int]
    p: float
    same_text: int

    @property
    def net(self) -> int:
        return len(self.gained) - len(self.lost)


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A share of right answers under one filter, its interval, and the reference's."""

    right: int
    questions: int
    share: float
    low: float
    high: float
    reference: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome and its sentences, in the order they are to be read."""

    outcome: Outcome
    invalid: list[str]
    failed: list[str]
    passed: list[str]
    notes: list[str]
    scores: dict[Filter, Score]
    least: int
    paired: Paired | None
    acceptance: float | None
    wants_rerun: bool = False


def judge(run: Run, reference: Reference, *, alpha: float = statistics.ALPHA, second: Run | None = None) -> Verdict:
    """Judge a run, or a run and the rerun its score asked for."""
    invalid = [*validity(run, reference)]
    if second is not None:
        invalid += [f"in the rerun, {problem}" for problem in validity(second, reference)]
    failed: list[str] = []
    passed: list[str] = []
    notes: list[str] = []
    floor = floor_of(reference, len(run.samples), alpha)
    paired = pair(run.samples, reference)
    asks, acceptance = False, None
    if run.samples:  # without them there is nothing to judge, and the reasons are said
        asks = _floor_rule(run, second, reference, floor, failed, passed)
        if paired is not None:
            _paired_rule(paired, len(run.samples), alpha, failed, passed)
        acceptance = _acceptance_rule(run, reference, failed, passed, notes)
        notes.append(_what_it_can_see(floor))
        untold = sum(one.finish_reason is None for one in run.answers.values())
        if untold:
            notes.append(f"{untold} answers came without a finish reason: cut-off ones are not seen among them")
    outcome: Outcome = "invalid" if invalid else "fail" if failed else "pass"
    return Verdict(
        outcome=outcome,
        invalid=invalid,
        failed=failed,
        passed=passed,
        notes=notes,
        scores=scores(run.samples, reference),
        least=floor.least,
        paired=paired,
        acceptance=acceptance,
        wants_rerun=asks and not invalid and len(failed) == 1,
    )


def floor_of(reference: Reference, questions: int, alpha: float) -> statistics.Floor:
    """Return the floor of the filter that the protocol gates, for so many questions."""
    return statistics.Floor(
        statistics.floor_chance(*reference.count(reference.header.protocol.filter)), questions, alpha
    )


def validity(run: Run, reference: Reference) -> Iterator[str]:
    """Yield every reason not to believe the score, a sentence each."""
    yield from run.problems
    yield from checks.count_problems(run.samples, run.expected)
    yield from checks.protocol_problems(run.samples, reference.header.protocol)
    yield from checks.reference_problems(run.samples, reference)
    yield from checks.unrecorded(run.samples, run.answers)
    known = [reference.questions[one.doc_id] for one in run.samples if one.doc_id in reference.questions]
    total = len(run.samples)
    answered = [run.answers[one.prompt_hash] for one in run.samples if one.prompt_hash in run.answers]
    kinds = (
        ("empty", [_empty(one.answer) for one in run.samples], [_empty(one.answer) for one in known], _EMPTY_SHARE),
        (
            "one token or phrase repeated",
            [is_degenerate(one.answer) for one in run.samples],
            [is_degenerate(one.answer) for one in known],
            _DEGENERATE_SHARE,
        ),
        (
            "cut off at the token limit",
            [one.finish_reason == "length" for one in answered],
            [one.truncated for one in known],
            _TRUNCATED_SHARE,
        ),
    )
    for what, seen, normal, share in kinds:
        allowed = sum(normal) + int(share * total)
        if sum(seen) > allowed:
            yield f"{sum(seen)} of {total} answers are {what}; {allowed} are allowed"


def _empty(text: str) -> bool:
    return not text.strip()


def scores(samples: list[Sample], reference: Reference) -> dict[Filter, Score]:
    """Return both filters' shares; none without samples. A floor-only reference may know one filter only."""
    found: dict[Filter, Score] = {}
    published = reference.header.published
    for name in ("strict-match", "flexible-extract"):
        if not samples or (reference.floor_only and published is not None and name not in published.scores):
            continue
        right = sum(one.verdicts[name] for one in samples)
        low, high = statistics.interval(right, len(samples))
        ref_right, ref_total = reference.count(name)
        found[name] = Score(
            right=right,
            questions=len(samples),
            share=right / len(samples),
            low=low,
            high=high,
            reference=ref_right / ref_total,
        )
    return found


def pair(samples: list[Sample], reference: Reference) -> Paired | None:
    """Count questions lost and gained against the reference; None for a floor-only one."""
    if reference.floor_only:
        return None
    gated = reference.header.protocol.filter
    both = [(one, reference.questions[one.doc_id]) for one in samples if one.doc_id in reference.questions]
    lost = [one.doc_id for one, ref in both if ref.verdicts[gated] and not one.verdicts[gated]]
    gained = [one.doc_id for one, ref in both if one.verdicts[gated] and not ref.verdicts[gated]]
    same = sum(one.answer.strip() == ref.answer.strip() for one, ref in both)
    return Paired(lost, gained, statistics.mcnemar_worse(len(lost), len(gained)), same)


def _floor_rule(
    run: Run,
    second: Run | None,
    reference: Reference,
    floor: statistics.Floor,
    failed: list[str],
    passed: list[str],
) -> bool:
    """Apply the floor; return whether the score is so close below it that a rerun may be asked for."""
    gated = reference.header.protocol.filter
    right = sum(one.verdicts[gated] for one in run.samples)
    source = f"exact binomial at {floor.alpha:g} from the reference's {floor.chance:.4f}"
    if second is not None:
        more = sum(one.verdicts[gated] for one in second.samples)
        sentence = f"both runs together: {right} + {more} of {2 * floor.trials} right ({gated}),"
        if floor.pooled(right, more) == "pass":
            passed.append(f"{sentence} and {floor.least_pooled} were needed ({source})")
        else:
            failed.append(f"{sentence} and {floor.least_pooled} are needed ({source}); there is no third run")
        return False
    outcome = floor.first(right)
    sentence = f"{right} of {floor.trials} right ({gated}),"
    if outcome == "pass":
        passed.append(f"{sentence} and the floor is {floor.least} ({source})")
        return False
    failed.append(f"{sentence} below the floor of {floor.least} ({source})")
    return outcome == "rerun"


def _paired_rule(paired: Paired, total: int, alpha: float, failed: list[str], passed: list[str]) -> None:
    sentence = (
        f"against the reference, question by question: {len(paired.lost)} lost, {len(paired.gained)} gained"
        f" ({100 * paired.net / total:+.2f} points), exact one-sided McNemar p = {paired.p:.3g}"
    )
    if paired.p < alpha:
        failed.append(f"{sentence}, below {alpha:g}: worse than the reference")
    else:
        passed.append(sentence)


def _acceptance_rule(
    run: Run, reference: Reference, failed: list[str], passed: list[str], notes: list[str]
) -> float | None:
    """Gate the share of accepted drafts: a dead drafter moves no score, only the time."""
    stated = reference.header.acceptance
    low, high = (stated.low, stated.high) if stated else (_LEAST_ACCEPTANCE, 1.0)
    if run.drafts is None:
        notes.append("the server has no counters of drafted tokens: acceptance was not looked at")
        return None
    made, accepted, words = run.drafts.made, run.drafts.accepted, run.drafts.words
    if made < _LEAST_DRAFTS:
        failed.append(f"the server counts drafts, but verified {made:.0f} {words} in this run: the drafter is dead")
        return None
    share = accepted / made
    sentence = f"{accepted:.0f} of {made:.0f} {words} accepted = {share:.3f}, legal {low:g} to {high:g}"
    (passed if low <= share <= high else failed).append(sentence)
    return share


def _what_it_can_see(floor: statistics.Floor) -> str:
    """Say how large a fault this many questions notice."""
    low, high = 0.0, floor.chance
    for _ in range(40):
        middle = (low + high) / 2
        if statistics.binomial_at_most(floor.least - 1, floor.trials, middle) >= _POWER:
            low = middle
        else:
            high = middle
    return (
        f"{floor.trials} questions: this floor fails {_POWER:.0%} of servers whose true share is {low:.3f},"
        f" {100 * (floor.chance - low):.1f} points below the reference"
    )


def discordant(verdict: Verdict, samples: list[Sample]) -> Mapping[str, list[Sample]]:
    """Return the samples that were lost and gained."""
    if verdict.paired is None:
        return {"lost": [], "gained": []}
    by_id = {one.doc_id: one for one in samples}
    return {
        "lost": [by_id[i] for i in verdict.paired.lost],
        "gained": [by_id[i] for i in verdict.paired.gained],
    }
