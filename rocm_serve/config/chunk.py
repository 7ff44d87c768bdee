"""How many prompt rows a step has: between reading the experts for few rows and keeping those who decode waiting. Pure.

A step reads every expert that a row chose, and a few hundred rows choose all. So the time of the routed experts is that
of reading them until there are so many rows that computing takes as long: about 5,400 for 256 experts of which a row
takes 8, 8,700 for 512 and 10 on an H200, 12,600 for those on an MI300X. A step of half as many pays twice what the
experts' computation alone would take; a longer one pays less, and every request that decodes beside it waits longer for
its token. Half of the balance, as the nearest power of two, is the default.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from math import log2

from rocm_serve.config.schema import DeviceName, ServeConfig
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, one_of_each, stage_layers, stage_params
from rocm_serve.parallel.expert_map import ExpertPlan
from rocm_serve.parallel.layout import Param, Place, bytes_at, shape_at
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.platform.facts import Platform

CPU_ROWS = 512
DENSE_ROWS = 2048  # no experts, or a card we know no rates of
MOST_ROWS = 8192
_LAYER = re.compile(r"\.layers\.(\d+)\.")
MEMORY_SHARE = 0.25  # of what the weights leave of a rank's memory, for the rows of a step; caches take the rest

# Bytes/s, and FP8 operations/s of one compute unit: MI300X and MI355X by datasheet, an H200 as measured.
_RATES: Mapping[str, tuple[float, float]] = {
    "gfx942": (5.3e12, 2614.9e12 / 304),
    "gfx950": (8.0e12, 5033e12 / 256),
    "sm_90": (4.25e12, 1437e12 / 132),
}


def widest(params: Mapping[str, Param], place: Place) -> int:
    """Return the most columns that a layer makes of a row on this rank. The head's are logits, counted elsewhere."""
    inner = (name for name in params if not name.endswith(("embed_tokens.weight", "lm_head.weight")))
    shapes = (shape_at(params[name], place) for name in inner)
    return max((shape[-2] for shape in shapes if len(shape) >= 2), default=0)


def weight_bytes(facts: ModelFacts, mesh: Mesh, table: Mapping[str, Param], itemsize: int) -> int:
    """Return the bytes of the fullest rank's parameters. `table`: those of one layer of each kind, and the ends."""
    place = mesh.coord(0).place
    layers: Counter[str] = Counter()
    ends = []
    for name, param in table.items():
        nbytes, layer = bytes_at(param, place, model_itemsize=itemsize), _LAYER.search(name)
        if layer is None:
            ends.append(nbytes)
        else:
            layers[layer[1]] += nbytes
    kinds = {facts.layer_types[int(number)]: nbytes for number, nbytes in layers.items()}
    stages = (stage_layers(facts, mesh.coord(stage * mesh.tp)) for stage in range(mesh.pp))
    most = max(sum(kinds[facts.layer_types[i]] for i in numbers) for numbers in stages)
    return most + (sum(ends) if mesh.pp == 1 else max(ends))


def row_bytes(widest: int, facts: ModelFacts) -> int:
    """Bound the memory of one row in a step: a few streams of the hidden size and the widest layer, in float32."""
    return 4 * (6 * facts.hidden_size + 3 * widest * max(1, facts.top_k))


def balance(facts: ModelFacts, platform: Platform) -> int | None:
    """Return the rows with which the experts take as long to compute as to read; None where nothing is known.

    Each of E experts is read once, a row is multiplied with k of them: E weights bytes against k weights 2 operations.
    """
    rates = _RATES.get(platform.arch)
    if rates is None or not facts.is_moe or not platform.compute_units:
        return None
    bytes_s, each = rates
    fp8 = facts.quantization is not None
    operations_s = each * platform.compute_units * (1.0 if fp8 else 0.5)
    return round(facts.num_experts / facts.top_k * (1 if fp8 else 2) * operations_s / (2 * bytes_s))


def decide(
    config: ServeConfig,
    facts: ModelFacts,
    platform: Platform,
    device: DeviceName,
    mem_fraction: float,
    itemsize: int,
    reasons: dict[str, str],
) -> int:
    """Decide the prompt rows of a step; a reason is added to `reasons`. `itemsize`: bytes of a number of the model."""
    if config.chunked_prefill_size is not None:
        return config.chunked_prefill_size
    if device == "cpu":
        reasons["chunked_prefill_size"] = "auto: a CPU computes, whatever the rows"
        return CPU_ROWS
    even = balance(facts, platform)
    if even is None:
        rows, why = DENSE_ROWS, "no experts, or a card of unknown speed"
    else:
        rows = min(MOST_ROWS, max(CPU_ROWS, 2 ** round(log2(even / 2))))
        why = (
            f"with {even} rows the experts take as long to compute as to read; about half, for those who decode beside"
        )
    mesh = Mesh(config.tp, config.pp, config.ep)
    one = one_of_each(facts)
    table = stage_params(
        one, Mesh(mesh.tp, 1, mesh.ep).coord(0), formats=ConfigFormats(one), mtp=False, experts=ExpertPlan(mesh.ep)
    )
    left = int(platform.hbm_bytes * mem_fraction) - weight_bytes(facts, mesh, table, itemsize)
    affordable = max(0, int(left * MEMORY_SHARE)) // row_bytes(widest(table, mesh.coord(0).place), facts)
    while rows > max(CPU_ROWS, affordable) and platform.hbm_bytes:
        rows //= 2
        why = f"{affordable} rows may take {MEMORY_SHARE:.0%} of what the weights leave of a GPU's memory"
    reasons["chunked_prefill_size"] = f"auto: {why}"
    return rows
