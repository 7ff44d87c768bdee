"""Masters, what the model sees of them, and the two kinds of steps."""

from __future__ import annotations

import torch

from evals.tiny.export import fill, named, published
from evals.tiny.modules import build
from evals.tiny.optimiser import Optimiser, orthogonalised, rounded
from tests.evals.tiny.test_modules import IDS, SMALL


def test_the_model_is_trained_with_the_values_that_the_files_will_have() -> None:
    model, mtp = build(SMALL, IDS, 0)
    first = Optimiser(model.named_parameters(), 0.01)
    seen = {name: p.detach().clone() for name, p in named(model, mtp)}
    assert any(not torch.equal(seen[name], master) for name, master in first.masters.items())
    rest = {name: p.detach() for name, p in named(model, mtp) if name not in first.masters}
    fill(model, mtp, published(rest | first.masters))
    for name, p in model.named_parameters():
        assert torch.equal(p, seen[name]), name


def test_an_expert_goes_through_fp8_and_the_rest_through_bf16() -> None:
    value = torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(0))
    expert = rounded("model.layers.0.mlp.experts.down_proj", value)
    plain = rounded("model.layers.0.mlp.gate.weight", value)
    assert torch.equal(plain, value.bfloat16().float())
    assert 0.01 < ((expert - value).abs() / value.abs().clamp(min=0.1)).max() < 0.1


def test_orthogonalised_has_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalised(torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(1))))
    assert values.min() > 0.6 and values.max() < 1.3


def test_both_kinds_of_steps_lower_a_loss_and_leave_no_gradient() -> None:
    model, _ = build(SMALL, IDS, 0)
    optimiser = Optimiser(model.named_parameters(), 0.003)
    kinds = {name for name, _ in optimiser.matrices}, {name for name, _ in optimiser.others}
    assert (
        "model.layers.0.mlp.experts.gate_up_proj" in kinds[0] and "model.layers.3.self_attn.q_proj.weight" in kinds[0]
    )
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.linear_attn.A_log"} <= kinds[1]
    ids = torch.randint(0, SMALL.vocabulary, (2, 40), generator=torch.Generator().manual_seed(2))
    losses = []
    for _ in range(6):
        loss = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        before = {name: master.clone() for name, master in optimiser.masters.items()}
        optimiser.step(1.0)
        assert all(p.grad is None for p in model.parameters())
        assert not [n for n, m in optimiser.masters.items() if torch.equal(m, before[n])]
    assert losses[-1] < losses[0] - 0.1
