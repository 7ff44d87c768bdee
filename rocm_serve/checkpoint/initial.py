"""How random weights are drawn so that a made-up model behaves: activations neither vanish nor explode. Pure.

Used by the synthetic checkpoint writer and by `--load-format dummy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt


@dataclass(frozen=True, slots=True)
class Draw:
    """Mean and standard deviation of a tensor's elements."""

    mean: float
    std: float

    @property
    def low(self) -> float:
        """Lower end of the uniform distribution of this mean and deviation."""
        return self.mean - sqrt(3.0) * self.std

    @property
    def high(self) -> float:
        return self.mean + sqrt(3.0) * self.std


# Gains over 1/sqrt(fan in). The router is spread so that top-k has no near ties; logits come out with a deviation of 2.
_GAINS = {"mlp.gate.weight": 2.0, "lm_head.weight": 2.0}
_DECAY = (log(0.02) + log(2.0)) / 2, (log(2.0) - log(0.02)) / sqrt(12.0)


def draw(key: str, shape: tuple[int, ...]) -> Draw:
    """Say how the elements of canonical tensor `key` are drawn.

    No vector sits at the value that a fresh model gives it (0 for the zero-centred norms, 1 for the GDN norm),
    so that a forgotten `1 + w` shows.
    """
    if key.endswith("A_log"):
        return Draw(*_DECAY)
    if key.endswith("dt_bias"):
        return Draw(-1.0, 0.7)
    if key.endswith("linear_attn.norm.weight"):
        return Draw(1.1, 0.15)
    if key.endswith(("q_norm.weight", "k_norm.weight")):
        return Draw(0.3, 0.15)
    if len(shape) == 1:
        return Draw(0.1, 0.15)
    if key.endswith("embed_tokens.weight"):
        return Draw(0.0, 1.0)
    if key.endswith("conv1d.weight"):
        return Draw(0.0, 1.0 / sqrt(shape[-1]))
    gain = next((g for name, g in _GAINS.items() if key.endswith(name)), 1.0)
    return Draw(0.0, gain / sqrt(shape[-1]))
