"""What a provider's results are held to. Read by the probe, the tuner, the benches and the tests on GPUs."""

from __future__ import annotations

import torch

from rocm_serve.ops.contract import Arguments, Facts, OwnBound, Provider

BOUND = 5e-3  # relative L2 over all rows: what kernels without a bound of their own are held to (docs/numerics.md)
JUDGED_ROWS = 64  # that `not_as_right` wants: over 8 rows sums in fewer bits move a distance by up to 5 %, not 1
_AS_FAR = 0.02


def own_bound(provider: Provider, arch: str, facts: Facts, rows: int) -> OwnBound | None:
    """Return the bound of its own that this provider has on `arch` for a call of so many rows; None: BOUND holds."""
    return provider.bound(arch, {**facts, "rows": rows})


def bound_of(own: OwnBound | None) -> float:
    """Return the relative L2 to the reference, over all rows, that a call may have."""
    return BOUND if own is None else own.rel


def not_as_right(own: OwnBound, got: torch.Tensor, expected: torch.Tensor, made: Arguments) -> str | None:
    """Say why a result that needs its own bound is wrong; None: it is as far from `own.exact` as the reference is.

    `got` and `expected`: the provider's and the reference's for the arguments `made`.
    """
    exact = own.exact(**made).double()
    size = exact.norm()
    ours, theirs = (((x.double() - exact).norm() / size).item() for x in (got, expected))
    if abs(ours - theirs) <= _AS_FAR * theirs:
        return None
    return (
        f"relative L2 {ours:.2e} to the op without that which is noisy, the reference has {theirs:.2e};"
        f" legal: as far within {100 * _AS_FAR:g} %"
    )
