"""Estimates of graphs and communicators: they grow by what one more of them holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocm_serve.config import graphs
from rocm_serve.executor import outside_memory, step_memory
from rocm_serve.models.qwen3_5.spec import ConfigFormats, stage_params
from rocm_serve.parallel.mesh import Mesh
from tests.executor.wishes import facts, resolved


@pytest.mark.parametrize(("tp", "pp", "rank"), [(1, 1, 0), (2, 2, 0), (2, 2, 3)])
def test_graphs_cost_a_step_of_the_largest_batch_and_what_every_size_leaves(
    monkeypatch: pytest.MonkeyPatch, tp: int, pp: int, rank: int
) -> None:
    """Two sizes more, 16 and 32: only what they leave, their nodes, and the larger pool come on top."""
    coord = Mesh(tp, pp).coord(rank)
    params = stage_params(facts(), coord, formats=ConfigFormats(facts()), mtp=False)

    def costs(most: int) -> int:
        wish = resolved(tp=tp, pp=pp, device="rocm", dtype="bfloat16", graph_max_batch=most, max_running_requests=64)
        return outside_memory.graph_bytes(params, facts(), coord, wish)

    def step(most: int, rows: int) -> int:
        wish = resolved(
            tp=tp, pp=pp, device="rocm", dtype="bfloat16", max_running_requests=most, chunked_prefill_size=rows
        )
        return step_memory.work_bytes(params, facts(), coord, wish, captured=True)

    def pool(most: int) -> int:
        """Of steps that decode, and of the 64 rows of a prompt beside 64 that decode, whichever is larger."""
        return max(step(most, 0), step(64, 64))

    assert costs(0) == 0
    row = 4 * facts().vocab_size // tp if coord.last_stage else 0
    row += 2 * facts().hidden_size
    layers = facts().num_layers // pp
    nodes = 2 * layers * outside_memory.GRAPH_NODES_OF_LAYER * outside_memory.GRAPH_NODE_BYTES
    assert costs(32) - costs(8) == pool(32) - pool(8) + 48 * row + nodes
    with_prompts = costs(8)
    monkeypatch.setattr(graphs, "PROMPTS", 1)  # 64 rows of several prompts beside 64 that decode: a graph less
    assert with_prompts - costs(8) == 128 * 2 * facts().hidden_size + nodes // 2
    monkeypatch.setattr(graphs, "PROMPT_ROWS", 0)  # 64 rows of a prompt, alone and beside 64: three graphs less
    left = (64 + 128 + 128) * 2 * facts().hidden_size
    assert with_prompts - costs(8) == pool(8) - step(8, 0) + left + nodes * 3 // 2


@pytest.mark.parametrize("rank", [0, 3])
def test_graphs_of_steps_with_drafts_cost_their_rows_and_a_second_set_of_sizes(rank: int) -> None:
    """128 requests or 64 at most: with K = 3 there are no more than 64 with drafts, so only plain sizes are added."""
    coord, made = Mesh(2, 2).coord(rank), replace(facts(), mtp_layers=1)
    params = stage_params(made, coord, formats=ConfigFormats(made), mtp=True)

    def costs(most: int, drafts: int) -> int:
        sizes: dict[str, object] = {
            "tp": 2,
            "pp": 2,
            "device": "rocm",
            "dtype": "bfloat16",
            "max_running_requests": 200,
        }
        return outside_memory.graph_bytes(
            params, made, coord, resolved(**sizes, graph_max_batch=most, draft_tokens=drafts)
        )

    row = 2 * made.hidden_size + (2 * made.vocab_size if coord.last_stage else 0)
    nodes = 2 * (made.num_layers // 2 + 3) * outside_memory.GRAPH_NODES_OF_LAYER * outside_memory.GRAPH_NODE_BYTES
    assert costs(0, 3) == 0
    assert costs(128, 3) - costs(64, 3) == 128 * row + nodes
    assert costs(64, 3) - costs(64, 0) > (4 * 127) * row


@pytest.mark.parametrize(
    ("tp", "pp", "how", "by_stage"),
    [(1, 1, "on", [0]), (2, 1, "on", [1]), (1, 3, "off", [1, 2, 1]), (1, 3, "on", [2, 2, 2]), (2, 2, "on", [3, 3])],
)
def test_communicators_are_those_of_a_stage_and_of_each_edge(tp: int, pp: int, how: str, by_stage: list[int]) -> None:
    wish = resolved(device="cuda", tp=tp, pp=pp, plan_ahead=how)
    one = outside_memory.CHANNELS * outside_memory.CONNECTIONS * outside_memory.CONNECTION_BYTES
    mesh = Mesh(tp=tp, pp=pp)
    held = [outside_memory.communicator_bytes(mesh.coord(mesh.tp_group(stage)[-1]), wish) for stage in range(pp)]
    assert held == [count * one for count in by_stage]
    assert outside_memory.communicator_bytes(mesh.coord(0), resolved(tp=tp, pp=pp, plan_ahead=how)) == 0
