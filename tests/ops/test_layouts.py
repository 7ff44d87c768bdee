"""A provider's own layout of weights: prepared once, tagged, and refused by everybody else in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_serve.layers.linear import Linear
from rocm_serve.layers.weights import Weights
from rocm_serve.ops import bind
from rocm_serve.ops.bind import OPS, bind_ops
from rocm_serve.ops.contract import PLAIN, LayoutError, Op, Provider, WeightTensors, layout_tag, tag_layout
from rocm_serve.ops.layouts import checked, prepared
from rocm_serve.parallel.layout import Band, Param, Place

TURNED = "rows from last to first"
SEEN: list[object] = []


def turn(weights: WeightTensors) -> WeightTensors:
    out = {name: weight.flip(0).contiguous() for name, weight in weights.items()}
    out["weight_NK"].mark_of_a_library = True  # type: ignore[attr-defined]
    return out


def turned_linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    SEEN.append(getattr(weight_NK, "mark_of_a_library", False))
    return OPS["linear"].reference(x_TK, weight_NK.flip(0), out_dtype=out_dtype)


TURNING = Provider("turning", lambda: turned_linear, prepare_weights=turn, layout=TURNED)


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Op:
    made = replace(OPS["linear"], others=(TURNING,))
    monkeypatch.setattr(bind, "OPS", {**OPS, "linear": made})
    return made


def layer(op_overrides: dict[str, str], number: int = 0) -> Linear:
    table = {"o.weight": Param("o.weight", "model", ((Band(6),), (Band(4),)), ())}
    weights = Weights(table, Place(), torch.float32, torch.device("cpu"), "o")
    made = Linear(weights, bind_ops(op_overrides, "cpu").for_layer(number))
    made.weight.copy_(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    return made


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))


def test_a_layer_holds_what_its_provider_made_with_tag_and_marks(op: Op) -> None:
    plain = layer({})
    made = layer({"linear": "turning"})
    before = made.weight
    made.prepare()
    assert made.weight is not before and isinstance(made.weight, torch.nn.Parameter)
    assert torch.equal(made.weight, plain.weight.flip(0)) and layout_tag(made.weight) == TURNED
    assert dict(made.named_parameters()).keys() == {"weight"} and not made.weight.requires_grad
    SEEN.clear()
    assert torch.equal(made(X), plain(X))
    assert SEEN == [True], "the very tensor of prepare_weights, with its library's own mark, reaches the kernel"


def test_a_plain_provider_keeps_the_parameter_it_has(op: Op) -> None:
    made = layer({})
    before = made.weight
    made.prepare()
    assert made.weight is before and layout_tag(before) == PLAIN


@pytest.mark.parametrize(
    "lose",
    [
        lambda w: torch.nn.Parameter(w.clone(), requires_grad=False),
        lambda w: torch.nn.Parameter(w.view(6, 4), requires_grad=False),
        lambda w: torch.nn.Parameter(w.to(torch.float64).to(torch.float32), requires_grad=False),
    ],
    ids=["copy", "view", "cast"],
)
def test_a_weight_that_lost_its_tag_is_refused(op: Op, lose: object) -> None:
    made = layer({"linear": "turning"})
    made.prepare()
    made.weight = lose(made.weight)  # type: ignore[operator]
    with pytest.raises(LayoutError, match=f"linear by turning reads weights laid out as '{TURNED}'; weight_NK has no"):
        made(X)


def test_a_weight_of_another_provider_is_refused_also_by_the_reference(op: Op) -> None:
    ops = bind_ops({"linear": "turning", "layers.3.linear": "reference"}, "cpu")
    weight = torch.randn(6, 4)
    tag_layout(weight, "16 x 16 tiles")
    with pytest.raises(LayoutError, match="turning reads .*; weight_NK is laid out as '16 x 16 tiles'"):
        ops.linear(X, weight_NK=weight)
    with pytest.raises(LayoutError, match="reference reads weights laid out as 'plain'; weight_NK is laid out as"):
        ops.for_layer(3).linear(X, weight)
    assert ops.for_layer(3).linear(X, torch.randn(6, 4)).shape == (3, 6)


def test_each_layer_is_prepared_by_its_own_provider(op: Op) -> None:
    wishes = {"layers.3.linear": "turning"}
    own, other = layer(wishes, 3), layer(wishes, 2)
    for one in (own, other):
        one.prepare()
    assert layout_tag(own.weight) == TURNED and layout_tag(other.weight) == PLAIN
    assert torch.equal(own(X), other(X))
    assert bind_ops(wishes, "cpu").preparing == {"linear"}
    assert bind_ops({}, "cpu").preparing == frozenset()


def test_where_nobody_has_a_layout_of_its_own_functions_are_bound_bare(op: Op) -> None:
    assert bind_ops({}, "cpu").linear is OPS["linear"].reference
    assert bind_ops({"linear": "turning"}, "cpu").rms_norm is OPS["rms_norm"].reference


def test_preparing_twice_is_refused(op: Op) -> None:
    made = layer({"linear": "turning"})
    made.prepare()
    with pytest.raises(LayoutError, match=f"laid out as '{TURNED}' before turning prepares it; legal: 'plain'"):
        made.prepare()


@pytest.mark.parametrize(
    "prepare",
    [lambda w: {"weight_NK": w["weight_NK"].double()}, lambda w: {}, lambda w: {"other": w["weight_NK"]}],
    ids=["wider", "nothing", "another name"],
)
def test_a_provider_that_changes_names_or_sizes_is_refused(prepare: object) -> None:
    wrong = Provider("wrong", lambda: turned_linear, prepare_weights=prepare, layout="x")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="linear: wrong was given weights of .* the same names and sizes"):
        prepared(OPS["linear"], wrong, {"weight_NK": torch.zeros(2, 3)})


def test_a_missing_scale_is_no_weight_to_look_at() -> None:
    op = OPS["moe_experts"]
    function = checked(op, Provider("reference", lambda: op.reference), op.reference)
    made = op.cases["one row"](torch.Generator().manual_seed(0), torch.float32)
    assert torch.equal(function(**made), op.reference(**made))


def test_a_layout_and_its_preparation_come_together() -> None:
    with pytest.raises(AssertionError, match="a layout needs its preparation"):
        Provider("half", lambda: turned_linear, layout="x")
    with pytest.raises(AssertionError, match="a layout needs its preparation"):
        Provider("half", lambda: turned_linear, prepare_weights=turn)
