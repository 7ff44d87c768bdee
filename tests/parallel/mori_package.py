"""Write a MORI that is nothing but signatures: a package as one release has it, for the ABI reader and the exchange.

What its functions do is in fake_mori.py, which checks every argument and computes on the CPU. The signatures were read
in the wheels of amd-mori 1.0.0 and 1.2.4.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tests.parallel import fake_mori

_DATA = Path(__file__).parent / "mori_signatures.json"
LATEST = "1.2.4"
_HEAD = (
    "import torch\nfrom dataclasses import dataclass\nfrom enum import Enum\nfrom tests.parallel import fake_mori\n\n"
)
_OPS_INIT = """from .dispatch_combine import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp
"""


@cache
def _data() -> Any:
    return json.loads(_DATA.read_text(encoding="utf-8"))


def releases() -> tuple[str, ...]:
    return tuple(_data()["releases"])


def write_package(root: Path, release: str = LATEST) -> Path:
    """Write the package `mori` of a release below `root` and return its folder."""
    folder = root / "mori"
    for name in ("", "ops", "shmem"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text("", encoding="utf-8")
    (folder / "ops" / "__init__.py").write_text(_OPS_INIT, encoding="utf-8")
    (folder / "ops" / "dispatch_combine.py").write_text(_ops(release), encoding="utf-8")
    (folder / "shmem" / "__init__.py").write_text("from .api import *\n", encoding="utf-8")
    (folder / "shmem" / "api.py").write_text(_shmem(), encoding="utf-8")
    return folder


def _ops(release: str) -> str:
    data = _data()
    kinds = "\n".join(f"    {name} = {number}" for number, name in enumerate(data["kernel_types"][release]))
    fields = "\n".join(f"    {field}" for field in data["config"][release])
    methods = ""
    for name, by_release in data["op"].items():
        inside = by_release[release][1:-1]
        parameters = ", ".join(filter(None, ["self", inside]))
        methods += f"    @fake_mori.strict\n    def {name}({parameters}):\n        ...\n\n"
    return (
        f"{_HEAD}class EpDispatchCombineKernelType(Enum):\n{kinds}\n\n\n"
        f"@dataclass\nclass EpDispatchCombineConfig:\n{fields}\n\n\n"
        f"class EpDispatchCombineOp(fake_mori.Op):\n{methods}"
    )


def _shmem() -> str:
    functions = [
        f"@fake_mori.strict\ndef {name}{parameters}:\n    ...\n" for name, parameters in _data()["shmem"].items()
    ]
    return "\n\n".join([f"{_HEAD}MORI_SHMEM_INIT_WITH_UNIQUEID = 1\n", *functions])


@contextmanager
def installed(root: Path, release: str = LATEST) -> Iterator[Path]:
    """Make `import mori` find the package of a release, written below `root`. Once at a time in a process."""
    folder = write_package(root, release)
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        yield folder
    finally:
        fake_mori.forget()
        sys.path.remove(str(root))
        for name in [name for name in sys.modules if name == "mori" or name.startswith("mori.")]:
            del sys.modules[name]
