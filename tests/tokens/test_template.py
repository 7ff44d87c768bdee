from __future__ import annotations

import re

import pytest

from rocm_serve.errors import UserError
from rocm_serve.tokens.template import ChatTemplate, TemplateRefused
from tests.tokens.tiny import TEMPLATE

HELLO = [{"role": "user", "content": "hi"}]


def render(source: str, **extra: object) -> str:
    return ChatTemplate(source, {"eos_token": "<|im_end|>", "bos_token": None}).render(HELLO, extra=extra)


def test_turns_and_generation_prompt() -> None:
    template = ChatTemplate(TEMPLATE, {})
    assert template.render(HELLO) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert template.render(HELLO, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_special_tokens_and_extra_values_reach_the_template() -> None:
    assert render("{{ eos_token }}|{{ bos_token is defined }}|{{ effort }}", effort="low") == "<|im_end|>|False|low"


def test_tojson_keeps_characters_and_order() -> None:
    assert render("{{ value | tojson }}", value={"b": "<é>", "a": [1]}) == '{"b": "<é>", "a": [1]}'
    assert render("{{ value | tojson(indent=1) }}", value=[1]) == "[\n 1\n]"


def test_the_date_helper_and_loop_controls_exist() -> None:
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))
    assert render("{% for m in [1, 2] %}{{ m }}{% break %}{% endfor %}") == "1"
    assert render("{% generation %}x{% endgeneration %}") == "x"


def test_the_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(TemplateRefused, match="^no system message$"):
        render("{{ raise_exception('no system message') }}")


@pytest.mark.parametrize(
    "source", ["{{ messages.foo.bar }}", "{{ 1 + 'a' }}", "{{ 1 / 0 }}", "{{ messages[0].nope() }}"]
)
def test_a_template_that_stumbles_is_a_refusal(source: str) -> None:
    with pytest.raises(TemplateRefused, match="cannot render"):
        render(source)


def test_the_sandbox_holds() -> None:
    with pytest.raises(TemplateRefused):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(TemplateRefused):
        render("{{ messages.append(1) }}")


def test_a_template_that_does_not_compile_is_the_users_error() -> None:
    with pytest.raises(UserError, match="line 2"):
        ChatTemplate("\n{% if %}", {})
