"""A row's bits depend on that row (and its sequence) alone: not on place, batch mates, chunk borders or threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_serve.ops.attention_cases import attention_case
from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.bind import OPS
from rocm_serve.ops.causal_conv.cases import conv_case
from rocm_serve.ops.gdn_cases import committing, gdn_case
from rocm_serve.ops.inputs import block_fp8, normal, sequences_of

DTYPES = (torch.float32, torch.bfloat16)
G = torch.Generator


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rowwise(dtype: torch.dtype) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Ops of rows alone, as functions of x [T, 256]; weights are drawn once."""
    g = G().manual_seed(5)
    norm_weight, head_weight = normal(g, 256, scale=0.3, dtype=dtype), normal(g, 64, dtype=dtype)
    weight = normal(g, 96, 256, scale=1 / 16, dtype=dtype)
    fp8, scale = block_fp8(g, 384, 256, scale=1 / 16)
    w13, w2 = normal(g, 8, 192, 256, scale=1 / 16, dtype=dtype), normal(g, 8, 256, 96, scale=1 / 10, dtype=dtype)
    (w13_fp8, s13), (w2_fp8, s2) = block_fp8(g, 8, 256, 256, scale=1 / 16), block_fp8(g, 8, 256, 128, scale=1 / 10)
    sent = (w13_fp8, w2_fp8, s13, s2)
    cos, sin = torch.rand(50, 8, generator=g), torch.rand(50, 8, generator=g)

    def op(name: str) -> Any:
        return OPS[name].reference

    def experts(x: torch.Tensor) -> torch.Tensor:
        ids, weights = op("moe_route")(x[:, :8], top_k=3, renormalise=True)
        return op("moe_experts")(x, ids, weights, len(x), w13, w2, activation="bf16")

    def sent_experts(x: torch.Tensor) -> torch.Tensor:
        ids, weights = op("moe_route")(x[:, :8], top_k=3, renormalise=True)
        rows, scales = op("quantise_rows")(x, dtype=torch.float8_e4m3fn)
        fp8_rows = {"x_scale": scales, "activation": "fp8_1x128", "out_dtype": x.dtype}
        return op("moe_experts")(rows, ids, weights, len(x), *sent, **fp8_rows)

    def turned(x: torch.Tensor) -> torch.Tensor:
        heads, at = x.view(-1, 4, 64), (x[:, 0].abs() * 10).long()
        return op("qk_norm_rope")(heads, heads[:, :2], head_weight, head_weight, cos, sin, at, eps=1e-6)[0].flatten(1)

    def gated_norm(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(-1, 4, 64)
        return op("gated_rms_norm")(heads, heads.flip(1), head_weight, eps=1e-6, activation="silu").flatten(1)

    def drawn(x: torch.Tensor) -> torch.Tensor:
        logits, keys = x.float(), (x[:, 0].double() * 2**40).long()
        return op("draw_token")(logits, keys, x[:, 1].float().clamp_min(0.0), first_id=9, used=250)[1]

    return {
        "draw_token": drawn,
        "log_sum_exp": lambda x: op("log_sum_exp")(x.float())[1],
        "rms_norm": lambda x: op("rms_norm")(x, norm_weight, eps=1e-6, plus_one=True),
        "gated_rms_norm": gated_norm,
        "linear": lambda x: op("linear")(x, weight),
        "linear, one column": lambda x: op("linear")(x, weight[:1]),
        "fp8_linear, bf16": lambda x: op("fp8_linear")(x, fp8, scale, activation="bf16"),
        "fp8_linear, fp8": lambda x: op("fp8_linear")(x, fp8, scale, activation="fp8_1x128"),
        "silu_mul": op("silu_mul"),
        "sigmoid_mul, a gate a row": lambda x: op("sigmoid_mul")(x, x[:, :1]),
        "moe_route": lambda x: op("moe_route")(x, top_k=3, renormalise=True)[1],
        "moe_experts": experts,
        "moe_experts, rows sent as fp8": sent_experts,
        "qk_norm_rope": turned,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", rowwise(torch.float32))
def test_a_row_has_the_same_bits_alone_and_anywhere_in_any_batch(name: str, dtype: torch.dtype) -> None:
    run = rowwise(dtype)[name]
    x = normal(G().manual_seed(len(name)), 77, 256, dtype=dtype)
    whole = run(x)
    for rows in (slice(0, 1), slice(76, 77), slice(13, 14), slice(5, 42), slice(0, 64)):
        assert torch.equal(run(x[rows]), whole[rows]), rows
    order = torch.randperm(77, generator=G().manual_seed(1))
    assert torch.equal(run(x[order]), whole[order])


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", rowwise(torch.float32))
def test_threads_do_not_change_bits(name: str, count: int) -> None:
    run = rowwise(torch.float32)[name]
    x = normal(G().manual_seed(2), 333, 256)
    with threads(1):
        alone = run(x)
    with threads(count):
        assert torch.equal(run(x), alone)


@pytest.mark.parametrize("columns", [1, 2, 16, 300])
def test_threads_do_not_cut_wide_sums(columns: int) -> None:
    """MKL does on some processors, unless its strict mode is asked for (config/load.py)."""
    g = G().manual_seed(columns)
    x, weight = normal(g, 64, 2048), normal(g, columns, 2048)
    with threads(1):
        alone = OPS["linear"].reference(x, weight)
    for count in (2, 3, 4):
        with threads(count):
            assert torch.equal(OPS["linear"].reference(x, weight), alone), count


def one(sequences: Sequences, b: int) -> Sequences:
    return sequences.run(b, b + 1)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", ["attention_prefill", "attention_decode"])
def test_attention_of_a_sequence_does_not_see_the_others(name: str, stored: torch.dtype) -> None:
    made = attention_case(G().manual_seed(3), torch.float32, rows=(1, 33, 70), contexts=(140, 0, 100), stored=stored)
    together = OPS[name].reference(**made)
    alone = torch.zeros_like(together)
    for b in (2, 0, 1):
        OPS[name].reference(**(made | {"sequences": one(made["sequences"], b), "out_THD": alone}))
    assert torch.equal(alone, together)


@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("chunk", [1, 7, 64, 128, 150])
def test_attention_does_not_see_chunk_borders(chunk: int, heads: tuple[int, int]) -> None:
    made = attention_case(
        G().manual_seed(4), torch.float32, rows=(300,), contexts=(0,), heads=heads[0], kv_heads=heads[1], d=32
    )
    whole = OPS["attention_prefill"].reference(**made)
    sequences, out = made["sequences"], torch.zeros_like(made["out_THD"])
    name = "attention_prefill" if chunk > 1 else "attention_decode"
    for first in range(0, 300, chunk):
        part = replace(sequences, row_starts=(first, min(first + chunk, 300)), contexts=(first,))
        OPS[name].reference(**(made | {"sequences": part, "out_THD": out}))
    assert torch.equal(out, whole)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["attention_prefill", "gdn_chunk", "gdn_decode"])
def test_threads_do_not_change_bits_of_sequence_ops(name: str, count: int) -> None:
    g = G().manual_seed(6)
    if name == "attention_prefill":
        made: dict[str, Any] = attention_case(g, torch.float32, rows=(70, 150), contexts=(140, 0))
    else:
        made = gdn_case(g, torch.float32, rows=(70, 150, 4), heads=8, key_heads=4, key=64, value=128)

    def run() -> list[torch.Tensor]:
        copy = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in made.items()}
        OPS[name].reference(**copy)
        return [copy[k] for k in OPS[name].mutates if copy.get(k) is not None]

    with threads(1):
        alone = run()
    with threads(count):
        assert all(torch.equal(a, b) for a, b in zip(run(), alone, strict=True))


