"""Steps with prompt rows, alone or beside requests that decode: a few sizes, captured where that is possible.

Rows of prompts are padded to the next size, decoding requests to the next number of them, by rows and sequences that
leave no trace: on the dummy slot, their keys not written. Experts do not see those of prompts; those of decoding
requests go through them for nothing. Inputs lie in memory that never moves, and come there in one transfer, or in two
where tokens are pending; captured or not, the same code runs on the same shapes. What a step draws is drawn from its
rows outside.

A step with one prompt has sizes of its own: the host knows where the prompt begins and ends, and kernels have a grid
for it. Several share the rows of a size as the device knows it, up to a number of prompts; those too many have no row.
They have room for the most decoding requests, always: half as many graphs.

Letters: D decoding sequences of a size, P its prompts, R their rows, T = D + R rows, B = D + P sequences, H width.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch

from rocm_serve.errors import UserError
from rocm_serve.executor.decode import DecodedModel
from rocm_serve.executor.graphs import Recorder
from rocm_serve.executor.inputs import HostRows, take_newest
from rocm_serve.executor.step_rows import padded
from rocm_serve.executor.upload import Array, Upload, offsets, views_of
from rocm_serve.messages import Plan, Work
from rocm_serve.ops.batch import ForwardBatch, Sequences, StageCache
from rocm_serve.ops.tiles_prefill import KEY_UNIT, KEYS_AT_A_TIME


@dataclass(slots=True)
class _Size:
    """Decoding sequences, prompts and their rows of a size, views of the static inputs, and its captured step."""

    decodes: int
    prompts: int
    rows: int
    table_start: int  # where the page table lies among the bytes that arrive
    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    kv_index_N: torch.Tensor
    starts_B1: torch.Tensor
    contexts_B: torch.Tensor
    slots_B: torch.Tensor
    replay: Callable[[], torch.Tensor] | None = None


class PromptSteps:
    """Runs such steps of one stage, up to the rows that it leaves.

    `decodes` and `rows`: sizes, ascending; `prompts`: the most in a step, whose keys attention can copy at one time
    where they are several. `captured`: whether `capture` records all sizes. `replays`: turn it off, and steps run
    without their graphs.
    """

    def __init__(
        self,
        model: DecodedModel,
        cache: StageCache,
        *,
        decodes: Sequence[int],
        rows: Sequence[int],
        prompts: int = 1,
        captured: bool,
        recorder: Recorder,
        max_model_len: int,
        hidden_size: int | None,
        dtype: torch.dtype,
        device: torch.device,
        row_multiple: int,
    ) -> None:
        """`hidden_size`: of the rows that come from the stage before; None where this one embeds tokens."""
        assert list(decodes) == sorted(set(decodes)) and list(rows) == sorted(set(rows)) and rows[0] > 0
        self.replays = True
        self._model, self._cache, self._recorder = model, cache, recorder
        self._decodes, self._rows, self._captured = tuple(decodes), tuple(rows), captured
        self._longest, self._multiple = max_model_len, row_multiple
        self._prompts, self._keys = prompts, min(KEYS_AT_A_TIME, prompts * padded(max_model_len, KEY_UNIT))
        self._upload = Upload(device)
        kinds = [(d, 1) for d in decodes] + [(decodes[-1], prompts)] * (prompts > 1)
        sizes = [(*kind, r) for kind, r in product(kinds, rows)]
        many, sequences = padded(decodes[-1] + rows[-1], row_multiple), decodes[-1] + prompts
        pages = -(-max_model_len // cache.page_size)
        self._pages_BP = torch.zeros((sequences, pages), dtype=torch.int32, device=device)
        fixed = max(offsets([x.nbytes for x in self._empty(*size)])[-1] for size in sizes)
        end = offsets([fixed, self._pages_BP.nbytes])[-1]
        self._inputs = torch.zeros(end, dtype=torch.uint8, device=device)
        self._at = {size: self._views(*size) for size in sizes}
        self._hidden_TH = None
        if hidden_size is not None:
            self._hidden_TH = torch.zeros((many, hidden_size), dtype=dtype, device=device)

    def takes(self, plan: Plan) -> bool:
        """Say whether the plan is such a step, of a size that there is. Plan and sizes alone decide."""
        works = plan.work
        decodes = sum([work.recurrent for work in works])  # they come first
        prompts = works[decodes:]
        return (
            1 <= len(prompts) <= self._prompts
            and decodes <= self._decodes[-1]
            and sum([work.num_rows for work in prompts]) <= self._rows[-1]
            and not any([work.num_rows > 1 or work.accepted for work in works[:decodes]])  # noqa: C419
            and (len(prompts) == 1 or self._keys_of(prompts) <= self._keys)
        )

    @staticmethod
    def _keys_of(prompts: Sequence[Work]) -> int:
        """Return how many keys attention copies for the prompts."""
        return sum(padded(work.start + work.num_rows, KEY_UNIT) for work in prompts)

    def forward(
        self, given: HostRows, hidden_TH: torch.Tensor | None, newest_S: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the residual stream as the model's `forward` does: the same rows. Waits for nothing.

        `newest_S`: see `build_inputs`.
        """
        decodes = given.recurrent
        rows = given.num_rows - decodes
        several = len(given.slots) > decodes + 1
        kind = (self._decodes[-1], self._prompts) if several else (self._size(self._decodes, decodes), 1)
        at = self._at[*kind, self._size(self._rows, rows)]
        self._fill(at, given, hidden_TH, newest_S)
        left_TH = self._forward(at) if at.replay is None or not self.replays else at.replay()
        out_TH = left_TH.new_empty(len(given.tokens_T), left_TH.shape[1])
        out_TH[:decodes] = left_TH[:decodes]
        out_TH[decodes : decodes + rows] = left_TH[at.decodes : at.decodes + rows]
        out_TH[decodes + rows :] = 0
        return out_TH

    @torch.inference_mode()
    def capture(self, moved: Callable[[int], None]) -> int:
        """Record all sizes, the largest first: smaller ones find room in its memory. Returns the rows of the largest.

        Where steps are not captured each runs once, so that its kernels are compiled before requests come; 0 then.
        `moved` is told the rows of each that is done. Every rank of a stage calls it: both run the collectives.
        Errors: UserError where the device refuses.
        """
        for at in sorted(self._at.values(), key=lambda at: -at.rows - at.decodes):
            self._blank(at)
            if not self._captured:
                self._forward(at)
                moved(at.rows)
                continue
            try:
                at.replay = self._recorder.record(partial(self._forward, at))
            except RuntimeError as error:
                first = str(error).partition("\n")[0]
                raise UserError(
                    f"steps of {at.rows} prompt rows cannot be captured as a device graph: {first};"
                    " --graph-max-batch 0 serves without"
                ) from error
            moved(at.rows)
        return self._rows[-1] if self._captured else 0

    @staticmethod
    def _size(sizes: Sequence[int], count: int) -> int:
        return sizes[bisect_left(sizes, count)]

    def _empty(self, decodes: int, prompts: int, rows: int) -> list[Array]:
        """Return the inputs of a step that is all padding, in the order of `_Size`.

        Its first prompt is one row of the dummy slot, whose key is not written.
        """
        many, padded_rows = decodes + prompts, padded(decodes + rows, self._multiple)
        return [
            np.zeros(padded_rows, dtype=np.int64),
            np.zeros(padded_rows, dtype=np.int64),
            np.full(decodes + rows, -1, dtype=np.int64),
            np.minimum(np.arange(many + 1, dtype=np.int32), decodes + 1),
            np.zeros(many, dtype=np.int32),
            np.zeros(many, dtype=np.int32),
        ]

    def _views(self, decodes: int, prompts: int, rows: int) -> _Size:
        empty = self._empty(decodes, prompts, rows)
        end = offsets([array.nbytes for array in empty])[-1]
        return _Size(decodes, prompts, rows, end, *views_of(self._inputs, empty))

    def _blank(self, at: _Size) -> None:
        self._upload.into(self._inputs, self._empty(at.decodes, at.prompts, at.rows))
        self._pages_BP.zero_()

    def _fill(self, at: _Size, given: HostRows, hidden_TH: torch.Tensor | None, newest_S: torch.Tensor | None) -> None:
        """Bring a step's inputs to their places; what is beyond its requests is padding."""
        arrays = self._empty(at.decodes, at.prompts, at.rows)
        tokens_T, positions_T, kv_index_N, starts_B1, contexts_B, slots_B = arrays
        d, n, b = given.recurrent, given.num_rows, len(given.slots)
        skipped = at.decodes - d  # rows and sequences between those that decode and the prompts
        for into, out_of in (
            (tokens_T, given.tokens_T),
            (positions_T, given.positions_T),
            (kv_index_N, given.kv_index_N),
        ):
            into[:d], into[at.decodes : n + skipped] = out_of[:d], out_of[d:n]
        for into, out_of in ((contexts_B, given.contexts), (slots_B, given.slots)):
            into[:d], into[at.decodes : b + skipped] = out_of[:d], out_of[d:]
        starts_B1[at.decodes + 1 : b + skipped + 1] = given.starts[d + 1 :]
        starts_B1[at.decodes + 1 : b + skipped + 1] += skipped
        starts_B1[b + skipped + 1 :] = n + skipped
        self._upload.into(self._inputs, [*arrays, given.pages_BP])
        self._place_pages(at, d, given.pages_BP)
        assert all(row < d for row, _ in given.pending), "a token is pending before rows of a prompt"
        take_newest(at.tokens_T, newest_S, given.pending, self._upload)
        if hidden_TH is not None:
            assert self._hidden_TH is not None
            self._hidden_TH[:d].copy_(hidden_TH[:d])
            self._hidden_TH[at.decodes : n + skipped].copy_(hidden_TH[d:n])

    def _place_pages(self, at: _Size, decodes: int, pages_BP: Array) -> None:
        """Copy the pages that have arrived to the table's rows; those of padding name the first page."""
        count, width = pages_BP.shape
        arrived = self._inputs[at.table_start : at.table_start + pages_BP.nbytes].view(torch.int32).view(count, width)
        ends = count + at.decodes - decodes
        table = self._pages_BP[: at.decodes + at.prompts, :width]
        for into, out_of in ((table[:decodes], arrived[:decodes]), (table[at.decodes : ends], arrived[decodes:])):
            if len(into):
                into.copy_(out_of)
        for padding in (table[decodes : at.decodes], table[ends:]):
            if len(padding):
                padding.zero_()

    def _forward(self, at: _Size) -> torch.Tensor:
        """Compute a step from the static inputs alone. This is what is captured."""
        d, many = at.decodes, at.decodes + at.prompts
        keys = self._longest if at.prompts == 1 else self._keys
        longest = (self._longest - 1,) * d + (max(0, keys - at.rows),) + (0,) * (at.prompts - 1)
        copy = self._recorder.host_copy
        sequences = Sequences(
            row_starts=copy(at.starts_B1, (*range(d + 1), *(d + at.rows,) * at.prompts)),
            contexts=copy(at.contexts_B, longest),
            slots=copy(at.slots_B, (0,) * many),
            num_recurrent=d,
            row_starts_B1=at.starts_B1,
            contexts_B=at.contexts_B,
            slots_B=at.slots_B,
            page_table_BP=self._pages_BP[:many],
            shared=at.prompts > 1,
        )
        given = at.tokens_T, at.positions_T, at.kv_index_N[: sequences.num_rows]
        batch = ForwardBatch(*given, sequences, self._cache, live_rows=at.starts_B1[-1:])
        rows = len(at.tokens_T)
        return self._model.forward(batch, None if self._hidden_TH is None else self._hidden_TH[:rows])
