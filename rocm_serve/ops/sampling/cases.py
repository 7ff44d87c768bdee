"""Named logits that matter to sampling: ordinary, flat, peaked, full of ties (what bf16 makes of logits), extreme.

Logits are float32 whatever the rows of a model are. Letters: R rows, V ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.sampling import rng

LogitsCase = Callable[[torch.Generator, int, int], torch.Tensor]  # rows, ids -> float32 RV


def _normal(scale: float) -> LogitsCase:
    return lambda generator, rows, ids: torch.randn(rows, ids, generator=generator) * scale


def _peaked(generator: torch.Generator, rows: int, ids: int) -> torch.Tensor:
    """One id of each row holds nearly all the mass: its log-prob is close to zero from below."""
    logits_RV = torch.randn(rows, ids, generator=generator)
    logits_RV[torch.arange(rows), torch.randint(ids, (rows,), generator=generator)] += 40.0
    return logits_RV


def _tied(generator: torch.Generator, rows: int, ids: int) -> torch.Tensor:
    """Every value occurs many times, signed zeros among them."""
    signs_RV = torch.randint(2, (rows, ids), generator=generator).float() - 0.5
    return torch.randint(-3, 4, (rows, ids), generator=generator).float() * signs_RV


def _constant(generator: torch.Generator, rows: int, ids: int) -> torch.Tensor:
    return torch.randn(rows, 1, generator=generator).expand(rows, ids).contiguous()


def _shifted(generator: torch.Generator, rows: int, ids: int) -> torch.Tensor:
    """Far from zero on either side: exp overflows or vanishes unless the maximum is taken off first."""
    return torch.randn(rows, ids, generator=generator) + torch.tensor([1e4, -1e4]).repeat(rows)[:rows, None]


CASES: Mapping[str, LogitsCase] = {
    "normal": _normal(3.0),
    "flat": _normal(1e-3),
    "wide": _normal(30.0),
    "peaked": _peaked,
    "tied": _tied,
    "constant": _constant,
    "shifted": _shifted,
}


_MARGIN = 0.02  # of a drawn winner: which of two scores within rounding of each other wins is nobody's fault


def draw_case(
    g: torch.Generator,
    dtype: torch.dtype,
    *,
    r: int,
    v: int,
    used: int,
    first_id: int = 0,
    logits: str = "normal",
    temperatures: tuple[float, ...] = (),
    masked: float = 0.0,
) -> Arguments:
    """Logits with keys and `temperatures` by turns, none of them: greedy. `masked`: how many ids are at -infinity."""
    logits_RV = CASES[logits](g, r, v)
    if masked:
        logits_RV[torch.rand(r, v, generator=g) < masked] = float("-inf")
    made: Arguments = {"logits_RV": logits_RV, "first_id": first_id, "used": used}
    if not temperatures:
        return made
    keys_R = torch.randint(-(2**63), 2**63 - 1, (r,), generator=g)
    temperature_R = torch.tensor(temperatures).repeat(r)[:r]
    if used:
        noise_RV = rng.gumbel(keys_R[:, None], rng.id_offsets(first_id, used, logits_RV.device))
        best_R1 = (logits_RV[:, :used] + noise_RV * temperature_R[:, None]).argmax(-1, keepdim=True)
        drawn_R1 = (temperature_R > 0).unsqueeze(-1)
        logits_RV.scatter_add_(1, best_R1, torch.where(drawn_R1, _MARGIN * (1 + temperature_R.unsqueeze(-1)), 0.0))
    return made | {"keys_R": keys_R, "temperature_R": temperature_R}


def sum_case(g: torch.Generator, dtype: torch.dtype, *, r: int, v: int, logits: str = "normal") -> Arguments:
    """Logits alone."""
    return {"logits_RV": CASES[logits](g, r, v)}


_TURNS = (1.0, 0.0, 0.6, 5.0, 1e-6)
DRAWS: dict[str, Case] = {
    "no rows": partial(draw_case, r=0, v=64, used=64),
    "no rows, drawn": partial(draw_case, r=0, v=64, used=64, temperatures=_TURNS),
    "one row": partial(draw_case, r=1, v=512, used=512, temperatures=(1.0,)),
    "nothing but padding": partial(draw_case, r=3, v=64, used=0, temperatures=_TURNS),
    "masked": partial(draw_case, r=9, v=101, used=93, temperatures=_TURNS, masked=0.4),
    "everything masked": partial(draw_case, r=3, v=70, used=70, masked=1.0),
    **{f"greedy, {name}": partial(draw_case, r=37, v=333, used=321, logits=name) for name in CASES},
    **{
        f"drawn, {name}": partial(draw_case, r=37, v=333, used=321, first_id=999, logits=name, temperatures=_TURNS)
        for name in ("normal", "flat", "peaked")
    },
    "2.4T, the last shard": partial(
        draw_case, r=33, v=31_040, used=30_797, first_id=7 * 31_040, temperatures=(0.0, 0.7, 1.0)
    ),
}
SUMS: dict[str, Case] = {
    "no rows": partial(sum_case, r=0, v=64),
    "one row": partial(sum_case, r=1, v=512),
    **{name: partial(sum_case, r=37, v=333, logits=name) for name in CASES},
    "2.4T": partial(sum_case, r=33, v=31_040),
}
