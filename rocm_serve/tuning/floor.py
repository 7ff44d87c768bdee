"""The least time that a decode step and its ops can take: bytes and operations over measured ceilings. Pure, no torch.

Each op reads its inputs once and writes its outputs once; what stays inside an op (the hidden rows of experts, scores)
is not counted. Weights count as far as a batch touches them: of routed experts the distinct ones, whose number a run
counts itself. Between ops rows are written and read again, as they are where ops are kernels of their own.

Letters: B rows (sequences), C tokens in the cache of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rocm_serve.checkpoint.synthetic_configs import Dims

BF16, FP32 = 2, 4
BLOCK = 128  # of FP8 scales, both ways


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the card moves and computes at best. Units: bytes/s (read plus written), operations/s."""

    bytes_s: float = 4.25e12  # one H200, 2026-11-29: a copy, a bf16 and an FP8 product of 8192^3
    bf16_s: float = 791e12
    fp8_s: float = 1437e12

    def at_least(self, other: Ceilings) -> Ceilings:
        """Return the larger of each."""
        return Ceilings(max(self.bytes_s, other.bytes_s), max(self.bf16_s, other.bf16_s), max(self.fp8_s, other.fp8_s))


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call must move and compute."""

    op: str
    nbytes: float
    bf16: float = 0.0  # operations: a multiplication and an addition are two
    fp8: float = 0.0

    def seconds(self, ceilings: Ceilings) -> float:
        """Return the larger of the two times."""
        return max(self.nbytes / ceilings.bytes_s, self.bf16 / ceilings.bf16_s + self.fp8 / ceilings.fp8_s)

    def times(self, count: int) -> Cost:
        return Cost(self.op, self.nbytes * count, self.bf16 * count, self.fp8 * count)


def expected_distinct(experts: int, top_k: int, rows: int) -> float:
    """Return how many experts rows touch on average when each chooses top_k at random: E (1 - (1 - k/E)^B)."""
    return experts * (1.0 - (1.0 - top_k / experts) ** rows)


def linear(rows: int, columns: int, outputs: int, out_itemsize: int = BF16, op: str = "linear") -> Cost:
    """A bf16 product of `rows` x `columns` with a weight of `outputs` x `columns`."""
    moved = columns * outputs * BF16 + rows * columns * BF16 + rows * outputs * out_itemsize
    return Cost(op, moved, bf16=2.0 * rows * columns * outputs)


def experts(dims: Dims, rows: int, distinct: float) -> Cost:
    """The routed experts in FP8, their scales, rows in and out, choices."""
    weights = 3 * dims.hidden * dims.expert_width
    scales = weights / BLOCK**2 * FP32
    moved = distinct * (weights + scales) + 2 * rows * dims.hidden * BF16 + rows * dims.top_k * 2 * FP32
    return Cost("moe_experts", moved, fp8=2.0 * rows * dims.top_k * weights)


def route(dims: Dims, rows: int) -> Cost:
    """Choose experts: logits in, ids and weights out."""
    return Cost("moe_route", rows * (dims.experts * BF16 + dims.top_k * 2 * FP32))


def attention(dims: Dims, rows: int, context: int, kv_itemsize: int = BF16) -> Cost:
    """Decode attention over `context` cached tokens a row (its own key and value among them)."""
    cached = rows * context * 2 * dims.kv_heads * dims.head_dim * kv_itemsize
    moved = cached + 2 * rows * dims.heads * dims.head_dim * BF16
    return Cost("attention_decode", moved, bf16=4.0 * rows * context * dims.heads * dims.head_dim)


def gdn_state(dims: Dims, rows: int) -> Cost:
    """The recurrence of one token a row: state in and out (fp32), q, k, v, gates in, rows out."""
    head, values, keys = dims.gdn_head_dim, dims.value_heads, dims.key_heads
    state = values * head * head * FP32 * 2
    moved = rows * (state + (2 * keys + 2 * values) * head * BF16 + 2 * values * BF16)
    return Cost("gdn_decode", moved, bf16=6.0 * rows * values * head * head)


def conv(dims: Dims, rows: int) -> Cost:
    """The short convolution of one token a row: window in and out, the row in and out, taps."""
    channels = (2 * dims.key_heads + dims.value_heads) * dims.gdn_head_dim
    carried = dims.conv_kernel - 1
    return Cost("causal_conv", channels * (rows * (2 * carried + 2) + dims.conv_kernel) * BF16)


def gdn_with_conv(dims: Dims, rows: int) -> Cost:
    """Both in one kernel: the convolved q, k and v are neither written nor read."""
    channels = (2 * dims.key_heads + dims.value_heads) * dims.gdn_head_dim
    both = gdn_state(dims, rows).nbytes + conv(dims, rows).nbytes
    return Cost("gdn_conv_decode", both - 2 * rows * channels * BF16, bf16=gdn_state(dims, rows).bf16)


def gdn_step(dims: Dims, rows: int) -> Cost:
    """Convolution, recurrence, norm and gate in one: the gate is read beside, the normed rows are what is written."""
    both, values = gdn_with_conv(dims, rows), dims.value_heads * dims.gdn_head_dim
    return Cost("gdn_step", both.nbytes + rows * values * BF16, bf16=both.bf16)


def norm(width: int, rows: int, *, residual: bool, op: str) -> Cost:
    """RMS norm; with a residual stream that is read and written beside."""
    return Cost(op, (rows * (4 if residual else 2) + 1) * width * BF16)


def kv_write(dims: Dims, rows: int, kv_itemsize: int = BF16) -> Cost:
    """Keys and values of rows into their pages, by index."""
    return Cost("kv_write", rows * (2 * dims.kv_heads * dims.head_dim * (BF16 + kv_itemsize) + 8))


def qk(dims: Dims, rows: int) -> Cost:
    """Queries, keys and values in, queries out, keys and values into pages; angles, positions and places."""
    q, kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    angles = 2 * (dims.head_dim // 8) * FP32
    return Cost("qk_norm_rope_kv_write", rows * ((2 * q + 4 * kv) * BF16 + angles + 16) + 2 * dims.head_dim * BF16)


def norm_in_product(width: int, rows: int, outputs: int) -> Cost:
    """The sum with a residual stream, its norm and a product of that: the sum and the norm are written too."""
    both = norm(width, rows, residual=True, op=""), linear(rows, width, outputs)
    return Cost("add_norm_linear", sum(one.nbytes for one in both) - rows * width * BF16, bf16=both[1].bf16)


def shared_down(width: int, inner: int, rows: int) -> Cost:
    """Gate and up of a shared expert and the routed rows in, their sum out."""
    product = linear(rows, inner, width)
    return Cost("shared_down_add", product.nbytes + rows * (inner + width + 1) * BF16, bf16=product.bf16)


def shared_add(width: int, rows: int) -> Cost:
    """Three rows and the gate's weight in, one out."""
    return Cost("shared_expert_add", (4 * rows + 1) * width * BF16, bf16=2.0 * rows * width)


