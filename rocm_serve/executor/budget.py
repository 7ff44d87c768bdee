"""What one worker may use of its machine, what is left of that for caches, and refusals of what does not fit. Pure.

Units: bytes. Nothing here asks the machine: free bytes come in as an int.
"""

from __future__ import annotations

from rocm_serve.config.schema import Resolved
from rocm_serve.errors import UserError


def human(nbytes: float) -> str:
    """Write bytes as people read them."""
    for unit in ("bytes", "KB", "MB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.3g} {unit}" if unit != "bytes" else f"{int(nbytes)} bytes"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"


def gpu_memory(total_bytes: int, free_bytes: int, resolved: Resolved) -> int:
    """Bytes that one worker may use of its GPU, seen before it has taken any."""
    return int(total_bytes * resolved.mem_fraction) - (total_bytes - free_bytes)


def cpu_memory(free_bytes: int, resolved: Resolved) -> int:
    """Share of free RAM that one worker may use in all."""
    local_workers = resolved.tp * resolved.pp // resolved.nnodes
    return int(free_bytes * resolved.mem_fraction) // max(1, local_workers)


def bytes_for_caches(rank: int, allowed: int, weights: int, step: int, *, held: int = 0) -> int:
    """What is left of `allowed` for pages and slots. `held`: bytes of the GPU that were in use before.

    Errors: UserError when the model itself does not fit.
    """
    left = allowed - weights - step
    if left <= 0:
        beside = f" beside {human(held)} of its GPU that are in use already" if held else ""
        advice = (
            "raise --mem-fraction, --tp or --pp, or lower --chunked-prefill-size or --max-running-requests"
            if left + held <= 0
            else f"without those it might use {human(allowed + held)}: end what holds them, or choose another GPU"
        )
        raise UserError(
            f"the model does not fit: rank {rank} may use {human(max(allowed, 0))} (--mem-fraction){beside}, but its"
            f" weights take {human(weights)} and one step up to {human(step)}; {advice}"
        )
    return left


def check_preparation(rank: int, allowed: int, weights: int, preparing: int) -> None:
    """Errors: UserError when the weights fit, but not while they are laid out for their kernels."""
    if preparing and weights + preparing > allowed:
        raise UserError(
            f"the model does not fit: rank {rank} may use {human(allowed)} (--mem-fraction), but its weights take"
            f" {human(weights)}, and laying them out for their kernels {human(preparing)} more for a moment;"
            " raise --mem-fraction, --tp or --pp, or choose providers that read them as they are: --op OP=reference"
        )


def planned_and_allocated(rank: int, weights: int, caches: int, allocated: int) -> str:
    """Say in one line what a rank was planned to hold and what it holds."""
    planned = weights + caches
    return (
        f"rank {rank}: planned {human(planned)} (weights {human(weights)}, caches {human(caches)}),"
        f" allocated {human(allocated)} ({(allocated - planned) / planned:+.2%})"
    )
