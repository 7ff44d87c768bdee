"""The Triton providers of row-wise ops, products and experts on a GPU: what no small case shows. Run by hand there.

Real sizes, against the reference on the same GPU; graphs; bits; NaN; no waiting for the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rocm_serve.ops import fp8, tiles
from rocm_serve.ops.bind import OPS
from rocm_serve.ops.contract import Arguments
from tests.ops.on_gpu import (
    BF16_LIMIT,
    EXPERT_ROWS,
    LINEAR_ROWS,
    LINEARS,
    LOGITS,
    SEED,
    SEED_VARIABLE,
    fp8_dtype,
    why_wrong,
)
from tests.ops.poison import poisoned
from tests.ops.test_references import error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.filterwarnings("ignore:::triton"),
    pytest.mark.usefixtures("compiled"),
]
BF16 = torch.bfloat16
SAID = f"{SEED_VARIABLE}={SEED}"


def provider(op: str) -> Callable[..., Any]:
    return OPS[op].providers["triton"].load()


@pytest.fixture
def g() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(SEED)


def normal(g: torch.Generator, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (torch.randn(shape, generator=g, device="cuda") * scale).to(dtype)


def block_fp8(g: torch.Generator, *shape: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an FP8 weight [..., N, K] and its scales; made in pieces, for the experts of a layer fill gigabytes."""
    weight = torch.empty(shape, dtype=fp8_dtype(), device="cuda")
    top = fp8.fp8_max(weight.dtype)
    for piece in weight.view(-1, *shape[-2:]).split(32):
        piece.copy_((torch.randn(piece.shape, generator=g, device="cuda") * (top / 4.5)).clamp(-top, top))
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    return weight, (torch.rand(blocks, generator=g, device="cuda") * 1.5 + 0.5) * (scale * 4.5 / top)


def judged(op: str, made: Arguments, limit: float | None = None) -> None:
    with poisoned():
        got = provider(op)(**made)
    expected = OPS[op].reference(**made)
    if limit is None:
        assert (why := why_wrong(op, got, expected, made)) is None, f"{why}; {SAID}"
        return
    found = error(got.float(), expected.double())
    assert found <= limit, f"{op}: relative L2 {found:.2e} > {limit:.1e}; {SAID}"


@pytest.mark.parametrize("activation", ["bf16", "fp8_1x128"])
@pytest.mark.parametrize("rows", LINEAR_ROWS)
def test_fp8_products_of_real_sizes(g: torch.Generator, rows: int, activation: str) -> None:
    for n, k in LINEARS:
        weight, scale = block_fp8(g, n, k, scale=k**-0.5)
        x = normal(g, rows, k)
        for rows_TK in (x, x * x.abs().square()):  # the second: few large values, many small ones
            judged("fp8_linear", {"x_TK": rows_TK, "weight_NK": weight, "scale": scale, "activation": activation})


@pytest.mark.parametrize("rows", LINEAR_ROWS)
def test_logits_are_float32_sums(g: torch.Generator, rows: int) -> None:
    x, weight = normal(g, rows, 8192), normal(g, LOGITS, 8192, scale=8192**-0.5)
    judged("linear", {"x_TK": x, "weight_NK": weight, "out_dtype": torch.float32}, limit=1e-5)


Experts = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def experts() -> Iterator[Experts]:
    """The routed experts of one layer of the 2.4T model on one of eight ranks: 3.2 GB."""
    g = torch.Generator("cuda").manual_seed(SEED)
    w13, s13 = block_fp8(g, 512, 512, 8192, scale=8192**-0.5)
    w2, s2 = block_fp8(g, 512, 8192, 256, scale=256**-0.5)
    yield {"w13_EIH": w13, "w13_scale": s13, "w2_EHI": w2, "w2_scale": s2}


def routed(g: torch.Generator, rows: int, num_experts: int = 512, top_k: int = 10) -> Arguments:
    """Rows and their choices; some experts are liked, some choices are held elsewhere."""
    liked = normal(g, num_experts, dtype=torch.float32)
    logits = normal(g, rows, num_experts, dtype=torch.float32) + liked
    ids, weights = OPS["moe_route"].reference(logits, top_k=top_k, renormalise=True)
    ids[torch.rand(ids.shape, generator=g, device="cuda") < 0.05] = -1
    return {"x_TH": normal(g, rows, 8192), "ids_Tk": ids, "weights_Tk": weights, "num_rows": rows}


