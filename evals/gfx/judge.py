"""Runs one trial on one device and judges what came out."""

from __future__ import annotations

import importlib
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from evals.gfx.checks import findings, unknown_exceptions
from evals.gfx.device import Device, Resources
from evals.gfx.registry import Arch, Outputs, Trial
from rocm_serve.ops.bind import OPS
from rocm_serve.ops.contract import Arguments, OpFunction
from rocm_serve.ops.layouts import prepared

NOISE = 2.0**-20  # of fp32 arithmetic over a few steps, relative: how near a boundary counts as on it


@dataclass(slots=True)
class Verdict:
    """What became of one trial on one architecture. `faults` empty: all is well."""

    trial: str
    arch: Arch
    launched: dict[str, list[Resources]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    error: float = 0.0  # relative L2, the worst of the outputs
    differing: int = 0  # elements whose bits are not the reference's
    elements: int = 0
    instructions: int = 0
    seconds: float = 0.0


def run_trial(trial: Trial, device: Device, seed: int) -> Verdict:
    """Compile the trial's launches, check them, and, if the device executes, compare its outputs with the reference."""
    verdict = Verdict(trial.name, device.arch)
    started = time.perf_counter()
    device.launched, device.instructions = {}, 0
    generator = torch.Generator().manual_seed((zlib.crc32(trial.name.encode()) + seed) % 2**63)
    try:
        arguments = trial.arguments(generator, device.arch)
        untouched = _copied(arguments)
        got = _called(trial, device, arguments)
    except Exception as error:
        verdict.faults.append(f"{type(error).__name__}: {error}")
    else:
        if device.execute and not trial.compile_only:
            _compare(trial, got, untouched, verdict)
    verdict.launched, verdict.instructions = device.launched, device.instructions
    verdict.faults += _kernel_faults(trial, verdict.launched)
    verdict.seconds = time.perf_counter() - started
    return verdict


def _kernel_faults(trial: Trial, launched: Mapping[str, list[Resources]]) -> list[str]:
    faults = unknown_exceptions(trial.exceptions, trial.kernels)
    if set(launched) != set(trial.kernels):
        faults.append(f"launched {sorted(launched)}, while the trial names {sorted(trial.kernels)}")
    for kernel, builds in launched.items():
        for needs in builds:
            faults += findings(kernel, needs, trial.exceptions, native_fp8=kernel in trial.native_fp8)
    return faults


def _copied(arguments: Arguments) -> Arguments:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def _called(trial: Trial, device: Device, arguments: Arguments) -> Outputs:
    """Call the provider as a server does, memory that it does not write filled with NaN."""
    with ExitStack() as stack:
        stack.enter_context(_poisoned())
        if trial.provider == "triton":
            stack.enter_context(importlib.import_module("evals.gfx.triton_device").active(device))
        function, arguments = _function(trial, device, arguments)
        execute, device.execute = device.execute, device.execute and not trial.compile_only
        try:
            if trial.call is not None:
                return trial.call(function, arguments)
            return outputs_of(trial.op, function(**arguments), arguments)
        finally:
            device.execute = execute


def _function(trial: Trial, device: Device, arguments: Arguments) -> tuple[OpFunction, Arguments]:
    """Return the provider's function, and the arguments with weights laid out as it reads them."""
    if trial.function is not None:
        return trial.function(device), arguments
    op = OPS[trial.op]
    provider = op.providers[trial.provider]
    weights = {name: arguments[name] for name in op.weights if isinstance(arguments.get(name), torch.Tensor)}
    if provider.prepare_weights is not None:
        arguments = {**arguments, **prepared(op, provider, weights)}
    return provider.load(), arguments


@contextmanager
def _poisoned() -> Iterator[None]:
    """Have torch.empty return NaN, and the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def outputs_of(op: str, result: object, arguments: Arguments) -> Outputs:
    """Return an op's result and the arguments that it wrote."""
    results = result if isinstance(result, tuple) else (result,)
    mutated = tuple(arguments[name] for name in OPS[op].mutates if arguments.get(name) is not None)
    return tuple(x for x in (*results, *mutated) if isinstance(x, torch.Tensor))


def _compare(trial: Trial, got: Outputs, untouched: Arguments, verdict: Verdict) -> None:
    exact = trial.exact(_copied(untouched)) if trial.exact else None
    if trial.expected is not None:
        expected = trial.expected(untouched)
    else:
        expected = outputs_of(trial.op, OPS[trial.op].reference(**untouched), untouched)
    if len(got) != len(expected):
        verdict.faults.append(f"{len(got)} outputs, the reference has {len(expected)}")
        return
    for k, (g, e) in enumerate(zip(got, expected, strict=True)):
        if g.shape != e.shape or g.dtype != e.dtype:
            said = f"output {k} is {g.dtype} {list(g.shape)}, the reference's {e.dtype} {list(e.shape)}"
            verdict.faults.append(said)
            continue
        differing = _differing(g, e)
        verdict.elements += g.numel()
        verdict.differing += int(differing.sum())
        error = relative_error(g, e)
        verdict.error = max(verdict.error, error)
        if not error <= trial.limit:
            verdict.faults.append(f"output {k}: relative L2 {error:.2e}, limit {trial.limit:.0e}")
        if not g.is_floating_point() and differing.any():
            verdict.faults.append(f"output {k}: {int(differing.sum())} of {g.numel()} integers differ")
        if exact is not None:
            off = differing & ~_on_boundary(g, e, exact[k])
            if off.any():
                verdict.faults.append(f"output {k}: the bits of {int(off.sum())} of {g.numel()} elements differ")


def _differing(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    a, b = got.float() if got.is_floating_point() else got, expected.float() if got.is_floating_point() else expected
    same = (a == b) | (a.isnan() & b.isnan()) if got.is_floating_point() else a == b
    return ~same


def _on_boundary(got: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Say where the exact value lies midway between the two, which then are neighbours."""
    middle = (got.double() + expected.double()) / 2
    return (exact.double() - middle).abs() <= NOISE * exact.double().abs()


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return relative L2; NaN or infinity in one and not in the other is infinitely far."""
    if not got.is_floating_point():
        return 0.0
    g, e = got.double(), expected.double()
    usual = e.isfinite()
    if not torch.equal(usual, g.isfinite()) or not torch.equal(g[~usual].nan_to_num(), e[~usual].nan_to_num()):
        return float("inf")
    difference, size = float((g - e)[usual].norm()), float(e[usual].norm())
    return difference / size if size else difference
