"""Triton kernels of the routed experts, interpreted: `TRITON_INTERPRET=1 python -m tests.ops.interpreted_experts`.

See interpreted.py. Every kernel runs once with the tail of each of its masks; which ones a call runs, a tile says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from rocm_serve.ops import fp8, tiles
from rocm_serve.ops.inputs import block_fp8, normal
from tests.ops.interpreted import F32, errors, exact_rows, one_thread, wide
from tests.ops.interpreting import patched_once
from tests.ops.poison import poisoned


def many(*, bm: int = 16, short: int = 0, halves: int = 0, held: int = 0, run: int = 1, **changes: int) -> tiles.Tile:
    """Return a tile of triton_grouped.py."""
    tile = {"FEW": 0, "BM": bm, "TILED": 0, "DOWN_HELD": held, "DOWN_RUN": run, "DOWN_PROGRAMS": 0}
    for part in ("UP", "DOWN"):
        tile |= {f"{part}_WARPS": 4, f"{part}_STAGES": 1, f"{part}_DESC": 0, f"{part}_SHORT": short}
        tile |= {f"{part}_HALVES": halves, f"{part}_REGS": 0}
    return tile | changes


def few(*, direct: int, fused: int, splits: int, up: int = 128, down: int = 128, unroll: int = 1) -> tiles.Tile:
    """Return a tile of triton_few.py; `up` and `down`: rows of a weight."""
    tile = {"FEW": 1, "BM": 16, "DIRECT": direct, "FUSED": fused, "PDL": 0, "UP_SPLITS": splits}
    for part, rows in (("UP", up), ("DOWN", down)):
        tile |= {f"{part}_BN": rows, f"{part}_WARPS": 4, f"{part}_STAGES": 1, f"{part}_UNROLL": unroll}
    return tile


def alone(*, up: int, deep: int, down: int) -> tiles.Tile:
    """Return a tile of triton_alone.py; `up` and `down`: rows of a weight, `deep` columns at once."""
    sizes = {"UP_BN": up, "UP_BK": deep, "UP_WARPS": 4, "UP_STAGES": 2, "DOWN_BN": down, "DOWN_WARPS": 4}
    return {"FEW": 1, "ALONE": 1, **sizes}


def by_blocks(*, up: int, down: int, columns: int, made: int = 0) -> tiles.Tile:
    """Return a tile of triton_alone_blocks.py; `up` and `down`: rows of a weight."""
    tile = {"FEW": 1, "ALONE": 2, "MADE": made, "UP_STAGES": 2}
    for part, rows in (("UP", up), ("DOWN", down)):
        tile |= {f"{part}_BN": rows, f"{part}_WARPS": 4, f"{part}_COLUMNS": columns, f"{part}_BITS": 8}
        tile |= {f"{part}_EARLY": 1}
    return tile


def provider(tile: tiles.Tile) -> Callable[..., torch.Tensor]:
    from rocm_serve.ops.moe_experts.triton import moe_experts

    def run(**made: Any) -> torch.Tensor:
        with tiles.forced("moe_experts", tile):
            return moe_experts(**made)

    return run


def order(g: torch.Generator, *, one_launch: bool) -> list[float] | str:
    """Tiles hold the choices of one expert each, in order, and say so."""
    from rocm_serve.ops.moe_experts import triton_order

    for t, k, experts, live, tile in ((1, 1, 1, 1, 16), (37, 3, 5, 30, 16), (300, 2, 3, 300, 32), (9, 4, 40, 0, 16)):
        ids = torch.randint(-2, experts + 2, (t, k), generator=g).to(torch.int32)
        for rows in (live, torch.tensor([live])):
            with poisoned():
                if one_launch:
                    placed = triton_order.place_few(ids, rows, experts, tile)[0]
                else:
                    placed = triton_order.sort_choices(ids, rows, experts, tile)
            flat, at = ids.flatten()[: live * k], 0
            for expert in range(experts):
                own = (flat == expert).nonzero().flatten().tolist()
                for first in range(0, len(own), tile):
                    held = own[first : first + tile] + [t * k] * (tile - len(own[first : first + tile]))
                    if placed.choices[at * tile : (at + 1) * tile].tolist() != held:
                        return f"tile {at} of {(t, k, experts, live, tile)} holds other choices than {held}"
                    if placed.expert_of_tile[at] != expert:
                        return f"tile {at} is not of expert {expert}"
                    at += 1
            if placed.num_tiles.tolist() != [at] or at > placed.max_tiles:
                return f"{placed.num_tiles.tolist()} tiles of at most {placed.max_tiles}, not {at}"
            if one_launch and not (placed.expert_of_tile[at:] == -1).all():
                return f"tiles from {at} on are of experts {placed.expert_of_tile[at:].tolist()}"
    return [0.0]


def sort_choices(g: torch.Generator) -> list[float] | str:
    return order(g, one_launch=False)


def place_few(g: torch.Generator) -> list[float] | str:
    return order(g, one_launch=True)


def place_few_beside_quantising(g: torch.Generator) -> list[float] | str:
    from rocm_serve.ops.moe_experts.triton_order import place_few

    x = wide(exact_rows(g, 5, 300))
    ids = torch.tensor([[0, 2]] * 5, dtype=torch.int32)
    with poisoned():
        placed, values, scales = place_few(ids, 5, 3, 16, x, torch.float8_e4m3fn)
    assert values is not None and scales is not None
    expected_q, expected_s = fp8.quantise_rows(x, torch.float8_e4m3fn)
    if not (torch.equal(scales, expected_s) and torch.equal(values.float(), expected_q.float())):
        return "other rows than those of the reference"
    return [0.0] if placed.expert_of_tile.tolist()[:2] == [0, 2] else f"experts {placed.expert_of_tile.tolist()}"


def case(g: torch.Generator, t: int, h: int, i: int, e: int, k: int, *, block: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"x_TH": wide(normal(g, t, h)), "activation": "bf16", "num_rows": t}
    made["ids_Tk"] = torch.stack([torch.randperm(e, generator=g)[:k] for _ in range(t)]).to(torch.int32)
    made["weights_Tk"] = torch.rand(t, k, generator=g)
    if not block:
        w13, w2 = normal(g, e, 2 * i, h, scale=h**-0.5), normal(g, e, h, i, scale=i**-0.5)
        return made | {"w13_EIH": w13, "w2_EHI": w2}
    (w13, s13), (w2, s2) = block_fp8(g, e, 2 * i, h, scale=h**-0.5), block_fp8(g, e, h, i, scale=i**-0.5)
    return made | {"w13_EIH": w13, "w13_scale": s13, "w2_EHI": w2, "w2_scale": s2}


def some_elsewhere(g: torch.Generator, t: int, h: int) -> dict[str, Any]:
    """Rows without an expert, a choice held elsewhere, rows of padding that the device counts."""
    made = case(g, t, h, 40, 5, 2, block=False)
    made["ids_Tk"][2] = -1
    made["num_rows"] = torch.tensor([t - 2], dtype=torch.int32)
    made["ids_Tk"][4, 1] = -1
    return made


def moe_experts_in_tiles(g: torch.Generator) -> list[float]:
    made, run = some_elsewhere(g, 9, 72), provider(many())
    return errors("moe_experts", run, made) + errors("moe_experts", run, made | {"num_rows": 0})


def moe_experts_in_tiles_fp8_weights(g: torch.Generator) -> list[float]:
    """An expert width of 192: the rows of gate and up meet inside a block of scales."""
    made = case(g, 5, 160, 192, 3, 2, block=True)
    return errors("moe_experts", provider(many(run=2)), made) + errors("moe_experts", provider(many(halves=1)), made)


def moe_experts_in_short_tiles(g: torch.Generator) -> list[float] | str:
    """Experts with 0, 1, 8, 9, 16 and 17 choices, in tiles of 16 whose halves are 8; hidden rows are kept, but no more
    blocks than there is room for."""
    from triton.runtime.errors import InterpreterError

    made = case(g, 51, 300, 96, 6, 1, block=False)
    each = [expert for expert, rows in enumerate((0, 1, 8, 9, 16, 17)) for _ in range(rows)]
    made["ids_Tk"] = torch.tensor(each, dtype=torch.int32)[torch.randperm(51, generator=g), None].contiguous()
    found = errors("moe_experts", provider(many(short=1, held=1, run=2)), made)
    found += errors("moe_experts", provider(many(short=1, halves=1, TILED=1)), made)
    try:
        provider(many(held=1))(**case(g, 2, 32, 160, 2, 1, block=False))
    except InterpreterError:
        return found
    return "five blocks of hidden columns are kept"


def moe_experts_in_turn(g: torch.Generator) -> list[float]:
    """Fewer programs than pieces of work, and more; choices elsewhere; a last block of columns that is not full."""
    made, turn = some_elsewhere(g, 6, 136), {"TILED": 1, "DOWN_PROGRAMS": 3}
    found = errors("moe_experts", provider(many(**turn)), made)
    found += errors("moe_experts", provider(many(halves=1, **turn)), made | {"num_rows": 0})
    made = case(g, 5, 160, 192, 3, 2, block=True)
    described = many(halves=1, TILED=1, DOWN_PROGRAMS=12, UP_DESC=1, DOWN_DESC=1)
    return found + errors("moe_experts", provider(described), made)


def moe_experts_in_panels(g: torch.Generator) -> list[float]:
    from rocm_serve.ops.moe_experts import triton_grouped

    with mock.patch.object(triton_grouped, "_RETURNED_BYTES", 4 * 128 * 12):
        made = case(g, 6, 300, 32, 4, 2, block=False)
        found = errors("moe_experts", provider(many(held=1, run=3)), made)
        return found + errors("moe_experts", provider(many(TILED=1, DOWN_PROGRAMS=2)), made)


def moe_experts_in_order(g: torch.Generator) -> list[float]:
    run, made = provider(few(direct=0, fused=0, splits=0)), some_elsewhere(g, 9, 72)
    return errors("moe_experts", run, made) + errors("moe_experts", run, made | {"num_rows": 0})


def moe_experts_in_one_go(g: torch.Generator) -> list[float]:
    """Every choice a tile, a row's experts in one program; then in parts, of which the last is empty."""
    made, run = some_elsewhere(g, 5, 72), provider(few(direct=1, fused=1, splits=0))
    found = errors("moe_experts", run, made) + errors("moe_experts", run, made | {"num_rows": 0})
    return found + errors("moe_experts", provider(few(direct=1, fused=0, splits=3, up=64)), made)


