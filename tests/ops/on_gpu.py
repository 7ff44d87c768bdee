"""Running a provider on this machine's GPU, judged by the reference on the CPU.

`python -m tests.ops.on_gpu I N` calls every N-th case, so that several processes compile at once what the tests need:
Triton keeps what it compiled on disk.
"""

from __future__ import annotations

import os
import secrets
import sys
import traceback
import zlib
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

import torch

from rocm_serve.ops import fp8
from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.bind import OPS
from rocm_serve.ops.contract import Arguments, Facts, Op, OwnBound
from rocm_serve.ops.judging import BOUND, bound_of, not_as_right, own_bound
from rocm_serve.platform.probe import gpus_seen_by_torch
from tests.ops.poison import poison_, poisoned
from tests.ops.test_references import error

SEED_VARIABLE = "ROCM_SERVE_TEST_SEED"
SEED = int(os.environ.get(SEED_VARIABLE) or secrets.randbits(31))
DTYPES = (torch.float32, torch.bfloat16)
# The fact that tells a row's width, and the argument that has it.
WIDTHS = {
    "rms_norm": ("hidden_size", "x_TH"),
    "add_rms_norm": ("hidden_size", "x_TH"),
    "gated_rms_norm": ("value_dim", "x_THD"),
    "qk_norm_rope": ("head_dim", "q_THD"),
}
BF16_LIMIT = 5e-3  # relative L2 against the reference of the same semantics, which rounds as well


# The 2.4T model on one of eight ranks, where a matrix is cut; rows that choose each size of a tile.
LINEARS = ((2560, 8192), (512, 2048))
LINEAR_ROWS = (1, 20, 60, 300)
LOGITS = 31_041
EXPERT_ROWS = (1, 37, 1000, 4000)


@cache
def arch() -> str:
    return gpus_seen_by_torch().arch if torch.cuda.is_available() else ""


def fp8_dtype() -> torch.dtype:
    return torch.float8_e4m3fnuz if arch() == "gfx942" else torch.float8_e4m3fn


def every_case() -> list[tuple[str, str, str, torch.dtype]]:
    """List (op, provider, case, dtype) of what this GPU's providers accept; everything where there is no GPU."""
    return [
        (name, provider.name, case, dtype)
        for name, op in OPS.items()
        for provider in op.others
        for case in op.cases
        for dtype in DTYPES
        if not arch() or provider.refusal(arch(), facts(name, case, dtype)) is None
    ]


def facts(name: str, case: str, dtype: torch.dtype) -> Facts:
    """Return what a provider that takes some widths only is told of a model."""
    told = {"dtype": str(dtype).removeprefix("torch.")}
    if name not in WIDTHS:
        return told
    fact, argument = WIDTHS[name]
    return told | {fact: arguments(name, case, dtype)[argument].shape[-1]}  # type: ignore[attr-defined]


def limit(op: Op, provider: str, made: Arguments, dtype: torch.dtype) -> float:
    """Bfloat16: the project's bound. float32: both sides lie within the op's tolerance of the exact result."""
    tol = op.tol[str(dtype).removeprefix("torch.")].rel
    usual = 2 * tol if dtype == torch.float32 else min(BF16_LIMIT, 2 * tol)
    own = own_bound_here(op, provider, made)
    return usual if own is None else own.rel


def own_bound_here(op: Op, provider: str, made: Arguments) -> OwnBound | None:
    """Return the bound that the provider has for itself on this GPU."""
    rows, dtype = made.get("x_TH"), made.get("out_dtype")
    if not isinstance(rows, torch.Tensor):
        return None
    told = {
        "dtype": str(dtype or rows.dtype).removeprefix("torch."),
        "activation": made.get("activation"),
        "expert_fp8": made.get("w13_scale") is not None,
    }
    return own_bound(op.providers[provider], arch(), told, len(rows))


def why_wrong(op: str, got: torch.Tensor, expected: torch.Tensor, made: Arguments) -> str | None:
    """Say why what Triton returns is not right, as the probe would; None: it is."""
    own, found = own_bound_here(OPS[op], "triton", made), error(got.float(), expected.double())
    if found > bound_of(own):
        return f"{op}: relative L2 {found:.2e} > {bound_of(own):.1e}"
    return None if own is None or found <= BOUND else not_as_right(own, got, expected, made)


