"""Steps planned ahead on a GPU: the same tokens, and a host that waits for nothing. Run by hand there:

python -m pytest -q -p no:cacheprovider tests/executor/test_plan_ahead_gpu.py -s
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_serve.config.schema import Resolved
from rocm_serve.executor.launched import Fetch, Launched
from rocm_serve.executor.loading import load_stage_model
from rocm_serve.executor.local import LocalExecutor
from rocm_serve.messages import NewRequest, Plan, Work
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.types import SamplingParams
from tests.executor.captured import GPU, NEEDS_GPU
from tests.executor.generate import Requests, session
from tests.executor.wishes import resolved

pytestmark = NEEDS_GPU

MOST = 16
SEED = secrets.randbits(31)
FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_k": 20, "top_p": 0.8}, {}, {"top_p": 0.9}, {"min_p": 0.05})


def wish(checkpoint: Path, graphs: int = MOST, **changes: Any) -> Resolved:
    return resolved(
        model=str(checkpoint),
        device=GPU,
        max_running_requests=MOST,
        graph_max_batch=graphs,
        mem_fraction=0.2,
        **changes,
    )


def params(i: int, most: int) -> SamplingParams:
    return SamplingParams(max_tokens=most, temperature=0.9 * (i % 2), seed=SEED + i, **FILTERS[i % len(FILTERS)])


def requests() -> Requests:
    """Greedy, drawn and filtered, of all lengths; all run at a time, so that steps hold the same rows either way."""
    return {
        f"r{i}": (tuple((SEED + 31 * i + j) % 2000 for j in range(1 + 9 * (i % 7))), params(i, 1 + 5 * i))
        for i in range(MOST)
    }


@pytest.mark.parametrize("graphs", [MOST // 2, 0])
def test_tokens_are_those_of_steps_one_after_the_other(checkpoint: Path, graphs: int) -> None:
    """Up to half of them are captured, more run as they are."""
    with session(LocalExecutor(wish(checkpoint, graphs))) as plain:
        expected = plain.generate(requests())
        assert plain.deepest == 1
    with session(LocalExecutor(wish(checkpoint, graphs, plan_ahead="on"))) as ahead:
        for _ in range(2):  # the second time slots and pages have had other owners
            answers = ahead.generate(requests())
            wrong = [name for name in expected if answers[name] != expected[name]]
            assert not wrong, f"seed {SEED}, graphs {graphs}: {wrong}"
        assert ahead.deepest == 2


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():  # torch says once that the mode is a prototype
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("graphs", [MOST, 0])
def test_the_host_waits_for_nothing_until_a_result_is_read(checkpoint: Path, graphs: int) -> None:
    """Decode, filtered rows, rows whose tokens are pending, and prompts beside them."""
    stage = load_stage_model(wish(checkpoint, graphs, plan_ahead="on"), Mesh(1, 1).coord(0), SoloComm())
    runner = stage.runner(num_pages=64, num_slots=MOST)
    stage.capture(runner, lambda: None)
    rids = range(1, 6)
    for turn in range(2):  # in the first, kernels are compiled and buffers made
        first = 10 * turn
        news = tuple(NewRequest(first + rid, (rid, 7), params(rid, 50)) for rid in rids)
        prompts = tuple(Work(first + rid, 0, 2, False, True, rid, (rid,)) for rid in rids)
        plans = [Plan(0, prompts, news, tuple(rid for rid in range(first - 9, first - 4)) if turn else ())]
        told: tuple[tuple[int, ...], ...] = ((),) * 5
        running: list[Launched] = []
        for step in range(6):
            if step:
                rows = tuple(
                    Work(first + rid, 1 + step, 1, True, True, rid, tokens=tokens, pending=True)
                    for rid, tokens in zip(rids, told, strict=True)
                )
                joins = step == 4
                new = (NewRequest(first + 6, (3, 3, 3), params(0, 50)),) if joins else ()
                more = (Work(first + 6, 0, 3, False, True, 6, (40,)),) if joins else ()
                plans.append(Plan(step, (*rows, *more), new))
            if turn:
                with waiting_is_an_error():
                    left = runner.launch(plans[step], None)
            else:
                left = runner.launch(plans[step], None)
            assert isinstance(left, Launched)
            running.append(left)
            if len(running) == 2:
                told = tuple(one.tokens for one in running.pop(0).result().sampled)[:5]
        running.pop().result()
        runner.launch(Plan(9, (), released=(first + 6,)), None)


def test_what_is_fetched_is_as_it_was_then() -> None:
    fetch = Fetch(torch.device("cuda"))
    x = torch.zeros(300, 3, dtype=torch.float64, device="cuda")
    for round_ in range(5):
        fetched = []
        for i in range(3):
            torch.cuda._sleep(2_000_000)
            x.fill_(10 * round_ + i)
            fetched.append(fetch(x[: 100 * (i + 1)]))
        assert not fetched[-1].there, "the host has not waited"
        for i, one in enumerate(fetched):
            host = one.wait()
            assert host.shape == (100 * (i + 1), 3) and bool((host == 10 * round_ + i).all()) and one.there
