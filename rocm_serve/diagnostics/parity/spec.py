"""What one side of a comparison is: a topology with options, or Hugging Face Transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

import msgspec

from rocm_serve.config import load
from rocm_serve.config.resolve import check_wishes
from rocm_serve.config.schema import ServeConfig
from rocm_serve.errors import UserError

HF = "hf"
# Key of a SPEC -> field of the configuration.
KEYS: Mapping[str, str] = MappingProxyType(
    {
        "tp": "tp",
        "pp": "pp",
        "ep": "ep",
        "expert_exchange": "expert_exchange",
        "expert_capacity": "expert_capacity",
        "expert_placement": "expert_placement",
        "allow_unvalidated": "allow_unvalidated",
        "dtype": "dtype",
        "kv_cache_dtype": "kv_cache_dtype",
        "page_size": "page_size",
        "chunk": "chunked_prefill_size",
        "running": "max_running_requests",
        "device": "device",
        "fp8_activation": "fp8_activation",
        "attention_backend": "attention_backend",
        "mem_fraction": "mem_fraction",
    }
)
_RUNNING = 4  # fewer places than prompts: slots and pages change hands while the comparison runs
LEGAL = f"{HF}, or KEY=VALUE,... with {', '.join(KEYS)}, op.OP, op.layers.N.OP"


class Side(msgspec.Struct, frozen=True):
    """One side. `config` is None for Hugging Face Transformers."""

    text: str
    config: ServeConfig | None

    @property
    def is_hf(self) -> bool:
        return self.config is None


def parse_side(text: str, model: Path, flag: str, *, longest: int) -> Side:
    """Read a SPEC. `longest` is the length of the longest sequence that will be run.

    Errors: UserError naming the part that is wrong and what is legal.
    """
    if text == HF:
        return Side(HF, None)
    values: dict[str, Any] = {}
    ops: list[str] = []
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not value or key == "op.":
            raise UserError(f"{flag} {text}: {part!r} is no KEY=VALUE; legal: {LEGAL}")
        if key.startswith("op."):
            ops.append(f"{key.removeprefix('op.')}={value}")
            continue
        field = KEYS.get(key)
        if field is None:
            raise UserError(f"{flag} {text}: unknown key {key!r}; legal: {LEGAL}")
        if field in values:
            raise UserError(f"{flag} {text}: {key} is given twice")
        load.check_value(field, value, f"{flag} {key}")
        values[field] = msgspec.convert(value, get_type_hints(ServeConfig)[field], strict=False)
    asked = {"max_running_requests": _RUNNING} | values
    with words_of_a_spec(flag, text):
        config = ServeConfig(
            model=str(model), max_model_len=longest, op=load.parse_ops(ops), log_level="warning", **asked
        )
        check_wishes(config)
    return Side(text or "tp=1", config)


@contextmanager
def words_of_a_spec(flag: str, text: str) -> Iterator[None]:
    """Say in the words of `flag` and its SPEC what is refused in those of `serve`. Errors: UserError."""
    try:
        yield
    except UserError as error:
        words = in_words_of(text, str(error))
        said = re.match(rf"{re.escape(text)}[: ]", words)  # no need to say it twice
        raise UserError(f"{flag} {words}" if said else f"{flag} {text}: {words}") from None


def in_words_of(text: str, sentence: str) -> str:
    """Write KEY=VALUE and KEY of a SPEC in the place of the flags of `serve`."""
    given = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    words = re.sub(r"--op '?(?=\w)", "op.", sentence)
    for key, field in KEYS.items():
        flag = load.flag_name(field)
        if key in given:
            words = re.sub(rf"{flag} (?={re.escape(given[key])}[: ])", f"{key}=", words)
        words = re.sub(rf"{flag} (?=[\w.-]*\d)", f"{key}=", words)
        words = re.sub(rf"{flag}\b", key, words)
    return words
