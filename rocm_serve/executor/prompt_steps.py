"""Steps with prompt rows, alone or beside requests that decode: a few sizes, captured where that is possible.

Rows of prompts are padded to the next size, decoding requests to the next number of them, by rows and sequences that
leave no trace: on the dummy slot, their keys not written. Experts do not see those of prompts; those of decoding
requests go through them for nothing. Inputs lie in memory that never moves; captured or not, the same code runs on the
same shapes. What a step draws is drawn from its rows outside.

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

import torch

from rocm_serve.errors import UserError
from rocm_serve.executor.decode import DecodedModel
from rocm_serve.executor.graphs import Recorder
from rocm_serve.executor.step_rows import padded
from rocm_serve.messages import Plan, Work
from rocm_serve.ops.batch import ForwardBatch, Sequences, StageCache
from rocm_serve.ops.tiles_prefill import KEY_UNIT, KEYS_AT_A_TIME


@dataclass(slots=True)
class _Size:
    """Decoding sequences, prompts and their rows of a size, and its captured step once there is one."""

    decodes: int
    prompts: int
    rows: int
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
        kinds = [(d, 1) for d in decodes] + [(decodes[-1], prompts)] * (prompts > 1)
        self._at = {(*kind, r): _Size(*kind, r) for kind, r in product(kinds, rows)}
        many, sequences = padded(decodes[-1] + rows[-1], row_multiple), decodes[-1] + prompts
        self._tokens_T, self._positions_T, self._kv_index_T = torch.zeros((3, many), dtype=torch.int64, device=device)
        self._starts = {
            kind: torch.arange(sum(kind) + 1, dtype=torch.int32, device=device) for kind in kinds
        }  # [B + 1]
        self._contexts_B, self._slots_B = torch.zeros((2, sequences), dtype=torch.int32, device=device)
        pages = -(-max_model_len // cache.page_size)
        self._pages_BP = torch.zeros((sequences, pages), dtype=torch.int32, device=device)
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

    def forward(self, batch: ForwardBatch, hidden_TH: torch.Tensor | None) -> torch.Tensor:
        """Return the residual stream as the model's `forward` does: the same rows. Waits for nothing."""
        decodes = batch.sequences.num_recurrent
        rows = batch.num_rows - decodes
        several = batch.sequences.num_sequences > decodes + 1
        kind = (self._decodes[-1], self._prompts) if several else (self._size(self._decodes, decodes), 1)
        at = self._at[*kind, self._size(self._rows, rows)]
        self._fill(at, batch, hidden_TH)
        left_TH = self._forward(at) if at.replay is None or not self.replays else at.replay()
        out_TH = left_TH.new_empty(len(batch.token_ids_T), left_TH.shape[1])
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

    def _blank(self, at: _Size) -> None:
        """Make all of a step padding: its first prompt is one row of the dummy slot, whose key is not written."""
        self._kv_index_T.fill_(-1)
        for zeros in (self._tokens_T, self._positions_T, self._contexts_B, self._slots_B, self._pages_BP):
            zeros.zero_()
        self._starts_of(at)[at.decodes + 1 :].fill_(at.decodes + 1)

    def _starts_of(self, at: _Size) -> torch.Tensor:
        return self._starts[at.decodes, at.prompts]

    def _fill(self, at: _Size, batch: ForwardBatch, hidden_TH: torch.Tensor | None) -> None:
        """Bring a step's inputs to their places, all on the device; what is beyond its requests is padding."""
        sequences = batch.sequences
        d, n, b = sequences.num_recurrent, batch.num_rows, sequences.num_sequences
        ends, prompts_end = at.decodes + n - d, at.decodes + b - d
        pairs = [
            (self._tokens_T, batch.token_ids_T),
            (self._positions_T, batch.positions_T),
            (self._kv_index_T, batch.kv_index_N),
        ]
        if hidden_TH is not None:
            assert self._hidden_TH is not None
            pairs.append((self._hidden_TH, hidden_TH))
        for into, out_of in pairs:
            into[at.decodes : ends].copy_(out_of[d:n])
            if d:
                into[:d].copy_(out_of[:d])
        self._kv_index_T[ends : at.decodes + at.rows].fill_(-1)
        width = sequences.page_table_BP.shape[1]
        pairs = [(self._contexts_B, sequences.contexts_B), (self._slots_B, sequences.slots_B)]
        for into, out_of in [*pairs, (self._pages_BP[:, :width], sequences.page_table_BP)]:
            into[at.decodes : prompts_end].copy_(out_of[d:b])
            if d:
                into[:d].copy_(out_of[:d])
            if d < at.decodes:
                into[d : at.decodes].zero_()
            if prompts_end < at.decodes + at.prompts:
                into[prompts_end : at.decodes + at.prompts].zero_()
        if d < at.decodes:
            self._kv_index_T[d : at.decodes].fill_(-1)
        starts_B1 = self._starts_of(at)
        torch.add(sequences.row_starts_B1[d + 1 :], at.decodes - d, out=starts_B1[at.decodes + 1 : prompts_end + 1])
        if prompts_end < at.decodes + at.prompts:
            starts_B1[prompts_end + 1 :].copy_(starts_B1[prompts_end].expand(at.prompts - (b - d)))

    def _forward(self, at: _Size) -> torch.Tensor:
        """Compute a step from the static inputs alone. This is what is captured."""
        d, many, rows = at.decodes, at.decodes + at.prompts, padded(at.decodes + at.rows, self._multiple)
        starts_B1, contexts_B, slots_B = self._starts_of(at), self._contexts_B[:many], self._slots_B[:many]
        keys = self._longest if at.prompts == 1 else self._keys
        longest = (self._longest - 1,) * d + (max(0, keys - at.rows),) + (0,) * (at.prompts - 1)
        copy = self._recorder.host_copy
        sequences = Sequences(
            row_starts=copy(starts_B1, (*range(d + 1), *(d + at.rows,) * at.prompts)),
            contexts=copy(contexts_B, longest),
            slots=copy(slots_B, (0,) * many),
            num_recurrent=d,
            row_starts_B1=starts_B1,
            contexts_B=contexts_B,
            slots_B=slots_B,
            page_table_BP=self._pages_BP[:many],
            shared=at.prompts > 1,
        )
        given = self._tokens_T[:rows], self._positions_T[:rows], self._kv_index_T[: sequences.num_rows]
        batch = ForwardBatch(*given, sequences, self._cache, live_rows=starts_B1[-1:])
        return self._model.forward(batch, None if self._hidden_TH is None else self._hidden_TH[:rows])