@pytest.mark.parametrize("activation", ["bf16", "fp8_1x128"])
@pytest.mark.parametrize("rows", EXPERT_ROWS)
def test_experts_of_the_2400b_model(g: torch.Generator, experts: Experts, rows: int, activation: str) -> None:
    """Both forms, of few rows and of many; from 820 rows on there are several panels of columns."""
    judged("moe_experts", {**routed(g, rows), **experts, "activation": activation})


@pytest.mark.parametrize("rows", [1, 700, 5000])
def test_plain_experts(g: torch.Generator, rows: int) -> None:
    made = routed(g, rows, num_experts=64, top_k=8) | {"activation": "bf16"}
    made["x_TH"] = normal(g, rows, 2048)
    w13, w2 = normal(g, 64, 1024, 2048, scale=2048**-0.5), normal(g, 64, 2048, 512, scale=512**-0.5)
    judged("moe_experts", made | {"w13_EIH": w13, "w2_EHI": w2})


def test_a_captured_graph_counts_its_rows_on_the_device(g: torch.Generator) -> None:
    w13, s13 = block_fp8(g, 16, 512, 256, scale=1 / 16)
    w2, s2 = block_fp8(g, 16, 256, 256, scale=1 / 16)
    made = routed(g, 40, num_experts=16, top_k=4) | {"activation": "fp8_1x128"}
    made |= {"x_TH": normal(g, 40, 256), "w13_EIH": w13, "w13_scale": s13, "w2_EHI": w2, "w2_scale": s2}
    made["num_rows"] = torch.tensor([40], dtype=torch.int32, device="cuda")
    held = {k: v for k, v in made.items() if isinstance(v, torch.Tensor)}
    function = provider("moe_experts")
    function(**made)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(**made)
    for live in (40, 0, 7):
        fresh = routed(g, 40, num_experts=16, top_k=4)
        for name in ("ids_Tk", "weights_Tk"):
            held[name].copy_(fresh[name])
        held["x_TH"].copy_(normal(g, 40, 256))
        held["num_rows"].fill_(live)
        out.fill_(float("nan"))
        graph.replay()
        expected = OPS["moe_experts"].reference(**(made | {"num_rows": live}))
        found = error(out.float(), expected.double())
        assert found <= BF16_LIMIT, f"{live} rows: relative L2 {found:.2e}; {SAID}"


def ways() -> list[tiles.Tile]:
    """Return a tile of every way through the kernels of few rows, among those that tuning tries."""
    shape = {"k": 4, "e": 16, "h": 512, "i": 256, "bits": 8}
    tried = [
        tile for rows in (1, 16, 256) for tile in tiles.candidates("moe_experts", {**shape, "rows": rows}, "sm_90")
    ]
    names = ("ALONE", "BM", "DIRECT", "FUSED", "PDL", "MADE", "EARLY", "UP_EARLY", "DOWN_EARLY")
    return list({(tile.get("UP_SPLITS", 0) > 0, *map(tile.get, names)): tile for tile in tried}.values())


@pytest.mark.parametrize("tile", ways(), ids=lambda tile: " ".join(map(str, tile.values())))
def test_every_way_of_few_experts_in_a_captured_graph(g: torch.Generator, tile: tiles.Tile) -> None:
    """Replayed without a pause with other rows each time: a kernel that starts before its rows are there is seen."""
    if (tile.get("PDL") or tile.get("ALONE") == 2) and not torch.version.cuda:
        pytest.skip("no such launches on this GPU")
    w13, s13 = block_fp8(g, 16, 512, 512, scale=512**-0.5)
    w2, s2 = block_fp8(g, 16, 512, 256, scale=1 / 16)
    made = routed(g, 24, num_experts=16, top_k=4) | {"activation": "fp8_1x128", "x_TH": normal(g, 24, 512)}
    made |= {"w13_EIH": w13, "w13_scale": s13, "w2_EHI": w2, "w2_scale": s2}
    with tiles.forced("moe_experts", tile):
        provider("moe_experts")(**made)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = provider("moe_experts")(**made)
    found = []
    for _ in range(20):
        fresh = routed(g, 24, num_experts=16, top_k=4) | {"x_TH": normal(g, 24, 512)}
        for name in ("ids_Tk", "weights_Tk", "x_TH"):
            made[name].copy_(fresh[name])  # type: ignore[attr-defined]
        graph.replay()
        found.append((fresh, out.clone()))
    for fresh, ours in found:
        expected = OPS["moe_experts"].reference(**(made | fresh))
        assert error(ours.float(), expected.double()) <= BF16_LIMIT, SAID


