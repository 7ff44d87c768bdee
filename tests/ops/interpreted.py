"""Triton kernels on CPU tensors, by Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.ops.interpreted`.

Prints one JSON object: by name of a check, the relative L2 errors of its outputs, or a sentence about what is wrong.
The interpreter proves indices, masks and tails. It does not prove numerics: it truncates to bf16 and loses the carry
when it rounds to FP8, so all rows are float32, and quantised ones hold values that FP8 holds exactly.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from rocm_serve.ops import fp8
from rocm_serve.ops.bind import OPS
from rocm_serve.ops.inputs import block_fp8, normal
from tests.ops.poison import poisoned

Check = Callable[[torch.Generator], "list[float] | str"]
F32 = torch.float32


def errors(op: str, provider: Callable[..., Any], made: dict[str, Any], **other: Any) -> list[float]:
    """Relative L2 of every output; `other` replaces arguments for the reference."""
    ours, theirs = ({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in made.items()} for _ in range(2))
    for name, value in made.items():  # clone() makes strided tensors dense
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            ours[name] = torch.full((value.untyped_storage().nbytes() // value.itemsize,), float("nan")).as_strided(
                value.shape, value.stride()
            )
            ours[name].copy_(value)
    with poisoned():
        got = provider(**ours)
    expected = OPS[op].reference(**(theirs | other))
    pairs = list(zip(*(x if isinstance(x, tuple) else (x,) for x in (got, expected)), strict=True))
    pairs += [(ours[name], theirs[name]) for name in OPS[op].mutates]
    found = []
    for g, e in pairs:
        assert g.shape == e.shape and g.dtype == e.dtype, (g.shape, e.shape, g.dtype, e.dtype)
        size = e.double().norm().item()
        found.append((g.double() - e.double()).norm().item() / (size or 1.0))
    return found


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return the same values as the middle columns of a wider tensor."""
    held = torch.full((*x.shape[:-1], x.shape[-1] + 24), float("nan"))
    held[..., 8:-16] = x
    return held[..., 8:-16]


def exact_rows(g: torch.Generator, t: int, k: int) -> torch.Tensor:
    """Return rows that lose nothing when they are quantised per 128 columns: e4m3 values, each block's largest 448."""
    codes = torch.randint(0, 0x7F, (t, k), generator=g).to(torch.uint8)
    x = codes.view(torch.float8_e4m3fn).float() * (torch.randint(0, 2, (t, k), generator=g) * 2.0 - 1.0)
    x[:, ::128] = 448.0
    return x * 2.0 ** torch.randint(-9, 3, (t, 1), generator=g)


def rms_norm(g: torch.Generator) -> list[float]:
    from rocm_serve.ops.rms_norm import triton

    made = {"x_TH": wide(normal(g, 5, 259)), "weight_H": normal(g, 259), "eps": 1e-5, "plus_one": True}
    heads = {"x_TH": wide(normal(g, 3, 2, 64)), "weight_H": normal(g, 64), "eps": 0.1, "plus_one": False}
    return errors("rms_norm", triton.rms_norm, made) + errors("rms_norm", triton.rms_norm, heads)


def add_rms_norm(g: torch.Generator) -> list[float]:
    from rocm_serve.ops.rms_norm.triton import add_rms_norm as provider

    made = {"x_TH": normal(g, 9, 130), "residual_TH": wide(normal(g, 9, 130)), "weight_H": normal(g, 130)}
    return errors("add_rms_norm", provider, made | {"eps": 1e-5, "plus_one": True})


def gated_rms_norm(g: torch.Generator) -> list[float]:
    from rocm_serve.ops.gated_rms_norm.triton import gated_rms_norm as provider

    gate = torch.cat([torch.full((5, 7), float("nan")), normal(g, 5, 120)], 1)[:, 7:].view(5, 3, 40)
    made = {"x_THD": normal(g, 5, 3, 40), "gate_THD": gate, "weight_D": normal(g, 40), "eps": 1e-5}
    return [
        error
        for activation in ("silu", "sigmoid")
        for error in errors("gated_rms_norm", provider, made | {"activation": activation})
    ]


def silu_mul(g: torch.Generator) -> list[float]:
    from rocm_serve.ops.silu_mul.triton import silu_mul as provider

    return errors("silu_mul", provider, {"gate_up_TI": wide(normal(g, 5, 102))}) + errors(
        "silu_mul", provider, {"gate_up_TI": normal(g, 2, 5000)}
    )


