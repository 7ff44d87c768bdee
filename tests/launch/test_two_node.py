"""launch/two_node.sh with a stand-in for rocm-serve: what it refuses, and what it starts with which environment."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from rocm_serve.config.load import FIELDS, flag_name, load
from rocm_serve.config.spelling import in_our_words
from rocm_serve.platform.rdma import FABRICS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "two_node.sh"
PRESETS = sorted((ROOT / "launch" / "fabric").glob("*.env"))
# `preflight --which-preset` answers with CARDS, `preflight` ends with READY, `serve` shows what it was started with.
STAND_IN = """#!/usr/bin/env bash
if [[ $* == "preflight --which-preset --root "* ]]; then echo "${CARDS:-}"; exit; fi
printf "%s\\n" "$@"
[[ $1 != preflight ]] || exit "${READY:-0}"
env | grep -E "^(NCCL|RCCL|IBV|ROCM_SERVE)" | sort || true
"""


def run(tmp_path: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    stand_in = tmp_path / "rocm-serve"
    stand_in.write_text(STAND_IN, encoding="utf-8")
    stand_in.chmod(0o755)
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NCCL", "RCCL", "IBV", "FABRIC", "PREFLIGHT", "ROCM_SERVE"))
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
    before, words = words[: words.index("serve")], words[words.index("serve") :]
    assert before == [
        *("preflight", "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:29500", "--root", "/")
    ]
    assert words[:3] == ["serve", "--model", "/models/big"]
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--dist-init-addr") + 1] == "10.0.0.1:29500"
    given = [word for word in words if word.startswith("--")]
    assert given[-1] == "--tp" and {flag_name(field) for field in FIELDS} >= set(given)
    assert not re.search("NCCL|RCCL|IBV", started.stdout), "without FABRIC no variable is set"


def test_production_settings_give_way_to_a_flag_in_any_spelling_and_to_a_variable(tmp_path: Path) -> None:
    started = run(tmp_path, "10.0.0.1", "1", "m", "--tp-size", "4", ROCM_SERVE_PORT="80")
    words = started.stdout.split()
    settings = dict(word.split("=", 1) for word in words if word.startswith("ROCM_SERVE_"))
    assert settings.pop("ROCM_SERVE_PORT") == "80", "a variable that was set is kept"
    theirs = in_our_words(words[words.index("--tp-size") :][:2], {"--tp": True})
    assert theirs.words == ["--tp", "4"]
    config = load({"model": "m", "tp": 4}, None, settings | {"ROCM_SERVE_PORT": "80"})
    assert (config.tp, config.pp, config.port, config.tool_call_parser) == (4, 2, 80, "qwen3_coder")


@pytest.mark.parametrize("spelled", [("--config", "{}"), ("--config={}",)])
def test_production_settings_give_way_to_a_file(spelled: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('tp = 4\n"page-size" = 32\nmax_running_requests = 8\n# pp = 1\n', encoding="utf-8")
    started = run(tmp_path, "10.0.0.1", "1", "m", *(word.format(file) for word in spelled))
    assert started.returncode == 0, started.stderr
    settings = dict(word.split("=", 1) for word in started.stdout.split() if word.startswith("ROCM_SERVE_"))
    config = load({"model": "m"}, file, settings)
    assert (config.tp, config.page_size, config.max_running_requests) == (4, 32, 8), "the file's"
    assert (config.pp, config.chunked_prefill_size, config.port) == (2, 8192, 9001), "the script's"


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)
def test_a_preset_sets_its_variables_explains_each_and_keeps_what_is_set(preset: Path, tmp_path: Path) -> None:
    lines = preset.read_text(encoding="utf-8").splitlines()
    values = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    for i, line in enumerate(lines):
        assert line.startswith("# ") or lines[i - 1].startswith("# "), f"{line}: not explained"
    shown = run(tmp_path, "10.0.0.1", "0", "m", FABRIC=preset.stem, NCCL_IB_GID_INDEX="7").stdout
    for name, value in values.items():
        assert f"\n{name}={'7' if name == 'NCCL_IB_GID_INDEX' else value}\n" in shown
    assert (
        f"two_node.sh: NCCL_IB_GID_INDEX=7 is kept; preset {preset.stem} has {values['NCCL_IB_GID_INDEX']}\n" in shown
    )
    assert f"two_node.sh: NCCL_IB_HCA={values['NCCL_IB_HCA']}, of preset {preset.stem}\n" in shown
    assert not any(name.startswith("GLOO") for name in values), "gloo's interface comes from the route"


@pytest.mark.parametrize(
    ("args", "env", "sentence"),
    [
        (("10.0.0.1", "0"), {}, "usage: launch/two_node.sh RANK0_ADDR NODE_RANK MODEL"),
        (("10.0.0.1", "2", "m"), {}, "NODE_RANK 2: legal: 0, 1"),
        (("127.0.0.1", "0", "m"), {}, "node 1 cannot reach it"),
        (("localhost", "0", "m"), {}, "node 1 cannot reach it"),
        (("10.0.0.1", "0", "m"), {"FABRIC": "mlx"}, "FABRIC=mlx: legal: ainic cx7 thor2 none"),
    ],
)
def test_a_wish_that_cannot_be_met_is_one_line(
    args: tuple[str, ...], env: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    refused = run(tmp_path, *args, **env)
    assert refused.returncode == 2 and refused.stdout == ""
    assert sentence in refused.stderr and refused.stderr.count("\n") == 1


def test_the_cards_choose_the_preset_unless_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    here = {"CARDS": "thor2", "HOST_ROOT": str(tmp_path)}
    assert "\nNCCL_IB_HCA=bnxt_re\n" in run(tmp_path, "10.0.0.1", "0", "m", **here).stdout
    assert "\nNCCL_IB_HCA=mlx5_\n" in run(tmp_path, "10.0.0.1", "0", "m", **here, FABRIC="cx7").stdout
    assert "NCCL" not in run(tmp_path, "10.0.0.1", "0", "m", **here, FABRIC="none").stdout


def test_nothing_is_served_on_a_host_that_is_not_ready(tmp_path: Path) -> None:
    refused = run(tmp_path, "10.0.0.1", "0", "m", READY="2")
    assert refused.returncode == 2 and refused.stdout.startswith("preflight\n") and "serve" not in refused.stdout
    assert "serve\n" in run(tmp_path, "10.0.0.1", "0", "m", READY="2", PREFLIGHT="off").stdout


def test_an_ipv6_address_is_put_in_brackets(tmp_path: Path) -> None:
    for given in ("fd00::1", "[fd00::1]"):
        assert "--dist-init-addr\n[fd00::1]:29500\n" in run(tmp_path, given, "1", "m").stdout


def test_every_preset_is_known_to_the_preflight_and_the_other_way_round() -> None:
    assert {preset.stem for preset in PRESETS} == {fabric.preset for fabric in FABRICS}
    for fabric in FABRICS:
        assert f"NCCL_IB_HCA={fabric.names}" in (ROOT / "launch" / "fabric" / f"{fabric.preset}.env").read_text()
