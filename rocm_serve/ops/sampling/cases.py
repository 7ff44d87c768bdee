"""Named logits that matter to sampling: ordinary, flat, peaked, full of ties (what bf16 makes of logits), extreme.

Letters: R rows, V ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

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
