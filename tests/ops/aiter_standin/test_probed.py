"""The probe on AITER's adapters: what AITER means passes in both dialects, wrong answers do not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rocm_serve.ops.bind import OPS
from rocm_serve.ops.fp8 import FN, FNUZ
from rocm_serve.ops.judging import BOUND as LEGAL
from rocm_serve.ops.probe import Refused, probe
from tests.ops.aiter_standin import behaviour, matrices
from tests.ops.aiter_standin.conftest import Install
from tests.ops.aiter_standin.package import releases
from tests.ops.aiter_standin.test_adapters import BOUND
from tests.ops.probing.facts import tiny_facts

CPU = torch.device("cpu")


@pytest.mark.parametrize("dialect", ["fn", "fnuz"])
@pytest.mark.parametrize("name", BOUND)
def test_adapters_pass_at_a_models_shapes(install: Install, name: str, dialect: str) -> None:
    install(releases()[1], {"fn": FN, "fnuz": FNUZ}[dialect])
    facts = tiny_facts(fp8_dialect=dialect, kv_dtype="fp8_e4m3")
    provider = OPS[name].providers["aiter"]
    assert provider.refusal("gfx942", facts.mapping()) is None
    assert probe(OPS[name], provider, facts, CPU, seed=21).error <= LEGAL


def _sparse_wrong_rows(x: torch.Tensor) -> torch.Tensor:
    """One row in 128 is another one's, as block products on gfx950 had it."""
    x = x.clone()
    x[:: max(2, x.shape[0] - 1)] *= 1.1
    return x


def _changed(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what gives a function some of its arguments otherwise."""
    return lambda f: lambda **a: f(**(a | {name: change(a[name]) for name, change in changes.items()}))


FAULTS: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("rms_norm", "rmsnorm", _changed(gemma_norm=lambda flag: False)),
    ("add_rms_norm", "add_rmsnorm", _changed(gemma_norm=lambda flag: False)),
    ("fp8_linear", "gemm_a8w8_blockscale_bpreshuffle", lambda f: lambda **a: _sparse_wrong_rows(f(**a))),
    ("moe_experts", "fused_moe", _changed(topk_weight=lambda weight: weight * 1.02)),
    ("moe_experts", "fused_moe", lambda f: lambda **a: f(**a) * (1.0 if len(a["topk_ids"]) <= 32 else 1.1)),
    ("gdn_chunk", "chunk_gated_delta_rule_opt_vk", _changed(initial_state=torch.zeros_like)),
    ("gdn_decode", "fused_rearrange_sigmoid_gated_delta_rule", _changed(a=lambda a: a + 0.5)),
    ("attention_prefill", "flash_attn_varlen_func", _changed(softmax_scale=lambda scale: scale * 1.1)),
    ("attention_decode", "unified_attention", _changed(softmax_scale=lambda scale: scale * 1.1)),
]


@pytest.mark.parametrize(("name", "function", "fault"), FAULTS)
def test_a_wrong_answer_is_refused(
    install: Install, monkeypatch: pytest.MonkeyPatch, name: str, function: str, fault: Callable[[Any], Any]
) -> None:
    install(releases()[-1])
    right = behaviour.BEHAVIOUR[function]

    def wrong(**arguments: Any) -> Any:
        return fault(right)(**arguments)

    wrong.__signature__ = inspect.signature(right)  # type: ignore[attr-defined]
    monkeypatch.setitem(behaviour.BEHAVIOUR, function, wrong)
    with pytest.raises(Refused, match="relative L2"):
        probe(OPS[name], OPS[name].providers["aiter"], tiny_facts(), CPU, seed=22)


def test_rows_quantised_to_224_are_not_what_aiter_means(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(releases()[-1], FNUZ)
    monkeypatch.setattr(matrices, "largest", lambda dtype: 224.0)
    with pytest.raises(Refused, match="relative L2"):
        probe(OPS["fp8_linear"], OPS["fp8_linear"].providers["aiter"], tiny_facts(fp8_dialect="fnuz"), CPU, seed=23)
