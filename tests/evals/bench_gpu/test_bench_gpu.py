"""The benchmark of decode at a tiny shape on the CPU: it runs, judges, stops at its budget. No time is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import msgspec
import pytest
import torch

from evals.bench_gpu import decode, op_level, stage, step_level
from evals.bench_gpu.__main__ import main, parser
from evals.bench_gpu.op_level import op_points
from evals.bench_gpu.plot import lines_of, svg
from evals.bench_gpu.records import Run, StepRecord, kernel_lines, table
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.ops.fp8 import FN, FNUZ, dequantise
from rocm_serve.tuning import cases
from rocm_serve.tuning.floor import Ceilings
from rocm_serve.tuning.operands import Bench
from rocm_serve.tuning.shapes import SHAPES
from rocm_serve.tuning.weights import fp8_weight

TINY = ["decode", "--cpu", "--shape", "tiny", "--batch", "2", "--ctx", "40", "--seed", "3", "--steps", "2"]


@cache
def _rank() -> stage.Rank:
    return stage.rank_of("tiny", running=8, longest=128)


def _bench() -> Bench:
    rank = _rank()
    return Bench(SHAPES["tiny"], replace(rank.ops), rank.device, torch.float32, torch.float8_e4m3fn, 3)


def test_steps_of_a_tiny_model_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, drawing = tmp_path / "run.json", tmp_path / "run.svg"
    command = [*TINY, "--levels", "step", "--modes", "eager", "ahead", "--json", str(file), "--plot", str(drawing)]
    assert main(command) == 0
    run = msgspec.json.decode(file.read_bytes(), type=Run)
    assert not run.failures
    assert run.command.startswith("python -m evals.bench_gpu decode --cpu") and str(tmp_path) not in run.command
    assert [(one.mode, one.batch, one.context) for one in run.steps] == [("eager", 2, 40), ("ahead", 2, 40)]
    step, ahead = run.steps
    assert ahead.wall_ms > 0 and ahead.floor_ms > 0
    assert step.ratio == pytest.approx(step.floor_ms / step.wall_ms)
    assert step.floor_ms == pytest.approx(sum(step.parts_ms.values()))
    assert 2 <= step.distinct <= 4, "two rows choose two of eight experts each"
    assert drawing.read_text().count("<polyline") == 1, "planned ahead, as a server has it"
    capsys.readouterr()
    assert main(["table", "--json", str(file)]) == 0
    assert f"| tiny, 40 | 2 | {ahead.wall_ms:.3f} |  |  | {step.wall_ms:.3f} |" in capsys.readouterr().out
    assert main(["plot", "--json", str(file)]) == 2


class _Repeats:
    """A recorder of a machine without graphs: a replay runs the step again."""

    def __init__(self, max_model_len: int, *, beside: bool) -> None:
        self.replay: Callable[[], object] | None = None

    def host_copies(self, contexts_B: torch.Tensor, slots_B: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(contexts_B.tolist()), tuple(slots_B.tolist())

    def record(self, run: Callable[[], object]) -> Callable[[], object]:
        self.replay = run
        return run


def test_captured_steps_touch_no_more_experts_and_draw_the_tokens_of_plain_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_level, "Graphs", _Repeats)
    monkeypatch.setattr(LoadedStage, "graph_refusal", None)
    monkeypatch.setattr(step_level, "device_time", lambda stage, graphs: (None, "" if graphs.replay else "none"))
    drawn: dict[bool, list[list[int]]] = {True: [], False: []}
    loaded = stage.load(_rank(), 3)
    for captured in (True, False):
        runner = loaded.runner(num_pages=24, num_slots=4)
        step_level.randomise(runner.cache, torch.Generator().manual_seed(1))
        chosen = step_level.stepper(loaded, runner, 2, captured=captured)
        assert (chosen.graphs is not None) == captured
        decoding = step_level.Decoding(chosen.runner, 512, 2, 40, 8, 0)
        for _ in range(3):
            decoding.step()
            drawn[captured].append(decoding.drawn)
    assert drawn[True] == drawn[False]
    decoding = step_level.Decoding(
        step_level.stepper(loaded, runner, 2, captured=True, ahead=True).runner, 512, 2, 40, 20, 50
    )
    decoding.step()
    assert len(decoding.steps_ahead(4)) == 4
    decoding.step()  # the table has been told every token
    for ahead in (False, True):
        found = step_level.measure(loaded, runner, 2, 40, 99 + ahead, captured=True, ahead=ahead, steps=3)
        assert found.wall > 0 and len(found.distinct) == 4
        assert all(2 <= count <= 4 for count in found.distinct)


@pytest.mark.parametrize(
    "make",
    [
        partial(cases.attention, rows=3, context=37),
        partial(cases.experts, rows=3),
        partial(cases.gdn, rows=3),
        partial(cases.conv, rows=3),
        partial(cases.step, rows=3),
        partial(cases.route, rows=3),
        partial(cases.qk, rows=3),
        partial(cases.shared_add, rows=3),
        partial(cases.linear, rows=3, name="out_proj"),
        partial(cases.head, rows=3),
        partial(cases.norms, rows=9, residual=True),
        partial(cases.quantise, rows=9),
        partial(cases.kv_write, rows=9),
        partial(cases.attention, rows=3, context=37, kv="fp8"),
        partial(cases.fp8_linear, rows=9, name="out_proj"),
        partial(cases.attention_prefill, rows=37),
        partial(cases.attention_prefill, rows=21, context=40, count=2),
        partial(cases.attention_prefill, rows=21, kv="fp8"),
        partial(cases.gdn_chunk, rows=70),
        partial(cases.gdn_chunk, rows=9, count=3),
        partial(cases.prompt_conv, rows=9, count=3),
    ],
    ids=lambda make: f"{make.func.__name__} {make.keywords}",
)
def test_an_op_is_judged_and_timed(make: op_level.Make) -> None:
    found = op_level.measure(_bench(), "tiny", make, Ceilings())
    assert found.right and found.error < 1e-4
    assert found.us > 0 and found.ratio == pytest.approx(found.floor_us / found.us)


@pytest.mark.parametrize(
    ("op", "make"),
    [
        ("attention_decode", partial(cases.attention, rows=3, context=37)),
        ("moe_experts", partial(cases.experts, rows=3)),
        ("gdn_decode", partial(cases.gdn, rows=3)),
        ("linear", partial(cases.linear, rows=3, name="gate")),
        ("add_rms_norm", partial(cases.norms, rows=9, residual=True)),
        ("fp8_linear", partial(cases.fp8_linear, rows=9, name="gate")),
        ("attention_prefill", partial(cases.attention_prefill, rows=9, context=16, count=2)),
        ("gdn_chunk", partial(cases.gdn_chunk, rows=9, count=2)),
        ("causal_conv", partial(cases.prompt_conv, rows=9, count=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fast_op_that_is_wrong_is_called_wrong(op: str, make: op_level.Make) -> None:
    """Wrong in one row only, the last; ops that write to an argument do it there."""
    bench = _bench()
    right = getattr(bench.ops, op)

    def wrong(*arguments: torch.Tensor, **more: object) -> torch.Tensor:
        made = right(*arguments, **more)
        made[-1] *= 1.02
        return made

    object.__setattr__(bench.ops, op, wrong)
    assert not op_level.measure(bench, "tiny", make, Ceilings()).right


def test_an_op_that_leaves_rows_unwritten_is_called_wrong() -> None:
    bench = _bench()
    object.__setattr__(bench.ops, "attention_decode", lambda *arguments, **more: arguments[4])
    found = op_level.measure(bench, "tiny", partial(cases.attention, rows=2, context=20), Ceilings())
    assert not found.right and found.error == op_level.NOT_FINITE


def test_another_librarys_kernel_may_fail_and_is_named() -> None:
    def make(bench: Bench, rows: int) -> cases.Case:
        case = cases.norms(bench, rows, residual=False)
        return replace(case, peers={"good": case.calls, "bad": [lambda: 1 / 0]})

    found = op_level.measure(_bench(), "tiny", partial(make, rows=4), Ceilings())
    assert list(found.peers) == ["good"] and found.right
    assert found.peers_failed == {"bad": "ZeroDivisionError: division by zero"}


def test_a_spent_budget_leaves_points_out_and_names_them(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert main([*TINY, "--levels", "step", "ops", "--budget-s", "0", "--json", str(file)]) == 0
    run = msgspec.json.decode(file.read_bytes(), type=Run)
    assert not run.steps and not run.ops
    assert "tiny: all steps" in run.left_out
    assert any("attention" in line for line in run.left_out)
    assert any("not reached" in line for line in table(run))


def test_without_a_gpu_nothing_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "device_here", lambda: torch.device("cpu"))
    assert main(["decode", "--shape", "tiny"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_a_wish_that_no_shape_can_have_is_refused_before_any_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--op", "layers.3.gdn_chunk=reference"]) == 2
    out, err = capsys.readouterr()
    assert err == (
        "bench_gpu: --op layers.3.gdn_chunk=reference: layer 3 does not call gdn_chunk; it runs in layers 0 to 2\n"
    )
    assert not out


def test_what_has_an_aim_comes_first() -> None:
    makes = [(make.func.__name__, make.keywords) for make in op_points((1, 16), (1024,))]  # type: ignore[attr-defined]
    assert makes[:2] == [("attention", {"rows": 16, "context": c}) for c in (8192, 65536)]
    assert len(makes) == len({(name, *sorted(k.items())) for name, k in makes}), "no case comes twice"


@pytest.mark.parametrize("dtype", [FN, FNUZ])
def test_random_fp8_weights_are_finite_and_make_rows_of_size_one(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(5)
    weight, scale = fp8_weight(256, 384, dtype=dtype, device=torch.device("cpu"), g=g)
    wide = dequantise(weight, scale)
    assert bool(wide.isfinite().all()) and float((wide == 0).float().mean()) < 0.01
    rows = torch.randn(64, 384, generator=g) @ wide.T
    assert 0.8 < float(rows.std()) < 1.25


def test_sets_of_one_row_share_no_expert_while_the_deck_lasts() -> None:
    ids = torch.cat([one.flatten() for one in _bench().choices(1, 4)])
    assert sorted(ids.tolist()) == list(range(8))


def test_kernels_of_a_step_are_listed_the_longest_first_and_the_rest_together() -> None:
    kernels = {f"kernel {i}": (2, 10.0 - i) for i in range(5)}
    lines = kernel_lines(_step(1, kernels), most=3)
    assert lines[0] == "       40.0 us    10 x  in all, of q35tp1 B 1 ctx 1024"
    assert [line.split("x  ")[1] for line in lines[1:]] == ["kernel 0", "kernel 1", "kernel 2", "2 others"]
    assert lines[-1] == "       13.0 us     4 x  2 others"
    assert kernel_lines(_step(1, {})) == []


def _step(batch: int, kernels: dict[str, tuple[int, float]]) -> StepRecord:
    return StepRecord(
        shape="q35tp1",
        mode="graphs",
        batch=batch,
        context=1024,
        wall_ms=4.0,
        low=4.0,
        high=4.0,
        device_ms=None,
        device_how="",
        floor_ms=1.0,
        uniform_floor_ms=2.1,
        ratio=0.25,
        uniform_ratio=0.525,
        distinct=8,
        uniform_distinct=8,
        parts_ms={},
        kernels=kernels,
    )


def test_the_plot_shows_ours_and_vllm_over_the_same_floor() -> None:
    ahead = msgspec.structs.replace(_step(64, {}), mode="ahead", uniform_ratio=0.75)
    ours, vllm = lines_of([ahead, *(_step(batch, {}) for batch in (1, 64))])
    assert ours == ("q35tp1, ctx 1024", [(1, 0.525), (64, 0.75)], False), "as a server has it"
    assert vllm[1][0] == (1, pytest.approx(2.1 / 4.20)) and vllm[2]
    assert svg([ours, vllm], "a < b").count("<polyline") == 2


def test_contexts_by_default_are_those_that_every_shape_has_positions_for() -> None:
    def chosen(*words: str) -> list[int]:
        arguments = parser().parse_args(["decode", "--steps", "40", *words])
        assert arguments.ctx is None
        return decode.contexts(arguments)

    assert chosen() == [1024, 8192, 32768]
    assert chosen("--shape", "tiny") == chosen("--shape", "q35tp1", "tiny") == [1024, 8192]
    assert chosen("--shape", "tiny", "--steps", "1000000") == [1024]  # which is refused by name
