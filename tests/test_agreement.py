"""What members compare: package, checkpoint and settings, but nothing that is a host's own affair."""

from __future__ import annotations

import shutil
from pathlib import Path

from rocm_serve.agreement import agreement, difference
from tests.executor.wishes import resolved


def test_hosts_with_paths_addresses_and_cores_of_their_own_agree(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(checkpoints["text-bf16"], copy)
    one = resolved(model=str(checkpoints["text-bf16"]), tp=2, pp=2, nnodes=2, members=2, run_dir="a", torch_threads=8)
    other = resolved(model=str(copy), tp=2, pp=2, nnodes=2, members=2, member=1, node_rank=1, run_dir="b", port=9)
    assert difference(agreement(one), "node 0", agreement(other), "node 1") is None


def test_another_checkpoint_or_setting_is_named(checkpoints: dict[str, Path]) -> None:
    one = agreement(resolved(model=str(checkpoints["text-bf16"])))
    told = difference(one, "node 0", agreement(resolved(model=str(checkpoints["dense"]), page_size=32)), "node 1")
    assert told is not None and "config.json: " in told and "page-size: 16 on node 0, 32 on node 1" in told
    assert "run-dir" not in told and "\n" not in told


def test_a_checkpoint_that_is_missing_on_one_host_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    told = difference(
        agreement(resolved(model=str(checkpoints["text-bf16"]))),
        "node 0",
        agreement(resolved(model=str(tmp_path))),
        "node 1",
    )
    assert told is not None and "missing on node 1" in told
