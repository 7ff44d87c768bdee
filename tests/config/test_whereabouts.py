"""A node that is refused still knows where it stands, from whichever words are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocm_serve.config.whereabouts import whereabouts

FLAGS = "--nnodes 2 --node-rank 1 --dist-init-addr h:29500"
VARIABLES = {"ROCM_SERVE_NNODES": "2", "ROCM_SERVE_NODE_RANK": "1", "ROCM_SERVE_DIST_INIT_ADDR": "h:29500"}


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (FLAGS, {}),
        (f"{FLAGS} --tp eight --pp 3 --bogus", {}),
        ("--nnodes=2 --node-rank=1 --nccl-init-addr=h:29500", {}),
        ("", VARIABLES),
        (FLAGS, VARIABLES | {"ROCM_SERVE_NODE_RANK": "0"}),
        (f"--node-rank 0 {FLAGS}", {}),
        ("--nnodes 2 --dist-init-addr h:29500", {"SLURM_NODEID": "1"}),
    ],
)
def test_it_is_node_1_of_2_at_that_address(words: str, environ: dict[str, str]) -> None:
    found = whereabouts(words.split(), environ)
    assert found is not None
    assert (found.member, found.members, found.init_addr) == (1, 2, "h:29500")


def test_a_file_says_it_too_and_loses_to_flags(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('nnodes = 2\nnode-rank = 0\ndist_init_addr = "h:29500"\nbogus = 1\n', encoding="utf-8")
    found = whereabouts(["--config", str(file), "--node-rank", "1"], {})
    assert found is not None and (found.member, found.members, found.init_addr) == (1, 2, "h:29500")


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--nnodes 1",
        "--nnodes two --node-rank 1 --dist-init-addr h:29500",
        "--nnodes 2 --dist-init-addr h:29500",
        "--nnodes 2 --node-rank 1",
        "--nnodes 2 --node-rank 2 --dist-init-addr h:29500",
        "--nnodes 0 --node-rank 0 --dist-init-addr h:29500",
        "--nnodes 2 --node-rank 1 --dist-init-addr h",
        "--nnodes 2 --node-rank 1 --dist-init-addr",
        "--config absent.toml",
    ],
)
def test_nothing_is_guessed(words: str) -> None:
    assert whereabouts(words.split(), {}) is None