@pytest.mark.parametrize("tile", ways(), ids=lambda tile: " ".join(map(str, tile.values())))
def test_a_route_that_lets_the_experts_begin_early_in_a_captured_graph(g: torch.Generator, tile: tiles.Tile) -> None:
    """Other logits at each replay: an expert that reads ids or weights before they are there makes other bits."""
    if not torch.version.cuda:
        pytest.skip("no such launches on this GPU")
    w13, s13 = block_fp8(g, 16, 512, 512, scale=512**-0.5)
    w2, s2 = block_fp8(g, 16, 512, 256, scale=1 / 16)
    rest = {"num_rows": 3, "w13_EIH": w13, "w13_scale": s13, "w2_EHI": w2, "w2_scale": s2, "activation": "fp8_1x128"}
    x, logits = normal(g, 3, 512), normal(g, 3, 16)

    def both(between: Callable[[], object]) -> torch.Tensor:
        ids, weights = provider("moe_route")(logits, top_k=4, renormalise=True)
        between()
        made: torch.Tensor = provider("moe_experts")(x, ids, weights, **rest)
        return made

    with tiles.forced("moe_route", {"EARLY": 1}), tiles.forced("moe_experts", tile):
        both(torch.cuda.synchronize)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = both(lambda: None)
        drawn, replayed = [normal(g, 3, 16) for _ in range(20)], []
        for one in drawn:
            logits.copy_(one)
            graph.replay()
            replayed.append(out.clone())
        for one, ours in zip(drawn, replayed, strict=True):
            logits.copy_(one)
            assert torch.equal(ours, both(torch.cuda.synchronize)), SAID


