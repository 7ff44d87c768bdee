"""Where the experts' own bound on sm_90 comes from: its FP8 instructions, simulated, inside the op; what it lets by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rocm_serve.ops.bind import OPS
from rocm_serve.ops.contract import Arguments, OpFunction
from rocm_serve.ops.inputs import normal
from rocm_serve.ops.judging import BOUND, own_bound
from rocm_serve.ops.moe_experts import hidden_unquantised
from rocm_serve.ops.moe_experts.cases import experts_case
from rocm_serve.ops.moe_experts.reference import experts, moe_experts
from rocm_serve.ops.probe import Passed, Refused, probe
from rocm_serve.ops.tiles_moe import MOST_FEW_ROWS
from tests.ops.probing.facts import tiny_facts
from tests.ops.short_sums import short_sums
from tests.ops.test_references import error

TRITON = OPS["moe_experts"].providers["triton"]
FACTS = {"dtype": "bfloat16", "activation": "fp8_1x128", "expert_fp8": True}
OWN_BOUND = own_bound(TRITON, "sm_90", FACTS, 300)
assert OWN_BOUND is not None
OWN = OWN_BOUND.rel
BITS = (12, 13)


def simulated(bits: int) -> OpFunction:
    """Return the op as a kernel with short sums computes it."""

    def function(*, activation: str, **arguments: object) -> torch.Tensor:
        assert activation == "fp8_1x128"
        return experts(**arguments, multiply=short_sums(bits))  # type: ignore[arg-type]

    return function


@pytest.fixture(scope="module", params=[1, 3, 5])
def results(request: pytest.FixtureRequest) -> dict[object, torch.Tensor]:
    """The op by its reference, with short sums, and with hidden rows, or any rows, that are not quantised."""
    g = torch.Generator().manual_seed(request.param)
    made = experts_case(g, torch.bfloat16, t=24, h=256, i=256, e=3, k=2, fp8=True)
    made |= {"out_dtype": torch.float32, "activation": "fp8_1x128"}
    found: dict[object, torch.Tensor] = {
        "reference": moe_experts(**made),  # type: ignore[arg-type]
        "hidden": hidden_unquantised.moe_experts(**made),  # type: ignore[arg-type]
        "W8A16": moe_experts(**made | {"activation": "bf16"}),  # type: ignore[arg-type]
    }
    found |= {bits: simulated(bits)(**made) for bits in BITS}
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
    assert 1e-3 <= error(results[bits], results["reference"]) <= 0.5 * OWN


@pytest.mark.parametrize("bits", BITS)
def test_short_sums_make_the_experts_no_less_right(results: dict[object, torch.Tensor], bits: int) -> None:
    theirs, ours = (error(results[name], results["hidden"]) for name in ("reference", bits))
    assert ours == pytest.approx(theirs, rel=0.01)


def test_rows_that_are_not_quantised_lie_beyond_the_own_bound(results: dict[object, torch.Tensor]) -> None:
    for name in ("hidden", "W8A16"):
        assert error(results[name], results["reference"]) >= 1.1 * OWN


def probed(many: OpFunction, few: OpFunction = moe_experts, **facts: object) -> Passed:
    """Probe a kernel that computes more than MOST_FEW_ROWS by `many`. Errors: Refused."""

    def kernel(**made: torch.Tensor) -> torch.Tensor:
        return (few if len(made["ids_Tk"]) <= MOST_FEW_ROWS else many)(**made)

    given = tiny_facts(**{"arch": "sm_90", "hidden_size": 256, "max_rows": 300} | facts)
    return probe(OPS["moe_experts"], replace(TRITON, load=lambda: kernel), given, torch.device("cpu"), seed=1)


def test_the_probe_takes_short_sums_of_many_rows() -> None:
    assert BOUND < probed(simulated(12)).error <= OWN, "the bound of all would have refused it"
    assert 1e-3 < probed(simulated(13)).error <= OWN


@pytest.mark.parametrize(
    "facts",
    [
        {"arch": "gfx942", "fp8_dialect": "fnuz"},
        {"arch": "gfx950"},
        {"arch": "sm_89"},
        {"arch": "sm_100"},
        {"arch": "sm_120"},
        {"dtype": "float32"},
        {"max_rows": MOST_FEW_ROWS},
    ],
    ids=str,
)
def test_nothing_else_is_let_by(facts: dict[str, object]) -> None:
    """Other cards, rows in float32, and few rows, whose sums are float32's."""
    with pytest.raises(Refused, match=r"relative L2 (5|6|7|8|9)\.\de-03 to the reference; legal: up to 0.005$"):
        probed(simulated(12), few=simulated(12) if "max_rows" in facts else moe_experts, **facts)