def moe_experts_in_order_fp8_weights(g: torch.Generator) -> list[float]:
    """Scales of each row of a weight and, where its width is whole blocks, one of them all."""
    found = errors(
        "moe_experts", provider(few(direct=0, fused=0, splits=2, up=256)), case(g, 5, 160, 192, 3, 2, block=True)
    )
    made = case(g, 3, 256, 128, 3, 2, block=True)
    return found + errors("moe_experts", provider(few(direct=1, fused=1, splits=0, down=64)), made)


def moe_experts_alone(g: torch.Generator) -> list[float]:
    """Rows without an expert, a count on the device; scales of each row of a weight, and one of them all."""
    made, run = some_elsewhere(g, 5, 72), provider(alone(up=8, deep=128, down=16))
    found = errors("moe_experts", run, made) + errors("moe_experts", run, made | {"num_rows": 0})
    run = provider(alone(up=16, deep=256, down=8))
    found += errors("moe_experts", run, case(g, 2, 300, 192, 3, 3, block=True))
    found += errors("moe_experts", run, case(g, 2, 256, 128, 3, 2, block=True))
    return found + errors(
        "moe_experts", provider(alone(up=256, deep=512, down=256)), case(g, 2, 160, 40, 3, 2, block=True)
    )


def moe_experts_alone_fp8_rows(g: torch.Generator) -> list[float]:
    return _of_rows(g, alone(up=8, deep=128, down=16)) + _of_rows(g, alone(up=32, deep=1024, down=64))