def quantise(width: int, rows: int) -> Cost:
    """bf16 rows to FP8 and a scale for every 128 columns."""
    return Cost("quantise_rows", rows * (width * (BF16 + 1) + width / BLOCK * FP32))


def head(dims: Dims, rows: int) -> Cost:
    """lm_head and the draw: the weight and rows in, a token out. Logits need not be written."""
    weight = dims.vocabulary * dims.hidden
    return Cost("lm_head", weight * BF16 + rows * (dims.hidden * BF16 + 8), bf16=2.0 * rows * weight)


def is_full(layer: int) -> bool:
    """Whether a layer has full attention: every fourth."""
    return (layer + 1) % 4 == 0


def gdn_widths(dims: Dims) -> tuple[int, int]:
    """Columns of q and k together, and of v (as wide as z and the output)."""
    return 2 * dims.key_heads * dims.gdn_head_dim, dims.value_heads * dims.gdn_head_dim


def linears_of(dims: Dims) -> dict[str, tuple[int, int]]:
    """Name every bf16 weight of a layer: (rows of the weight, columns)."""
    keys, values = gdn_widths(dims)
    q, kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    return {
        "in_proj_qkvz": (keys + 2 * values, dims.hidden),
        "in_proj_ba": (2 * dims.value_heads, dims.hidden),
        "out_proj": (dims.hidden, values),
        "qkv_proj": (2 * q + 2 * kv, dims.hidden),
        "o_proj": (dims.hidden, q),
        "gate": (dims.experts, dims.hidden),
        "shared gate_up": (2 * dims.shared_width, dims.hidden),
        "shared down": (dims.hidden, dims.shared_width),
        "shared gate": (1, dims.hidden),
    }


