"""A command line with flags of SGLang and vLLM -> the same one in our flags, and what is to be said about it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rocm_serve.config.aliases import NO_EFFECT, SETTINGS, SHORT, SPELLINGS, SWITCHES, WORDS, refusal
from rocm_serve.config.load import FIELDS, check_value, flag_name
from rocm_serve.errors import UserError

_OURS = {flag_name(name): name for name in FIELDS}
_BOOL = {name for name, info in FIELDS.items() if info.type is bool}


@dataclass(slots=True)
class CommandLine:
    """`words` hold our flags only. `notes`: a line about each flag that has no effect."""

    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    given: dict[str, tuple[str, str]] = field(default_factory=dict)  # our key -> spelling and value

    def in_their_words(self, message: str) -> str:
        """Add to an error about one of our flags how the user has spelt it."""
        spelt = {flag_name(key): flag for key, (flag, _) in self.given.items() if flag not in _OURS}
        said = [f"{ours} is your {flag}" for ours, flag in spelt.items() if re.search(rf"{ours}(?![\w-])", message)]
        return f"{message} ({', '.join(said)})" if said else message


def in_our_words(words: Sequence[str], known: Mapping[str, bool], command: str = "serve") -> CommandLine:
    """Translate the arguments of `command`, whose flags are `known`; a flag that takes a value is True there.

    What `command` does not know of the flags of `serve` has no meaning for it, and a note says so.
    Errors: UserError, naming flags as they were given.
    """
    line = CommandLine()
    meaningless: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, equals, text = word.partition("=")
        value = text if equals else None
        key = _OURS.get(flag) or SPELLINGS.get(flag) or SWITCHES.get(flag) or SETTINGS.get(flag, (None,))[0]
        if key is not None:
            value = _value_of(line, key, flag, value, rest, known=flag in known)
            if flag_name(key) not in known:
                meaningless.append(flag)
            else:
                line.words.extend([flag_name(key)] if key in _BOOL else [flag_name(key), value])
        elif not flag.startswith("-") or not _foreign(line, flag, value, rest):
            line.words.append(word)
            if known.get(flag) and value is None:
                line.words.extend(_next(rest))
    if meaningless:
        line.notes.append(f"no meaning for `{command}`: {', '.join(dict.fromkeys(meaningless))}")
    return line


def _value_of(line: CommandLine, key: str, flag: str, value: str | None, rest: Iterator[str], *, known: bool) -> str:
    """Read the value of one of our keys, in our words; the command line itself checks flags that it knows."""
    if key in _BOOL or flag in SETTINGS:
        if value is not None:
            raise UserError(f"{flag} takes no value")
        value = SETTINGS[flag][1] if flag in SETTINGS else "true"
    elif value is None:
        value = _needed(flag, rest)
    value = WORDS.get(key, {}).get(value, value)
    if key != "op":
        first, earlier = line.given.setdefault(key, (flag, value))
        if first != flag and not _same(earlier, value):
            raise UserError(f"{first} {earlier} and {flag} {value} are one setting, {flag_name(key)}; give it once")
        line.given[key] = flag, value
        if not known:
            check_value(key, value, flag)
    return value


def _foreign(line: CommandLine, given: str, value: str | None, rest: Iterator[str]) -> bool:
    """Deal with a flag that stands for none of ours; False when nobody knows it."""
    flag = SHORT.get(given, given)
    why = refusal(flag)
    if why is not None:
        raise UserError(f"{given} is refused: {why}")
    entry = NO_EFFECT.get(flag)
    if entry is None:
        return False
    if entry.takes is None:
        if value is not None:
            raise UserError(f"{given} takes no value")
        line.notes.append(f"{given} has no effect: {entry.because}")
        return True
    value = _needed(given, rest) if value is None else value
    if entry.takes and value not in entry.takes:
        raise UserError(f"{given} {value}: {entry.because}; legal: {', '.join(entry.takes)}")
    line.notes.append(f"{given} {value} has no effect: {entry.because}")
    return True


def _same(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def _needed(flag: str, rest: Iterator[str]) -> str:
    value = next(rest, None)
    if value is None:
        raise UserError(f"{flag} needs a value")
    return value


def _next(rest: Iterator[str]) -> list[str]:
    return [word for word in [next(rest, None)] if word is not None]
