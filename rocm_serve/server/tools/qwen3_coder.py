"""Tool calls as Qwen3-Coder, Qwen3.5 and Qwen3.8 write them:

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from rocm_serve.server.pieces import Arguments, CallStart, Content, Piece
from rocm_serve.server.tags import Tags
from rocm_serve.server.tools.schema_values import ArgumentWriter, Types, json_text, tool_functions, types_of_arguments

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_TEXT_TAGS = Tags(_CALL)
_BODY_TAGS = Tags(_PARAMETER, _FUNCTION_END, _CALL_END, _CALL)
# One newline before the end belongs to it. Without an end, a tag at the beginning of a line ends the value.
_VALUE_ENDS = Tags(_PARAMETER_END, "\n" + _PARAMETER_END, "\n" + _PARAMETER, "\n" + _FUNCTION_END, "\n" + _CALL_END)
_SPACE = re.compile(r"\s*")
_NOT_IN_NAME = re.compile(r"[<\n]")
_MAX_NAME_CHARS = 256

Step = Callable[[], bool]


class Qwen3CoderParser:
    """Parses one answer, piece by piece.

    A call counts as soon as its function's name is there. What is no call is content and comes out as it is, but for
    white space around calls at both ends of the content. Stray text inside a call is content too. A missing
    `</parameter>`, `</function>` or `</tool_call>` is forgiven where the next tag, or the model's own end of the
    answer, shows where it belongs. A call that was cut off keeps unfinished JSON: nobody can run half of it.
    """

    def __init__(self, tools: Sequence[Mapping[str, object]], *, parallel: bool = True) -> None:
        self._functions = tool_functions(tools)
        self._parallel = parallel
        self.num_calls = 0
        self.in_call = False
        self._buffer = ""
        self._at = 0  # what is before it has been dealt with
        self._pieces: list[Piece] = []
        self._step: Step = self._in_text
        self._opening = ""  # the text that a call, if it is none, gives back
        self._types: dict[str, Types] = {}
        self._keys: set[str] = set()
        self._value = ArgumentWriter(frozenset())
        self._value_is_new = False
        self._said = False  # content has come out
        self._space = ""  # white space that is content if more content comes
        self._stray_space = ""  # the same inside a call

    def feed(self, text: str) -> list[Piece]:
        self._buffer = self._buffer[self._at :] + text
        self._at = 0
        while self._step():
            pass
        return self._out()

    def finish(self, *, cut: bool) -> list[Piece]:
        rest, self._at = self._buffer[self._at :], len(self._buffer)
        if self._step == self._in_opening:
            self._content(self._opening + rest)
        elif not self.in_call:
            self._content(rest)
        elif self._step == self._in_value:
            self._push_value(rest if cut else rest.removesuffix("\n"))
            self._argue(self._value.cut() if cut else self._value.close())
        else:
            self._stray(rest)
        if self.in_call and not cut:
            self._end_call()
        if not self.num_calls and self._space:
            self._pieces.append(Content(self._space))
        return self._out()

    def _out(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _go(self, step: Step, to: int) -> bool:
        self._step, self._at = step, to
        return True

    def _in_text(self) -> bool:
        if self.num_calls and not self._parallel:
            found = None
            upto = len(self._buffer)
        else:
            found = _TEXT_TAGS.first(self._buffer, self._at)
            upto = _TEXT_TAGS.held_from(self._buffer, self._at) if found is None else found[0]
        self._content(self._buffer[self._at : upto])
        self._at = upto
        if found is None:
            return False
        self._opening = _CALL
        return self._go(self._in_opening, upto + len(_CALL))

    def _in_opening(self) -> bool:
        """Between `<tool_call>` and the name of the function."""
        found = self._name_after(_FUNCTION, self._past_space())
        if found is None:
            return False
        name, end = found
        if not name:
            self._content(self._opening)
            return self._go(self._in_text, self._at)
        self._pieces.append(CallStart(self.num_calls, name))
        self.num_calls += 1
        self.in_call = True
        self._types = types_of_arguments(self._functions.get(name, {}))
        self._keys = set()
        self._stray_space = ""
        return self._go(self._in_body, end)

    def _in_body(self) -> bool:
        """In a function, outside of its parameters."""
        found = _BODY_TAGS.first(self._buffer, self._at)
        upto = _BODY_TAGS.held_from(self._buffer, self._at) if found is None else found[0]
        self._stray(self._buffer[self._at : upto])
        self._at = upto
        if found is None:
            return False
        start, tag = found
        if tag == _PARAMETER:
            return self._begin_value(start)
        self._end_call()
        if tag == _FUNCTION_END:
            return self._go(self._in_tail, start + len(tag))
        return self._go(self._in_text, start + len(tag) if tag == _CALL_END else start)

    def _begin_value(self, start: int) -> bool:
        found = self._name_after(_PARAMETER, start)
        if found is None:
            return False
        key, end = found
        if not key or key in self._keys:  # JSON readers disagree about a key that comes twice
            self._stray(_PARAMETER)
            return self._go(self._in_body, start + len(_PARAMETER))
        self._argue((", " if self._keys else "{") + json_text(key) + ": ")
        self._keys.add(key)
        self._value = ArgumentWriter(self._types.get(key, frozenset()))
        self._value_is_new = True
        return self._go(self._in_value, end)

    def _in_value(self) -> bool:
        found = _VALUE_ENDS.first(self._buffer, self._at)
        upto = _VALUE_ENDS.held_from(self._buffer, self._at) if found is None else found[0]
        self._push_value(self._buffer[self._at : upto])
        self._at = upto
        if found is None:
            return False
        start, tag = found
        self._argue(self._value.close())
        self._stray_space = ""
        return self._go(self._in_body, start + (len(tag) if tag.endswith(_PARAMETER_END) else 1))

    def _in_tail(self) -> bool:
        """After a function; the call's own end is awaited, or another function in the same call."""
        place = self._past_space()
        text = self._buffer[place : place + len(_CALL_END)]
        if text == _CALL_END:
            return self._go(self._in_text, place + len(_CALL_END))
        if _CALL_END.startswith(text):
            return False
        if self._parallel and text.startswith(_FUNCTION):
            self._opening = ""
            return self._go(self._in_opening, place)
        if self._parallel and _FUNCTION.startswith(text):
            return False
        return self._go(self._in_text, self._at)

    def _past_space(self) -> int:
        found = _SPACE.match(self._buffer, self._at)
        assert found is not None
        return found.end()

    def _name_after(self, tag: str, place: int) -> tuple[str, int] | None:
        """Return the name in the tag at `place` and where the tag ends, or None if more text must come first.

        The name is "" if there is no such tag.
        """
        text = self._buffer[place : place + len(tag)]
        if text != tag:
            return None if tag.startswith(text) else ("", place)
        begin = place + len(tag)
        end = self._buffer.find(">", begin, begin + _MAX_NAME_CHARS + 1)
        name = self._buffer[begin : end if end >= 0 else begin + _MAX_NAME_CHARS + 1]
        if len(name) > _MAX_NAME_CHARS or _NOT_IN_NAME.search(name):
            return "", place
        return None if end < 0 else (name.strip(), end + 1)

    def _push_value(self, text: str) -> None:
        if self._value_is_new and text:
            self._value_is_new = False
            text = text.removeprefix("\n")
        self._argue(self._value.push(text))

    def _argue(self, text: str) -> None:
        if text:
            self._pieces.append(Arguments(self.num_calls - 1, text))

    def _end_call(self) -> None:
        self._argue("}" if self._keys else "{}")
        self.in_call = False

    def _stray(self, text: str) -> None:
        """Take text between the tags of a function: white space is layout, the rest content."""
        text = self._stray_space + text
        kept = text.rstrip()
        self._stray_space = text[len(kept) :]
        self._content(kept)

    def _content(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            return
        if not self._said and self.num_calls:
            kept = kept.lstrip()
        self._said = True
        self._pieces.append(Content(kept))
