"""The least time that a step with prompts can take: bytes and operations over measured ceilings. Pure, no torch.

Summed as in floor.py: each op takes the longer of its bytes over the copy rate and its operations over the rates of
bf16 and FP8 products, and ops run one after the other. Of a prompt's attention a row counts the keys that it sees; the
keys and values of the pages are read once. The delta rule counts as the recurrence, 6 operations for each number of a
state and row: the chunked form does more. lm_head counts the rows that draw a token, one for each prompt that ends.

Letters: T rows of a prompt in this step, C tokens of it cached before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rocm_serve.checkpoint.synthetic_configs import Dims
from rocm_serve.tuning import floor
from rocm_serve.tuning.floor import BF16, BLOCK, FP32, Cost


@dataclass(frozen=True, slots=True)
class Mixed:
    """A step: `prompts` of `rows` rows each after `context` tokens, and `decodes` sequences of one row beside them."""

    rows: int
    context: int = 0
    prompts: int = 1
    decodes: int = 0
    decode_context: int = 0

    @property
    def num_rows(self) -> int:
        return self.prompts * self.rows + self.decodes


def visible(rows: int, context: int) -> int:
    """Return how many keys the rows of one prompt see, added up."""
    return rows * context + rows * (rows + 1) // 2


def attention(dims: Dims, rows: int, context: int = 0, prompts: int = 1, kv_itemsize: int = BF16) -> Cost:
    """Causal attention of prompts: queries in, rows out, keys and values of the pages once."""
    cached = 2 * (context + rows) * dims.kv_heads * dims.head_dim * kv_itemsize
    moved = prompts * (cached + 2 * rows * dims.heads * dims.head_dim * BF16)
    operations = 4.0 * prompts * visible(rows, context) * dims.heads * dims.head_dim
    return Cost("attention_prefill", moved, bf16=operations)


def gdn(dims: Dims, rows: int, prompts: int = 1) -> Cost:
    """The delta rule over prompts: q, k, v and gates in, rows out, a state in and out for each prompt."""
    head, values, keys, total = dims.gdn_head_dim, dims.value_heads, dims.key_heads, rows * prompts
    states = prompts * values * head * head * FP32 * 2
    moved = states + total * ((2 * keys + 2 * values) * head + 2 * values) * BF16
    return Cost("gdn_chunk", moved, bf16=6.0 * total * values * head * head)


def conv(dims: Dims, rows: int, prompts: int = 1) -> Cost:
    """The short convolution of prompts: rows in and out, a window in and out for each prompt, taps."""
    channels, carried = sum(floor.gdn_widths(dims)), dims.conv_kernel - 1
    moved = channels * (2 * rows * prompts + 2 * carried * prompts + dims.conv_kernel) * BF16
    return Cost("causal_conv", moved)


def gdn_with_conv(dims: Dims, rows: int, prompts: int = 1) -> Cost:
    """Both in one: the convolved q, k and v are neither written nor read."""
    rule, between = gdn(dims, rows, prompts), 2 * rows * prompts * sum(floor.gdn_widths(dims)) * BF16
    moved = rule.nbytes + conv(dims, rows, prompts).nbytes - between
    return Cost("gdn_conv_chunk", moved, bf16=rule.bf16)


def fp8_linear(rows: int, columns: int, outputs: int) -> Cost:
    """A product of bf16 rows, quantised on the way, with a block-FP8 weight."""
    weight = columns * outputs
    moved = weight + weight / BLOCK**2 * FP32 + rows * (columns + outputs) * BF16
    return Cost("fp8_linear", moved, fp8=2.0 * rows * weight)


def layer(dims: Dims, step: Mixed, distinct: float, *, full: bool) -> list[Cost]:
    """List what one layer must do in the step."""
    rows = step.num_rows
    if full:
        mixer = [
            floor.projections(dims, rows, full=True),
            attention(dims, step.rows, step.context, step.prompts),
            floor.kv_write(dims, rows),
        ]
        beside = [floor.attention(dims, step.decodes, step.decode_context)]
    else:
        mixer = [floor.projections(dims, rows, full=False), gdn_with_conv(dims, step.rows, step.prompts)]
        beside = [floor.gdn_with_conv(dims, step.decodes)]
    return [*mixer, *(beside if step.decodes else ()), *floor.mlp(dims, rows, distinct)]


def step(dims: Dims, shape: Mixed, distinct: Sequence[float]) -> list[Cost]:
    """List what the whole step must do, summed by op. `distinct`: experts that each layer touches."""
    assert len(distinct) == dims.layers, "one number for each layer"
    layers = [layer(dims, shape, some, full=floor.is_full(i)) for i, some in enumerate(distinct)]
    drawn = floor.head(dims, shape.prompts + shape.decodes)
    return floor.summed([*(cost for parts in layers for cost in parts), drawn])
