"""`rocm-serve experts`: from files to a table and a placement, and wishes that cannot be met."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from rocm_serve.cli import app
from rocm_serve.diagnostics.experts.counts import CountFile, LayerCount
from rocm_serve.errors import UserError
from rocm_serve.parallel.expert_placement import MoeShape, read_placement
from tests.checkpoint import published
from tests.diagnostics.experts.made import SHAPE, count_file, write_pair

ROOT = Path(__file__).parents[1]


@dataclass
class Done:
    """How a command ended, with what it printed."""

    code: int
    stdout: str
    error: str


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> Done:
        result = CliRunner().invoke(app, ["experts", *map(str, words)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            assert isinstance(result.exception, UserError), result.exception
            return Done(2, result.output, str(result.exception))  # as cli.main does
        return Done(result.exit_code, result.output, "")

    return call


def test_counts_become_a_table_and_a_placement_that_serve_reads(tmp_path: Path, run: Callable[..., Done]) -> None:
    write_pair(tmp_path)
    done = run("--from", "counts.json", "--ep", 2, "--redundant", 2, "--out", "placement.json", "--plot", "p.svg")
    assert done.code == 0, done.error
    lines = done.stdout.splitlines()
    assert lines[0].endswith("100 tokens in 4 layers, from 2 files; experts over --ep 2, 2 copies allowed")
    assert [line.partition(",")[0] for line in lines[1:5]] == [f"layer {layer}" for layer in range(4)]
    assert lines[-1] == "placement.json: for serve --ep 2 --expert-placement placement.json"
    assert (tmp_path / "p.svg").read_text().count("<title>") == 4
    maps = read_placement(tmp_path / "placement.json", SHAPE, 2, draft=False)
    told = json.loads(run("--from", "counts.json", "--ep", 2, "--redundant", 2, "--json").stdout)
    for layer, one in told["layers"].items():
        assert list(maps[int(layer)].experts) == one["slots"]
        loads, chosen = [0.0, 0.0], [0] * 16
        for rank in range(2):
            file = msgspec.json.decode((tmp_path / f"counts.rank-{rank}.json").read_bytes(), type=CountFile)
            chosen = [a + b for a, b in zip(chosen, file.layers[int(layer)].chosen, strict=True)]
        for slot, expert in enumerate(one["slots"]):
            loads[2 * slot // len(one["slots"])] += chosen[expert] / one["slots"].count(expert)
        assert one["imbalance_planned"] == pytest.approx(max(loads) / (sum(loads) / 2))
        assert one["imbalance_planned"] <= one["imbalance_in_order"]


def test_experts_that_need_copies_to_be_shared_and_a_draft_layer_that_saw_nothing(
    tmp_path: Path, run: Callable[..., Done]
) -> None:
    nothing = LayerCount(tokens=0, chosen=(0,) * 16)
    count_file(counting=(0,), layers={-1: nothing, 0: count_file().layers[0]}).write(tmp_path / "one")
    done = run("--from", "one", "--ep", 3, "--redundant", 2)
    assert done.code == 0, done.error
    assert "layer draft, tokens 0, hottest expert none: saw no token, max/mean in order none" in done.stdout
    assert "copies help in 2 of 2 layers" in done.stdout


def test_what_copies_take_of_a_gpu_of_the_published_model(tmp_path: Path, run: Callable[..., Done]) -> None:
    """An expert is 3 x 8192 x 2048 bytes of FP8 and a fp32 scale for 128 x 128 of them."""
    (tmp_path / "config.json").write_text(json.dumps(published.config()))
    shape = MoeShape(architecture="Qwen3_5MoeForCausalLM", num_layers=92, num_experts=512, top_k=10)
    hot = LayerCount(tokens=100, chosen=(100, *(0,) * 502, *(100,) * 9))
    for stage, counted in enumerate(((7, 45), (46, 50, -1))):
        layers = dict.fromkeys(counted, hot)
        file = count_file(8 * stage, model=shape, tp=8, pp=2, stage=stage, counting=(8 * stage,), layers=layers)
        file.write(tmp_path / f"c.rank-{8 * stage}")
    words = ("--from", "c", "--ep", 8, "--redundant", 24, "--model", tmp_path)
    told = json.loads(run(*words, "--json").stdout)
    assert {one["copies"] for one in told["layers"].values()} == {24}
    expert = 3 * 8192 * 2048 + 4 * 3 * 64 * 16
    assert told["extra_bytes"] == 3 * 3 * expert, "three copies a rank in each of the three layers of the last stage"
    half = run(*words, "--tp", 16, "--pp", 1).stdout
    assert f"copies take {5 * 3 * expert / 2e6:.2f} MB more of the GPU" in half, "five layers, half of each expert"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--ep", 2, "--from", "absent.json"), "absent.json: no such file, and none of a rank beside it"),
        (("--ep", 2, "--from", "counts.rank-0.json"), "rank 1 counted too"),
        (("--ep", 2, "--redundant", 3, "--from", "counts.json"), "--redundant 3: 16 experts and 3 copies"),
        (
            ("--ep", 3, "--from", "counts.json"),
            "cannot be shared by --ep 3 equally, no expert twice on a rank; legal: 2",
        ),
        (("--ep", 0, "--from", "counts.json"), "legal: --ep 1 or more"),
        (("--ep", 2, "--redundant", -2, "--from", "counts.json"), "--redundant 0 or more"),
        (("--ep", 2, "--from", "counts.json", "--out", "no/x.json"), "no/x.json: No such file"),
        (("--ep", 2, "--from", "counts.json", "--tp", 4), "they need --model"),
        (("--ep", 2, "--from", "counts.json", "--model", "."), "--model . is Qwen3_5MoeForCausalLM, 92 layers of 512"),
        (("--ep", 2, "--from", "counts.json", "--model", "away"), "away"),
    ],
)
def test_wishes_that_cannot_be_met_are_one_line(
    words: tuple[object, ...], sentence: str, tmp_path: Path, run: Callable[..., Done]
) -> None:
    write_pair(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(published.config()))
    done = run(*words)
    assert done.code == 2 and done.stdout == ""
    assert sentence in done.error and "\n" not in done.error


def test_the_program_itself_ends_in_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("{")
    ended = subprocess.run(
        [sys.executable, "-m", "rocm_serve", "experts", "--ep", "2", "--from", "x"],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr == "rocm-serve: x is no 'rocm-serve expert counts' file, or only a part of one\n"