def test_the_convolution_does_not_see_chunk_borders_or_other_sequences() -> None:
    g = G().manual_seed(7)
    sequences, _ = sequences_of(g, (130, 1, 5), (0, 0, 0))
    u, weight, start = normal(g, 136, 96), normal(g, 96, 4), normal(g, 5, 3, 96)
    conv = OPS["causal_conv"].reference
    state = start.clone()
    together = conv(u, weight, state, sequences)
    for chunk in (1, 2, 33):
        other, pieces = start.clone(), torch.zeros_like(u)
        for b in (1, 2, 0):
            first, last = sequences.row_starts[b], sequences.row_starts[b + 1]
            for row in range(first, last, chunk):
                part = replace(one(sequences, b), row_starts=(row, min(row + chunk, last)))
                pieces[row : min(row + chunk, last)] = conv(u, weight, other, part)[row : min(row + chunk, last)]
        assert torch.equal(pieces, together)
        assert torch.equal(other, state)


@pytest.mark.parametrize("name", ["gdn_chunk", "gdn_decode"])
def test_a_state_does_not_see_other_sequences(name: str) -> None:
    made: dict[str, Any] = gdn_case(G().manual_seed(8), torch.float32, rows=(3, 70, 1, 64), key_heads=4)
    start = made["state"].clone()
    op = OPS[name].reference
    together, state = op(**made).clone(), made["state"].clone()
    made["state"], made["out_THV"] = start, torch.zeros_like(together)
    for b in (2, 0, 3, 1):
        op(**(made | {"sequences": one(made["sequences"], b)}))
    assert torch.equal(made["out_THV"], together)
    assert torch.equal(made["state"], state)