_GDN = (("in_proj_qkvz", "in_proj_ba"), ("out_proj",))  # together: of the same rows, which are read once
_FULL = (("qkv_proj",), ("o_proj",))
_MLP = (("gate", "shared gate_up", "shared gate"), ("shared down",))
_ALIGNED = 16  # of which the rows of a weight are a multiple, where layers pad it


def readers_of(dims: Dims, *, opener: bool = False) -> dict[str, tuple[int, int]]:
    """Name every product of normed rows as a GPU runs it, several weights as one: (its rows, columns).

    `opener`: what opens the shared expert is made too; the rows of that weight are padded then.
    """
    weights = linears_of(dims)
    mlp = _MLP[0] if opener else _MLP[0][:2]
    groups = {"in_proj": _GDN[0], "qkv_proj": _FULL[0], "router and shared expert": mlp}
    sizes = {name: sum(weights[one][0] for one in group) for name, group in groups.items()}
    if opener:
        sizes["router and shared expert"] += -sizes["router and shared expert"] % _ALIGNED
    return {name: (size, dims.hidden) for name, size in sizes.items()}


def products(dims: Dims, rows: int, groups: Sequence[Sequence[str]], op: str) -> Cost:
    """Several bf16 products; those of one group share their rows."""
    weights, moved, operations = linears_of(dims), 0.0, 0.0
    for names in groups:
        columns = weights[names[0]][1]
        outputs = sum(weights[name][0] for name in names)
        both = linear(rows, columns, outputs)
        moved, operations = moved + both.nbytes, operations + both.bf16
    return Cost(op, moved, operations)


def projections(dims: Dims, rows: int, *, full: bool) -> Cost:
    """The products around the mixer of a layer."""
    name = "attention projections" if full else "GDN projections"
    return products(dims, rows, _FULL if full else _GDN, name)


def mlp(dims: Dims, rows: int, distinct: float) -> list[Cost]:
    """List what every layer must do beside its mixer: router, experts, norms."""
    return [
        products(dims, rows, _MLP, "router and shared expert"),
        experts(dims, rows, distinct),
        norm(dims.hidden, rows, residual=True, op="norms").times(2),
    ]


def layer(dims: Dims, rows: int, context: int, distinct: float, *, full: bool) -> list[Cost]:
    """List what one layer must do in a decode step."""
    mixer = [projections(dims, rows, full=full)]
    mixer += [attention(dims, rows, context), kv_write(dims, rows)] if full else [gdn_with_conv(dims, rows)]
    return mixer + mlp(dims, rows, distinct)


def step(dims: Dims, rows: int, context: int, distinct: Sequence[float]) -> list[Cost]:
    """List what a whole decode step must do, summed by op. `distinct`: experts that each layer touches."""
    assert len(distinct) == dims.layers, "one number for each layer"
    parts = [cost for i, some in enumerate(distinct) for cost in layer(dims, rows, context, some, full=is_full(i))]
    return summed([*parts, head(dims, rows)])


def summed(costs: Iterable[Cost]) -> list[Cost]:
    """Add up what is of the same op."""
    found: dict[str, Cost] = {}
    for cost in costs:
        before = found.get(cost.op, Cost(cost.op, 0.0))
        found[cost.op] = Cost(cost.op, before.nbytes + cost.nbytes, before.bf16 + cost.bf16, before.fp8 + cost.fp8)
    return list(found.values())


def seconds(costs: Sequence[Cost], ceilings: Ceilings) -> float:
    """Add the least times of ops that run one after the other."""
    return sum(cost.seconds(ceilings) for cost in costs)
