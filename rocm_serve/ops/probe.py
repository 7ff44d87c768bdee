"""Judge one provider by numbers: its results at a model's shapes against the reference on the same device.

The reference computes sampled rows of the experts, so that their true number and the largest step can be judged in
seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from rocm_serve.ops.contract import Arguments, Op, OpFunction, OwnBound, Provider
from rocm_serve.ops.facts import OpFacts
from rocm_serve.ops.judging import BOUND, JUDGED_ROWS, bound_of, not_as_right, own_bound
from rocm_serve.ops.layouts import checked, prepared
from rocm_serve.ops.probe_cases import probe_cases

_OF_A_ROW = 4  # times as much in any one row: sparse wrong rows hide in the norm of thousands
SAMPLED = JUDGED_ROWS  # rows that the reference of a sampled op computes
# Ops whose reference takes too long for all rows (it walks the experts one by one), and their arguments of rows. A
# row's result depends on that row alone.
_SAMPLED_OPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"moe_experts": ("x_TH", "x_scale", "ids_Tk", "weights_Tk")}
)
# The argument of which one row becomes zeros, where there is one: kernels divide by its norm or its largest value.
_ZERO_ROW_OF: Mapping[str, str] = MappingProxyType(
    {
        "rms_norm": "x_TH",
        "add_rms_norm": "x_TH",
        "gated_rms_norm": "x_THD",
        "linear": "x_TK",
        "fp8_linear": "x_TK",
        "silu_mul": "gate_up_TI",
        "moe_experts": "x_TH",
        "qk_norm_rope": "q_THD",
    }
)
# Ops that every tensor-parallel rank computes for itself from the same rows (linear: the router's logits). A kernel
# whose bits change from launch to launch lets ranks choose different experts.
_SAME_ON_ALL_RANKS = ("rms_norm", "add_rms_norm", "linear", "moe_route")
_LEAST = 1e-30


@dataclass(frozen=True, slots=True)
class Passed:
    """What a provider has shown: how many calls, the largest error of one, the seconds that all took."""

    calls: int
    error: float
    seconds: float


class Refused(Exception):
    """The provider's results are not those of the op. The message says which call and how."""


def probe(
    op: Op,
    provider: Provider,
    facts: OpFacts,
    device: torch.device,
    *,
    seed: int,
    began: Callable[[str], None] = lambda case: None,
) -> Passed:
    """Call the provider with every case of the model. `began` is told each case before it is called.

    Errors: Refused, and whatever the provider raises.
    """
    start, worst, calls = time.perf_counter(), 0.0, 0
    began("loading it")
    function, told = checked(op, provider, provider.load()), facts.mapping()
    for name, case in probe_cases(op.name, facts).items():
        began(name)
        g = torch.Generator(device).manual_seed(seed + calls)
        with torch.device(device):
            made = case(g, getattr(torch, facts.dtype))
        tp = facts.tp if op.name in _SAME_ON_ALL_RANKS else 1
        own = own_bound(provider, facts.arch, told, _rows(made)) if op.name in _SAMPLED_OPS else None
        worst = max(worst, _judge(op, provider, function, made, name, tp=tp, own=own))
        calls += 1
    return Passed(calls, worst, time.perf_counter() - start)


@torch.inference_mode()
def _judge(
    op: Op, provider: Provider, function: OpFunction, made: Arguments, name: str, *, tp: int, own: OwnBound | None
) -> float:
    """Return the relative L2 of one call. With `tp` above 1 a second call must give the same bits. Errors: Refused."""
    _zero_a_row(op, made)
    rows = _sample(op, made)
    judged = _of_rows(op, made | _clones(made, op.mutates), rows)
    expected = _outputs(op, provider.semantics or op.reference, judged)
    total = None if rows is None else _rows(made)
    given = made | _clones(made, op.mutates) | prepared(op, provider, _clones(made, op.weights))
    _poison(expected, total)
    got = _outputs(op, function, given)
    if tp > 1:
        again = _outputs(op, function, given | _clones(made, op.mutates))
        if not all(_same_bits(a, b) for a, b in zip(got, again, strict=True)):
            raise Refused(f"{name}: a second call with the same numbers gives other bits: tp {tp} ranks would differ")
    if rows is not None:
        _check_all_rows(made, got, name)
        got = [x[rows] for x in got]
    if len(got) != len(expected):
        raise Refused(f"{name}: returns {len(got)} tensors, not {len(expected)}")
    return max((_compare(g, e, name, own, judged) for g, e in zip(got, expected, strict=True)), default=0.0)