@pytest.mark.parametrize("heads", [(8, 2), (1, 1), (4, 4)])
def test_the_chunked_form_does_not_see_borders_at_multiples_of_64(heads: tuple[int, int]) -> None:
    made: dict[str, Any] = gdn_case(
        G().manual_seed(9), torch.float32, rows=(300,), heads=heads[0], key_heads=heads[1], fresh=True
    )
    op = OPS["gdn_chunk"].reference
    whole, state = op(**made).clone(), made["state"].clone()
    for cuts in ((0, 64, 128, 192, 256, 300), (0, 192, 300), (0, 128, 300)):
        made["state"], made["out_THV"] = torch.zeros_like(state), torch.zeros_like(whole)
        for first, last in zip(cuts, cuts[1:], strict=False):
            op(**(made | {"sequences": replace(made["sequences"], row_starts=(first, last))}))
        assert torch.equal(made["out_THV"], whole)
        assert torch.equal(made["state"], state)


@pytest.mark.parametrize("sizes", [(64, 32), (128, 128), (7, 5)], ids=str)
def test_many_recurrent_rows_at_once_give_the_bits_of_single_rows(sizes: tuple[int, int]) -> None:
    made: dict[str, Any] = gdn_case(
        G().manual_seed(10), torch.float32, rows=(5, 1), heads=6, key=sizes[0], value=sizes[1]
    )
    op, start = OPS["gdn_decode"].reference, made["state"].clone()
    together, state = op(**made).clone(), made["state"].clone()
    made["state"], made["out_THV"] = start, torch.zeros_like(together)
    for b, row in ((0, 0), (0, 1), (1, 5), (0, 2), (0, 3), (0, 4)):
        op(**(made | {"sequences": replace(one(made["sequences"], b), row_starts=(row, row + 1))}))
    assert torch.equal(made["out_THV"], together)
    assert torch.equal(made["state"], state)


@pytest.mark.parametrize("commit", range(6))
@pytest.mark.parametrize("name", ["causal_conv", "gdn_decode"])
def test_states_are_kept_after_the_committed_rows_and_rows_behind_them_read_the_same(name: str, commit: int) -> None:
    """The committed states are those of a call that ends there; the results are those of a call that commits all."""
    g, op = G().manual_seed(11 + commit), OPS[name].reference
    if name == "gdn_decode":
        made: dict[str, Any] = gdn_case(g, torch.float32, rows=(5, 2), heads=6, key=33, value=20)
    else:
        made = conv_case(g, torch.float32, rows=(5, 2))
    start, whole = made["state"], made["sequences"]

    def ran(sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        fresh = {key: torch.zeros_like(x) for key, x in made.items() if key == "out_THV"}
        state = start.clone()
        return op(**(made | fresh | {"state": state, "sequences": sequences})), state

    result, state = ran(committing(whole, (commit, 2)))
    assert torch.equal(result, ran(whole)[0])
    shorter = ran(replace(one(whole, 0), row_starts=(0, commit)))[1] if commit else start
    slots = [one(whole, b).slots[0] for b in (0, 1)]
    assert torch.equal(state[slots[0]], shorter[slots[0]])
    assert torch.equal(state[slots[1]], ran(one(whole, 1))[1][slots[1]])
    others = [slot for slot in range(len(state)) if slot not in slots]
    assert torch.equal(state[others], start[others])
