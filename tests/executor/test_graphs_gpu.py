"""Captured decode steps on a GPU: the tokens of the same steps without graphs. Run by hand there:

python -m pytest -q -p no:cacheprovider tests/executor/test_graphs_gpu.py -s
"""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed

from rocm_serve.config import graphs as sizes
from rocm_serve.config.schema import Resolved
from rocm_serve.executor.inputs import HostRows
from rocm_serve.executor.launched import Launched
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.local import LocalExecutor
from rocm_serve.executor.prompt_steps import PromptSteps
from rocm_serve.executor.runner import StageRunner
from rocm_serve.executor.upload import Upload
from rocm_serve.messages import NewRequest, Plan, StepResult, Work
from rocm_serve.types import SamplingParams
from tests.executor.captured import GPU, NEEDS_GPU, rows_of, same, stage_of, waits_in
from tests.executor.generate import Answer, Requests, session
from tests.executor.recorded import poison_inputs
from tests.executor.wishes import resolved

pytestmark = NEEDS_GPU

MOST = 8
SEED = secrets.randbits(31)


def wish(checkpoint: Path, most: int, pp: int = 1, dtype: str = "bfloat16"):  # type: ignore[no-untyped-def]
    return resolved(
        model=str(checkpoint),
        device=GPU,
        dtype=dtype,
        kv_cache_dtype=dtype,
        pp=pp,
        max_running_requests=MOST,
        graph_max_batch=most,
        mem_fraction=0.2,
    )


def plain_requests() -> Requests:
    """Greedy and drawn ones, and batches of every size from eight to one."""
    return {
        f"plain {i}": (
            tuple((SEED + 31 * i + j) % 2000 for j in range(1 + 9 * i)),
            SamplingParams(max_tokens=4 + 3 * i, temperature=0.9 * (i % 2), seed=SEED + i),
        )
        for i in range(MOST)
    }


def served(checkpoint: Path, requests: Requests, most: int, dtype: str) -> dict[str, Answer]:
    with session(LocalExecutor(wish(checkpoint, most, dtype=dtype))) as local:
        assert local.limits.graph_max_batch == most, local.limits.reasons["graph_max_batch"]
        print(f"graph_max_batch = {most}  ({local.limits.reasons['graph_max_batch']})")
        return local.generate(requests)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_with_graphs_are_those_without(checkpoint: Path, mixed_requests: Requests, dtype: str) -> None:
    requests = {**mixed_requests, **plain_requests()}
    eager = served(checkpoint, requests, 0, dtype)
    graphs = served(checkpoint, requests, MOST, dtype)
    for name, answer in eager.items():
        assert graphs[name].tokens == answer.tokens, f"{name}, seed {SEED}"
        assert graphs[name].logprobs == answer.logprobs, f"{name}, seed {SEED}"


PARAMS = SamplingParams(max_tokens=200, temperature=0.7, seed=5)


def decoded(stage: LoadedStage, runner: StageRunner, count: int, steps: int) -> list[object]:
    """Admit `count` requests and decode; return what the runner gave. The requests are forgotten."""
    rids = range(1, count + 1)
    work = tuple(Work(rid, 0, 1, False, True, rid, (rid,)) for rid in rids)
    out = [runner.step(Plan(0, work, tuple(NewRequest(rid, (rid,), PARAMS) for rid in rids)), rows_of(stage, count))]
    for position in range(1, steps):
        tokens = [(7,)] * count if isinstance(out[-1], torch.Tensor) else [one.tokens for one in out[-1].sampled]
        work = tuple(
            Work(rid, position, 1, True, True, rid, tokens=token) for rid, token in zip(rids, tokens, strict=True)
        )
        out.append(runner.step(Plan(position, work), rows_of(stage, count)))
    runner.step(Plan(steps, (), released=tuple(rids)), None)
    return [one[:count].cpu() if isinstance(one, torch.Tensor) else one.sampled for one in out]


@pytest.mark.parametrize(("rank", "pp"), [(0, 1), (0, 2), (1, 2)])
def test_a_replay_gives_the_bits_of_the_step_whatever_lies_beyond(checkpoint: Path, rank: int, pp: int) -> None:
    stage, runner = stage_of(wish(checkpoint, MOST, pp), rank)
    assert runner.decode is not None
    for count in (3, 8, 1, 5):
        runner.decode.replays = False
        eager = decoded(stage, runner, count, 6)
        runner.decode.replays = True
        replayed = decoded(stage, runner, count, 6)
        assert all(same(a, b) for a, b in zip(eager, replayed, strict=True)), f"{count} requests"
    poison_inputs(runner.decode)
    assert all(same(a, b) for a, b in zip(eager, decoded(stage, runner, count, 6), strict=True)), "poisoned"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_host_waits_for_the_event_of_the_tokens_at_most(checkpoint: Path, rank: int) -> None:
    stage, runner = stage_of(wish(checkpoint, MOST, 2), rank)
    decoded(stage, runner, 3, 3)
    rids = range(1, 4)
    news = tuple(NewRequest(rid, (rid,), PARAMS) for rid in rids)
    runner.step(Plan(0, tuple(Work(rid, 0, 1, False, True, rid, (rid,)) for rid in rids), news), rows_of(stage, 3))
    for replays in (True, False):
        assert runner.decode is not None
        runner.decode.replays = replays
        position = 1 + (not replays)
        plan = Plan(position, tuple(Work(rid, position, 1, True, True, rid, tokens=(7,)) for rid in rids))
        rows = rows_of(stage, 3)
        out, waits = waits_in(partial(runner.step, plan, rows))
        assert not waits, f"replays {replays}: {waits}"
        assert isinstance(out, StepResult) == (rank == 1)


