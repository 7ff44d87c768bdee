"""What a rank holds for a step beside weights and caches, at most. Pure, no torch.

Where Triton's kernels run the layers it is counted from the tensors that these make: a layer's parts run one after the
other, so the largest counts. Elsewhere it is bounded loosely, whoever computes it. Units: bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from rocm_serve.cache.layout import CACHE_ITEMSIZE, StageLayout
from rocm_serve.config import chunk, graphs
from rocm_serve.config.graphs import verified_sizes
from rocm_serve.config.schema import Resolved
from rocm_serve.executor import experts_memory, step_rows
from rocm_serve.executor.stage_memory import layout_of
from rocm_serve.models.qwen3_5.spec import ModelFacts
from rocm_serve.ops.tiles_prefill import MOST_UNITS, copied_keys
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
_ROW_INPUTS = 512  # bytes that a row or request of a step of fixed size has at most, beside its pages
_WIDENED_ROWS = 8192  # of the head, in float32 at a time, where a library has no float32 result of bf16 factors


@dataclass(frozen=True, slots=True)
class Step:
    """What the memory of a rank's longest step depends on. `captured`: in a graph, where every draw is plain."""

    params: Mapping[str, Param]
    facts: ModelFacts
    coord: Coord
    resolved: Resolved
    captured: bool = False

    @property
    def rows(self) -> int:
        return step_rows.most_rows(self.resolved)

    @property
    def logits(self) -> int:
        """Rows of them at one time, on the last stage: of every running request, of scored prompt rows, and copies."""
        if not self.coord.last_stage:
            return 0
        decodes = step_rows.padded(step_rows.decode_rows(self.resolved), step_rows.CPU_ROW_MULTIPLE)
        return 3 * decodes + 2 * step_rows.SCORED_ROWS

    @property
    def drawn(self) -> int:
        """Bytes that draws from them take."""
        if self.captured or not self.coord.last_stage:
            return 0
        return drawn_bytes(self.facts, step_rows.decode_rows(self.resolved))

    @property
    def experts(self) -> int:
        """Bytes of the workspace of a layer's routed experts."""
        multiple = step_rows.row_multiple(self.resolved)
        return experts_memory.step_workspace(
            self.params, self.facts, self.coord.place, self.resolved, self.rows, multiple
        )

    @property
    def copied(self) -> int:
        """Bytes of keys and values that attention of prompt rows by Triton copies from their pages, of one layer."""
        layout, resolved = layout_of(self.facts, self.coord, self.resolved), self.resolved
        if resolved.device == "cpu" or not resolved.chunked_prefill_size or not layout.kv_layers:
            return 0
        keys = copied_keys(resolved.max_model_len, resolved.max_running_requests)
        return 2 * keys * layout.kv_heads * layout.head_dim * CACHE_ITEMSIZE[resolved.dtype]


def step_bytes(
    params: Mapping[str, Param], facts: ModelFacts, coord: Coord, resolved: Resolved, *, counted: bool | None = None
) -> int:
    """Bound the memory that one step holds beside weights and caches, and that its inputs take between steps.

    `counted`: whether Triton's kernels run the layers, None as far as wishes tell.
    """
    return work_bytes(params, facts, coord, resolved, counted=counted) + inputs_bytes(facts, coord, resolved)


def work_bytes(
    params: Mapping[str, Param],
    facts: ModelFacts,
    coord: Coord,
    resolved: Resolved,
    *,
    counted: bool | None = None,
    captured: bool = False,
) -> int:
    """Bound what a step holds while it runs. `captured`: in a graph.

    Rows on their way to experts come on top of what layers and head hold, and rows between stages: `pp + 1` messages
    that leave, and for every step in flight one that was asked for.
    """
    step = Step(params, facts, coord, resolved, captured)
    of_layers = counted_before_binding(resolved) if counted is None else counted
    total = _counted_bytes(step) if of_layers else _loose_bytes(step)
    total += experts_memory.step_staging(params, facts, resolved, step.rows)
    pp = coord.mesh.pp
    asked_for = pp + (resolved.plan_ahead != "off")
    messages = (0 if coord.last_stage else pp + 1) + (0 if coord.first_stage else asked_for)
    return total + messages * step.rows * facts.hidden_size * CACHE_ITEMSIZE[resolved.dtype]


