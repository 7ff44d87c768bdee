"""Probing in child processes: crashes and hangs are the provider's, a pass is remembered for what it holds for."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from rocm_serve.executor import probe_node
from rocm_serve.executor.probe_node import NodeProber, cache_folder, package_hash
from tests.ops.probing import providers
from tests.ops.probing.facts import tiny_facts


def prober(run_dir: Path, **changes: Any) -> NodeProber:
    values: dict[str, Any] = {
        "ops": providers.OPS,
        "facts": tiny_facts(),
        "device": "cpu",
        "machine": "a cpu",
        "run_dir": run_dir,
        "table": providers.TABLE,
        "call_s": 6.0,
    }
    return NodeProber(**values | changes)


def test_each_provider_gets_its_verdict_whatever_the_others_do_to_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["good", "one_percent", "raises", "crashes", "unloadable", "hangs", "another"]
    ticks: list[float] = []
    node = prober(tmp_path, moved=lambda: ticks.append(time.monotonic()))
    with caplog.at_level(logging.INFO):
        verdicts = node.probe([("rms_norm", name) for name in names])
    said = {name: verdicts["rms_norm", name].refused for name in names}
    assert said["good"] is None and said["another"] is None
    assert verdicts["rms_norm", "good"].calls == 4 and verdicts["rms_norm", "good"].error == 0.0
    assert "1 x 128: relative L2" in str(said["one_percent"])
    assert said["raises"] == "0 x 128: RuntimeError: no kernel image is available"
    assert said["unloadable"] == "loading it: ImportError: libkernels.so: undefined symbol: launch"
    assert str(said["crashes"]).startswith("0 x 128: the probe's process ended with signal SIGABRT")
    assert said["hangs"] == "0 x 128: no sign of life for 6 s; the probe was ended"
    # one more process after each that raised, crashed or hung
    assert node.children == 5
    assert max(b - a for a, b in zip(ticks, ticks[1:], strict=False)) < 30, "whoever watches is told all the while"
    assert sum(line.startswith("probe of rms_norm by") for line in caplog.messages) == len(names)


def test_what_passed_is_not_run_again_and_what_failed_is(tmp_path: Path) -> None:
    tasks = [("rms_norm", "good"), ("rms_norm", "one_percent")]
    first = prober(tmp_path, cache_dir=tmp_path / "cache")
    verdicts = first.probe(tasks)
    assert first.children == 1 and len(list((tmp_path / "cache").iterdir())) == 1
    second = prober(tmp_path, cache_dir=tmp_path / "cache")
    assert second.probe(tasks[:1])["rms_norm", "good"] == verdicts["rms_norm", "good"]
    assert second.children == 0
    assert second.probe(tasks)["rms_norm", "one_percent"].refused is not None
    assert second.children == 1


def test_a_pass_holds_for_its_shapes_machine_sources_and_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = ("rms_norm", "good")
    key = prober(tmp_path).key(task)
    assert prober(tmp_path / "another", seed=8, call_s=1.0).key(task) == key
    others = [
        prober(tmp_path, facts=tiny_facts(hidden_size=256)).key(task),
        prober(tmp_path, facts=tiny_facts(fp8_dialect="fnuz")).key(task),
        prober(tmp_path, machine="gfx942, 80 units, torch 2.11").key(task),
        prober(tmp_path, machine="gfx942, 304 units, torch 2.11").key(task),
        prober(tmp_path).key(("rms_norm", "another")),
        prober(tmp_path).key(("add_rms_norm", "reference")),
    ]
    monkeypatch.setattr(probe_node, "source_hash", lambda: "other sources")
    others.append(prober(tmp_path).key(task))
    assert len({key, *others}) == len(others) + 1


def test_a_package_is_known_by_its_files_not_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "kernels-1.0.dist-info"
    info.mkdir()
    (tmp_path / "kernels.py").write_text("a = 1\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 1.0\n")
    (info / "RECORD").write_text("kernels.py,,\nkernels-1.0.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = package_hash("kernels")
    assert package_hash("kernels") == before != package_hash("numpy")
    (tmp_path / "kernels.py").write_text("a = 22\n")
    assert package_hash("kernels") != before
    assert package_hash("no-such-distribution") == "absent"


def test_an_editable_package_is_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info, source = tmp_path / "site" / "kernels-1.0.dist-info", tmp_path / "src"
    info.mkdir(parents=True)
    source.mkdir()
    (source / "norm.hip").write_text("v1")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 1.0\n")
    (info / "direct_url.json").write_text(f'{{"url": "file://{source}", "dir_info": {{"editable": true}}}}')
    monkeypatch.syspath_prepend(tmp_path / "site")
    before = package_hash("kernels")
    (source / "build").mkdir()
    (source / "build" / "norm.hip").write_text("a copy")
    (source / "norm.so").write_text("built on first use")
    assert package_hash("kernels") == before
    (source / "norm.hip").write_text("v1, patched")
    assert package_hash("kernels") != before


def test_a_damaged_memory_is_probed_again(tmp_path: Path) -> None:
    node = prober(tmp_path, cache_dir=tmp_path)
    task = ("rms_norm", "good")
    (tmp_path / f"{node.key(task)}.json").write_text('{"type": "Verd')
    assert node.probe([task])[task].refused is None and node.children == 1
    assert prober(tmp_path, cache_dir=tmp_path).probe([task])[task].calls == 4


def test_a_cache_that_cannot_be_written_is_said_once_and_costs_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    node = prober(tmp_path, cache_dir=tmp_path / "file" / "probes")
    verdicts = node.probe([("rms_norm", "good"), ("rms_norm", "another")])
    assert [verdict.refused for verdict in verdicts.values()] == [None, None]
    assert [line for line in caplog.messages if "not remembered" in line] == [
        f"probes are not remembered: {tmp_path}/file/probes: Not a directory"
    ]


def test_the_cache_follows_the_users_wishes() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/rocm_serve/probes")
    assert cache_folder({"HOME": "/h"}) == Path("/h/.cache/rocm_serve/probes")


def test_no_process_is_started_for_nothing(tmp_path: Path) -> None:
    node = prober(tmp_path)
    assert node.probe([]) == {} and node.children == 0
