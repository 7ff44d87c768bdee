"""What the functions of the stand-in do, and how a call reaches them: by keyword only."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from tests.ops.aiter_standin import matrices, sequences
from tests.ops.aiter_standin.checks import (
    HALF,
    ActivationType,
    GateMode,
    QuantType,
    Tensor,
    demand,
    dtypes,
    norm,
    tensor,
)

__all__ = ["BEHAVIOUR", "ActivationType", "GateMode", "QuantType", "dtypes", "strict", "strict_method"]


def custom_ar_init(self: Any, group: Any, device: Any, max_size: int = 1 << 30) -> None:
    """`group` is one of several simulated ranks, which meet in its own all_reduce."""
    demand(isinstance(device, torch.device), "device")
    self.group, self.max_size = group, max_size
    self.disabled = group.size not in (2, 4, 6, 8)


def _summed(self: Any, x: Tensor) -> Tensor | None:
    tensor(x, "input", (*HALF, torch.float32), *x.shape)
    demand(not self.disabled, "custom all-reduce is disabled")
    if x.nbytes % 16 or x.nbytes > 64 << 20:
        return None
    demand(x.nbytes <= self.max_size, "more than the staging buffer holds")
    total: Tensor = self.group.all_reduce(x)
    return total


def custom_all_reduce(self: Any, input: Any) -> Tensor | None:
    return _summed(self, input)


def custom_fused_ar_rms(
    self: Any, input: Any, residual_inp: Any, weight: Any, eps: float, use_1stage: bool, gemma_norm: bool = False
) -> tuple[Tensor, Tensor] | None:
    demand(self.group.size != 6 and input.shape[-1] <= 16384, "there is no fused kernel for this")
    tensor(residual_inp, "residual_inp", input.dtype, *input.shape)
    tensor(weight, "weight", input.dtype, input.shape[-1])
    demand(isinstance(use_1stage, bool), "use_1stage")
    total = _summed(self, input)
    if total is None:
        return None
    stream = (total.float() + residual_inp.float()).to(input.dtype)
    return norm(stream, weight, eps, gemma_norm), stream


@contextmanager
def capture(self: Any) -> Any:
    yield


BEHAVIOUR: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        matrices.rmsnorm,
        matrices.add_rmsnorm,
        matrices.gemm_a16w16,
        matrices.per_group_quant_hip,
        matrices.gemm_a8w8_blockscale_bpreshuffle,
        matrices.shuffle_weight,
        matrices.fused_moe,
        sequences.reshape_and_cache_flash,
        sequences.flash_attn_varlen_func,
        sequences.unified_attention,
        sequences.chunk_gated_delta_rule_opt_vk,
        sequences.fused_rearrange_sigmoid_gated_delta_rule,
    )
} | {
    "CustomAllreduce.__init__": custom_ar_init,
    "CustomAllreduce.capture": capture,
    "CustomAllreduce.custom_all_reduce": custom_all_reduce,
    "CustomAllreduce.custom_fused_ar_rms": custom_fused_ar_rms,
}


def strict(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Answer calls of a function, all by keyword, with the behaviour of that name."""
    return _strict(name, 0)


def strict_method(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return _strict(name, 1)


def _strict(name: str, own: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(declared: Callable[..., Any]) -> Callable[..., Any]:
        declares = inspect.signature(declared)
        behaviour = BEHAVIOUR[name]
        knows = inspect.signature(behaviour).parameters

        @functools.wraps(declared)
        def call(*args: Any, **kwargs: Any) -> Any:
            demand(len(args) == own, f"{name} was given arguments by position: they move between releases")
            bound = declares.bind(*args, **kwargs)
            bound.apply_defaults()
            passed = dict(list(bound.arguments.items())[own:])
            for key, value in passed.items():
                default = declares.parameters[key].default
                demand(key in knows or value is default, f"{name}: {key} is nothing that our adapters pass")
            return behaviour(*args, **{key: value for key, value in passed.items() if key in knows})

        return call

    return wrap