def sigmoid_mul(g: torch.Generator) -> list[float]:
    from rocm_serve.ops.sigmoid_mul.triton import sigmoid_mul as provider

    x = wide(normal(g, 5, 51))
    return errors("sigmoid_mul", provider, {"x_TH": x, "gate": wide(normal(g, 5, 51))}) + errors(
        "sigmoid_mul", provider, {"x_TH": x, "gate": wide(normal(g, 5, 1))}
    )


def quantise_rows(g: torch.Generator) -> list[float] | str:
    from rocm_serve.ops.triton_common.triton import quantise_rows as provider

    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        x = wide(exact_rows(g, 5, 300) / (1.0 if dtype == torch.float8_e4m3fn else 2.0))
        if dtype == torch.float8_e4m3fnuz:
            x[x.abs() < 2.0**-12] = 0.0
        x[3, 128:256] = 0.0
        with poisoned():
            q, s = provider(x, dtype)
        expected_q, expected_s = fp8.quantise_rows(x, dtype)
        if not torch.equal(s, expected_s):
            return f"{dtype}: multipliers differ"
        if not torch.equal(q.float(), expected_q.float()):
            return f"{dtype}: values differ"
        x[2, 130] = float("nan")
        if provider(x, dtype)[1].isnan().nonzero().tolist() != [[2, 1]]:
            return f"{dtype}: a NaN is not seen in the multiplier of its block alone"
    return [0.0]


def linear(g: torch.Generator) -> list[float]:
    from rocm_serve.ops.linear.triton import linear as provider

    made = {"x_TK": wide(normal(g, 19, 101)), "weight_NK": wide(normal(g, 67, 101)), "out_dtype": torch.float64}
    return errors("linear", provider, made)


def fp8_linear(g: torch.Generator) -> list[float]:
    from rocm_serve.ops.fp8_linear.triton import fp8_linear as provider

    found = []
    for t, k, n in ((5, 200, 130), (17, 256, 128)):
        weight, scale = block_fp8(g, n, k, scale=k**-0.5)
        made = {"weight_NK": weight, "scale": scale}
        found += errors("fp8_linear", provider, made | {"x_TK": wide(normal(g, t, k)), "activation": "bf16"})
        found += errors("fp8_linear", provider, made | {"x_TK": exact_rows(g, t, k), "activation": "fp8_1x128"})
    return found


def moe_route(g: torch.Generator) -> list[float] | str:
    from rocm_serve.ops.moe_route.triton import moe_route as provider

    found = errors(
        "moe_route", provider, {"logits_TE": wide(normal(g, 5, 27)), "top_k": 5, "renormalise": True}
    ) + errors(
        "moe_route",
        provider,
        {"logits_TE": torch.randint(0, 3, (4, 32), generator=g).float(), "top_k": 6, "renormalise": False},
    )
    found += errors("moe_route", provider, {"logits_TE": normal(g, 2, 8), "top_k": 8, "renormalise": True})
    logits = normal(g, 2, 27)
    logits[1, 3] = float("nan")
    ids, weights = provider(logits, top_k=4, renormalise=True)
    if not (weights[1].isnan().all() and weights[0].isfinite().all()):
        return "a NaN among the logits is not seen in the weights of its row alone"
    if not ((ids >= 0) & (ids < 27)).all():
        return f"ids that no expert has: {ids.tolist()}"
    return found


def sort_choices(g: torch.Generator) -> list[float] | str:
    from rocm_serve.ops.moe_experts import triton

    for t, k, experts, live, tile in ((1, 1, 1, 1, 16), (37, 3, 5, 30, 16), (700, 2, 3, 700, 32), (9, 4, 40, 0, 16)):
        ids = torch.randint(-2, experts + 2, (t, k), generator=g).to(torch.int32)
        for rows in (live, torch.tensor([live])):
            with poisoned():
                order = triton.sort_choices(ids, rows, experts, tile)
            flat, at = ids.flatten()[: live * k], 0
            for expert in range(experts):
                own = (flat == expert).nonzero().flatten().tolist()
                for first in range(0, len(own), tile):
                    held = own[first : first + tile] + [t * k] * (tile - len(own[first : first + tile]))
                    if order.choices[at * tile : (at + 1) * tile].tolist() != held:
                        return f"tile {at} of {(t, k, experts, live, tile)} holds other choices than {held}"
                    if order.expert_of_tile[at] != expert:
                        return f"tile {at} is not of expert {expert}"
                    at += 1
            if order.num_tiles.tolist() != [at] or at > order.max_tiles:
                return f"{order.num_tiles.tolist()} tiles of at most {order.max_tiles}, not {at}"
    return [0.0]


