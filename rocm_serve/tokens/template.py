"""Chat templates: a model directory's own Jinja text, run in a sandbox with the helpers that HF templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rocm_serve.errors import UserError

_STUMBLES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class TemplateRefused(ValueError):
    """The template does not accept these messages; the text is the template's own."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant turns for training masks; for serving it is its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str | None]) -> None:
        self.source = source
        self._tokens = {name: token for name, token in special_tokens.items() if token is not None}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt of a conversation. `extra` reaches the template untouched.

        Errors: TemplateRefused with the template's sentence, or with what it stumbled over.
        """
        variables: dict[str, object] = {**self._tokens, **(extra or {})}
        variables.update(messages=messages, add_generation_prompt=add_generation_prompt, tools=tools)
        try:
            return self._template.render(variables)
        except TemplateRefused:
            raise
        except _STUMBLES as error:
            raise TemplateRefused(f"the chat template cannot render these messages: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise TemplateRefused(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Differ from Jinja's own filter as HF does: no HTML escapes, real characters, the order of the keys kept."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
