"""The machine is asked, and what it says is checked against a second source."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest

from rocm_serve.errors import UserError
from rocm_serve.platform import probe as probing
from rocm_serve.platform.facts import GpuFacts


def test_cpu_facts_are_within_what_the_operating_system_reports() -> None:
    platform = probing.probe("cpu")
    assert platform.device == "cpu"
    assert platform.num_gpus == 0
    assert 1 <= platform.cores <= (os.cpu_count() or 1)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < platform.free_ram_bytes <= total


def test_a_container_limit_lowers_cores_and_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup = tmp_path
    (cgroup / "cpu.max").write_text("100000 100000\n")
    (cgroup / "memory.max").write_text("5000000\n")
    (cgroup / "memory.current").write_text("2000000\n")
    (cgroup / "memory.stat").write_text("anon 1\ninactive_file 500000\n")
    monkeypatch.setattr(probing, "_CGROUP", cgroup)
    assert probing.usable_cores() == 1
    assert probing.free_ram_bytes() == 3_500_000
    (cgroup / "cpu.max").write_text("max 100000\n")
    (cgroup / "memory.max").write_text("max\n")
    assert probing.usable_cores() == len(os.sched_getaffinity(0))
    assert probing.free_ram_bytes() > 3_500_000


def test_a_free_port_can_be_bound() -> None:
    port = probing.free_port()
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", port))


def test_a_gpu_that_torch_does_not_see_is_refused_with_the_legal_devices() -> None:
    import torch

    absent = "rocm" if torch.version.hip is None else "cuda"
    with pytest.raises(UserError, match=rf"--device {absent}: torch .* sees .* here; legal: auto, cpu"):
        probing.probe(absent)


def test_gpu_facts_survive_the_way_from_the_child() -> None:
    seen = probing.gpus_seen_by_torch()
    assert msgspec.json.decode(msgspec.json.encode(seen), type=GpuFacts) == seen
    assert (seen.kind == "none") == (seen.num_gpus == 0)
