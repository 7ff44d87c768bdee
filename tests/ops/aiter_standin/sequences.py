"""Cache writes, attention and the gated delta rule of the stand-in. Letters as in the ops' references."""

from __future__ import annotations

from typing import Any

import torch

from tests.ops.aiter_standin.checks import HALF, POISON, Tensor, demand, dtypes, largest, tensor


def reshape_and_cache_flash(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    tensor(key, "key", HALF, None, None, None)
    tensor(value, "value", key.dtype, *key.shape)
    slots = tensor(slot_mapping, "slot_mapping", torch.int64, key.shape[0])
    demand(kv_cache_dtype in ("auto", "fp8"), f"kv_cache_dtype {kv_cache_dtype}")
    stored = key.dtype if kv_cache_dtype == "auto" else dtypes.fp8
    for rows, cache, scale, name in ((key, key_cache, k_scale, "key"), (value, value_cache, v_scale, "value")):
        tensor(cache, f"{name}_cache", stored, None, None, *key.shape[1:])
        tensor(scale, f"{name[0]}_scale", torch.float32, 1)
        demand(int(slots.max()) < cache.shape[0] * cache.shape[1], "a slot out of bounds")
        new = rows
        if kv_cache_dtype == "fp8":
            new = rows.float() / scale
            demand(bool((new.abs() <= largest(stored)).all()), f"{name}: a value that the cast may turn into NaN")
            new = new.to(stored)
        as_bytes = cache.view(-1, *cache.shape[2:]).view(torch.uint8)
        real = slots >= 0  # the kernel returns at a negative one
        as_bytes[slots[real]] = new[real].contiguous().view(torch.uint8)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend with the last query at the last key: the causal mask is aligned at the bottom right."""
    r = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(r, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    hidden = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v.float()).to(q.dtype)


def _spans(starts: Any, name: str, rows: int | None, longest: int | None) -> list[tuple[int, int]]:
    tensor(starts, name, torch.int32, None)
    at = starts.tolist()
    demand(at[0] == 0 and at == sorted(at) and rows in (None, at[-1]), f"{name} {at} for {rows} rows")
    spans = list(zip(at, at[1:], strict=False))
    demand(longest in (None, max(b - a for a, b in spans)), f"{name} {at}: the longest is not {longest}")
    return spans


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    tensor(q, "q", HALF, None, None, None)
    heads, d = q.shape[1:]
    tensor(k, "k", q.dtype, None, None, d)
    tensor(v, "v", q.dtype, *k.shape)
    demand(d <= 256 and d % 8 == 0 and heads % k.shape[1] == 0, f"heads {heads} x {d}")
    demand(causal and softmax_scale is not None, "causal and softmax_scale")
    assert softmax_scale is not None
    queries = _spans(cu_seqlens_q, "cu_seqlens_q", q.shape[0], max_seqlen_q)
    keys = _spans(cu_seqlens_k, "cu_seqlens_k", k.shape[0], max_seqlen_k)
    out = torch.full_like(q, POISON)
    for (a, b), (c, e) in zip(queries, keys, strict=True):
        out[a:b] = _attend(q[a:b], k[c:e], v[c:e], softmax_scale)
    return out


def unified_attention(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int,
    seqused_k: Any,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: Any,
    softcap: float,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
) -> Tensor:
    tensor(q, "q", HALF, None, None, None)
    tensor(out, "out", q.dtype, *q.shape)
    stored = k.dtype if k.dtype is dtypes.fp8 else q.dtype
    tensor(k, "k", stored, None, None, None, q.shape[2])
    tensor(v, "v", stored, *k.shape)
    page = k.shape[1]
    demand(page & (page - 1) == 0, f"pages of {page}")
    demand(causal is True and window_size == (-1, -1) and softcap == 0 and q_descale is None, "causal, no window")
    for scale, name in ((k_descale, "k_descale"), (v_descale, "v_descale")):
        if stored is dtypes.fp8:
            tensor(scale, name, torch.float32, 1)
        else:
            demand(scale is None, f"{name} for {stored} pages")
    spans = _spans(cu_seqlens_q, "cu_seqlens_q", q.shape[0], max_seqlen_q)
    lengths = tensor(seqused_k, "seqused_k", torch.int64, len(spans)).tolist()
    demand(max(lengths) == max_seqlen_k, f"the longest of {lengths} is not {max_seqlen_k}")
    demand(block_table.dtype is torch.int32 and block_table.shape[0] == len(spans), "block_table")
    for (a, b), length, pages in zip(spans, lengths, block_table, strict=True):
        used = pages[: -(-length // page)].long()
        held = [x.view(torch.uint8)[used].view(stored).flatten(0, 1)[:length].float() for x in (k, v)]
        if stored is dtypes.fp8:
            held = [x * scale for x, scale in zip(held, (k_descale, v_descale), strict=True)]
        out[a:b] = _attend(q[a:b], held[0], held[1], softmax_scale)
    return out


def _unit(x: Tensor) -> Tensor:
    return x.float() / (x.float().pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


def _recur(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Run the rows of one sequence, [n, H, ...] each, on a state [H, V, K]; return outputs and each row's state."""
    outputs, states = [], []
    for t in range(q.shape[0]):
        state = state * g[t].exp()[:, None, None]
        delta = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * beta[t, :, None]
        state = state + torch.einsum("hv,hk->hvk", delta, k[t])
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]))
        states.append(state)
    return torch.stack(outputs), states


