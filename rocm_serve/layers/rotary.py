"""Rotary angles, plain and YaRN. Letters: P positions, R half of the rotated dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from rocm_serve.ops.rows import steady_


class YarnFacts(Protocol):
    """What static YaRN needs to know."""

    @property
    def factor(self) -> float: ...
    @property
    def original_max_position(self) -> int: ...
    @property
    def beta_fast(self) -> float: ...
    @property
    def beta_slow(self) -> float: ...
    @property
    def attention_factor(self) -> float: ...
    @property
    def truncate(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin of every position, fp32 [P, R]; shared by all layers of a stage."""

    cos_PR: torch.Tensor
    sin_PR: torch.Tensor


def rotary_table(
    *, rotary_dim: int, theta: float, yarn: YarnFacts | None, max_position: int, device: torch.device
) -> RotaryTable:
    """Compute the table for positions 0 .. max_position - 1.

    Numerics: angles in fp32 (position * frequency), as the models were trained and as HF computes them. YaRN
    multiplies cos and sin by its attention factor.
    """
    frequencies_R = inverse_frequencies(rotary_dim, theta, yarn)
    angles_PR = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies_R
    gain = 1.0 if yarn is None else yarn.attention_factor
    cos_PR = steady_(torch.cos_, angles_PR.clone()).mul_(gain)
    sin_PR = steady_(torch.sin_, angles_PR).mul_(gain)
    return RotaryTable(cos_PR.to(device), sin_PR.to(device))


def inverse_frequencies(rotary_dim: int, theta: float, yarn: YarnFacts | None) -> torch.Tensor:
    """Return theta^(-2i / rotary_dim), fp32 [R], stretched when YaRN asks for it.

    Source: YaRN (arXiv 2309.00071) section 3.2: frequencies that turn more than beta_fast times within the original
    context stay, those that turn less than beta_slow times are divided by the factor, a ramp lies between.
    """
    powers_R = theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    plain_R = 1.0 / powers_R
    if yarn is None:
        return plain_R
    context = yarn.original_max_position

    def index_of(turns: float) -> float:
        return rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(yarn.beta_fast), index_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    stretched_R = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain_R / yarn.factor * stretched_R + plain_R * (1 - stretched_R)
