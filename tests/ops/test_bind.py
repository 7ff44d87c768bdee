"""Choosing providers: overrides, refusals, the report."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_serve.errors import UserError
from rocm_serve.ops import bind
from rocm_serve.ops.bind import OPS, BoundOps, bind_ops, binding_lines, op_names
from rocm_serve.ops.contract import Facts, Op, Provider
from rocm_serve.platform.table import LAY_OUT, PROVIDER_ORDER, PROVIDERS, provider_order


def shifted(x: torch.Tensor) -> torch.Tensor:
    return OPS["silu_mul"].reference(x) + 1


@pytest.fixture
def two_more(monkeypatch: pytest.MonkeyPatch) -> Op:
    """Give silu_mul a provider for another architecture and one that wants 128-wide heads."""
    others = (
        Provider("elsewhere", lambda: shifted, archs=frozenset({"gfx942", "gfx950"})),
        Provider("wide", lambda: shifted, accepts=lambda f: None if f.get("head_dim") == 128 else "wants head_dim 128"),
    )
    op = replace(OPS["silu_mul"], others=others)
    monkeypatch.setattr(bind, "OPS", {**OPS, "silu_mul": op})
    order = ("elsewhere", "wide", "reference")
    monkeypatch.setattr(bind, "provider_order", lambda name, arch: order if name == "silu_mul" else ("reference",))
    return op


def test_every_op_is_bound_and_is_an_attribute() -> None:
    ops = bind_ops({}, "cpu")
    assert op_names() == tuple(OPS)
    assert all(getattr(ops, name) is OPS[name].reference for name in OPS)
    assert [(line.op, line.provider) for line in ops.report] == [(name, "reference") for name in OPS]


def test_the_first_provider_that_accepts_is_taken_and_the_report_says_why_others_were_not(two_more: Op) -> None:
    ops = bind_ops({}, "cpu", facts={"head_dim": 64})
    line = next(line for line in ops.report if line.op == "silu_mul")
    assert line.provider == "reference"
    assert line.refused == (
        ("elsewhere", "runs on gfx942, gfx950, not on cpu"),
        ("wide", "wants head_dim 128"),
    )
    assert bind_ops({}, "cpu", facts={"head_dim": 128}).silu_mul is shifted
    assert bind_ops({}, "gfx950").report[list(OPS).index("silu_mul")].provider == "elsewhere"


def test_a_provider_that_cannot_verify_drafts_gives_way_where_requests_draft_and_both_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def accepts(facts: Facts) -> str | None:
        return "keeps no state from before drafts" if facts.get("draft_tokens") else None

    older = Provider("older", lambda: OPS["gdn_decode"].reference, accepts=accepts)
    table = {**OPS, "gdn_decode": replace(OPS["gdn_decode"], others=(older,))}
    monkeypatch.setattr(
        bind, "provider_order", lambda name, arch: ("older", "reference") if name == "gdn_decode" else ("reference",)
    )
    lines = list(binding_lines(bind_ops({}, "cpu", facts={"draft_tokens": 2}, table=table).report))
    assert "op gdn_decode: reference; older keeps no state from before drafts" in lines
    lines = list(binding_lines(bind_ops({}, "cpu", facts={"draft_tokens": 0}, table=table).report))
    assert "op gdn_decode: older" in lines


def test_an_override_of_one_layer_leaves_the_others_alone(two_more: Op) -> None:
    ops = bind_ops({"layers.3.silu_mul": "wide"}, "cpu", facts={"head_dim": 128})
    ops = replace(ops, silu_mul=OPS["silu_mul"].reference)
    assert ops.for_layer(3).silu_mul is shifted
    assert ops.for_layer(2) is ops
    assert ops.report[-1].op == "layers.3.silu_mul"


def test_an_override_of_a_part_has_the_parts_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(*arguments: object) -> torch.Tensor:
        raise AssertionError("not called")

    table = {**OPS, "gdn_step": replace(OPS["gdn_step"], others=(Provider("kernel", lambda: kernel),))}
    orders = {"gdn_step": ("kernel", "reference")}
    monkeypatch.setattr(bind, "provider_order", lambda name, arch: orders.get(name, ("reference",)))

    def bound(overrides: dict[str, str], layer: int) -> bool:
        return bind_ops(overrides, "cpu", table=table).for_layer(layer).gdn_step is kernel

    assert bound({}, 3)
    assert bound({"gdn_chunk": "reference"}, 3)
    assert not bound({"causal_conv": "reference"}, 3)
    assert bound({"layers.3.gdn_decode": "reference"}, 2) and not bound({"layers.3.gdn_decode": "reference"}, 3)
    assert bound({"gdn_decode": "reference", "gdn_step": "kernel"}, 3)


def test_every_part_is_an_op_that_has_no_parts() -> None:
    assert all(not OPS[part].parts for op in OPS.values() for part in op.parts)


def test_an_override_of_an_op_holds_in_every_layer(two_more: Op) -> None:
    ops = bind_ops({"silu_mul": "reference"}, "gfx950")
    assert ops.silu_mul is ops.for_layer(7).silu_mul is OPS["silu_mul"].reference


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rms_norn": "reference"}, "no such op; ops are rms_norm, .*gdn_decode"),
        ({"layers.x.rms_norm": "reference"}, "no such op"),
        ({"silu_mul": "triton"}, "no such provider; silu_mul has reference, elsewhere, wide"),
        ({"layers.0.silu_mul": "triton"}, "layers.0.silu_mul=triton: no such provider"),
        ({"silu_mul": "elsewhere"}, "elsewhere runs on gfx942, gfx950, not on cpu"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_with_the_legal_ones(
    two_more: Op, overrides: dict[str, str], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        bind_ops(overrides, "cpu")


def test_rows_stay_bf16_on_the_cpu_and_are_quantised_elsewhere_unless_told() -> None:
    assert bind_ops({}, "cpu").fp8_activation == "bf16"
    assert bind_ops({}, "gfx942").fp8_activation == "fp8_1x128"
    assert bind_ops({}, "cpu", activation="fp8_1x128").fp8_activation == "fp8_1x128"


def test_the_table_names_only_providers_that_exist() -> None:
    for arch, by_op in PROVIDER_ORDER.items():
        assert set(by_op) <= {*OPS, "*"}
        for name in OPS:
            assert set(provider_order(name, arch)) <= set(OPS[name].providers)


def test_a_provider_has_the_signature_of_the_reference() -> None:
    for op in OPS.values():
        for provider in op.providers.values():
            if provider.name == "aiter":
                continue  # its package is not here; aiter_standin/test_adapters.py asks the same of its adapters
            if provider.name == "triton":
                continue  # not everywhere either; test_triton_provider.py reads the source
            if provider.name == "hip":
                continue  # its library needs a GPU; test_hip_providers.py asks the same without one
            assert provider.load().__annotations__.keys() == op.reference.__annotations__.keys()


def test_bound_ops_cannot_be_changed() -> None:
    ops: BoundOps = bind_ops({}, "cpu")
    with pytest.raises(AttributeError):
        ops.linear = shifted  # type: ignore[misc]


def test_the_table_without_torch_names_every_op_and_provider() -> None:
    assert {name: tuple(op.providers) for name, op in OPS.items()} == dict(PROVIDERS)
    laying = {op.name: tuple(p.name for p in op.others if p.prepare_weights is not None) for op in OPS.values()}
    assert {name: providers for name, providers in laying.items() if providers} == dict(LAY_OUT)


def test_one_line_says_that_all_ops_have_one_provider() -> None:
    report = bind_ops({"layers.3.moe_route": "reference"}, "cpu").report
    assert list(binding_lines(report)) == [f"ops: all {len(OPS) + 1} by reference"]


def test_where_providers_differ_or_were_refused_each_op_has_its_line(two_more: Op) -> None:
    lines = list(binding_lines(bind_ops({}, "gfx942").report))
    assert len(lines) == len(OPS)
    assert "op silu_mul: elsewhere" in lines and "op linear: reference" in lines
    refused = "op silu_mul: reference; elsewhere runs on gfx942, gfx950, not on cpu; wide wants head_dim 128"
    assert refused in list(binding_lines(bind_ops({}, "cpu").report))
