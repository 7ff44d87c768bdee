"""What MORI's ops must be built with: kernel, launch geometry, memory. Pure, no torch.

Read in amd-mori 1.2.4: python/mori/ops/dispatch_combine.py and src/ops/dispatch_combine/dispatch_combine.cpp, which its
wheel carries for compiling on the spot.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rocm_serve.errors import UserError

HEAP_VARIABLE = "MORI_SHMEM_HEAP_SIZE"
MODE_VARIABLE = "MORI_SHMEM_MODE"
_DEFAULT_HEAP_GIB = {"static_heap": 4, "vmm_heap": 16}  # by mode; the first is its default
_LEGAL_SETTINGS = {
    # In mode AUTO a table's grid, or 128 blocks, goes before the one that a call asks for.
    "MORI_EP_LAUNCH_CONFIG_MODE": ("MANUAL",),
    # "cco" tells its id from global rank 0 over the world, so that it starts on no later pipeline stage.
    "MORI_EP_COMM": ("shmem",),
    # Of another value MORI says one line in a log and takes the default; its documentation names two such.
    MODE_VARIABLE: tuple(_DEFAULT_HEAP_GIB),
}
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SMALL_BUFFERS = 1 << 20  # counters and flags of one op, and each buffer's rounding up

_MAX_RANKS_OF_A_NODE = 8
_FEW_ROWS = 256  # at most so many rows a rank go by the kernel for latency, where a group spans nodes
_CAPACITY_STEP = 64  # InterNodeV1 allots slots in whole wavefronts


@dataclass(frozen=True, slots=True)
class OpShape:
    """One op to build: the kernel by its name, and the grid that each launch must be given.

    Without a `block_num` of the call itself, IntraNode takes 256 blocks whatever the configuration says; its kernels
    end in a barrier of the whole grid, which never opens when the GPU has fewer compute units than that.
    """

    kernel: str
    capacity: int  # rows that a rank may bring
    block_num: int
    warp_per_block: int
    rdma_block_num: int


def op_shapes(world: int, gpus_per_node: int, capacity: int, compute_units: int) -> tuple[OpShape, ...]:
    """Return the ops that exchange up to `capacity` rows a rank, smallest capacity first.

    Inside a node one op does, by peer stores (the kernel IntraNodeLL exists too; nothing here has measured it). A group
    that spans nodes gets one for small batches and one for the rest.
    Errors: UserError for a capacity or a group that MORI cannot serve.
    """
    if capacity < 1 or capacity % _CAPACITY_STEP:
        raise UserError(f"mori takes a capacity of whole {_CAPACITY_STEP}s of rows, not {capacity}")
    group_gpus(world, gpus_per_node)
    if world <= gpus_per_node:
        if world > _MAX_RANKS_OF_A_NODE:
            raise UserError(f"mori exchanges between at most {_MAX_RANKS_OF_A_NODE} GPUs of a node, not {world}")
        return (OpShape("IntraNode", capacity, min(80, compute_units), 16, 0),)
    blocks = min(64, compute_units)
    few = OpShape("InterNodeV1LL", min(capacity, _FEW_ROWS), blocks, 8, blocks // 2)
    if capacity <= _FEW_ROWS:
        return (few,)
    return (few, OpShape("InterNodeV1", capacity, blocks, 8, blocks // 2))


def group_gpus(world: int, gpus_per_node: int) -> int:
    """Return how many ranks of the group are on one node.

    Errors: UserError where that is no power of two, or the nodes do not hold equally many.
    """
    here = min(world, gpus_per_node)
    if here < 1 or here & (here - 1) or world % here:
        raise UserError(f"mori needs 1, 2, 4 or 8 ranks of a stage on each node, and --tp {world} puts {here} on one")
    return here


def heap_bytes(
    shape: OpShape,
    *,
    world: int,
    gpus_per_node: int,
    hidden_size: int,
    top_k: int,
    slots_per_rank: int,
    row_type_bytes: int,
    scales_a_row: int,
) -> int:
    """Return what one op takes of the shared heap, buffer by buffer as its constructor allocates them.

    Scales are fp32, as many a row as it is built for; `row_type_bytes` are those of the widest type that crosses.
    """
    received = world * shape.capacity
    row = hidden_size * row_type_bytes
    record = row + 8 * top_k + 4 + 4 * scales_a_row  # with ids, weights and the number of the row
    total = received * (record + row) + shape.capacity * row  # combine's input, dispatch's and combine's output
    total += received * (3 * 4 * top_k + 2 * 4 * top_k + 2 * 4 * scales_a_row)  # weights, ids, scales
    total += received * slots_per_rank * 4  # the map from rows back to their senders
    if shape.kernel.startswith("InterNode"):
        nodes = world // group_gpus(world, gpus_per_node)
        total += (3 * nodes + 1) * shape.capacity * record  # input, two halves of staging, and dispatch's own
        total += nodes * shape.capacity * 8  # flags of chunks
    return total + _SMALL_BUFFERS


def check_settings(environ: Mapping[str, str]) -> None:
    """Refuse what variables of MORI in the environment would break in silence.

    Errors: UserError naming the variable and what is legal.
    """
    for name, legal in _LEGAL_SETTINGS.items():
        if environ.get(name) and environ[name] not in legal:
            raise UserError(f"--expert-exchange mori with {name}={environ[name]}; legal: {', '.join(legal)}, or unset")


def check_heap(needed: int, setting: str | None, mode: str | None = None) -> None:
    """Refuse a heap that ops of `needed` bytes do not fit in. `setting`: HEAP_VARIABLE of this process, None if unset.

    `mode`: MODE_VARIABLE. MORI itself would say so only after the start, when the op is built, and with its own
    default left unnamed.
    Errors: UserError naming a value that does.
    """
    advice = f"set {HEAP_VARIABLE}={-(-needed // _UNITS['g'])}G in the environment of every rank"
    default = _DEFAULT_HEAP_GIB[mode or "static_heap"]
    heap, said = default << 30, f"{HEAP_VARIABLE} is not set and MORI's own is {default}G"
    if setting is not None:
        match = re.fullmatch(r"(\d+)\s*([kmgt]?)(?:i?b)?", setting.strip().lower())
        if match is None:
            raise UserError(f"{HEAP_VARIABLE}={setting} is no size such as 8G; {advice}")
        heap, said = int(match[1]) * _UNITS[match[2]], f"{HEAP_VARIABLE} is {setting}"
    if heap < needed:
        raise UserError(f"--expert-exchange mori needs {needed / _UNITS['g']:.2f} GiB of MORI's heap: {said}; {advice}")


def planned_heap(needed: int) -> int:
    """Return what MORI reserves when it starts: its own default, or the value that `check_heap` advises."""
    return max(_DEFAULT_HEAP_GIB["static_heap"] << 30, -(-needed // _UNITS["g"]) * _UNITS["g"])


def total_heap(each: Iterable[int]) -> int:
    """Return the heap for several ops: MORI frees nothing between them, and rounds up where they meet."""
    return sum(each) + (16 << 20)
