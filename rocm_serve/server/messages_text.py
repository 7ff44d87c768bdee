"""Chat messages to the prompt text: shape checks, text parts joined, the template's own refusals as 400."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rocm_serve.server.context import Context
from rocm_serve.server.errors import ApiError, bad_request
from rocm_serve.server.protocol import checked_text
from rocm_serve.tokens.template import TemplateRefused

_ROLES = ("system", "developer", "user", "assistant", "tool")
_OWN_VARIABLES = {"messages", "add_generation_prompt", "tools"}


def render_messages(
    context: Context,
    messages: Sequence[Mapping[str, object]],
    *,
    add_generation_prompt: bool,
    extra: Mapping[str, object],
) -> str:
    """Return the prompt text of a conversation. Errors: ApiError 400 that names `messages`."""
    if context.template is None:
        raise ApiError(400, "this model has no chat template", param="messages", code="no_chat_template")
    for name in _OWN_VARIABLES & set(extra):
        raise bad_request(f"chat_template_kwargs cannot set {name}", "chat_template_kwargs")
    plain = [_plain(message, f"messages[{place}]") for place, message in enumerate(messages)]
    try:
        text = context.template.render(plain, add_generation_prompt=add_generation_prompt, extra=extra)
    except TemplateRefused as error:
        raise bad_request(str(error), "messages") from None
    return usable_text(text, "messages")


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
    content = message.get("content")
    if content is None and (role != "assistant" or "content" not in message and not message.get("tool_calls")):
        raise bad_request(f"{what}.content is required", "messages")
    plain = {**message, "content": "" if content is None else _text(content, f"{what}.content")}
    if message.get("tool_calls") is not None:
        plain["tool_calls"] = _tool_calls(message["tool_calls"], f"{what}.tool_calls")
    return plain


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
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise bad_request(f"{what}[{place}].function.arguments is not JSON", "messages") from None
        plain.append({**call, "function": {**function, "arguments": arguments}})
    return plain
