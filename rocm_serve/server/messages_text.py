"""Chat messages to the prompt text: shape checks, text parts joined, the template's own refusals as 400."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rocm_serve.server.context import Context
from rocm_serve.server.errors import ApiError, bad_request
from rocm_serve.server.protocol import checked_text
from rocm_serve.tokens.template import TemplateRefused

_ROLES = ("system", "developer", "user", "assistant", "tool")
_OWN_VARIABLES = {"messages", "add_generation_prompt", "tools"}
_OPTIONAL_STRINGS = {"name": _ROLES, "reasoning_content": ("assistant",), "tool_call_id": ("tool",)}  # and whose
_KEYS = {"role", "content", "tool_calls", *_OPTIONAL_STRINGS}
_KEYS_IF_NULL = {"refusal", "annotations", "audio", "function_call"}  # OpenAI's answers have them


def render_messages(
    context: Context,
    messages: Sequence[Mapping[str, object]],
    *,
    add_generation_prompt: bool,
    extra: Mapping[str, object],
    tools: Sequence[Mapping[str, object]] = (),
    reasoning_effort: str | None = None,
) -> str:
    """Return the prompt text of a conversation; `tools` are checked ones. Errors: ApiError 400 that names the field."""
    if context.template is None:
        raise ApiError(400, "this model has no chat template", param="messages", code="no_chat_template")
    if tools and "tools" not in context.template.variables:
        raise bad_request("the chat template of this model does not show tools", "tools")
    for name in _OWN_VARIABLES & set(extra):
        raise bad_request(f"chat_template_kwargs cannot set {name}", "chat_template_kwargs")
    variables = dict(extra)
    if reasoning_effort is not None:
        if extra.get("reasoning_effort", reasoning_effort) != reasoning_effort:
            raise bad_request("reasoning_effort and chat_template_kwargs differ; give one", "reasoning_effort")
        variables["reasoning_effort"] = reasoning_effort
    plain = [_plain(message, f"messages[{place}]") for place, message in enumerate(messages)]
    render = partial(context.template.render, plain, add_generation_prompt=add_generation_prompt, tools=tools or None)
    try:
        text = render(extra=variables)
    except TemplateRefused as error:
        fault = _variable_at_fault(render, variables)
        if fault is None:
            raise bad_request(str(error), "messages") from None
        param = "reasoning_effort" if fault == "reasoning_effort" and fault not in extra else "chat_template_kwargs"
        raise bad_request(str(error), param) from None
    return usable_text(text, "messages")


def _variable_at_fault(render: Callable[..., str], variables: Mapping[str, object]) -> str | None:
    """Return the variable without which the template takes the messages, if there is one."""
    for name in variables:
        others = {key: value for key, value in variables.items() if key != name}
        with contextlib.suppress(TemplateRefused):
            render(extra=others)
            return name
    return None


def usable_text(text: str, param: str) -> str:
    """Return `text` if it can be tokenised. Errors: ApiError 400."""
    try:
        return checked_text(text, param)
    except ValueError as error:
        raise bad_request(str(error), param) from None


def _plain(message: Mapping[str, object], what: str) -> dict[str, object]:
    """Return the message as templates expect it: content a string, arguments of past tool calls an object."""
    role = message.get("role")
    if role not in _ROLES:
        raise bad_request(f"{what}.role must be one of {', '.join(_ROLES)}", "messages")
    _check_keys(message, role, what)
    content = message.get("content")
    if content is None and (role != "assistant" or "content" not in message and not message.get("tool_calls")):
        raise bad_request(f"{what}.content is required", "messages")
    plain = {key: value for key, value in message.items() if value is not None}
    plain |= {"content": "" if content is None else _text(content, f"{what}.content")}
    if message.get("tool_calls") is not None:
        plain["tool_calls"] = _tool_calls(message["tool_calls"], f"{what}.tool_calls")
    return plain


def _check_keys(message: Mapping[str, object], role: object, what: str) -> None:
    """Refuse what no template would see: unknown keys, and known ones in a message of another role."""
    for key, value in message.items():
        if key not in _KEYS and not (value is None and key in _KEYS_IF_NULL):
            raise bad_request(f"{what} has the unknown key {key!r}: it would have no effect here", "messages")
        if key in _OPTIONAL_STRINGS and value is not None:
            if role not in _OPTIONAL_STRINGS[key]:
                raise bad_request(f"{what}.{key} has no effect in a message of role {role}", "messages")
            if not isinstance(value, str):
                raise bad_request(f"{what}.{key} must be a string", "messages")
    if message.get("tool_calls") and role != "assistant":
        raise bad_request(f"{what}.tool_calls has no effect in a message of role {role}", "messages")


def _text(content: object, what: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{what} must be a string or a list of text parts", "messages")
    texts: list[str] = []
    for place, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise bad_request(f"{what}[{place}] must be a text part; this server reads text only", "messages")
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: object, what: str) -> list[dict[str, object]]:
    """OpenAI sends arguments as JSON text, templates walk over an object."""
    if not isinstance(calls, list):
        raise bad_request(f"{what} must be a list", "messages")
    plain: list[dict[str, object]] = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{what}[{place}].function needs a name and arguments", "messages")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise bad_request(f"{what}[{place}].function.arguments is not JSON", "messages") from None
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            raise bad_request(f"{what}[{place}].function.arguments must be a JSON object", "messages")
        plain.append({**call, "function": {**function, "arguments": arguments}})
    return plain