def moved(x: Any) -> Any:
    """Move tensors, also those inside Sequences, to the GPU, with their strides; what lies between is poisoned."""
    if isinstance(x, Sequences):
        tensors = {f.name: getattr(x, f.name) for f in fields(x)}
        return replace(x, **{k: v.cuda() for k, v in tensors.items() if isinstance(v, torch.Tensor)})
    if not isinstance(x, torch.Tensor) or x.is_cuda:
        return x
    if x.is_contiguous():
        return x.cuda()
    y = poison_(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda"))
    return y.copy_(x)


def in_dialect(made: Arguments) -> Arguments:
    """Turn e4m3fn into what the GPU's matrix cores read, and the multipliers with it."""
    held = [v.dtype if isinstance(v, torch.Tensor) else v for v in made.values()]
    if arch() != "gfx942" or torch.float8_e4m3fn not in held:
        return made
    turned = dict(made)
    for name, value in made.items():
        if value is torch.float8_e4m3fn:
            turned[name] = torch.float8_e4m3fnuz
        elif isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn:
            turned[name] = fp8.fn_to_fnuz(value)
        elif name.endswith("scale") and (isinstance(value, torch.Tensor) or name in ("k_scale", "v_scale")):
            turned[name] = value * 2  # type: ignore[operator]
    return turned


def arguments(name: str, case: str, dtype: torch.dtype) -> Arguments:
    """Draw the inputs of a case, others in every run: the seed is in the message of a failure."""
    seed = zlib.crc32(f"{SEED} {name} {case} {dtype}".encode())
    return in_dialect(OPS[name].cases[case](torch.Generator().manual_seed(seed), dtype))


def outputs(op: Op, provider: str, made: Arguments) -> list[torch.Tensor]:
    """Call a provider on the GPU; return its result and the arguments that it writes."""
    given = {k: moved(v) for k, v in made.items()}
    chosen = op.providers[provider]
    if chosen.prepare_weights:
        held = {k: given[k] for k in op.weights if isinstance(given.get(k), torch.Tensor)}
        given |= chosen.prepare_weights(held)
    function = chosen.load()
    with poisoned():
        result = function(**given)
    torch.cuda.synchronize()
    results = list(result) if isinstance(result, tuple) else [result]
    return results + [given[name] for name in op.mutates if given.get(name) is not None]


def real_calls() -> list[tuple[str, Callable[[], Arguments]]]:
    """List the calls of test_triton_gpu.py that have the 2.4T model's sizes, on zeros."""

    def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    def fp8_linear(rows: int, n: int, k: int, activation: str) -> Arguments:
        x, weight = zeros(torch.bfloat16, rows, k), zeros(fp8_dtype(), n, k)
        return {
            "x_TK": x,
            "weight_NK": weight,
            "scale": zeros(torch.float32, n // 128, k // 128),
            "activation": activation,
        }

    def logits(rows: int) -> Arguments:
        x, weight = zeros(torch.bfloat16, rows, 8192), zeros(torch.bfloat16, LOGITS, 8192)
        return {"x_TK": x, "weight_NK": weight, "out_dtype": torch.float32}

    def experts(rows: int, activation: str) -> Arguments:
        ids = zeros(torch.int32, rows, 10)
        return {
            **{"x_TH": zeros(torch.bfloat16, rows, 8192), "ids_Tk": ids, "weights_Tk": ids.float(), "num_rows": rows},
            **{"w13_EIH": zeros(fp8_dtype(), 512, 512, 8192), "w13_scale": zeros(torch.float32, 512, 4, 64)},
            **{"w2_EHI": zeros(fp8_dtype(), 512, 8192, 256), "w2_scale": zeros(torch.float32, 512, 64, 2)},
            "activation": activation,
        }

    calls: list[tuple[str, Callable[[], Arguments]]] = []
    for activation in ("bf16", "fp8_1x128"):
        calls += [("moe_experts", partial(experts, rows, activation)) for rows in EXPERT_ROWS]
        for n, k in LINEARS:
            calls += [("fp8_linear", partial(fp8_linear, rows, n, k, activation)) for rows in LINEAR_ROWS]
    return calls + [("linear", partial(logits, rows)) for rows in LINEAR_ROWS]


def compile_ahead(index: int, count: int) -> None:
    calls: list[Callable[[], Any]] = [
        partial(lambda op, made: OPS[op].providers["triton"].load()(**made()), op, made) for op, made in real_calls()
    ]
    calls += [
        partial(lambda n, p, c, d: outputs(OPS[n], p, arguments(n, c, d)), name, provider, case, dtype)
        for name, provider, case, dtype in every_case()
    ]
    for call in calls[index::count]:
        try:
            call()
        except Exception:  # the test of this case meets it too, and fails
            traceback.print_exc()


if __name__ == "__main__":
    compile_ahead(int(sys.argv[1]), int(sys.argv[2]))
