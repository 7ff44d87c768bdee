"""What the layers of a stage hold for a step at one time, where Triton's kernels run them. Pure, no torch.

Units: bytes. A layer's parts run one after the other, so the largest counts. Letters: T rows, H width, K inner width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rocm_serve.cache.layout import CACHE_ITEMSIZE, StageLayout
from rocm_serve.config.schema import Resolved
from rocm_serve.models.qwen3_5.spec import ModelFacts
from rocm_serve.ops.tiles_prefill import MOST_UNITS
from rocm_serve.parallel.layout import Param, Place, shape_at
from rocm_serve.parallel.mesh import Coord

# Providers of ops whose results or workspaces grow with the rows of a step. What others hold is theirs, and unknown: a
# reference widens rows and weights to float32. References of ops that are not named hold no more than is planned.
_TRITON = frozenset({"triton"})
_KNOWN: Mapping[str, frozenset[str]] = {
    "linear": _TRITON | {"torch"},
    "fp8_linear": _TRITON,
    "quantise_rows": _TRITON,
    "silu_mul": _TRITON,
    "sigmoid_mul": _TRITON,
    "moe_experts": _TRITON,
    "attention_prefill": _TRITON,
    "attention_decode": _TRITON,
    "causal_conv": _TRITON,
    "gdn_chunk": _TRITON,
    "gdn_step": _TRITON,
    "draw_token": _TRITON,
}
DRAWN_ROWS = 32  # whole vocabularies that are sorted at one time (sampler.DRAWN_ROWS)
_DRAWN_COPIES = 12  # of a row in float32: values, ids and keys in 64 bits, weights and their sums in float64
# What torch's allocator takes is more than what is asked of it: it keeps blocks of steps of other sizes.
SLACK = 1.25
_STREAMS = 5  # rows of the hidden size at one time: the stream, its norm, what a part returns, a sum, a quantised copy
_DRAFT_STREAMS = 4  # and of the draft layer: an embedding, both halves of what it projects, their norm
_CHUNK = 64  # rows of a sub-chunk of gdn_chunk, whose square is held twice, and five vectors in float32
_SPLIT_ROWS = 128  # query rows times heads of a tile of attention; splits fill each unit of a card with one
_DECODE_PROGRAMS = 1024  # that decoding requests' splits make at most, each of the heads of one key/value head
_ROW_INPUTS = 512  # bytes that a row or request of such a step has at most beside its pages, with all sizes' own
_WIDENED_ROWS = 8192  # of the head, in float32 at a time, where a library has no float32 result of bf16 factors


def counted_before_binding(resolved: Resolved) -> bool:
    """Whether providers will be bound of which that is known, as far as wishes tell: AITER comes first on ROCm."""
    return resolved.device == "cuda" and not resolved.preferred and counted(resolved.op.items())


def counted(bound: Iterable[tuple[str, str]]) -> bool:
    """Whether they are. `bound`: "op" or "layers.N.op", and its provider."""
    return all(provider in _KNOWN.get(name.rpartition(".")[2], (provider,)) for name, provider in bound)


def streams_bytes(facts: ModelFacts, resolved: Resolved, rows: int) -> int:
    """Bound the rows of the hidden size that are there while a layer works."""
    streams = _STREAMS + (_DRAFT_STREAMS if resolved.draft_tokens else 0)
    return streams * rows * facts.hidden_size * CACHE_ITEMSIZE[resolved.dtype]


def mixer_bytes(
    params: Mapping[str, Param], layout: StageLayout, place: Place, resolved: Resolved, rows: int, copied_keys: int
) -> int:
    """Bound what attention or a delta rule holds beside the streams. `copied_keys`: bytes of them.

    With drafts, those that were accepted run through a delta rule once more, beside the rows of the step.
    """
    itemsize, found, ahead = CACHE_ITEMSIZE[resolved.dtype], 0, resolved.draft_tokens
    walked = rows + (resolved.max_running_requests * (1 + 2 * ahead) if ahead else 0)
    for made, inner in _widths(params, place, "linear_attn"):
        held = walked * itemsize * (made + layout.conv_channels + 3 * inner)
        found = max(found, held + _rule_bytes(layout, resolved, rows))
    for made, inner in _widths(params, place, "self_attn"):
        wide = 4 * layout.head_dim
        splits = min(MOST_UNITS * _SPLIT_ROWS * wide, 64 * rows * 4 * inner)
        splits = max(splits, _DECODE_PROGRAMS * wide * -(-inner // (layout.head_dim * layout.kv_heads)))
        found = max(found, rows * itemsize * (made + 3 * inner) + copied_keys + splits)
    return found


def mlp_bytes(params: Mapping[str, Param], place: Place, resolved: Resolved, rows: int) -> int:
    """Bound what a dense MLP, or the shared expert with the router, holds beside the streams."""
    return rows * CACHE_ITEMSIZE[resolved.dtype] * max(map(sum, _widths(params, place, "mlp")), default=0)


def head_bytes(facts: ModelFacts, tp: int, resolved: Resolved, logits: int, drawn: int) -> int:
    """Return what the head and the sampler hold on the last stage, where `logits` rows of them exist at one time.

    `drawn`: of `drawn_bytes`, once the logits are there.
    """
    columns = -(-facts.vocab_size // tp)
    widened = min(_WIDENED_ROWS, columns) * facts.hidden_size if resolved.device == "rocm" else 0
    return 4 * logits * columns + max(4 * widened, drawn)


def drawn_bytes(facts: ModelFacts, rows: int) -> int:
    """Return what drawing holds beside copies of logits: every rank sorts whole vocabularies, of a few rows at a time.

    What penalties, log-probs and candidates of a shard take is less, and comes before or after.
    """
    return _DRAWN_COPIES * min(DRAWN_ROWS, rows) * facts.vocab_size * 4


def inputs_bytes(
    facts: ModelFacts, coord: Coord, resolved: Resolved, *, decodes: int, rows: int, prompt_rows: int, sequences: int
) -> int:
    """Bound the inputs of steps of fixed sizes, which lie in memory that never moves, captured or not.

    `decodes`, `rows`: requests and rows of the largest step without prompts. `prompt_rows`, `sequences`: rows and
    requests of the largest step with some; 0: there is none. Pages of decode steps arrive beside their table.
    """
    pages = 4 * -(-resolved.max_model_len // resolved.page_size)
    row = 0 if coord.first_stage else facts.hidden_size * CACHE_ITEMSIZE[resolved.dtype]
    newest = 8 * (resolved.max_running_requests + 1)
    of_decodes = 2 * decodes * pages + rows * (row + _ROW_INPUTS)
    return newest + of_decodes + sequences * pages + prompt_rows * (row + _ROW_INPUTS)


def _rule_bytes(layout: StageLayout, resolved: Resolved, rows: int) -> int:
    """Return what gdn_chunk prepares of every sub-chunk: of whole ones, and of one more for each sequence."""
    side = min(4, CACHE_ITEMSIZE[resolved.dtype])
    places = rows // _CHUNK + min(rows, resolved.max_running_requests)
    return places * layout.value_heads * _CHUNK * (2 * _CHUNK * side + 5 * 4)


def _widths(params: Mapping[str, Param], place: Place, part: str) -> set[tuple[int, int]]:
    """Return of each layer that has `part` the columns that its products make of a row, and K of the one that ends it.

    Routed experts are counted elsewhere.
    """
    made: dict[str, int] = {}
    inner: dict[str, int] = {}
    for name, param in params.items():
        layer, found, product = name.partition(f".{part}.")
        if not found or ".experts." in name or not name.endswith(".weight") or "norm" in product or "conv1d" in product:
            continue
        columns, width = shape_at(param, place)
        if product.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            inner[layer] = width
        else:
            made[layer] = made.get(layer, 0) + columns
    return {(made[layer], inner[layer]) for layer in made}
