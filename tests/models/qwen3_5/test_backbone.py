"""The decoder over batches, stages and ranks: who may change a row's bits (nobody), and how many collectives run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rocm_serve.models.qwen3_5.backbone import Qwen3_5Model, Qwen3_5MoeModel
from rocm_serve.parallel.comm import Comm, CountingComm, run_ranks
from rocm_serve.parallel.mesh import Mesh
from tests.models.harness import (
    Chunk,
    Pipeline,
    allowed,
    build_stage,
    decode,
    difference,
    facts_of,
    hf_logits,
    hf_model,
    make_batch,
    on_ranks,
    pipeline,
    prefill,
    random_tokens,
    text,
)


@pytest.fixture(scope="module")
def hf() -> nn.Module:
    return hf_model(seed=1)


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    return hf_model(moe=False, seed=1)


def ours(hf: nn.Module, **options: Any) -> Pipeline:
    return pipeline(facts_of(hf), hf.state_dict(), **options)


def alone(hf: nn.Module, tokens: list[int], split: int, **options: Any) -> torch.Tensor:
    """Logits of all rows of a text computed alone: prompt of `split` tokens, then one by one."""
    run, t = ours(hf, **options), text()
    return torch.cat([prefill(run, t, tokens[:split]), decode(run, t, tokens[split:])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_text_has_the_same_bits_alone_and_among_any_batch_mates(hf: nn.Module, dtype: torch.dtype) -> None:
    texts = {i: random_tokens(n + 3, 30 + n) for i, n in enumerate((1, 5, 33, 64, 70), start=1)}
    expected = {i: alone(hf, tokens, len(tokens) - 3, dtype=dtype) for i, tokens in texts.items()}
    run = ours(hf, dtype=dtype, pages=100)
    t = {i: text(i) for i in texts}
    rows: dict[int, list[torch.Tensor]] = {i: [] for i in texts}

    def step(*work: tuple[int, int, bool]) -> None:
        chunks = [Chunk(t[i], texts[i][t[i].cached : t[i].cached + n], past) for i, n, past in work]
        for (i, _, _), got in zip(work, run.step(*chunks), strict=True):
            rows[i].append(got)

    step((3, 33, False), (1, 1, False))
    step((1, 1, True), (5, 64, False))
    step((1, 1, True), (3, 1, True), (5, 6, False), (4, 64, False))
    step((4, 1, True), (5, 1, True), (3, 1, True), (2, 5, False))
    step((2, 1, True), (1, 1, True), (5, 1, True))
    step((3, 1, True), (4, 1, True))
    step((2, 2, True), (4, 1, True), (5, 1, True))
    for i, tokens in texts.items():
        got = torch.cat(rows[i])
        assert len(got) == len(tokens)
        assert torch.equal(got, expected[i]), i


def test_a_preempted_text_computed_again_has_the_same_bits(hf: nn.Module) -> None:
    tokens = random_tokens(90, 8)
    expected = alone(hf, tokens, 70)
    run, t = ours(hf), text(2)
    got = prefill(run, t, tokens[:70], 64)
    (after,) = run.step(Chunk(t, tokens[70:87], recurrent=True))
    assert torch.equal(torch.cat([got, after, decode(run, t, tokens[87:])]), expected)


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("kind", ["hf", "dense"])
def test_stages_called_in_turn_give_the_bits_of_one_stage(kind: str, pp: int, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    tokens = random_tokens(75, 9)
    assert torch.equal(alone(model, tokens, 66, pp=pp), alone(model, tokens, 66))


@pytest.mark.parametrize("kind", ["hf", "dense"])
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_together_equal_hf(kind: str, tp: int, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    tokens = random_tokens(75, 10)

    def body(run: Pipeline) -> list[torch.Tensor]:
        t = text()
        return [prefill(run, t, tokens[:66]), decode(run, t, tokens[66:])]

    got = torch.cat(on_ranks(facts_of(model), model.state_dict(), tp, body))
    assert difference(got, hf_logits(model, tokens)) <= allowed(model, tokens)


def test_a_text_on_two_ranks_has_the_same_bits_alone_and_with_mates(hf: nn.Module) -> None:
    tokens, mate = random_tokens(40, 12), random_tokens(70, 13)

    def by_itself(run: Pipeline) -> list[torch.Tensor]:
        t = text()
        return [prefill(run, t, tokens[:38]), decode(run, t, tokens[38:])]

    def with_mate(run: Pipeline) -> list[torch.Tensor]:
        t, m = text(), text(2)
        first = run.step(Chunk(m, mate[:64]), Chunk(t, tokens[:38]))[1]
        second = run.step(Chunk(t, tokens[38:39], recurrent=True), Chunk(m, mate[64:]))[0]
        return [first, torch.cat([second, decode(run, t, tokens[39:])])]

    both = [torch.cat(on_ranks(facts_of(hf), hf.state_dict(), 2, body)) for body in (by_itself, with_mate)]
    assert torch.equal(*both)


@pytest.mark.parametrize("kind", ["hf", "dense"])
@pytest.mark.parametrize("tp", [1, 2])
def test_exactly_two_all_reduces_a_layer_and_one_for_the_embedding(
    kind: str, tp: int, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    facts, tensors = facts_of(model), model.state_dict()

    def body(comm: Comm) -> list[tuple[dict[str, int], int]]:
        seen = []
        for stage in range(2):
            counting = CountingComm(comm)
            built = build_stage(facts, tensors, mesh=Mesh(tp, 2), rank=stage * tp + comm.rank, comm=counting)
            batch = make_batch([Chunk(text(), [3, 4, 5])], built.cache, 16)
            built.model.forward(batch, None if stage == 0 else torch.zeros(32, facts.hidden_size))
            seen.append((dict(counting.calls), counting.bytes["all_reduce"]))
        return seen

    row_bytes = 32 * facts.hidden_size * 4
    embedding = 1 if tp > 1 else 0
    expected = [
        ({"all_reduce": 4 + embedding}, (4 + embedding) * row_bytes),
        ({"all_reduce": 4}, 4 * row_bytes),
    ]
    assert all(seen == expected for seen in run_ranks(tp, body))


def test_each_stage_builds_only_its_own_layers(hf: nn.Module) -> None:
    first, second = (s.model for s in ours(hf, pp=2).stages)
    assert list(first.model.layers) == ["0", "1"] and list(second.model.layers) == ["2", "3"]
    assert first.model.embed_tokens is not None and first.model.norm is None and first.lm_head is None
    assert second.model.embed_tokens is None and second.model.norm is not None and second.lm_head is not None


def test_hidden_states_are_captured_after_the_layers_asked_for_and_only_inside_the_block(hf: nn.Module) -> None:
    tokens = random_tokens(20, 14)
    one, two = ours(hf), ours(hf, pp=2)
    with torch.inference_mode():
        theirs = hf(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    with one.stages[0].model.capture_hidden([0, 2]) as captured:
        (hidden,) = one.hidden(Chunk(text(), tokens))
    assert captured.keys() == {0, 2}
    for layer in (0, 2):
        torch.testing.assert_close(captured[layer][:20], theirs[layer + 1][0], rtol=1e-4, atol=1e-4)
    with two.stages[0].model.capture_hidden([0, 2]) as a, two.stages[1].model.capture_hidden([0, 2]) as b:
        two.hidden(Chunk(text(), tokens))
    assert torch.equal(a[0], captured[0]) and torch.equal(b[2], captured[2]) and (a.keys(), b.keys()) == ({0}, {2})
    before = captured[2].clone()
    one.hidden(Chunk(text(2), tokens))
    assert torch.equal(captured[2], before)
    with pytest.raises(ValueError, match=r"legal: 0\.\.3"), one.stages[0].model.capture_hidden([4]):
        pass


def test_the_rows_of_the_previous_stage_are_left_as_they_came(hf: nn.Module) -> None:
    stage = ours(hf, pp=2).stages[1]
    came = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    kept = came.clone()
    out = stage.model.forward(make_batch([Chunk(text(), [1, 2])], stage.cache, 16), came)
    assert torch.equal(came, kept)
    assert out.shape == came.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_residual_stream_has_the_dtype_of_the_run(hf: nn.Module, dtype: torch.dtype) -> None:
    first = ours(hf, pp=2, dtype=dtype).stages[0]
    assert first.model.forward(make_batch([Chunk(text(), [1, 2])], first.cache, 16), None).dtype == dtype


def test_padding_rows_leave_every_cache_alone(hf: nn.Module) -> None:
    run = ours(hf)
    run.step(Chunk(text(2), [5, 6, 7]))
    cache = run.stages[0].cache
    touched = text(2).pages[0]
    for pages in (*cache.k_pages.values(), *cache.v_pages.values()):
        others = [i for i in range(len(pages)) if i != touched]
        assert pages[others].isnan().all() and not pages[touched, :3].isnan().any() and pages[touched, 3:].isnan().all()
    for states in (*cache.conv.values(), *cache.ssm.values()):
        assert states[2].abs().sum() > 0
        assert states[[0, 1, 3, 4]].abs().sum() == 0


def test_backbones_are_moe_or_dense_as_the_facts_say(hf: nn.Module, dense: nn.Module) -> None:
    assert type(ours(hf).stages[0].model.model) is Qwen3_5MoeModel
    assert type(ours(dense).stages[0].model.model) is Qwen3_5Model
