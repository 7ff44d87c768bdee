"""The tensors of a synthetic checkpoint: published names, shapes and dtypes, drawn from a seed.

Names and shapes are written out here from the published files, not from the server's own table: a mistake in either
one shows when the other reads it. Shapes are [out, in].
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rocm_serve.checkpoint.fp8 import quantise
from rocm_serve.checkpoint.initial import draw
from rocm_serve.checkpoint.synthetic_configs import Dims, Layout, MtpFormat, layer_types

_VISION_WIDTH = 64

Shapes = dict[str, tuple[int, ...]]


def tensors(layout: Layout, mtp: MtpFormat, dims: Dims, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (published name, tensor) in the order of the files."""
    fp8 = layout.endswith("fp8")
    vl = layout == "vl-fp8"
    yield from _emit("model.embed_tokens.weight", (dims.vocabulary, dims.hidden), seed, vl=vl)
    for i, kind in enumerate(layer_types(dims)):
        prefix = f"model.layers.{i}"
        shapes = _mixer(kind, dims) | _norms(dims) | _mlp(layout, dims, fused=not fp8)
        for name, shape in shapes.items():
            yield from _emit(f"{prefix}.{name}", shape, seed, vl=vl, fp8=fp8 and _is_fp8(name, vl))
    yield from _emit("model.norm.weight", (dims.hidden,), seed, vl=vl)
    yield from _emit("lm_head.weight", (dims.vocabulary, dims.hidden), seed)
    if vl:
        for name, shape in _vision().items():
            yield f"model.visual.{name}", _normal(f"model.visual.{name}", shape, seed).bfloat16()
    if mtp != "none":
        yield from _mtp(layout, mtp, dims, seed)


def _mtp(layout: Layout, mtp: MtpFormat, dims: Dims, seed: int) -> Iterator[tuple[str, Tensor]]:
    shapes: Shapes = {"fc.weight": (dims.hidden, 2 * dims.hidden)}
    shapes |= {f"{name}.weight": (dims.hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    layer = _norms(dims) | _mixer("full_attention", dims) | _mlp(layout, dims, fused=mtp == "bf16")
    shapes |= {f"layers.0.{name}": shape for name, shape in layer.items()}
    for name, shape in shapes.items():
        yield from _emit(f"mtp.{name}", shape, seed, fp8=mtp == "fp8" and _is_fp8(name, layout == "vl-fp8"))


def _emit(
    key: str, shape: tuple[int, ...], seed: int, *, vl: bool = False, fp8: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Draw tensor `key` and give it the name and dtype that the layout stores it with."""
    value = _normal(key, shape, seed)
    name = key.replace("model.", "model.language_model.", 1) if vl and key.startswith("model.") else key
    if fp8:
        weight, scale = quantise(value)
        yield name, weight
        yield f"{name}_scale_inv", scale
    elif vl and key.endswith(("A_log", "linear_attn.norm.weight")):
        yield name, value
    else:
        yield name, value.bfloat16()


def _normal(key: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw float32 values; a tensor's values depend on the seed and on its canonical name only."""
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    how = draw(key, shape)
    values = generator.standard_normal(shape, dtype=np.float32)
    if key.endswith("A_log"):
        values = generator.uniform(-1.0, 1.0, shape).astype(np.float32) * np.float32(3**0.5)
    return torch.from_numpy(values * np.float32(how.std) + np.float32(how.mean))


def _is_fp8(name: str, vl: bool) -> bool:
    if not name.endswith("_proj.weight") and "in_proj_" not in name:
        return False
    if ".experts." in name:
        return True
    return vl and not name.endswith(("in_proj_a.weight", "in_proj_b.weight"))


def _norms(dims: Dims) -> Shapes:
    return {f"{x}_layernorm.weight": (dims.hidden,) for x in ("input", "post_attention")}


def _mixer(kind: str, dims: Dims) -> Shapes:
    hidden = dims.hidden
    if kind == "full_attention":
        q, kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
        return {
            "self_attn.q_proj.weight": (2 * q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "self_attn.q_norm.weight": (dims.head_dim,),
            "self_attn.k_norm.weight": (dims.head_dim,),
        }
    key, value = dims.key_heads * dims.gdn_head_dim, dims.value_heads * dims.gdn_head_dim
    return {
        "linear_attn.in_proj_qkv.weight": (2 * key + value, hidden),
        "linear_attn.in_proj_z.weight": (value, hidden),
        "linear_attn.in_proj_b.weight": (dims.value_heads, hidden),
        "linear_attn.in_proj_a.weight": (dims.value_heads, hidden),
        "linear_attn.conv1d.weight": (2 * key + value, 1, dims.conv_kernel),
        "linear_attn.A_log": (dims.value_heads,),
        "linear_attn.dt_bias": (dims.value_heads,),
        "linear_attn.norm.weight": (dims.gdn_head_dim,),
        "linear_attn.out_proj.weight": (hidden, value),
    }


def _mlp(layout: Layout, dims: Dims, *, fused: bool) -> Shapes:
    hidden, wide = dims.hidden, dims.expert_width
    if layout == "dense":
        return _gated("mlp", dims.dense_width, hidden)
    shapes: Shapes = {"mlp.gate.weight": (dims.experts, hidden), "mlp.shared_expert_gate.weight": (1, hidden)}
    shapes |= _gated("mlp.shared_expert", dims.shared_width, hidden)
    if fused:
        shapes["mlp.experts.gate_up_proj"] = (dims.experts, 2 * wide, hidden)
        shapes["mlp.experts.down_proj"] = (dims.experts, hidden, wide)
    else:
        for e in range(dims.experts):
            shapes |= _gated(f"mlp.experts.{e}", wide, hidden)
    return shapes


def _gated(prefix: str, wide: int, hidden: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (wide, hidden),
        f"{prefix}.up_proj.weight": (wide, hidden),
        f"{prefix}.down_proj.weight": (hidden, wide),
    }


def _vision() -> Shapes:
    w = _VISION_WIDTH
    shapes: Shapes = {"patch_embed.proj.weight": (w, 3, 2, 16, 16), "patch_embed.proj.bias": (w,)}
    shapes["pos_embed.weight"] = (w, w)
    for i in range(2):
        shapes |= {f"blocks.{i}.attn.qkv.weight": (3 * w, w), f"blocks.{i}.attn.proj.weight": (w, w)}
    shapes |= {"merger.norm.weight": (w,), "merger.linear_fc1.weight": (4 * w, 4 * w)}
    return shapes
