"""Finding and building the library of kernels, with compilers that are scripts of this test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kernels_hip import build

ROCM = build.Target("rocm", ("gfx942",))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hipcc that counts its builds and writes its arguments where -o says."""
    programs = tmp_path / "bin"
    programs.mkdir()
    hipcc = programs / "hipcc"
    hipcc.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = --version ]; then cat {tmp_path}/version; exit 0; fi\n'
        f"echo built >> {tmp_path}/builds\n"
        f"cat {tmp_path}/slow 2>/dev/null && sleep 1\n"
        'for last; do :; done\necho "$@" > "$last"\n'
    )
    hipcc.chmod(0o755)
    (tmp_path / "version").write_text("HIP version: 7.2\n")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    return tmp_path


def builds(folder: Path) -> int:
    log = folder / "builds"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_the_first_use_builds_and_the_next_finds(compiler: Path) -> None:
    first = build.library(ROCM, compiler / "cache")
    assert build.library(ROCM, compiler / "cache") == first
    assert builds(compiler) == 1
    said = first.read_text()
    assert "--offload-arch=gfx942" in said and "-ffp-contract=off" in said
    assert all(str(source) in said for source in build.kernel_sources())


def test_another_compiler_or_another_source_is_another_library(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.library(ROCM, compiler / "cache")
    (compiler / "version").write_text("HIP version: 8.0\n")
    second = build.library(ROCM, compiler / "cache")
    sources = compiler / "sources"
    for part in ("include", "impls"):
        shutil.copytree(build.ROOT / part, sources / part)
    changed = sources / "include" / "rows.h"
    changed.write_text(changed.read_text() + "// another byte\n")
    monkeypatch.setattr(build, "ROOT", sources)
    third = build.library(ROCM, compiler / "cache")
    assert len({first, second, third}) == 3 and builds(compiler) == 3


def test_a_library_beside_the_sources_needs_no_compiler(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build.main(["--archs", "gfx942,gfx950"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.parent == compiler / "built"
    monkeypatch.setenv("PATH", "/nowhere")
    assert build.missing(ROCM) is None
    assert build.library(ROCM, compiler / "cache") == path
    assert build.library(build.Target("rocm", ("gfx950", "gfx942")), compiler / "cache") == path
    assert builds(compiler) == 1


def test_without_library_and_compiler_one_sentence_says_so(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(build._COMPILERS, "rocm", ("hipcc-that-nobody-has",))
    assert build.missing(ROCM) == "is not built and finds no hipcc-that-nobody-has to build it with"
    with pytest.raises(build.BuildError, match="finds no hipcc-that-nobody-has"):
        build.library(ROCM, compiler / "cache")
    assert build.main(["--archs", "gfx942"]) == 2
    assert "finds no hipcc-that-nobody-has" in capsys.readouterr().err


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(compiler: Path) -> None:
    hipcc = compiler / "bin" / "hipcc"
    hipcc.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "error: no such thing as gfx942" >&2\nexit 1\n')
    with pytest.raises(build.BuildError, match="no such thing as gfx942"):
        build.library(ROCM, compiler / "cache")
    assert [p.suffix for p in (compiler / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_named(compiler: Path) -> None:
    (compiler / "file").write_text("")
    with pytest.raises(build.BuildError, match="cannot be written to .*file"):
        build.library(ROCM, compiler / "file" / "cache")


def test_the_cache_is_the_users_and_one_without_a_home_has_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/someone"))
    assert build.default_cache() == Path("/home/someone/.cache/rocm_serve/kernels_hip")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert build.default_cache().parts[-3:] == (".cache", "rocm_serve", "kernels_hip")


def test_processes_that_start_together_build_once(compiler: Path) -> None:
    (compiler / "slow").write_text("")
    script = f"from kernels_hip import build; from pathlib import Path; build.BUILT = Path({str(compiler / 'none')!r});"
    script += f"build.library(build.Target('rocm', ('gfx942',)), Path({str(compiler / 'cache')!r}))"
    running = [subprocess.Popen([sys.executable, "-c", script], cwd=build.ROOT.parent) for _ in range(3)]
    assert [process.wait(timeout=60) for process in running] == [0, 0, 0]
    assert builds(compiler) == 1


def test_a_process_that_was_killed_while_it_built_holds_no_lock(compiler: Path) -> None:
    cache = compiler / "cache"
    script = (
        "import time; from kernels_hip import build; from pathlib import Path\n"
        f"cache = Path({str(cache)!r}); cache.mkdir()\n"
        "target = build.Target('rocm', ('gfx942',))\n"
        "path = cache / build._file_name(target, build._digest(target, build._version(build.find_compiler('rocm'))))\n"
        "with build._alone(path.with_suffix('.lock')):\n"
        "    (cache / 'held').write_text('')\n"
        "    time.sleep(600)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], cwd=build.ROOT.parent)
    try:
        deadline = time.monotonic() + 60
        while not (cache / "held").exists():
            assert time.monotonic() < deadline and holder.poll() is None
            time.sleep(0.02)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert build.library(ROCM, cache).exists()


@pytest.mark.parametrize(
    ("archs", "words"),
    [("x86_64", "run on AMD and NVIDIA GPUs, not on x86_64"), ("gfx942,sm_90", "for the GPUs of one maker")],
)
def test_architectures_that_cannot_be_are_refused(archs: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["--archs", archs]) == 2
    assert words in capsys.readouterr().err


def test_targets_name_architectures_as_each_compiler_does() -> None:
    assert build.target_of("gfx950").flags()[-1] == "--offload-arch=gfx950"
    assert build.target_of("sm_90").flags()[-1] == "-gencode=arch=compute_90,code=sm_90"
