"""The byte budget: what a step, a page and a slot cost, and how many pages and slots every rank can afford. Pure.

Units: bytes unless a name says otherwise. Nothing here asks the machine: free bytes come in as an int.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import msgspec

from rocm_serve.cache.layout import CACHE_ITEMSIZE, StageLayout, stage_layout
from rocm_serve.config import chunk, graphs
from rocm_serve.config.ahead import in_effect
from rocm_serve.config.graphs import batch_sizes, verified_sizes
from rocm_serve.config.load import FIELDS, flag_name
from rocm_serve.config.resolve import check_total_tokens
from rocm_serve.config.schema import PlanAheadName, Resolved
from rocm_serve.errors import UserError
from rocm_serve.executor import experts_memory, step_memory
from rocm_serve.messages import EffectiveLimits, WorkerLoaded, WorkerReady
from rocm_serve.models.qwen3_5.spec import ModelFacts, stage_layers
from rocm_serve.ops.comm import AITER_MAX_BYTES, AITER_STAGING_BUFFERS
from rocm_serve.ops.tiles_prefill import copied_keys
from rocm_serve.parallel.layout import Param, bytes_at, shape_at
from rocm_serve.parallel.mesh import Coord, Mesh

CPU_ROW_MULTIPLE = 32  # with rows padded to this, CPU GEMMs give a row the same bits in every batch
SCORED_ROWS = 256  # prompt rows whose logits exist at one time (vocab_shard.SLICE_ROWS)

# Estimates of what lies outside torch's allocator; nothing but a GPU can tell. Per channel and connection NCCL and RCCL
# hold a Simple buffer (NCCL_BUFFSIZE, 4 MiB) and those of LL and LL128 (about 2 MiB); four connections a channel stand
# for ring and tree, and for a send or receive with its proxies. Seen on two H200s with one communicator a rank, driver
# and all: 1.4 to 1.6 GiB; these constants say 1.75.
CHANNELS = 32
CONNECTIONS = 4
CONNECTION_BYTES = 6 << 20
RUNTIME_BYTES = 1 << 30  # driver context, loaded code objects and BLAS workspaces, there before the first weight
GRAPH_NODE_BYTES = 4096
GRAPH_NODES_OF_LAYER = 24


def row_multiple(resolved: Resolved) -> int:
    """Say to what multiple a step's rows are padded."""
    return CPU_ROW_MULTIPLE if resolved.device == "cpu" else 1


