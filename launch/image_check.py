"""The image's check of itself, last step of Dockerfile.rocm: versions and imports that need no GPU.

One line per finding; exits with 1 when something is not as it must be.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

PYTHON = (3, 12)
ROCM = (7, 2, 2)
MORI = "1.2.4"
AITER = (0, 1, 17)
PROVIDERS = ("mlx5", "bnxt_re")
OURS = ("rocm_serve.cli", "rocm_serve.compose", "rocm_serve.engine.main", "rocm_serve.executor.worker")


def numbers(version: str) -> tuple[int, ...]:
    """Read the leading numbers of a version: "7.2.4-abc" is (7, 2, 4)."""
    found = []
    for part in version.replace("-", ".").replace("+", ".").split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


def python() -> str:
    assert sys.version_info[:2] == PYTHON, f"Python {sys.version.split()[0]}, wanted 3.12"
    return sys.version.split()[0]


def torch() -> str:
    module = importlib.import_module("torch")
    hip = module.version.hip
    assert hip, f"torch {module.__version__} is no ROCm build: something has replaced the image's"
    assert numbers(hip) >= ROCM[:2], f"torch is built for ROCm {hip}, wanted 7.2.2 or later"
    return f"{module.__version__}, HIP {hip}"


def rocm() -> str:
    text = Path("/opt/rocm/.info/version").read_text(encoding="utf-8").strip()
    assert numbers(text) >= ROCM, f"ROCm {text}, wanted 7.2.2 or later"
    return text


def mori() -> str:
    version = importlib.metadata.version("amd-mori")
    assert version == MORI, f"amd-mori {version}, wanted {MORI}"
    importlib.import_module("mori.ops")  # loads its libraries: what they are linked with is there
    return version


def aiter() -> str:
    # Importing it without a GPU fails by design, so it is only looked for.
    assert importlib.util.find_spec("aiter") is not None, "no package aiter"
    version = importlib.metadata.version("amd-aiter")
    assert numbers(version) >= AITER, f"amd-aiter {version}, wanted 0.1.17 or later"
    return version


def providers() -> str:
    found = {path.stem for path in Path("/etc/libibverbs.d").glob("*.driver")}
    missing = [name for name in PROVIDERS if name not in found]
    assert not missing, f"no libibverbs provider {', '.join(missing)} in /etc/libibverbs.d"
    return ", ".join(sorted(found))


def ours() -> str:
    for name in OURS:
        importlib.import_module(name)
    return importlib.metadata.version("rocm-serve")


CHECKS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("python", python),
    ("rocm", rocm),
    ("torch", torch),
    ("mori", mori),
    ("aiter", aiter),
    ("rdma providers", providers),
    ("rocm_serve", ours),
)


def main() -> int:
    failed = 0
    for name, check in CHECKS:
        try:
            line = f"ok      {name}: {check()}"
        except (AssertionError, ImportError, OSError) as error:  # OSError: a shared library is missing, too
            failed += 1
            line = f"FAILED  {name}: {error}"
        sys.stdout.write(line + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
