"""The planner against the published 2.4T repository, and against what tiny checkpoints really hold."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rocm_serve.checkpoint.reader import CheckpointReader
from rocm_serve.diagnostics.plan import checkpoint_totals, legal_tp, plan
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, parse_config
from rocm_serve.parallel.expert_map import ExpertMap, ExpertPlan
from rocm_serve.parallel.mesh import Mesh
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


SHARED = 2 * 3 * 2048 * 8192  # bytes of a shared expert: BF16, never FP8


def test_with_ep8_a_rank_holds_64_whole_experts_and_a_whole_shared_expert_costs_4_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published.config()))
    plain, local, sent = (
        plan(path, 8, 2, 0, experts=experts)
        for experts in (ExpertPlan(), ExpertPlan(8), ExpertPlan(8, shared_whole=True))
    )
    assert local.mesh == Mesh(8, 2, 8) and local.legal_tp == (8, 16)
    held = [made.ranks[0].weight_bytes for made in (plain, local, sent)]
    assert held[0] == held[1], "64 experts whole are as many bytes as 512 cut in 8"
    assert held[2]["layers"] - held[0]["layers"] == 46 * SHARED * 7 // 8
    assert round((held[2]["layers"] - held[0]["layers"]) / 1e9, 2) == 4.05


def test_slots_and_the_shared_expert_of_each_layer_are_counted_as_its_plan_says(tmp_path: Path) -> None:
    path, short = tmp_path / "config.json", published.config()
    path.write_text(json.dumps(short | {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}))

    def held(**plans: Any) -> Mapping[str, int]:
        return plan(path, 8, 1, 5, experts=ExpertPlan(8, **plans)).ranks[0].weight_bytes

    plain, draft = held(), held(draft_shared_whole=True)
    assert draft["mtp"] - plain["mtp"] == SHARED * 7 // 8 and draft["layers"] == plain["layers"]
    more = held(maps={0: ExpertMap((*range(512), *range(64)), 8)})
    slot = 3 * 2048 * 8192 + 4 * 3 * 16 * 64  # scales in float32
    assert more["layers"] - plain["layers"] == 8 * slot and more["mtp"] == plain["mtp"]


@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_with_experts_over_ranks_the_files_are_kept_as_often_as_without(
    checkpoints: dict[str, Path], tp: int, ep: int
) -> None:
    for name in ("text-fp8", "text-bf16"):
        plain, shared = (plan(checkpoints[name], tp, 1, experts=experts) for experts in (ExpertPlan(), ExpertPlan(ep)))
        assert shared.from_headers
        assert [rank.disk_bytes for rank in shared.ranks] == [rank.disk_bytes for rank in plain.ranks]


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
    with pytest.raises(UserError, match=r"^ep 3 cannot be used: it does not divide tp 2; legal: 1, 2$"):
        plan(checkpoints["vl-fp8"], 2, 1, experts=ExpertPlan(3))
    with pytest.raises(UserError, match=r"^tp 2 and pp 1 with ep 0; legal: whole numbers, at least 1$"):
        plan(checkpoints["vl-fp8"], 2, 1, experts=ExpertPlan(0))
    shared, *_ = plan(checkpoints["vl-fp8"], 2, 1, experts=ExpertPlan(2)).lines()
    assert shared == "tp 2 x pp 1 with ep 2 by checkpoint headers; legal tp with ep 2: 2, 4"
    head, *ranks = plan(checkpoints["vl-fp8"], 2, 2).lines()
    assert head == "tp 2 x pp 2 by checkpoint headers; legal tp: 1, 2, 4"
    assert [line.split(" (")[0] for line in ranks] == ["rank 0", "rank 1", "rank 2", "rank 3"]