def test_what_is_uploaded_arrives_while_more_is_on_its_way() -> None:
    upload = Upload(torch.device("cuda"))
    sent = []
    for i in range(20):
        arrays = np.full(1000 + 5000 * i, i, dtype=np.int64), np.full((3, i + 1), -i, dtype=np.int32)
        sent.append((i, upload(*arrays)))
        torch.cuda._sleep(1_000_000)
    for i, (wide, table) in sent:
        assert bool((wide == i).all()) and bool((table == -i).all()) and table.shape == (3, i + 1)


def test_steps_with_prompts_beside_decoding_rows_go_on_from_replayed_ones(checkpoint: Path) -> None:
    """A long prompt joins in the middle: its steps are no replays, the steps around them are."""
    long = {"late": (tuple(range(100, 300)), SamplingParams(max_tokens=9, temperature=0.0))}

    def run(most: int) -> dict[str, Answer]:
        with session(LocalExecutor(wish(checkpoint, most))) as local:
            answers = {name: Answer() for name in (*plain_requests(), *long)}
            local.add(dict(list(plain_requests().items())[:4]))
            for _ in range(5):
                local.step(answers)
            local.add(dict(list(plain_requests().items())[4:7]))
            local.add(long)
            while not local.scheduler.idle:
                local.step(answers)
            return answers

    eager, graphs = run(0), run(MOST)
    assert {name: one.tokens for name, one in graphs.items()} == {name: one.tokens for name, one in eager.items()}, SEED


def late_requests() -> Requests:
    """Prompts short and long."""
    return {
        f"late {i}": (
            tuple((SEED + 7 * i + 3 * j) % 2000 for j in range(1 + 23 * i)),
            SamplingParams(max_tokens=5, temperature=0.9 * (i % 2), seed=SEED + i),
        )
        for i in range(6)
    }


def joined_by(late: Requests, wished: Resolved) -> dict[str, Answer]:
    """Serve plain requests, and from the fourth step on the late ones too."""
    with session(LocalExecutor(wished)) as local:
        answers = {name: Answer() for name in (*plain_requests(), *late)}
        local.add(plain_requests())
        for _ in range(3):
            local.step(answers)
        local.add(late)
        while not local.scheduler.idle:
            local.step(answers)
        return answers


def test_several_prompts_share_captured_steps(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some that share no size join others that decode: the tokens of the same steps not captured."""
    kinds: list[int] = []
    forward = PromptSteps.forward

    def counted(steps: PromptSteps, given: HostRows, *rest: Any) -> torch.Tensor:
        kinds.append(len(given.slots) - given.recurrent)
        return forward(steps, given, *rest)

    monkeypatch.setattr(PromptSteps, "forward", counted)
    late = late_requests()
    eager, graphs = (joined_by(late, wish(checkpoint, most)) for most in (0, MOST))
    assert kinds[: len(kinds) // 2] == kinds[len(kinds) // 2 :] and max(kinds) > 1, "several shared a step"
    assert {name: one.tokens for name, one in graphs.items()} == {name: one.tokens for name, one in eager.items()}, SEED


@pytest.mark.parametrize("ahead", ["off", "on"])
def test_prompts_beside_more_that_decode_are_two_captured_steps(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, ahead: str
) -> None:
    """More than a size of prompts has room for: the tokens of the same two steps not captured."""
    monkeypatch.setattr(sizes, "PROMPT_DECODES", 2)
    parts: list[int] = []
    in_parts = StageRunner._in_parts

    def counted(runner: StageRunner, plan: Plan, decoded: Plan, *rest: Any) -> torch.Tensor | Launched:
        parts.append(len(decoded.work))
        return in_parts(runner, plan, decoded, *rest)

    monkeypatch.setattr(StageRunner, "_in_parts", counted)
    late = late_requests()
    eager, graphs = (joined_by(late, changed(wish(checkpoint, most), plan_ahead=ahead)) for most in (0, MOST))
    assert parts[: len(parts) // 2] == parts[len(parts) // 2 :] and len(parts) >= 4 and min(parts) > 2, parts
    assert {name: one.tokens for name, one in graphs.items()} == {name: one.tokens for name, one in eager.items()}, SEED
