"""Captured steps with drafts on a GPU: the tokens of the same steps without graphs. Run by hand there:

python -m pytest -q -p no:cacheprovider tests/executor/test_draft_graphs_gpu.py -s
"""

from __future__ import annotations

import secrets
from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed

from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.local import LocalExecutor
from rocm_serve.executor.parts import parts_of
from rocm_serve.executor.runner import StageRunner
from rocm_serve.messages import Plan, StepResult
from rocm_serve.types import SamplingParams
from tests.executor.captured import GPU, NEEDS_GPU, rows_of, same, stage_of, waits_in
from tests.executor.generate import Answer, Requests, session
from tests.executor.recorded_drafts import mixed_plans, plans_with_drafts, poison_inputs
from tests.executor.test_speculative import TRAINED, Cell, prompts, requests_of, wish_of

pytestmark = NEEDS_GPU

MOST = 8
SEED = secrets.randbits(31)


def wish(drafts: int, most: int, dtype: str = "bfloat16", pp: int = 1) -> Any:
    plain = wish_of(Cell(pp, 1, 1, 64, False, drafts, True), TRAINED, drafts)
    return changed(
        plain,
        device=GPU,
        dtype=dtype,
        kv_cache_dtype=dtype,
        fp8_activation="fp8_1x128",
        graph_max_batch=most,
        mem_fraction=0.2,
    )


def requests() -> Requests:
    """Greedy, drawn and filtered ones; batches of every size from eight to one."""
    plain = {
        f"plain {i}": (
            prompt[-(5 + 9 * i) :],
            SamplingParams(max_tokens=6 + 5 * i, temperature=0.6 * (i % 3 == 1), seed=SEED + i),
        )
        for i, prompt in enumerate(prompts(MOST))
    }
    return {**requests_of(prompts(MOST)), **plain}


def served(drafts: int, most: int, dtype: str) -> dict[str, Answer]:
    with session(LocalExecutor(wish(drafts, most, dtype))) as local:
        assert local.limits.graph_max_batch == most, local.limits.reasons["graph_max_batch"]
        print(f"K {drafts}, graph_max_batch = {most}  ({local.limits.reasons['graph_max_batch']})")
        answers = local.generate(requests())
        stats = local.stats
        print(f"  {stats.accepted_draft_tokens} of {stats.draft_tokens} drafts accepted")
        assert stats.accepted_draft_tokens > stats.draft_tokens // 10
        return answers


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("drafts", [1, 3])
def test_tokens_with_graphs_are_those_without(drafts: int, dtype: str) -> None:
    eager = served(drafts, 0, dtype)
    graphs = served(drafts, MOST, dtype)
    for name, answer in eager.items():
        assert graphs[name].tokens == answer.tokens, f"{name}, seed {SEED}"
        assert graphs[name].logprobs == answer.logprobs, f"{name}, seed {SEED}"


def ran(stage: LoadedStage, runner: StageRunner, made: list[Plan]) -> list[object]:
    out = []
    for plan in made:
        rows = sum(work.num_rows for work in plan.work)
        left = runner.step(plan, rows_of(stage, rows) if plan.work else None)
        out.append(left.cpu() if isinstance(left, torch.Tensor) else left)
    return out


@pytest.mark.parametrize(("rank", "pp"), [(0, 1), (0, 2), (1, 2)])
def test_a_replay_gives_the_bits_of_the_step_whatever_lies_beyond(rank: int, pp: int) -> None:
    stage, runner = stage_of(wish(3, MOST, pp=pp), rank)
    assert runner.decode is not None
    for count in (3, 8, 1, 5):
        made = plans_with_drafts(count, 3, 6)
        runner.decode.replays = False
        eager = ran(stage, runner, made)
        runner.decode.replays = True
        replayed = ran(stage, runner, made)
        assert all(same(a, b) for a, b in zip(eager, replayed, strict=True)), f"{count} requests"
    poison_inputs(runner.decode)  # type: ignore[arg-type]
    assert all(same(a, b) for a, b in zip(eager, ran(stage, runner, made), strict=True)), "poisoned"


@pytest.mark.parametrize(("rank", "pp"), [(0, 1), (0, 2), (1, 2)])
def test_steps_with_prompts_in_two_parts_give_the_bits_of_the_same_parts_without_graphs(rank: int, pp: int) -> None:
    stage, runner = stage_of(wish(3, MOST, pp=pp), rank)
    assert runner.decode is not None and runner.prompts is not None
    made = mixed_plans()
    assert [plan.seq for plan in made if plan.work and parts_of(plan, runner.decode, runner.prompts)] == [2, 3, 5, 6]
    found = []
    for replays in (False, True):
        runner.decode.replays = runner.prompts.replays = replays
        found.append(ran(stage, runner, made))
    assert all(same(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("rank", "waits"), [(0, 0), (1, 1)])
def test_the_host_waits_once_on_the_last_stage_and_never_on_others(rank: int, waits: int) -> None:
    stage, runner = stage_of(wish(3, MOST, pp=2), rank)
    *made, _ = plans_with_drafts(3, 3, 5)
    ran(stage, runner, made[:-1])
    rows = rows_of(stage, sum(work.num_rows for work in made[-1].work))
    out, waited = waits_in(lambda: runner.step(made[-1], rows))
    assert len(waited) == waits, waited
    assert isinstance(out, StepResult) == (waits == 1)
