"""Norms, matrix products and experts of the stand-in. Letters: M rows, K inner, N outer."""

from __future__ import annotations

from typing import Any

import torch

from tests.ops.aiter_standin.checks import (
    BLOCK,
    HALF,
    POISON,
    ActivationType,
    QuantType,
    Tensor,
    demand,
    dtypes,
    largest,
    norm,
    tensor,
)


def rmsnorm(out: Any, input: Any, weight: Any, epsilon: float, gemma_norm: bool = False) -> None:
    x = tensor(input, "input", HALF, None, None)
    tensor(out, "out", x.dtype, *x.shape)
    tensor(weight, "weight", x.dtype, x.shape[1])
    demand(x.shape[1] <= 8192, "rows wider than 8192")
    out.copy_(norm(x, weight, epsilon, gemma_norm))


def add_rmsnorm(
    out: Any, input: Any, residual_in: Any, residual_out: Any, weight: Any, epsilon: float, gemma_norm: bool = False
) -> None:
    x = tensor(input, "input", HALF, None, None)
    for one, name in ((out, "out"), (residual_in, "residual_in"), (residual_out, "residual_out")):
        tensor(one, name, x.dtype, *x.shape)
    tensor(weight, "weight", x.dtype, x.shape[1])
    demand(x.shape[1] <= 8192, "rows wider than 8192")
    demand(len({t.data_ptr() for t in (out, x, residual_in, residual_out)}) == 4, "an output lies upon an input")
    total = x.float() + residual_in.float()  # the norm is of the sum before it is rounded
    residual_out.copy_(total)
    out.copy_(norm(total, weight, epsilon, gemma_norm))


def gemm_a16w16(A: Any, B: Any, otype: torch.dtype | None = None) -> Tensor:
    x = tensor(A, "A", HALF, None, None)
    tensor(B, "B", x.dtype, None, x.shape[1])
    return (x.float() @ B.float().T).to(x.dtype).to(otype or x.dtype)


def _quantised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return FP8 codes [M, K] and fp32 scales [M, K / 128] in row order."""
    blocks = x.float().view(x.shape[0], -1, BLOCK)
    scale = blocks.abs().amax(-1).clamp_min(1e-10) / largest(dtype)
    return (blocks / scale[..., None]).to(dtype).view(x.shape), scale


def per_group_quant_hip(
    x: Any,
    scale: Any = None,
    quant_dtype: torch.dtype = torch.int8,
    group_size: int = 128,
    transpose_scale: bool = False,
) -> tuple[Tensor, Tensor]:
    tensor(x, "x", HALF, None, None)
    demand(scale is None, "scale is for static quantisation, which this function refuses")
    demand(quant_dtype is dtypes.fp8, f"quant_dtype is {quant_dtype}, the GPU's FP8 is {dtypes.fp8}")
    demand(group_size == BLOCK and x.shape[1] % BLOCK == 0, f"groups of {group_size} in {x.shape[1]} columns")
    codes, scales = _quantised(x, quant_dtype)
    return codes, scales.T.contiguous().view(scales.shape) if transpose_scale else scales


def shuffled(x: Tensor) -> Tensor:
    """Put tiles of 16 rows by two times 16 bytes (or numbers) one after the other."""
    n, k = x.shape[-2:]
    pack = 16 // x.element_size()
    tiles = x.reshape(-1, n // 16, 16, k // 32, 32 // pack, pack)
    return tiles.permute(0, 1, 3, 4, 2, 5).contiguous().view(x.shape)


def unshuffled(x: Tensor) -> Tensor:
    n, k = x.shape[-2:]
    pack = 16 // x.element_size()
    tiles = x.reshape(-1, n // 16, k // 32, 32 // pack, 16, pack)
    return tiles.permute(0, 1, 4, 2, 3, 5).contiguous().view(x.shape)


def shuffle_weight(x: Any, layout: tuple[int, int] = (16, 16)) -> Tensor:
    demand(layout == (16, 16) and x.shape[-2] % 16 == 0 and x.shape[-1] % 32 == 0, f"{layout} of {tuple(x.shape)}")
    demand(x.is_contiguous() and not hasattr(x, "is_shuffled"), "the weight was shuffled before, or is a view")
    out = shuffled(x)
    out.is_shuffled = True  # type: ignore[attr-defined]
    return out


def _marked(weight: Any, name: str) -> None:
    demand(getattr(weight, "is_shuffled", False) is True, f"{name} does not carry is_shuffled: a copy, a view, a cast")


def _block_product(codes: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Multiply codes [M, K] with an FP8 weight [N, K] in float64, each block with its own two scales."""
    x = codes.double() * scales.double().repeat_interleave(BLOCK, 1)
    w = weight.double() * weight_scale.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (x @ w.T).float()


