"""Steps with drafts: which rows run again, which are known, which are only tried.

A slot's committed states (convolution window, recurrent state) are those after the request's last known row. Drafts run
from there without being committed, and what they bring to each layer stays pending with the slot. When the next step
tells how many of them were accepted, these run first, by the same arithmetic: the same bits as if each had been decoded
in a step of its own. Rejected ones leave nothing behind. Why not a state after each row: docs/decisions/0010.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rocm_serve.ops.batch import Replay, Sequences


def replay_of(sequences: Sequences, accepted: Sequence[int], drafts: Sequence[int], draft_tokens: int) -> Replay | None:
    """Lay out the recurrent sequences of a step; None when no draft is to be replayed or tried: a plain step.

    By sequence of the batch: `accepted` pending drafts of its last step, and how many of its rows now, the last ones,
    are `drafts`. Both are at most `draft_tokens`, and 0 in prompts; a sequence has a known row before its drafts.
    """
    if not any(accepted) and not any(drafts):
        return None
    count, starts, width = sequences.num_recurrent, sequences.row_starts, draft_tokens
    assert len(accepted) == len(drafts) == sequences.num_sequences, "one number for each sequence"
    assert not any(accepted[count:]) and not any(drafts[count:]), "prompts have no drafts"
    own: list[int] = []
    replayed: list[int] = []
    sources: list[int] = []
    tried: list[int] = []
    targets: list[int] = []
    extended, commits = [0], []
    for b in range(count):
        m, d, slot = accepted[b], drafts[b], sequences.slots[b]
        rows, at = starts[b + 1] - starts[b], extended[b]
        assert 0 <= m <= width and 0 <= d <= width and d < rows, f"{m} accepted, {d} of {rows} rows drafts, K {width}"
        replayed += range(at, at + m)
        sources += range(slot * width, slot * width + m)
        own += range(at + m, at + m + rows)
        tried += range(starts[b + 1] - d, starts[b + 1])
        targets += range(slot * width, slot * width + d)
        extended.append(at + m + rows)
        commits.append(m + rows - d)

    device = sequences.slots_B.device
    indices = (own, replayed, sources, tried, targets)
    on_device = torch.tensor([i for some in indices for i in some], dtype=torch.int64).to(device)  # one transfer
    own_N, replayed_R, sources_R, drafts_D, targets_D = on_device.split([len(some) for some in indices])
    contexts = [c - m for c, m in zip(sequences.contexts[:count], accepted[:count], strict=True)]
    small = torch.tensor([*extended, *commits, *contexts], dtype=torch.int32).to(device)
    row_starts_B1, commits_B, contexts_B = small.split([count + 1, count, count])
    run = Sequences(
        row_starts=tuple(extended),
        contexts=tuple(contexts),
        slots=sequences.slots[:count],
        num_recurrent=count,
        row_starts_B1=row_starts_B1,
        contexts_B=contexts_B,
        slots_B=sequences.slots_B[:count],
        page_table_BP=sequences.page_table_BP[:count],
        commits=tuple(commits),
        commits_B=commits_B,
    )
    return Replay(run, own_N, replayed_R, sources_R, drafts_D, targets_D)


def extended(x_TC: torch.Tensor, pending: torch.Tensor, replay: Replay) -> torch.Tensor:
    """Return the extended rows [E, C]: pending ones [slots + 1, K, C] beside the batch's own [T, C]."""
    channels = x_TC.shape[1]
    x_EC = x_TC.new_empty((replay.num_rows, channels))
    x_EC[replay.own_N] = x_TC[: len(replay.own_N)]
    x_EC[replay.replayed_R] = pending.view(-1, channels)[replay.sources_R]
    return x_EC


def keep_drafts(x_TC: torch.Tensor, pending: torch.Tensor, replay: Replay) -> None:
    """Write what the drafts of this step brought to the pending rows of their slots."""
    pending.view(-1, x_TC.shape[1])[replay.targets_D] = x_TC[replay.drafts_D]