def padded(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple


def human(nbytes: float) -> str:
    """Write bytes as people read them."""
    for unit in ("bytes", "KB", "MB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.3g} {unit}" if unit != "bytes" else f"{int(nbytes)} bytes"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"


def layout_of(facts: ModelFacts, coord: Coord, resolved: Resolved) -> StageLayout:
    return stage_layout(facts, coord, resolved.page_size, resolved.draft_tokens)


def page_bytes(facts: ModelFacts, coord: Coord, resolved: Resolved) -> int:
    """Bytes of one KV page on this rank: K and V of every full-attention layer of its stage."""
    return layout_of(facts, coord, resolved).page_bytes(CACHE_ITEMSIZE[resolved.kv_cache_dtype])


def slot_bytes(facts: ModelFacts, coord: Coord, resolved: Resolved) -> int:
    """Bytes of one slot on this rank: conv rows and SSM state of every GDN layer of its stage."""
    return layout_of(facts, coord, resolved).slot_bytes(CACHE_ITEMSIZE[resolved.dtype])


def weight_bytes(params: Mapping[str, Param], coord: Coord, resolved: Resolved) -> int:
    """Bytes of this rank's parameters."""
    itemsize = CACHE_ITEMSIZE[resolved.dtype]
    return sum(bytes_at(p, coord.place, model_itemsize=itemsize) for p in params.values())


def step_bytes(
    params: Mapping[str, Param], facts: ModelFacts, coord: Coord, resolved: Resolved, *, counted: bool | None = None
) -> int:
    """Bound the memory that one step holds beside weights and caches, and that its inputs take between steps.

    `counted`: whether Triton's kernels run the layers, None as far as wishes tell.
    """
    return work_bytes(params, facts, coord, resolved, counted=counted) + inputs_bytes(facts, coord, resolved)


def work_bytes(
    params: Mapping[str, Param],
    facts: ModelFacts,
    coord: Coord,
    resolved: Resolved,
    *,
    counted: bool | None = None,
    captured: bool = False,
) -> int:
    """Bound what a step holds while it runs. `captured`: in a graph, where every draw is plain.

    The last stage has the logits of every running request and of one slice of scored prompt rows, with their copies,
    and draws from them. Rows on their way to experts come on top, and rows between stages: `pp + 1` messages that
    leave, and for every step in flight one that was asked for.
    """
    rows = step_rows(resolved)
    logits = 3 * padded(decode_rows(resolved), CPU_ROW_MULTIPLE) + 2 * SCORED_ROWS if coord.last_stage else 0
    drawn = step_memory.drawn_bytes(facts, decode_rows(resolved)) if coord.last_stage and not captured else 0
    of_layers = step_memory.counted_before_binding(resolved) if counted is None else counted
    total = (_counted_bytes if of_layers else _bounded_bytes)(params, facts, coord, resolved, rows, logits, drawn)
    total += experts_memory.step_staging(params, facts, resolved, rows)
    pp = coord.mesh.pp
    asked_for = pp + (resolved.plan_ahead != "off")
    messages = (0 if coord.last_stage else pp + 1) + (0 if coord.first_stage else asked_for)
    return total + messages * rows * facts.hidden_size * CACHE_ITEMSIZE[resolved.dtype]


def _counted_bytes(
    params: Mapping[str, Param],
    facts: ModelFacts,
    coord: Coord,
    resolved: Resolved,
    rows: int,
    logits: int,
    drawn: int,
) -> int:
    """Take what is there at one time: the streams, and the most of attention or delta rule, experts and head."""
    experts = experts_memory.step_workspace(params, facts, coord.place, resolved, rows, row_multiple(resolved))
    copied = copied_keys_bytes(facts, coord, resolved)
    parts = (
        step_memory.mixer_bytes(params, layout_of(facts, coord, resolved), coord.place, resolved, rows, copied),
        step_memory.mlp_bytes(params, coord.place, resolved, rows) + experts,
        step_memory.head_bytes(facts, coord.mesh.tp, resolved, logits, drawn) if coord.last_stage else 0,
    )
    return int(step_memory.SLACK * (step_memory.streams_bytes(facts, resolved, rows) + max(parts)))


def _bounded_bytes(
    params: Mapping[str, Param],
    facts: ModelFacts,
    coord: Coord,
    resolved: Resolved,
    rows: int,
    logits: int,
    drawn: int,
) -> int:
    """Take for each row a few streams of the hidden size and the widest inner layer in float32, whoever computes it.

    Or what the routed experts take if that is more; logits, what draws take and copied keys on top. In bfloat16 the
    references of linear layers, which a CPU has, hold one weight in float32.
    """
    experts = experts_memory.step_workspace(params, facts, coord.place, resolved, rows, row_multiple(resolved))
    streams = rows * chunk.row_bytes(0, facts)
    inner = max(rows * chunk.row_bytes(chunk.widest(params, coord.place), facts) - streams, experts)
    total = streams + inner + copied_keys_bytes(facts, coord, resolved)
    total += logits * -(-facts.vocab_size // coord.mesh.tp) * 4 + drawn
    widens = resolved.device == "cpu" or any(map(_widens, resolved.op.items()))
    if widens and resolved.dtype == "bfloat16":
        inner_params = (p for name, p in params.items() if not name.endswith("embed_tokens.weight"))
        shapes = (shape_at(p, coord.place) for p in inner_params)
        total += 4 * max((prod(shape[-2:]) for shape in shapes if len(shape) >= 2), default=0)
    return total


def _widens(wish: tuple[str, str]) -> bool:
    name, provider = wish
    return provider == "reference" and name.rpartition(".")[2] in ("linear", "fp8_linear")


def inputs_bytes(facts: ModelFacts, coord: Coord, resolved: Resolved) -> int:
    """Bound what the inputs of steps of fixed sizes take, on a GPU."""
    if resolved.device == "cpu":
        return 0
    ahead = resolved.draft_tokens
    most = min(resolved.graph_max_batch or graphs.AUTO_MOST, resolved.max_running_requests)
    verified = verified_sizes(most, ahead)[-1] * (1 + ahead) if ahead else 0
    beside, rows = prompt_counts(resolved)[-1], prompt_rows(resolved)
    return step_memory.inputs_bytes(
        facts,
        coord,
        resolved,
        decodes=most,
        rows=max(most, verified),
        prompt_rows=rows + beside if rows else 0,
        sequences=prompt_sequences(resolved) + beside if rows else 0,
    )


def copied_keys_bytes(facts: ModelFacts, coord: Coord, resolved: Resolved) -> int:
    """Bytes of keys and values that attention of prompt rows by Triton copies from their pages, of one layer."""
    layout = layout_of(facts, coord, resolved)
    if resolved.device == "cpu" or not resolved.chunked_prefill_size or not layout.kv_layers:
        return 0
    keys = copied_keys(resolved.max_model_len, resolved.max_running_requests)
    return 2 * keys * layout.kv_heads * layout.head_dim * CACHE_ITEMSIZE[resolved.dtype]


def step_rows(resolved: Resolved) -> int:
    """Return the rows of the longest step, with padding."""
    return padded(resolved.chunked_prefill_size + decode_rows(resolved), CPU_ROW_MULTIPLE)


def decode_rows(resolved: Resolved) -> int:
    """Return the most rows of decoding requests in a step: of each its newest token, and its drafts."""
    return resolved.max_running_requests * (1 + resolved.draft_tokens)


def preparation_bytes(params: Mapping[str, Param], coord: Coord, resolved: Resolved, preparing: Iterable[str]) -> int:
    """Bytes that laying weights out anew takes for a moment: those of one op in one layer exist twice.

    A prepared weight has as many bytes as a plain one, so nothing else changes. `preparing`: the ops that do it.
    """
    ops, itemsize = set(preparing), CACHE_ITEMSIZE[resolved.dtype]
    groups: dict[str, int] = {}
    for name, param in params.items():
        op, group = _op_weights(name, param, params)
        if op in ops:
            size = bytes_at(param, coord.place, model_itemsize=itemsize)
            groups[group] = groups.get(group, 0) + size
    return max(groups.values(), default=0)


def _op_weights(name: str, param: Param, params: Mapping[str, Param]) -> tuple[str, str]:
    """Name the op whose weight a parameter is ("" for those that no provider lays out), and its group."""
    weight = name.removesuffix("_scale_inv")
    if ".experts." in name:
        return "moe_experts", name.partition(".experts.")[0]
    if params[weight].dtype == "fp8":
        return "fp8_linear", weight
    matrix = len(param.dims) == 2 and weight.endswith(".weight") and not weight.endswith("embed_tokens.weight")
    return ("linear" if matrix else ""), weight


def check_preparation(rank: int, allowed: int, weights: int, preparing: int) -> None:
    """Errors: UserError when the weights fit, but not while they are laid out for their kernels."""
    if preparing and weights + preparing > allowed:
        raise UserError(
            f"the model does not fit: rank {rank} may use {human(allowed)} (--mem-fraction), but its weights take"
            f" {human(weights)}, and laying them out for their kernels {human(preparing)} more for a moment;"
            " raise --mem-fraction, --tp or --pp, or choose providers that read them as they are: --op OP=reference"
        )


def communicator_bytes(coord: Coord, resolved: Resolved) -> int:
    """Estimate what RCCL or NCCL holds on this rank: its stage's all-reduce, and one communicator for each edge.

    Where steps are planned ahead of their tokens, one edge goes from the last of several stages to the first.
    """
    if resolved.device == "cpu":
        return 0
    communicators = (coord.mesh.tp > 1) + (not coord.first_stage) + (not coord.last_stage)
    if resolved.plan_ahead != "off":
        communicators += coord.first_stage != coord.last_stage
    return communicators * CHANNELS * CONNECTIONS * CONNECTION_BYTES


def summing_bytes(resolved: Resolved) -> int:
    """Return what AITER's sums over ranks reserve when they are made, before the budget is measured."""
    return AITER_STAGING_BUFFERS * AITER_MAX_BYTES if resolved.all_reduce == "aiter" else 0


def graph_bytes(
    params: Mapping[str, Param], facts: ModelFacts, coord: Coord, resolved: Resolved, *, counted: bool | None = None
) -> int:
    """Estimate device graphs of steps of fixed sizes: one pool for the largest, what each leaves, and their nodes.

    Steps of all sizes share the pool, but what a step leaves behind (logits, or rows for the next stage) has its own.
    """
    if not resolved.graph_max_batch:
        return 0
    ahead, sizes = resolved.draft_tokens, batch_sizes(resolved.graph_max_batch)
    rows, largest, passes = list(sizes), sizes[-1], 1
    if ahead:
        sizes = verified_sizes(resolved.graph_max_batch, ahead)
        rows += [size * (1 + ahead) for size in sizes]
        largest, passes = max(largest // (1 + ahead), sizes[-1]), 2  # what drafts add to a layer counts as one more
    decode = msgspec.structs.replace(resolved, chunked_prefill_size=0, max_running_requests=largest)
    nodes = GRAPH_NODES_OF_LAYER * passes * (len(stage_layers(facts, coord)) + ahead)
    left = facts.hidden_size * CACHE_ITEMSIZE[resolved.dtype]
    if coord.last_stage:
        left += 4 * -(-facts.vocab_size // coord.mesh.tp)
    counts, several = prompt_counts(resolved), prompt_sequences(resolved)
    kinds = counts + counts[-1:] * (several > 1)
    prompts = [many + count for count in kinds for many in graphs.prompt_sizes(prompt_rows(resolved))]
    largest_step = work_bytes(params, facts, coord, decode, counted=counted, captured=True)
    if prompts:  # their logits are computed outside
        beside = max(several, counts[-1])
        one = msgspec.structs.replace(resolved, chunked_prefill_size=prompt_rows(resolved), max_running_requests=beside)
        largest_step = max(largest_step, work_bytes(params, facts, coord, one, counted=counted, captured=True))
    held = sum(rows) * left + sum(prompts) * facts.hidden_size * CACHE_ITEMSIZE[resolved.dtype]
    return largest_step + held + (len(rows) + len(prompts)) * nodes * GRAPH_NODE_BYTES


def prompt_rows(resolved: Resolved) -> int:
    """Return the most rows of prompts in a step of fixed size; 0: there are no such steps."""
    if resolved.device == "cpu":
        return 0
    return min(graphs.PROMPT_ROWS, resolved.chunked_prefill_size, resolved.max_model_len)


def prompt_sequences(resolved: Resolved) -> int:
    """Return the most prompts in a step of fixed size."""
    return min(graphs.PROMPTS, resolved.max_running_requests)


def prompt_counts(resolved: Resolved) -> tuple[int, ...]:
    """Return the sizes of what decodes beside prompts there. Padding there would be counted among experts' rows."""
    return (0,) if resolved.expert_counts else (0, min(graphs.PROMPT_DECODES, resolved.max_running_requests))


def gpu_memory(total_bytes: int, free_bytes: int, resolved: Resolved) -> int:
    """Bytes that one worker may use of its GPU, seen before it has taken any."""
    return int(total_bytes * resolved.mem_fraction) - (total_bytes - free_bytes)


def cpu_memory(free_bytes: int, resolved: Resolved) -> int:
    """Share of free RAM that one worker may use in all."""
    local_workers = resolved.tp * resolved.pp // resolved.nnodes
    return int(free_bytes * resolved.mem_fraction) // max(1, local_workers)


def planned_and_allocated(rank: int, weights: int, caches: int, allocated: int) -> str:
    """Say in one line what a rank was planned to hold and what it holds."""
    planned = weights + caches
    return (
        f"rank {rank}: planned {human(planned)} (weights {human(weights)}, caches {human(caches)}),"
        f" allocated {human(allocated)} ({(allocated - planned) / planned:+.2%})"
    )


def bytes_for_caches(rank: int, allowed: int, weights: int, step: int, *, held: int = 0) -> int:
    """What is left of `allowed` for pages and slots. `held`: bytes of the GPU that were in use before.

    Errors: UserError when the model itself does not fit.
    """
    left = allowed - weights - step
    if left <= 0:
        beside = f" beside {human(held)} of its GPU that are in use already" if held else ""
        advice = (
            "raise --mem-fraction, --tp or --pp, or lower --chunked-prefill-size or --max-running-requests"
            if left + held <= 0
            else f"without those it might use {human(allowed + held)}: end what holds them, or choose another GPU"
        )
        raise UserError(
            f"the model does not fit: rank {rank} may use {human(max(allowed, 0))} (--mem-fraction){beside}, but its"
            f" weights take {human(weights)} and one step up to {human(step)}; {advice}"
        )
    return left


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
