"""Fits or not: the published 2.4T configuration on the GPUs people own, against numbers counted elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from rocm_serve.checkpoint.reader import INDEX
from rocm_serve.config.schema import ServeConfig
from rocm_serve.diagnostics.launch import plan_launch
from rocm_serve.diagnostics.launch_result import Experts, Launch
from rocm_serve.diagnostics.show import head_lines, show, to_json, verdict
from rocm_serve.errors import UserError
from rocm_serve.executor.limits import effective_limits
from rocm_serve.messages import WorkerLoaded
from rocm_serve.platform.gpus import GPUS, Gpu, gpu_of
from tests.checkpoint import published

Plan = Callable[..., Launch]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("published") / "config.json"
    path.write_text(json.dumps(published.config()))
    return path


@pytest.fixture(scope="module")
def planned(model: Path) -> Plan:
    made: dict[tuple[object, ...], Launch] = {}

    def plan(gpu: str, tp: int, pp: int, **wishes: object) -> Launch:
        key = gpu, tp, pp, str(sorted(wishes.items()))
        if key not in made:
            made[key] = plan_launch(
                msgspec.convert({"model": str(model), "tp": tp, "pp": pp} | wishes, ServeConfig), GPUS[gpu]
            )
        return made[key]

    return plan


def gb(nbytes: int) -> float:
    return round(nbytes / 1e9, 1)


def test_two_nodes_of_mi300x_hold_the_2_4t_model_as_published_numbers_say(planned: Plan) -> None:
    launch = planned("mi300x", 8, 2)
    assert launch.fits and launch.resolved.nnodes == 2
    for one in launch.ranks:
        assert gb(one.weights.weight_bytes["layers"]) == 154.2
        assert one.weights.total_bytes - one.weights.weight_bytes["layers"] == 2_034_237_440 * 2 // 8 + (
            8192 * 2 if one.weights.stage else 0  # the final norm
        )
    assert launch.legal.tp == (1, 2, 4, 8, 16)
    assert (launch.legal.pp, launch.legal.ep) == (92, (1, 2, 4, 8))


def test_experts_over_8_ranks_are_planned_with_and_without_sending_rows(planned: Plan) -> None:
    plain = planned("mi300x", 8, 2, chunked_prefill_size=512)
    local = planned("mi300x", 8, 2, ep=8, chunked_prefill_size=512)
    mori = planned("mi300x", 8, 2, ep=8, expert_exchange="mori", allow_unvalidated=True, chunked_prefill_size=512)
    assert plain.experts == Experts(slots=512, slices=8, shared_extra=0)
    assert local.experts == Experts(slots=64, slices=1, shared_extra=0)
    assert mori.experts is not None and round(mori.experts.shared_extra / 1e9, 2) == 4.05
    assert (local.legal.tp, local.legal.ep) == ((8, 16), (1, 2, 4, 8))
    assert local.fits and mori.fits and mori.resolved.expert_capacity == 256
    for before, one, other in zip(plain.ranks, local.ranks, mori.ranks, strict=True):
        assert one.weights.total_bytes == before.weights.total_bytes
        assert one.allowed == before.allowed and (one.heap, one.exchange) == (0, 0)
        assert other.weights.total_bytes - one.weights.total_bytes == mori.experts.shared_extra
        assert other.heap == 4 << 30 and other.allowed == one.allowed - other.heap
        assert 0 < other.exchange < other.step
        assert other.cache == other.allowed - other.weights.total_bytes - other.step
    text = "\n".join(head_lines(mori))
    assert "experts: 64 slots a rank, each expert whole; exchange mori, up to 256 rows a rank" in text
    assert "the shared expert is whole on every rank: 4.052 GB more than cut" in text
    assert "4.295 GB of MORI's heap" in text and "not there yet" not in text
    assert "experts:" not in "\n".join(head_lines(plain))
    said = json.loads(to_json(mori))
    assert (said["ep"], said["expert_exchange"], said["expert_capacity"]) == (8, "mori", 256)
    assert said["ranks"][3]["heap_bytes"] == 4 << 30 and said["experts"]["slots"] == 64


def test_long_chunks_need_more_of_moris_heap_and_are_told_so(planned: Plan) -> None:
    wishes = {"ep": 8, "expert_exchange": "mori", "allow_unvalidated": True, "expert_capacity": 16384}
    launch = planned("mi355x", 8, 2, **wishes)
    assert {one.heap for one in launch.ranks} == {5 << 30}


@pytest.mark.parametrize(
    ("wishes", "preparing"),
    [
        ({}, 512 * (3 * 256 * 8192 + 4 * 3 * 2 * 64)),
        ({"ep": 8}, 64 * (3 * 2048 * 8192 + 4 * 3 * 16 * 64)),
        ({"op": {"moe_experts": "triton"}}, 0),
    ],
)
def test_weights_of_a_layer_exist_twice_while_aiter_lays_them_out(
    planned: Plan, wishes: dict[str, object], preparing: int
) -> None:
    assert {one.preparing for one in planned("mi300x", 8, 2, **wishes).ranks} == {preparing}
    assert {one.preparing for one in planned("h200", 8, 3).ranks} == {0}


def test_weights_that_fit_but_cannot_be_laid_out_are_a_no(planned: Plan, model: Path) -> None:
    short = {"chunked_prefill_size": 512}
    config = ServeConfig(model=str(model), tp=8, pp=2, max_model_len=1024, max_running_requests=1, **short)
    one = planned("mi300x", 8, 2, **short).ranks[8]  # of longer steps, so its caches are enough
    least = one.weights.total_bytes + one.step + 4 * one.slot + 64 * one.page
    assert least < one.weights.total_bytes + one.preparing
    tight = Gpu("tight", "rocm", "gfx942", 304, int((least + one.runtime) / 0.9) + 1)
    launch = plan_launch(config, tight)
    assert launch.limits is None
    assert launch.why is not None and "laying them out for their kernels 3.222 GB more" in launch.why


def test_the_stages_are_46_46_and_with_the_draft_layer_47_45_would_be_neutral(planned: Plan) -> None:
    launch = planned("mi300x", 8, 2)
    assert (launch.split.layers, launch.neutral.layers) == ((46, 46), (46, 46))
    assert launch.server_with_mtp is not None and launch.neutral_with_mtp is not None
    assert launch.neutral_with_mtp.layers == (47, 45)
    assert launch.neutral_with_mtp.heaviest < launch.server_with_mtp.heaviest
    draft = launch.server_with_mtp.stage_bytes[1] - launch.split.stage_bytes[1]
    assert round(draft / 1e9, 2) == 4.13  # 3.62 and its own embedding


def test_caches_cost_what_the_shapes_of_the_model_say(planned: Plan) -> None:
    first, last = planned("mi300x", 8, 2).ranks[0], planned("mi300x", 8, 2).ranks[8]
    assert (first.page, last.page) == (16 * 1024 * 11, 16 * 1024 * 12)
    assert first.slot + last.slot == 73_411_584
    half = planned("mi300x", 8, 2, kv_cache_dtype="fp8_e4m3").ranks[0]
    assert 2 * half.page == first.page


@pytest.mark.parametrize(
    ("gpu", "tp", "pp", "why", "instead"),
    [
        ("mi355x", 8, 1, "309.4 GB, one MI355X has 309.2 GB", "--tp 8 --pp 2 fits: 16 x MI355X on 2 nodes"),
        ("h200", 8, 2, "154.7 GB, one H200 has 150.1 GB", "--tp 8 --pp 3 fits: 24 x H200 on 3 nodes"),
    ],
)
def test_too_few_gpus_are_a_no_with_the_bytes_and_what_would_do(
    planned: Plan, gpu: str, tp: int, pp: int, why: str, instead: str
) -> None:
    launch = planned(gpu, tp, pp)
    assert not launch.fits and launch.limits is None
    assert launch.why is not None and why in launch.why
    assert launch.fits_with == instead
    assert verdict(launch) == f"does not fit: {launch.why}; {instead}"


def test_limits_are_those_that_the_server_would_compute_from_the_same_budgets(planned: Plan) -> None:
    launch = planned("mi300x", 8, 2, max_running_requests=16, chunked_prefill_size=8192, mem_fraction=0.95)
    budgets = [WorkerLoaded(r.weights.rank, 1, r.cache, r.page, r.slot) for r in launch.ranks]
    assert launch.limits == effective_limits(launch.resolved, budgets)
    pages, slots = launch.limits.num_pages, launch.limits.num_slots
    for one in launch.ranks:
        held = one.weights.total_bytes + one.step + pages * one.page + (slots + 1) * one.slot
        assert held <= one.allowed <= 0.95 * launch.gpu.hbm_bytes - one.runtime


def test_longer_requests_are_fewer_at_once_and_memory_alone_never_says_less(planned: Plan) -> None:
    launch = planned("mi300x", 8, 2)
    lengths = [c.length for c in launch.concurrency]
    assert lengths == [1024, 4096, 8192, 32768, 131072, 262144]
    at_once = [c.at_once for c in launch.concurrency]
    assert at_once == sorted(at_once, reverse=True) and at_once[-1] >= 1
    assert all(c.at_once <= c.by_memory for c in launch.concurrency)


def test_a_context_that_does_not_fit_is_a_no_with_the_one_that_fits_every_rank(model: Path) -> None:
    config = ServeConfig(model=str(model), tp=8, pp=2)
    tight = Gpu("tight", "rocm", "gfx942", 304, 177 * 10**9)
    launch = plan_launch(config, tight)
    assert launch.why is not None and "one request of 262144 tokens does not fit" in launch.why
    length = int(launch.why.split("--max-model-len ")[1].split(" ")[0])
    assert plan_launch(msgspec.structs.replace(config, max_model_len=length), tight).fits


def test_what_aiter_reserves_for_sums_is_not_there_for_the_model(planned: Plan) -> None:
    plain, aiter = planned("mi300x", 8, 2), planned("mi300x", 8, 2, all_reduce="aiter")
    assert {one.sums for one in plain.ranks} == {0} and {one.sums for one in aiter.ranks} == {12 << 20}
    for one, other in zip(plain.ranks, aiter.ranks, strict=True):
        assert other.allowed == one.allowed - (12 << 20) and other.cache == one.cache - (12 << 20)
    assert any("12.6 MB of AITER's buffers for sums over ranks" in line for line in head_lines(aiter))


def test_a_share_that_leaves_no_room_for_communicators_is_a_no(model: Path) -> None:
    launch = plan_launch(ServeConfig(model=str(model), tp=8, pp=2, mem_fraction=1.0), GPUS["mi300x"])
    assert not launch.fits
    assert launch.why is not None and "communicators and graphs" in launch.why


@pytest.mark.parametrize(
    ("wishes", "nnodes", "said"),
    [
        ({"tp": 3, "pp": 1}, None, "tp 3 cannot be used: .*; legal: 1, 2, 4, 8, 16$"),
        ({"tp": 8, "pp": 93}, None, r"--pp 93: .*; legal: 1\.\.92$"),
        ({"tp": 8, "pp": 2}, 3, "--nnodes 3: 16 ranks do not divide by it; legal: 1, 2, 4, 8, 16$"),
        ({"tp": 8, "pp": 2}, 4, "a stage may not span nodes; legal --nnodes with --pp 2: 1, 2$"),
        ({"tp": 2, "pp": 3}, 2, "a stage may not span nodes; legal --nnodes with --pp 3: 1, 3$"),
        ({"tp": 8, "pp": 2, "max_model_len": 10**6}, None, r"--max-model-len 1000000: .* 2\.\.262144"),
    ],
)
def test_a_launch_that_no_gpu_could_run_is_refused(
    model: Path, wishes: dict[str, object], nnodes: int | None, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        plan_launch(msgspec.convert({"model": str(model)} | wishes, ServeConfig), GPUS["mi300x"], nnodes=nnodes)


def test_json_says_the_same_as_the_plan_rank_by_rank(planned: Plan) -> None:
    launch = planned("mi300x", 8, 2)
    said = json.loads(to_json(launch))
    assert said["fits"] and said["why"] is None and said["kv_tokens"] == said["limits"]["num_pages"] * 16
    assert [r["rank"] for r in said["ranks"]] == list(range(16))
    assert said["ranks"][9]["weight_bytes"] == dict(launch.ranks[9].weights.weight_bytes)
    assert said["splits"]["neutral_with_mtp"]["layers"] == [47, 45]


@pytest.mark.parametrize("terminal", [True, False])
def test_people_read_every_group_of_ranks_and_a_verdict_last(planned: Plan, terminal: bool) -> None:
    launch = planned("mi300x", 8, 2)
    console = Console(force_terminal=terminal, width=200, highlight=False, markup=False, color_system=None)
    with console.capture() as captured:
        show(launch, console)
    lines = captured.get().splitlines()
    text = "\n".join(lines)
    assert "2 x 8 MI300X" in lines[0]
    assert ("│" in text) is terminal
    for fact in ("0..7", "8..15", "154.7 GB", "46/46", "47/45", "at 4096 tokens"):
        assert fact in text
    assert lines[-1] == "fits"


def test_each_node_is_told_its_files_from_the_index_before_they_are_there(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    whole = checkpoints["text-fp8"]
    for name in ("config.json", INDEX):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    small = Gpu("small", "rocm", "gfx942", 304, 2 * 10**9)
    wish = ServeConfig(model=str(tmp_path), tp=2, pp=2, max_model_len=128, max_running_requests=2)
    early = plan_launch(wish, small, nnodes=2)
    later = plan_launch(msgspec.structs.replace(wish, model=str(whole)), small, nnodes=2)
    assert (early.source, later.source) == ("configuration and index", "checkpoint headers")
    assert [n.files for n in early.nodes] == [n.files for n in later.nodes]
    assert [n.nbytes for n in early.nodes] == [None, None]
    assert set(early.missing_files) == {path.name for path in whole.glob("*.safetensors")} and not later.missing_files
    weight_map = json.loads((whole / INDEX).read_text())["weight_map"]
    for node, layers in enumerate((range(2), range(2, 4))):
        needed = {f for t, f in weight_map.items() if any(t.startswith(f"model.layers.{i}.") for i in layers)}
        assert needed <= set(later.nodes[node].files)
        size = sum((whole / f).stat().st_size for f in later.nodes[node].files)
        assert later.nodes[node].nbytes == size
    assert weight_map["model.embed_tokens.weight"] in later.nodes[0].files
    assert weight_map["lm_head.weight"] in later.nodes[1].files


def test_gpus_are_found_by_name_or_size() -> None:
    assert gpu_of(None, None) is None
    assert gpu_of("MI300X", None) is GPUS["mi300x"]
    assert gpu_of("mi300x", 64.0) == Gpu("MI300X", "rocm", "gfx942", 304, 64 << 30)
    unnamed = gpu_of(None, 100.0)
    assert unnamed is not None and unnamed.hbm_bytes == 100 << 30
    with pytest.raises(UserError, match="--gpu mi999: legal: mi300x, mi308x, mi325x, mi355x, h200$"):
        gpu_of("mi999", None)
    with pytest.raises(UserError, match="--hbm-gib 0: legal: above 0"):
        gpu_of(None, 0.0)
    for size in (float("inf"), float("nan"), 1e300):
        with pytest.raises(UserError, match="legal: above 0, up to 1048576"):
            gpu_of("mi300x", size)
