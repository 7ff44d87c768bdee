"""What all members must have in common, and how a difference is told. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rocm_serve.config.schema import Resolved
from rocm_serve.version import VERSION

# Each host's own affair.
_OWN = {
    "model",  # what lies there is compared, not where
    "served_model_name",
    "host",
    "port",
    "node_rank",
    "member",
    "first_device",
    "address",
    "interface",
    "torch_threads",
    "max_queued_requests",
    "reasoning_parser",
    "tool_call_parser",
    "log_level",
    "run_dir",
    "notes",
    "trace",
    "expert_placement",  # as with the model
    "expert_counts",
    "reasons",
}
# What RCCL and NCCL must be told alike on all members, or they wait for each other in silence. Names of cards and of
# interfaces, and rows of address tables, may differ.
_VARIABLES = (
    *("NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_DISABLE", "RCCL_AINIC_ROCE", "NCCL_PROTO", "NCCL_ALGO", "NCCL_BUFFSIZE"),
    *("NCCL_CROSS_NIC", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_TC"),
    *("NCCL_IB_SL", "NCCL_PXN_DISABLE", "NCCL_P2P_NET_CHUNKSIZE", "RCCL_MSCCL_ENABLE", "RCCL_MSCCLPP_ENABLE"),
)
_LIBRARIES = ("torch", "triton", "pytorch-triton-rocm", "amd-mori", "amd-aiter")
_SHOWN = 60
_REMEDIES = {
    "rocm-serve source": "install the same package on both",
    "mtu": "give the interfaces that face each other one MTU: ip link set dev NAME mtu BYTES",
}


def agreement(resolved: Resolved, environ: Mapping[str, str]) -> dict[str, str]:
    """List what must be equal on all members: packages, checkpoint (by hashes), configuration, variables of RCCL."""
    fields = msgspec.structs.asdict(resolved)
    return (
        {"rocm-serve version": VERSION, "rocm-serve source": source_hash()}
        | _library_versions()
        | {name: environ[name] for name in _VARIABLES if name in environ}
        | _model_hashes(Path(resolved.model))
        | ({} if resolved.expert_placement is None else {"expert placement": _hash(Path(resolved.expert_placement))})
        | {name.replace("_", "-"): _text(value) for name, value in fields.items() if name not in _OWN}
    )


def identity(checks: Mapping[str, str]) -> str:
    """Say in one line which package and which checkpoint a member has."""
    settings = {name.replace("_", "-") for name in Resolved.__struct_fields__}
    settings |= set(_VARIABLES)
    return ", ".join(f"{key} {value}" for key, value in checks.items() if key not in settings)


def source_hash() -> str:
    """Hash the package as it is installed: two checkouts may bear the same version."""
    package = Path(__file__).parent
    whole = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        whole.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:16]


def _library_versions() -> dict[str, str]:
    """List the libraries whose kernels and wire formats meet, without importing any."""
    found = {}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[f"{name} version"] = importlib.metadata.version(name)
    return found


def difference(mine: Mapping[str, str], my_name: str, theirs: Mapping[str, str], their_name: str) -> str | None:
    """Name every key that differs, with both values; None when there is none."""
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    if not keys:
        return None
    told = (f"{key}: {_shown(mine.get(key))} on {my_name}, {_shown(theirs.get(key))} on {their_name}" for key in keys)
    remedies = (f"; {_REMEDIES[key]}" for key in keys if key in _REMEDIES)
    return f"{my_name} and {their_name} differ; " + "; ".join(told) + "".join(remedies)


def _model_hashes(model: Path) -> dict[str, str]:
    index = model / "model.safetensors.index.json"
    weights = {"model.safetensors.index.json": _hash(index)} if index.exists() else {}
    if not weights:
        weights = {path.name: f"{path.stat().st_size} bytes" for path in sorted(model.glob("*.safetensors"))}
    return {"config.json": _hash(model / "config.json"), **weights}


def _text(value: object) -> str:
    return str(sorted(value.items()) if isinstance(value, dict) else value)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else "missing"


def _shown(value: str | None) -> str:
    if value is None:
        return "absent"
    return value if len(value) <= _SHOWN else value[:_SHOWN] + "..."
