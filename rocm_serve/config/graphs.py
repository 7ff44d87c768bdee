"""Device graphs of decode steps: which batch sizes are captured, and when none is. Pure."""

from __future__ import annotations

from rocm_serve.config.schema import DeviceName, ServeConfig
from rocm_serve.errors import UserError

AUTO_MOST = 256  # beyond it a step takes so long that launching its kernels one by one is hidden
PROMPT_ROWS = 2048  # most of prompts in a step of fixed size; with more, computing hides the launches
PROMPT_DECODES = 64  # decoding requests beside them
# Beside more, up to so many, prompts are a step of their own. Beyond, launches are the smaller part in layers of the
# 2.4T, and weights that are read twice cost more (docs/decisions/0020). Steps with drafts have no size beyond.
PARTS_DECODES = 128
PROMPTS = 16  # most of them in such a step; room for 64 costs all such steps some time (docs/decisions/0018)
_LEAST_ROWS = 64
# Why no step with rows on their way to experts is captured, by exchange.
_EXCHANGES = {
    "torch": "--expert-exchange torch has the host count the rows that each rank sends",
    "mori": "--expert-exchange mori: no graph with MORI's kernels was ever replayed by us",
}


def batch_sizes(most: int) -> tuple[int, ...]:
    """Return the sizes that batches are padded to: powers of two below `most`, and `most` itself.

    Kernels choose their tiles by the next power of two (ops/tiles.py), so sizes between would add graphs, not speed.
    """
    powers = [1 << i for i in range(max(most - 1, 0).bit_length())]
    return (*powers, most) if most else ()


def prompt_sizes(most: int) -> tuple[int, ...]:
    """Return the sizes that a prompt is padded to: powers of two from 64, from 256 on halves between, and `most`.

    Empty where `most` is less than 64.
    """
    powers = [_LEAST_ROWS << i for i in range(max(0, most // _LEAST_ROWS).bit_length())]
    sizes = {*powers, *(one * 3 // 2 for one in powers if one >= 256)}
    return tuple(sorted({size for size in sizes if size < most} | ({most} if powers else set())))


def verified_sizes(most: int, draft_tokens: int) -> tuple[int, ...]:
    """Return the sizes of batches in which each request brings drafts: `AUTO_MOST` rows at most, so fewer requests."""
    return batch_sizes(min(most, AUTO_MOST // (1 + draft_tokens)))


def shared_beside(device: DeviceName) -> bool:
    """Whether a captured step computes the shared expert of few rows beside the routed ones: not timed on ROCm."""
    return device == "cuda"


def decide(
    config: ServeConfig,
    device: DeviceName,
    nnodes: int,
    chosen: dict[str, object],
    reasons: dict[str, str],
    notes: list[str],
) -> dict[str, object]:
    """Decide the largest decode batch that is captured, 0 for none, and return that field of Resolved.

    `chosen`: fields of Resolved that were decided before. `reasons` and `notes` are added to.
    Errors: UserError naming the flag and what is legal.
    """
    wish = config.graph_max_batch
    if wish is not None and wish < 0:
        raise UserError(f"--graph-max-batch {wish}: legal: 0 (no device graphs) or more")
    if config.enforce_eager:
        reasons["graph_max_batch"] = "--enforce-eager"
        return {"graph_max_batch": 0}
    if wish == 0:
        return {"graph_max_batch": 0}
    why = _refusal(config, device, nnodes, chosen)
    if why is not None:
        if wish is not None:
            notes.append(f"--graph-max-batch {wish} has no effect: {why}")
        if device != "cpu":
            reasons["graph_max_batch"] = f"no device graphs: {why}"
        return {"graph_max_batch": 0}
    most = config.max_running_requests
    if wish is None:
        reasons["graph_max_batch"] = f"auto: --max-running-requests {most}" + (
            f", at most {AUTO_MOST}" if most > AUTO_MOST else ""
        )
        return {"graph_max_batch": min(most, AUTO_MOST)}
    if wish > most:
        reasons["graph_max_batch"] = f"no batch is larger than --max-running-requests {most}"
    return {"graph_max_batch": min(most, wish)}


def _refusal(config: ServeConfig, device: DeviceName, nnodes: int, chosen: dict[str, object]) -> str | None:
    """Say why no step can be captured, as far as wishes tell; a rank knows the rest when its ops are bound."""
    if device == "cpu":
        return "a CPU has no device graphs"
    if chosen["all_reduce"] == "aiter":
        return "--all-reduce aiter shares the buffers of a graph while it is captured, which we do not do"
    names = ["expert_exchange", *(["speculative_expert_exchange"] if chosen["draft_tokens"] else [])]
    for exchange in (str(chosen[name]) for name in names):
        if exchange in _EXCHANGES:
            return _EXCHANGES[exchange]
    if config.tp * config.pp // nnodes < config.tp:
        return "the ranks of a stage are on several hosts, and NCCL 2.28 hangs in captured sums between hosts"
    return None
