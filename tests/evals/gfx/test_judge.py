"""The judge of trials: what is wrong must be said, with providers that are functions of this test."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evals.gfx.device import Device, span
from evals.gfx.judge import relative_error, run_trial
from evals.gfx.registry import Arch, Trial
from rocm_serve.ops.contract import Arguments
from rocm_serve.ops.rms_norm.reference import add_rms_norm, rms_norm

BF16 = torch.bfloat16


def arguments(g: torch.Generator, arch: Arch) -> Arguments:
    x, weight = torch.randn(9, 64, generator=g).to(BF16), torch.randn(64, generator=g).to(BF16)
    return {"x_TH": x, "weight_H": weight, "eps": 1e-6, "plus_one": True}


def exact(a: Any) -> tuple[torch.Tensor, ...]:
    x = a["x_TH"].double()
    return (x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * (a["weight_H"].double() + 1),)


def verdict(function: Callable[..., Any], **changes: Any) -> Any:
    made = Trial(
        "rms_norm", "hip", "of this test", arguments, kernels=(), function=lambda device: function, exact=exact
    )
    return run_trial(replace(made, **changes), Device("gfx942", Path("unused")), seed=5)


def test_the_reference_itself_is_well() -> None:
    found = verdict(rms_norm)
    assert found.faults == [] and found.differing == 0 and found.elements == 9 * 64 and found.error == 0


def test_a_last_bit_is_seen_where_no_boundary_excuses_it() -> None:
    def off(**a: Any) -> torch.Tensor:
        y = rms_norm(**a)
        y.view(torch.int16)[4, 7] += 1
        return y

    (fault,) = verdict(off).faults
    assert fault == "output 0: the bits of 1 of 576 elements differ"
    assert verdict(off, exact=None).faults == [], "one unit in one element is far below the limit"


def test_a_neighbour_on_the_other_side_of_a_boundary_is_excused() -> None:
    lower = torch.ones(1, dtype=BF16)
    upper = torch.tensor([1 + 2**-7], dtype=BF16)
    middle = (lower.double() + upper.double()) / 2
    call = {"call": lambda f, a: (upper,), "expected": lambda a: (lower,), "limit": 1.0}
    assert verdict(rms_norm, **call, exact=lambda a: (middle * (1 + 2**-22),)).faults == []
    assert len(verdict(rms_norm, **call, exact=lambda a: (middle * (1 + 2**-15),)).faults) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda y: y * 1.02, "output 0: relative L2 2"),
        (lambda y: y.float(), "output 0 is torch.float32 \\[9, 64\\], the reference's torch.bfloat16"),
        (lambda y: y[:8], "output 0 is torch.bfloat16 \\[8, 64\\]"),
        (lambda y: (y, y), "2 outputs, the reference has 1"),
        (lambda y: y.index_fill(0, torch.tensor([3]), float("nan")), "relative L2 inf"),
    ],
)
def test_wrong_outputs_are_told(change: Callable[[torch.Tensor], Any], words: str) -> None:
    found = verdict(lambda **a: change(rms_norm(**a)))
    assert any(re.search(words, fault) for fault in found.faults), found.faults


def test_memory_that_is_not_written_is_nan() -> None:
    def forgets_a_row(**a: Any) -> torch.Tensor:
        y = torch.empty(9, 64, dtype=BF16)
        y[:8] = rms_norm(**a)[:8]
        return y

    assert any("relative L2 inf" in fault for fault in verdict(forgets_a_row).faults)


def test_arguments_that_the_op_mutates_are_outputs() -> None:
    def with_residual(g: torch.Generator, arch: Arch) -> Arguments:
        return {**arguments(g, arch), "residual_TH": torch.randn(9, 64, generator=g).to(BF16)}

    common = {"op": "add_rms_norm", "arguments": with_residual, "exact": None}
    assert verdict(add_rms_norm, **common).elements == 2 * 9 * 64
    forgetful = verdict(lambda residual_TH, **a: add_rms_norm(residual_TH=residual_TH.clone(), **a), **common)
    assert any(fault.startswith("output 1: relative L2") for fault in forgetful.faults)


def test_an_exception_is_a_fault_and_not_the_end() -> None:
    def fails(**a: Any) -> torch.Tensor:
        raise ValueError("no such tile")

    assert verdict(fails).faults == ["ValueError: no such tile"]


def test_kernels_that_were_named_must_be_launched() -> None:
    (fault,) = verdict(rms_norm, kernels=("rms_norm_128",)).faults
    assert fault == "launched [], while the trial names ['rms_norm_128']"


def test_fresh_inputs_come_with_another_seed() -> None:
    seen: list[torch.Tensor] = []

    def keeps(**a: Any) -> torch.Tensor:
        seen.append(a["x_TH"])
        return rms_norm(**a)

    made = Trial("rms_norm", "hip", "of this test", arguments, kernels=(), function=lambda device: keeps)
    for seed in (1, 2, 1):
        run_trial(made, Device("gfx950", Path("unused")), seed)
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], seen[1])


def test_integers_must_be_equal() -> None:
    ids = torch.arange(6)
    found = verdict(rms_norm, call=lambda f, a: (ids + (ids == 4),), expected=lambda a: (ids,), exact=None)
    assert found.faults == ["output 0: 1 of 6 integers differ"]


def test_infinities_in_the_same_places_are_equal() -> None:
    e = torch.tensor([1.0, float("inf"), float("nan"), -float("inf")])
    assert relative_error(e.clone(), e) == 0
    assert relative_error(torch.tensor([1.0, -float("inf"), float("nan"), -float("inf")]), e) == float("inf")


def test_a_span_reaches_from_the_first_element_to_the_last() -> None:
    held = torch.zeros(10, 20, dtype=BF16)
    part = held[2:4, 5:9]
    assert span(part, "x") == (held.data_ptr() + 90, (20 + 4) * 2, "x bfloat16[2, 4]")
    assert span(held[:0])[1] == 0
