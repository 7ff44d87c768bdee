"""The fields `tools`, `tool_choice` and `parallel_tool_calls` of a chat request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from rocm_serve.server.errors import ApiError, bad_request
from rocm_serve.server.protocol import ChatRequest, checked_text

Tools = Sequence[Mapping[str, object]]

_NAME = re.compile(r"[^\s<>]{1,128}")  # what the models' formats can carry


def tools_shown(body: ChatRequest, parser: str | None, legal: Sequence[str]) -> Tools:
    """Return the tools that the model is shown and may call; none with tool_choice "none".

    `parser`: the server's --tool-call-parser, one of `legal`. Errors: ApiError 400 that names the field.
    """
    tools = body.tools or []
    if tools and parser is None:
        flags = " or ".join(f"--tool-call-parser {name}" for name in legal)
        raise ApiError(
            400, f"this server takes no tools: start it with {flags}", param="tools", code="unsupported_field"
        )
    check_tools(tools)
    return () if body.tool_choice == "none" else tools


def check_tools(tools: Tools) -> None:
    """Errors: ApiError 400 for the first tool that is not a function with a usable name and schema."""
    names: set[str] = set()
    for place, tool in enumerate(tools):
        what = f"tools[{place}]"
        if tool.get("type") != "function":
            raise bad_request(f"{what}.type must be 'function'", "tools")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise bad_request(f"{what}.function must be an object", "tools")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise bad_request(f"{what}.function.name must be 1 to 128 characters without spaces, < and >", "tools")
        if name in names:
            raise bad_request(f"{what}.function.name: {name!r} comes twice", "tools")
        names.add(name)
        if not isinstance(function.get("parameters", {}), Mapping | None):
            raise bad_request(f"{what}.function.parameters must be an object (a JSON schema)", "tools")
        if not isinstance(function.get("description", ""), str | None):
            raise bad_request(f"{what}.function.description must be a string", "tools")
    try:
        checked_text(json.dumps(tools, ensure_ascii=False), "tools")
    except ValueError as error:
        raise bad_request(str(error), "tools") from None
