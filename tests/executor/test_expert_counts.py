"""What ranks count is what their rows chose, each row once, and a placement made of it changes no answer."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rocm_serve.config.schema import Resolved
from rocm_serve.diagnostics.experts.counts import Counts, file_of_rank, read_counts
from rocm_serve.diagnostics.experts.flow import placement_of, plan_experts
from rocm_serve.diagnostics.experts.planner import imbalance, plan_layer
from rocm_serve.executor import expert_counts
from rocm_serve.executor.expert_counts import count_rows
from rocm_serve.executor.local import LocalExecutor
from rocm_serve.layers.moe import ExpertSlots, SparseMoe
from rocm_serve.parallel.expert_map import DRAFT_LAYER, ExpertMap
from rocm_serve.platform.probe import free_port
from rocm_serve.types import SamplingParams
from tests.executor.generate import Answer, Requests, session
from tests.executor.processes import world
from tests.executor.simulated import SimulatedExecutor
from tests.executor.test_topologies import check_close
from tests.executor.wishes import resolved


@pytest.mark.parametrize(("rows", "live"), [(0, 0), (1, 0), (1, 1), (32, 7), (33, 33), (65, 64)])
@pytest.mark.parametrize("known_to", [int, lambda live: torch.tensor([live], dtype=torch.int32)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_live_rows_are_counted_and_padding_is_not(
    rows: int, live: int, known_to: Callable[[int], int | torch.Tensor], dtype: torch.dtype
) -> None:
    draw = random.Random(rows)
    counts = torch.zeros(12, dtype=torch.int64)
    expected = Counter[int]()
    for _ in range(2):
        chosen = [draw.sample(range(11), 3) for _ in range(rows)]
        count_rows(counts, torch.tensor(chosen, dtype=dtype).reshape(rows, 3), known_to(live))
        expected.update(expert for row in chosen[:live] for expert in row)
    assert counts.tolist() == [*(expected[expert] for expert in range(11)), 2 * live]


def test_rows_load_the_ranks_as_was_planned() -> None:
    """The plan lets copies share alike; rows choose among them by what else they chose. Gumbel noise: no repeats."""
    draw = torch.Generator().manual_seed(3)
    favour = -torch.randperm(512, generator=draw).add(1).log()

    def choose(rows: int) -> torch.Tensor:
        noise = -torch.rand(rows, 512, generator=draw).log().neg().log()
        return (favour + noise).topk(10).indices

    plan = plan_layer(choose(8000).flatten().bincount(minlength=512).tolist(), 8, 24)
    ranks = ExpertSlots(ExpertMap(plan.slots, 8), torch.device("cpu"))(choose(8000)) // (len(plan.slots) // 8)
    loads = ranks.flatten().bincount(minlength=8).tolist()
    assert imbalance(plan.plain) > 1.2 and plan.copies == 24
    assert imbalance(loads) < 1.04 and imbalance(plan.planned) < 1.001


def watch(model: nn.Module, seen: dict[str, Counter[int]]) -> None:
    """Route every row of every MoE layer again, in double precision, beside the layer."""

    def look(name: str, moe: SparseMoe, x_TH: torch.Tensor, num_rows: int) -> None:
        logits = x_TH[:num_rows].double() @ moe.gate.weight.double().T
        seen.setdefault(name, Counter()).update(logits.topk(moe.top_k).indices.flatten().tolist())

    for name, module in model.named_modules():
        if isinstance(module, SparseMoe):
            module.register_forward_pre_hook(lambda moe, inputs, name=name: look(name, moe, *inputs))


def test_one_rank_counts_what_its_requests_chose_and_not_the_warm_up(
    checkpoint: Path, mixed_requests: Requests, tmp_path: Path
) -> None:
    executor = LocalExecutor(resolved(model=str(checkpoint), expert_counts=str(tmp_path / "c.json")))
    seen: dict[str, Counter[int]] = {}
    with session(executor) as running:
        model = executor._runner.model
        assert isinstance(model, nn.Module)
        watch(model, seen)
        running.generate(mixed_requests)
        assert list(tmp_path.iterdir()) == [], "nothing is written before it is time"
    (path,) = tmp_path.iterdir()
    assert path == file_of_rank(tmp_path / "c.json", 0)
    counts = read_counts([tmp_path / "c.json"])
    prompts = sum(len(prompt) for prompt, _ in mixed_requests.values())
    decoded = sum(max(params.max_tokens - 1, 0) for _, params in mixed_requests.values())
    for layer in range(4):
        expected = seen[f"model.layers.{layer}.mlp"]
        assert counts.layers[layer].chosen == tuple(expected[expert] for expert in range(8))
        assert counts.layers[layer].tokens == prompts + decoded


def test_the_draft_layer_is_counted_by_itself(checkpoint: Path, mixed_requests: Requests, tmp_path: Path) -> None:
    """It sees other rows than the model's layers do."""
    executor = LocalExecutor(resolved(model=str(checkpoint), expert_counts=str(tmp_path / "c"), draft_tokens=2))
    seen: dict[str, Counter[int]] = {}
    with session(executor) as running:
        watch(executor._runner.model, seen)
        running.generate({name: mixed_requests[name] for name in "bh"})
    counts = read_counts([tmp_path / "c"])
    assert list(counts.layers) == [DRAFT_LAYER, 0, 1, 2, 3]
    expected = seen["mtp.layers.0.mlp"]
    assert counts.layers[DRAFT_LAYER].chosen == tuple(expected[expert] for expert in range(8))
    assert 0 < counts.layers[DRAFT_LAYER].tokens == expected.total() // 3


