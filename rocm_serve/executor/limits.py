"""How many pages and slots every rank can afford, and what else the engine may count on, each with its reason. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from rocm_serve.config.ahead import in_effect
from rocm_serve.config.load import FIELDS, flag_name
from rocm_serve.config.resolve import check_total_tokens
from rocm_serve.config.schema import PlanAheadName, Resolved
from rocm_serve.errors import UserError
from rocm_serve.executor.budget import human
from rocm_serve.messages import EffectiveLimits, WorkerLoaded, WorkerReady
from rocm_serve.parallel.mesh import Mesh


def effective_limits(resolved: Resolved, budgets: Sequence[WorkerLoaded]) -> EffectiveLimits:
    """Turn every rank's budget into one number of pages and slots: the least that any rank affords.

    Every rank first keeps the pages of one request of `max_model_len`; slots take what remains, but at most half of
    the rank's cache memory unless a single slot needs more; pages take the rest, up to what all slots together can
    use or `max_total_tokens`. One slot more than `num_slots` is paid for: the dummy.
    Errors: UserError when one request of full length does not fit, or wishes contradict each other.
    """
    assert budgets
    page_size, length = resolved.page_size, resolved.max_model_len
    least_pages = -(-length // page_size)
    mesh = Mesh(tp=resolved.tp, pp=resolved.pp, ep=resolved.ep)
    check_total_tokens(resolved.max_total_tokens, page_size, length)
    _check_one_request(budgets, least_pages, page_size, length)
    running_why = _why(resolved, "max_running_requests")
    wish = f"--max-running-requests {resolved.max_running_requests}"
    slots, slots_why = _least(
        [(resolved.max_running_requests, f"{'the default ' if running_why == 'default' else ''}{wish}")]
        + [(_slots_afforded(b, least_pages), _blame(b, mesh, "a slot", b.slot_bytes)) for b in budgets]
    )
    useful = slots * least_pages
    wishes = [(useful, f"what {slots} requests of {length} tokens can use")]
    if resolved.max_total_tokens is not None:
        wishes.append((resolved.max_total_tokens // page_size, f"--max-total-tokens {resolved.max_total_tokens}"))
    pages, pages_why = _least(wishes + list(_pages_afforded(budgets, mesh, slots)))
    if slots < resolved.max_running_requests:
        running_why = f"lowered from {resolved.max_running_requests}: {slots_why}"
    return EffectiveLimits(
        max_model_len=length,
        max_running_requests=slots,
        chunked_prefill_size=resolved.chunked_prefill_size,
        page_size=page_size,
        num_pages=pages,
        num_slots=slots,
        draft_tokens=resolved.draft_tokens,
        graph_max_batch=min(resolved.graph_max_batch, slots),
        plan_ahead=in_effect(resolved.plan_ahead, resolved.graph_max_batch),
        reasons={
            "max_model_len": _why(resolved, "max_model_len"),
            "max_running_requests": running_why,
            "chunked_prefill_size": _why(resolved, "chunked_prefill_size"),
            "page_size": _why(resolved, "page_size"),
            "num_pages": f"{pages * page_size} tokens of KV: {pages_why}",
            "num_slots": slots_why,
            "draft_tokens": _why(resolved, "draft_tokens") if resolved.draft_tokens else "--speculative off",
            "graph_max_batch": _why(resolved, "graph_max_batch"),
            "plan_ahead": _why(resolved, "plan_ahead"),
        },
    )


def with_graphs(
    limits: EffectiveLimits, ready: Sequence[WorkerReady], plan_ahead: PlanAheadName = "off"
) -> EffectiveLimits:
    """Add what the ranks have captured: the least of all, with the words of the rank that has it; and what follows.

    Also the ops that run as their reference on any of them because a probe refused their kernel.
    """
    least = min(ready, key=lambda one: one.graph_max_batch)
    reasons = limits.reasons | {"graph_max_batch": least.graphs}
    ahead = in_effect(plan_ahead, least.graph_max_batch)
    if plan_ahead == "graphs" and not ahead:
        reasons["plan_ahead"] = "auto: no decode step is captured"
    by_reference = {op: why for one in ready for op, why in one.by_reference.items()}
    return msgspec.structs.replace(
        limits, graph_max_batch=least.graph_max_batch, plan_ahead=ahead, reasons=reasons, by_reference=by_reference
    )


def _least(limits: Iterable[tuple[int, str]]) -> tuple[int, str]:
    return min(limits, key=lambda limit: limit[0])


def _blame(budget: WorkerLoaded, mesh: Mesh, what: str, cost: int) -> str:
    stage = mesh.coord(budget.rank).stage
    return f"memory of rank {budget.rank} (stage {stage}): {human(budget.cache_bytes)} for caches, {what} {human(cost)}"


def _check_one_request(budgets: Sequence[WorkerLoaded], least_pages: int, page_size: int, length: int) -> None:
    """Refuse what the tightest rank cannot hold, so that the advice is good for all of them."""

    def pages_left(budget: WorkerLoaded) -> int:
        left = budget.cache_bytes - 2 * budget.slot_bytes
        return -1 if left < 0 else left // budget.page_bytes if budget.page_bytes else least_pages

    tightest = min(budgets, key=pages_left)
    pages = pages_left(tightest)
    if pages >= least_pages:
        return
    need = least_pages * tightest.page_bytes + 2 * tightest.slot_bytes
    advice = f"--max-model-len {pages * page_size} fits" if pages > 0 else "raise --mem-fraction, --tp or --pp"
    raise UserError(
        f"one request of {length} tokens does not fit: it needs {human(need)} of caches on rank {tightest.rank},"
        f" which has {human(tightest.cache_bytes)}; {advice}"
    )


def _slots_afforded(budget: WorkerLoaded, least_pages: int) -> int:
    if budget.slot_bytes == 0:
        return 1 << 30
    beside_pages = (budget.cache_bytes - least_pages * budget.page_bytes) // budget.slot_bytes - 1
    in_half = budget.cache_bytes // 2 // budget.slot_bytes - 1
    return max(1, min(beside_pages, in_half))


def _pages_afforded(budgets: Sequence[WorkerLoaded], mesh: Mesh, slots: int) -> Iterable[tuple[int, str]]:
    for budget in budgets:
        if budget.page_bytes:
            left = budget.cache_bytes - (slots + 1) * budget.slot_bytes
            yield left // budget.page_bytes, _blame(budget, mesh, "a page", budget.page_bytes)


def _why(resolved: Resolved, field: str) -> str:
    """Name what set a value: a decision's reason, the default, or the flag."""
    default = getattr(resolved, field) == FIELDS[field].default
    return resolved.reasons.get(field) or ("default" if default else flag_name(field))
