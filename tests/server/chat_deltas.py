"""Read a streamed chat as a client does that knows OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence

from tests.server.http import Json


def joined(chunks: Sequence[Json]) -> list[Json]:
    """Put the deltas of the chunks together, one choice each."""
    choices: dict[int, Json] = {}
    for part in (part for chunk in chunks for part in chunk["choices"]):
        known = choices.setdefault(part["index"], {"message": {"content": None}, "logprobs": None, "ended": False})
        assert not known["ended"], "nothing comes after the finish reason"
        message, said = known["message"], part["delta"]
        for name in ("content", "reasoning_content"):
            if said.get(name):
                message[name] = (message.get(name) or "") + said[name]
        calls = message.setdefault("tool_calls", [])
        entries = said.get("tool_calls", [])
        assert len(entries) <= 1
        for entry in entries:
            if entry["index"] == len(calls):
                assert set(entry) == {"index", "id", "type", "function"} and entry["function"]["arguments"] == ""
                calls.append({"id": entry["id"], "type": entry["type"], "function": dict(entry["function"])})
            else:
                assert set(entry) == {"index", "function"} and set(entry["function"]) == {"arguments"}
                assert entry["function"]["arguments"]
                calls[entry["index"]]["function"]["arguments"] += entry["function"]["arguments"]
        if part["logprobs"] is not None:
            known["logprobs"] = (known["logprobs"] or []) + part["logprobs"]["content"]
        known |= {name: part[name] for name in ("finish_reason", "stop_reason")}
        known["ended"] = part["finish_reason"] is not None
    return [choices[index] for index in sorted(choices)]
