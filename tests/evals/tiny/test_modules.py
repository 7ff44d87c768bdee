"""The fast forward of training is HF's own forward, gradients too; the MTP head is the projection around HF's layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3_5MoeForCausalLM
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_chunk_gated_delta_rule

from evals.tiny.modules import MtpHead, Parts, angles_of, build, trunk
from evals.tiny.scan import CHUNK, UnitInverse, scan
from rocm_serve.checkpoint.synthetic_configs import Dims, SpecialIds

SMALL = Dims(
    hidden=64,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=32,
    key_heads=2,
    value_heads=4,
    gdn_head_dim=32,
    experts=4,
    top_k=2,
    expert_width=32,
    shared_width=48,
    vocabulary=96,
    max_position=512,
)
IDS = SpecialIds(90, 91, 92, 93, 94, 95)


@pytest.fixture(scope="module")
def models() -> tuple[Qwen3_5MoeForCausalLM, MtpHead]:
    """Both with weights that no initialisation hides."""
    model, mtp = build(SMALL, IDS, 0)
    torch.manual_seed(1)
    for module in (model, mtp):
        for name, p in module.named_parameters():
            p.data += torch.randn_like(p) * (0.2 if p.dim() == 1 or "conv1d" in name else p.shape[-1] ** -0.5)
    return model.eval(), mtp.eval()


def tokens(length: int) -> Tensor:
    return torch.randint(0, SMALL.vocabulary, (2, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("length", [1, CHUNK, 150])
def test_logits_are_those_of_hf_s_own_forward(models: tuple[Any, MtpHead], length: int) -> None:
    model, _ = models
    ids = tokens(length)
    with torch.no_grad():
        hidden, _ = trunk(model, ids, angles_of(model, length), Parts())
        expected = model(ids).logits
    torch.testing.assert_close(model.lm_head(hidden), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad((logits * noise).sum(), parameters)
    return dict(zip(names, found, strict=True))


def test_gradients_are_those_of_hf_s_own_forward(models: tuple[Any, MtpHead]) -> None:
    model, _ = models
    ids = tokens(100)
    ours = gradients(model, model.lm_head(trunk(model, ids, angles_of(model, 100), Parts())[0]))
    for name, expected in gradients(model, model(ids).logits).items():
        assert (ours[name] - expected).abs().max() <= 1e-4 * expected.abs().max(), name


def test_the_scan_is_hf_s_chunked_rule() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 150, 2, 16) for _ in "qk")
    v, g, beta = torch.randn(2, 150, 4, 24), -torch.rand(2, 150, 4), torch.rand(2, 150, 4)
    expected, _ = torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(scan(q, k, v, g, beta), expected, rtol=1e-5, atol=1e-6)


def test_the_inverse_and_its_gradient_are_right() -> None:
    a = torch.randn(3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).tril(-1).requires_grad_()
    inverse = UnitInverse.apply(a)
    torch.testing.assert_close(inverse @ (a + torch.eye(6, dtype=a.dtype)), torch.eye(6, dtype=a.dtype).expand(3, 6, 6))
    assert torch.autograd.gradcheck(lambda x: UnitInverse.apply(x.tril(-1)), (a,))


def test_drafts_are_hf_s_layer_between_projection_and_norm(models: tuple[Any, MtpHead]) -> None:
    """Embedding first, then the hidden state, each normed with 1 + w; then HF's decoder layer as HF runs it."""
    model, mtp = models
    length = 70
    hidden = torch.randn(1, length, SMALL.hidden, generator=torch.Generator().manual_seed(5))
    embedded = model.model.embed_tokens(tokens(length)[:1])

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * (1 + weight)

    with torch.no_grad():
        pair = norm(embedded, mtp.pre_fc_norm_embedding.weight), norm(hidden, mtp.pre_fc_norm_hidden.weight)
        x = torch.cat(pair, -1) @ mtp.fc.weight.T
        positions = torch.arange(length)[None, None].expand(3, 1, length)
        mask = torch.full((1, 1, length, length), float("-inf")).triu(1)
        out = mtp.layers[0](x, position_embeddings=model.model.rotary_emb(x, positions), attention_mask=mask)
        expected = norm(out, mtp.norm.weight)
        got = mtp(embedded, hidden, angles_of(model, length), Parts())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
