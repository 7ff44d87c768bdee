"""What a server was started with, written into its run directory so that a report can be made of it later.

Everything is redacted before it is written: `Redactor` knows the values of every variable whose name sounds secret.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from rocm_serve.config.aliases import SPELLINGS
from rocm_serve.config.load import FIELDS
from rocm_serve.config.schema import Resolved
from rocm_serve.platform.facts import Platform
from rocm_serve.version import VERSION

RESOLVED, STARTED = "resolved.json", "started.json"
REDACTED = "<redacted>"

# Variables that decide how a server runs; nothing else of an environment is ever written down.
SHOWN_PREFIXES = (
    *("ROCM_SERVE_", "NCCL_", "RCCL_", "GLOO_", "MORI_", "AITER_", "HIP_", "HSA_", "ROCR_", "ROCM_", "GPU_", "FABRIC"),
    *("CUDA_", "TORCH_", "PYTORCH_", "TRITON_", "OMP_", "IBV_", "RDMAV_", "LWS_", "SLURM_", "MASTER_", "FLYDSL_"),
)
SHOWN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HOSTNAME", "LD_LIBRARY_PATH")
PACKAGES = (
    *("torch", "triton", "pytorch-triton-rocm", "amd-mori", "amd-aiter", "flydsl", "numpy", "msgspec"),
    *("pyzmq", "fastapi", "uvicorn", "pydantic", "tokenizers", "safetensors", "jinja2"),
)
_SECRET_NAME = re.compile(
    r"(^|[_\W])(api_?keys?|.*keys?|.*tokens?|secrets?|passw(or)?d|passphrase|credentials?|jwt|auth)$", re.I
)
_NOT_SECRET = (
    {name.upper() for name in FIELDS}
    | {f"ROCM_SERVE_{name.upper()}" for name in FIELDS}
    | {flag.strip("-").replace("-", "_").upper() for flag in SPELLINGS}  # --max-num-batched-tokens
)
_SHORTEST = 6  # characters; shorter values occur everywhere
# Bounded names: a log may hold one word of megabytes, and the search must stay linear in it.
_FLAG = re.compile(r"(--([\w-]{1,64})[= ]+)(\"[^\"]*\"|'[^']*'|[^\s\"',}]+)")
_ASSIGNED = re.compile(r"\b(([A-Za-z][\w-]{0,63})[\"']?\s{0,4}[=:]\s{0,4})(\"[^\"]+\"|'[^']+'|[^\s,;&\"'}\])]+)")
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}")
_WELL_KNOWN = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[0-9A-Z]{16})")
_IN_URL = re.compile(r"\b(\w{1,16}://)[^/\s:@]{1,64}:[^/\s@]{1,256}@")


def sounds_secret(name: str) -> bool:
    """Say whether a variable, flag or key of this name may hold a secret; the server's own settings do not."""
    word = name.strip("-").replace("-", "_")
    return word.upper() not in _NOT_SECRET and _SECRET_NAME.search(word) is not None


class Redactor:
    """Takes secrets out of text: by the values of `environ` that sound secret, by the names before values, by shape."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        values = {value for name, value in environ.items() if sounds_secret(name) and len(value) >= _SHORTEST}
        self._values = sorted(values, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return `text` without what looks or is known to be secret."""
        for value in self._values:
            text = text.replace(value, REDACTED)
        text = _BEARER.sub(rf"\1 {REDACTED}", text)
        text = _WELL_KNOWN.sub(REDACTED, text)
        text = _IN_URL.sub(rf"\1{REDACTED}@", text)
        return _ASSIGNED.sub(_without_value, _FLAG.sub(_without_value, text))

    def json(self, value: object) -> object:
        """Return a JSON value without secrets: every text in it is looked at, and the names before texts."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.json(item) for item in value]
        if isinstance(value, dict):
            return {
                name: REDACTED if isinstance(item, str) and sounds_secret(name) else self.json(item)
                for name, item in value.items()
            }
        return value

    def arguments(self, argv: Sequence[str]) -> list[str]:
        """Return a command line without the values of flags that sound secret."""
        clean: list[str] = []
        hide = False
        for word in argv:
            clean.append(REDACTED if hide else self.text(word))
            hide = word.startswith("--") and "=" not in word and sounds_secret(word)
        return clean

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that matter to a server."""
        shown = (name for name in sorted(environ) if name.startswith(SHOWN_PREFIXES) or name in SHOWN_NAMES)
        return {name: REDACTED if sounds_secret(name) else self.text(environ[name]) for name in shown}


def _without_value(match: re.Match[str]) -> str:
    value = match[3].strip("\"'")
    harmless = not sounds_secret(match[2]) or value == REDACTED or value.replace(".", "").isdigit()
    return match[0] if harmless else match[1] + REDACTED


def versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """List interpreter, system, ROCm and packages, without importing any of them."""
    found = {
        "rocm_serve": VERSION,
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
    }
    rocm = Path("/opt/rocm/.info/version")
    if rocm.is_file():
        found["rocm"] = rocm.read_text(encoding="utf-8").strip()
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def record_start(
    resolved: Resolved, machine: Platform, environ: Mapping[str, str], argv: Sequence[str], run_dir: Path
) -> None:
    """Write what decides the run into its directory, before anything is started."""
    redactor = Redactor(environ)
    started = {
        "command": redactor.arguments(argv),
        "machine": machine.describe(),
        "versions": versions(),
        "environment": redactor.environment(environ),
    }
    (run_dir / RESOLVED).write_bytes(msgspec.json.encode(resolved))
    (run_dir / STARTED).write_bytes(msgspec.json.format(msgspec.json.encode(started), indent=1))