def inputs_bytes(facts: ModelFacts, coord: Coord, resolved: Resolved) -> int:
    """Bound the inputs of steps of fixed sizes, on a GPU: they lie in memory that never moves, captured or not.

    Pages arrive beside their table.
    """
    if resolved.device == "cpu":
        return 0
    ahead = resolved.draft_tokens
    decodes = min(resolved.graph_max_batch or graphs.AUTO_MOST, resolved.max_running_requests)
    verified = verified_sizes(decodes, ahead)[-1] * (1 + ahead) if ahead else 0
    prompts, with_prompts, sequences = step_rows.prompt_rows(resolved), 0, 0
    if prompts:
        beside = step_rows.prompt_counts(resolved)[-1]
        with_prompts, sequences = prompts + beside, step_rows.prompt_sequences(resolved) + beside
    pages = 4 * -(-resolved.max_model_len // resolved.page_size)
    row = _ROW_INPUTS + (0 if coord.first_stage else facts.hidden_size * CACHE_ITEMSIZE[resolved.dtype])
    newest = 8 * (resolved.max_running_requests + 1)
    return newest + 2 * (decodes + sequences) * pages + (max(decodes, verified) + with_prompts) * row


def counted_before_binding(resolved: Resolved) -> bool:
    """Whether providers will be bound whose tensors are known, as far as wishes tell: AITER comes first on ROCm."""
    return resolved.device == "cuda" and not resolved.preferred and counted(resolved.op.items())


def counted(bound: Iterable[tuple[str, str]]) -> bool:
    """Whether the tensors of these are known. `bound`: "op" or "layers.N.op", and its provider."""
    return all(provider in _KNOWN.get(name.rpartition(".")[2], (provider,)) for name, provider in bound)


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


def _counted_bytes(step: Step) -> int:
    """Take what is there at one time: the streams, and the most of attention or delta rule, experts and head."""
    facts, coord = step.facts, step.coord
    head = head_bytes(facts, coord.mesh.tp, step.resolved, step.logits, step.drawn) if coord.last_stage else 0
    return int(SLACK * (_streams_bytes(step) + max(_mixer_bytes(step), _mlp_bytes(step) + step.experts, head)))


def _streams_bytes(step: Step) -> int:
    """Bound the rows of the hidden size that are there while a layer works."""
    streams = _STREAMS + (_DRAFT_STREAMS if step.resolved.draft_tokens else 0)
    return streams * step.rows * step.facts.hidden_size * CACHE_ITEMSIZE[step.resolved.dtype]


def _mixer_bytes(step: Step) -> int:
    """Bound what attention or a delta rule holds beside the streams.

    With drafts, those that were accepted run through a delta rule once more, beside the rows of the step.
    """
    params, place, resolved, rows = step.params, step.coord.place, step.resolved, step.rows
    layout = layout_of(step.facts, step.coord, resolved)
    itemsize, found, ahead = CACHE_ITEMSIZE[resolved.dtype], 0, resolved.draft_tokens
    walked = rows + (resolved.max_running_requests * (1 + 2 * ahead) if ahead else 0)
    for made, inner in _widths(params, place, "linear_attn"):
        held = walked * itemsize * (made + layout.conv_channels + 3 * inner)
        found = max(found, held + _rule_bytes(layout, resolved, rows))
    for made, inner in _widths(params, place, "self_attn"):
        wide = 4 * layout.head_dim
        splits = min(MOST_UNITS * _SPLIT_ROWS * wide, 64 * rows * 4 * inner)
        splits = max(splits, _DECODE_PROGRAMS * wide * -(-inner // (layout.head_dim * layout.kv_heads)))
        found = max(found, rows * itemsize * (made + 3 * inner) + step.copied + splits)
    return found


def _mlp_bytes(step: Step) -> int:
    """Bound what a dense MLP, or the shared expert with the router, holds beside the streams."""
    widths = map(sum, _widths(step.params, step.coord.place, "mlp"))
    return step.rows * CACHE_ITEMSIZE[step.resolved.dtype] * max(widths, default=0)


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


def _loose_bytes(step: Step) -> int:
    """Take for each row a few streams of the hidden size and the widest inner layer in float32, whoever computes it.

    Or what the routed experts take if that is more; logits, what draws take and copied keys on top. In bfloat16 the
    references of linear layers, which a CPU has, hold one weight in float32.
    """
    params, place, facts, resolved = step.params, step.coord.place, step.facts, step.resolved
    streams = step.rows * chunk.row_bytes(0, facts)
    inner = max(step.rows * chunk.row_bytes(chunk.widest(params, place), facts) - streams, step.experts)
    total = streams + inner + step.copied
    total += step.logits * -(-facts.vocab_size // step.coord.mesh.tp) * 4 + step.drawn
    widens = resolved.device == "cpu" or any(map(_widens, resolved.op.items()))
    if widens and resolved.dtype == "bfloat16":
        inner_params = (p for name, p in params.items() if not name.endswith("embed_tokens.weight"))
        shapes = (shape_at(p, place) for p in inner_params)
        total += 4 * max((prod(shape[-2:]) for shape in shapes if len(shape) >= 2), default=0)
    return total


def _widens(wish: tuple[str, str]) -> bool:
    name, provider = wish
    return provider == "reference" and name.rpartition(".")[2] in ("linear", "fp8_linear")
