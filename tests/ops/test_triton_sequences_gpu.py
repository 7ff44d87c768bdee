"""Triton kernels that walk sequences, on a GPU: what the cases are too small for. Run by hand where a GPU is."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_serve.ops import tiles
from rocm_serve.ops.attention_cases import attention_case
from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.bind import OPS
from rocm_serve.ops.contract import Arguments
from rocm_serve.ops.gdn_cases import gdn_case
from rocm_serve.ops.gdn_step.cases import step_case
from rocm_serve.ops.inputs import normal, sequences_of
from tests.ops.layer_layout import as_in_the_layer
from tests.ops.on_gpu import fp8_dtype
from tests.ops.test_gpu import moved
from tests.ops.test_references import DTYPES, copied
from tests.ops.test_triton_gpu import no_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
Function = Callable[..., torch.Tensor]


def triton(op: str) -> Function:
    return OPS[op].providers["triton"].load()


def on_gpu(made: Arguments) -> dict[str, Any]:
    return {name: moved(x) for name, x in made.items()}


def poisoned(made: dict[str, Any]) -> dict[str, Any]:
    """Fill what the op only writes with NaN, but in rows that no sequence owns: those stay as they are."""
    rows = made["sequences"].rows
    for name in ("out_THD", "out_THV"):
        if made.get(name) is not None:
            made[name][rows] = float("nan")
    return made


def differences(op: str, made: dict[str, Any]) -> list[float]:
    """Relative L2 of all that provider and reference write, each on its own copy of the arguments."""
    found = []
    for function in (triton(op), OPS[op].reference):
        own = as_in_the_layer(op, poisoned(copied(made)))
        result = function(**own)
        found.append([result, *(own[name] for name in OPS[op].mutates if own.get(name) is not None)])
    errors = []
    for got, expected in zip(*found, strict=True):
        assert got.shape == expected.shape and got.dtype == expected.dtype
        holes = (got.isnan() & ~expected.isnan()).sum().item()
        assert not holes, f"{op} by triton leaves {holes} of {got.numel()} numbers NaN"
        errors.append(((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item())
    return errors


def judge(op: str, build: Callable[[torch.Generator], Arguments], dtype: torch.dtype, float32: float = 5e-6) -> None:
    """Both round once, and not always alike: 5e-3 in bf16. In float32 sums are longer than those of the op's cases."""
    seed = secrets.randbits(31)
    errors = differences(op, on_gpu(build(torch.Generator().manual_seed(seed))))
    limit = float32 if dtype == torch.float32 else 5e-3
    assert max(errors) <= limit, f"{op} by triton, seed {seed}: {errors} > {limit} (the result, then what it writes)"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_over_contexts_on_both_sides_of_a_split(dtype: torch.dtype) -> None:
    """Splits end between blocks of keys; drafts to verify may lie on either side of a border."""
    judge(
        "attention_decode",
        lambda g: attention_case(
            g, dtype, rows=(1, 1, 1, 4, 1), contexts=(3, 1023, 1024, 2046, 4500), heads=8, kv_heads=1, d=256
        ),
        dtype,
        float32=2e-5,  # sums of 4500 keys, half of whose float32 error is the reference's own
    )


