"""What a tapped rank writes down of a step: the wished rows of what ops return, of states they find, of the stream.

A module's ops are called through `Taps.call`; how what an op returns is cut over ranks follows from its `Place`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from rocm_serve.diagnostics.parity.tap_files import Band, Header, Site, TapWish, step_file, wish_file
from rocm_serve.messages import Plan
from rocm_serve.models.qwen3_5.spec import ModelFacts
from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.contract import OpFunction
from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.mesh import Coord

EXPERTS = "mlp.experts"
_ROUTED = ("mlp.gate.linear", "mlp.moe_route")
_ONE_NAME = {
    "fp8_linear": "linear",
    "attention_prefill": "attention",
    "attention_decode": "attention",
    "gdn_chunk": "gdn",
    "gdn_decode": "gdn",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module stands: its layer, its name below it, and how what it returns is cut."""

    layer: int
    module: str
    shares: tuple[Band, ...] | None  # of the rows of its weight; None: they are whole
    addend: bool  # its weight is cut along what is summed over
    whole: bool = False  # an MLP that this rank has all columns of


class Taps:
    """Records one rank. `step` surrounds a step; between its begin and its end, wrapped ops leave their results."""

    def __init__(self, coord: Coord, run_dir: str, facts: ModelFacts) -> None:
        self.coord = coord
        self._run_dir = run_dir
        self._kv_repeat = max(1, coord.mesh.tp // facts.num_kv_heads)
        self._seeds: dict[int, int] = {}
        self._rows: dict[int, tuple[int, int]] = {}  # row of the batch -> (seed, position), recorded everywhere
        self._routed: dict[int, tuple[int, int]] = {}  # recorded where experts are chosen
        self._starts: dict[int, tuple[int, int]] = {}  # slot -> (seed, first position) of a sequence with such rows
        self._own: range | None = None  # rows of the batch that this rank works on; None: all of them
        self._sites: list[Site] = []
        self._tensors: list[torch.Tensor] = []

    @property
    def on(self) -> bool:
        return bool(self._rows or self._routed)

    @contextmanager
    def step(self, plan: Plan) -> Iterator[None]:
        """Record the rows of `plan` that are wished for, and write them at its end."""
        for rid in plan.released:
            self._seeds.pop(rid, None)
        self._seeds.update((new.rid, new.params.seed) for new in plan.new)
        path = wish_file(self._run_dir)
        if plan.seq >= 0 and path.exists():
            self._choose(plan, msgspec.json.decode(path.read_bytes(), type=TapWish))
        yield
        if self._sites:
            self._write(step_file(self._run_dir, self.coord.rank, plan.seq))
        for kept in (self._rows, self._routed, self._starts, self._sites, self._tensors):
            kept.clear()

    def _choose(self, plan: Plan, wish: TapWish) -> None:
        row = 0
        for work in plan.work:
            seed = self._seeds[work.rid]
            wanted, below = frozenset(wish.rows.get(seed, ())), wish.routed.get(seed, 0)
            for i in range(work.num_rows):
                position = work.start + i
                if position in wanted:
                    self._rows[row + i] = (seed, position)
                    self._starts[work.slot] = (seed, work.start)
                if position in wanted or position < below:
                    self._routed[row + i] = (seed, position)
            row += work.num_rows

    def _write(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        header = Header(self.coord.rank, self.coord.tp_rank, self.coord.mesh.tp, tuple(self._sites))
        tensors = {str(i): tensor for i, tensor in enumerate(self._tensors)}
        save_file(tensors, path, metadata={"header": msgspec.json.encode(header).decode()})

    def work_on(self, own: range | None) -> None:
        """Say which rows of the batch the tensors from now on have: this rank's, whole, or (None) all of them."""
        self._own = own

    def stream(self, layer: int, name: str, hidden_TH: torch.Tensor) -> None:
        """Record the residual stream at one end of a layer."""
        if self.on:
            self.keep(Place(layer, "", None, False), name, name, hidden_TH)

    def keep(
        self,
        place: Place,
        name: str,
        op: str,
        x: torch.Tensor,
        *,
        bands: Sequence[Band] = (),
        addend: bool = False,
        run: Sequences | None = None,
    ) -> None:
        """Record the wished rows of `x` [T, ...]; with `run`, those of its sequences only."""
        chosen = self._routed if name in _ROUTED else self._rows
        rows = [row for row in chosen if run is None or run.rows.start <= row < run.rows.stop]
        first = 0
        if self._own is not None:
            rows = [row for row in rows if row in self._own]
            first, bands, addend = self._own.start, (), False
        self._add(
            place, name, op, x[[row - first for row in rows]], [chosen[row] for row in rows], tuple(bands), addend
        )

    def _add(
        self,
        place: Place,
        name: str,
        op: str,
        rows: torch.Tensor,
        keys: Sequence[tuple[int, int]],
        bands: tuple[Band, ...] = (),
        addend: bool = False,
    ) -> None:
        if keys or self._own is not None:  # a rank without rows of its own still says in which order sites come
            values = rows.detach().to("cpu", torch.float32, copy=True).flatten(1).contiguous()
            self._sites.append(Site(place.layer, name, op, tuple(keys), bands, addend))
            self._tensors.append(values)

    def call(self, place: Place, op: str, function: OpFunction, *args: Any, **kwargs: Any) -> Any:
        """Run an op and record what it returns, and the states that came in."""
        if not self.on or (self._own is not None and place.module == EXPERTS):  # there they are rows of all ranks
            return function(*args, **kwargs)
        name = f"{place.module}.{_ONE_NAME.get(op, op)}"
        self._states(place, op, args)
        result = function(*args, **kwargs)
        record = _SPECIAL.get(op)
        if record is not None:
            record(self, place, name, op, args, result)
        else:
            shares = place.shares or ()
            self.keep(place, name, op, result, bands=shares, addend=place.addend)
        return result

    def all_reduce(self, place: Place, inner: Comm, x: torch.Tensor) -> torch.Tensor:
        total = inner.all_reduce(x)
        if self.on:
            self.keep(place, f"{place.module}.all_reduce", "all_reduce", total)
        return total

    def _states(self, place: Place, op: str, args: tuple[Any, ...]) -> None:
        """Record the states of Gated DeltaNet as the op finds them, at the first row of each sequence."""
        at = {"causal_conv": (2, 3), "gdn_chunk": (7, 8), "gdn_decode": (7, 8)}.get(op)
        if at is None:
            return
        state, run = args[at[0]], args[at[1]]
        found = [(slot, self._starts[slot]) for slot in run.slots if slot in self._starts]
        if found:
            held = state[[slot for slot, _ in found]].float()
            # [B, taps, C] as [B, C]; [B, heads, V, K] as the length of each row of V
            rows = held.norm(dim=1) if op == "causal_conv" else held.norm(dim=-1).flatten(1)
            bands = place.shares if op == "causal_conv" else None
            keys = [key for _, key in found]
            name = "linear_attn.conv_state" if op == "causal_conv" else "linear_attn.ssm_state"
            self._add(place, name, "state of the slot", rows, keys, bands or (Band(rows.shape[1]),))

    def whole_band(self, place: Place, name: str, op: str, args: tuple[Any, ...], result: Any) -> None:
        """Record an op whose rank computes its own heads or columns."""
        self.keep(place, name, op, result, bands=() if place.whole else [Band(result[0].numel())])

    def attention(self, place: Place, name: str, op: str, args: tuple[Any, ...], result: Any) -> None:
        """Record the keys and values that the new rows find of themselves in the pages, then the attention."""
        _, k_pages, v_pages, run = args[:4]
        keys, places = [], []
        for b in range(run.num_sequences):
            first = run.row_starts[b]
            for row in range(first, run.row_starts[b + 1]):
                if row in self._rows:
                    page, offset = divmod(run.contexts[b] + row - first, k_pages.shape[1])
                    places.append((int(run.page_table_BP[b, page]), offset))
                    keys.append(self._rows[row])
        for part, pages in (("k", k_pages), ("v", v_pages)) if keys else ():
            held = torch.stack([pages[at].float() for at in places])
            bands = (Band(held[0].numel(), self._kv_repeat),)
            self._add(place, f"{place.module}.kv_write.{part}", "kv_write", held, keys, bands)
        self.keep(place, name, op, result, bands=[Band(result[0].numel())], run=run)

    def gdn(self, place: Place, name: str, op: str, args: tuple[Any, ...], result: Any) -> None:
        self.keep(place, name, op, result, bands=[Band(result[0].numel())], run=args[8])

    def rope(self, place: Place, name: str, op: str, args: tuple[Any, ...], result: Any) -> None:
        for part, x, repeat in (("q", result[0], 1), ("k", result[1], self._kv_repeat)):
            self.keep(place, f"{name}.{part}", op, x, bands=[Band(x[0].numel(), repeat)])

    def route(self, place: Place, name: str, op: str, args: tuple[Any, ...], result: Any) -> None:
        """Record the weight of every expert, chosen or not: equal choices in another order are equal."""
        ids, weights = result
        dense = torch.zeros(args[0].shape, device=weights.device)
        self.keep(place, name, op, dense.scatter_(-1, ids.long(), weights))

    def add_norm(self, place: Place, name: str, op: str, args: tuple[Any, ...], result: Any) -> None:
        self.keep(place, f"{name}.stream", op, args[1])
        self.keep(place, name, op, result)

    def gate(self, place: Place, name: str, op: str, args: tuple[Any, ...], result: Any) -> None:
        """Record an output gate: of the heads of this rank, or of a shared expert's addend."""
        bands = () if place.module == "mlp" else [Band(result[0].numel())]
        self.keep(place, name, op, result, bands=bands, addend=place.module == "mlp")

    def nothing(self, place: Place, name: str, op: str, args: tuple[Any, ...], result: Any) -> None:
        """`kv_write` returns the pages: they are recorded as attention reads them. FP8 rows are as they are sent."""


_SPECIAL: dict[str, Callable[..., None]] = {
    "kv_write": Taps.nothing,
    "quantise_rows": Taps.nothing,
    "attention_prefill": Taps.attention,
    "attention_decode": Taps.attention,
    "gdn_chunk": Taps.gdn,
    "gdn_decode": Taps.gdn,
    "qk_norm_rope": Taps.rope,
    "moe_route": Taps.route,
    "add_rms_norm": Taps.add_norm,
    "sigmoid_mul": Taps.gate,
    "silu_mul": Taps.whole_band,
    "gated_rms_norm": Taps.whole_band,
}
