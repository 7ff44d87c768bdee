"""What every kernel must hold when it is compiled, whatever it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from evals.gfx.device import Resources

WIDE = 16  # bytes a lane


def _spills(r: Resources) -> str | None:
    return f"{r.spills} registers spill" if r.spills else None


def _scratch(r: Resources) -> str | None:
    return f"{r.scratch} bytes of scratch a lane" if r.scratch else None


def _wide_loads(r: Resources) -> str | None:
    return f"no 16-byte load among {r.loads}" if r.loads and WIDE not in r.loads else None


def _wide_stores(r: Resources) -> str | None:
    return f"no 16-byte store among {r.stores}" if r.stores and WIDE not in r.stores else None


def _native_fp8(r: Resources) -> str | None:
    if not r.matrix:
        return "no matrix instruction"
    other = [name for name in r.matrix if "fp8_fp8" not in name and "f8f6f4" not in name]
    return f"not FP8: {', '.join(other)}" if other else None


CHECKS: Mapping[str, Callable[[Resources], str | None]] = {
    "spills": _spills,
    "scratch": _scratch,
    "wide_loads": _wide_loads,
    "wide_stores": _wide_stores,
}
NATIVE_FP8 = "native_fp8"


def findings(kernel: str, needs: Resources, exceptions: Mapping[str, str], *, native_fp8: bool) -> list[str]:
    """List what a kernel does not hold, without what is excepted."""
    checks = {**CHECKS, **({NATIVE_FP8: _native_fp8} if native_fp8 else {})}
    found = []
    for name, check in checks.items():
        said = check(needs)
        if said and name not in exceptions and f"{kernel}:{name}" not in exceptions:
            found.append(f"{kernel}: {name}: {said}")
    return found


def unknown_exceptions(exceptions: Mapping[str, str], kernels: tuple[str, ...]) -> list[str]:
    """List exceptions that name no check or no kernel of the trial, or give no reason."""
    legal = {*CHECKS, NATIVE_FP8}
    found = []
    for key, why in exceptions.items():
        kernel, _, name = key.rpartition(":")
        if name not in legal or (kernel and kernel not in kernels) or len(why) < 10:
            found.append(f"exception {key!r} ({why!r}) is none of {', '.join(sorted(legal))}, or gives no reason")
    return found
