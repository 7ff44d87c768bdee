"""The noise of ops/sampling/triton.py alone, for many keys at once: the op shows only the noise of winners."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.sampling import rng
from rocm_serve.ops.sampling.triton import gumbel

TOKEN = 41
COUNT = 2048


@triton.jit  # type: ignore[untyped-decorator]
def noise_kernel(keys_ptr, out_ptr, TOKEN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, gumbel(tl.load(keys_ptr + at), at * 0 + TOKEN))


def worst_noise(g: torch.Generator, device: str = "cpu") -> float:
    """Return the largest error against float64 among 500 numbers from each end of a million, and some between.

    Relative to the noise, or to 1 where it is smaller.
    """
    keys = torch.randint(-(2**62), 2**62, (1_000_000, 1), generator=g, device=g.device).to("cpu")
    u = rng.uniform(rng.random_bits(keys, rng.id_offsets(TOKEN, 1, keys.device))).flatten()
    order = u.argsort()
    chosen = torch.cat([order[:500], order[::1000], order[-548:]])
    out = torch.empty(COUNT, device=device)
    noise_kernel[(1,)](keys.flatten()[chosen].to(device), out, TOKEN=TOKEN, BLOCK=COUNT, enable_fp_fusion=False)
    expected = -torch.log(-torch.log1p(-u[chosen].double()))
    return float(((out.cpu() - expected).abs() / expected.abs().clamp_min(1.0)).max())
