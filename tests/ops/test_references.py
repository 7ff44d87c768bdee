"""The reference of every op against its float64 oracle, case by case; and cases that would miss a mistake."""

from __future__ import annotations

import inspect
import zlib
from typing import Any

import pytest
import torch

from rocm_serve.ops.bind import OPS
from rocm_serve.ops.contract import Arguments, Op
from tests.ops.oracles import ORACLES

DTYPES = (torch.float32, torch.bfloat16)
EVERY_CASE = [(op, case) for op in OPS for case in OPS[op].cases]
# Arguments whose value a case must show to matter: change it as said and some case's outputs move.
SCALARS: dict[tuple[str, str], Any] = {
    ("rms_norm", "eps"): 1e-4,
    ("rms_norm", "plus_one"): False,
    ("add_rms_norm", "eps"): 1e-4,
    ("add_rms_norm", "plus_one"): False,
    ("gated_rms_norm", "eps"): 1e-4,
    ("gated_rms_norm", "activation"): "silu",
    ("linear", "out_dtype"): None,
    ("add_norm_linear", "eps"): 1e-4,
    ("add_norm_linear", "plus_one"): False,
    ("fp8_linear", "activation"): "bf16",
    ("moe_route", "top_k"): 2,
    ("moe_route", "renormalise"): True,
    ("moe_experts", "num_rows"): 1,
    ("moe_experts", "activation"): "bf16",
    ("moe_experts", "out_dtype"): torch.float32,
    ("quantise_rows", "dtype"): torch.float8_e4m3fnuz,
    ("qk_norm_rope", "eps"): 1e-4,
    ("qk_norm_rope_kv_write", "eps"): 1e-4,
    ("qk_norm_rope_kv_write", "k_scale"): 1.0,
    ("qk_norm_rope_kv_write", "v_scale"): 1.0,
    ("kv_write", "k_scale"): 1.0,
    ("kv_write", "v_scale"): 1.0,
    ("attention_prefill", "scale"): 0.2,
    ("attention_prefill", "k_scale"): 1.0,
    ("attention_prefill", "v_scale"): 1.0,
    ("attention_decode", "scale"): 0.2,
    ("attention_decode", "k_scale"): 1.0,
    ("attention_decode", "v_scale"): 1.0,
    ("gdn_extend", "rows"): 99,
    ("gdn_step", "eps"): 1e-4,
    ("gdn_step", "activation"): "silu",
    ("draw_token", "first_id"): 5,
    ("draw_token", "used"): 7,
}


def arguments(op: Op, case: str, dtype: torch.dtype) -> Arguments:
    seed = zlib.crc32(f"{op.name} {case}".encode())
    return op.cases[case](torch.Generator().manual_seed(seed), dtype)


def copied(made: Arguments) -> Arguments:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in made.items()}


def outputs(op: Op, made: Arguments) -> list[torch.Tensor]:
    """Run the reference on a copy; return its result and the arguments that it writes."""
    made = copied(made)
    result = op.reference(**made)
    results = list(result) if isinstance(result, tuple) else [result]
    return results + [made[name] for name in op.mutates if made.get(name) is not None]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2; both must be NaN in the same places."""
    assert got.shape == expected.shape
    assert torch.equal(got.isnan(), expected.isnan())
    difference = (got.double() - expected).nan_to_num().norm().item()
    size = expected.nan_to_num().norm().item()
    return difference / size if size else difference


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "case"), EVERY_CASE)
def test_reference_equals_its_oracle(name: str, case: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    made = arguments(op, case, dtype)
    expected = ORACLES[name](**copied(made))
    got = outputs(op, made)
    tol = op.tol[str(dtype).removeprefix("torch.")]
    for g, e in zip(got, expected, strict=True):
        assert error(g, e) <= tol.rel, f"{error(g, e):.2e} > {tol.rel} ({tol.why})"


@pytest.mark.parametrize("name", OPS)
def test_results_have_the_dtype_of_the_rows(name: str) -> None:
    op = OPS[name]
    case = next(reversed(op.cases))
    made = arguments(op, case, torch.bfloat16) | ({"out_dtype": None} if name == "linear" else {})
    result = op.reference(**made)
    if name == "moe_route":
        assert [r.dtype for r in result] == [torch.int32, torch.float32]
    elif name == "quantise_rows":
        assert [r.dtype for r in result] == [torch.float8_e4m3fn, torch.float32]
    elif name == "draw_token":
        assert [r.dtype for r in result] == [torch.bool, torch.float32, torch.int64]
    elif name == "log_sum_exp":
        assert [r.dtype for r in result] == [torch.float32, torch.float32]
    elif name != "kv_write":
        assert {r.dtype for r in (result if isinstance(result, tuple) else (result,))} == {torch.bfloat16}


@pytest.mark.parametrize(("name", "argument"), SCALARS)
def test_some_case_shows_that_the_argument_matters(name: str, argument: str) -> None:
    op = OPS[name]

    def moved(case: str) -> bool:
        made = arguments(op, case, torch.bfloat16)
        before = outputs(op, made)
        after = outputs(op, made | {argument: SCALARS[name, argument]})
        if len(before) != len(after) or any(a.dtype != b.dtype or a.shape != b.shape for a, b in zip(before, after)):  # noqa: B905
            return True
        return any(error(b, a.double()) > 1e-3 for a, b in zip(after, before, strict=True))

    assert any(moved(case) for case in op.cases)


def test_every_scalar_argument_is_in_the_table_above() -> None:
    scalars = {
        (name, p.name)
        for name, op in OPS.items()
        for p in inspect.signature(op.reference).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }
    assert scalars | {("moe_experts", "num_rows")} == set(SCALARS)


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_tolerances_with_reasons_for_both_dtypes(name: str) -> None:
    assert OPS[name].tol.keys() == {"float32", "bfloat16"}
    assert all(len(tol.why) > 20 for tol in OPS[name].tol.values())


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_case_without_rows_and_one_with_a_single_row(name: str) -> None:
    counts = []
    for case in OPS[name].cases:
        made = arguments(OPS[name], case, torch.float32)
        sequences = made.get("sequences")
        first = next(v for v in made.values() if isinstance(v, torch.Tensor))
        counts.append(first.shape[0] if sequences is None else sequences.row_starts[-1] - sequences.row_starts[0])
    assert 0 in counts and 1 in counts


@pytest.mark.parametrize("name", ["fp8_linear", "moe_experts", "gated_rms_norm", "gdn_step"])
def test_an_unknown_activation_is_refused_with_the_legal_ones(name: str) -> None:
    made = arguments(OPS[name], "one row" if name != "fp8_linear" else "one row, bf16", torch.float32)
    with pytest.raises(ValueError, match="knows the activations"):
        OPS[name].reference(**(made | {"activation": "int4"}))