def test_rows_as_bf16_and_plain_weights_have_no_bound_of_their_own() -> None:
    for other in ({"activation": "bf16"}, {"expert_fp8": False}):
        assert own_bound(TRITON, "sm_90", FACTS | other, 300) is None


Change = Callable[[Arguments], Arguments]


def scaled(name: str, factor: float, at: int | slice | tuple[int, ...] = slice(None)) -> Change:
    """Return what multiplies scales, those of all experts, of one, or of one block."""

    def change(made: Arguments) -> Arguments:
        scale = made[name].clone()  # type: ignore[attr-defined]
        scale[at] *= factor
        return made | {name: scale}

    return change


@pytest.mark.parametrize("multiply", [moe_experts, 12], ids=["fp32 sums", "short sums"])
@pytest.mark.parametrize(
    "change",
    [
        scaled("w2_scale", 1.01),
        scaled("w2_scale", 1.006),
        scaled("w13_scale", 1.01),
        scaled("w2_scale", 1.04, 0),
        scaled("w2_scale", 1.05, (0, 0, 0)),
        scaled("w13_scale", 1.05, (0, 0, 0)),
    ],
    ids=["w2 +1 %", "w2 +0.6 %", "w13 +1 %", "w2 of an expert +4 %", "a block of w2 +5 %", "a block of w13 +5 %"],
)
def test_what_is_wrong_by_a_percent_is_refused(multiply: OpFunction | int, change: Change) -> None:
    """The bound alone would let most of them by; the second judge does not."""
    inner = simulated(multiply) if isinstance(multiply, int) else multiply
    with pytest.raises(Refused, match=r"^300 x 256"):
        probed(lambda **made: inner(**change(made)), num_experts=16, top_k=4)


def test_rows_that_were_sent_as_fp8_are_judged_so_too() -> None:
    wrong = scaled("w2_scale", 1.01)
    with pytest.raises(Refused, match=r"^300 x 256, .*, sent as FP8: .* to the op without that which is noisy"):
        probed(lambda **made: moe_experts(**made if made["x_scale"] is None else wrong(made)), fp8_dispatch=True)


def test_rows_that_are_not_quantised_are_refused() -> None:
    with pytest.raises(Refused, match=r"relative L2 \d.\de-02 to the reference; legal: up to 0.018$"):
        probed(lambda **made: moe_experts(**made | {"activation": "bf16"}))
    with pytest.raises(Refused, match="relative L2"):
        probed(lambda **made: hidden_unquantised.moe_experts(**made).bfloat16())


def test_scales_that_were_rounded_to_bf16_pass_for_many_rows() -> None:
    """They flip codes as short sums do and are off by 1e-3 themselves: no judge of one call tells the two apart."""

    def rounded(**made: torch.Tensor) -> torch.Tensor:
        return moe_experts(**made | {name: made[name].bfloat16().float() for name in ("w13_scale", "w2_scale")})  # type: ignore[arg-type]

    assert BOUND < probed(rounded).error <= OWN
    with pytest.raises(Refused, match="legal: up to 0.005$"):
        probed(rounded, few=rounded)


def test_one_row_may_be_far_off_only_where_all_together_are_as_right() -> None:
    def one_row(factor: float) -> OpFunction:
        def off(**made: torch.Tensor) -> torch.Tensor:
            out = moe_experts(**made)  # type: ignore[arg-type]
            out[-3] *= factor  # the last of those that are sampled; two of padding follow
            return out

        return off

    with pytest.raises(Refused, match=r"and relative L2 .* to the op without that which is noisy"):
        probed(one_row(1.06))
    with pytest.raises(Refused, match=r"row \d+ has relative L2 8.\de-02 to the reference; legal: up to 0.072$"):
        probed(one_row(1.08))
    assert probed(one_row(1.018)).error < BOUND