def gemm_a8w8_blockscale_bpreshuffle(
    XQ: Any, WQ: Any, x_scale: Any, w_scale: Any, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    x = tensor(XQ, "XQ", dtypes.fp8, None, None)
    w = tensor(WQ, "WQ", dtypes.fp8, None, x.shape[1])
    _marked(WQ, "WQ")
    (m, k), n = x.shape, w.shape[0]
    demand(n % BLOCK == 0 and k % BLOCK == 0, f"no whole blocks in [{n}, {k}]")
    tensor(w_scale, "w_scale", torch.float32, n // BLOCK, k // BLOCK)
    tensor(x_scale, "x_scale", torch.float32, m, k // BLOCK)
    demand(dtype in HALF, f"the output is {dtype}")
    in_rows = x_scale.view(k // BLOCK, m).T  # the bytes are read column by column
    return _block_product(x, in_rows, unshuffled(w), w_scale).to(dtype)


def fused_moe(
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weight: Any,
    topk_ids: Any,
    expert_mask: Any = None,
    activation: Any = ActivationType.Silu,
    quant_type: Any = QuantType.No,
    w1_scale: Any = None,
    w2_scale: Any = None,
    a1_scale: Any = None,
    num_local_tokens: Any = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    blocks = quant_type is QuantType.per_1x128
    x = tensor(hidden_states, "hidden_states", HALF if a1_scale is None else dtypes.fp8, None, None)
    m, h = x.shape
    dtype = dtype or x.dtype
    demand(dtype in HALF, f"the output is {dtype}")
    if a1_scale is not None:
        demand(blocks, "scales of rows for plain weights")
        tensor(a1_scale, "a1_scale", torch.float32, m, h // BLOCK)
        demand(num_local_tokens is None, "scales are turned around by num_local_tokens and read by the buffer's rows")
    stored = dtypes.fp8 if blocks else x.dtype
    tensor(w1, "w1", stored, None, None, h)
    experts, i = w1.shape[0], w1.shape[1] // 2
    tensor(w2, "w2", stored, experts, h, i)
    _marked(w1, "w1")
    _marked(w2, "w2")
    demand(activation is ActivationType.Silu and quant_type in (QuantType.No, QuantType.per_1x128), "an enum")
    if blocks:
        demand(h % BLOCK == 0 and i % BLOCK == 0, f"no whole blocks in {h} x {i}")
        tensor(w1_scale, "w1_scale", torch.float32, experts, 2 * i // BLOCK, h // BLOCK)
        tensor(w2_scale, "w2_scale", torch.float32, experts, h // BLOCK, i // BLOCK)
    else:
        demand(w1_scale is None and w2_scale is None, "scales for plain weights")
    tensor(topk_ids, "topk_ids", torch.int32, m, None)
    tensor(topk_weight, "topk_weight", torch.float32, *topk_ids.shape)
    local = _local_ids(topk_ids, expert_mask, experts)
    live = m
    if num_local_tokens is not None:
        live = int(tensor(num_local_tokens, "num_local_tokens", torch.int32, 1))
    y = torch.full((m, h), POISON)
    y[:live] = 0
    for e in range(experts):
        rows, choices = (local[:live] == e).nonzero(as_tuple=True)
        if len(rows):
            scales = (w1_scale[e], w2_scale[e]) if blocks else None
            given = None if a1_scale is None else a1_scale[rows]
            one = _expert(x[rows], given, unshuffled(w1[e]), unshuffled(w2[e]), scales)
            y.index_add_(0, rows, one * topk_weight[rows, choices, None])
    return y.to(dtype)


def _local_ids(ids: Tensor, mask: Any, experts: int) -> Tensor:
    """Return the local number of every choice, -1 where its expert is masked."""
    everywhere = experts if mask is None else tensor(mask, "expert_mask", torch.int32, None).numel()
    demand(int(ids.min()) >= 0 and int(ids.max()) < everywhere, "an id out of bounds: AITER follows it")
    if mask is None:
        return ids
    demand(set(mask.tolist()) <= {0, 1} and int(mask.sum()) == experts, "expert_mask is no mask of the experts here")
    local = torch.where(mask == 1, mask.cumsum(0) - 1, -1)[ids.long()]
    demand(bool((local[:, -1] == -1).all()), "with a mask the last choice is a masked one")
    return local


def _expert(x: Tensor, x_scale: Tensor | None, w1: Tensor, w2: Tensor, scales: tuple[Tensor, Tensor] | None) -> Tensor:
    def product(rows: Tensor, given: Tensor | None, weight: Tensor, which: int) -> Tensor:
        if scales is None:
            return rows.float() @ weight.float().T
        codes, factors = _quantised(rows, weight.dtype) if given is None else (rows, given)
        return _block_product(codes, factors, weight, scales[which])

    gate, up = product(x, x_scale, w1, 0).chunk(2, dim=-1)
    return product(torch.nn.functional.silu(gate) * up, None, w2, 1)
