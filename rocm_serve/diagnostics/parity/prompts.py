"""The sequences that both sides compute: prompts of the user's, or lengths at which things are known to break."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rocm_serve.errors import UserError
from rocm_serve.tokens.tokenizer import Tokenizer

# Around the edges of pages (16), padded rows (32), chunks of the delta rule (64) and blocks of keys (128).
LENGTHS = (1, 3, 31, 64, 65, 130)
_SEED = 17


class Prompt(msgspec.Struct, frozen=True):
    """Token ids, never empty. `where`: the line that they are from, for whoever refuses them; empty for drawn ones."""

    ids: tuple[int, ...]
    where: str = ""


def drawn(tokenizer: Tokenizer) -> list[Prompt]:
    """Draw prompts of LENGTHS among the ids that the tokenizer knows."""
    draw = random.Random(_SEED)
    return [Prompt(tuple(draw.randrange(tokenizer.vocab_used) for _ in range(length))) for length in LENGTHS]


def read(path: Path, tokenizer: Tokenizer) -> list[Prompt]:
    """Read one prompt a line: JSON text, or a JSON list of ids.

    Errors: UserError naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may hold the other ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {path}: {getattr(error, 'strerror', None) or error}") from None
    found = [_prompt(line, f"--prompts {path}, line {i}", tokenizer) for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError(f"--prompts {path} holds no prompt; legal: a JSON text or a JSON list of ids a line")
    return found


def _prompt(line: str, where: str, tokenizer: Tokenizer) -> Prompt:
    try:
        value = json.loads(line)
        if isinstance(value, str):
            value.encode()
            value = tokenizer.encode(value)
    except UnicodeEncodeError:
        raise UserError(f"{where}: this text holds half a surrogate pair; legal: text that UTF-8 can hold") from None
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, brackets without end
        value = None
    known = isinstance(value, list) and all(type(token) is int and 0 <= token < tokenizer.vocab_used for token in value)
    if not known or not value:
        raise UserError(f"{where}: legal: a JSON text, or a JSON list of ids from 0 to {tokenizer.vocab_used - 1}")
    return Prompt(tuple(value), where)


def check_lengths(prompts: Sequence[Prompt], new_tokens: int, positions: int) -> int:
    """Return the length of the longest sequence. Errors: UserError where a model of so many positions holds it not."""
    if new_tokens < 1:
        raise UserError(f"--new-tokens {new_tokens}: legal: 1 or more")
    for prompt in prompts:
        if len(prompt.ids) >= positions:
            raise UserError(
                f"{prompt.where or 'a drawn prompt'}: {len(prompt.ids)} tokens; the model allows {positions} positions,"
                f" so legal: up to {positions - 1}, and a new token"
            )
    longest = max(len(prompt.ids) for prompt in prompts)
    if longest + new_tokens > positions:
        raise UserError(
            f"--new-tokens {new_tokens}: legal: 1..{positions - longest}: the longest prompt has {longest} tokens, and"
            f" the model allows {positions} positions"
        )
    return longest + new_tokens
