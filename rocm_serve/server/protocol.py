"""Request bodies: every field of OpenAI's schema is honoured, or refused by name. Nothing that asks is ignored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128  # n
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
DEFAULT_MAX_TOKENS = 16  # OpenAI's

Prompt = str | tuple[int, ...]


def _invalid(message: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_value", "{message}", {"message": message})


def checked_text(text: str, what: str) -> str:
    """Return `text` if it can be tokenised. Errors: PydanticCustomError for a lone surrogate or NUL."""
    if "\x00" in text:
        raise _invalid(f"{what} contains a NUL character")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _invalid(f"{what} is not valid Unicode: a lone surrogate at character {error.start}") from None
    return text


def _ids(value: list[object], what: str) -> tuple[int, ...]:
    for place, item in enumerate(value):
        if type(item) is not int:
            raise _invalid(f"{what}[{place}] must be an integer token id")
    return tuple(item for item in value if type(item) is int)


def _one_prompt(value: object, what: str) -> Prompt:
    if isinstance(value, str):
        if not value:
            raise _invalid(f"{what} is empty; the model needs at least one token")
        return checked_text(value, what)
    if isinstance(value, list):
        if not value:
            raise _invalid(f"{what} is empty; the model needs at least one token")
        return _ids(value, what)
    raise _invalid(f"{what} must be a string or a list of token ids")


def _prompts(value: object) -> tuple[Prompt, ...]:
    """Take a string, a list of strings, a list of token ids, or a list of lists of token ids."""
    if isinstance(value, str):
        return (_one_prompt(value, "prompt"),)
    if not isinstance(value, list):
        raise _invalid("prompt must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not value:
        raise _invalid("prompt is an empty list")
    if isinstance(value[0], str | list):
        return tuple(_one_prompt(item, f"prompt[{place}]") for place, item in enumerate(value))
    return (_one_prompt(value, "prompt"),)


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > MAX_STOPS:
        raise _invalid(f"stop must be a string or a list of at most {MAX_STOPS} strings")
    stops: list[str] = []
    for item in items:
        if not isinstance(item, str) or not item or len(item) > MAX_STOP_CHARS:
            raise _invalid(f"every stop must be a string of 1 to {MAX_STOP_CHARS} characters")
        stops.append(checked_text(item, "stop"))
    return tuple(dict.fromkeys(stops))


def _stop_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _invalid("stop_token_ids must be a list of token ids")
    return tuple(dict.fromkeys(_ids(value, "stop_token_ids")))


def _bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _invalid("logit_bias must be an object of token id -> number from -100 to 100")
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise _invalid(f"logit_bias: the key {key[:40]!r} is not a token id")
        if isinstance(number, bool) or not isinstance(number, int | float) or not -100 <= number <= 100:
            raise _invalid(f"logit_bias[{key}] must be a number from -100 to 100")
        bias[int(key)] = float(number)
    return bias


def _no_suffix(value: object) -> None:
    if value is not None:
        raise _invalid("suffix (fill in the middle) is not supported; leave it out or send null")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool | None, Field(description="usage so far in every chunk")] = None
    include_obfuscation: Literal[False] | None = None


# Fields of OpenAI's that this server lacks, with the values that ask for nothing.
_NOTHING: dict[str, tuple[object, ...]] = {
    "audio": (None,),
    "function_call": (None,),
    "functions": (None,),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_cache_key": (None,),
    "safety_identifier": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "verbosity": (None,),
    "web_search_options": (None,),
}

Real = Annotated[float, Field(allow_inf_nan=False)]


class SamplingFields(_Body):
    """Fields that completions and chat share. null means the default."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Real, Field(ge=0, le=2, description="0 (or below 1e-5) is greedy")] | None = None
    top_p: Annotated[Real, Field(ge=0, le=1, description="0 leaves the best token only")] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1, description="0 or -1: off")] | None = None
    min_p: Annotated[Real, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Real, Field(ge=0.01, le=10)] | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_bias, dict[str, float] | None)] = {}
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stops, str | list[str] | None)] = ()
    stop_token_ids: Annotated[tuple[int, ...], PlainValidator(_stop_ids, list[int] | None)] = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, value: dict[str, object]) -> dict[str, object]:
        return {name: wish for name, wish in value.items() if wish not in _NOTHING.get(name, ())}


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_prompts, str | list[str] | list[int] | list[list[int] | str])]
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: Annotated[None, PlainValidator(_no_suffix, None)] = None


class ResponseFormat(_Body):
    """Free text; structured output is refused."""

    type: Literal["text"]


ToolChoice = Literal["auto", "none"]


def _tool_choice(value: object) -> ToolChoice | None:
    if value is None or value == "auto" or value == "none":
        return value
    raise _invalid("tool_choice must be 'auto' or 'none': this server cannot force a call")


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions. Structured output and parts that are not text are refused."""

    messages: Annotated[list[dict[str, object]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, object]] | None = None
    tool_choice: Annotated[ToolChoice | None, PlainValidator(_tool_choice, ToolChoice | None)] = None
    parallel_tool_calls: Annotated[bool | None, Field(description="false: the first call only is taken")] = None
    separate_reasoning: Annotated[bool | None, Field(description="false: reasoning stays in the content")] = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool | None = None


class TokenizeRequest(_Body):
    """POST /tokenize: a text, or a conversation that the chat template renders."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    tools: list[dict[str, object]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, object] | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[tuple[int, ...], PlainValidator(lambda value: _token_list(value), list[int])]
    skip_special_tokens: bool = False


def _token_list(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _invalid("tokens must be a list of token ids")
    return _ids(value, "tokens")
