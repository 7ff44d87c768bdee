"""What AITER cannot do for a model is said in words when it is chosen; models that it is for are taken."""

from __future__ import annotations

import pytest

from rocm_serve.ops.aiter_provider import aiter_provider
from rocm_serve.ops.facts import LinearShape
from rocm_serve.platform import aiter_abi
from tests.ops.probing.facts import tiny_facts

OPS = [op for op in aiter_abi.NEEDS if op != "all_reduce"]
# Qwen3.8-2.4T at TP8 on gfx942: one rank's sizes.
LARGE = tiny_facts(
    fp8_dialect="fnuz",
    tp=8,
    hidden_size=8192,
    heads=8,
    kv_heads=1,
    head_dim=256,
    rotary_dim=64,
    page_size=64,
    key_heads=2,
    value_heads=16,
    key_dim=128,
    value_dim=128,
    num_experts=512,
    top_k=10,
    expert_width=256,
    linears=(LinearShape(5120, 8192, False), LinearShape(2048, 8192, True)),
)


@pytest.fixture(autouse=True)
def any_aiter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiter_abi, "refusal", lambda op: None)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("op", OPS)
def test_the_largest_model_is_taken_and_so_is_one_that_is_not_described(op: str, arch: str) -> None:
    assert aiter_provider(op).refusal(arch, LARGE.mapping()) is None
    assert aiter_provider(op).refusal(arch, {}) is None


@pytest.mark.parametrize("op", OPS)
def test_rows_in_float32_are_not_taken(op: str) -> None:
    why = aiter_provider(op).refusal("gfx950", LARGE.mapping() | {"dtype": "float32"})
    assert why == "takes rows in bfloat16, not float32"


@pytest.mark.parametrize(
    ("op", "facts", "words"),
    [
        ("rms_norm", {"hidden_size": 8200}, "normalises rows of up to 8192 columns, not 8200"),
        ("add_rms_norm", {"hidden_size": 16384}, "up to 8192 columns, not 16384"),
        ("fp8_linear", {"linears": (LinearShape(64, 8192, True),)}, "whole blocks of 128, not [64, 8192]"),
        ("fp8_linear", {"linears": (LinearShape(128, 8200, True),)}, "whole blocks of 128, not [128, 8200]"),
        ("fp8_linear", {"activation": "bf16"}, "rows quantised per 128 columns (fp8_1x128), not with bf16 rows"),
        ("moe_experts", {"activation": "bf16"}, "not with bf16 rows"),
        ("moe_experts", {"expert_width": 64}, "whole blocks of 128, not 8192 x 64 on a rank"),
        ("moe_experts", {"expert_width": 48, "expert_fp8": False}, "multiples of 32, not 8192 x 48 on a rank"),
        ("kv_write", {"kv_dtype": "float32"}, "keys and values in bfloat16 or fp8_e4m3, not float32"),
        ("attention_prefill", {"head_dim": 264}, "heads of up to 256 in multiples of 8, not 264"),
        ("attention_decode", {"head_dim": 100}, "multiples of 8, not 100"),
        ("attention_decode", {"page_size": 48}, "pages of a power of two of rows, not 48"),
        ("gdn_chunk", {"key_dim": 512}, "key heads of up to 256, not 512"),
        ("gdn_decode", {"key_dim": 512}, "key heads of up to 256, not 512"),
    ],
)
def test_a_limit_names_what_was_asked_and_what_is_legal(op: str, facts: dict[str, object], words: str) -> None:
    why = aiter_provider(op).refusal("gfx942", LARGE.mapping() | facts)
    assert why is not None and words in why


@pytest.mark.parametrize(
    ("op", "facts"),
    [
        ("fp8_linear", {"linears": (LinearShape(64, 8200, False),)}),
        ("moe_experts", {"expert_width": 96, "expert_fp8": False, "activation": "bf16"}),
        ("attention_prefill", {"page_size": 48}),
        ("attention_decode", {"page_size": 1, "kv_dtype": "fp8_e4m3"}),
    ],
)
def test_a_limit_is_for_what_it_is_about(op: str, facts: dict[str, object]) -> None:
    assert aiter_provider(op).refusal("gfx942", LARGE.mapping() | facts) is None


def test_a_models_limit_is_told_before_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package can be exchanged, the model cannot."""
    monkeypatch.setattr(aiter_abi, "refusal", lambda op: "is not installed")
    assert "float32" in str(aiter_provider("linear").refusal("gfx942", {"dtype": "float32"}))
    assert aiter_provider("linear").refusal("gfx942", {}) == "is not installed"
    assert aiter_provider("linear").refusal("cpu", {}) == "runs on gfx942, gfx950, not on cpu"
