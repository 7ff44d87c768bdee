"""What all members must have in common, and how a difference is told. No torch."""

from __future__ import annotations

import hashlib
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
    "log_level",
    "run_dir",
    "trace",
    "reasons",
}
_SHOWN = 60


def agreement(resolved: Resolved) -> dict[str, str]:
    """List what must be equal on all members: package, checkpoint (by hashes), and configuration."""
    fields = msgspec.structs.asdict(resolved)
    return (
        {"rocm-serve version": VERSION}
        | _model_hashes(Path(resolved.model))
        | {name.replace("_", "-"): _text(value) for name, value in fields.items() if name not in _OWN}
    )


def difference(mine: Mapping[str, str], my_name: str, theirs: Mapping[str, str], their_name: str) -> str | None:
    """Name every key that differs, with both values; None when there is none."""
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    if not keys:
        return None
    told = (f"{key}: {_shown(mine.get(key))} on {my_name}, {_shown(theirs.get(key))} on {their_name}" for key in keys)
    return f"{my_name} and {their_name} differ; " + "; ".join(told)


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
