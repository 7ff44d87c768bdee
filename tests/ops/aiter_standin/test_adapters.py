"""Every adapter against the stand-in of every release: the op's cases, refused in words or answered rightly."""

from __future__ import annotations

import inspect
import zlib
from typing import Any

import pytest
import torch

from rocm_serve.errors import UserError
from rocm_serve.ops.bind import OPS
from rocm_serve.ops.contract import Arguments, Op, layout_tag
from rocm_serve.ops.facts import LinearShape
from rocm_serve.ops.layouts import checked, prepared
from rocm_serve.platform.aiter_abi import NEEDS
from tests.ops.aiter_standin.conftest import Install
from tests.ops.aiter_standin.package import releases
from tests.ops.oracles import ORACLES
from tests.ops.test_references import copied, error

OLDEST_REFUSED, *SERVED = releases()
BOUND = [name for name, op in OPS.items() if "aiter" in op.providers]
# Seconds each on the CPU, and nothing in them that differs between releases: for the oldest one only.
SLOW = {("gdn_chunk", "2.4T heads at tp 8"), ("gdn_chunk", "long memory"), ("gdn_chunk", "quick forgetting")}
EVERY_CASE = [
    (release, op, case)
    for release in SERVED
    for op in BOUND
    for case in OPS[op].cases
    if release == SERVED[0] or (op, case) not in SLOW
]
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "fp8_e4m3"}


def facts_of(op: str, made: Arguments) -> dict[str, object]:
    """Tell of one case what a model's facts would tell."""
    rows = next(value for value in made.values() if isinstance(value, torch.Tensor))
    facts: dict[str, object] = {
        "dtype": NAMES[made.get("out_dtype") or rows.dtype] if op == "moe_experts" else NAMES[rows.dtype]
    }
    if "activation" in made and op != "moe_experts" or made.get("w13_scale") is not None:
        facts["activation"] = made["activation"]
    if op in ("rms_norm", "add_rms_norm"):
        facts["hidden_size"] = rows.shape[-1]
    if op == "fp8_linear":
        facts["linears"] = (LinearShape(*made["weight_NK"].shape, fp8=True),)  # type: ignore[attr-defined]
    if op == "moe_experts":
        _, hidden, width = made["w2_EHI"].shape  # type: ignore[attr-defined]
        facts |= {"hidden_size": hidden, "expert_width": width, "expert_fp8": "w13_scale" in made}
    if "k_pages_PSGD" in made:
        pages: Any = made["k_pages_PSGD"]
        facts |= {"kv_dtype": NAMES[pages.dtype], "page_size": pages.shape[1], "head_dim": pages.shape[3]}
    if op.startswith("gdn"):
        facts["key_dim"] = made["q_ThK"].shape[2]  # type: ignore[attr-defined]
    return facts


def answers(op: Op, made: Arguments) -> list[torch.Tensor]:
    """Run the adapter as a bound op runs: weights prepared and tagged, tags looked at."""
    made = copied(made)
    provider = op.providers["aiter"]
    weights = {name: made[name] for name in op.weights if made.get(name) is not None}
    ready = prepared(op, provider, weights)  # type: ignore[arg-type]
    result = checked(op, provider, provider.load())(**(made | ready))
    return [result] + [made[name] for name in op.mutates if made.get(name) is not None]  # type: ignore[misc]