def moe_experts_by_blocks(g: torch.Generator) -> list[float]:
    """Rows without an expert, a count on the device; blocks that a step lacks, scales of each row of a weight. An id
    past the last expert is none either."""
    made, run = some_elsewhere(g, 5, 72), provider(by_blocks(up=16, down=32, columns=8))
    past = made["ids_Tk"].clone()
    past[4, 1] = past[2, 0] = 5
    found = errors("moe_experts", run, made | {"ids_Tk": past, "num_rows": 5}, ids_Tk=made["ids_Tk"])
    found += errors("moe_experts", run, made) + errors("moe_experts", run, made | {"num_rows": 0})
    run = provider(by_blocks(up=64, down=64, columns=2))
    found += errors("moe_experts", run, case(g, 1, 300, 192, 3, 2, block=True))
    return found + errors("moe_experts", run, case(g, 1, 256, 128, 3, 3, block=True))


def moe_experts_by_blocks_fp8_rows(g: torch.Generator) -> list[float]:
    """Hidden rows of one block; then of three, in more than one step, quantised in a launch of their own."""
    found = _of_rows(g, by_blocks(up=64, down=64, columns=2))
    made = case(g, 2, 256, 384, 4, 3, block=True) | {"x_TH": exact_rows(g, 2, 256), "activation": "fp8_1x128"}
    made["x_TH"][1] = made["x_TH"][0].flip(0)  # rows of one size: neither is lost beside the other
    made["ids_Tk"][0, 1] = -1
    made["w13_scale"] *= torch.tensor([1.0, 0.75, 1.5] * 2)[:, None]  # blocks of a hidden row of unlike sizes
    return found + errors("moe_experts", provider(by_blocks(up=128, down=32, columns=8, made=1)), made)


