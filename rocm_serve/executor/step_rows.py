"""How many rows and requests the steps of a launch have at most. Pure, no torch."""

from __future__ import annotations

from rocm_serve.config import graphs
from rocm_serve.config.schema import Resolved

CPU_ROW_MULTIPLE = 32  # with rows padded to this, CPU GEMMs give a row the same bits in every batch
SCORED_ROWS = 256  # prompt rows whose logits exist at one time (vocab_shard.SLICE_ROWS)


def row_multiple(resolved: Resolved) -> int:
    """Say to what multiple a step's rows are padded."""
    return CPU_ROW_MULTIPLE if resolved.device == "cpu" else 1


def padded(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple


def most_rows(resolved: Resolved) -> int:
    """Return the rows of the longest step, with padding."""
    return padded(resolved.chunked_prefill_size + decode_rows(resolved), CPU_ROW_MULTIPLE)


def decode_rows(resolved: Resolved) -> int:
    """Return the most rows of decoding requests in a step: of each its newest token, and its drafts."""
    return resolved.max_running_requests * (1 + resolved.draft_tokens)


def prompt_rows(resolved: Resolved) -> int:
    """Return the most rows of prompts in a step of fixed size; 0: there are no such steps."""
    if resolved.device == "cpu":
        return 0
    return min(graphs.PROMPT_ROWS, resolved.chunked_prefill_size, resolved.max_model_len)


def prompt_sequences(resolved: Resolved) -> int:
    """Return the most prompts in a step of fixed size."""
    return min(graphs.PROMPTS, resolved.max_running_requests)


def prompt_counts(resolved: Resolved) -> tuple[int, ...]:
    """Return the sizes of what decodes beside prompts there. Padding there would be counted among experts' rows."""
    return (0,) if resolved.expert_counts else (0, min(graphs.PROMPT_DECODES, resolved.max_running_requests))