def case_arguments(op: Op, case: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> Arguments:
    print(f"seed {seed}")
    return op.cases[case](torch.Generator().manual_seed(seed), dtype)


def agree(op: Op, got: list[torch.Tensor], made: Arguments) -> None:
    tol = op.tol["bfloat16"]
    for g, e in zip(got, ORACLES[op.name](**copied(made)), strict=True):
        assert error(g, e) <= tol.rel, f"{error(g, e):.2e} > {tol.rel} ({tol.why})"


@pytest.mark.parametrize(("release", "name", "case"), EVERY_CASE)
def test_a_case_is_refused_in_words_or_agrees_with_the_oracle(
    install: Install, release: str, name: str, case: str
) -> None:
    install(release)
    op = OPS[name]
    made = case_arguments(op, case, zlib.crc32(f"{release} {name} {case}".encode()))
    why = op.providers["aiter"].refusal("gfx950", facts_of(name, made))
    if why is None:
        assert (name, case) not in REFUSED
        agree(op, answers(op, made), made)
    else:
        assert REFUSED[name, case] in why


# Every case that AITER may not serve, and the words that say so.
REFUSED = {
    ("moe_experts", "odd sizes"): "multiples of 32, not 72 x 40",
    ("moe_experts", "fp8 weights"): "not with bf16 rows",
    ("kv_write", "float32 pages"): "in bfloat16 or fp8_e4m3, not float32",
    ("attention_prefill", "float32 pages"): "in bfloat16 or fp8_e4m3, not float32",
    ("attention_decode", "float32 pages"): "in bfloat16 or fp8_e4m3, not float32",
    ("attention_decode", "large pages"): "power of two of rows, not 200",
    ("fp8_linear", "ragged blocks, fp8_1x128"): "whole blocks of 128, not [130, 200]",
    ("fp8_linear", "ragged blocks, bf16"): "whole blocks of 128, not [130, 200]",
} | {
    ("fp8_linear", f"{case}, bf16"): "not with bf16 rows"
    for case in ("no rows", "one row", "odd rows", "small values", "blocks of zeros")
}


@pytest.mark.parametrize("name", BOUND)
def test_rows_in_float32_are_refused(install: Install, name: str) -> None:
    install(SERVED[-1])
    op = OPS[name]
    for case in op.cases:
        why = op.providers["aiter"].refusal("gfx942", facts_of(name, case_arguments(op, case, 1, torch.float32)))
        assert why is not None and ("float32" in why or (name, case) in REFUSED)


@pytest.mark.parametrize("name", BOUND)
def test_an_adapter_has_the_signature_of_the_reference(install: Install, name: str) -> None:
    install(SERVED[0])
    op = OPS[name]
    assert inspect.signature(op.providers["aiter"].load()) == inspect.signature(op.reference)


@pytest.mark.parametrize("name", BOUND)
def test_an_older_release_is_refused_naming_the_missing_parameter(install: Install, name: str) -> None:
    folder = install(OLDEST_REFUSED)
    why = OPS[name].providers["aiter"].refusal("gfx950", {})
    assert why is not None
    assert "has no parameter gemma_norm" in why and str(folder) in why and "install AMD's AITER v0.1.17" in why


@pytest.mark.parametrize("name", BOUND)
def test_an_adapter_passes_nothing_beyond_the_table_of_needs(
    install: Install, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter missing from the table would be found missing in a step, not when the provider is chosen."""
    install(SERVED[0])
    op = OPS[name]
    module = inspect.getmodule(op.providers["aiter"].load())
    passed: dict[str, set[str]] = {need.function: set() for need in NEEDS[name]}
    for function in passed:
        real = getattr(module, function)

        def seen(*args: object, _real: Any = real, _into: set[str] = passed[function], **kwargs: object) -> object:
            _into.update(kwargs)
            return _real(*args, **kwargs)

        monkeypatch.setattr(module, function, seen)
    for case in op.cases:
        made = case_arguments(op, case, 2)
        if op.providers["aiter"].refusal("gfx950", facts_of(name, made)) is None:
            answers(op, made)
    assert passed == {need.function: set(need.passes) for need in NEEDS[name]}


def test_an_import_that_fails_is_a_refusal_in_words(install: Install) -> None:
    folder = install(SERVED[0])
    (folder / "__init__.py").write_text("raise RuntimeError('ROCm version file not found')\n", encoding="utf-8")
    provider = OPS["rms_norm"].providers["aiter"]
    assert provider.refusal("gfx942", {}) is None
    with pytest.raises(UserError, match="--op rms_norm=aiter: .*RuntimeError: ROCm version file not found.*triton"):
        provider.load()


@pytest.mark.parametrize("name", ["fp8_linear", "moe_experts"])
def test_weights_are_laid_out_by_the_adapter_and_others_are_refused(install: Install, name: str) -> None:
    install(SERVED[0])
    op = OPS[name]
    provider = op.providers["aiter"]
    case = {"fp8_linear": "odd rows, fp8_1x128", "moe_experts": "fp8 weights and rows"}[name]
    made = case_arguments(op, case, 3)
    weights = {key: made[key] for key in op.weights}
    ready = prepared(op, provider, weights)  # type: ignore[arg-type]
    assert {layout_tag(weight) for weight in ready.values()} == {"aiter_16x16"}
    call = checked(op, provider, provider.load())
    with pytest.raises(ValueError, match="reads weights laid out as 'aiter_16x16'"):
        call(**made)
    lost = {key: weight.clone() for key, weight in ready.items()}
    with pytest.raises(ValueError, match="no layout tag"):
        call(**(made | lost))
    with pytest.raises(AssertionError, match="mark|is_shuffled"):
        provider.load()(**(made | lost))