def chunk_gated_delta_rule_opt_vk(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    beta: Any = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    state_dtype: Any = None,
) -> tuple[Tensor, Tensor]:
    tensor(q, "q", HALF, 1, None, None, None)
    _, t, key_heads, key = q.shape
    tensor(k, "k", q.dtype, *q.shape)
    tensor(v, "v", q.dtype, 1, t, None, None)
    heads, value = v.shape[2:]
    demand(key <= 256 and heads % key_heads == 0, f"{key_heads} key heads of {key}, {heads} value heads")
    for x, name in ((g, "g"), (beta, "beta")):
        tensor(x, name, torch.float32, 1, t, heads)
    demand(bool((g <= 0).all()), "g is the logarithm of a decay")
    tensor(cu_seqlens, "cu_seqlens", torch.int64, None)
    spans = _spans(cu_seqlens.int(), "cu_seqlens", t, None)
    demand(all(b > a for a, b in spans), "a sequence without rows")
    tensor(initial_state, "initial_state", torch.float32, len(spans), heads, value, key)
    demand(output_final_state and use_qk_l2norm_in_kernel and state_dtype is torch.float32, "the state's flags")
    r = heads // key_heads
    queries, keys = (_unit(x[0]).repeat_interleave(r, 1) for x in (q, k))
    out, final = torch.full_like(v, POISON), torch.full_like(initial_state, POISON)
    for n, (a, b) in enumerate(spans):
        rows = slice(a, b)
        y, states = _recur(
            queries[rows] * key**-0.5, keys[rows], v[0, rows].float(), g[0, rows], beta[0, rows], initial_state[n]
        )
        out[0, rows] = y.to(v.dtype)
        final[n] = states[-1]
    return out, final


def fused_rearrange_sigmoid_gated_delta_rule(
    A_log: Any,
    a: Any,
    b: Any,
    dt_bias: Any,
    qkv: Any,
    key_dim: int,
    value_dim: int,
    head_k_dim: int,
    head_v_dim: int,
    initial_state: Any = None,
    inplace_final_state: bool = True,
    cu_seqlens: Any = None,
    ssm_state_indices: Any = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    tensor(qkv, "qkv", HALF, None, 2 * key_dim + value_dim)
    t, heads = qkv.shape[0], value_dim // head_v_dim
    tensor(A_log, "A_log", torch.float32, heads)
    tensor(dt_bias, "dt_bias", (torch.float32, qkv.dtype), heads)
    tensor(a, "a", qkv.dtype, t, heads)
    tensor(b, "b", qkv.dtype, t, heads)
    tensor(initial_state, "initial_state", torch.float32, None, heads, head_v_dim, head_k_dim)
    tensor(cu_seqlens, "cu_seqlens", torch.int64, None)
    spans = _spans(cu_seqlens.int(), "cu_seqlens", t, None)
    slots = tensor(ssm_state_indices, "ssm_state_indices", torch.int32, len(spans), max(e - s for s, e in spans))
    demand(bool((slots[:, 0] >= 0).all()), "a sequence whose first slot is negative does not run at all")
    demand(use_qk_l2norm_in_kernel, "q and k are not normalised")
    q, k, v = (x.float() for x in qkv.split([key_dim, key_dim, value_dim], dim=1))
    r = value_dim // head_v_dim // (key_dim // head_k_dim)
    q, k = (_unit(x.view(t, -1, head_k_dim)).repeat_interleave(r, 1) for x in (q, k))
    v = v.view(t, heads, head_v_dim)
    g = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias.float(), threshold=20)
    out = torch.full((1, t, heads, head_v_dim), POISON, dtype=qkv.dtype)
    final = initial_state if inplace_final_state else torch.full((t, *initial_state.shape[1:]), POISON)
    for n, (s, e) in enumerate(spans):
        if s == e:
            continue
        rows = slice(s, e)
        start = initial_state[slots[n, 0]].clone()
        y, states = _recur(q[rows] * head_k_dim**-0.5, k[rows], v[rows], g[rows], b[rows].float().sigmoid(), start)
        out[0, rows] = y.to(qkv.dtype)
        for i, state in enumerate(states):
            at = int(slots[n, i]) if inplace_final_state else s + i
            if at >= 0:  # a negative slot: the state of this row is stored nowhere
                final[at] = state
    return out, final
