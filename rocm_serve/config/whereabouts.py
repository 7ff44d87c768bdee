"""Where a node stands whose flags, variables or file are refused: read from the words that are right.

A launch that cannot be read as a whole still has other nodes that wait for it, and they are to know why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from rocm_serve.config import aliases, load
from rocm_serve.config.launcher import Membership, membership
from rocm_serve.config.schema import ServeConfig
from rocm_serve.errors import UserError

_FIELDS = ("nnodes", "node_rank", "dist_init_addr")


def whereabouts(args: Sequence[str], environ: Mapping[str, str]) -> Membership | None:
    """Read the node's place from the arguments of `serve`; None when it is alone, or they do not say it."""
    said: dict[str, object] = {"model": "not read"}
    file = _file(args)
    for field in _FIELDS:
        flags = (load.flag_name(field), *aliases.others(field))
        sources = (_last(args, flags), environ.get(load.ENV_PREFIX + field.upper()), file.get(field))
        value = next((value for value in sources if value is not None), None)
        if value is not None:
            said[field] = value
    said["pp"] = said.get("nnodes", 1)  # as many stages as nodes is legal, whatever else was asked for
    try:
        place = membership(msgspec.convert(said, ServeConfig, strict=False), environ)
    except (UserError, msgspec.ValidationError):
        return None
    return place if place.members > 1 else None


def _file(args: Sequence[str]) -> Mapping[str, object]:
    path = _last(args, ("--config",))
    if path is None:
        return {}
    try:
        return load.read_file(Path(path))
    except UserError:  # which may be the very reason
        return {}


def _last(args: Sequence[str], flags: Sequence[str]) -> str | None:
    found = list(_values(args, flags))
    return found[-1] if found else None


def _values(args: Sequence[str], flags: Sequence[str]) -> Iterator[str]:
    for at, word in enumerate(args):
        flag, equals, value = word.partition("=")
        if flag in flags and equals:
            yield value
        elif flag in flags and at + 1 < len(args):
            yield args[at + 1]
