"""A run of the tuner from compilers to the table, with a kernel of plain torch on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
import torch

from rocm_serve.ops import tiles
from rocm_serve.ops.tiles import read_table
from rocm_serve.tuning import session
from rocm_serve.tuning.bench import bench_of
from rocm_serve.tuning.flow import Group, groups_of
from rocm_serve.tuning.session import Session
from rocm_serve.tuning.static import facts_on, model_of, wish_of
from rocm_serve.tuning.wish import Point, Wish

US = {16: 10.0, 32: 7.0}


class _Compilers:
    """Compiles nothing; the second tile of rows 8 never comes, and no tile of rows 16."""

    def __init__(self, wish: Wish, count: int) -> None:
        assert count == 2

    def compile(self, point: Point, kernel: str, tile: tiles.Tile) -> Future[str]:
        future: Future[str] = Future()
        rows = point.arguments["rows"]
        if rows == 4 or (rows == 8 and tile["BM"] == 16):
            future.set_result("")
        return future

    def stop(self) -> None:
        """Nothing runs."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Session, list[str]]]:
    made = wish_of(facts_on(model_of(None, "tiny"), "sm_90", 1, {}), {}, 0)
    wish = msgspec.structs.replace(
        made, providers=dict.fromkeys(made.providers, "reference"), dtype="float32", activation="bf16"
    )
    for kernel in ("first", "second", "third"):
        monkeypatch.setitem(tiles.RULES, kernel, lambda shape, arch: {"BM": 16})
        monkeypatch.setitem(tiles.CANDIDATES, kernel, lambda shape, arch: [{"BM": 32}])
    todo = [Point("norms", {"rows": rows, "residual": True}) for rows in (4, 8, 16)]
    seen = {0: [("first", {"rows": 4})], 1: [("second", {"rows": 8})], 2: [("third", {"rows": 16})]}
    monkeypatch.setattr(session, "Compilers", _Compilers)
    monkeypatch.setattr(session, "gpu_timer", lambda device: lambda case: US[_asked()])
    said: list[str] = []
    groups = groups_of(todo, seen, "sm_90")
    cpu = torch.device("cpu")
    yield Session(wish, groups, cpu, tmp_path / "t.json", tmp_path / "r.json", time.monotonic() + 2, said.append), said


def _asked() -> int:
    kernel = next(iter(tiles._forced))
    return tiles.tile(kernel, {"rows": 1}, "sm_90")["BM"]


def test_a_winner_is_in_the_table_though_the_next_group_is_never_compiled(run: tuple[Session, list[str]]) -> None:
    one, said = run
    assert one.run(2) == 0
    assert read_table(one.out) == {"first": {"rows=4": {"BM": 32}}}
    assert said[-2] == "not reached within the budget: third rows=16"
    assert said[-1] == f"2 shapes tuned, 1 beat the rule: {one.out}"
    assert "1 of 2 tried" in said[1]
    report = msgspec.json.decode((one.out.parent / "r.json").read_bytes())
    assert [tried["us"] for tried in report["outcomes"][0]["tried"]] == [[10.0], [7.0]]


def test_groups_are_made_of_what_calls_ask_for(run: tuple[Session, list[str]]) -> None:
    one, _ = run
    assert [group.key for group in one.groups] == [("first", "rows=4"), ("second", "rows=8"), ("third", "rows=16")]
    assert isinstance(one.groups[0], Group)
    assert bench_of(one.wish, torch.device("cpu")).dims.hidden == 128
