"""Whether a step is planned, and given to the device, before the tokens of the one before it are known. Pure."""

from __future__ import annotations

from rocm_serve.config.schema import DeviceName, PlanAheadName, ServeConfig

_DRAFTS = "which drafts are right must be known before the next step is planned"


def decide(
    config: ServeConfig,
    device: DeviceName,
    chosen: dict[str, object],
    reasons: dict[str, str],
    notes: list[str],
) -> dict[str, object]:
    """Return that field of Resolved. `chosen`: those decided before; `reasons` and `notes` are added to."""
    wish = config.plan_ahead
    if wish == "off":
        return {"plan_ahead": "off"}
    why = _DRAFTS if chosen["draft_tokens"] else None
    if why is not None and wish == "on":
        notes.append(f"--plan-ahead on has no effect: {why}")
    if device == "cpu" and wish == "auto":
        reasons["plan_ahead"] = "auto: on a CPU the host computes"
        return {"plan_ahead": "off"}
    if why is None and wish == "auto" and not chosen["graph_max_batch"]:
        why = "no device graphs"
    if why is None and wish == "auto" and config.pp > 1:
        why = "not measured with stages yet; --plan-ahead on"
    if why is not None:
        reasons["plan_ahead"] = why if wish == "on" else f"auto: {why}"
        return {"plan_ahead": "off"}
    if wish == "auto":
        reasons["plan_ahead"] = "auto: where decode steps are captured"
        return {"plan_ahead": "graphs"}
    return {"plan_ahead": "on"}


def in_effect(plan_ahead: PlanAheadName, graph_max_batch: int) -> bool:
    """Say what it comes to when it is known which decode batches have been captured."""
    return plan_ahead == "on" or (plan_ahead == "graphs" and graph_max_batch > 0)
