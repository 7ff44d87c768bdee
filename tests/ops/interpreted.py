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

from rocm_serve.ops import fp8, tiles
from rocm_serve.ops.bind import OPS
from rocm_serve.ops.inputs import block_fp8, normal
from tests.ops.interpreting import patched_once
from tests.ops.poison import poisoned

Check = Callable[[torch.Generator], "list[float] | str"]
F32 = torch.float32


def errors(op: str, provider: Callable[..., Any], made: dict[str, Any], **other: Any) -> list[float]:
    """Relative L2 of every output; `other` replaces arguments for the reference."""
    ours, theirs = ({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in made.items()} for _ in range(2))
    for name, value in made.items():  # clone() makes strided tensors dense
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            held = torch.full((value.untyped_storage().nbytes() // value.itemsize,), float("nan"), dtype=value.dtype)
            ours[name] = held.as_strided(value.shape, value.stride())
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
    return (
        errors("sigmoid_mul", provider, {"x_TH": x, "gate": wide(normal(g, 5, 51))})
        + errors("sigmoid_mul", provider, {"x_TH": x, "gate": wide(normal(g, 5, 1))})
        + errors("sigmoid_mul", provider, {"x_TH": normal(g, 5, 3, 40), "gate": wide(normal(g, 5, 3, 80))[..., 40:]})
    )


def shared_expert_add(g: torch.Generator) -> list[float]:
    """Columns of a row in several programs, more of a row than is multiplied at once, and rows that have one each."""
    from rocm_serve.ops.shared_expert_add import triton
    from rocm_serve.ops.shared_expert_add.cases import shared_case

    found = []
    for rows, width, few in ((3, 1100, 64), (2, 2100, 64), (3, 2100, 2)):
        made = shared_case(g, F32, t=rows, h=width)
        made |= {name: wide(made[name]) for name in ("routed_TH", "shared_TH", "x_TH")}
        with mock.patch.object(triton, "_FEW_ROWS", few):
            found += errors("shared_expert_add", triton.shared_expert_add, made)
    return found


def quantise_rows(g: torch.Generator) -> list[float] | str:
    """Dividing each number, and by the inverse of a block's multiplier."""
    from rocm_serve.ops.triton_common import triton

    for inverse in (0, 1):
        tile = {"BLOCKS": 4, "INVERSE": inverse, "num_warps": 1}
        with mock.patch.object(triton, "quantise_rows_tile", lambda rows, tile=tile: tile):
            why = _wrongly_quantised(g, triton.quantise_rows)
        if why:
            return f"INVERSE {inverse}: {why}"
    return [0.0]


def _wrongly_quantised(g: torch.Generator, provider: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> str:
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
        x[2, 130], x[1, 3] = 1.0, float("inf")
        if provider(x, dtype)[0][1, :128].float().nan_to_num(0.0).count_nonzero() > 1:  # the infinite number itself
            return f"{dtype}: beside an infinite number others are not zeros"
    return ""


def linear(g: torch.Generator) -> list[float]:
    from rocm_serve.ops.linear.triton import linear as provider

    made = {"x_TK": wide(normal(g, 19, 101)), "weight_NK": wide(normal(g, 67, 101)), "out_dtype": torch.float64}
    found = errors("linear", provider, made)
    whole = {"x_TK": wide(normal(g, 3, 256)), "weight_NK": normal(g, 40, 256), "out_dtype": None}
    for sizes in ((0, 8, 64, 1), (0, 4, 512, 1), (16, 16, 32, 1), (16, 32, 16, 3), (32, 16, 128, 2)):
        tile = dict(zip(("BM", "BN", "BK", "SPLITS"), sizes, strict=True))
        with tiles.forced("linear", {"FEW": 1, "AHEAD": 0, "num_warps": 1, "num_stages": 1, **tile}):
            for _ in range(2):  # counters are left as they were found
                found += errors("linear", provider, made) + errors("linear", provider, whole)
    with tiles.forced("linear", {"VENDOR": 1}):
        found += errors("linear", provider, whole)
    return found


def add_norm_linear(g: torch.Generator) -> list[float]:
    """Rows apart; columns and rows of the weight that fill no tile, and those that fill some."""
    from rocm_serve.ops.add_norm_linear.cases import add_norm_linear_case
    from rocm_serve.ops.add_norm_linear.triton import add_norm_linear as provider

    found = []
    for rows, width, n, eps, plus_one in ((1, 101, 37, 0.1, True), (3, 128, 16, 1e-6, False), (4, 128, 19, 1e-6, True)):
        made = add_norm_linear_case(g, F32, t=rows, h=width, n=n, eps=eps, plus_one=plus_one)
        made |= {name: wide(made[name]) for name in ("x_TH", "residual_TH", "weight_NH", "total_TH")}
        with tiles.forced("add_norm_linear", {"BN": 8, "num_warps": 1, "num_stages": 1}):
            found += errors("add_norm_linear", provider, made)
    return found


def shared_down_add(g: torch.Generator) -> list[float]:
    """Gate, up and what opens the shared expert are pieces of one product's rows."""
    from rocm_serve.ops.shared_down_add.cases import down_case
    from rocm_serve.ops.shared_down_add.triton import shared_down_add as provider

    found = []
    whole = {"BN": 8, "num_warps": 1, "num_stages": 1}
    for rows, width, n, more in ((1, 51, 37, {}), (3, 64, 19, {}), (4, 64, 16, {}), (19, 51, 37, {"BM": 16, "BK": 32})):
        made = down_case(g, F32, t=rows, i=width, h=n)
        made |= {name: wide(made[name]) for name in ("routed_TH", "gate_up_TI", "gate_T1", "weight_HI")}
        with tiles.forced("shared_down_add", whole | more):
            found += errors("shared_down_add", provider, made)
    return found


def fp8_linear(g: torch.Generator) -> list[float]:
    from rocm_serve.ops.fp8_linear.triton import fp8_linear as provider

    found = []
    for t, k, n in ((5, 200, 130), (17, 256, 128)):
        weight, scale = block_fp8(g, n, k, scale=k**-0.5)
        made = {"weight_NK": weight, "scale": scale}
        found += errors("fp8_linear", provider, made | {"x_TK": wide(normal(g, t, k)), "activation": "bf16"})
        found += errors("fp8_linear", provider, made | {"x_TK": exact_rows(g, t, k), "activation": "fp8_1x128"})
    return found


def fp8_linear_in_tiles(g: torch.Generator) -> list[float] | str:
    """More tiles of rows than are side by side, a program for each and few programs; blocks and rows that are cut.

    Weights are whole; rows of whole 16 bytes, which a descriptor reads; and rows that only the form for all rows reads.
    """
    from rocm_serve.ops.fp8_linear.triton import fp8_linear as provider

    found = []
    tile = {"MANY": 1, "BM": 16, "BK": 128, "REGS": 1, "num_warps": 4, "num_stages": 1}
    for (t, k, n), apart, sizes in (
        ((37, 200, 130), 0, {"BN": 64, "PARTS": 2, "GROUP": 2, "PROGRAMS": 0, "DESC": 0}),
        ((37, 256, 144), 16, {"BN": 64, "PARTS": 4, "GROUP": 2, "PROGRAMS": 2, "DESC": 1}),
        ((17, 256, 384), 0, {"BN": 64, "PARTS": 4, "GROUP": 8, "PROGRAMS": 3, "DESC": 0}),
        ((5, 128, 128), 0, {"BN": 128, "PARTS": 1, "GROUP": 1, "PROGRAMS": 9, "DESC": 1}),
        ((5, 128, 128), 8, {"BN": 128, "PARTS": 1, "GROUP": 1, "PROGRAMS": 0, "DESC": 1}),
        ((5, 128, 128), 16, {"BN": 128, "PARTS": 1, "GROUP": 1, "PROGRAMS": 0, "DESC": 0}),
    ):
        weight, scale = block_fp8(g, n, k, scale=k**-0.5)
        weight = torch.cat([weight, weight[:, :apart]], 1)[:, :k]
        made = {"weight_NK": weight, "scale": scale, "x_TK": wide(exact_rows(g, t, k)), "activation": "fp8_1x128"}
        with tiles.forced("fp8_linear", tile | sizes):
            found += errors("fp8_linear", provider, made)
            none = provider(**made | {"x_TK": made["x_TK"][:0]})
        if none.shape != (0, n):
            return f"no rows give {tuple(none.shape)}"
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


# How large an error may be: float32 sums in another order.
LIMITS: dict[str, float] = dict.fromkeys(
    (
        "rms_norm",
        "add_rms_norm",
        "gated_rms_norm",
        "silu_mul",
        "sigmoid_mul",
        "shared_expert_add",
        "quantise_rows",
        "linear",
        "add_norm_linear",
        "shared_down_add",
        "fp8_linear",
        "fp8_linear_in_tiles",
        "moe_route",
    ),
    2e-6,
)


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
    with one_thread(), patched_once():
        found = {name: globals()[name](torch.Generator().manual_seed(seed)) for name in LIMITS}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
