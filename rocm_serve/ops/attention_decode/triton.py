"""Causal attention of rows past the prompt in Triton: the kernel of prompt rows, with a sequence's keys split.

Letters: T rows of the batch, H query heads, D head size, P pages, S rows of a page, G key/value heads.
"""

from __future__ import annotations

import torch

from rocm_serve.ops.attention_prefill.triton import attend
from rocm_serve.ops.batch import Sequences

SPAN = 1024  # keys of one split: a constant, so that a row's bits do not depend on its batch mates


def attention_decode(
    q_THD: torch.Tensor,
    k_pages_PSGD: torch.Tensor,
    v_pages_PSGD: torch.Tensor,
    sequences: Sequences,
    out_THD: torch.Tensor,
    *,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Write softmax(scale q k) v of the sequences' rows to their rows of `out`: the reference's semantics.

    Numerics: as attention_prefill's. Contexts above 1024 keys are computed in parts, merged in fp32.
    """
    return attend(
        q_THD,
        k_pages_PSGD,
        v_pages_PSGD,
        sequences,
        out_THD,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
        span=SPAN,
    )
