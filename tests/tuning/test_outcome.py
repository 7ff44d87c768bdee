"""Tables of tiles: what goes in, what comes out again, in a stable order."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rocm_serve.ops.tiles import Table, read_table
from rocm_serve.tuning.outcome import Outcome, Tried, merged, words, write_report, write_table


def _outcome(rule_us: float | None, best_us: float | None, key: str = "rows=8") -> Outcome:
    def tried(bm: int, us: float | None) -> Tried:
        return Tried({"BM": bm}, why="it failed") if us is None else Tried({"BM": bm}, us=(us,), error=0.0, score=us)

    rule, best = tried(16, rule_us), tried(64, best_us)
    return Outcome(
        kernel="one_kernel",
        key=key,
        calls=("",),
        rule=rule,
        best=best,
        tried=(rule, best),
        candidates=2,
        nbytes=(4e6,),
        operations=(3e8,),
    )


def test_a_winner_is_kept_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "tuned" / "sm_90.json"
    table: Table = {"other": {"rows=1": {"BN": 8}}}
    for key in ("rows=8", "rows=16"):
        table = merged(table, _outcome(10.0, 5.0, key), 1.02)
    write_table(path, table)
    assert read_table(path) == table
    assert table["one_kernel"] == {"rows=8": {"BM": 64}, "rows=16": {"BM": 64}}
    assert path.read_text() == (
        '{\n  "one_kernel": {\n    "rows=16": {"BM":64},\n    "rows=8": {"BM":64}\n  },\n'
        '  "other": {\n    "rows=1": {"BN":8}\n  }\n}\n'
    )


def test_a_gain_within_noise_is_not_kept_and_an_old_winner_goes() -> None:
    before: Table = {"one_kernel": {"rows=8": {"BM": 128}, "rows=1": {"BM": 16}}}
    after = merged(before, _outcome(10.0, 9.9), 1.02)
    assert after == {"one_kernel": {"rows=1": {"BM": 16}}}
    assert merged({"one_kernel": {"rows=8": {"BM": 128}}}, _outcome(10.0, 9.9), 1.02) == {}


def test_where_the_rules_tile_does_not_run_any_that_does_is_kept() -> None:
    assert merged({}, _outcome(None, 9.0), 1.02) == {"one_kernel": {"rows=8": {"BM": 64}}}
    assert merged({}, _outcome(None, None), 1.02) == {}
    assert "nothing ran" in words(_outcome(None, None)) and "it failed" in words(_outcome(None, None))


def test_words_name_speed_and_gain() -> None:
    assert words(_outcome(10.0, 5.0)).startswith(
        "one_kernel rows=8: 5.0 us (0.80 TB/s 60 TF), rule 10.0 us, 2.00x: BM 64"
    )


def test_no_table_is_an_empty_one(tmp_path: Path) -> None:
    assert read_table(tmp_path / "none.json") == {}
    write_table(tmp_path / "none.json", {})
    assert read_table(tmp_path / "none.json") == {}


def test_the_report_holds_every_tile(tmp_path: Path) -> None:
    write_report(tmp_path / "report.json", {"gpu": "none"}, [_outcome(10.0, None)])
    found = msgspec.json.decode((tmp_path / "report.json").read_bytes())
    assert [one["why"] for one in found["outcomes"][0]["tried"]] == ["", "it failed"]
