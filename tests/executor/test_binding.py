"""Agreeing on providers: rounds until every op has one, one decision for all ranks, one sentence when there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from rocm_serve.checkpoint.synthetic_configs import DIMS, model_config
from rocm_serve.errors import UserError
from rocm_serve.executor import binding
from rocm_serve.executor.binding import Wishes, check_same, fallbacks, op_facts, settle
from rocm_serve.models.qwen3_5.spec import ConfigFormats, parse_config, stage_params
from rocm_serve.ops import bind
from rocm_serve.ops.bind import bind_ops, binding_lines
from rocm_serve.ops.facts import LinearShape
from rocm_serve.ops.probe_cases import probe_cases
from rocm_serve.ops.probe_child import Verdict
from rocm_serve.parallel.board import Board, NotesOfOneProcess, read
from rocm_serve.parallel.expert_map import ExpertMap, ExpertPlan
from rocm_serve.parallel.mesh import Mesh
from tests.executor.wishes import IDS, facts, resolved
from tests.ops.probing.facts import tiny_facts
from tests.ops.probing.providers import OPS

Task = tuple[str, str]


@dataclass
class Scripted:
    """A prober without processes: `bad` maps providers to why they fail."""

    bad: dict[str, str] = field(default_factory=dict)
    rounds: list[list[Task]] = field(default_factory=list)

    def probe(self, tasks: Sequence[Task]) -> dict[Task, Verdict]:
        self.rounds.append(list(tasks))
        return {task: Verdict(*task, self.bad.get(task[1])) for task in tasks}

    def moved(self) -> None:
        return


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> None:
    wish = {
        "rms_norm": ("one_percent", "crashes", "good", "reference"),
        "fp8_linear": ("scale_divided", "reference"),
    }
    monkeypatch.setattr(bind, "provider_order", lambda op, arch: wish.get(op, ("reference",)))


def on_ranks(size: int, body: Callable[[Board], Any]) -> list[Any]:
    """Run `body` with a board of its own on every rank; exceptions are results."""
    notes: dict[str, str] = {}

    def one(rank: int) -> Any:
        try:
            return body(NotesOfOneProcess(rank, size, notes))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def settled(board: Board, probers: dict[int, Scripted], overrides: dict[str, str] | None = None, **changes: Any) -> Any:
    prober: Any = probers.get(board.rank, Scripted())
    leaders = tuple(sorted(probers))
    return settle(OPS, Wishes(overrides or {}), tiny_facts(**changes), board, leaders, prober)


@pytest.mark.usefixtures("order")
def test_the_next_provider_is_tried_until_each_op_has_one() -> None:
    prober = Scripted({"one_percent": "off", "crashes": "SIGSEGV", "scale_divided": "off"})
    refused = settled(NotesOfOneProcess(), {0: prober})
    assert prober.rounds == [
        [("rms_norm", "one_percent"), ("fp8_linear", "scale_divided")],
        [("rms_norm", "crashes")],
        [("rms_norm", "good")],
    ]
    ops = bind_ops({}, "cpu", table=OPS, refused=refused)
    lines = [line for line in binding_lines(ops.report) if "rms_norm:" in line or "fp8_linear:" in line]
    assert "op rms_norm: good; one_percent failed its probe: off; crashes failed its probe: SIGSEGV" in lines
    assert "op fp8_linear: reference; scale_divided failed its probe: off" in lines


def test_a_reference_that_runs_because_a_probe_refused_the_kernel_is_warned_of_with_its_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wish = {
        "rms_norm": ("one_percent", "good", "reference"),
        "moe_experts": ("padding_left", "one_expert_less", "reference"),
        "causal_conv": ("commits_all", "reference"),
        "attention_prefill": ("triton", "reference"),
        "fp8_linear": ("scale_divided", "reference"),
        "linear": ("aiter", "reference"),
        "gdn_step": ("triton", "reference"),
    }
    monkeypatch.setattr(bind, "provider_order", lambda op, arch: wish.get(op, ("reference",)))
    refused = {
        ("rms_norm", "one_percent"): "failed its probe: off",
        ("moe_experts", "padding_left"): "failed its probe: left",
        ("moe_experts", "one_expert_less"): "failed its probe: less",
        ("fp8_linear", "scale_divided"): "failed its probe: off",
        ("gdn_step", "triton"): "failed its probe: then its parts run, as their own lines say",
    }
    report = bind_ops({"layers.1.silu_mul": "reference"}, "sm_90", table=OPS, refused=refused).report
    fell_back = {line.op for line in report if line.fell_back}
    assert fell_back == {"moe_experts", "fp8_linear"}, "what refuses this GPU of itself is no surprise"
    told = fallbacks(report, graphs=True)
    assert told == {
        "fp8_linear": "runs as its reference in torch (slow, and no step is captured as a device graph):"
        " scale_divided failed its probe: off",
        "moe_experts": "runs as its reference in torch (slow, and no step is captured as a device graph):"
        " padding_left failed its probe: left; one_expert_less failed its probe: less",
    }
    unasked = fallbacks(report, graphs=False)
    assert unasked == {op: why.replace(", and no step is captured as a device graph", "") for op, why in told.items()}


def test_where_the_reference_alone_is_bound_nothing_is_probed_or_said() -> None:
    prober, board = Scripted(), NotesOfOneProcess(0, 8)  # seven others that nobody waits for
    assert settled(board, {0: prober, 4: Scripted()}, {"rms_norm": "reference"}) == {}
    assert prober.rounds == [] and board.look("round 0") is None
    check_same(bind_ops({}, "cpu").report, "bf16", board, lambda: None)
    assert board.look("bound 0") is None


@pytest.mark.usefixtures("order")
def test_all_ranks_of_two_nodes_come_to_what_both_nodes_can_do() -> None:
    probers = {0: Scripted({"one_percent": "off"}), 2: Scripted({"crashes": "SIGSEGV"})}
    found = on_ranks(4, lambda board: settled(board, probers))
    assert all(one == found[0] for one in found)
    assert found[0] == {
        ("rms_norm", "one_percent"): "failed its probe (on the node of rank 0): off",
        ("rms_norm", "crashes"): "failed its probe (on the node of rank 2): SIGSEGV",
    }
    assert probers[0].rounds == probers[2].rounds, "one probe per node, each of the same"


@pytest.mark.parametrize("key", ["rms_norm", "layers.2.rms_norm"])
def test_a_provider_that_was_asked_for_is_probed_and_its_failure_ends_the_start_everywhere(key: str) -> None:
    probers = {0: Scripted(), 2: Scripted({"one_percent": "1 x 128: relative L2 1.0e-02"})}
    found = on_ranks(4, lambda board: settled(board, probers, {key: "one_percent"}))
    assert probers[0].rounds == [[("rms_norm", "one_percent")]]
    assert {type(one) for one in found} == {UserError}
    (said,) = {str(one) for one in found}
    assert f"--op {key}=one_percent: one_percent failed its probe (on the node of rank 2): 1 x 128: rel" in said
    assert "rms_norm has reference" in said and ", good," in said


@pytest.mark.usefixtures("order")
def test_a_preference_is_tried_first_and_given_up_without_a_word_of_error() -> None:
    prober: Any = Scripted({"another": "off", "one_percent": "off"})
    wishes = Wishes({}, {"rms_norm": "another", "silu_mul": "reference"})
    refused = settle(OPS, wishes, tiny_facts(), NotesOfOneProcess(), (0,), prober)
    assert [tasks[0][1] for tasks in prober.rounds] == ["another", "one_percent", "crashes"]
    ops = bind_ops({}, "cpu", table=OPS, refused=refused, preferred=wishes.preferred)
    line = next(line for line in ops.report if line.op == "rms_norm")
    assert line.provider == "crashes" and [name for name, _ in line.refused] == ["another", "one_percent"]


def test_two_layers_and_the_rest_with_one_provider_are_one_probe() -> None:
    prober = Scripted()
    wish = {"rms_norm": "good", "layers.0.rms_norm": "good", "layers.3.rms_norm": "another"}
    assert settled(NotesOfOneProcess(), {0: prober}, wish) == {}
    assert prober.rounds == [[("rms_norm", "good"), ("rms_norm", "another")]]


def test_two_kinds_of_gpu_are_refused_on_every_rank() -> None:
    probers = {0: Scripted(), 1: Scripted()}
    wish = {"rms_norm": "good"}
    found = on_ranks(2, lambda board: settled(board, probers, wish, arch=("gfx942", "gfx950")[board.rank]))
    assert {str(one) for one in found} == {"rank 1 computes on gfx950 and rank 0 on gfx942; legal: one kind of GPU"}


def test_a_rank_that_has_bound_something_else_is_refused_by_its_hash() -> None:
    reports = [bind_ops({"rms_norm": name}, "cpu", table=OPS).report for name in ("good", "good", "another")]
    found = on_ranks(3, lambda board: check_same(reports[board.rank], "bf16", board, lambda: None))
    assert found[:2] == [None, None]
    assert isinstance(found[2], UserError) and "rank 2 has bound other providers" in str(found[2])
    assert on_ranks(2, lambda b: check_same(reports[0], ("bf16", "fp8_1x128")[b.rank], b, lambda: None))[1] is not None


def test_a_note_that_does_not_come_has_a_deadline_and_waiting_is_movement() -> None:
    ticks: list[int] = []
    with pytest.raises(TimeoutError, match="rank 1 has waited 0 s for round 0"):
        read(NotesOfOneProcess(1, 2), "round 0", lambda: ticks.append(1), 0.3)
    assert len(ticks) > 2
    assert binding.ROUND_S > 600


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 1), (4, 2)])
def test_the_facts_are_this_ranks_own_sizes(tp: int, rank: int) -> None:
    model, coord = facts(), Mesh(tp, 1).coord(rank)
    params = stage_params(model, coord, formats=ConfigFormats(model), mtp=False)
    made = op_facts(
        model,
        params,
        coord,
        resolved(tp=tp, draft_tokens=3),
        arch="gfx942",
        compute_units=304,
        dialect="fnuz",
        activation="fp8_1x128",
    )
    assert (made.heads, made.kv_heads) == (model.num_heads // tp, max(1, model.num_kv_heads // tp))
    assert made.expert_width * tp == model.moe_intermediate_size
    assert made.num_experts == made.local_experts == model.num_experts
    assert made.mlp_width * tp == model.shared_intermediate_size
    assert made.value_heads * tp == model.linear_num_value_heads
    assert LinearShape(model.hidden_size, made.heads * made.head_dim, False) in made.linears, "o_proj"
    assert LinearShape(model.vocab_size // tp, model.hidden_size, False) in made.linears, "lm_head"
    assert LinearShape(model.num_experts, model.hidden_size, False) in made.linears, "the router"
    assert not made.expert_fp8 and made.max_rows == 64 + 8 * (1 + 3) and made.draft_tokens == 3
    assert (made.arch, made.compute_units, made.fp8_dialect) == ("gfx942", 304, "fnuz")
    assert made.mapping()["linears"] == made.linears


@pytest.mark.parametrize(("tp", "ep", "slots"), [(4, 2, None), (4, 4, None), (4, 2, (*range(8), 3, 3, 0, 7))])
def test_the_facts_tell_experts_here_from_experts_to_choose_from(
    tp: int, ep: int, slots: tuple[int, ...] | None
) -> None:
    model, coord = facts(), Mesh(tp, 1, ep).coord(1)
    maps = {} if slots is None else {1: ExpertMap(slots, ep)}
    params = stage_params(
        model, coord, formats=ConfigFormats(model), mtp=False, experts=ExpertPlan(ep, shared_whole=True, maps=maps)
    )
    made = op_facts(
        model, params, coord, resolved(tp=tp, ep=ep), arch="cpu", compute_units=0, dialect="fn", activation="bf16"
    )
    assert made.num_experts == model.num_experts == 8
    assert made.local_experts == (8 if slots is None else len(slots)) // ep
    assert made.expert_width == model.moe_intermediate_size * ep // tp
    assert made.mlp_width == model.shared_intermediate_size
    for name, case in probe_cases("moe_experts", made).items():
        assert f"of 8 experts ({made.local_experts} of them here) of {made.expert_width}" in name
        arguments = case(torch.Generator().manual_seed(1), torch.float32)
        ids = arguments["ids_Tk"]
        assert isinstance(ids, torch.Tensor) and ids.shape[1] == model.top_k
        assert not ids.numel() or (ids.min() >= -1 and ids.max() < made.local_experts)
    for case in probe_cases("moe_route", made).values():
        logits = case(torch.Generator().manual_seed(1), torch.float32)["logits_TE"]
        assert isinstance(logits, torch.Tensor) and logits.shape[1] == 8


@pytest.mark.parametrize(
    ("changes", "activation", "sent"),
    [
        ({}, "fp8_1x128", False),
        ({"expert_exchange": "torch"}, "fp8_1x128", True),
        ({"expert_exchange": "torch"}, "bf16", False),
        ({"speculative_expert_exchange": "all_gather"}, "fp8_1x128", False),
        ({"speculative_expert_exchange": "all_gather", "draft_tokens": 1}, "fp8_1x128", True),
    ],
)
def test_experts_are_probed_with_fp8_rows_where_an_exchange_sends_such(
    changes: dict[str, Any], activation: str, sent: bool
) -> None:
    fp8, coord = parse_config(model_config("text-fp8", "none", DIMS["default"], IDS), None), Mesh(2, 1, 2).coord(0)
    plain = facts()
    for model in (fp8, plain):
        params = stage_params(model, coord, formats=ConfigFormats(model), mtp=False, experts=ExpertPlan(2))
        wish = resolved(tp=2, ep=2, **changes)
        made = op_facts(model, params, coord, wish, arch="cpu", compute_units=0, dialect="fn", activation=activation)
        assert made.fp8_dispatch == (sent and model is fp8)
        assert any("sent as FP8" in name for name in probe_cases("moe_experts", made)) == made.fp8_dispatch
