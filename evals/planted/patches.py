"""The patches behind faults.py: each replaces one function of the product, or changes what a rank has loaded."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

import rocm_serve.checkpoint.load as loader
import rocm_serve.executor.loading as loading
import rocm_serve.executor.runner as runner
import rocm_serve.models.qwen3_5.backbone as backbone
import rocm_serve.ops.bind as bind
import rocm_serve.ops.moe_experts.reference as moe_reference
import rocm_serve.parallel.exchange.local as local_exchange
import rocm_serve.parallel.exchange.torch_a2a as torch_exchange
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.layers.attention import GatedAttention
from rocm_serve.layers.gated_delta_net import Conv1d, GatedRMSNorm
from rocm_serve.layers.mlp import GatedMLP
from rocm_serve.layers.moe import RoutedExperts, SparseMoe
from rocm_serve.layers.norm import RMSNorm
from rocm_serve.ops.contract import OpFunction
from rocm_serve.ops.qk_norm_rope.reference import qk_norm_rope
from rocm_serve.ops.rms_norm.reference import rms_norm
from rocm_serve.ops.sampling import rng
from rocm_serve.parallel.layout import Copy, Param, Place, Split
from rocm_serve.parallel.layout import copies as real_copies

_QKV = re.compile(r"linear_attn\.(in_proj_qkvz|conv1d)\.weight$")


def _modules(stage: LoadedStage, kind: type[nn.Module]) -> Iterator[Any]:
    assert isinstance(stage.model, nn.Module)
    return (module for module in stage.model.modules() if isinstance(module, kind))


def _with_op(**functions: OpFunction) -> None:
    """Put other functions in the place of references, before any is bound."""
    ops = {name: replace(op, reference=functions.get(name, op.reference)) for name, op in bind.OPS.items()}
    bind.OPS = MappingProxyType(ops)


def norm_without_one() -> None:
    def forward(self: RMSNorm, x_TH: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x_TH, self.weight, eps=self.eps, plus_one=False)

    RMSNorm.forward = forward


def gated_norm_with_one() -> None:
    plain = GatedRMSNorm.forward

    def forward(self: GatedRMSNorm, x_THV: torch.Tensor, gate_THV: torch.Tensor) -> torch.Tensor:
        kept = self.weight.data
        self.weight.data = kept + 1
        out = plain(self, x_THV, gate_THV)
        self.weight.data = kept
        return out

    GatedRMSNorm.forward = forward


def rope_theta_10000() -> None:
    plain = backbone.rotary_table
    backbone.rotary_table = lambda **asked: plain(**(asked | {"theta": 1e4}))


def rope_interleaved() -> None:
    def faulty(
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        q_weight_D: torch.Tensor,
        k_weight_D: torch.Tensor,
        cos_PR: torch.Tensor,
        sin_PR: torch.Tensor,
        positions_T: torch.Tensor,
        *,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos_PR[positions_T][:, None], sin_PR[positions_T][:, None]
        turned = []
        for x, weight in ((q_THD, q_weight_D), (k_TGD, k_weight_D)):
            normed = rms_norm(x.float(), weight, eps=eps, plus_one=True)
            width = 2 * cos_PR.shape[1]
            a, b = normed[..., 0:width:2], normed[..., 1:width:2]
            pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
            turned.append(torch.cat((pairs, normed[..., width:]), -1).to(x.dtype))
        return turned[0], turned[1]

    assert faulty.__annotations__ == qk_norm_rope.__annotations__
    _with_op(qk_norm_rope=faulty)


def q_gate_halves(stage: LoadedStage) -> None:
    for attention in _modules(stage, GatedAttention):
        heads, d = attention.heads, attention.head_dim

        def split(_module: nn.Module, _args: Any, out: torch.Tensor, heads: int = heads, d: int = d) -> torch.Tensor:
            both = out[:, : 2 * heads * d].view(-1, 2, heads, d).transpose(1, 2).reshape(-1, 2 * heads * d)
            return torch.cat((both, out[:, 2 * heads * d :]), -1)

        attention.qkv_proj.register_forward_hook(split)


def qkv_contiguous() -> None:
    def copies(param: Param, place: Place) -> Iterator[Copy]:
        at = 0
        for copy in real_copies(param, place):
            rows = copy.src[0].stop - copy.src[0].start
            if _QKV.search(param.name) and copy.key.endswith(("in_proj_qkv.weight", "conv1d.weight")):
                whole = next(part.source[0] for part in param.parts if part.key == copy.key)
                first = place.tp_rank * (whole // place.tp) + at
                copy = replace(copy, src=(slice(first, first + rows), *copy.src[1:]))
            at += rows
            yield copy

    loader.copies = copies


def conv_reversed(stage: LoadedStage) -> None:
    for conv in _modules(stage, Conv1d):
        conv.weight.data = conv.weight.data.flip(-1).contiguous()


def heads_modulo() -> None:
    def faulty(plain: OpFunction) -> OpFunction:
        def op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
            heads = torch.arange(v.shape[1], device=v.device) % k.shape[1]
            return plain(q[:, heads], k[:, heads], v, *more, **named)

        return op

    _with_op(**{name: faulty(bind.OPS[name].reference) for name in ("gdn_chunk", "gdn_decode")})


def state_bf16() -> None:
    def faulty(plain: OpFunction) -> OpFunction:
        def op(*args: Any, **named: Any) -> torch.Tensor:
            out = plain(*args, **named)
            state, slots = args[7], args[8].slots_B.long()
            state[slots] = state[slots].bfloat16().float()
            return out

        return op

    _with_op(**{name: faulty(bind.OPS[name].reference) for name in ("gdn_chunk", "gdn_decode")})


def scale_divided() -> None:
    plain = moe_reference.dequantise
    moe_reference.dequantise = lambda weight, scale: plain(weight, 1.0 / scale)


def expert_scale_lost(stage: LoadedStage) -> None:
    layer = _layers(stage).get("2")
    if layer is not None:
        for scale in (layer.mlp.experts.gate_up_proj_scale_inv, layer.mlp.experts.down_proj_scale_inv):
            scale.data[3] = 1.0


def fp8_fnuz(stage: LoadedStage) -> None:
    for experts in _modules(stage, RoutedExperts):
        for scale in (experts.gate_up_proj_scale_inv, experts.down_proj_scale_inv):
            scale.data *= 0.5


def gate_up_swapped(stage: LoadedStage) -> None:
    for experts in _modules(stage, RoutedExperts):
        for weight in (experts.gate_up_proj, experts.gate_up_proj_scale_inv):
            bits = weight.data.view(torch.uint8) if weight.dtype.itemsize == 1 else weight.data
            gate, up = bits.chunk(2, dim=1)
            bits.copy_(torch.cat((up, gate), dim=1))


def shared_expert_dropped(stage: LoadedStage) -> None:
    for moe in _modules(stage, SparseMoe):
        moe.shared_expert.down_proj.weight.data.zero_()


def shared_expert_tp_times() -> None:
    plain = GatedMLP.partial

    def partial(self: GatedMLP, x_TH: torch.Tensor) -> torch.Tensor:
        return plain(self, x_TH) * self.down_proj.comm.size

    GatedMLP.partial = partial


def not_renormalised(stage: LoadedStage) -> None:
    for moe in _modules(stage, SparseMoe):
        moe.renormalise = False


def stale_slot() -> None:
    runner.clear_slots = lambda cache, slots: None


def state_lost_at_chunk() -> None:
    plain = bind.OPS["gdn_chunk"].reference

    def op(*args: Any, **named: Any) -> torch.Tensor:
        state, run = args[7], args[8]
        for slot, context in zip(run.slots, run.contexts, strict=True):
            if context:
                state[slot].zero_()
        return plain(*args, **named)

    _with_op(gdn_chunk=op)


def residual_dropped_at_cut() -> None:
    plain = backbone.Qwen3_5Model.forward

    def forward(self: backbone.Qwen3_5Model, batch: Any, hidden_TH: torch.Tensor | None) -> torch.Tensor:
        last = list(self.layers.values())[-1]
        kept: list[torch.Tensor] = []
        hook = last.mlp.register_forward_hook(lambda _module, _args, out: kept.append(out.clone()))
        out_TH = plain(self, batch, hidden_TH)
        hook.remove()
        return out_TH if self.norm is not None else kept[-1]

    backbone.Qwen3_5Model.forward = forward


def wrong_kv_head() -> None:
    plain = Split.owned

    def owned(self: Split, degree: int, index: int) -> range:
        if self.repeat and self.units % degree:
            unit = index % self.units
            return range(unit, unit + 1)
        return plain(self, degree, index)

    Split.owned = owned


def kv_off_by_one() -> None:
    plain = runner.build_inputs

    def build(table: Any, plan: Any, cache: Any, *rest: Any, **named: Any) -> Any:
        inputs = plain(table, plan, cache, *rest, **named)
        rows, pages = inputs.rows, next(iter(cache.k_pages.values()), None)
        if pages is not None:
            own_N = rows.kv_index_N[: rows.starts[rows.recurrent]]
            own_N[:] = (own_N + 1).clip(max=pages.shape[0] * pages.shape[1] - 1)
        return inputs

    runner.build_inputs = build


def lm_head_tied(stage: LoadedStage) -> None:
    held: Mapping[str, torch.Tensor] = dict(stage.model.named_parameters())  # type: ignore[attr-defined]
    if {"lm_head.weight", "model.embed_tokens.weight"} <= held.keys():
        held["lm_head.weight"].data.copy_(held["model.embed_tokens.weight"].data)


def seed_ignored() -> None:
    drawn = itertools.count()

    def keys(streams_R: rng.Uint64, positions_R: rng.Uint64) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([rng.as_signed(rng.row_key(0, 0, next(drawn))) for _ in streams_R], dtype=np.int64)

    rng.row_keys = keys


def extra_all_reduce() -> None:
    plain = SparseMoe.forward

    def forward(self: SparseMoe, x_TH: torch.Tensor, num_rows: int | torch.Tensor) -> torch.Tensor:
        return self.comm.all_reduce(plain(self, x_TH, num_rows))

    SparseMoe.forward = forward


def shared_expert_ep_times() -> None:
    plain = loading.expert_plan
    loading.expert_plan = lambda resolved, facts: replace(plain(resolved, facts), shared_whole=True)


def expert_map_as_mask() -> None:
    plain = torch_exchange.local_slots

    def faulty(ids: torch.Tensor, ep_rank: int, slots_per_rank: int) -> torch.Tensor:
        expert_map = plain(ids, ep_rank, slots_per_rank)
        return torch.where(expert_map.bool(), expert_map % slots_per_rank, -1)

    for module in (torch_exchange, local_exchange):
        module.local_slots = faulty


def _layers(stage: LoadedStage) -> Mapping[str, Any]:
    return dict(stage.model.model.layers.items())  # type: ignore[attr-defined]
