"""What the operator reads at the start: values with their reasons, then one line when requests may come. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec

from rocm_serve.config.schema import Resolved, ServeConfig
from rocm_serve.messages import EffectiveLimits
from rocm_serve.platform.facts import Platform

_NOT_SHOWN = {"reasons", "notes", "run_dir", "op", "preferred"}
_DEFAULTS: dict[str, object] = {
    field.name: field.default
    for kind in (ServeConfig, Resolved)
    for field in msgspec.structs.fields(kind)
    if field.default is not msgspec.NODEFAULT
} | {"node_rank": 0}
_CURL_PROMPT = "The quick brown fox"
_CURL_TOKENS = 16


def start_up_lines(resolved: Resolved, platform: Platform, *, everything: bool = False) -> Iterator[str]:
    """List the machine's facts and every value that was decided for the user, with its reason, or is no default.

    `everything`: the defaults too.
    """
    yield f"machine: {platform.describe()}"
    for field in resolved.__struct_fields__:
        if field in _NOT_SHOWN:
            continue
        value, reason = getattr(resolved, field), resolved.reasons.get(field)
        empty = value is None or value == ""
        if everything or (not empty and (reason or value != _DEFAULTS.get(field, value))):
            yield f"{field} = {_shown(value)}" + (f"  ({reason})" if reason else "")
    for op, provider in resolved.op.items():
        yield f"op {op} = {provider}  (--op)"
    for op, provider in resolved.preferred.items():
        yield f"op {op} = {provider}, if it can  ({resolved.reasons[f'op {op}']})"
    if everything or resolved.tp * resolved.pp > 1:
        yield f"logs of workers and core: {resolved.run_dir}"


def limit_lines(limits: EffectiveLimits) -> Iterator[str]:
    """List what the running server can do, and what set each limit."""
    for field in limits.__struct_fields__:
        if field in ("reasons", "by_reference"):
            continue
        reason = limits.reasons.get(field)
        yield f"effective {field} = {getattr(limits, field)}" + (f"  ({reason})" if reason else "")


def ready_line(resolved: Resolved, limits: EffectiveLimits, url: str) -> str:
    """Say in one line where it listens, what it serves, on what, and how much of it."""
    return (
        f"ready: {url} serves {resolved.served_model_name}"
        f" on {resolved.device} tp {resolved.tp} x pp {resolved.pp}{_experts(resolved)}{_drafts(limits)},"
        f" {resolved.dtype} (kv {resolved.kv_cache_dtype});"
        f" limits: {limits.max_model_len} tokens a request, {limits.max_running_requests} running,"
        f" {limits.num_pages * limits.page_size} tokens cached, {resolved.max_queued_requests} queued"
    )


def fallback_line(limits: EffectiveLimits) -> str | None:
    """Name the ops that run as references because probes refused their kernels, cost and reason; None: none does."""
    said = "; ".join(f"op {op} {why}" for op, why in limits.by_reference.items())
    return f"warning: {said}" if said else None


def _experts(resolved: Resolved) -> str:
    plain = resolved.ep == 1 and resolved.expert_exchange == "local"
    return "" if plain else f", ep {resolved.ep} by {resolved.expert_exchange}"


def _drafts(limits: EffectiveLimits) -> str:
    return f", up to {limits.draft_tokens} drafts a step" if limits.draft_tokens else ""


def curl_line(resolved: Resolved, url: str) -> str:
    """Return a command that works as it is."""
    body = {"model": resolved.served_model_name, "prompt": _CURL_PROMPT, "max_tokens": _CURL_TOKENS}
    quoted = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    return f"curl {url}/v1/completions -H 'Content-Type: application/json' -d '{quoted}'"


def _shown(value: object) -> str:
    return "none" if value is None or value == "" else str(value)
