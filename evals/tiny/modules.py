"""What is trained: HF's Qwen3_5MoeForCausalLM and an MTP head in Qwen's form, built of HF's own layer.

`trunk` and `MtpHead.forward` compute what HF's classes compute on the same parameters, faster in training: HF's gated
delta rule without a kernel package and its loop over experts would take most of the time. Tests hold them to HF's own
forward. Letters: B rows, T tokens, H width, N = B * T, E experts, I expert width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeDecoderLayer,
    Qwen3_5MoeRMSNorm,
    Qwen3_5MoeTextRotaryEmbedding,
)

from evals.tiny.scan import chunk_terms, scan
from evals.tiny.shape import text_config
from rocm_serve.checkpoint.synthetic_configs import Dims, SpecialIds


class MtpHead(nn.Module):
    """Predicts token t + 2 from the trunk's normed hidden state at t and the embedding of token t + 1.

    Parameter names below `mtp.` are the published ones.
    """

    def __init__(self, config: Qwen3_5MoeTextConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5MoeRMSNorm(hidden, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = Qwen3_5MoeRMSNorm(hidden, eps=config.rms_norm_eps)
        full = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([Qwen3_5MoeDecoderLayer(config, full)])
        self.norm = Qwen3_5MoeRMSNorm(hidden, eps=config.rms_norm_eps)

    def forward(self, embedded: Tensor, hidden: Tensor, angles: Angles, parts: Parts) -> Tensor:
        """Return draft states, normed: the head makes logits of them. Shapes: [B, T, H] twice -> [B, T, H]."""
        pair = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        x, _ = parts.attention(self.layers[0], self.fc(torch.cat(pair, -1)), *angles)
        return self.norm(x)


Angles = tuple[Tensor, Tensor]  # cos, sin [1, T, rotary dims]


def build(dims: Dims, ids: SpecialIds, seed: int) -> tuple[Qwen3_5MoeForCausalLM, MtpHead]:
    """Make both with fresh weights: normal 0.02, projections back to the residual stream less, GDN decays spread."""
    torch.manual_seed(seed)
    config = Qwen3_5MoeTextConfig(**text_config(dims, ids))
    model, mtp = Qwen3_5MoeForCausalLM(config), MtpHead(config)
    back = 0.02 / math.sqrt(2 * dims.layers)
    for name, p in [*model.named_parameters(), *((f"mtp.{n}", p) for n, p in mtp.named_parameters())]:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            nn.init.normal_(p, std=back)
        elif name.endswith("conv1d.weight"):
            nn.init.normal_(p, std=0.3)
        elif name.endswith("A_log"):
            p.data = torch.empty_like(p).uniform_(0.5, 8).log()
        elif name.endswith("dt_bias"):
            step = torch.empty_like(p).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            p.data = step + torch.log(-torch.expm1(-step))  # softplus gives the step back
        elif name.endswith("mtp.fc.weight"):
            nn.init.normal_(p, std=0.04)
        elif p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    return model, mtp


def angles_of(model: Qwen3_5MoeForCausalLM, length: int) -> Angles:
    """Return cos and sin of positions 0..length-1 in float32, by HF's own module."""
    rotary: Qwen3_5MoeTextRotaryEmbedding = model.model.rotary_emb
    like = torch.zeros(1, dtype=torch.float32, device=rotary.inv_freq.device)
    positions = torch.arange(length, device=like.device)[None, None].expand(3, 1, length)
    cos, sin = rotary(like, positions)
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dims of each head; the others pass. Shapes: x [B, T, heads, D], cos and sin [1, T, R]."""
    width = cos.shape[-1]
    turned, rest = x[..., :width].float(), x[..., width:]
    a, b = turned.chunk(2, -1)
    turned = turned * cos[:, :, None] + torch.cat((-b, a), -1) * sin[:, :, None]
    return torch.cat((turned.to(x.dtype), rest), -1)


def attention_mixer(attn: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gated full attention over all of the row. Shapes: [B, T, H] -> [B, T, H]."""
    shape = (*x.shape[:2], -1)
    q, gate = attn.q_proj(x).view(*shape, 2 * attn.head_dim).chunk(2, -1)
    k, v = (p(x).view(*shape, attn.head_dim) for p in (attn.k_proj, attn.v_proj))
    q, k = rotate(attn.q_norm(q), cos, sin), rotate(attn.k_norm(k), cos, sin)
    k, v = (t.repeat_interleave(attn.num_key_value_groups, 2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return attn.o_proj((out * torch.sigmoid(gate)).reshape(shape))


def moe(block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Routed and shared experts, and the balance loss of the router.

    Every expert sees every token and the weights of those not chosen are zero: the same sum as routing, in two GEMMs.
    Shapes: [B, T, H] -> [B, T, H], [].
    """
    flat = x.flatten(0, 1)
    logits, weights, chosen = block.gate(flat)
    share = torch.zeros_like(logits).scatter(1, chosen, weights)
    experts = block.experts
    count, wide = experts.gate_up_proj.shape[0], experts.down_proj.shape[-1]
    gate, up = F.linear(flat, experts.gate_up_proj.flatten(0, 1)).view(-1, count, 2, wide).unbind(2)
    inner = (F.silu(gate) * up * share[:, :, None]).flatten(1)
    routed = inner @ experts.down_proj.permute(0, 2, 1).flatten(0, 1)
    shared = block.shared_expert(flat) * torch.sigmoid(block.shared_expert_gate(flat))
    load = (share > 0).float().mean(0) / chosen.shape[-1]
    balance = count * (load.detach() * logits.float().softmax(-1).mean(0)).sum()
    return (routed + shared).view_as(x), balance


def attention_layer(layer: Any, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """One decoder layer with full attention. Shapes: [B, T, H] -> [B, T, H], []."""
    h = h + attention_mixer(layer.self_attn, layer.input_layernorm(h), cos, sin)
    out, balance = moe(layer.mlp, layer.post_attention_layernorm(h))
    return h + out, balance


def before_scan(layer: Any, h: Tensor) -> tuple[Tensor, ...]:
    """Projections and convolution of a GDN layer: q, k, v [B, T, heads, D], g, beta [B, T, Hv], z [B, T, Hv, D]."""
    gdn = layer.linear_attn
    x = layer.input_layernorm(h)
    length = x.shape[1]
    u = F.pad(gdn.in_proj_qkv(x), (0, 0, gdn.conv_kernel_size - 1, 0)).float()
    taps = gdn.conv1d.weight[:, 0].float()
    mixed = sum(u[:, j : j + length] * taps[:, j] for j in range(gdn.conv_kernel_size))
    q, k, v = F.silu(mixed).to(x.dtype).split((gdn.key_dim, gdn.key_dim, gdn.value_dim), -1)
    q, k = (t.unflatten(-1, (-1, gdn.head_k_dim)).contiguous() for t in (q, k))
    v, z = (t.unflatten(-1, (-1, gdn.head_v_dim)).contiguous() for t in (v, gdn.in_proj_z(x)))
    beta = gdn.in_proj_b(x).sigmoid()
    g = -gdn.A_log.float().exp() * F.softplus(gdn.in_proj_a(x).float() + gdn.dt_bias.float())
    return q, k, v, g, beta, z


def after_scan(layer: Any, h: Tensor, out: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The rest of a GDN layer: gated norm, projection, experts. Shapes: h [B, T, H] -> [B, T, H], []."""
    gdn = layer.linear_attn
    h = h + gdn.out_proj(gdn.norm(out, z).flatten(2))
    more, balance = moe(layer.mlp, layer.post_attention_layernorm(h))
    return h + more, balance


@dataclass(frozen=True, slots=True)
class Parts:
    """The pieces of a layer, compiled or not."""

    attention: Callable[..., tuple[Tensor, Tensor]] = attention_layer
    before: Callable[..., tuple[Tensor, ...]] = before_scan
    after: Callable[..., tuple[Tensor, Tensor]] = after_scan
    terms: Callable[..., Any] = chunk_terms

    @staticmethod
    def compiled() -> Parts:
        return Parts(*(torch.compile(f) for f in (attention_layer, before_scan, after_scan, chunk_terms)))


def trunk(model: Qwen3_5MoeForCausalLM, ids: Tensor, angles: Angles, parts: Parts) -> tuple[Tensor, Tensor]:
    """Run the decoder: hidden states after the final norm and the mean balance loss.

    Shapes: ids [B, T] -> [B, T, H], [].
    """
    h = model.model.embed_tokens(ids)
    balances = []
    for layer in model.model.layers:
        if hasattr(layer, "self_attn"):
            h, balance = parts.attention(layer, h, *angles)
        else:
            *inputs, z = parts.before(layer, h)
            h, balance = parts.after(layer, h, scan(*inputs, terms=parts.terms), z)
        balances.append(balance)
    return model.model.norm(h), torch.stack(balances).mean()
