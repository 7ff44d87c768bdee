"""Speculative decoding: what is legal, and what it comes to. Pure."""

from __future__ import annotations

from rocm_serve.config.schema import ServeConfig
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import ModelFacts

MOST_DRAFT_TOKENS = 4  # one layer drafts them all, each from its own guess before: later ones are seldom right
DRAFT_TOKENS = 3


def decide(config: ServeConfig, facts: ModelFacts, reasons: dict[str, str], notes: list[str]) -> dict[str, object]:
    """Decide how many drafts a step may have, and return these fields of Resolved; `reasons` and `notes` are added to.

    Errors: UserError naming the flag and what is legal.
    """
    tokens, wish = config.draft_tokens, f"--speculative {config.speculative}"
    if tokens is not None and not 1 <= tokens <= MOST_DRAFT_TOKENS:
        raise UserError(f"--draft-tokens {tokens}: legal: 1..{MOST_DRAFT_TOKENS}")
    if config.speculative == "off":
        if tokens is not None:
            notes.append(f"--draft-tokens {tokens} has no effect without --speculative mtp or auto")
        return {"draft_tokens": 0, "adaptive_drafting": False}
    if not facts.mtp_layers:
        raise UserError(f"{wish}: the model has no draft layer (mtp_num_hidden_layers is 0); legal: off")
    if facts.mtp_layers > 1:
        raise UserError(f"{wish}: the model has {facts.mtp_layers} draft layers; legal with more than one: off")
    reasons["draft_tokens"] = f"{wish}, {'its default' if tokens is None else '--draft-tokens'}"
    if config.speculative == "auto":
        reasons["adaptive_drafting"] = wish
    return {"draft_tokens": tokens or DRAFT_TOKENS, "adaptive_drafting": config.speculative == "auto"}
