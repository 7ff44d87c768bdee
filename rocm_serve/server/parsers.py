"""Can the chosen parsers work with the tokenizer of this model?"""

from __future__ import annotations

from rocm_serve.errors import UserError
from rocm_serve.server.reasoning import REASONING_TAGS
from rocm_serve.server.tools import TOOL_TAGS
from rocm_serve.tokens.tokenizer import Tokenizer


def check_tags_are_seen(tokenizer: Tokenizer, reasoning_parser: str | None, tool_call_parser: str | None) -> None:
    """Errors: UserError if the tokenizer marks a tag as special: such tokens are left out of answers."""
    for flag, name, tags in (
        ("--reasoning-parser", reasoning_parser, REASONING_TAGS),
        ("--tool-call-parser", tool_call_parser, TOOL_TAGS),
    ):
        for tag in () if name is None else tags[name]:
            if tokenizer.id_of(tag) in tokenizer.special_ids:
                raise UserError(f"{flag} {name} reads {tag}, which the tokenizer of this model hides as special")
