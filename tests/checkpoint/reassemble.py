"""Put the ranks' parameters back together into checkpoint tensors, by hand-written rules that know no table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rocm_serve.models.qwen3_5.spec import ModelFacts
from rocm_serve.parallel.expert_map import DRAFT_LAYER, ExpertPlan

Tensors = dict[str, Tensor]
PLAIN = ExpertPlan()


def raw(tensor: Tensor) -> Tensor:
    """FP8 cannot be concatenated or compared everywhere: use its bytes."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor


def reassemble(
    name: str, shards: Sequence[Tensor], facts: ModelFacts, fused: bool, plan: ExpertPlan = PLAIN
) -> Tensors:
    """Return the checkpoint tensors that parameter `name` came from, given every rank's share in order."""
    shards = [raw(shard) for shard in shards]
    words = name.split(".")
    layer = int(words[2]) if words[:2] == ["model", "layers"] else DRAFT_LAYER
    if ".shared_expert." in name and plan.shared_is_whole(layer):
        assert all(torch.equal(shards[0], shard) for shard in shards), f"{name} differs between ranks"
        shards = shards[:1]
    stem, _, leaf = name.rpartition(".")
    scale = "_scale_inv" if leaf.endswith("_scale_inv") else ""
    base = name.removesuffix("_scale_inv").removesuffix(".weight")
    prefix, _, module = base.rpartition(".")

    def called(*modules: str) -> list[str]:
        return [f"{prefix}.{m}.weight{scale}" for m in modules]

    if module == "qkv_proj":
        q, kv = facts.num_heads * 2, facts.num_kv_heads
        copies = max(1, len(shards) // kv)
        parts = bands(shards, (q // len(shards), kv * copies // len(shards), kv * copies // len(shards)))
        return dict(zip(called("q_proj", "k_proj", "v_proj"), join(parts, (1, copies, copies)), strict=True))
    if module == "in_proj_qkvz":
        key, value = facts.linear_num_key_heads, facts.linear_num_value_heads
        q, k, v, z = join(bands(shards, (key, key, value, value)))
        return dict(zip(called("in_proj_qkv", "in_proj_z"), (torch.cat([q, k, v]), z), strict=True))
    if module == "conv1d":
        key, value = facts.linear_num_key_heads, facts.linear_num_value_heads
        return {name: torch.cat(join(bands(shards, (key, key, value))))}
    if module == "in_proj_ba":
        return dict(zip(called("in_proj_b", "in_proj_a"), join(bands(shards, (1, 1))), strict=True))
    if ".experts." in name:
        slots = plan.slots_of(layer, facts.num_experts)
        return experts(base, module, scale, joined(module, shards, plan.ep, slots), fused)
    if module == "gate_up_proj":
        return dict(zip(called("gate_proj", "up_proj"), join(bands(shards, (1, 1))), strict=True))
    if module in ("o_proj", "out_proj", "down_proj"):
        return {name: torch.cat(list(shards), -1)}
    if module in ("embed_tokens", "lm_head") or leaf in ("A_log", "dt_bias"):
        return {name.replace("mtp.embed", "model.embed"): torch.cat(list(shards))}
    assert all(torch.equal(shards[0], shard) for shard in shards), f"{name} differs between ranks"
    return {name: shards[0]}


def joined(module: str, shards: Sequence[Tensor], ep: int, slots: Sequence[int]) -> Tensor:
    """Put slices of experts together, stack the ranks' slots, and return the experts in order. Copies must agree."""
    each = len(shards) // ep
    stacks = []
    for first in range(0, len(shards), each):
        neighbours = shards[first : first + each]
        if module == "down_proj":
            stacks.append(torch.cat(list(neighbours), -1))
        else:
            halves = [shard.chunk(2, 1) for shard in neighbours]
            stacks.append(torch.cat([half[i] for i in (0, 1) for half in halves], 1))
    by_slot = torch.cat(stacks)
    assert len(by_slot) == len(slots), f"{len(by_slot)} slots, {len(slots)} in the placement"
    first_slot = {expert: slot for slot, expert in reversed(list(enumerate(slots)))}
    for slot, expert in enumerate(slots):
        assert torch.equal(by_slot[slot], by_slot[first_slot[expert]]), f"slot {slot} is not expert {expert}"
    return by_slot[[first_slot[expert] for expert in range(len(first_slot))]]


def experts(base: str, module: str, scale: str, stack: Tensor, fused: bool) -> Tensors:
    prefix = base.rpartition(".")[0]
    if module == "down_proj":
        down = stack
        if fused:
            return {base + scale: down}
        return {f"{prefix}.{e}.down_proj.weight{scale}": down[e] for e in range(len(down))}
    if fused:
        return {base + scale: stack}
    gate, up = stack.chunk(2, 1)
    each = ((e, own, half[e]) for e in range(len(gate)) for own, half in (("gate", gate), ("up", up)))
    return {f"{prefix}.{e}.{own}_proj.weight{scale}": tensor for e, own, tensor in each}


def bands(shards: Sequence[Tensor], weights: Sequence[int]) -> list[list[Tensor]]:
    """Split every shard's rows in proportion to `weights`: [shard][band]."""
    found = []
    for shard in shards:
        sizes = [divmod(shard.shape[0] * w, sum(weights)) for w in weights]
        assert not any(rest for _, rest in sizes)
        found.append(list(shard.split([size for size, _ in sizes])))
    return found


def join(parts: list[list[Tensor]], repeats: Sequence[int] | None = None) -> list[Tensor]:
    """Concatenate band by band over the ranks, taking one of each `repeats` neighbours."""
    steps = repeats or [1] * len(parts[0])
    for i, step in enumerate(steps):
        for rank in range(len(parts)):
            assert torch.equal(parts[rank][i], parts[rank - rank % step][i]), "neighbours hold different copies"
    return [torch.cat([parts[rank][i] for rank in range(0, len(parts), step)]) for i, step in enumerate(steps)]
