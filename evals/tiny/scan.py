"""The gated delta rule over whole rows, in chunks: the sequential part is one small step a chunk. For training.

Letters: B rows, T tokens, C chunk, n chunks, M = B * value heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


class Terms(NamedTuple):
    """What does not depend on the state, per chunk, in float32."""

    system: Tensor  # [n, M, C, C] (beta K) K^T with decay, below the diagonal: I + it is to be inverted
    right: Tensor  # [n, M, C, V + K] beta V | beta K with decay
    scores: Tensor  # [n, M, C, C] Q K^T with decay, on and below the diagonal
    queries: Tensor  # [n, M, C, K] with the decay since the chunk began
    keys: Tensor  # [n, M, K, C] with the decay until the chunk ends
    decay: Tensor  # [n, M, 1, 1] of the state over a chunk


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def chunk_terms(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Terms:
    """Shapes: q, k [B, T, Hk, K], v [B, T, Hv, V], g, beta [B, T, Hv]; T is a multiple of CHUNK."""
    rows, length, heads = v.shape[:3]
    key_dim = k.shape[-1]

    def cut(x: Tensor) -> Tensor:  # [B, T, Hv, *] -> [n, M, C, *]
        x = x.reshape(rows, length // CHUNK, CHUNK, heads, -1).permute(1, 0, 3, 2, 4)
        return x.reshape(length // CHUNK, rows * heads, CHUNK, -1).contiguous()

    q, k = (cut(normed(x.float()).repeat_interleave(heads // k.shape[2], 2)) for x in (q, k))
    v, beta, sums = cut(v.float()), cut(beta.float()[..., None]), cut(g.float()[..., None])[..., 0].cumsum(-1)
    q = q * key_dim**-0.5
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    fade = (sums[..., :, None] - sums[..., None, :]).masked_fill(above, -torch.inf).exp()
    k_beta, since = k * beta, sums.exp()[..., None]
    until = (sums[..., -1:] - sums).exp()[..., None]
    return Terms(
        ((k_beta @ k.mT) * fade).tril(-1),
        torch.cat((v * beta, k_beta * since), -1),
        (q @ k.mT) * fade,
        q * since,
        (k * until).mT.contiguous(),
        sums[..., -1].exp()[..., None, None],
    )


class UnitInverse(torch.autograd.Function):
    """(I + A)^-1 of strictly lower A [*, C, C]; its gradient needs products only, no second triangular solve."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
        inverse = torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ gradient @ inverse.mT).tril(-1)


def scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, terms: Callable[..., Terms] = chunk_terms
) -> Tensor:
    """Return o [B, T, Hv, V] in v's dtype; the state starts at zero. Shapes as in `chunk_terms`, any T."""
    rows, length, heads, width = v.shape
    missing = -length % CHUNK
    if missing:
        q, k, v, g, beta = (F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing)) for x in (q, k, v, g, beta))
    t = terms(q, k, v, g, beta)
    values, reads = (UnitInverse.apply(t.system) @ t.right).split((width, k.shape[-1]), -1)
    state: Tensor | None = None
    out = []
    # unbind, not an index in the loop: the gradient of an index is a tensor of zeros of the full size
    for value, read, score, query, key, decay in zip(
        *(x.unbind(0) for x in (values, reads, t.scores, t.queries, t.keys, t.decay)), strict=True
    ):
        if state is None:
            out.append(score @ value)
            state = key @ value
        else:
            new = torch.baddbmm(value, read, state, alpha=-1)
            out.append(torch.baddbmm(score @ new, query, state))
            state = torch.baddbmm(state * decay, key, new)
    joined = torch.stack(out).view(-1, rows, heads, CHUNK, width).permute(1, 0, 3, 2, 4)
    return joined.reshape(rows, -1, heads, width)[:, :length].to(v.dtype)