def test_a_file_is_written_now_and_then_and_an_unwritable_one_does_not_end_the_server(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(expert_counts, "EVERY_S", 0.0)
    folder = tmp_path / "there"
    folder.mkdir()
    requests = {"x": ((1, 2, 3), SamplingParams(max_tokens=2, temperature=0.0))}
    with session(LocalExecutor(resolved(model=str(checkpoint), expert_counts=str(folder / "c")))) as running:
        running.generate(requests)
        assert read_counts([folder / "c"]).tokens == 4
        (folder / "c.rank-0").unlink()
        folder.rmdir()
        running.generate(requests)
    assert "rank 0: --expert-counts" in caplog.text and "No such file" in caplog.text


def test_nothing_is_observed_unless_it_is_wished(checkpoint: Path) -> None:
    executor = LocalExecutor(resolved(model=str(checkpoint)))
    with session(executor):
        layers = [module for module in executor._runner.model.modules() if isinstance(module, SparseMoe)]
        assert len(layers) == 4 and all(moe.observe is None for moe in layers)


def two_by_two(checkpoint: Path, **changes: Any) -> Resolved:
    """EP2 over two stages. `expert_capacity`: half of a step's most rows."""
    topology = {"tp": 2, "pp": 2, "ep": 2, "expert_capacity": 36}
    return resolved(model=str(checkpoint), **{**topology, **changes})


def total_difference(one: Counts, other: Counts) -> float:
    """Share of all choices that went elsewhere."""
    pairs = [(a, b) for n in range(4) for a, b in zip(one.layers[n].chosen, other.layers[n].chosen, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / sum(a for a, _ in pairs)


@pytest.mark.slow
def test_counts_of_any_topology_place_experts_so_that_no_answer_changes(
    checkpoint: Path, mixed_requests: Requests, tmp_path: Path
) -> None:
    """Ranks that all route the same rows leave one file between them; those with rows of their own one each."""
    requests = {name: mixed_requests[name] for name in "abc"}
    told: dict[str, Counts] = {}
    answers: dict[str, dict[str, Answer]] = {}
    with session(LocalExecutor(resolved(model=str(checkpoint), expert_counts=str(tmp_path / "alone")))) as one:
        answers["alone"] = one.generate(requests)
    for exchange in ("local", "torch"):
        wish = two_by_two(checkpoint, expert_exchange=exchange, expert_counts=str(tmp_path / exchange))
        with session(SimulatedExecutor(wish)) as ranks:
            answers[exchange] = ranks.generate(requests)
    for name in answers:
        told[name] = read_counts([tmp_path / name])
        check_close(answers[name], answers["alone"], requests)
        assert {n: one.tokens for n, one in told[name].layers.items()} == dict.fromkeys(range(4), told["alone"].tokens)
        assert total_difference(told["alone"], told[name]) < 0.01, "a tie may fall the other way"
    assert [path.name for path in told["local"].files] == ["local.rank-0", "local.rank-2"]
    assert [path.name for path in told["torch"].files] == [f"torch.rank-{rank}" for rank in range(4)]

    planned = plan_experts([tmp_path / "torch"], 2, 2)
    assert any(plan.copies for plan in planned.layers.values()) and max(planned.after) < max(planned.before)
    placement_of(planned).write(tmp_path / "placement.json")
    for exchange in ("local", "all_gather"):
        wish = two_by_two(
            checkpoint,
            expert_exchange=exchange,
            expert_placement=str(tmp_path / "placement.json"),
            expert_counts=str(tmp_path / f"placed-{exchange}"),
        )
        with session(SimulatedExecutor(wish)) as ranks:
            check_close(ranks.generate(requests), answers["alone"], requests)
        placed = read_counts([tmp_path / f"placed-{exchange}"])
        assert total_difference(told["alone"], placed) < 0.01, "experts are counted, not slots"


@pytest.mark.slow
@pytest.mark.multirank
def test_worker_processes_leave_their_files_when_they_end(
    checkpoint: Path, mixed_requests: Requests, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    counted = {"expert_exchange": "torch", "expert_counts": str(tmp_path / "c.json"), "run_dir": str(run_dir)}
    wish = two_by_two(checkpoint, pp=1, dist_init_addr=f"127.0.0.1:{free_port()}", **counted)
    with world(wish, run_dir) as running:
        running.session.generate({name: mixed_requests[name] for name in "ae"})
        running.session.executor.shutdown()
        assert [worker.wait(timeout=60) for worker in running.workers] == [0, 0]
    counts = read_counts([tmp_path / "c.json"])
    assert len(counts.files) == 2 and counts.tokens == sum(len(mixed_requests[name][0]) + 6 for name in "ae")
