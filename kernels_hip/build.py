"""Finds or builds the shared library of all kernels.

    python -m kernels_hip.build --archs gfx942,gfx950     builds beside the sources, as Dockerfile.rocm does

A library is named after everything that went into it. One that was built beside the sources is taken first, then one in
the user's cache; else it is built there, by one process of the machine while the others wait. The lock is the kernel's
own (flock): it ends with the process that holds it. Imports nothing of rocm_serve and no torch.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent
BUILT = ROOT / "built"
Kind = Literal["rocm", "cuda"]

_COMPILERS: dict[Kind, tuple[str, ...]] = {
    "rocm": ("hipcc", "/opt/rocm/bin/hipcc"),
    "cuda": ("nvcc", "/usr/local/cuda/bin/nvcc"),
}
# A product and a sum are rounded one by one, as the references do; divisions are exact.
_FLAGS: dict[Kind, tuple[str, ...]] = {
    "rocm": ("-O3", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC"),
    "cuda": ("-O3", "-std=c++17", "-fmad=false", "-shared", "-Xcompiler", "-fPIC", "-x", "cu"),
}


class BuildError(RuntimeError):
    """The library is not there and cannot be built; one sentence for the user."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a library is for. Architectures as the compilers name them: gfx942, sm_90."""

    kind: Kind
    archs: tuple[str, ...]

    def flags(self) -> tuple[str, ...]:
        if self.kind == "rocm":
            return (*_FLAGS["rocm"], *(f"--offload-arch={arch}" for arch in self.archs))
        numbers = [arch.removeprefix("sm_") for arch in self.archs]
        return (*_FLAGS["cuda"], *(f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers))


def default_cache() -> Path:
    """Return the folder of this user's libraries; one of temporary files for a user without a home."""
    try:
        home = Path.home()
    except RuntimeError:
        home = Path(tempfile.gettempdir())
    return home / ".cache" / "rocm_serve" / "kernels_hip"


def target_of(arch: str) -> Target:
    """Return the target of one machine. Errors: BuildError for an architecture that is no GPU's."""
    if arch.startswith("gfx"):
        return Target("rocm", (arch,))
    if arch.startswith("sm_"):
        return Target("cuda", (arch,))
    raise BuildError(f"the HIP kernels run on AMD and NVIDIA GPUs, not on {arch}")


def kernel_sources() -> list[Path]:
    """List the files that are compiled, each on its own."""
    return sorted(ROOT.glob("impls/*/*.hip"))


def _digest(target: Target, compiler: str) -> str:
    """Name everything that a library is made of. `compiler` is its version, or "" beside the sources."""
    digest = hashlib.sha256()
    for path in (*sorted(ROOT.glob("include/*.h")), *kernel_sources()):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    digest.update("\0".join((*_FLAGS[target.kind], compiler)).encode())
    return digest.hexdigest()[:16]


def _file_name(target: Target, digest: str) -> str:
    return f"kernels-{target.kind}-{'.'.join(target.archs)}-{digest}.so"


def find_compiler(kind: Kind) -> Path | None:
    """Return hipcc or nvcc, or None."""
    for name in _COMPILERS[kind]:
        found = shutil.which(name)
        if found:
            return Path(found)
    return None


def find_built(target: Target) -> Path | None:
    """Return a library beside the sources that holds these sources for (at least) the target's architectures."""
    digest = _digest(target, "")
    for path in sorted(BUILT.glob(f"kernels-{target.kind}-*-{digest}.so")):
        if set(target.archs) <= set(path.name.split("-")[2].split(".")):
            return path
    return None


def missing(target: Target) -> str | None:
    """Say why no library can be had, or None. Reads file names only."""
    if find_built(target) or find_compiler(target.kind):
        return None
    return f"is not built and finds no {_COMPILERS[target.kind][0]} to build it with"


def library(target: Target, cache: Path | None = None) -> Path:
    """Return the library for `target`, building it if need be. Errors: BuildError, with the compiler's words."""
    cache = cache or default_cache()
    built = find_built(target)
    if built:
        return built
    compiler = find_compiler(target.kind)
    if compiler is None:
        raise BuildError(f"the library of HIP kernels {missing(target)}")
    path = cache / _file_name(target, _digest(target, _version(compiler)))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(path.with_suffix(".lock")):
            if not path.exists():
                _build(compiler, target, path)
    except OSError as error:
        raise BuildError(f"the library of HIP kernels cannot be written to {cache}: {error}") from error
    return path


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold the lock of one library. The file stays: taking it away would let two processes hold two locks."""
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _version(compiler: Path) -> str:
    return _run([str(compiler), "--version"])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip()[-2000:]
        raise BuildError(f"{command[0]} ended with {done.returncode}: {words}")
    return done.stdout


def _build(compiler: Path, target: Target, path: Path) -> None:
    """Compile into a file of this process, then move it: no one sees half a library."""
    partial = path.with_suffix(f".{os.getpid()}")
    sources = [str(source) for source in kernel_sources()]
    try:
        _run([str(compiler), *target.flags(), f"-I{ROOT / 'include'}", *sources, "-o", str(partial)])
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Build beside the sources."""
    parser = argparse.ArgumentParser(prog="python -m kernels_hip.build", description="Build the library of kernels.")
    parser.add_argument("--archs", required=True, help="of one maker, with commas: gfx942,gfx950 or sm_90")
    archs = tuple(parser.parse_args(argv).archs.split(","))
    try:
        kinds = {target_of(arch).kind for arch in archs}
        if len(kinds) != 1:
            raise BuildError(f"--archs {','.join(archs)}: a library is for the GPUs of one maker")
        target = Target(kinds.pop(), archs)
        compiler = find_compiler(target.kind)
        if compiler is None:
            raise BuildError(f"the library of HIP kernels {missing(target)}")
        BUILT.mkdir(exist_ok=True)
        (BUILT / ".gitignore").write_text("*\n", encoding="utf-8")
        path = BUILT / _file_name(target, _digest(target, ""))
        _build(compiler, target, path)
    except BuildError as error:
        sys.stderr.write(f"kernels_hip.build: {error}\n")
        return 2
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