@pytest.mark.parametrize("sequences", [3, 80, 300])
def test_decode_over_fp8_pages_with_many_splits_few_and_none(sequences: int) -> None:
    contexts = tuple((37 * b) % 700 for b in range(sequences - 1)) + (3000,)
    judge(
        "attention_decode",
        lambda g: attention_case(
            g,
            torch.bfloat16,
            rows=(1,) * sequences,
            contexts=contexts,
            heads=16,
            kv_heads=2,
            d=256,
            stored=fp8_dtype(),
            k_scale=0.5,
            v_scale=3.0,
        ),
        torch.bfloat16,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_of_many_tiles_behind_a_context(dtype: torch.dtype) -> None:
    judge(
        "attention_prefill",
        lambda g: attention_case(
            g, dtype, rows=(150, 1, 33), contexts=(300, 0, 64), heads=8, kv_heads=1, d=256, first_row=2
        ),
        dtype,
        float32=2e-5,
    )


def conv_case(g: torch.Generator, dtype: torch.dtype, rows: tuple[int, ...], channels: int) -> Arguments:
    sequences, _ = sequences_of(g, rows, (0,) * len(rows), first_row=1)
    total = sequences.row_starts[-1] + 3
    return {
        "u_TC": normal(g, total, channels, dtype=dtype),
        "weight_CK": normal(g, channels, 4, dtype=dtype),
        "state": normal(g, len(rows) + 2, 3, channels, dtype=dtype),
        "sequences": sequences,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_convolution_of_a_mixed_batch_of_the_real_width(dtype: torch.dtype) -> None:
    judge("causal_conv", lambda g: conv_case(g, dtype, (1,) * 20 + (4, 2, 3, 500), 2560), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_scan_of_a_long_prompt_beside_others(dtype: torch.dtype) -> None:
    judge(
        "gdn_chunk",
        lambda g: gdn_case(g, dtype, rows=(1000, 3, 65), heads=16, key_heads=2, key=128, value=128, decay=-2.0),
        dtype,
        float32=2e-5,  # the chunked reference solves systems of 64 rows: its own bound
    )


@pytest.mark.parametrize("decay", [-6.0, -3.0, 0.0, 3.0])
def test_prompts_that_remember_and_prompts_that_forget(decay: float) -> None:
    sizes: dict[str, int] = {"heads": 8, "key_heads": 4, "key": 128, "value": 128}
    judge("gdn_chunk", lambda g: gdn_case(g, torch.bfloat16, rows=(2100,), decay=decay, **sizes), torch.bfloat16)


def test_many_short_prompts_and_odd_heads() -> None:
    sizes: dict[str, int] = {"heads": 4, "key_heads": 2, "key": 128, "value": 128}
    rows = (128, 1, 0, 63, 65) * 14
    judge("gdn_chunk", lambda g: gdn_case(g, torch.bfloat16, rows=rows, first_row=7, **sizes), torch.bfloat16)
    odd: dict[str, int] = {"heads": 3, "key_heads": 1, "key": 40, "value": 70}
    judge("gdn_chunk", lambda g: gdn_case(g, torch.bfloat16, rows=(130, 5), **odd), torch.bfloat16)


def test_values_that_float16_does_not_hold() -> None:
    def build(g: torch.Generator) -> Arguments:
        made = gdn_case(g, torch.bfloat16, rows=(200,), heads=4, key_heads=2, key=128, value=128)
        for name in ("v_THV", "state"):
            value = made[name]
            assert isinstance(value, torch.Tensor)
            value *= 1e8
        return made

    judge("gdn_chunk", build, torch.bfloat16)


def test_a_prompt_has_the_same_bits_alone_among_others_and_cut_between_chunks() -> None:
    g = torch.Generator().manual_seed(seed := secrets.randbits(31))
    made = on_gpu(gdn_case(g, torch.bfloat16, rows=(70, 300, 9), heads=16, key_heads=2, key=128, value=128))
    whole, parts = copied(made), copied(made)
    tile = tiles.by_rule("gdn_chunk", {"rows": 1, "heads": 16, "k": 128, "v": 128}, "sm_90")
    with tiles.forced("gdn_chunk", tile):
        in_chunks_and_at_once(made, whole, parts)
    for name in ("out_THV", "state"):
        assert torch.equal(whole[name], parts[name]), f"gdn_chunk, {name}, seed {seed}"


def in_chunks_and_at_once(made: dict[str, Any], whole: dict[str, Any], parts: dict[str, Any]) -> None:
    triton("gdn_chunk")(**whole)
    for b in (2, 0, 1):
        first, last = made["sequences"].row_starts[b : b + 2]
        cuts = (first, *range(first + 64, last, 128), last)
        for start, stop in itertools.pairwise(cuts):
            piece = replace(
                alone(made["sequences"], b),
                row_starts=(start, stop),
                row_starts_B1=torch.tensor([start, stop], dtype=torch.int32, device="cuda"),
            )
            triton("gdn_chunk")(**(parts | {"sequences": piece}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recurrent_rows_of_many_sequences_with_drafts_on_a_copy(dtype: torch.dtype) -> None:
    def build(g: torch.Generator) -> Arguments:
        sizes: dict[str, int] = {"heads": 16, "key_heads": 2, "key": 128, "value": 128}
        return gdn_case(g, dtype, rows=(1, 4, 7) * 12, commits=(1, 1, 4) * 12, first_row=5, **sizes)

    judge("gdn_decode", build, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_of_many_sequences_of_the_real_width(dtype: torch.dtype) -> None:
    sizes: dict[str, int] = {"heads": 16, "key_heads": 2, "key": 128, "value": 128}
    judge("gdn_step", lambda g: step_case(g, dtype, rows=(1,) * 150, **sizes), dtype)
    judge("gdn_step", lambda g: step_case(g, dtype, rows=(1, 4, 7), commits=(1, 1, 4), **sizes), dtype)


@pytest.mark.parametrize("values", [128, 32])
def test_a_captured_step_goes_by_the_slots_that_stand_on_the_device(values: int) -> None:
    """Replays advance the states of other slots each time; the windows that heads share are rewritten once in each."""
    g = torch.Generator().manual_seed(secrets.randbits(31))
    sizes: dict[str, int] = {"heads": 16, "key_heads": 2, "key": 128, "value": 128}
    made = on_gpu(step_case(g, torch.bfloat16, rows=(1,) * 8, **sizes))
    rows = made["sequences"].row_starts[-1]
    made |= {name: made[name][:rows].contiguous() for name in ("u_TC", "a_TH", "b_TH", "z_THV")}
    theirs, dummy = copied(made), torch.zeros(8, dtype=torch.int32, device="cuda")
    slots_B = dummy.clone()
    made["sequences"] = replace(made["sequences"], slots=(0,) * 8, slots_B=slots_B)
    graph, tile = torch.cuda.CUDAGraph(), {"BV": values, "KL": 32, "num_warps": values * 128 // 2048}
    with tiles.forced("gdn_step", tile):
        triton("gdn_step")(**made)
        with torch.cuda.graph(graph):
            y = triton("gdn_step")(**made)
    for live in (5, 8, 1, 7):
        slots = (1 + torch.randperm(8, generator=g))[:live].tolist()
        slots_B.copy_(torch.tensor(slots + [0] * (8 - live), dtype=torch.int32))
        graph.replay()
        of_live = {name: theirs[name][:live] for name in ("u_TC", "a_TH", "b_TH", "z_THV")}
        sequences = replace(theirs["sequences"].run(0, live), slots=tuple(slots), slots_B=slots_B[:live].clone())
        expected = OPS["gdn_step"].reference(**theirs | of_live | {"sequences": sequences})
        pairs = [(y[:live], expected), *((made[x][1:9], theirs[x][1:9]) for x in ("state", "conv_state"))]
        errors = [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs]
        assert max(errors) <= 5e-3, errors


def one_layer(g: torch.Generator, contexts: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Arguments of every op of a decode step, one row a sequence, on the GPU."""
    rows = (1,) * len(contexts)
    made: dict[str, Arguments] = {
        "causal_conv": conv_case(g, torch.bfloat16, rows, 256),
        "gdn_decode": gdn_case(g, torch.bfloat16, rows=rows, key=32, value=48),
        "gdn_step": step_case(g, torch.bfloat16, rows=rows),
        "qk_norm_rope": OPS["qk_norm_rope"].cases["2.4T heads"](g, torch.bfloat16),
        "kv_write": OPS["kv_write"].cases["fp8 pages, scales"](g, torch.bfloat16),
        "qk_norm_rope_kv_write": OPS["qk_norm_rope_kv_write"].cases["fp8 pages, scales"](g, torch.bfloat16),
        "attention_decode": attention_case(g, torch.bfloat16, rows=rows, contexts=contexts),
    }
    return {op: on_gpu(arguments) for op, arguments in made.items()}


def test_the_host_never_waits_for_the_device() -> None:
    for op, made in one_layer(torch.Generator().manual_seed(1), (5, 2100, 64)).items():
        triton(op)(**made)
        with no_waiting():
            triton(op)(**made)


def test_a_captured_graph_follows_what_the_device_holds() -> None:
    """Captured for long contexts and replayed for shorter ones, other slots and other pages: all read on the device."""
    seed = secrets.randbits(31)
    g = torch.Generator().manual_seed(seed)
    for (op, held), fresh in zip(
        one_layer(g, (5, 2100, 64)).items(), one_layer(g, (1500, 3, 200)).values(), strict=True
    ):
        function, sequences = triton(op), held.get("sequences")
        if sequences is not None:
            short = sequences.page_table_BP.shape[1] - fresh["sequences"].page_table_BP.shape[1]
            fresh["sequences"] = replace(
                fresh["sequences"],
                page_table_BP=torch.nn.functional.pad(fresh["sequences"].page_table_BP, (0, short), value=-1),
            )
        for name in ("k_pages_PSGD", "v_pages_PSGD"):  # as many pages as the longer contexts need
            if name in fresh:
                own = held[name].clone()
                own[: len(fresh[name])] = fresh[name]
                fresh[name] = own
        function(**copied(held))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = function(**held)
        for into, out_of in (*zip(tensors(held), tensors(fresh), strict=True),):
            into.copy_(out_of)
        graph.replay()
        expected = function(**fresh)
        pairs = [*zip(as_tuple(result), as_tuple(expected), strict=True)]
        pairs += [(held[name], fresh[name]) for name in OPS[op].mutates if held.get(name) is not None]
        for i, (got, wanted) in enumerate(pairs):
            same = torch.equal(got.float().nan_to_num(7.0), wanted.float().nan_to_num(7.0))
            assert same, f"{op}, output {i}: a replay gives other bits than a call, seed {seed}"


def as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def tensors(made: dict[str, Any]) -> list[torch.Tensor]:
    """List every tensor of the arguments, those inside Sequences too."""
    found = [x for x in made.values() if isinstance(x, torch.Tensor)]
    if (sequences := made.get("sequences")) is not None:
        found += [
            sequences.row_starts_B1,
            sequences.contexts_B,
            sequences.slots_B,
            sequences.page_table_BP,
        ]
    return found


def alone(sequences: Sequences, b: int) -> Sequences:
    return sequences.run(b, b + 1)


def test_attention_of_a_sequence_sees_nothing_of_a_batch_but_its_size() -> None:
    """How keys are split depends on the number of sequences, rounded up to a power of two: 3 and 4 are alike."""
    g = torch.Generator().manual_seed(seed := secrets.randbits(31))
    contexts = (2500, 7, 1100)
    made = on_gpu(attention_case(g, torch.bfloat16, rows=(1, 1, 1), contexts=contexts, heads=8, kv_heads=1, d=256))
    three = triton("attention_decode")(**copied(made))
    order = [2, 0, 1, 2]
    sequences = made["sequences"]
    others = replace(
        sequences,
        row_starts=(0, 1, 2, 3, 4),
        contexts=tuple(contexts[b] for b in order),
        slots=(1, 2, 3, 4),
        row_starts_B1=torch.arange(5, dtype=torch.int32, device="cuda"),
        contexts_B=sequences.contexts_B[order],
        slots_B=torch.arange(1, 5, dtype=torch.int32, device="cuda"),
        page_table_BP=sequences.page_table_BP[order],
    )
    q, out = made["q_THD"][order].contiguous(), torch.full_like(three[:4], float("nan"))
    triton("attention_decode")(**(made | {"q_THD": q, "sequences": others, "out_THD": out}))
    assert torch.equal(out, three[order]), f"seed {seed}"


def test_a_recurrent_row_has_the_same_bits_alone_and_among_others() -> None:
    g = torch.Generator().manual_seed(seed := secrets.randbits(31))
    made = on_gpu(gdn_case(g, torch.bfloat16, rows=(3, 1, 9), heads=16, key_heads=2, key=128, value=128))
    whole, parts = copied(made), copied(made)
    triton("gdn_decode")(**whole)
    for b in (2, 0, 1):
        first, last = made["sequences"].row_starts[b : b + 2]
        for row in range(first, last):
            one = replace(
                alone(made["sequences"], b),
                row_starts=(row, row + 1),
                row_starts_B1=torch.tensor([row, row + 1], dtype=torch.int32, device="cuda"),
            )
            triton("gdn_decode")(**(parts | {"sequences": one}))
    for name in ("out_THV", "state"):
        assert torch.equal(whole[name], parts[name]), f"gdn_decode, {name}, seed {seed}"


def test_fp8_pages_hold_the_bytes_of_the_reference() -> None:
    """Every sum of two e4m3 neighbours is a tie: they are rounded to even, as torch does it. NaN stays NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[:126] + codes[1:127]) / 2
    x = torch.cat([codes, ties, -ties, torch.tensor([500.0, -500.0, float("inf"), 1e-9])]).cuda()
    rows = x.view(-1, 2, 8)
    pages = [torch.zeros(5, 16, 2, 8, device="cuda", dtype=torch.float8_e4m3fn) for _ in range(4)]
    index = torch.randperm(80, device="cuda")[: len(rows)]
    triton("kv_write")(rows, rows * 3, pages[0], pages[1], index, k_scale=1.0, v_scale=3.0)
    OPS["kv_write"].reference(rows, rows * 3, pages[2], pages[3], index, k_scale=1.0, v_scale=3.0)
    for got, expected in zip(pages[:2], pages[2:], strict=True):
        both_nan = got.float().isnan() & expected.float().isnan()  # of either sign
        wrong = ((got.view(torch.uint8) != expected.view(torch.uint8)) & ~both_nan).nonzero().tolist()
        assert not wrong, f"{len(wrong)} bytes differ, the first at {wrong[0]}"
