"""The table of planted faults: each can be planted, and is seen and named by parity; a clean run raises no alarm."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rocm_serve.checkpoint.load as loader
from evals.planted import detectors
from evals.planted.__main__ import main, table
from evals.planted.faults import FAULTS
from rocm_serve.config.schema import Resolved
from rocm_serve.diagnostics.gate.reference import read_reference
from rocm_serve.diagnostics.parity import flow
from rocm_serve.diagnostics.parity.drive import Driver
from rocm_serve.executor.taps import load_tapped_stage
from rocm_serve.ops.sampling import rng
from tests.executor import sampler_model, simulated

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "evals" / "tiny" / "checkpoint"
SHORT = (3, 31)  # prompts where a fault shows in any row; `make planted` has them all


def test_there_are_faults_enough_and_each_says_where_it_happened() -> None:
    assert len(FAULTS) >= 18
    assert all(fault.words and fault.source for fault in FAULTS.values())
    assert len({fault.words for fault in FAULTS.values()}) == len(FAULTS)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("parity", "--fault", "nonsense"), "--fault nonsense: legal: "),
        (("parity", "--model", "nowhere"), "nowhere"),
        (("ledger", "--clean", "-1"), "--clean -1: legal: 0 or more"),
        (("gate",), "--reference FILE"),
        (("gate", "--reference", "nowhere"), "--reference nowhere: No such file"),
        (("gate", "--reference", "nowhere", "--limit", "0"), "--limit 0: legal: 1 or more"),
        (("r7", "--out", "no/such/folder/planted.jsonl"), "there is no folder"),
    ],
)
def test_a_wish_that_cannot_be_met_is_no_fault_that_was_seen(
    words: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that is not there made every detector report every fault as seen."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["planted", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and sentence in capsys.readouterr().err
    assert not (ROOT / "planted.jsonl").exists()


def test_every_fault_in_code_changes_the_code_it_is_about() -> None:
    """Patching a name that nothing reads any more would plant nothing."""
    script = "import sys; from evals.planted.faults import FAULTS; FAULTS[sys.argv[1]].before()"
    for name in ("norm-without-one", "qkv-contiguous", "heads-modulo"):
        ended = subprocess.run([sys.executable, "-c", script, name], cwd=ROOT, capture_output=True, check=False)
        assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.missing])
def test_the_ledger_refuses_files_that_lack_the_tensors(name: str, tmp_path: Path) -> None:
    words = detectors.ledger(FAULTS[name], MODEL, tmp_path)
    assert words is not None and re.search(r"lacks|no scale", words), words


@pytest.mark.multirank
def test_parity_names_layer_and_op(tmp_path: Path) -> None:
    """Of a fault in loaded weights; two that need two ranks are below, and `make planted` runs them all."""
    fault = FAULTS["top-k-not-renormalised"]
    found = detectors.parity(fault, MODEL, tmp_path, b="hf", lengths=SHORT)
    assert not found.agree and found.divergence is not None
    assert detectors.named(fault, found), f"expected {fault.site}: {found.divergence.how}: {found.divergence.first}"


def test_parity_names_a_weight_that_is_cut_wrongly_over_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of both sides are threads with the product's loader and taps; processes are those of its neighbours."""
    fault = FAULTS["qkv-contiguous"]

    @contextmanager
    def started(wish: Resolved, *_: Any, worker: str) -> Iterator[Driver]:
        with monkeypatch.context() as patch:
            patch.setattr(simulated, "load_stage_model", load_tapped_stage)
            patch.setattr(loader, "copies", loader.copies)  # to be as it was afterwards
            if worker == detectors.WORKER:
                fault.before()
            executor = simulated.SimulatedExecutor(wish)
            try:
                yield Driver(executor, executor.start())
            finally:
                executor.shutdown()

    monkeypatch.setattr(flow, "started", started)
    found = detectors.parity(fault, MODEL, tmp_path, b="tp=1,dtype=float32", lengths=SHORT)
    assert not found.agree and found.divergence is not None
    assert detectors.named(fault, found), f"expected {fault.site}: {found.divergence.how}: {found.divergence.first}"


