"""What a rank is estimated to hold outside of its budget: driver, communicators, AITER's sums, device graphs. Pure.

Units: bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rocm_serve.cache.layout import CACHE_ITEMSIZE
from rocm_serve.config import graphs
from rocm_serve.config.graphs import batch_sizes, verified_sizes
from rocm_serve.config.schema import Resolved
from rocm_serve.executor import step_rows
from rocm_serve.executor.step_memory import work_bytes
from rocm_serve.models.qwen3_5.spec import ModelFacts, stage_layers
from rocm_serve.ops.comm import AITER_MAX_BYTES, AITER_STAGING_BUFFERS
from rocm_serve.parallel.layout import Param
from rocm_serve.parallel.mesh import Coord

# Estimates of what lies outside torch's allocator; nothing but a GPU can tell. Per channel and connection NCCL and RCCL
# hold a Simple buffer (NCCL_BUFFSIZE, 4 MiB) and those of LL and LL128 (about 2 MiB); four connections a channel stand
# for ring and tree, and for a send or receive with its proxies. Seen on two H200s with one communicator a rank, driver
# and all: 1.4 to 1.6 GiB; these constants say 1.75.
# All of it is a channel's and is there for the first message, however short: an edge for tokens of 8 bytes is counted
# like one for hidden rows. NCCL 2.28 is reported to take 512 MiB for sends and receives of a communicator that has no
# peer (NVIDIA/nccl issue 2363). Groups of fewer channels (max_ctas) would take less; not tried.
CHANNELS = 32
CONNECTIONS = 4
CONNECTION_BYTES = 6 << 20
RUNTIME_BYTES = 1 << 30  # driver context, loaded code objects and BLAS workspaces, there before the first weight
GRAPH_NODE_BYTES = 4096
GRAPH_NODES_OF_LAYER = 24
SIDE_BYTES = 32 << 20  # the second stream's workspace of BLAS, where steps are recorded with one (cuBLAS's for sm_90)


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
    counts, several = step_rows.prompt_counts(resolved), step_rows.prompt_sequences(resolved)
    kinds = counts + counts[-1:] * (several > 1)
    longest = step_rows.prompt_rows(resolved)
    prompts = [many + count for count in kinds for many in graphs.prompt_sizes(longest)]
    largest_step = work_bytes(params, facts, coord, decode, counted=counted, captured=True)
    if prompts:  # their logits are computed outside
        beside = max(several, counts[-1])
        one = msgspec.structs.replace(resolved, chunked_prefill_size=longest, max_running_requests=beside)
        largest_step = max(largest_step, work_bytes(params, facts, coord, one, counted=counted, captured=True))
    held = sum(rows) * left + sum(prompts) * facts.hidden_size * CACHE_ITEMSIZE[resolved.dtype]
    side = SIDE_BYTES if graphs.shared_beside(resolved.device) else 0
    return largest_step + held + side + (len(rows) + len(prompts)) * nodes * GRAPH_NODE_BYTES