def _outputs(op: Op, function: OpFunction, arguments: Arguments) -> list[torch.Tensor]:
    """Call, and return the result with the arguments that were written."""
    result: object = function(**arguments)
    results = list(result) if isinstance(result, tuple) else [result]
    if op.name == "moe_route":  # in which order a row names its choices is left to the provider
        results = [_dense(results[0], results[1], arguments["logits_TE"])]
    written = [arguments[n] for n in op.mutates if arguments.get(n) is not None]
    out = [x for x in (*results, *written) if isinstance(x, torch.Tensor)]
    assert len(out) == len(results) + len(written), f"{op.name} returned something that is no tensor"
    return out


def _dense(ids: object, weights: object, logits: object) -> torch.Tensor:
    assert isinstance(ids, torch.Tensor) and isinstance(weights, torch.Tensor) and isinstance(logits, torch.Tensor)
    out = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    return out.scatter_add_(1, ids.long(), weights.float())


def _clones(made: Arguments, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {n: v.clone() for n in names if isinstance(v := made.get(n), torch.Tensor)}


def _live(made: Arguments) -> int:
    live = made["num_rows"]
    assert isinstance(live, int | torch.Tensor)
    return int(live)


def _rows(made: Arguments) -> int:
    x = made["x_TH"]
    assert isinstance(x, torch.Tensor)
    return int(x.shape[0])


def _zero_a_row(op: Op, made: Arguments) -> None:
    x = made.get(_ZERO_ROW_OF.get(op.name, ""))
    if isinstance(x, torch.Tensor) and x.shape[0] > 2:
        x[1] = 0


def _sample(op: Op, made: Arguments) -> torch.Tensor | None:
    """Pick the rows that the reference computes, the first, the zero and the last of them; None: it computes all."""
    if op.name not in _SAMPLED_OPS:
        return None
    live, x = _live(made), made["x_TH"]
    assert isinstance(x, torch.Tensor)
    if live <= SAMPLED:
        return torch.arange(live, device=x.device)
    spread = torch.linspace(0, live - 1, SAMPLED - 1, device=x.device).long()
    return torch.cat([spread, torch.ones(1, dtype=torch.long, device=x.device)]).unique()


def _of_rows(op: Op, made: Arguments, rows: torch.Tensor | None) -> Arguments:
    if rows is None:
        return made
    cut = {n: v[rows] for n in _SAMPLED_OPS[op.name] if isinstance(v := made[n], torch.Tensor)}
    return made | cut | {"num_rows": len(rows)}


def _check_all_rows(made: Arguments, got: list[torch.Tensor], name: str) -> None:
    """Rows from `num_rows` on come out as zeros, and no other row has NaN. Errors: Refused."""
    live = _live(made)
    if got[0][live:].count_nonzero():
        raise Refused(f"{name}: rows of padding do not come out as zeros")
    if not got[0].isfinite().all():
        raise Refused(f"{name}: some rows are not finite")


def _poison(like: list[torch.Tensor], total: int | None) -> None:
    """Leave NaN in the memory that the next allocations of such sizes get: a row that is not written shows.

    `total`: rows that the provider returns where those of the reference are a sample.
    """
    for x in like:
        if x.is_floating_point() and x.dtype.itemsize > 1:
            shape = x.shape if total is None else (total, *x.shape[1:])
            torch.full(shape, float("nan"), dtype=x.dtype, device=x.device)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())


def _compare(got: torch.Tensor, expected: torch.Tensor, name: str, own: OwnBound | None, made: Arguments) -> float:
    bound = bound_of(own)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise Refused(f"{name}: returns {got.dtype} {tuple(got.shape)}, not {expected.dtype} {tuple(expected.shape)}")
    g, e = got.double(), expected.double()
    strange = (g.isfinite() != e.isfinite()).sum().item()
    if strange:
        raise Refused(f"{name}: {strange} of {g.numel()} numbers are finite on one side only")
    g, e = g.nan_to_num(0, 0, 0), e.nan_to_num(0, 0, 0)
    if not g.numel():
        return 0.0
    error = _relative((g - e).norm().item(), e.norm().item())
    if error > bound:
        raise Refused(f"{name}: relative L2 {error:.1e} to the reference; legal: up to {bound:g}")
    per_row = (g - e).view(len(g), -1).norm(dim=1), e.view(len(g), -1).norm(dim=1)
    ratio = torch.where(per_row[0] == 0, 0.0, per_row[0] / per_row[1].clamp_min(_LEAST))
    worst = ratio.max().item()
    if worst > _OF_A_ROW * bound:
        row, legal = int(ratio.argmax()), _OF_A_ROW * bound
        raise Refused(f"{name}: row {row} has relative L2 {worst:.1e} to the reference; legal: up to {legal:g}")
    if own is not None and (error > BOUND or worst > _OF_A_ROW * BOUND):
        why = not_as_right(own, got, expected, made)
        if why is not None:
            raise Refused(f"{name}: relative L2 {error:.1e} to the reference, and {why}")
    return error


def _relative(difference: float, size: float) -> float:
    return difference / size if size else difference
