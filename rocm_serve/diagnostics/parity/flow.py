"""The comparison from start to end: A twice, B once, and where they differ both again with their inner results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rocm_serve.checkpoint.reader import read_config
from rocm_serve.config.schema import Resolved, ServeConfig
from rocm_serve.diagnostics.parity import hf
from rocm_serve.diagnostics.parity.drive import Driver, Scored, wish
from rocm_serve.diagnostics.parity.judge import FP8_ROWS, Judged, Rule, judge, rounding_noise, rule_of
from rocm_serve.diagnostics.parity.localise import (
    DIFFERS,
    Divergence,
    Recorded,
    compare,
    first_divergence,
    near_ties,
)
from rocm_serve.diagnostics.parity.prompts import Prompt
from rocm_serve.diagnostics.parity.spec import Side, in_words_of, words_of_a_spec
from rocm_serve.diagnostics.parity.tap_files import TapWish, wish_file
from rocm_serve.diagnostics.parity.world import WORKER, started
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import parse_config

WINDOW = 8  # rows, up to the first that is too far off, whose inner results are compared
Say = Callable[[str], None]
Tick = Callable[[int, int], None]  # tokens computed, and of all


@dataclass(frozen=True)
class Comparison:
    """What to compare. `workers`: the module that the ranks of a side run; tests put a fault there."""

    model: Path
    a: Side
    b: Side
    prompts: Sequence[Prompt]
    new_tokens: int
    vocab_used: int
    prepare: Callable[[ServeConfig, Path], Resolved]  # decides what a side left open, for a run in this folder
    env: Mapping[str, str]
    folder: Path  # for sockets, logs and recorded rows
    workers: Mapping[str, str] = field(default_factory=dict)
    progress: Callable[[str], AbstractContextManager[Tick]] = lambda what: nullcontext(lambda done, tokens: None)


class Parity(msgspec.Struct, frozen=True):
    """The result. `divergence` is there when the sides differ, and when only near ties part them."""

    a: str
    b: str
    agree: bool
    rule: Rule
    noise_of_hf: tuple[float, ...] | None
    prompts: tuple[Judged, ...]
    divergence: Divergence | None


class _Side:
    """One engine side: how it is started, and what it said."""

    def __init__(self, given: Comparison, side: Side, name: str, folder: str = "") -> None:
        assert side.config is not None
        self.name, self.given = name, given
        self.folder = given.folder / (folder or name)
        self.folder.mkdir()
        with words_of_a_spec(f"--{name.lower()}", side.text):
            self.resolved: Resolved = given.prepare(side.config, self.folder)
        self.notes = [in_words_of(side.text, note) for note in self.resolved.notes]

    def use(self, body: Callable[[Driver], None]) -> None:
        worker = self.given.workers.get(self.name, WORKER)
        with started(self.resolved, self.given.env, self.name, worker=worker) as driver:
            body(driver)

    @contextmanager
    def shown(self, driver: Driver, what: str) -> Iterator[None]:
        """Show how far the runs of the block are."""
        with self.given.progress(f"{self.name}, {what}") as driver.tick:
            yield

    def record(self, driver: Driver, sequences: Sequence[Scored], rows: Mapping[int, Sequence[int]]) -> int:
        """Run the sequences as they are once more, with rows recorded. Returns the number of that run."""
        run = driver.runs
        chosen, routed = wish(rows, driver)
        wish_file(self.folder).write_bytes(msgspec.json.encode(TapWish(chosen, routed)))
        with self.shown(driver, "recorded"):
            driver.run(self.given.prompts, self.given.new_tokens, [one.ids for one in sequences])
        wish_file(self.folder).unlink()
        return run


def run(given: Comparison, say: Say) -> Parity:
    """Compare. `say` gets a line about each stage.

    Errors: UserError when a side cannot be run.
    """
    if given.a.is_hf:
        raise UserError(f"--a {given.a.text}: A is what is examined; legal: a topology, with hf as --b")
    if given.b.is_hf:
        hf.check()
    return _Run(given, say).result()


class _Run:
    def __init__(self, given: Comparison, say: Say) -> None:
        self.given, self.say = given, say
        self.a = _Side(given, given.a, "A")
        self.b = None if given.b.is_hf else _Side(given, given.b, "B")
        self.dtype = self._dtype()
        self.rounds = self._kind(self.a) != "float32" and (self.b is None or _rounds(self.a) != _rounds(self.b))
        self.rule = rule_of(self.dtype, hf=self.b is None, rounding=self.rounds)
        self.scored_a: list[Scored] = []
        self.again: list[Scored] = []
        self.scored_b: list[Scored] = []
        self.noise_of_hf: list[float] | None = None
        self.rounding = 0.0
        self.run_of_b = 0

    def _dtype(self) -> str:
        kinds = {self._kind(side) for side in (self.a, self.b) if side is not None}
        return next(kind for kind in ("bfloat16", FP8_ROWS, "float32") if kind in kinds)

    def _kind(self, side: _Side) -> str:
        """Say what a side rounds to, coarsest first: rows as FP8, where the checkpoint is, or its dtype."""
        if side.resolved.dtype != "float32":
            return side.resolved.dtype
        quantised = parse_config(*read_config(self.given.model)).quantization is not None
        return FP8_ROWS if quantised and side.resolved.fp8_activation == FP8_ROWS else "float32"

    def result(self) -> Parity:
        for side in (self.a, self.b):
            if side is not None:
                for note in side.notes:
                    self.say(f"{side.name}: {note}")
        self.say(f"A: {self.given.a.text}: all at once, then token by token")
        self.a.use(self._first_of_a)
        if self.rounds:
            self._round()
        self.say(f"B: {self.given.b.text}, on the same tokens")
        if self.b is None:
            self.scored_b, self.noise_of_hf = self._hf("hf")
        else:
            self.b.use(self._first_of_b)
        judged = self._judge({})
        failing = [one for one in judged if one.first is not None]
        if not failing:
            return self._parity(judged, None)
        self.say(f"{len(failing)} of {len(judged)} prompts differ: the rows before are recorded on both sides")
        return self._examine(failing)

    def _hf(self, what: str, asked: TapWish | None = None) -> tuple[list[Scored], list[float]]:
        given = self.given
        with given.progress(f"B, {what}") as tick:
            return hf.run(
                given.model,
                self.scored_a,
                given.folder / "B",
                given.env,
                vocab_used=given.vocab_used,
                tick=tick,
                wish=asked,
            )

    def _first_of_a(self, driver: Driver) -> None:
        with self.a.shown(driver, "all at once"):
            self.scored_a = driver.run(self.given.prompts, self.given.new_tokens)
        with self.a.shown(driver, "token by token"):
            self.again = driver.stepwise(self.scored_a)

    def _round(self) -> None:
        """Run A's tokens through A in float32: what rounding does to A, it may do to B, elsewhere."""
        given = self.given.a
        assert given.config is not None
        self.say(f"A in float32: {given.text}, on the same tokens")
        config = msgspec.structs.replace(given.config, dtype="float32", kv_cache_dtype="auto", fp8_activation="bf16")
        exact: list[Scored] = []
        forced = [one.ids for one in self.scored_a]
        side = _Side(self.given, Side(given.text, config), "A", "A-float32")

        def score(driver: Driver) -> None:
            with side.shown(driver, "in float32"):
                exact.extend(driver.run(self.given.prompts, self.given.new_tokens, forced))

        side.use(score)
        self.rounding = rounding_noise(self.scored_a, exact)

    def _first_of_b(self, driver: Driver) -> None:
        """Run B; where it differs, record it at once, while its processes are there."""
        assert self.b is not None
        forced = [one.ids for one in self.scored_a]
        with self.b.shown(driver, "on the same tokens"):
            self.scored_b = driver.run(self.given.prompts, self.given.new_tokens, forced)
        rows = windows(self._judge({}))
        if rows:
            self.run_of_b = self.b.record(driver, self.scored_a, rows)

    def _judge(self, ties: Mapping[int, int]) -> list[Judged]:
        noise = [self.rounding] * len(self.scored_a) if self.rounds else self.noise_of_hf
        return judge(self.scored_a, self.again, self.scored_b, self.rule, noise, ties)

    def _examine(self, failing: Sequence[Judged]) -> Parity:
        rows = windows(failing)
        run_of_a = 0

        def record(driver: Driver) -> None:
            nonlocal run_of_a
            run_of_a = self.a.record(driver, self.scored_a, rows)

        self.a.use(record)
        if self.b is None:
            routed = {index: max(positions) + 1 for index, positions in rows.items()}
            asked = TapWish({index: tuple(positions) for index, positions in rows.items()}, routed)
            self._hf("hf, recorded", asked)
        mine = Recorded(self.given.folder / "A", run_of_a)
        theirs = Recorded(self.given.folder / "B", self.run_of_b)
        ties = near_ties(mine, theirs, self.dtype)
        judged = self._judge(ties)
        worst = max((one.worst for one in judged if one.first is not None), default=0.0)
        apart = compare(mine, theirs, DIFFERS[self.dtype], ties)
        last = parse_config(*read_config(self.given.model)).num_layers
        return self._parity(judged, first_divergence(apart, self.dtype, last, worst))

    def _parity(self, judged: Sequence[Judged], divergence: Divergence | None) -> Parity:
        noise = None if self.noise_of_hf is None else tuple(self.noise_of_hf)
        agree = all(one.first is None for one in judged)
        a, b = self.given.a.text, self.given.b.text
        return Parity(a, b, agree, self.rule, noise, tuple(judged), divergence)


def _rounds(side: _Side) -> tuple[object, ...]:
    """Return what decides where a side rounds and in which order it adds."""
    resolved = side.resolved
    dtypes = (resolved.dtype, resolved.kv_cache_dtype, resolved.fp8_activation)
    ranks = (resolved.tp, resolved.ep, resolved.expert_exchange)
    return resolved.device, *dtypes, *ranks, resolved.op, resolved.preferred


def windows(judged: Sequence[Judged]) -> dict[int, range]:
    """Say which rows of which prompts to record: some up to the one that the first bad log-probs came out of."""
    return {one.index: range(max(0, one.first - WINDOW), one.first) for one in judged if one.first is not None}
