"""Muon for the matrices of layers, AdamW for the rest, over float32 masters of parameters that the model sees rounded.

The model's own parameters are what the checkpoint will hold: BF16, routed experts through block FP8 and back. Gradients
are taken there and applied to the masters (a straight-through estimate).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rocm_serve.checkpoint.fp8 import dequantise, quantise

_ADAM = ("conv1d.weight", "mlp.gate.weight", "shared_expert_gate.weight", "in_proj_a.weight", "in_proj_b.weight")


def is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def rounded(name: str, master: Tensor) -> Tensor:
    """Return the float32 values that the checkpoint's reader will see for a master."""
    if is_expert(name):
        parts = master.unflatten(1, (2, -1)) if name.endswith("gate_up_proj") else master  # gate and up apart
        return dequantise(*quantise(parts)).view_as(master)
    return master.bfloat16().float()


def orthogonalised(x: Tensor) -> Tensor:
    """Newton-Schulz, in BF16 on a GPU: x's singular vectors, singular values near 1. Shapes: [*, R, C]."""
    x = x.bfloat16() if x.is_cuda else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


class Optimiser:
    """Holds the masters of `parameters` (name, model parameter) and steps them."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], lr: float, decay: float = 0.05) -> None:
        self.named = list(parameters)
        self.lr, self.decay = lr, decay
        self.masters = {name: p.detach().float().clone() for name, p in self.named}
        muon = {n for n, p in self.named if p.dim() > 1 and "layers." in n and not n.endswith(_ADAM)}
        muon |= {n for n, _ in self.named if n.endswith("fc.weight")}
        self.matrices = [(n, p) for n, p in self.named if n in muon]
        self.momentum = {n: torch.zeros_like(self.masters[n]) for n, _ in self.matrices}
        self.others = [(n, p) for n, p in self.named if n not in muon]
        groups = [
            {"params": [self.masters[n] for n, p in self.others if p.dim() > 1], "weight_decay": decay},
            {"params": [self.masters[n] for n, p in self.others if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Write the rounded masters into the model."""
        for name, p in self.named:
            p.copy_(rounded(name, self.masters[name]))

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Apply the gradients with the learning rate times `scale`, and forget them."""
        for name, p in self.others:
            assert p.grad is not None, name
            self.masters[name].grad = p.grad.float()
        torch.nn.utils.clip_grad_norm_([self.masters[n] for n, _ in self.others], 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.lr * scale
        self.adam.step()
        self._step_matrices(self.lr * scale)
        for _, p in self.named:
            p.grad = None
        self.publish()

    def _step_matrices(self, lr: float) -> None:
        alike: dict[tuple[int, ...], list[tuple[str, Tensor, bool]]] = defaultdict(list)
        for name, p in self.matrices:
            assert p.grad is not None, name
            grad = p.grad.float()
            self.momentum[name].mul_(0.95).add_(grad)
            update = grad.add_(self.momentum[name], alpha=0.95)  # Nesterov
            if name.endswith("gate_up_proj"):  # gate and up are two matrices
                update = update.unflatten(1, (2, -1)).flatten(0, 1)
            update = update.reshape(-1, *update.shape[-2:])
            tall = update.shape[-2] > update.shape[-1]
            update = update.mT if tall else update
            alike[tuple(update.shape[-2:])].append((name, update, tall))
        for shape, members in alike.items():
            whole = orthogonalised(torch.cat([update for _, update, _ in members]))
            size = 0.2 * math.sqrt(max(shape))
            pieces = whole.split([update.shape[0] for _, update, _ in members])
            for (name, _, tall), piece in zip(members, pieces, strict=True):
                master = self.masters[name]
                change = (piece.mT if tall else piece).reshape(master.shape).float()
                master.mul_(1 - lr * self.decay).add_(change, alpha=-lr * size)
