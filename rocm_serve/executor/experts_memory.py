"""What experts take of a rank beside their weights: the op's workspace, rows on their way, MORI's heap. Pure, no torch.

Units: bytes unless a name says otherwise. Letters: R rows that the experts of a rank are called with, k choices a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rocm_serve.cache.layout import CACHE_ITEMSIZE
from rocm_serve.config.schema import ExchangeName, Resolved
from rocm_serve.models.qwen3_5.spec import ModelFacts, promised_fp8
from rocm_serve.parallel.exchange.mori_limits import (
    HEAP_VARIABLE,
    MODE_VARIABLE,
    check_heap,
    check_settings,
    heap_bytes,
    op_shapes,
    planned_heap,
    total_heap,
)
from rocm_serve.parallel.exchange.traffic import row_bytes
from rocm_serve.parallel.expert_map import DRAFT_LAYER, ExpertPlan
from rocm_serve.parallel.layout import Param, Place, shape_at

RETURNED_BYTES = 1 << 28  # the Triton provider's panel of what experts return (moe_experts/triton_grouped.py)
PANEL_COLUMNS = 128  # which is never narrower than a tile


@dataclass(frozen=True, slots=True)
class LayerExchange:
    """What one MoE layer's exchange is built for. Layers with equal ones share it."""

    name: ExchangeName
    capacity: int  # rows that a rank may bring
    slots_per_rank: int
    fp8_rows: bool


def layer_exchanges(
    facts: ModelFacts, plan: ExpertPlan, resolved: Resolved, *, mtp: bool = False
) -> dict[int, LayerExchange]:
    """Say what each layer of the whole model asks of its exchange: the same on every rank of every stage.

    Rows go as FP8 where the layer's experts are FP8 and would quantise them anyway, by what the configuration promises.
    """
    layers = (*range(facts.num_layers), *((DRAFT_LAYER,) if mtp else ())) if facts.is_moe else ()
    found = {}
    for layer in layers:
        draft = layer == DRAFT_LAYER
        prefix = "mtp.layers.0" if draft else f"model.layers.{layer}"
        fp8 = promised_fp8(facts, f"{prefix}.mlp.experts.0.down_proj.weight")
        found[layer] = LayerExchange(
            resolved.speculative_expert_exchange if draft else resolved.expert_exchange,
            resolved.speculative_expert_capacity if draft else resolved.expert_capacity,
            plan.of_layer(layer, facts.num_experts).slots_per_rank,
            fp8 and plan.shared_is_whole(layer) and resolved.fp8_activation == "fp8_1x128",
        )
    return found


def mori_heap_bytes(
    facts: ModelFacts, exchanges: Mapping[int, LayerExchange], resolved: Resolved, *, compute_units: int
) -> int:
    """Return what the ops of MORI take of its heap on every rank; 0 where no layer asks for MORI.

    Errors: UserError for a group or a capacity that MORI cannot serve.
    """
    gpus_per_node = resolved.tp * resolved.pp // resolved.nnodes
    ops = [
        heap_bytes(
            shape,
            world=resolved.tp,
            gpus_per_node=gpus_per_node,
            hidden_size=facts.hidden_size,
            top_k=facts.top_k,
            slots_per_rank=one.slots_per_rank,
            row_type_bytes=CACHE_ITEMSIZE[resolved.dtype],
            scales_a_row=facts.hidden_size // 128 if one.fp8_rows else 0,
        )
        for one in dict.fromkeys(exchanges.values())
        if one.name == "mori"
        for shape in op_shapes(resolved.tp, gpus_per_node, one.capacity, compute_units)
    ]
    return total_heap(ops) if ops else 0


def reserved_heap_bytes(needed: int) -> int:
    """Return what MORI reserves at its start for ops of `needed` bytes, where its environment is as we advise."""
    return planned_heap(needed) if needed else 0


def check_mori(
    facts: ModelFacts, plan: ExpertPlan, resolved: Resolved, *, compute_units: int, environ: Mapping[str, str]
) -> None:
    """Refuse before anything starts an environment that MORI could not work in, and a heap that is too small.

    Errors: UserError naming the variable and a value that does.
    """
    exchanges = layer_exchanges(facts, plan, resolved, mtp=resolved.draft_tokens > 0)
    needed = mori_heap_bytes(facts, exchanges, resolved, compute_units=max(1, compute_units))
    if needed:
        check_settings(environ)
        check_heap(needed, environ.get(HEAP_VARIABLE), environ.get(MODE_VARIABLE))


