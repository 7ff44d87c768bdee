"""The draft head against HF's decoder layer, with the projection and norms around it written here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeTextRotaryEmbedding

from rocm_serve.layers.mlp import GatedMLP
from rocm_serve.layers.moe import SparseMoe
from rocm_serve.models.qwen3_5.backbone import DRAFT_CACHE_KEY, Qwen3_5Model
from rocm_serve.models.qwen3_5.mtp import Qwen3_5ForCausalLMMTP
from tests.models.harness import (
    Chunk,
    Pipeline,
    build_stage,
    facts_of,
    hf_model,
    make_batch,
    on_ranks,
    pipeline,
    random_tokens,
    text,
)

H = 64


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * (1 + weight)


class Oracle:
    """Random weights of a draft head, and what it computes from a whole prompt at once."""

    def __init__(self, hf: nn.Module, moe: bool) -> None:
        torch.manual_seed(4)
        self.hf = hf
        config = hf.config
        full = config.layer_types.index("full_attention")
        self.layer = (Qwen3_5MoeDecoderLayer if moe else Qwen3_5DecoderLayer)(config, full).eval()
        for name, p in self.layer.named_parameters():
            p.data = torch.randn_like(p) * (0.3 if "norm" in name else p.shape[-1] ** -0.5)
        self.rotary = (Qwen3_5MoeTextRotaryEmbedding if moe else Qwen3_5TextRotaryEmbedding)(config)
        self.fc = torch.randn(H, 2 * H) * (2 * H) ** -0.5
        self.norms = {k: torch.randn(H) * 0.3 for k in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}

    def tensors(self) -> dict[str, torch.Tensor]:
        own = {f"mtp.layers.0.{k}": v for k, v in self.layer.state_dict().items()}
        norms = {f"mtp.{k}.weight": v for k, v in self.norms.items()}
        return {**self.hf.state_dict(), **own, **norms, "mtp.fc.weight": self.fc}

    @torch.inference_mode()
    def __call__(self, next_tokens: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.hf.model.embed_tokens(torch.tensor(next_tokens))
        pair = (
            norm(embedded, self.norms["pre_fc_norm_embedding"]),
            norm(hidden, self.norms["pre_fc_norm_hidden"]),
        )
        x = (torch.cat(pair, dim=-1) @ self.fc.T)[None]
        n = x.shape[1]
        angles = self.rotary(x, torch.arange(n)[None].expand(3, 1, n))
        mask = torch.full((1, 1, n, n), float("-inf")).triu(1)
        out = self.layer(x, position_embeddings=angles, attention_mask=mask)
        y = norm(out[0], self.norms["norm"])
        return y, self.hf.lm_head(y)


@pytest.fixture(scope="module", params=[True, False], ids=["moe", "dense"])
def oracle(request: pytest.FixtureRequest) -> Oracle:
    return Oracle(hf_model(moe=request.param, seed=5), request.param)


def facts(oracle: Oracle) -> Any:
    return facts_of(oracle.hf, mtp_num_hidden_layers=1)


def head_of(run: Pipeline) -> Qwen3_5ForCausalLMMTP:
    head = run.stages[-1].model.mtp
    assert head is not None
    return head


def drafted(run: Pipeline, tokens: list[int], hidden: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Feed rows (token t + 1, hidden t) in pieces; return the draft hidden states of all rows."""
    head, t, out = head_of(run), text(3), []
    for first, last in zip(cuts, cuts[1:], strict=False):
        batch = make_batch([Chunk(t, tokens[first + 1 : last + 1])], run.stages[-1].cache, run.page_size)
        rows = torch.zeros(len(batch.token_ids_T), H)
        rows[: last - first] = hidden[first:last]
        with torch.inference_mode():
            out.append(head(batch, rows)[: last - first])
        t.cached += last - first
    return torch.cat(out)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("cuts", [[0, 40], [0, 1, 2, 20, 40]])
def test_draft_states_and_logits_equal_hf_s_layer_between_the_two_projections(
    oracle: Oracle, pp: int, cuts: list[int]
) -> None:
    tokens = random_tokens(41, 6)
    run = pipeline(facts(oracle), oracle.tensors(), pp=pp, mtp=True)
    (hidden,) = run.hidden(Chunk(text(), tokens[:40]))
    expected, logits = oracle(tokens[1:], hidden)
    got = drafted(run, tokens, hidden, cuts)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head_of(run).logits(got), logits, rtol=1e-4, atol=1e-4)


def test_the_bits_do_not_depend_on_pieces_or_stages(oracle: Oracle) -> None:
    tokens = random_tokens(41, 7)
    one, two = (pipeline(facts(oracle), oracle.tensors(), pp=pp, mtp=True) for pp in (1, 2))
    (hidden,) = one.hidden(Chunk(text(), tokens[:40]))
    whole = drafted(one, tokens, hidden, [0, 40])
    assert torch.equal(drafted(one, tokens, hidden, [0, 7, 40]), whole)
    assert torch.equal(drafted(two, tokens, hidden, [0, 40]), whole)


def test_ranks_together_draft_what_one_rank_drafts(oracle: Oracle) -> None:
    tokens = random_tokens(41, 8)
    one = pipeline(facts(oracle), oracle.tensors(), mtp=True)
    (hidden,) = one.hidden(Chunk(text(), tokens[:40]))
    expected = head_of(one).logits(drafted(one, tokens, hidden, [0, 40]))

    def body(run: Pipeline) -> list[torch.Tensor]:
        return [head_of(run).logits(drafted(run, tokens, hidden, [0, 40]))]

    (got,) = on_ranks(facts(oracle), oracle.tensors(), 2, body, mtp=True)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_the_order_of_the_two_halves_matters(oracle: Oracle) -> None:
    tokens = random_tokens(41, 9)
    run = pipeline(facts(oracle), oracle.tensors(), mtp=True)
    (hidden,) = run.hidden(Chunk(text(), tokens[:40]))
    right = drafted(run, tokens, hidden, [0, 40])
    fc = head_of(run).fc.weight
    fc.data = torch.cat((fc[:, H:], fc[:, :H]), dim=1)
    assert (drafted(run, tokens, hidden, [0, 40]) - right).abs().max() > 0.1


def test_the_draft_decoder_is_one_full_attention_layer_with_a_cache_of_its_own(oracle: Oracle) -> None:
    stage = build_stage(facts(oracle), oracle.tensors(), mtp=True)
    head = stage.model.mtp
    assert head is not None and type(head.model) is Qwen3_5Model
    assert list(head.model.layers) == ["0"]
    layer = head.model.layers["0"]
    assert layer.full_attention and layer.self_attn.cache_key == DRAFT_CACHE_KEY
    assert type(layer.mlp) is (SparseMoe if facts(oracle).is_moe else GatedMLP)
    assert head.model.embed_tokens is None, "it shares the main model's embedding"
    with pytest.raises(ValueError, match=r"legal: 0\.\.0"), head.model.capture_hidden([1]):
        pass
