"""The benchmark of two GPUs on the CPU with a tiny shape: floors, traces, picture, and one whole run over gloo."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from evals.bench_gpu import pair_floor, pair_steps
from evals.bench_gpu.pair import main
from evals.bench_gpu.pair_floor import LAYOUTS, PAIR_SHAPES, Message
from evals.bench_gpu.pair_plot import svg
from evals.bench_gpu.pair_records import FirstRecord, LinkRecord, PairRun, Timeline
from evals.bench_gpu.pair_worker import fill, share_of
from rocm_serve.models.qwen3_5.spec import ConfigFormats, parse_config, stage_params
from rocm_serve.parallel.layout import shape_at
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.trace import StageTrace, StepTrace
from rocm_serve.tuning import floor
from rocm_serve.tuning.floor import Ceilings
from rocm_serve.tuning.floor_prefill import Mixed
from rocm_serve.tuning.shapes import config_of

Q35 = PAIR_SHAPES["q35tp1"]
SLOW = 1e9  # bytes/s of a link


def test_the_floor_of_one_gpu_is_that_of_the_decode_benchmark() -> None:
    least = pair_floor.decode(Q35, LAYOUTS["tp1"], 16, 1024, Ceilings())
    distinct = floor.expected_distinct(Q35.experts, Q35.top_k, 16)
    assert least.seconds(SLOW) == pytest.approx(
        floor.seconds(floor.step(Q35, 16, 1024, [distinct] * Q35.layers), Ceilings())
    )


@pytest.mark.parametrize("batch", [1, 16, 256])
def test_two_ranks_have_a_little_more_than_half_of_the_work_and_81_sums(batch: int) -> None:
    one, two = (pair_floor.decode(Q35, LAYOUTS[name], batch, 1024, Ceilings()) for name in ("tp1", "tp2"))
    assert 0.5 < two.kernels_s / one.kernels_s < 0.53
    assert two.messages == (Message("all_reduce", 81, batch * 4096),)
    assert two.seconds(SLOW) == pytest.approx(two.kernels_s + 81 * batch * 4096 / SLOW)


def test_two_stages_gain_nothing_for_one_request_and_overlap_for_two() -> None:
    one = pair_floor.decode(Q35, LAYOUTS["tp1"], 1, 1024, Ceilings())
    alone, both = (pair_floor.decode(Q35, LAYOUTS["pp2"], batch, 1024, Ceilings()) for batch in (1, 2))
    assert alone.kernels_s == pytest.approx(one.kernels_s) and alone.messages == (Message("send", 1, 4096),)
    assert one.kernels_s < both.kernels_s < 1.3 * one.kernels_s, "the last stage has lm_head, and sets the pace"
    assert both.messages == ()


def test_prompts_are_cut_into_chunks_and_chunks_hold_several_prompts() -> None:
    assert pair_floor.plans_of(2, 128, 64) == [Mixed(64), Mixed(64, 64), Mixed(64), Mixed(64, 64)]
    assert pair_floor.plans_of(5, 32, 64) == [Mixed(32, prompts=2), Mixed(32, prompts=2), Mixed(32, prompts=1)]
    with pytest.raises(AssertionError, match="whole chunks"):
        pair_floor.plans_of(1, 100, 64)


def test_stages_halve_the_time_of_many_prompts_but_not_of_one_plan() -> None:
    def seconds(layout: str, prompts: int) -> float:
        return pair_floor.prefill(Q35, LAYOUTS[layout], prompts, 1024, 1024, Ceilings()).kernels_s

    assert seconds("pp2", 1) == pytest.approx(seconds("tp1", 1))
    assert 0.5 < seconds("pp2", 64) / seconds("tp1", 64) < 0.56


def _step(seq: int, works: int, at_ms: float, recurrent: int | None = None) -> StepTrace:
    return StepTrace(seq, works, works if recurrent is None else recurrent, 2, 0, round(at_ms * 1e6))


def test_an_advance_is_as_many_plans_as_the_batch_is_split_into() -> None:
    halves = [_step(i, 4, 3.0 * i) for i in range(8)]
    assert pair_steps.advances_ms(halves, 8).median == pytest.approx(6.0)
    assert pair_steps.advances_ms(halves, 4).median == pytest.approx(3.0)
    uneven = [_step(i, 4 if i % 2 else 5, i) for i in range(9)]
    assert pair_steps.advances_ms(uneven, 9).median == pytest.approx(2.0)
    with pytest.raises(AssertionError, match="rows of prompts"):
        pair_steps.advances_ms([_step(0, 4, 0), _step(1, 4, 1, recurrent=3)], 4)


def _stamps(*steps: tuple[int, float, float]) -> list[StageTrace]:
    return [StageTrace(seq, 1, round(start * 1000), round(end * 1000)) for seq, start, end in steps]


def test_a_rank_is_at_work_while_one_of_its_steps_runs() -> None:
    stamps = {0: _stamps((0, 0, 9), (1, 10, 14), (2, 16, 20)), 1: _stamps((0, 9, 10), (1, 14, 20), (2, 20, 24))}
    assert pair_steps.at_work(stamps, range(1, 3)) == {0: 0.8, 1: 1.0}
    assert pair_steps.bars(stamps, range(3)) == [(0, 1, 1, 5), (0, 2, 7, 11), (1, 0, 0, 1), (1, 1, 5, 11)]
    with pytest.raises(AssertionError, match="rank 0 has 2 stamps of 3 steps"):
        pair_steps.at_work(stamps, range(1, 4))


def test_a_message_alone_is_looked_up_at_its_size_or_above() -> None:
    links = [LinkRecord("all_reduce", 4096, 10.0, 9.0, 11.0, "graph"), LinkRecord("send", 8192, 4.0, 4.0, 4.0, "")]
    run = PairRun(machine={}, command="", seed=0, shape="tiny", measured_ceilings=(1, 1, 1), ceilings=(1, 1, 1))
    run.links += links
    assert run.alone_us("all_reduce", 4000) == 10.0 and run.alone_us("all_reduce", 8000) is None
    assert run.link_bytes_s == pytest.approx(8192 / 4e-6)


def test_a_first_request_is_late_beside_the_later_ones() -> None:
    assert FirstRecord("tp2", (9.0, *[4.0] * 9), 1.0).late_ms == 5.0


def test_the_picture_has_a_box_for_every_step_of_each_gpu() -> None:
    bars = [(0, 1, 0.0, 4.0), (0, 2, 4.0, 9.0), (1, 1, 4.0, 8.0)]
    drawn = svg([Timeline("pp2", "decode", 2, bars)], [], "a < b")
    assert drawn.count("<title>plan") == 3 and "a &lt; b" in drawn and "GPU 1" in drawn
    assert drawn.startswith("<svg") and drawn.rstrip().endswith("</svg>")


def _filled(mesh: Mesh, rank: int) -> dict[str, torch.Tensor]:
    facts, coord = parse_config(config_of(PAIR_SHAPES["tiny"]), None), mesh.coord(rank)
    params = stage_params(facts, coord, formats=ConfigFormats(facts), mtp=False)
    dtypes = {"fp8": torch.float8_e4m3fn, "model": torch.float32, "float32": torch.float32}
    shapes = {name: shape_at(param, coord.place) for name, param in params.items()}
    into = {name: torch.full(shapes[name], torch.nan).to(dtypes[param.dtype]) for name, param in params.items()}
    fill(params, coord, into, seed=5)
    return {name: tensor.float() for name, tensor in into.items()}


def test_made_up_weights_of_every_layout_are_shares_of_the_same_tensors() -> None:
    whole = _filled(Mesh(1, 1), 0)
    assert all(bool(tensor.isfinite().all()) for tensor in whole.values())
    stages = [_filled(Mesh(1, 2), rank) for rank in (0, 1)]
    assert {name for stage in stages for name in stage} == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for stage in stages for name, tensor in stage.items())
    facts = parse_config(config_of(PAIR_SHAPES["tiny"]), None)
    split = 0
    for rank in (0, 1):
        coord = Mesh(2, 1).coord(rank)
        params = stage_params(facts, coord, formats=ConfigFormats(facts), mtp=False)
        for name, tensor in _filled(Mesh(2, 1), rank).items():
            assert torch.equal(tensor, share_of(whole[name], params[name], coord.place)), name
            split += tensor.shape != whole[name].shape
    assert split > 20


@pytest.mark.by_hand
@pytest.mark.multirank
@pytest.mark.slow
def test_a_run_over_gloo_measures_every_point_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, drawing = tmp_path / "run.json", tmp_path / "run.svg"
    how = [
        "--device",
        "cpu",
        "--shape",
        "tiny",
        "--layouts",
        "tp1",
        "tp2",
        "pp2",
        "pp2-ahead",
        "--one-by-one",
        "--mem-fraction",
        "0.1",
    ]
    sizes = [
        "--batch",
        "1",
        "4",
        "--prefill",
        "2",
        "--ctx",
        "64",
        "--prompt",
        "32",
        "--chunk",
        "64",
        "--steps",
        "6",
        "--seed",
        "3",
    ]
    assert main(["run", *how, *sizes, "--json", str(file), "--plot", str(drawing)]) == 0
    run = msgspec.json.decode(file.read_bytes(), type=PairRun)
    assert not run.failures and str(tmp_path) not in run.command
    points = {(one.layout, one.part, one.batch): one for one in run.points}
    assert len(points) == 4 * 3
    for (layout, part, batch), one in points.items():
        assert one.ratio == pytest.approx(one.floor_ms / one.ms)
        assert len(one.at_work) == (1 if layout == "tp1" else 2)
        assert all(0 < share <= 1 for share in one.at_work.values())
        if part == "decode":
            assert one.tokens_s == pytest.approx(batch / one.ms * 1e3)
            assert 64 < one.context < 100
            assert one.steps >= 5 * min(batch, LAYOUTS[layout].pp)
            assert one.in_flight == min(batch, LAYOUTS[layout].pp) + LAYOUTS[layout].ahead
        else:
            assert one.tokens_s == pytest.approx(2 * 32 / one.ms * 1e3) and one.steps == 1
    assert {one.what for one in run.links} == {"all_reduce", "send"}
    assert [len(one.ms) for one in run.first] == [10, 10, 10, 10]
    apart = {(one.layout, one.company): one.most for one in run.agreement}
    assert len(run.agreement) == len(apart) == 8 and apart["tp1", False] == 0
    assert apart["pp2", False] == apart["pp2-ahead", False] == 0, "stages change no bit on a CPU"
    assert 0 < apart["tp2", False] < 1e-3
    assert drawing.read_text().count("<title>plan") >= 12
    capsys.readouterr()
    assert main(["table", "--json", str(file)]) == 0
    assert f"| 4 | pp2 | {points['pp2', 'decode', 4].context} |" in capsys.readouterr().out
    assert main(["plot", "--json", str(file)]) == 2


def test_without_two_gpus_nothing_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["run"]) == 2
    assert "fewer than two GPUs" in capsys.readouterr().err