@pytest.mark.multirank
@pytest.mark.slow
def test_parity_names_the_experts_where_ranks_work_on_rows_of_their_own(tmp_path: Path) -> None:
    """Some have none in a step of few rows, and still say in which order sites come."""
    fault = FAULTS["expert-map-as-mask"]
    found = detectors.parity(fault, MODEL, tmp_path, b="tp=1,dtype=float32", lengths=SHORT)
    assert detectors.named(fault, found), f"expected {fault.site}: {found.divergence}"


@pytest.mark.multirank
def test_without_a_fault_parity_agrees_with_hf(tmp_path: Path) -> None:
    """Prompts of a chunk and of two."""
    spec = "tp=2,pp=2,ep=2,expert_exchange=torch,dtype=float32,chunk=64"
    found = detectors.parity(None, MODEL, tmp_path, spec=spec, lengths=(1, 65))
    assert found.agree, found.prompts


def test_seeded_requests_among_others_tell_a_sampler_that_ignores_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That they tell nothing of a right server is the probes' own test, tests/e2e/test_probes.py."""
    monkeypatch.setattr(detectors, "NEIGHBOURS", (7,))
    with detectors.served(FAULTS["seed-ignored"], MODEL, detectors.flags_of({"tp": 1})) as url:
        assert detectors.seeded(url)


@pytest.mark.parametrize("count", [1, 31])
def test_a_sampler_that_ignores_the_seed_is_told_among_one_other_and_among_31(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve draws each, in this process: with the fault, what a request draws hangs on those before it."""

    def drawn(others: int) -> list[int]:
        logits_RV = sampler_model.normal(1).expand(others + 1, -1)
        place, found = (others + 1) // 2, []
        for position in range(12):
            rows = [sampler_model.row(position, seed=100 + i) for i in range(others)]
            rows.insert(place, sampler_model.row(position, seed=7))
            found.append(sampler_model.sample(logits_RV, rows)[place].token)
        return found

    assert drawn(count) == drawn(0)
    monkeypatch.setattr(rng, "row_keys", rng.row_keys)  # to be as it was afterwards
    FAULTS["seed-ignored"].before()
    assert drawn(count) != drawn(0)


@pytest.mark.parametrize(("lost", "outcome", "asked"), [(32, "fail", 32), (0, "pass", 200), (12, "fail", 200)])
def test_the_gate_is_asked_in_full_unless_the_first_questions_decide(lost: int, outcome: str, asked: int) -> None:
    """12 lost of 32 against 7 that could still be gained says nothing yet."""
    calls = []

    def judge(limit: int) -> dict[str, object]:
        calls.append(limit)
        failed = "fail" if lost else "pass"
        return {"outcome": failed, "invalid": [], "paired": {"lost": [*range(lost)], "gained": [], "p": 0.5}}

    reference = read_reference(ROOT / "evals/references/tiny-gsm8k-synth.jsonl")
    found = detectors.gate(reference, 200, judge)
    assert found[0] == outcome and calls[-1] == asked


def test_the_table_tells_seen_from_not_seen_from_not_decided_from_not_run() -> None:
    found = [
        {"detector": "gate", "fault": "lm-head-tied", "seen": True, "words": "fail"},
        {"detector": "r7", "fault": "lm-head-tied", "seen": False, "words": "identical"},
        {"detector": "ledger", "fault": "lm-head-tied", "seen": None, "words": "3 of 32 lost"},
        {"detector": "gate", "fault": "clean 0", "seen": True, "words": "fail"},
    ]
    lines = table(found).splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {FAULTS['lm-head-tied'].words} |")]
    assert [cell.strip() for cell in row.split("|")[2:6]] == ["seen", "not run", "3 of 32 lost", "no"]
    assert "gate: 1 alarms in 1 clean runs." in lines
