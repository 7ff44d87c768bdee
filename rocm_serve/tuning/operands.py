"""Operands of ops on the device, in sets that are gone through in turn so that no cache holds them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from math import isfinite

import torch
import torch.nn.functional as F

from rocm_serve.checkpoint.synthetic_configs import Dims
from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.bind import BoundOps
from rocm_serve.ops.contract import Arguments, OwnBound
from rocm_serve.ops.fp8 import FN
from rocm_serve.ops.judging import BOUND, bound_of, not_as_right, own_bound
from rocm_serve.platform.probe import gpus_seen_by_torch
from rocm_serve.tuning import weights

log = logging.getLogger(__name__)

CYCLE_BYTES = 256 << 20  # more than four times the L2 of an H200, and MI300X's Infinity Cache
SLOTS = 512  # a pool of states of which a batch takes random ones
_MOST_SETS = 128
_PAGES_AT_ONCE = 1 << 14  # that are drawn in a wider dtype first
PIECE = 16  # rows of a prompt that are compared together
SAMPLED_ROWS = 6  # that are held against the reference


class Bench:
    """A shape, bound ops, and random numbers on one device. `fp8`: the dialect of experts; None: they are not FP8.

    A hollow one makes operands of the right shapes that hold anything: for compiling, not for running.
    """

    def __init__(
        self,
        dims: Dims,
        ops: BoundOps,
        device: torch.device,
        dtype: torch.dtype,
        fp8: torch.dtype | None,
        seed: int,
        *,
        hollow: bool = False,
    ) -> None:
        self.dims, self.ops, self.device, self.dtype, self.fp8 = dims, ops, device, dtype, fp8
        self.hollow = hollow
        self.g = torch.Generator("cpu" if hollow else device).manual_seed(seed)

    @cached_property
    def arch(self) -> str:
        """Name the card that is here."""
        return gpus_seen_by_torch().arch or "cpu"

    def own_bound(self, op: str, rows: int) -> OwnBound | None:
        """Return the bound that the op's provider has for a call of so many rows alone."""
        dtype = str(self.dtype).removeprefix("torch.")
        facts = {"dtype": dtype, "activation": self.ops.fp8_activation, "expert_fp8": self.fp8 is not None}
        return own_bound(self.ops.providers[op], self.arch, facts, rows)

    def limit(self, op: str, rows: int) -> float:
        """Return the relative L2 to the reference, rows in bf16, that a call may have: the op's own if looser."""
        return max(bound_of(self.own_bound(op, rows)), self.ops.table[op].tol["bfloat16"].rel)

    def judged(self, op: str, rows: int, got: torch.Tensor, expected: torch.Tensor, made: Arguments) -> float:
        """Return the relative L2 to the reference; infinite where the bound is the provider's own and it is less right.

        `rows`: of the call; `made`: the arguments of those that are compared.
        """
        error, own = relative(got, expected), self.own_bound(op, rows)
        if own is None or not BOUND < error <= own.rel:
            return error
        why = not_as_right(own, got, expected, made)
        if why is None:
            return error
        log.warning("%s of %d rows: relative L2 %.1e to the reference, and %s", op, rows, error, why)
        return float("inf")

    @property
    def small(self) -> bool:
        """Whether nothing is timed in earnest: on a CPU a benchmark is a test of itself."""
        return self.hollow or self.device.type == "cpu"

    def sets(self, nbytes: float, least: int = 2) -> int:
        """Return how many sets of so many bytes are gone through in turn."""
        if self.hollow:
            return 1
        wanted = 0 if self.small else -(-CYCLE_BYTES // max(1, int(nbytes)))
        return min(max(least, wanted), _MOST_SETS)

    def rows(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return normally distributed numbers on the device."""
        made = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return made if self.hollow else made.normal_(0.0, scale, generator=self.g)

    def pages(self, *shape: int, kv: str = "bf16") -> torch.Tensor:
        """Return random keys or values in pages: "bf16" is the operands' own dtype, "fp8" that of the card."""
        if kv != "fp8":
            return self.rows(*shape)
        made = torch.empty(shape, dtype=torch.uint8, device=self.device).view(self.fp8 or FN)
        if not self.hollow:
            for piece in made.split(_PAGES_AT_ONCE):
                piece.copy_(self.rows(*piece.shape))
        return made

    def shares(self, rows: int) -> torch.Tensor:
        """Return weights of choices that add up to one, fp32 [rows, top_k]."""
        return self.rows(rows, self.dims.top_k, dtype=torch.float32).softmax(-1)

    def order(self, count: int) -> torch.Tensor:
        """Return the numbers below `count` in random order."""
        if self.hollow:
            return torch.arange(count, device=self.device)
        return torch.randperm(count, generator=self.g, device=self.device)

    def deck(self, count: int) -> list[int]:
        """Return the numbers below `count` in random order, on the host."""
        return list(range(count)) if self.hollow else self.order(count).tolist()

    def sample(self, rows: int, count: int = SAMPLED_ROWS) -> list[int]:
        """Choose rows that are held against the reference: the first, the last, some between."""
        picked = self.deck(rows)[:count]
        return sorted({0, rows - 1, *picked})

    @cached_property
    def experts(self) -> list[dict[str, torch.Tensor]]:
        """Two layers of routed experts, plain."""
        e, h, i = self.dims.experts, self.dims.hidden, self.dims.expert_width
        layers = []
        for _ in range(1 if self.hollow else 2):
            if self.fp8 is None:
                made = {"w13_EIH": self.rows(e, 2 * i, h, scale=h**-0.5), "w2_EHI": self.rows(e, h, i, scale=i**-0.5)}
            else:
                how = {"dtype": self.fp8, "device": self.device, "g": None if self.hollow else self.g}
                w13, w13_scale = weights.fp8_weight(e, 2 * i, h, **how)
                w2, w2_scale = weights.fp8_weight(e, h, i, **how)
                made = {"w13_EIH": w13, "w2_EHI": w2, "w13_scale": w13_scale, "w2_scale": w2_scale}
            layers.append(made)
        return layers

    def choices(self, rows: int, sets: int) -> list[torch.Tensor]:
        """Return sets of int32 ids [rows, top_k], uniform; a single row's sets share no expert as long as they can."""
        e, k = self.dims.experts, self.dims.top_k
        if self.hollow:
            return [torch.empty(rows, k, dtype=torch.int32, device=self.device)] * sets
        if rows == 1:
            deck = torch.cat([self.order(e) for _ in range(-(-sets * k // e) + 1)])
            return [deck[i : i + k].view(1, k).to(torch.int32) for i in _starts(e, k, sets)]
        drawn = torch.rand(sets, rows, e, generator=self.g, device=self.device)
        return list(drawn.topk(k, dim=-1).indices.to(torch.int32).unbind(0))

    def decoding(
        self, slots: Sequence[int], context: int | Sequence[int], table_BP: torch.Tensor | None = None
    ) -> Sequences:
        """Return sequences of one row each, `context` tokens before it: of all, or of each."""
        rows = len(slots)
        contexts = (context,) * rows if isinstance(context, int) else tuple(context)
        made = {"dtype": torch.int32, "device": self.device}
        return Sequences(
            row_starts=tuple(range(rows + 1)),
            contexts=contexts,
            slots=tuple(slots),
            num_recurrent=rows,
            row_starts_B1=torch.arange(rows + 1, **made),
            contexts_B=torch.tensor(contexts, **made),
            slots_B=torch.tensor(list(slots), **made),
            page_table_BP=torch.empty(rows, 0, **made) if table_BP is None else table_BP,
        )

    def prompts(
        self,
        rows: Sequence[int],
        slots: Sequence[int],
        *,
        context: int = 0,
        table_BP: torch.Tensor | None = None,
    ) -> Sequences:
        """Return sequences of so many prompt rows each, `context` tokens before the first."""
        starts, count = tuple(accumulate(rows, initial=0)), len(rows)
        made = {"dtype": torch.int32, "device": self.device}
        return Sequences(
            row_starts=starts,
            contexts=(context,) * count,
            slots=tuple(slots),
            num_recurrent=0,
            row_starts_B1=torch.tensor(starts, **made),
            contexts_B=torch.full((count,), context, **made),
            slots_B=torch.tensor(list(slots), **made),
            page_table_BP=torch.empty(count, 0, **made) if table_BP is None else table_BP,
        )


def _starts(experts: int, top_k: int, sets: int) -> list[int]:
    """Return where runs of top_k begin in shuffled decks laid end to end; no run lies across two decks."""
    each = experts // top_k
    return [i // each * experts + i % each * top_k for i in range(sets)]


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |a - b| / |b|; infinite where one is not finite."""
    g, e = got.double(), expected.double()
    if not bool(g.isfinite().all()):
        return float("inf")
    size = float(e.norm())
    return float((g - e).norm()) / size if size else float((g - e).abs().sum())


def worst_piece(got: torch.Tensor, expected: torch.Tensor, rows: int) -> float:
    """Return the largest |a - b| / |b| of pieces of so many rows: one wrong row among thousands is not lost."""
    g, e = (x.double().flatten(1) for x in (got, expected))
    off, size = (F.pad(x.square().sum(1), (0, -len(x) % rows)).view(-1, rows).sum(1).sqrt() for x in (g - e, e))
    worst = float(torch.where(size > 0, off / size, off).max())
    return worst if isfinite(worst) else float("inf")
