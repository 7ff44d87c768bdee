"""Attention over paged keys and values, one sequence at a time: the mathematics of both attention references.

Letters: T rows of the batch, n rows of one sequence, H query heads, G key/value heads, r = H / G, D head size,
L keys (a multiple of 128), M = n * r padded to a multiple of 32, P pages, S rows of a page.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.fp8 import widened
from rocm_serve.ops.rows import ROW_MULTIPLE, steady_

KEY_BLOCK = 128
_QUERY_ROWS = 64  # bounds the scores in memory; no influence on bits


def attend_paged(
    q_THD: torch.Tensor,
    k_pages_PSGD: torch.Tensor,
    v_pages_PSGD: torch.Tensor,
    sequences: Sequences,
    out_THD: torch.Tensor,
    *,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> None:
    """Write causal attention of the sequences' rows to their rows of `out`.

    Numerics: fp32. Keys are taken in blocks of 128 counted from position 0, each block multiplied and summed alone
    and blocks added in order; a block with no visible key adds exact zeros. So a row's bits depend on its query and
    the keys before it, not on chunk borders, the length of the cache or other sequences.
    """
    for b in range(sequences.num_sequences):
        first, last = sequences.row_starts[b], sequences.row_starts[b + 1]
        context = sequences.contexts[b]
        length = context + last - first
        pages = sequences.page_table_BP[b, : -(-length // k_pages_PSGD.shape[1])].long()
        k_LGD = _gather(k_pages_PSGD, pages, length, k_scale)
        v_LGD = _gather(v_pages_PSGD, pages, length, v_scale)
        for row in range(first, last, _QUERY_ROWS):
            stop = min(row + _QUERY_ROWS, last)
            position = context + row - first
            visible = -(-(position + stop - row) // KEY_BLOCK) * KEY_BLOCK
            o_nHD = _attend(q_THD[row:stop].float(), k_LGD[:visible], v_LGD[:visible], position, scale)
            out_THD[row:stop] = o_nHD.to(out_THD.dtype)


def _gather(pages_PSGD: torch.Tensor, pages: torch.Tensor, length: int, scale: float) -> torch.Tensor:
    """Return the first `length` rows in fp32, followed by zeros up to a whole block (pages hold anything there)."""
    if pages_PSGD.dtype.itemsize == 1:
        held = pages_PSGD.view(torch.uint8)[pages].view(pages_PSGD.dtype)
    else:
        held = pages_PSGD[pages]
    x_LGD = widened(held.flatten(0, 1)[:length]) * scale
    return F.pad(x_LGD, (0, 0, 0, 0, 0, -length % KEY_BLOCK))


def _attend(q_nHD: torch.Tensor, k_LGD: torch.Tensor, v_LGD: torch.Tensor, position: int, scale: float) -> torch.Tensor:
    n, heads, d = q_nHD.shape
    groups, blocks = k_LGD.shape[1], k_LGD.shape[0] // KEY_BLOCK
    r = heads // groups
    q_GMD = q_nHD.view(n, groups, r, d).transpose(0, 1).reshape(groups, n * r, d)
    q_GMD = F.pad(q_GMD, (0, 0, 0, -(n * r) % ROW_MULTIPLE))
    m = q_GMD.shape[1]
    k_GbDk = k_LGD.view(blocks, KEY_BLOCK, groups, d).permute(2, 0, 3, 1)
    v_GbkD = v_LGD.view(blocks, KEY_BLOCK, groups, d).permute(2, 0, 1, 3)

    q_all = q_GMD[:, None].expand(groups, blocks, m, d).reshape(groups * blocks, m, d)
    scores = torch.bmm(q_all, k_GbDk.reshape(groups * blocks, d, KEY_BLOCK)).view(groups, blocks, m, KEY_BLOCK)
    query_at = position + (torch.arange(m, device=q_nHD.device) // r).clamp_max(n - 1)
    key_at = torch.arange(blocks * KEY_BLOCK, device=q_nHD.device).view(blocks, 1, KEY_BLOCK)
    scores = scores.mul_(scale).masked_fill_(key_at > query_at[:, None], float("-inf"))
    peak_GM = scores.amax(dim=(1, 3))
    p = steady_(torch.exp_, scores.sub_(peak_GM[:, None, :, None]))

    sums_GbM = p.sum(-1)
    total_GM = torch.zeros_like(peak_GM)
    o_GMD = torch.zeros_like(q_GMD)
    for i in range(blocks):
        total_GM += sums_GbM[:, i]
        o_GMD += torch.bmm(p[:, i], v_GbkD[:, i])
    o_GMD /= total_GM[..., None]
    return o_GMD[:, : n * r].view(groups, n, r, d).transpose(0, 1).reshape(n, heads, d)