def _of_rows(g: torch.Generator, tile: tiles.Tile) -> list[float]:
    made = case(g, 4, 256, 128, 3, 2, block=True) | {"x_TH": exact_rows(g, 4, 256), "activation": "fp8_1x128"}
    return errors("moe_experts", provider(tile), made)


def moe_experts_in_tiles_fp8_rows(g: torch.Generator) -> list[float]:
    """The hidden rows are rounded as the interpreter does it: this shows that nothing is misplaced, not more."""
    registers, turn = many(held=1, halves=1, TILED=1, UP_REGS=1, DOWN_REGS=1), many(TILED=1, DOWN_PROGRAMS=3)
    found = _of_rows(g, many(halves=1)) + _of_rows(g, many(held=1, run=2))
    return found + _of_rows(g, registers) + _of_rows(g, turn)


def moe_experts_in_order_fp8_rows(g: torch.Generator) -> list[float]:
    tile = few(direct=0, fused=0, splits=0)
    return _of_rows(g, tile) + _of_rows(g, few(direct=1, fused=1, splits=2))


def moe_experts_sent_rows(g: torch.Generator) -> str | list[float]:
    """The bits of the rows that are quantised in place; dead rows hold what was there before."""
    made = case(g, 3, 256, 128, 3, 2, block=True) | {"x_TH": exact_rows(g, 3, 256), "activation": "fp8_1x128"}
    made["ids_Tk"][1, 1] = -1
    rows, scales = fp8.quantise_rows(made["x_TH"], torch.float8_e4m3fn)
    rows[2:], scales[2:] = float("nan"), float("nan")
    sent = made | {"x_TH": rows, "x_scale": wide(scales), "out_dtype": F32}
    for live, tile in (
        (2, alone(up=64, deep=128, down=64)),
        (2, by_blocks(up=128, down=128, columns=2)),
        (2, many(short=1)),
        (torch.tensor([2], dtype=torch.int32), few(direct=0, fused=1, splits=1)),
    ):
        with poisoned():
            ours, plain = (provider(tile)(**one | {"num_rows": live}) for one in (sent, made))
        if ours.dtype != F32 or not torch.equal(ours, plain):
            return f"other bits than for the rows before: {(ours != plain).sum()} of {ours.numel()}"
    return [0.0]


# How large an error may be: float32 sums in another order, or what the interpreter's rounding costs.
LIMITS: dict[str, float] = dict.fromkeys(
    (
        "sort_choices",
        "place_few",
        "place_few_beside_quantising",
        "moe_experts_in_tiles",
        "moe_experts_in_tiles_fp8_weights",
        "moe_experts_in_short_tiles",
        "moe_experts_in_turn",
        "moe_experts_in_panels",
        "moe_experts_in_order",
        "moe_experts_in_one_go",
        "moe_experts_in_order_fp8_weights",
        "moe_experts_alone",
        "moe_experts_by_blocks",
        "moe_experts_sent_rows",
    ),
    2e-6,
) | dict.fromkeys(
    (
        *("moe_experts_in_tiles_fp8_rows", "moe_experts_in_order_fp8_rows", "moe_experts_alone_fp8_rows"),
        "moe_experts_by_blocks_fp8_rows",
    ),
    0.15,
)


def main() -> None:
    seed = int(sys.argv[1])
    with one_thread(), patched_once():
        found = {name: globals()[name](torch.Generator().manual_seed(seed)) for name in LIMITS}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
