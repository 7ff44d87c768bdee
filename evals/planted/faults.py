"""The faults. Each patches the product in the process that it is planted in, and is known by what it must disturb."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from evals.planted import patches
from rocm_serve.executor.loaded_stage import LoadedStage


def _untouched(stage: LoadedStage) -> None:
    """Most faults are in code, not in what was loaded."""


@dataclass(frozen=True)
class Fault:
    """One bug.

    `before` patches code before a rank loads, `after` what it has loaded. `flags`: what it takes to meet the bug.
    `site`: (layer of the tiny checkpoint, part of the site's or op's name) where parity must see it first; None where
    only sampled tokens show it. `source`: where it happened.
    """

    name: str
    words: str
    source: str
    site: tuple[int, str] | None
    before: Callable[[], None] = lambda: None
    after: Callable[[LoadedStage], None] = _untouched
    flags: Mapping[str, int | str] = field(default_factory=dict)
    layout: str = ""  # a made-up checkpoint of this layout, where the tiny one cannot be cut so
    missing: tuple[str, ...] = ()  # the same fault as tensors that a checkpoint lacks: for the ledger

    @property
    def spec(self) -> str:
        """Return the SPEC of `rocm-serve parity` in which the fault shows."""
        wide: dict[str, int | str] = {"tp": 1, "pp": 1, "dtype": "float32"} | dict(self.flags)
        return ",".join(f"{key}={value}" for key, value in wide.items())


TP2 = MappingProxyType({"tp": 2})
EP2 = MappingProxyType({"tp": 2, "ep": 2, "expert_exchange": "torch"})
LAST = 8  # what follows the last of the tiny checkpoint's layers

_ALL = (
    Fault(
        "norm-without-one",
        "norms multiply by w, not by 1 + w",
        "lmdeploy #4790",
        (0, "input_layernorm.rms_norm"),
        before=patches.norm_without_one,
    ),
    Fault(
        "gated-norm-with-one",
        "the norm inside Gated DeltaNet multiplies by 1 + w",
        "lmdeploy #4790, the other way round",
        (0, "gated_rms_norm"),
        before=patches.gated_norm_with_one,
    ),
    Fault(
        "rope-theta-10000",
        "rope_theta is a class default, 1e4",
        "transformers' default when the key is missed",
        (3, "qk_norm_rope"),
        before=patches.rope_theta_10000,
    ),
    Fault(
        "rope-interleaved",
        "neighbouring dimensions are rotated, not halves",
        "GPT-J's form; ports of rotary kernels",
        (3, "qk_norm_rope"),
        before=patches.rope_interleaved,
    ),
    Fault(
        "q-gate-halves",
        "query and gate are split as halves, not per head",
        "ports of Qwen3-Next's attention",
        (3, "qk_norm_rope"),
        after=patches.q_gate_halves,
    ),
    Fault(
        "qkv-contiguous",
        "in_proj_qkv is cut in one piece, not in three",
        "loaders of fused GDN projections",
        (0, "in_proj_qkvz.linear"),
        before=patches.qkv_contiguous,
        flags=TP2,
    ),
    Fault(
        "conv-reversed",
        "the convolution's taps are in reverse order",
        "convolution kernels that count from the other end",
        (0, "causal_conv"),
        after=patches.conv_reversed,
    ),
    Fault(
        "heads-modulo",
        "value head i reads key head i mod Hk, not i // (Hv / Hk)",
        "repeat for repeat_interleave",
        (0, "linear_attn.gdn"),
        before=patches.heads_modulo,
    ),
    Fault(
        "state-bf16",
        "the recurrent state is kept in bf16",
        "LightLLM #1446, sglang #33515",
        (0, "ssm_state|linear_attn.gdn"),
        before=patches.state_bf16,
    ),
    Fault(
        "scale-divided",
        "weight_scale_inv divides",
        "the tensor's name",
        (0, "moe_experts"),
        before=patches.scale_divided,
    ),
    Fault(
        "expert-scale-lost",
        "one expert of one layer has the scale 1",
        "sglang, plain FP8 slots whose scales start as ones",
        (2, "moe_experts"),
        after=patches.expert_scale_lost,
        missing=(r"layers\.2\.mlp\.experts\.3\..*_scale_inv",),
    ),
    Fault(
        "fp8-fnuz",
        "FP8 bits are read as e4m3fnuz: half of each value",
        "aiter #3807",
        (0, "moe_experts"),
        after=patches.fp8_fnuz,
    ),
    Fault(
        "gate-up-swapped",
        "the experts' gate and up rows are exchanged",
        "w1/w3 order of fused expert kernels",
        (0, "moe_experts"),
        after=patches.gate_up_swapped,
    ),
    Fault(
        "shared-expert-dropped",
        "the shared expert's tensors were skipped with a warning",
        "sglang #40754",
        (0, "shared_expert.down_proj.linear"),
        after=patches.shared_expert_dropped,
        missing=(r"mlp\.shared_expert\.",),
    ),
    Fault(
        "shared-expert-tp-times",
        "the shared expert is counted once by every rank",
        "sglang #23084",
        (0, "mlp.sigmoid_mul"),
        before=patches.shared_expert_tp_times,
        flags=TP2,
    ),
    Fault(
        "top-k-not-renormalised",
        "the weights of the chosen experts do not sum to 1",
        "norm_topk_prob is absent from config.json",
        (0, "moe_route"),
        after=patches.not_renormalised,
    ),
    Fault(
        "stale-slot",
        "a state slot is not cleared when it changes hands",
        "modular #6681, vllm #34571",
        (0, "conv_state|causal_conv|ssm_state|linear_attn.gdn"),
        before=patches.stale_slot,
    ),
    Fault(
        "state-lost-at-chunk",
        "the recurrent state is zero at the start of a later chunk",
        "sglang #33515",
        (0, "linear_attn.gdn"),
        before=patches.state_lost_at_chunk,
        flags=MappingProxyType({"chunk": 64}),
    ),
    Fault(
        "residual-dropped-at-cut",
        "a stage sends the last MLP's output without the residual stream",
        "deferred residual adds under PP",
        (4, "stream_in"),
        before=patches.residual_dropped_at_cut,
        flags=MappingProxyType({"pp": 2}),
    ),
    Fault(
        "wrong-kv-head",
        "with more ranks than KV heads, rank r holds head r mod G",
        "KV replication by modulo",
        (3, "qkv_proj.linear"),
        before=patches.wrong_kv_head,
        flags=MappingProxyType({"tp": 4}),
        layout="text-bf16",
    ),
    Fault(
        "kv-off-by-one",
        "keys and values of decode rows are written one place too far",
        "vllm #44697",
        (3, "kv_write"),
        before=patches.kv_off_by_one,
    ),
    Fault(
        "lm-head-tied",
        "embed_tokens serves as lm_head though they are not tied",
        "pegainfer #544",
        (LAST, "lm_head"),
        after=patches.lm_head_tied,
        missing=(r"^lm_head\.weight$",),
    ),
    Fault(
        "seed-ignored",
        "random numbers go by the row of the batch",
        "vllm #51226",
        None,
        before=patches.seed_ignored,
    ),
    Fault(
        "extra-all-reduce",
        "a layer reduces what its experts' exchange has summed already",
        "sglang #34006",
        (0, "mlp.all_reduce"),
        before=patches.extra_all_reduce,
        flags=EP2,
    ),
    Fault(
        "shared-expert-ep-times",
        "the shared expert is whole on every rank, and its outputs are reduced",
        "sglang #32039",
        (0, "mlp.sigmoid_mul"),
        before=patches.shared_expert_ep_times,
        flags=MappingProxyType({"tp": 2, "ep": 2, "expert_exchange": "local"}),
    ),
    Fault(
        "expert-map-as-mask",
        "a map of experts to slots, -1 where they are elsewhere, serves as the mask of those here",
        "ATOM #887",
        (0, "mlp.experts.moe_experts"),
        before=patches.expert_map_as_mask,
        flags=EP2,
    ),
)
FAULTS: Mapping[str, Fault] = MappingProxyType({fault.name: fault for fault in _ALL})