def small(g: torch.Generator, rows: int) -> dict[str, Arguments]:
    """One call of each op, rows in bf16."""
    weight, scale = block_fp8(g, 384, 256, scale=1 / 16)
    w13, s13 = block_fp8(g, 8, 256, 256, scale=1 / 16)
    w2, s2 = block_fp8(g, 8, 256, 128, scale=1 / 16)
    x = normal(g, rows, 256)
    moe = routed(g, rows, num_experts=8, top_k=3) | {"x_TH": x, "activation": "fp8_1x128"}
    heads = {"x_THD": x.view(rows, 4, 64), "gate_THD": normal(g, rows, 4, 64), "weight_D": normal(g, 64)}
    return {
        "rms_norm": {"x_TH": x, "weight_H": normal(g, 256), "eps": 1e-6, "plus_one": True},
        "add_rms_norm": {
            "x_TH": x,
            "residual_TH": normal(g, rows, 256),
            "weight_H": normal(g, 256),
            "eps": 1e-6,
            "plus_one": True,
        },
        "gated_rms_norm": heads | {"eps": 1e-6, "activation": "silu"},
        "silu_mul": {"gate_up_TI": x},
        "sigmoid_mul": {"x_TH": x, "gate": normal(g, rows, 1)},
        "linear": {"x_TK": x, "weight_NK": normal(g, 96, 256), "out_dtype": torch.float32},
        "fp8_linear": {"x_TK": x, "weight_NK": weight, "scale": scale, "activation": "fp8_1x128"},
        "moe_route": {"logits_TE": normal(g, rows, 64), "top_k": 8, "renormalise": True},
        "moe_experts": moe | {"w13_EIH": w13, "w13_scale": s13, "w2_EHI": w2, "w2_scale": s2},
    }


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make every wait of the host for the device an error."""
    with warnings.catch_warnings(action="ignore"):  # torch says that the mode does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_host_never_waits_for_the_device(g: torch.Generator) -> None:
    for op, made in small(g, 33).items():
        function = provider(op)
        function(**made)
        with no_waiting():
            function(**made)


BITS = ("rms_norm", "gated_rms_norm", "silu_mul", "sigmoid_mul", "moe_route")
ROWS = ("x_TH", "x_THD", "gate_THD", "gate_up_TI", "logits_TE", "gate")


def test_a_row_has_the_same_bits_alone_and_among_many(g: torch.Generator) -> None:
    made = small(g, 4099)
    for op in BITS:
        row = 2050
        alone = made[op] | {k: v[row : row + 1] for k, v in made[op].items() if k in ROWS}
        all_rows, one = provider(op)(**made[op]), provider(op)(**alone)
        pairs = zip(all_rows, one, strict=True) if isinstance(one, tuple) else [(all_rows, one)]
        assert all(torch.equal(a[row], b[0]) for a, b in pairs), f"{op}; {SAID}"


def test_strided_views_are_read_in_place(g: torch.Generator) -> None:
    held = normal(g, 37, 1000)
    heads = held[:, 488:1000].view(37, 8, 64)
    calls: dict[str, Arguments] = {
        "rms_norm": {"x_TH": held[:, 8:264], "weight_H": normal(g, 256), "eps": 1e-6, "plus_one": True},
        "gated_rms_norm": {
            "x_THD": held[:, :512].view(37, 8, 64),
            "gate_THD": heads,
            "weight_D": normal(g, 64),
            "eps": 1e-6,
            "activation": "silu",
        },
        "silu_mul": {"gate_up_TI": held[:, 1:803]},
        "sigmoid_mul": {"x_TH": held[:, 3:300], "gate": held[:, 500:797]},
    }
    for op, made in calls.items():
        judged(op, made)
    stream, x = held[:, 16:272], normal(g, 37, 256)
    before, outside = stream.clone(), held[:, 272:].clone()
    y = provider("add_rms_norm")(x, stream, normal(g, 256), eps=1e-6, plus_one=True)
    assert torch.equal(stream, before + x) and torch.equal(held[:, 272:], outside) and y.isfinite().all()


def test_rows_are_quantised_to_the_codes_of_the_reference(g: torch.Generator) -> None:
    from rocm_serve.ops.triton_common.triton import quantise_rows

    for dtype in (BF16, torch.float32):
        spread = torch.exp2(torch.randint(-20, 12, (515, 1), generator=g, device="cuda").float())
        x = (normal(g, 515, 8200, dtype=torch.float32) * spread).to(dtype)
        x[7] = 0
        x[9, :128] = 1e-30
        with poisoned():
            q, s = quantise_rows(x, fp8_dtype())
        expected_q, expected_s = fp8.quantise_rows(x.cpu(), fp8_dtype())
        assert torch.equal(s.cpu(), expected_s), f"{(s.cpu() != expected_s).sum()} multipliers differ; {SAID}"
        wrong = (q.cpu().view(torch.uint8) != expected_q.view(torch.uint8)).sum().item()
        assert wrong == 0, f"{wrong} of {q.numel()} codes differ; {SAID}"


def test_a_nan_reaches_the_output_of_its_row_alone(g: torch.Generator) -> None:
    made = small(g, 20)
    ids = made["moe_experts"]["ids_Tk"]
    assert isinstance(ids, torch.Tensor)
    ids[5, 0] = 6  # held here
    for op, argument in (
        ("rms_norm", "x_TH"),
        ("silu_mul", "gate_up_TI"),
        ("fp8_linear", "x_TK"),
        ("moe_route", "logits_TE"),
        ("moe_experts", "x_TH"),
    ):
        x = made[op][argument]
        assert isinstance(x, torch.Tensor)
        x = x.clone()
        x[5, 3] = float("nan")
        result = provider(op)(**(made[op] | {argument: x}))
        y = result[1] if isinstance(result, tuple) else result
        seen = y.isnan().any(1).nonzero().flatten().tolist()
        assert seen == [5], f"{op}: NaN in rows {seen}; {SAID}"
        if op == "moe_route":
            assert ((result[0] >= 0) & (result[0] < 64)).all()
