"""--graph-max-batch: what is captured, what is refused with its reason, and sizes that never exceed what may run."""

from __future__ import annotations

import msgspec
import pytest

from rocm_serve.config.graphs import batch_sizes, decide, prompt_sizes, verified_sizes
from rocm_serve.config.schema import DeviceName, ServeConfig
from rocm_serve.errors import UserError

PLAIN: dict[str, object] = {"draft_tokens": 0, "all_reduce": "library", "expert_exchange": "local"}


def config(**wishes: object) -> ServeConfig:
    return msgspec.convert({"model": "some/dir"} | wishes, ServeConfig)


def decided(
    wishes: dict[str, object], device: DeviceName = "rocm", nnodes: int = 1, **chosen: object
) -> tuple[object, str, list[str]]:
    """Return the value, its reason and the notes."""
    reasons: dict[str, str] = {}
    notes: list[str] = []
    found = decide(config(**wishes), device, nnodes, PLAIN | chosen, reasons, notes)
    assert found.keys() == {"graph_max_batch"}
    return found["graph_max_batch"], reasons.get("graph_max_batch", ""), notes


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(0, ()), (1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (48, (1, 2, 4, 8, 16, 32, 48))],
)
def test_sizes_are_powers_of_two_and_the_largest(most: int, sizes: tuple[int, ...]) -> None:
    assert batch_sizes(most) == sizes


@pytest.mark.parametrize(
    ("most", "drafts", "sizes"),
    [(5, 3, (1, 2, 4, 5)), (256, 1, (1, 2, 4, 8, 16, 32, 64, 128)), (100, 3, (1, 2, 4, 8, 16, 32, 64))],
)
def test_batches_with_drafts_have_256_rows_at_most(most: int, drafts: int, sizes: tuple[int, ...]) -> None:
    assert verified_sizes(most, drafts) == sizes


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (63, ()),
        (64, (64,)),
        (100, (64, 100)),
        (512, (64, 128, 256, 384, 512)),
        (2048, (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)),
    ],
)
def test_long_prompts_are_padded_by_a_third_at_most_and_a_whole_chunk_is_not(most: int, sizes: tuple[int, ...]) -> None:
    assert prompt_sizes(most) == sizes


@pytest.mark.parametrize("device", ["rocm", "cuda"])
def test_auto_is_what_may_run_at_most_256(device: DeviceName) -> None:
    assert decided({}, device) == (64, "auto: --max-running-requests 64", [])
    assert decided({"max_running_requests": 1000}, device) == (
        256,
        "auto: --max-running-requests 1000, at most 256",
        [],
    )


def test_a_wish_counts_up_to_what_may_run() -> None:
    assert decided({"graph_max_batch": 8}) == (8, "", [])
    assert decided({"graph_max_batch": 512, "max_running_requests": 600}) == (512, "", [])
    assert decided({"graph_max_batch": 100}) == (64, "no batch is larger than --max-running-requests 64", [])


def test_two_ways_to_have_none() -> None:
    assert decided({"graph_max_batch": 0}) == (0, "", [])
    assert decided({"enforce_eager": True}) == (0, "--enforce-eager", [])
    assert decided({"enforce_eager": True, "graph_max_batch": 0}) == (0, "--enforce-eager", [])


def test_a_cpu_has_none_and_says_so_to_who_asked() -> None:
    assert decided({}, "cpu") == (0, "", [])
    told = "--graph-max-batch 8 has no effect: a CPU has no device graphs"
    assert decided({"graph_max_batch": 8}, "cpu") == (0, "", [told])


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ({"all_reduce": "aiter"}, "--all-reduce aiter shares the buffers"),
        ({"expert_exchange": "torch"}, "--expert-exchange torch has the host count"),
        ({"expert_exchange": "mori"}, "--expert-exchange mori: no graph with MORI's kernels"),
        ({"speculative_expert_exchange": "torch", "draft_tokens": 1}, "--expert-exchange torch has the host count"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_its_reason(chosen: dict[str, object], why: str) -> None:
    value, reason, notes = decided({}, **chosen)
    assert value == 0 and reason.startswith(f"no device graphs: {why}") and not notes
    _, _, notes = decided({"graph_max_batch": 8}, **chosen)
    assert [note.startswith(f"--graph-max-batch 8 has no effect: {why}") for note in notes] == [True]


def test_stages_over_hosts_are_captured_and_a_stage_over_hosts_is_not() -> None:
    assert decided({"tp": 8, "pp": 2, "nnodes": 2}, nnodes=2)[0] == 64
    value, reason, _ = decided({"tp": 16, "nnodes": 2}, nnodes=2)
    assert value == 0 and "on several hosts" in reason


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(UserError, match=r"--graph-max-batch -1: legal: 0 \(no device graphs\) or more"):
        decided({"graph_max_batch": -1})
