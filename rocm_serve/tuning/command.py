"""What `rocm-serve tune` does with its flags."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch

import rocm_serve
from rocm_serve.errors import UserError
from rocm_serve.ops import tiles
from rocm_serve.platform.probe import gpus_seen_by_torch, usable_cores
from rocm_serve.tuning import floor
from rocm_serve.tuning.bench import asked_for
from rocm_serve.tuning.flow import Group, groups_of
from rocm_serve.tuning.session import Session
from rocm_serve.tuning.static import facts_on, model_of, wish_of
from rocm_serve.tuning.wish import PROMPT_ROWS, ROWS, Point, Wish, facts_words, points

Say = Callable[[str], object]
_CASES = ("experts", "attention", "step", "linear", "head", "gdn", "conv", "route", "norms") + (
    *("attention_prefill", "gdn_chunk", "prompt_conv", "fp8_linear", "norm_in_product", "shared_down"),
)
_MOST_JOBS = 16  # each holds operands of its own on the GPU


@dataclass(frozen=True, slots=True)
class Request:
    """The flags of one command."""

    model: Path | None
    shape: str | None
    tp: int
    rows: tuple[int, ...]
    only: tuple[str, ...]
    arch: str | None
    op: dict[str, str]
    out: Path | None
    report: Path | None
    budget_s: float
    jobs: int | None
    seed: int

    def wish(self, arch: str) -> Wish:
        """Decide what is tuned. Errors: UserError."""
        if importlib.util.find_spec("triton") is None:
            raise UserError("tune is about Triton's kernels, and the package triton is not here")
        foreign = [name for name in self.only if name not in _CASES]
        if foreign:
            raise UserError(f"--only {foreign[0]}: no such call; legal: {', '.join(_CASES)}")
        if any(count < 1 for count in self.rows):
            raise UserError(f"--rows {min(self.rows)}: legal: numbers from 1 on")
        facts = facts_on(model_of(self.model, self.shape), arch, self.tp, self.op)
        if not facts.num_experts:
            raise UserError("tune knows models with experts; this one is dense")
        return wish_of(facts, self.op, self.seed)

    def todo(self, wish: Wish) -> list[Point]:
        """List the calls, what matters most first."""
        return list(points(self.rows or (*ROWS, *PROMPT_ROWS), floor.linears_of(wish.sizes), self.only))

    def list_candidates(self, say: Say) -> int:
        """Print every kernel, shape and candidate; nothing is compiled or run."""
        gpu = gpus_seen_by_torch()
        arch = self.arch or gpu.arch
        if not arch:
            raise UserError(
                "there is no GPU here; with --dry-run name one: --gpu mi300x, or --arch gfx942, gfx950 or sm_90"
            )
        wish = self.wish(arch)
        say(facts_words(wish))
        here = gpu.kind != "none" and gpu.arch == arch
        total = 0
        for group in _groups(wish, self.todo(wish), torch.device("cuda:0" if here else "meta")):
            calls = "; ".join(map(str, group.points))
            say(f"{group.asked[0]} {group.key[1]}: {len(group.tiles)} candidates, for {calls}")
            for i, tile in enumerate(group.tiles):
                say(f"  {' '.join(f'{n} {size}' for n, size in tile.items())}{'' if i else '   (the rule)'}")
            total += len(group.tiles)
        say(f"{total} candidates" + ("" if here else f"; {arch} is not here, nothing was compiled"))
        return 0

    def run(self, say: Say) -> int:
        """Tune. Errors: UserError without a GPU."""
        gpu = gpus_seen_by_torch()
        if gpu.kind == "none":
            raise UserError(f"tune needs a GPU: torch {gpu.torch_build} sees none here; legal without one: --dry-run")
        wish = self.wish(gpu.arch)
        out = self.out or default_table(gpu.arch)
        say(f"{gpu.name}: {facts_words(wish)}; winners go to {out}")
        started = time.monotonic()
        device = torch.device("cuda:0")
        groups = _groups(wish, self.todo(wish), device)
        session = Session(wish, groups, device, out, self.report, started + self.budget_s, say)
        return session.run(self.jobs or min(usable_cores(), _MOST_JOBS))


def default_table(arch: str) -> Path:
    """Say which table is extended: the committed one in a checkout, the user's where the package is installed."""
    package = Path(str(resources.files(rocm_serve)))
    if (package.parent / "pyproject.toml").is_file():
        return package / "ops" / "tuned" / f"{arch}.json"
    return tiles.user_table(arch)


def _groups(wish: Wish, todo: list[Point], device: torch.device) -> list[Group]:
    return groups_of(todo, asked_for(wish, todo, device), wish.arch)
