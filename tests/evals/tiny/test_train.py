"""The training script, all of it, with a small model on the CPU: three steps, then everything that follows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rocm_serve.checkpoint.ledger import validate
from rocm_serve.checkpoint.reader import CheckpointReader
from rocm_serve.models.qwen3_5.spec import parse_config
from rocm_serve.parallel.mesh import Mesh

ROOT = Path(__file__).parents[3]
# A process of its own: the script forks the processes that make text.
SCRIPT = """
from dataclasses import replace
from evals.tiny import train
train.DIMS = replace(
    train.DIMS, hidden=128, heads=2, kv_heads=1, head_dim=16, key_heads=1, value_heads=2, gdn_head_dim=16,
    experts=3, expert_width=128, shared_width=32,
)
train.main()
"""
FLAGS = (
    "--device cpu --eager --layers 4 --rows 2 --length 192 --steps 3 --questions 2 --longest 3 --workers 1"
    " --mtp-start 0 --mtp-every 2"
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained")
    tokenizer = ROOT / "evals" / "tiny" / "checkpoint"
    command = [sys.executable, "-c", SCRIPT, "--tokenizer", str(tokenizer), "--out", str(path), *FLAGS.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return path


def test_a_run_writes_a_checkpoint_that_the_server_s_ledger_accepts(out: Path) -> None:
    with CheckpointReader(out / "checkpoint") as reader:
        facts = parse_config(*reader.config())
        for mesh in (Mesh(1, 1), Mesh(1, 2)):
            validate(reader, facts, mesh, mtp=True)
    assert facts.num_experts == 3 and facts.mtp_layers == 1


def test_a_run_reports_what_the_card_says(out: Path) -> None:
    results = json.loads((out / "results.json").read_text())
    assert results["steps"] == 3 and results["tokens"] == 3 * 2 * 192
    assert [age["steps"] for age in results["mtp"]] == [2] and results["mtp steps"] == 2
    assert len(results["by level"]) == 3 and len(results["mix"]) == 3 and len(results["acceptance"]) == 2
    for name in ("validation", "test 5-shot", "test 0-shot", "test chat", "test 5-shot bfloat16"):
        assert len(results[name]) == 2 and all("answer" in line or line["strict"] for line in results[name]), name
    log = (out / "log.txt").read_text()
    assert "step 3 loss" in log and "acceptance of depth-1 drafts on 2 test answers" in log


def test_the_norms_left_zero(out: Path) -> None:
    (shard,) = (out / "checkpoint").glob("*.safetensors")
    tensors = load_file(shard)
    for name in ("model.norm.weight", "mtp.norm.weight", "model.layers.3.self_attn.q_norm.weight"):
        assert tensors[name].any(), name