def moe_case(g: torch.Generator, t: int, h: int, i: int, e: int, k: int, *, block: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"x_TH": wide(normal(g, t, h)), "activation": "bf16", "num_rows": t}
    made["ids_Tk"] = torch.stack([torch.randperm(e, generator=g)[:k] for _ in range(t)]).to(torch.int32)
    made["weights_Tk"] = torch.rand(t, k, generator=g)
    if not block:
        w13, w2 = normal(g, e, 2 * i, h, scale=h**-0.5), normal(g, e, h, i, scale=i**-0.5)
        return made | {"w13_EIH": w13, "w2_EHI": w2}
    (w13, s13), (w2, s2) = block_fp8(g, e, 2 * i, h, scale=h**-0.5), block_fp8(g, e, h, i, scale=i**-0.5)
    return made | {"w13_EIH": w13, "w13_scale": s13, "w2_EHI": w2, "w2_scale": s2}


def moe_experts(g: torch.Generator) -> list[float]:
    from rocm_serve.ops.moe_experts.triton import moe_experts as provider

    made = moe_case(g, 9, 72, 40, 5, 2, block=False)
    made["ids_Tk"][2] = -1
    made["ids_Tk"][4, 1] = -1
    made["num_rows"] = torch.tensor([7], dtype=torch.int32)
    none = made | {"num_rows": 0}
    return errors("moe_experts", provider, made) + errors("moe_experts", provider, none)


def moe_experts_fp8_weights(g: torch.Generator) -> list[float]:
    """An expert width of 192: the rows of gate and up meet inside a block of scales."""
    from rocm_serve.ops.moe_experts.triton import moe_experts as provider

    return errors("moe_experts", provider, moe_case(g, 5, 160, 192, 3, 2, block=True))


def moe_experts_in_panels(g: torch.Generator) -> list[float]:
    from rocm_serve.ops.moe_experts import triton

    with mock.patch.object(triton, "_RETURNED_BYTES", 4 * 128 * 12):
        return errors("moe_experts", triton.moe_experts, moe_case(g, 6, 300, 32, 4, 2, block=False))


def moe_experts_fp8_rows(g: torch.Generator) -> list[float]:
    """The hidden rows are rounded as the interpreter does it: this shows that nothing is misplaced, not more."""
    from rocm_serve.ops.moe_experts.triton import moe_experts as provider

    made = moe_case(g, 5, 256, 128, 3, 2, block=True) | {"x_TH": exact_rows(g, 5, 256), "activation": "fp8_1x128"}
    return errors("moe_experts", provider, made)


def moe_experts_sent_rows(g: torch.Generator) -> str | list[float]:
    """The bits of the rows that are quantised in place; dead rows hold what was there before."""
    from rocm_serve.ops.moe_experts.triton import moe_experts as provider

    made = moe_case(g, 9, 256, 128, 3, 2, block=True) | {"x_TH": exact_rows(g, 9, 256), "activation": "fp8_1x128"}
    made["ids_Tk"][3, 1] = -1
    rows, scales = fp8.quantise_rows(made["x_TH"], torch.float8_e4m3fn)
    rows[7:], scales[7:] = float("nan"), float("nan")
    sent = made | {"x_TH": rows, "x_scale": wide(scales), "out_dtype": F32}
    for live in (7, torch.tensor([7], dtype=torch.int32)):
        with poisoned():
            ours, plain = provider(**sent | {"num_rows": live}), provider(**made | {"num_rows": live})
        if ours.dtype != F32 or not torch.equal(ours, plain):
            return f"other bits than for the rows before: {(ours != plain).sum()} of {ours.numel()}"
    return [0.0]


# How large an error may be: float32 sums in another order, or what the interpreter's rounding costs.
LIMITS: dict[str, float] = dict.fromkeys(
    (
        "rms_norm",
        "add_rms_norm",
        "gated_rms_norm",
        "silu_mul",
        "sigmoid_mul",
        "quantise_rows",
        "linear",
        "fp8_linear",
        "moe_route",
        "sort_choices",
        "moe_experts",
        "moe_experts_fp8_weights",
        "moe_experts_in_panels",
        "moe_experts_sent_rows",
    ),
    2e-6,
) | {"moe_experts_fp8_rows": 0.15}


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main() -> None:
    seed = int(sys.argv[1])
    with one_thread():
        found = {name: globals()[name](torch.Generator().manual_seed(seed)) for name in LIMITS}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
