"""What every op should return, in float64 and written another way than the references: loops, one row at a time.

Each oracle takes the arguments of a case and returns its outputs: the result, then the mutated arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Outputs = tuple[torch.Tensor, ...]


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * sigmoid(x)


def rms_norm(x_TH: Any, weight_H: Any, *, eps: float, plus_one: bool) -> Outputs:
    x = x_TH.double()
    length = torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return (x / length * (weight_H.double() + (1 if plus_one else 0)),)


def add_rms_norm(x_TH: Any, residual_TH: Any, weight_H: Any, *, eps: float, plus_one: bool) -> Outputs:
    total = (x_TH.double() + residual_TH.double()).to(x_TH.dtype)
    return (*rms_norm(total, weight_H, eps=eps, plus_one=plus_one), total.double())


def gated_rms_norm(x_THD: Any, gate_THD: Any, weight_D: Any, *, eps: float, activation: str) -> Outputs:
    (normed,) = rms_norm(x_THD, weight_D, eps=eps, plus_one=False)
    return (normed * {"silu": silu, "sigmoid": sigmoid}[activation](gate_THD.double()),)


def linear(x_TK: Any, weight_NK: Any, *, out_dtype: Any) -> Outputs:
    return (torch.einsum("tk,nk->tn", x_TK.double(), weight_NK.double()),)


def add_norm_linear(
    x_TH: Any, residual_TH: Any, norm_weight_H: Any, weight_NH: Any, total_TH: Any, *, eps: float, plus_one: bool
) -> Outputs:
    normed_TH, total_TH = add_rms_norm(x_TH, residual_TH, norm_weight_H, eps=eps, plus_one=plus_one)
    return (*linear(normed_TH, weight_NH, out_dtype=None), normed_TH, total_TH)


def widened(weight: Any, scale: Any) -> torch.Tensor:
    """Dequantise element by element."""
    n, k = weight.shape[-2:]
    rows, columns = torch.arange(n) // 128, torch.arange(k) // 128
    return weight.double() * scale.double()[..., rows, :][..., columns]


def as_quantised(x: Any) -> torch.Tensor:
    """Return what an e4m3fn row with one fp32 scale per 128 columns stands for."""
    out = []
    for row in x.float():
        for block in row.split(128):
            scale = torch.clamp(block.abs().max(), min=1e-10) / 448.0
            out.append((block / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double())
    return torch.cat(out).view(x.shape) if out else x.double()


def quantise_rows(x_TK: Any, *, dtype: Any) -> Outputs:
    width = x_TK.shape[1]
    q, s = torch.zeros(x_TK.shape, dtype=torch.float64), torch.zeros(len(x_TK), -(-width // 128), dtype=torch.float64)
    for t, row in enumerate(x_TK.double()):
        for b, block in enumerate(row.split(128)):
            s[t, b] = (
                max(block.abs().max().item(), 1e-10) / {torch.float8_e4m3fn: 448, torch.float8_e4m3fnuz: 224}[dtype]
            )
            q[t, b * 128 : b * 128 + len(block)] = (block / s[t, b]).float().to(dtype).double()
    return q, s


def fp8_linear(x_TK: Any, weight_NK: Any, scale: Any, *, activation: str) -> Outputs:
    x = as_quantised(x_TK) if activation == "fp8_1x128" else x_TK.double()
    return (x @ widened(weight_NK, scale).T,)


def silu_mul(gate_up_TI: Any) -> Outputs:
    width = gate_up_TI.shape[-1] // 2
    return (silu(gate_up_TI.double()[:, :width]) * gate_up_TI.double()[:, width:],)


def sigmoid_mul(x_TH: Any, gate: Any) -> Outputs:
    return (x_TH.double() * sigmoid(gate.double()),)


def shared_expert_add(routed_TH: Any, shared_TH: Any, x_TH: Any, gate_weight_1H: Any) -> Outputs:
    opening_T1 = sigmoid((x_TH.double() * gate_weight_1H.double()).sum(1, keepdim=True))
    return (routed_TH.double() + shared_TH.double() * opening_T1,)


def shared_down_add(routed_TH: Any, gate_up_TI: Any, gate_T1: Any, weight_HI: Any) -> Outputs:
    (hidden_TI,) = silu_mul(gate_up_TI)
    return (routed_TH.double() + sigmoid(gate_T1.double()) * (hidden_TI @ weight_HI.double().T),)


def moe_route(logits_TE: Any, *, top_k: int, renormalise: bool) -> Outputs:
    ids, weights = [], []
    for row in logits_TE.double():
        p = torch.exp(row - row.max())
        p = p / p.sum()
        # float32 logits that differ may give equal float32 probabilities; none of the cases has such a pair
        order = sorted(range(len(row)), key=lambda e: (-row[e].item(), e))[:top_k]
        chosen = p[order]
        ids.append(torch.tensor(order))
        weights.append(chosen / chosen.sum() if renormalise else chosen)
    if not ids:
        return torch.empty(0, top_k), torch.empty(0, top_k)
    return torch.stack(ids).double(), torch.stack(weights)


def moe_experts(
    x_TH: Any,
    ids_Tk: Any,
    weights_Tk: Any,
    num_rows: int,
    w13_EIH: Any,
    w2_EHI: Any,
    w13_scale: Any = None,
    w2_scale: Any = None,
    x_scale: Any = None,
    *,
    activation: str,
    out_dtype: Any,
) -> Outputs:
    fp8 = w13_scale is not None
    w13 = widened(w13_EIH, w13_scale) if fp8 else w13_EIH.double()
    w2 = widened(w2_EHI, w2_scale) if fp8 else w2_EHI.double()
    rounded = as_quantised if fp8 and activation == "fp8_1x128" else (lambda x: x.double())
    columns = torch.arange(x_TH.shape[1])
    rows = rounded(x_TH) if x_scale is None else x_TH.double() * x_scale.double()[:, columns // 128]
    out = torch.zeros(x_TH.shape, dtype=torch.float64)
    for t in range(num_rows):
        for e, weight in zip(ids_Tk[t].tolist(), weights_Tk[t].tolist(), strict=True):
            if e >= 0:
                gate, up = (rows[t : t + 1] @ w13[e].T).chunk(2, dim=-1)
                out[t] += weight * (rounded(silu(gate) * up) @ w2[e].T)[0]
    return (out,)


def qk_norm_rope(
    q_THD: Any, k_TGD: Any, q_weight_D: Any, k_weight_D: Any, cos_PR: Any, sin_PR: Any, positions_T: Any, *, eps: float
) -> Outputs:
    out = []
    for x, weight in ((q_THD, q_weight_D), (k_TGD, k_weight_D)):
        (y,) = rms_norm(x, weight, eps=eps, plus_one=True)
        half = cos_PR.shape[1]
        for t, p in enumerate(positions_T.tolist()):
            turn = torch.complex(cos_PR[p].double(), sin_PR[p].double())
            turned = torch.complex(y[t, :, :half], y[t, :, half : 2 * half]) * turn
            y[t, :, :half], y[t, :, half : 2 * half] = turned.real, turned.imag
        out.append(y)
    return tuple(out)


def kv_write(
    k_NGD: Any, v_NGD: Any, k_pages_PSGD: Any, v_pages_PSGD: Any, index_N: Any, *, k_scale: float, v_scale: float
) -> Outputs:
    out = []
    for x, pages, scale in ((k_NGD, k_pages_PSGD, k_scale), (v_NGD, v_pages_PSGD, v_scale)):
        held, size = pages.double(), pages.shape[1]
        for n, i in enumerate(index_N.tolist()):
            if i < 0:
                continue
            value = x[n].float() / scale
            if pages.dtype == torch.float8_e4m3fn:
                value = value.clamp(-448, 448)
            held[i // size, i % size] = value.to(pages.dtype).double()
        out.append(held)
    return out[0], out[0], out[1]


def qk_norm_rope_kv_write(
    qkv_TC: Any,
    q_weight_D: Any,
    k_weight_D: Any,
    cos_PR: Any,
    sin_PR: Any,
    positions_T: Any,
    k_pages_PSGD: Any,
    v_pages_PSGD: Any,
    index_N: Any,
    *,
    eps: float,
    k_scale: float,
    v_scale: float,
) -> Outputs:
    groups, d = k_pages_PSGD.shape[2:]
    heads = qkv_TC.shape[1] // (2 * d) - groups
    first_key, first_value = 2 * heads * d, (2 * heads + groups) * d
    q = torch.stack([qkv_TC[:, 2 * h * d : (2 * h + 1) * d] for h in range(heads)], 1)
    k, v = (
        torch.stack([qkv_TC[:, at + j * d : at + (j + 1) * d] for j in range(groups)], 1)
        for at in (first_key, first_value)
    )
    turned, keys = qk_norm_rope(q, k, q_weight_D, k_weight_D, cos_PR, sin_PR, positions_T, eps=eps)
    keys = keys.to(qkv_TC.dtype)
    pages = kv_write(keys, v, k_pages_PSGD, v_pages_PSGD, index_N, k_scale=k_scale, v_scale=v_scale)
    return (turned, *pages[1:])


def attention(
    q_THD: Any,
    k_pages_PSGD: Any,
    v_pages_PSGD: Any,
    sequences: Any,
    out_THD: Any,
    *,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Outputs:
    out = out_THD.double()
    size, shared = k_pages_PSGD.shape[1], q_THD.shape[1] // k_pages_PSGD.shape[2]
    for b in range(sequences.num_sequences):
        first, last = sequences.row_starts[b], sequences.row_starts[b + 1]
        length = sequences.contexts[b] + last - first
        at = [(int(sequences.page_table_BP[b, p // size]), p % size) for p in range(length)]
        keys = torch.stack([k_pages_PSGD[page, offset].double() for page, offset in at]) * k_scale
        values = torch.stack([v_pages_PSGD[page, offset].double() for page, offset in at]) * v_scale
        for row in range(first, last):
            seen = sequences.contexts[b] + row - first + 1
            k, v = keys[:seen], values[:seen]
            for h in range(q_THD.shape[1]):
                p = (k[:, h // shared] @ q_THD[row, h].double() * scale).softmax(0)
                out[row, h] = p @ v[:, h // shared]
    return out, out


def committed(sequences: Any, b: int) -> int:
    """Number the last row whose states are kept; one before the first row when none is."""
    first, last = sequences.row_starts[b], sequences.row_starts[b + 1]
    return int(first + (last - first if sequences.commits is None else sequences.commits_B[b]) - 1)


def causal_conv(u_TC: Any, weight_CK: Any, state: Any, sequences: Any) -> Outputs:
    out, held = torch.zeros(u_TC.shape, dtype=torch.float64), state.double()
    for b, slot in enumerate(sequences.slots):
        window = list(held[slot].clone())
        for t in range(sequences.row_starts[b], sequences.row_starts[b + 1]):
            window.append(u_TC[t].double())
            out[t] = silu(sum((w * x for w, x in zip(weight_CK.double().T, window, strict=True)), torch.zeros(())))
            window.pop(0)
            if t == committed(sequences, b):
                held[slot] = torch.stack(window)
    return out, held


def gated_delta_rule(
    q_ThK: Any,
    k_ThK: Any,
    v_THV: Any,
    a_TH: Any,
    b_TH: Any,
    a_log_H: Any,
    dt_bias_H: Any,
    state: Any,
    sequences: Any,
    out_THV: Any,
) -> Outputs:
    out, held = out_THV.double(), state.double()
    shared = v_THV.shape[1] // k_ThK.shape[1]
    for b, slot in enumerate(sequences.slots):
        running = held[slot].clone()
        for t in range(sequences.row_starts[b], sequences.row_starts[b + 1]):
            for h in range(v_THV.shape[1]):
                q, k = q_ThK[t, h // shared].double(), k_ThK[t, h // shared].double()
                q, k = (x / torch.sqrt(x @ x + 1e-6) for x in (q, k))
                step = torch.log1p(torch.exp(a_TH[t, h].double() + dt_bias_H[h].double()))
                s = running[h] * torch.exp(-torch.exp(a_log_H[h].double()) * step)
                s = s + torch.outer(sigmoid(b_TH[t, h].double()) * (v_THV[t, h].double() - s @ k), k)
                running[h] = s
                out[t, h] = s @ q / q.shape[0] ** 0.5
            if t == committed(sequences, b):
                held[slot] = running
    return out, held, out


def gdn_step(
    u_TC: Any,
    conv_weight_CK: Any,
    conv_state: Any,
    a_TH: Any,
    b_TH: Any,
    a_log_H: Any,
    dt_bias_H: Any,
    state: Any,
    z_THV: Any,
    norm_weight_V: Any,
    sequences: Any,
    *,
    eps: float,
    activation: str,
) -> Outputs:
    (t, heads, value), key, owned = z_THV.shape, state.shape[-1], sequences.rows
    mixed, window = causal_conv(u_TC, conv_weight_CK, conv_state, sequences)
    keys, at = (u_TC.shape[1] - heads * value) // 2, slice(owned.start, owned.stop)
    q, k, v = mixed[:, :keys], mixed[:, keys : 2 * keys], mixed[:, 2 * keys :]
    rows = q.reshape(t, keys // key, key), k.reshape(t, keys // key, key), v.reshape(t, heads, value), a_TH, b_TH
    read, held, _ = gated_delta_rule(*rows, a_log_H, dt_bias_H, state, sequences, torch.zeros(z_THV.shape))
    y = torch.zeros_like(read)
    (y[at],) = gated_rms_norm(read[at], z_THV[at], norm_weight_V, eps=eps, activation=activation)
    return y, window, held


def drawn(key: int, token: int) -> float:
    """Return the noise of one token, from plain integers."""
    z = (key + (token + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    u = ((z ^ (z >> 31)) >> 12) + 0.5
    return -math.log(-math.log1p(-u / 2**52))


def draw_token(logits_RV: Any, keys_R: Any = None, temperature_R: Any = None, *, first_id: int, used: int) -> Outputs:
    scores, ids = [], []
    for r, row in enumerate(logits_RV.tolist()):
        t = 0.0 if keys_R is None else float(temperature_R[r])
        noise = [drawn(int(keys_R[r]), first_id + i) if t else 0.0 for i in range(used)]
        x = [a + t * b for a, b in zip(row, noise)]  # noqa: B905 - padding has none
        scores.append(max(x, default=-math.inf))
        ids.append(x.index(scores[-1]) if x else 0)
    finite = [all(math.isfinite(x) for x in row) for row in logits_RV.tolist()]
    return torch.tensor(finite).double(), torch.tensor(scores).double(), torch.tensor(ids).double()


def log_sum_exp(logits_RV: Any) -> Outputs:
    x = logits_RV.double()
    top = x.sort(-1).values[:, -1]
    return top, torch.exp(torch.logsumexp(x, -1) - top)


def gdn_extend(
    u_TC: Any, ba_TG: Any, z_TV: Any, pending_u: Any, pending_ba: Any, sequences: Any, extended: Any, *, rows: int
) -> Outputs:
    x = torch.zeros(rows, u_TC.shape[1] + z_TV.shape[1] + ba_TG.shape[1], dtype=torch.float64)
    kept = pending_u.double(), pending_ba.double()
    for b, slot in enumerate(extended.slots):
        own = list(range(sequences.row_starts[b], sequences.row_starts[b + 1]))
        pending = extended.row_starts[b + 1] - extended.row_starts[b] - len(own)
        for i in range(pending):
            gate = torch.zeros(z_TV.shape[1], dtype=torch.float64)
            x[extended.row_starts[b] + i] = torch.cat((pending_u[slot, i].double(), gate, pending_ba[slot, i].double()))
        for i, t in enumerate(own):
            parts = u_TC[t].double(), z_TV[t].double(), ba_TG[t].double()
            x[extended.row_starts[b] + pending + i] = torch.cat(parts)
            draft = pending + i - extended.commits[b]
            if draft >= 0:
                kept[0][slot, draft], kept[1][slot, draft] = parts[0], parts[2]
    return x, *kept


ORACLES: Mapping[str, Callable[..., Outputs]] = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "gated_rms_norm": gated_rms_norm,
    "linear": linear,
    "add_norm_linear": add_norm_linear,
    "quantise_rows": quantise_rows,
    "fp8_linear": fp8_linear,
    "silu_mul": silu_mul,
    "sigmoid_mul": sigmoid_mul,
    "shared_expert_add": shared_expert_add,
    "shared_down_add": shared_down_add,
    "moe_route": moe_route,
    "moe_experts": moe_experts,
    "qk_norm_rope": qk_norm_rope,
    "qk_norm_rope_kv_write": qk_norm_rope_kv_write,
    "kv_write": kv_write,
    "attention_prefill": attention,
    "attention_decode": attention,
    "causal_conv": causal_conv,
    "gdn_chunk": gated_delta_rule,
    "gdn_decode": gated_delta_rule,
    "gdn_extend": gdn_extend,
    "gdn_step": gdn_step,
    "draw_token": draw_token,
    "log_sum_exp": log_sum_exp,
}
