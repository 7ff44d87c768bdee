"""The planner against the published 2.4T repository, and against what tiny checkpoints really hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rocm_serve.checkpoint.reader import CheckpointReader
from rocm_serve.diagnostics.plan import checkpoint_totals, legal_tp, plan
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, parse_config
from tests.checkpoint import published

# VmHWM is this program's own; getrusage would count the parent's memory, which a child shares until it executes.
PLAN_IN_CHILD = """
import json, os, re, sys
from pathlib import Path
from rocm_serve.diagnostics.plan import plan
made = plan(sys.argv[1], 8, 2, rank=11)
(one,) = made.ranks
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
times = os.times()
print(json.dumps({"peak": peak, "cpu_s": times.user + times.system, "torch": "torch" in sys.modules,
                  "headers": made.from_headers, "disk": one.disk_bytes,
                  "layers": [one.layers.start, one.layers.stop], "groups": dict(one.weight_bytes)}))
"""


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return parse_config(published.config(), published.generation_config())


def test_the_2_4t_config_comes_to_the_published_totals(facts: ModelFacts) -> None:
    totals = checkpoint_totals(facts)
    assert totals.parameters == 2_446_182_725_504
    assert totals.tensors == 287_119
    assert totals.payload_bytes == 2_496_066_252_544
    assert checkpoint_totals(facts, mtp=False).parameters == 2_419_804_697_984


def test_the_2_4t_config_puts_154_gigabytes_on_each_gpu_of_two_nodes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published.config()))
    made = plan(path, 8, 2)
    assert not made.from_headers
    assert [len(rank.layers) for rank in made.ranks] == [46] * 16
    for rank in made.ranks:
        assert round(rank.weight_bytes["layers"] / 1e9, 1) == 154.2
        groups = {name: round(size / 1e9, 2) for name, size in rank.weight_bytes.items() if name != "layers"}
        last = {"embedding": 0.0, "head": 0.51, "mtp": 4.13}  # 3.62 and its own embedding
        assert groups == (last if rank.stage else {"embedding": 0.51, "head": 0.0, "mtp": 0.0})


@pytest.mark.parametrize(
    ("tp", "pp", "rank", "layers", "beside", "mtp"),
    [
        (16, 1, 0, 154.7, 0.51, 1.95),
        (8, 4, 0, 77.1, 0.51, 0.0),
        (8, 4, 9, 77.1, 0.0, 0.0),
        (8, 4, 31, 77.1, 0.51, 4.13),
    ],
)
def test_other_layouts_of_the_2_4t_config_come_to_the_published_gigabytes(
    tmp_path: Path, tp: int, pp: int, rank: int, layers: float, beside: float, mtp: float
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published.config()))
    held = plan(path, tp, pp, rank).ranks[0].weight_bytes
    assert round(held["layers"] / 1e9, 1) == layers
    assert round((held["embedding"] + held["head"]) / 1e9, 2) == beside
    assert round(held["mtp"] / 1e9, 2) == mtp


def test_the_2_4t_config_is_cut_into_1_2_4_8_or_16_and_refuses_32(facts: ModelFacts, tmp_path: Path) -> None:
    assert legal_tp(facts, ConfigFormats(facts)) == (1, 2, 4, 8, 16)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published.config()))
    with pytest.raises(UserError, match=r"^tp 32 cannot be used: .*16 GDN key heads.*; legal: 1, 2, 4, 8, 16$"):
        plan(path, 32, 1, rank=0)


def test_a_2_4t_checkpoint_is_planned_for_one_rank_from_its_headers(tmp_path: Path) -> None:
    headers = published.write_sparse(tmp_path)
    assert 30e6 < headers < 100e6
    command = [sys.executable, "-c", PLAN_IN_CHILD, str(tmp_path)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    said = json.loads(child.stdout)
    assert said["cpu_s"] < 20  # of its own: the wall clock belongs to whoever else is on the machine
    assert said["peak"] < 1 << 30
    assert not said["torch"]
    assert said["headers"]
    assert said["layers"] == [46, 92]
    assert round(said["groups"]["layers"] / 1e9, 1) == 154.2
    scales_in_float32_only_in_memory = 47 * 512 * (3 * 16 * 64 // 8) * 2
    assert said["disk"] == sum(said["groups"].values()) - scales_in_float32_only_in_memory - 34 * 2 * 16 * 2


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_over_one_stage_the_ranks_keep_the_files_and_repeat_only_what_is_held_whole(
    checkpoints: dict[str, Path], tp: int
) -> None:
    for path in checkpoints.values():
        reader = CheckpointReader(path)
        made = plan(path, tp, 1)
        assert made.from_headers
        kept = [rank.disk_bytes for rank in made.ranks]
        stored = sum(reader.info(n).nbytes for n in reader.names if not n.startswith("model.visual."))
        assert all(k is not None for k in kept)
        assert kept[0] == stored if tp == 1 else stored < sum(k or 0 for k in kept) < 1.2 * stored
        assert len(set(kept)) == 1


@pytest.mark.parametrize(
    ("tp", "pp", "rank", "said"),
    [
        (0, 1, None, "tp 0 and pp 1; legal: whole numbers, at least 1"),
        (2, 2, 4, r"rank 4 is not one of the 4 of tp 2 x pp 2; legal: 0\.\.3"),
        (1, 9, 0, r"pp 9 cannot be used: the model has 4 layers; legal: 1\.\.4"),
        (8, 1, 0, "tp 8 cannot be used: .* 4 GDN key heads.*; legal: 1, 2, 4"),
    ],
)
def test_a_launch_that_cannot_be_is_refused_with_the_legal_values(
    checkpoints: dict[str, Path], tp: int, pp: int, rank: int | None, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        plan(checkpoints["text-fp8"], tp, pp, rank)


def test_lines_name_every_rank_and_the_legal_degrees(checkpoints: dict[str, Path]) -> None:
    head, *ranks = plan(checkpoints["vl-fp8"], 2, 2).lines()
    assert head == "tp 2 x pp 2 by checkpoint headers; legal tp: 1, 2, 4"
    assert [line.split(" (")[0] for line in ranks] == ["rank 0", "rank 1", "rank 2", "rank 3"]
