"""What is tuned, in a form that a child process is given: sizes, providers, device; and at which calls. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from rocm_serve.checkpoint.synthetic_configs import Dims
from rocm_serve.ops.facts import OpFacts
from rocm_serve.ops.tiles_linear import FOLDED_ROWS, SHARED_ROWS

# Batches that graphs are captured at, in the order in which they matter to a server.
ROWS = (16, 64, 1, 256, 8, 32, 128, 4, 2)
# Chunks of a prompt; more rows than a decode step has.
PROMPT_ROWS = (2048, 8192, 512, 16384)
MOST_DECODED = 256
_SHORT = 128  # rows of short prompts, as many as make those of a chunk
JOINED = ("in_proj", "router and shared expert")  # products of several weights at once, as GPUs run them
# Of attention: the host does not know how long sequences are, so that one tile serves them all.
CONTEXTS = (1024, 8192, 32768)
_MOST_KEYS = 2 << 20  # of all sequences: 2 GiB of keys and values a head of 256, twice


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's sizes and who provides its ops."""

    dims: dict[str, int]
    providers: dict[str, str]
    arch: str
    dtype: str
    dialect: str | None  # of FP8 experts; None: they are not FP8
    activation: str
    seed: int

    @property
    def sizes(self) -> Dims:
        return Dims(**self.dims)


class Point(msgspec.Struct, frozen=True):
    """One call: a case of tuning/cases.py by name, and its arguments."""

    case: str
    arguments: dict[str, int | str | bool]

    def __str__(self) -> str:
        return f"{self.case} {' '.join(f'{name} {value}' for name, value in self.arguments.items())}"


def sizes_of(facts: OpFacts) -> dict[str, int]:
    """Return the sizes that operands are made of, as fields of `Dims`. Layers are not counted."""
    assert facts.key_dim == facts.value_dim, "heads of keys and values have one size in this family"
    return {
        "hidden": facts.hidden_size,
        "layers": 4,
        "heads": facts.heads,
        "kv_heads": facts.kv_heads,
        "head_dim": facts.head_dim,
        "key_heads": facts.key_heads,
        "value_heads": facts.value_heads,
        "gdn_head_dim": facts.key_dim,
        "conv_kernel": facts.conv_kernel,
        "experts": facts.local_experts,
        "top_k": facts.top_k,
        "expert_width": facts.expert_width,
        "shared_width": facts.mlp_width,
        "vocabulary": facts.vocab,
    }


def points(rows: Sequence[int], linears: Iterable[str], only: Sequence[str] = ()) -> Iterator[Point]:
    """Yield the calls that may have tiles: where most of a step goes first, then products, then the rest.

    Rows as they are given; more than a decode step has are rows of one prompt. `only`: names of cases, others are left
    out.
    """
    linears = [name for name in linears if name != "shared gate"]  # one row of a weight: part of shared_expert_add
    for decoded, prompt in ((_first, _first_of_prompts), (_products, _products_of_prompts), (_rest, _rest_of_prompts)):
        for count in rows:
            for point in (decoded if count <= MOST_DECODED else prompt)(count, linears):
                if not only or point.case in only:
                    yield point


def _first(count: int, linears: Iterable[str]) -> Iterator[Point]:
    yield Point("experts", {"rows": count})
    yield from _attention(count)
    yield Point("step", {"rows": count})


def _products(count: int, linears: Iterable[str]) -> Iterator[Point]:
    yield Point("head", {"rows": count})
    for name in (*JOINED, *linears):
        yield Point("linear", {"rows": count, "name": name})
    if count <= FOLDED_ROWS:
        for name in (*JOINED, "qkv_proj"):
            yield Point("norm_in_product", {"rows": count, "name": name})
    if count <= SHARED_ROWS:
        yield Point("shared_down", {"rows": count})


def _rest(count: int, linears: Iterable[str]) -> Iterator[Point]:
    yield from _attention(count, kv="fp8")
    yield Point("gdn", {"rows": count})
    yield Point("conv", {"rows": count})
    yield Point("route", {"rows": count})
    yield Point("norms", {"rows": count, "residual": True})
    for name in linears:
        yield Point("fp8_linear", {"rows": count, "name": name})


def _attention(count: int, **kv: str) -> Iterator[Point]:
    """Yield the contexts that a tile is chosen for, by the product of its times; the shortest is compiled."""
    for context in CONTEXTS:
        if count * context <= _MOST_KEYS:
            yield Point("attention", {"rows": count, "context": context, **kv})


def _first_of_prompts(count: int, linears: Iterable[str]) -> Iterator[Point]:
    yield Point("experts", {"rows": count})
    yield Point("attention_prefill", {"rows": count})
    yield Point("gdn_chunk", {"rows": count})


def _products_of_prompts(count: int, linears: Iterable[str]) -> Iterator[Point]:
    for name in JOINED:
        yield Point("linear", {"rows": count, "name": name})
    for name in linears:
        yield Point("fp8_linear", {"rows": count, "name": name})
        yield Point("linear", {"rows": count, "name": name})


def _rest_of_prompts(count: int, linears: Iterable[str]) -> Iterator[Point]:
    yield Point("attention_prefill", {"rows": count, "kv": "fp8"})
    yield Point("gdn_chunk", {"rows": _SHORT, "count": max(1, count // _SHORT)})
    yield Point("prompt_conv", {"rows": count})
    yield Point("route", {"rows": count})
    yield Point("norms", {"rows": count, "residual": True})


def facts_words(wish: Wish) -> str:
    """Say in one line what is tuned."""
    d: Mapping[str, int] = wish.dims
    return (
        f"hidden {d['hidden']}, {d['experts']} experts of {d['expert_width']} (top {d['top_k']}), heads {d['heads']} on"
        f" {d['kv_heads']} of {d['head_dim']}, GDN {d['key_heads']} and {d['value_heads']} of {d['gdn_head_dim']},"
        f" {wish.dtype}, experts {wish.dialect or wish.dtype}, {wish.arch}"
    )
