"""One rank end to end: the numbers of a one-shot forward, and the same bits however requests meet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rocm_serve.errors import UserError
from rocm_serve.executor.api import ExecutorFailed
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.loading import load_stage_model
from rocm_serve.executor.local import LocalExecutor
from rocm_serve.messages import NewRequest, Plan, Work
from rocm_serve.ops.batch import ForwardBatch, Sequences
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.types import FinishReason, SamplingParams
from tests.executor.generate import Answer, Requests, Session, session
from tests.executor.wishes import resolved


@pytest.fixture(scope="module")
def local(checkpoint: Path) -> Iterator[Session]:
    with session(LocalExecutor(resolved(model=str(checkpoint)))) as running:
        yield running


@pytest.fixture(scope="module")
def together(local: Session, mixed_requests: Requests) -> dict[str, Answer]:
    return local.generate(mixed_requests)


@pytest.fixture(scope="module")
def stage(checkpoint: Path) -> LoadedStage:
    return load_stage_model(resolved(model=str(checkpoint)), Mesh(1, 1).coord(0), SoloComm())


def one_shot_logprobs(stage: LoadedStage, tokens: list[int]) -> torch.Tensor:
    """Log-probs [T, V] of a plain loop over the model: the whole sequence at once, fresh caches, no worker code."""
    runner = stage.runner(num_pages=-(-len(tokens) // 16), num_slots=1)
    rows, pages = len(tokens), -(-len(tokens) // 16)
    sequences = Sequences(
        row_starts=(0, rows),
        contexts=(0,),
        slots=(1,),
        num_recurrent=0,
        row_starts_B1=torch.tensor([0, rows], dtype=torch.int32),
        contexts_B=torch.zeros(1, dtype=torch.int32),
        slots_B=torch.ones(1, dtype=torch.int32),
        page_table_BP=torch.arange(pages, dtype=torch.int32).unsqueeze(0),
    )
    missing = -rows % 32
    ids = torch.tensor(tokens + [0] * missing)
    positions = torch.cat([torch.arange(rows), torch.zeros(missing, dtype=torch.int64)])
    batch = ForwardBatch(ids, positions, torch.arange(rows), sequences, runner.cache)
    with torch.inference_mode():
        hidden = stage.model.forward(batch, None)
        return stage.model.logits(hidden)[:rows].double().log_softmax(-1)


def test_tokens_and_logprobs_are_those_of_a_one_shot_forward(
    stage: LoadedStage, mixed_requests: Requests, together: dict[str, Answer]
) -> None:
    for name, (prompt, params) in mixed_requests.items():
        answer = together[name]
        reference = one_shot_logprobs(stage, [*prompt, *answer.tokens])
        assert len(answer.tokens) == params.max_tokens and answer.finish_reason is FinishReason.LENGTH
        for i, (token, news) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
            row = reference[len(prompt) + i - 1]
            assert news.token == token and abs(news.logprob - float(row[token])) < 1e-4
            if params.temperature == 0.0 and params.presence_penalty == 0.0:
                assert float(row[:2000].max() - row[token]) < 1e-4
        wanted = [] if params.prompt_logprobs is None else list(range(1, len(prompt)))
        assert len(answer.prompt_logprobs) == len(wanted)
        for p, news in zip(wanted, answer.prompt_logprobs, strict=True):
            assert news.token == prompt[p] and abs(news.logprob - float(reference[p - 1, prompt[p]])) < 1e-4
            assert abs(news.top_logprobs[0] - float(reference[p - 1, :2000].max())) < 1e-4


def test_a_request_alone_has_the_bits_of_the_same_request_in_company(
    local: Session, mixed_requests: Requests, together: dict[str, Answer]
) -> None:
    for name in reversed(mixed_requests):
        assert local.generate({name: mixed_requests[name]})[name] == together[name], name
    assert local.stats.mixed_steps > 0 and local.stats.pages_used == local.stats.slots_used == 0


def test_preemption_changes_no_bit(checkpoint: Path, local: Session) -> None:
    requests = {}
    for number in range(4):
        temperature = 0.7 if number == 2 else 0.0
        params = SamplingParams(max_tokens=20, temperature=temperature, seed=9, logprobs=1, prompt_logprobs=1)
        requests[f"p{number}"] = (tuple(range(number, number + 20)), params)
    expected = local.generate(requests)
    wish = resolved(model=str(checkpoint), page_size=4, max_model_len=100, max_total_tokens=100)
    with session(LocalExecutor(wish)) as tight:
        assert tight.limits.num_pages == 25
        assert tight.generate(requests) == expected
        assert tight.stats.preemptions > 0


def test_made_up_weights_need_no_weights_on_disk(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    wish = resolved(model=str(tmp_path), load_format="dummy", kv_cache_dtype="fp8_e4m3", dtype="bfloat16")
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=0)
    with session(LocalExecutor(wish)) as made_up:
        answer = made_up.generate({"x": ((5, 6, 7), params)})["x"]
    assert len(answer.tokens) == 3 and all(news.logprob < 0 for news in answer.logprobs)


def test_what_cannot_be_loaded_is_refused_before_any_big_read(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the model does not fit"):
        LocalExecutor(resolved(model=str(checkpoint), mem_fraction=1e-4)).start()
    with pytest.raises(UserError, match="is not a directory|has no config"):
        LocalExecutor(resolved(model=str(tmp_path / "nowhere"))).start()


def test_a_plan_that_breaks_the_contract_fails_with_its_step(checkpoint: Path) -> None:
    executor = LocalExecutor(resolved(model=str(checkpoint)))
    executor.start()
    params = SamplingParams(max_tokens=1, temperature=0.0)
    executor.submit(Plan(0, (Work(0, 0, 3, False, True, 1, ()),), (NewRequest(0, (1, 2, 3), params),)))
    with pytest.raises(ExecutorFailed, match="rank 0 failed during step 0: AssertionError: .* beyond 0 pages"):
        executor.poll(0)
    assert executor.poll(0) is None
    executor.shutdown()
    executor.shutdown()
