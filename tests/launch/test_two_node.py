"""launch/two_node.sh with a stand-in for rocm-serve: what it refuses, and what it starts with which environment."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from rocm_serve.config.load import FIELDS, flag_name

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "two_node.sh"
PRESETS = sorted((ROOT / "launch" / "fabric").glob("*.env"))
STAND_IN = '#!/usr/bin/env bash\nprintf "%s\\n" "$@"; env | grep -E "^(NCCL|RCCL|IBV)" | sort || true\n'


def run(tmp_path: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    stand_in = tmp_path / "rocm-serve"
    stand_in.write_text(STAND_IN, encoding="utf-8")
    stand_in.chmod(0o755)
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("NCCL", "RCCL", "IBV", "FABRIC"))
    }
    return subprocess.run(
        [SCRIPT, *args],
        env=clean | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_three_words_are_enough_and_own_flags_come_last(tmp_path: Path) -> None:
    started = run(tmp_path, "10.0.0.1", "1", "/models/big", "--tp", "4")
    words = started.stdout.split("\n")
    assert started.returncode == 0, started.stderr
    assert words[:3] == ["serve", "--model", "/models/big"]
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--dist-init-addr") + 1] == "10.0.0.1:29500"
    given = [word for word in words if word.startswith("--")]
    assert given[-1] == "--tp" and {flag_name(field) for field in FIELDS} >= set(given)
    assert not re.search("NCCL|RCCL|IBV", started.stdout), "without FABRIC no variable is set"


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)
def test_a_preset_sets_its_variables_explains_each_and_keeps_what_is_set(preset: Path, tmp_path: Path) -> None:
    lines = preset.read_text(encoding="utf-8").splitlines()
    values = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    for i, line in enumerate(lines):
        assert line.startswith("# ") or lines[i - 1].startswith("# "), f"{line}: not explained"
    shown = run(tmp_path, "10.0.0.1", "0", "m", FABRIC=preset.stem, NCCL_IB_GID_INDEX="7").stdout
    for name, value in values.items():
        assert f"{name}={'7' if name == 'NCCL_IB_GID_INDEX' else value}\n" in shown
    assert not any(name.startswith("GLOO") for name in values), "gloo's interface comes from the route"


@pytest.mark.parametrize(
    ("args", "env", "sentence"),
    [
        (("10.0.0.1", "0"), {}, "usage: launch/two_node.sh RANK0_ADDR NODE_RANK MODEL"),
        (("10.0.0.1", "2", "m"), {}, "NODE_RANK 2: legal: 0, 1"),
        (("127.0.0.1", "0", "m"), {}, "node 1 cannot reach it"),
        (("localhost", "0", "m"), {}, "node 1 cannot reach it"),
        (("10.0.0.1", "0", "m"), {"FABRIC": "mlx"}, "FABRIC=mlx: legal: ainic cx7 thor2"),
    ],
)
def test_a_wish_that_cannot_be_met_is_one_line(
    args: tuple[str, ...], env: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    refused = run(tmp_path, *args, **env)
    assert refused.returncode == 2 and refused.stdout == ""
    assert sentence in refused.stderr and refused.stderr.count("\n") == 1
