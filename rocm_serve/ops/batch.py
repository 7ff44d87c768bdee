"""What a step looks like to layers and ops: rows of several sequences, laid one after the other.

Letters: T rows in the batch (padded), N real rows, B sequences with rows in this step, P pages of a table.
Sequences whose rows are past their prompt (recurrent) come first, those with prompt rows after them.
Host copies (tuples of int) stand beside the device tensors: the CPU reference walks them, GPU kernels read tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Sequences:
    """The B sequences of one step, or a contiguous run of them."""

    row_starts: tuple[int, ...]  # B + 1 entries: sequence b owns rows [row_starts[b], row_starts[b + 1])
    contexts: tuple[int, ...]  # B entries: tokens already cached before its first row (= that row's position)
    slots: tuple[int, ...]  # B entries: GDN state slot, 1-based; 0 is the dummy
    num_recurrent: int  # the first `num_recurrent` sequences are past their prompt
    row_starts_B1: torch.Tensor  # int32, same values on the device
    contexts_B: torch.Tensor  # int32
    slots_B: torch.Tensor  # int32
    page_table_BP: torch.Tensor  # int32, page ids of each sequence, rest undefined
    # B entries, 0 <= commit <= rows: the rows after which a sequence's recurrent states are kept; those behind them run
    # on a copy. None: all rows. Ops without recurrent states read neither.
    commits: tuple[int, ...] | None = None
    commits_B: torch.Tensor | None = None  # int32
    # A step of fixed size with several prompts: how they share its rows and keys only the device knows. On the host the
    # first prompt has as many of both as all may have together, the others have none.
    shared: bool = False

    @property
    def num_sequences(self) -> int:
        return len(self.contexts)

    @property
    def num_rows(self) -> int:
        return self.row_starts[-1]

    @property
    def num_recurrent_rows(self) -> int:
        return self.row_starts[self.num_recurrent]

    @property
    def rows(self) -> slice:
        """Return the rows of the batch that these sequences own."""
        return slice(self.row_starts[0], self.row_starts[-1])

    def run(self, start: int, stop: int) -> Sequences:
        """Return sequences [start, stop); rows keep their numbers in the batch."""
        assert 0 <= start <= stop <= self.num_sequences
        shared = self.shared and stop > self.num_recurrent
        assert not shared or (start <= self.num_recurrent and stop == self.num_sequences), "what is shared is not cut"
        return Sequences(
            row_starts=self.row_starts[start : stop + 1],
            contexts=self.contexts[start:stop],
            slots=self.slots[start:stop],
            num_recurrent=min(max(self.num_recurrent - start, 0), stop - start),
            row_starts_B1=self.row_starts_B1[start : stop + 1],
            contexts_B=self.contexts_B[start:stop],
            slots_B=self.slots_B[start:stop],
            page_table_BP=self.page_table_BP[start:stop],
            commits=None if self.commits is None else self.commits[start:stop],
            commits_B=None if self.commits_B is None else self.commits_B[start:stop],
            shared=shared,
        )

    @property
    def recurrent(self) -> Sequences:
        """Return the sequences past their prompt."""
        return self.run(0, self.num_recurrent)

    @property
    def prompt(self) -> Sequences:
        """Return the sequences with prompt rows in this step."""
        return self.run(self.num_recurrent, self.num_sequences)


@dataclass(frozen=True, slots=True)
class Replay:
    """How the recurrent sequences of a step with drafts run through layers that keep a state; see ops/replay.py.

    E extended rows: for each sequence its accepted drafts of the step before, then its own rows. The states are kept
    after its known rows; the R replayed rows and the N own rows fill E between them, D of the own ones are drafts.
    """

    sequences: Sequences  # the recurrent ones over the extended rows, with `commits`
    own_N: torch.Tensor  # int64: where rows 0..N of the batch stand among the extended ones
    replayed_R: torch.Tensor  # int64: where replayed rows stand among the extended ones
    sources_R: torch.Tensor  # int64: slot * K + i, where they are pending
    drafts_D: torch.Tensor  # int64: rows of the batch that are drafts
    targets_D: torch.Tensor  # int64: slot * K + i, where they are to be pending

    @property
    def num_rows(self) -> int:
        """Return E. In a step of fixed size the sequences may have fewer: those behind them are padding."""
        return len(self.own_N) + len(self.replayed_R)


@dataclass(slots=True)
class StageCache:
    """This stage's device state. Keys are global layer indices (the draft layer uses its own key, -1).

    KV: NHD pages [pages, page_size, kv_heads_local, head_dim]. Conv: the last three pre-conv rows,
    [slots + 1, 3, channels_local], oldest first. SSM: fp32, V-major [slots + 1, Hv_local, dv, dk].
    Pending, with K draft tokens a step: what a slot's last drafts brought to the layer, pre-conv rows
    [slots + 1, K, channels_local] and the projection b, a [slots + 1, K, 2 Hv_local]; without drafts there are none.
    `by_slot`: the same memory as what slots hold, a kind's layers in one tensor or a few, [layers, slots + 1, words].
    """

    page_size: int
    k_pages: dict[int, torch.Tensor]
    v_pages: dict[int, torch.Tensor]
    conv: dict[int, torch.Tensor]
    ssm: dict[int, torch.Tensor]
    pending_u: dict[int, torch.Tensor] = field(default_factory=dict)
    pending_ba: dict[int, torch.Tensor] = field(default_factory=dict)
    draft_tokens: int = 0  # K
    by_slot: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step as the model sees it. Rows N..T are padding: token 0, position 0, ignored by every sequence op.

    A decode batch of fixed size has more padding among the N: sequences of one row on the dummy slot, at position 0,
    with a negative `kv_index`, which is not written. `live_rows` then says how many of the first rows are requests'.
    """

    token_ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64
    kv_index_N: torch.Tensor  # int64: page * page_size + offset where each real row's K and V go
    sequences: Sequences
    cache: StageCache
    replay: Replay | None = None  # None: no sequence has drafts in this step or had any accepted in its last one
    live_rows: torch.Tensor | None = None  # int32 [1]; None: all N

    @property
    def num_rows(self) -> int:
        return self.sequences.num_rows

    @property
    def rows_of_requests(self) -> int | torch.Tensor:
        """Return how many rows are no padding, as the host or else the device knows it."""
        return self.num_rows if self.live_rows is None else self.live_rows