def step_workspace(
    params: Mapping[str, Param], facts: ModelFacts, place: Place, resolved: Resolved, rows: int, multiple: int
) -> int:
    """Bound what the routed experts of a layer take while they run, in a step of `rows` rows of the stage.

    `multiple`: to which the machine pads rows.
    """
    kernels = resolved.device != "cpu" and resolved.op.get("moe_experts") != "reference"
    found = 0
    for name, param in _stacks(params).items():
        ours = expert_rows(*_exchange_of(name, resolved), rows, resolved.tp, multiple)
        slots, gate_up_rows, hidden = shape_at(param, place)
        size = workspace_bytes(ours, facts.top_k, hidden, gate_up_rows, slots, kernels=kernels)
        found = max(found, size)
    return found


def step_staging(params: Mapping[str, Param], facts: ModelFacts, resolved: Resolved, rows: int) -> int:
    """Bound the rows on their way to a layer's experts and back, as far as torch holds them."""
    itemsize = CACHE_ITEMSIZE[resolved.dtype]
    found = 0
    for name, param in _stacks(params).items():
        exchange, _ = _exchange_of(name, resolved)
        fp8 = param.dtype == "fp8" and resolved.fp8_activation == "fp8_1x128"
        found = max(found, staging_bytes(exchange, facts, rows, resolved.tp, itemsize=itemsize, fp8_rows=fp8))
    return found


def _stacks(params: Mapping[str, Param]) -> dict[str, Param]:
    return {name: param for name, param in params.items() if name.endswith(".experts.gate_up_proj")}


def _exchange_of(name: str, resolved: Resolved) -> tuple[ExchangeName, int]:
    """Return the exchange of a parameter's layer, and its capacity."""
    if name.startswith("mtp."):
        return resolved.speculative_expert_exchange, resolved.speculative_expert_capacity
    return resolved.expert_exchange, resolved.expert_capacity


def expert_rows(name: ExchangeName, capacity: int, rows: int, tp: int, multiple: int) -> int:
    """Return R at most, of a step of `rows` rows: those of the whole stage, however many of them chose this rank.

    MORI hands over its whole buffer and says on the device how much of it is filled.
    """
    if name == "mori":
        return tp * capacity
    share = -(-rows // tp)
    return rows if name == "local" else tp * (-(-share // multiple) * multiple)


def workspace_bytes(rows: int, top_k: int, hidden: int, gate_up_rows: int, slots: int, *, kernels: bool) -> int:
    """Bound what one call of moe_experts holds beside its rows and its weights.

    For every choice the product of gate and up, in float32 or in bf16 with a quantised copy, and what the expert
    returns in float32; `kernels` hold some columns of that at a time. For every row a copy, quantised with its scales,
    and the sum in float32. The reference has the rows in float32 instead, and gate, up, their product and the result of
    one expert at work. The order of choices is padded to whole tiles for each of the `slots`.
    """
    choices = rows * top_k
    returned = choices * 4 * hidden
    of_a_row = 5 * hidden
    if kernels:
        returned = min(returned, max(RETURNED_BYTES, choices * 4 * PANEL_COLUMNS))
    else:
        returned *= 2  # and weighted
        of_a_row = 12 * hidden + 6 * gate_up_rows
    order = 16 * choices + 1024 * slots
    return choices * 2 * gate_up_rows + returned + order + rows * of_a_row


def staging_bytes(name: ExchangeName, facts: ModelFacts, rows: int, tp: int, *, itemsize: int, fp8_rows: bool) -> int:
    """Bound the rows on their way to experts and back, in torch's memory: `rows` of the stage, all of them sent here.

    What is sent, packed, received and unpacked exists at once; then results, their sums in float32, and the gather of
    all shares.
    """
    if name == "local":
        return 0
    width = row_bytes(facts.hidden_size, facts.top_k, result_type=itemsize, fp8_rows=fp8_rows)
    share = -(-rows // tp)
    out = {"torch": 4 * rows, "all_gather": 2 * rows + 2 * share, "mori": 3 * share}[name] * width.record
    back = (2 if name == "mori" else 3) * rows * width.result + 2 * share * 4 * facts.hidden_size
    return out + back
