"""Where the experts' own bound on NVIDIA GPUs comes from: their FP8 instructions, simulated, inside the op."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_serve.ops.bind import OPS
from rocm_serve.ops.contract import OpFunction
from rocm_serve.ops.inputs import normal
from rocm_serve.ops.moe_experts.cases import experts_case
from rocm_serve.ops.moe_experts.reference import experts, moe_experts
from rocm_serve.ops.probe import BOUND, Refused, bound_of, probe
from tests.ops.probing.facts import tiny_facts
from tests.ops.short_sums import hidden_rows_unquantised, short_sums
from tests.ops.test_references import error

TRITON = OPS["moe_experts"].providers["triton"]
OWN = bound_of(TRITON, "sm_90", {"activation": "fp8_1x128", "expert_fp8": True})
BITS = (12, 13)


def simulated(bits: int) -> OpFunction:
    """Return the op as a kernel with short sums computes it."""

    def function(*, activation: str, **arguments: object) -> torch.Tensor:
        assert activation == "fp8_1x128" and arguments["x_scale"] is None
        return experts(**arguments, multiply=short_sums(bits))  # type: ignore[arg-type]

    return function


@pytest.fixture(scope="module", params=[1, 3, 5])
def results(request: pytest.FixtureRequest) -> dict[object, torch.Tensor]:
    """The op by its reference, with short sums, and with hidden rows, or any rows, that are not quantised."""
    g = torch.Generator().manual_seed(request.param)
    made = experts_case(g, torch.bfloat16, t=24, h=256, i=256, e=3, k=2, fp8=True)
    made |= {"out_dtype": torch.float32}
    del made["activation"]
    found: dict[object, torch.Tensor] = {
        "reference": moe_experts(**made, activation="fp8_1x128"),  # type: ignore[arg-type]
        "hidden": hidden_rows_unquantised(made),
        "W8A16": moe_experts(**made, activation="bf16"),  # type: ignore[arg-type]
    }
    found |= {bits: simulated(bits)(**made, activation="fp8_1x128") for bits in BITS}
    return {name: made.double() for name, made in found.items()}


def test_short_sums_are_the_sums_where_there_are_bits_enough_and_near_them_where_not() -> None:
    g = torch.Generator().manual_seed(7)
    made = experts_case(g, torch.bfloat16, t=0, h=256, i=128, e=1, k=1, fp8=True)
    w, scale = made["w13_EIH"][0], made["w13_scale"][0]  # type: ignore[index]
    x = normal(g, 9, 256)
    exact = OPS["fp8_linear"].reference(x, w, scale, activation="fp8_1x128").double()
    errors = [error(short_sums(bits)(x, w, scale), exact) for bits in (22, 13, 12)]
    assert errors[0] <= 1e-6 and 5e-5 <= errors[1] <= 3e-4 <= 2 * errors[2] <= 1.6e-3, errors


@pytest.mark.parametrize("bits", BITS)
def test_short_sums_move_the_experts_by_less_than_their_own_bound(
    results: dict[object, torch.Tensor], bits: int
) -> None:
    assert 1e-3 <= error(results[bits], results["reference"]) <= 0.6 * OWN


@pytest.mark.parametrize("bits", BITS)
def test_short_sums_make_the_experts_no_less_right(results: dict[object, torch.Tensor], bits: int) -> None:
    theirs, ours = (error(results[name], results["hidden"]) for name in ("reference", bits))
    assert ours == pytest.approx(theirs, rel=0.02)


def test_rows_that_are_not_quantised_lie_beyond_the_own_bound(results: dict[object, torch.Tensor]) -> None:
    for name in ("hidden", "W8A16"):
        assert error(results[name], results["reference"]) >= 1.3 * OWN


def test_the_probe_tells_the_two_apart() -> None:
    op, facts = OPS["moe_experts"], tiny_facts(arch="sm_90", hidden_size=256)
    passed = probe(op, replace(TRITON, load=lambda: simulated(12)), facts, torch.device("cpu"), seed=1)
    assert BOUND < passed.error <= OWN, "the bound of all would have refused it"
    unlike = replace(TRITON, load=lambda: lambda **made: moe_experts(**made | {"activation": "bf16"}))
    with pytest.raises(Refused, match=r"relative L2 \d.\de-02 to the reference; legal: up to 0.015$"):
        probe(op, unlike, facts, torch.device("cpu"), seed=1)
