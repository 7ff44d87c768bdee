"""Loading under expert parallelism: all ranks together hold the checkpoint, and none reads another's experts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest
import torch

from rocm_serve.checkpoint.load import dummy_fill
from rocm_serve.checkpoint.reader import Bits, CheckpointReader, TensorInfo
from rocm_serve.parallel.expert_map import DRAFT_LAYER, ExpertMap, ExpertPlan
from rocm_serve.parallel.mesh import Mesh
from tests.checkpoint.reassemble import Tensors, reassemble
from tests.checkpoint.test_load import check_whole, empty, load, table

EXPERTS = 8
LAYERS = (0, 1, 2, 3, DRAFT_LAYER)
# In order; moved; some held twice, and one of those twice on the same rank.
MOVED = (5, 0, 2, 7, 1, 6, 3, 4)
TWICE = (5, 0, 2, 7, 1, 6, 3, 4, 0, 5, 5, 4)
Slots = Mapping[int, tuple[int, ...]]
PLANS: list[tuple[str, int, int, Slots]] = [
    ("text-fp8-mtp-bf16", 4, 2, {}),
    ("text-fp8-mtp-bf16", 4, 4, {0: MOVED, 3: TWICE, DRAFT_LAYER: TWICE}),
    ("text-bf16", 2, 2, {1: TWICE, DRAFT_LAYER: MOVED}),
    ("text-bf16", 4, 4, {}),
]


def plan_of(tp: int, ep: int, slots: Slots) -> ExpertPlan:
    maps = {layer: ExpertMap(experts, ep) for layer, experts in slots.items()}
    return ExpertPlan(ep, shared_whole=tp == ep, draft_shared_whole=tp != ep, maps=maps)


class Watch:
    """Counts the bytes that a reader fetches of each expert, by (layer, expert), and of all other tensors together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.experts: Counter[tuple[int, int]] = Counter()
        self.rest = 0
        fetch = CheckpointReader._fill

        def fill(reader: CheckpointReader, info: TensorInfo, start: int, bits: Bits) -> None:
            self._count(info, start, bits)
            fetch(reader, info, start, bits)

        monkeypatch.setattr(CheckpointReader, "_fill", fill)

    def _count(self, info: TensorInfo, start: int, bits: Bits) -> None:
        found = re.search(r"layers\.(\d+)\.mlp\.experts\.(?:(\d+)\.)?", info.name)
        if found is None:
            self.rest += bits.nbytes
            return
        layer = DRAFT_LAYER if info.name.startswith("mtp.") else int(found[1])
        if found[2] is not None:
            self.experts[layer, int(found[2])] += bits.nbytes
            return
        each = prod(info.shape[1:])
        for expert in range(start // each, -(-(start + bits.size) // each)):
            part = min(start + bits.size, (expert + 1) * each) - max(start, expert * each)
            self.experts[layer, expert] += part * bits.itemsize


def expert_bytes(reader: CheckpointReader, layer: int) -> int:
    """Bytes of one expert in the files."""
    prefix = "mtp.layers.0" if layer == DRAFT_LAYER else f"model.layers.{layer}"
    names = [name for name in reader.names if name.startswith(f"{prefix}.mlp.experts.")]
    return sum(reader.info(name).nbytes for name in names) // EXPERTS


@pytest.mark.parametrize(("name", "tp", "ep", "slots"), PLANS)
def test_the_ranks_hold_the_checkpoint_and_none_reads_experts_of_another(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, tp: int, ep: int, slots: Slots
) -> None:
    path, mesh, plan = checkpoints[name], Mesh(tp, 1, ep), plan_of(tp, ep, slots)
    reader = CheckpointReader(path)
    shares = []
    for rank in range(tp):
        with monkeypatch.context() as patched:
            watch = Watch(patched)
            into, report = load(path, mesh.coord(rank), torch.float32, experts=plan)
        shares.append(into)
        assert watch.rest + watch.experts.total() == report.bytes_read
        wanted: Counter[tuple[int, int]] = Counter()
        for layer in LAYERS:
            held = plan.of_layer(layer, EXPERTS).held_by(mesh.coord(rank).place.ep_rank)
            for expert in held:  # once for each slot
                wanted[layer, expert] += expert_bytes(reader, layer)
        assert watch.experts.keys() == wanted.keys()
        if ep == tp:
            assert watch.experts == wanted
        else:  # a column slice is read as its enclosing range
            assert all(wanted[key] * ep / tp <= watch.experts[key] <= wanted[key] for key in wanted)
    check_whole(name, path, mesh, shares, plan)


@pytest.mark.parametrize(("name", "used"), [("text-fp8", 5 * 2 * 6), ("text-bf16", 5 * 2)])
def test_the_report_names_the_experts_of_other_ranks(checkpoints: dict[str, Path], name: str, used: int) -> None:
    reader = CheckpointReader(checkpoints[name])
    experts = sum(".mlp.experts." in key for key in reader.names)
    _, report = load(checkpoints[name], Mesh(4, 1, 4).coord(2), experts=ExpertPlan(4))
    assert report.tensors == len(reader.names) - experts + used
    left = experts - used
    assert report.foreign == ({"experts of other ranks": left} if left else {})


@pytest.mark.parametrize(("name", "tp", "ep"), [("vl-fp8", 4, 2), ("text-bf16", 2, 2)])
def test_dummy_shares_are_slices_of_one_virtual_checkpoint_under_every_placement(
    checkpoints: dict[str, Path], name: str, tp: int, ep: int
) -> None:
    path = checkpoints[name]
    found: list[Tensors] = []
    for mesh, slots in ((Mesh(1, 4), {}), (Mesh(tp, 4, ep), {3: TWICE, DRAFT_LAYER: MOVED})):
        plan = plan_of(mesh.tp, mesh.ep, slots)
        shares = []
        for rank in mesh.tp_group(3):  # one decoder layer, the draft layer, head and embedding
            facts, params = table(CheckpointReader(path), mesh.coord(rank), experts=plan)
            shares.append(empty(params, mesh.coord(rank), torch.bfloat16))
            dummy_fill(params, mesh.coord(rank), shares[-1], seed=5)
        found.append({})
        for param in shares[0]:
            found[-1] |= reassemble(param, [share[param] for share in shares], facts, name == "text-bf16", plan)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[1][key], tensor) for key, tensor in found[0].items())
