"""Which ops are measured at which sizes, the ones with an aim first, and how one of them is judged and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import isfinite

import torch

from evals.bench_gpu.records import OpRecord
from rocm_serve.tuning import cases
from rocm_serve.tuning.cases import Case
from rocm_serve.tuning.floor import Ceilings
from rocm_serve.tuning.operands import Bench
from rocm_serve.tuning.timing import Timing, time_calls

NOT_FINITE = 1e9  # stands for an error that JSON has no number for
MANY_ROWS = (4096, 8192, 16384)
_LINEARS = ("in_proj_qkvz", "out_proj", "qkv_proj", "o_proj", "gate", "shared gate_up", "shared down")
_AIMED_CONTEXTS = (8192, 65536)  # of attention, at a batch of 16

_LONG_CONTEXT = 30 << 10
_LONGEST = 65536  # of the delta rule
_SHORT = (64, 128)  # so many prompts of so many rows

_OP_OF = {"lm_head + draw": "linear"}

Make = partial[Case]


def op_points(batches: Sequence[int], contexts: Sequence[int], many: Sequence[int] = MANY_ROWS) -> Iterator[Make]:
    """Yield what makes each case: ops with an aim, then the rest; a batch of 8 comes last of all."""
    ordered = sorted(batches, key=lambda b: (b == 8, b))
    if 16 in batches:
        yield from (partial(cases.attention, rows=16, context=context) for context in _AIMED_CONTEXTS)
    for rows in ordered:
        yield partial(cases.experts, rows=rows)
        yield partial(cases.step, rows=rows)
        yield partial(cases.gdn, rows=rows)
    for rows in many:
        yield partial(cases.norms, rows=rows, residual=False)
        yield partial(cases.norms, rows=rows, residual=True)
        yield partial(cases.kv_write, rows=rows)
        yield partial(cases.quantise, rows=rows)
    for rows in ordered:
        for name in _LINEARS:
            yield partial(cases.linear, rows=rows, name=name)
        yield partial(cases.head, rows=rows)
        yield partial(cases.conv, rows=rows)
        yield partial(cases.route, rows=rows)
        yield partial(cases.qk, rows=rows)
        yield partial(cases.shared_add, rows=rows)
        yield partial(cases.norms, rows=rows, residual=True)
    for context in contexts:
        for rows in ordered:
            if (rows, context) not in {(16, aimed) for aimed in _AIMED_CONTEXTS} and (context < 32768 or rows <= 64):
                yield partial(cases.attention, rows=rows, context=context)


def prompt_points(rows: Sequence[int], most: int = 1 << 30) -> Iterator[Make]:
    """Yield the same for prompts of so many rows: ops with an aim in the order given, then the rest.

    `most`: cuts every size, for a trial of this program.
    """
    rows = [min(count, most) for count in rows]
    short = {"rows": min(_SHORT[1], most), "count": min(_SHORT[0], most)}
    for make in (cases.experts, cases.attention_prefill, cases.gdn_chunk):
        yield from (partial(make, rows=count) for count in rows)
    yield partial(cases.gdn_chunk, rows=min(_LONGEST, most))
    yield partial(cases.gdn_chunk, **short)
    yield partial(cases.attention_prefill, **short)
    yield partial(cases.attention_prefill, rows=min(2048, most), context=min(_LONG_CONTEXT, most))
    for count in rows:
        yield partial(cases.prompt_conv, rows=count)
        yield partial(cases.norms, rows=count, residual=True)
        yield partial(cases.route, rows=count)
        yield partial(cases.qk, rows=count)
        yield partial(cases.shared_add, rows=count)
        yield from (partial(cases.linear, rows=count, name=name) for name in _LINEARS)
        yield from (partial(cases.fp8_linear, rows=count, name=name) for name in ("in_proj_qkvz", "out_proj"))


@torch.inference_mode()
def measure(bench: Bench, shape: str, make: Make, ceilings: Ceilings) -> OpRecord:
    """Judge one case and time it and its peers; ours once more after the peers, so that a drift shows."""
    case = make(bench)
    for call in case.calls:
        call()
    error = case.check()
    ours = time_calls(case.calls, bench.device)
    peers, failed = {}, {}
    for name, calls in case.peers.items():
        try:
            peers[name] = _timed(calls, bench.device).median
        except Exception as error_:  # another library's kernel need not have this size
            failed[name] = f"{type(error_).__name__}: {error_}".splitlines()[0][:200]
    again = time_calls(case.calls, bench.device) if peers else ours
    best = min(ours, again, key=lambda one: one.median)
    least = case.cost.seconds(ceilings) * 1e6
    op = _OP_OF.get(case.op, case.op)
    return OpRecord(
        shape=shape,
        op=case.op,
        what=case.what,
        provider=bench.ops.providers[op].name,
        us=best.median,
        low=best.low,
        high=best.high,
        drift=abs(ours.median - again.median) / best.median,
        how=best.how,
        nbytes=case.cost.nbytes,
        operations=case.cost.bf16 + case.cost.fp8,
        floor_us=least,
        ratio=least / best.median,
        error=error if isfinite(error) else NOT_FINITE,
        right=error <= bench.limit(op, make.keywords["rows"]),
        distinct=case.distinct,
        peers=peers,
        peers_failed=failed,
    )


def _timed(calls: Sequence[Callable[[], object]], device: torch.device) -> Timing:
    for call in calls:
        call()
    return time_calls(calls, device)
