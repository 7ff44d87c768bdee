"""The benchmark of prefill at a tiny shape on the CPU: it runs, counts, stops at its budget. No time is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch

from evals.bench_gpu import op_level, prefill_level, stage, step_level
from evals.bench_gpu.__main__ import main
from evals.bench_gpu.plot import lines_of_prefill, svg
from evals.bench_gpu.prefill import shapes_of
from evals.bench_gpu.prefill_level import Prefilling, busy_in
from evals.bench_gpu.prefill_records import PrefillRecord, prefill_kernel_lines, prefill_markdown
from evals.bench_gpu.records import Run
from rocm_serve.executor import step_rows
from rocm_serve.executor.launched import Launched
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.messages import Plan, StepResult
from rocm_serve.ops.batch import ForwardBatch
from rocm_serve.tuning.floor_prefill import Mixed

TINY = ["prefill", "--cpu", "--shape", "tiny", "--rows", "12", "20", "--most", "20", "--seed", "3", "--steps", "2"]


@cache
def _loaded() -> LoadedStage:
    return stage.load(stage.rank_of("tiny", running=8, longest=128), 3)


def test_steps_of_every_kind_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, drawing = tmp_path / "run.json", tmp_path / "run.svg"
    assert main([*TINY, "--levels", "step", "--json", str(file), "--plot", str(drawing)]) == 0
    run = msgspec.json.decode(file.read_bytes(), type=Run)
    assert not run.failures
    found = [(one.prompts, one.rows, one.context, one.decodes, one.tokens) for one in run.prefills]
    assert found == [(1, 12, 0, 0, 12), (1, 20, 0, 0, 20), (1, 20, 20, 0, 20), (20, 20, 0, 0, 400), (1, 20, 0, 20, 40)]
    for one in run.prefills:
        assert one.ratio == pytest.approx(one.floor_ms / one.wall_ms)
        assert one.floor_ms == pytest.approx(sum(one.parts_ms.values()))
        assert one.tokens_s == pytest.approx(one.tokens / one.wall_ms * 1e3)
        assert 2 <= one.distinct <= 8
    assert drawing.read_text().count("<polyline") == 2
    capsys.readouterr()
    assert main(["table", "--json", str(file)]) == 0
    assert f"| tiny, 12 | {run.prefills[0].wall_ms:.1f} |" in capsys.readouterr().out


def test_a_spent_budget_leaves_points_out_and_names_them(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert main([*TINY, "--budget-s", "0", "--json", str(file)]) == 0
    run = msgspec.json.decode(file.read_bytes(), type=Run)
    assert not run.prefills and not run.ops
    assert "tiny: all steps" in run.left_out
    assert any("gdn_chunk {'rows': 20, 'count': 20}" in line for line in run.left_out)


def test_ops_of_prompts_are_judged_and_written(tmp_path: Path) -> None:
    file, some = tmp_path / "run.json", ["gdn_chunk", "attention_prefill", "prompt_conv"]
    cut = ["--rows", "6", "--most", "6", "--levels", "ops", "--only", *some]
    assert main([*TINY, *cut, "--json", str(file)]) == 0
    run = msgspec.json.decode(file.read_bytes(), type=Run)
    assert not run.failures and all(one.right for one in run.ops)
    assert {(one.op, one.what) for one in run.ops} == {
        *((op, "T 6") for op in ("gdn_chunk", "attention_prefill", "causal_conv")),
        *((op, "6 x T 6") for op in ("gdn_chunk", "attention_prefill")),
        ("attention_prefill", "T 6 ctx 6"),
    }


def test_aims_come_first_and_no_case_twice() -> None:
    assert shapes_of((2048, 8192), ("single",)) == [Mixed(2048), Mixed(8192)]
    assert shapes_of((512,), ("mixed", "context")) == [
        Mixed(2048, decodes=64, decode_context=1024),
        Mixed(2048, context=30720),
    ]
    makes = [(make.func.__name__, make.keywords) for make in op_level.prompt_points((2048, 512))]
    assert makes[0] == ("experts", {"rows": 2048})
    assert len(makes) == len({(name, *sorted(k.items())) for name, k in makes})


class _Noting:
    """A runner that notes the plans that it runs."""

    def __init__(self, runner: object) -> None:
        self._runner, self.plans = runner, list[Plan]()

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def step(self, plan: Plan, hidden_TH: torch.Tensor | None) -> object:
        self.plans.append(plan)
        return self._runner.step(plan, hidden_TH)  # type: ignore[attr-defined]


def test_every_step_prefills_new_requests_beside_the_same_decodes() -> None:
    runner = _Noting(_loaded().runner(num_pages=24, num_slots=5))
    steps = Prefilling(runner, 512, Mixed(17, context=9, prompts=2, decodes=3, decode_context=40), 3, 100)  # type: ignore[arg-type]
    for _ in range(3):
        steps.step()
    steps.release()
    ran = [plan.work for plan in runner.plans if plan.work]
    assert [[(w.start, w.num_rows, w.recurrent) for w in work] for work in ran] == [
        [(40 + i, 1, True)] * 3 + [(9, 17, False)] * 2 for i in range(3)
    ]
    fresh = [work.rid for works in ran for work in works if not work.recurrent]
    assert len(set(fresh)) == 6, "a prompt is prefilled once"
    assert len({work.slot for work in ran[0]}) == 5
    assert len(runner.table) == 0, "nothing is left behind"  # type: ignore[arg-type]


def test_a_context_is_what_the_pages_hold() -> None:
    """The token drawn after the same prompt depends on the pages in front of it."""
    tokens = []
    for fill in (0.0, 3.0):
        runner = _loaded().runner(num_pages=8, num_slots=1)
        for pages in (*runner.cache.k_pages.values(), *runner.cache.v_pages.values()):
            pages.fill_(fill).mul_(torch.arange(pages.shape[-1]) - 7.0)
        steps = Prefilling(runner, 512, Mixed(5, context=32), 1, 7)
        result = runner.step(steps.plan(), None)
        assert isinstance(result, StepResult)
        tokens.append(result.sampled[0].tokens)
    assert tokens[0] != tokens[1]


def test_without_draws_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = _loaded().runner(num_pages=8, num_slots=2)
    steps = Prefilling(runner, 512, Mixed(5, prompts=2), 2, 7)
    result = runner.step(steps.plan(draws=False), None)
    assert isinstance(result, StepResult) and result.sampled == ()
    read: list[int] = []
    result_of = Launched.result

    def noted(one: Launched) -> StepResult:
        read.append(one.seq)
        return result_of(one)

    monkeypatch.setattr(Launched, "result", noted)
    steps.step(draws=False)
    # The step that was timed is not read; the one after it brings no rows: it only has prompts forgotten.
    assert len(read) == 1
    steps.step()
    assert len(read) == 3


def test_busy_and_idle_time_of_a_step() -> None:
    """Two kernels overlap, one is waited for 30 us: 10..20, 15..40, 70..80."""
    found = busy_in([(70.0, 80.0, "b"), (10.0, 20.0, "a"), (15.0, 40.0, "b")])
    assert (found.busy, found.idle) == (pytest.approx(0.040), pytest.approx(0.030))
    assert found.kernels == {"b": (2, 35.0), "a": (1, 10.0)} and list(found.kernels) == ["b", "a"]
    assert found.gaps == {"b": (1, 30.0)}
    assert busy_in([]).busy == 0.0


def test_distinct_experts_are_counted_layer_by_layer() -> None:
    loaded = _loaded()
    found = prefill_level.measure(loaded, loaded.runner(num_pages=8, num_slots=1), Mixed(1), 50, steps=2)
    assert found.distinct == (2, 2, 2, 2), "one row chooses two experts in each layer"
    assert found.fullest == (4.0, 4.0, 4.0, 4.0), "of eight, which have a quarter of a row on average"
    assert found.wall > 0 and found.host > 0 and found.device is None


class _Captured:
    """Stands for steps that are captured: what they run cannot be watched."""

    def takes(self, batch: object) -> bool:
        return True

    def forward(self, given: object, hidden_TH: object, newest_S: object) -> torch.Tensor:
        raise RuntimeError("a replay")


def test_experts_are_counted_in_a_step_that_is_not_captured() -> None:
    loaded = _loaded()
    runner = replace(loaded.runner(num_pages=8, num_slots=1), prompts=_Captured())  # type: ignore[arg-type]
    steps = Prefilling(runner, 512, Mixed(3), 2, 60)
    assert [int(counts.sum()) for counts in prefill_level.chosen_experts(loaded, steps)] == [6, 6, 6, 6]
    with pytest.raises(RuntimeError, match="a replay"):
        steps.step()


class _Repeats:
    """A recorder of a machine without graphs: a replay runs the step again."""

    def __init__(self, max_model_len: int, *, beside: bool) -> None:
        pass

    def host_copy(self, values: torch.Tensor, longest: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values.tolist())

    def record(self, run: Callable[[], object]) -> Callable[[], object]:
        return run


def test_steps_of_fixed_sizes_draw_the_tokens_of_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_level, "DeviceGraphs", _Repeats)
    monkeypatch.setattr(step_rows, "prompt_rows", lambda resolved: 128)
    loaded, shape = _loaded(), Mixed(70, decodes=2, decode_context=9)
    drawn = []
    for fixed in (True, False):
        runner = loaded.runner(num_pages=24, num_slots=8)
        step_level.randomise(runner.cache, torch.Generator().manual_seed(1))
        runner = replace(runner, prompts=_Captured())  # type: ignore[arg-type]
        chosen = prefill_level.at_fixed_sizes(loaded, runner, [shape] if fixed else [Mixed(129), Mixed(7, prompts=17)])
        assert (chosen.prompts is not None) == fixed
        result = chosen.step(Prefilling(chosen, 512, shape, 2, 5).plan(), None)
        assert isinstance(result, StepResult)
        drawn.append([one.tokens for one in result.sampled])
    assert drawn[0] == drawn[1]


def test_several_prompts_have_room_for_those_that_decode_as_on_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_level, "DeviceGraphs", _Repeats)
    monkeypatch.setattr(step_rows, "prompt_rows", lambda resolved: 128)
    loaded, shape = _loaded(), Mixed(9, prompts=2)
    runner = replace(loaded.runner(num_pages=24, num_slots=8), prompts=_Captured())  # type: ignore[arg-type]
    chosen = prefill_level.at_fixed_sizes(loaded, runner, [shape])
    forward, rows = loaded.model.forward, []

    def counted(batch: ForwardBatch, hidden_TH: torch.Tensor | None) -> torch.Tensor:
        rows.append(batch.num_rows)
        return forward(batch, hidden_TH)

    monkeypatch.setattr(loaded.model, "forward", counted)
    chosen.step(Prefilling(chosen, 512, shape, 2, 5).plan(), None)
    most = step_rows.prompt_counts(loaded.resolved)[-1]
    assert most > 0 and rows == [2 * 9 + most]


def _record(rows: int, **changes: object) -> PrefillRecord:
    values: dict[str, object] = {
        "shape": "q35tp1",
        "prompts": 1,
        "rows": rows,
        "context": 0,
        "decodes": 0,
        "decode_context": 0,
        "tokens": rows,
        "captured": False,
        "wall_ms": 50.0,
        "low": 49.0,
        "high": 51.0,
        "host_ms": 10.0,
        "busy_ms": 45.0,
        "idle_ms": 5.0,
        "tokens_s": rows / 0.05,
        "floor_ms": 16.0,
        "uniform_floor_ms": 20.0,
        "ratio": 0.32,
        "uniform_ratio": 0.4,
        "distinct": 250.0,
        "uniform_distinct": 256.0,
        "fullest": 1.5,
        "parts_ms": {},
    }
    return PrefillRecord(**(values | changes))  # type: ignore[arg-type]


def test_vllm_stands_beside_single_prompts_only() -> None:
    records = [_record(2048), _record(2048, decodes=64, decode_context=1024, captured=True)]
    alone, beside = prefill_markdown(records)[2:]
    assert alone.startswith("| q35tp1, 2048 | 50.0 | 41.0 | 10.0 | 45.0 |") and alone.endswith("| 125.0 | 2.50 |")
    assert beside.startswith("| q35tp1, 2048 + 64 decodes at 1024, a graph |") and beside.endswith("|  | |")


def test_the_plot_shows_ours_and_vllm_over_the_same_floor() -> None:
    steps = [_record(8192), _record(2048), _record(2048, context=30720), _record(9, prompts=2)]
    graph, eager = _record(2048, captured=True), _record(2048, uniform_ratio=0.1)
    assert lines_of_prefill([graph, eager])[0] == ("q35tp1", [(2048, 0.4)], False), "as a server has it"
    ours, long, vllm = lines_of_prefill(steps)
    assert ours == ("q35tp1", [(2048, 0.4), (8192, 0.4)], False)
    assert long == ("q35tp1, context 30720", [(2048, 0.4)], False)
    assert vllm == ("q35tp1, vLLM 0.26", [(2048, pytest.approx(0.16)), (8192, pytest.approx(20 / 192))], True)
    assert svg([ours, vllm], "a < b", "tokens").count("<polyline") == 2


def test_kernels_and_gaps_are_listed_the_longest_first() -> None:
    kernels = {f"kernel {i}": (2, 10.0 - i) for i in range(5)}
    lines = prefill_kernel_lines(_record(2048, kernels=kernels, gaps={"late": (3, 60.0)}), most=3)
    assert [line.split("x  ")[1] for line in lines] == [
        "in all, of q35tp1 2048",
        *("kernel 0", "kernel 1", "kernel 2", "2 others"),
        "idle in all, by the kernel that was waited for",
        "late",
    ]
    assert lines[4] == "       13.0 us     4 x  2 others"
    assert prefill_kernel_lines(_record(2048)) == []
