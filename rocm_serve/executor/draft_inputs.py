"""What a step of fixed size reads when a server drafts: where each array lies, and how a plan fills it.

Letters: B sequences of a size, K drafts of each at most (0: plain steps), T rows (N padded to the row multiple),
N = B (K + 1) rows, R = D = B K replayed rows and drafts, X = 2 K places after the newest token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from rocm_serve.executor.inputs import Request
from rocm_serve.executor.memory import padded
from rocm_serve.executor.upload import Array
from rocm_serve.messages import Work
from rocm_serve.ops.sampling import rng

A = TypeVar("A")


class Fields(NamedTuple, Generic[A]):
    """The inputs of a step, as arrays of the host or as tensors on the device.

    Rows lie one after the other, those of padding at the end; of the extended rows (ops/replay.py) too. Keys are those
    of the token after a row; draft key x is that of the token at place x after the token that follows the newest one.
    """

    token_ids_T: A
    positions_T: A
    kv_index_N: A
    keys_N: A
    draft_keys_BX: A
    own_N: A
    replayed_R: A
    sources_R: A
    drafts_D: A
    targets_D: A
    temperature_N: A
    draft_temperature_B: A
    row_starts_B1: A
    contexts_B: A
    slots_B: A
    proposals_B: A
    extended_B1: A
    extended_contexts_B: A
    commits_B: A
    live_rows_1: A
    live_sequences_1: A


def blank(size: int, ahead: int, multiple: int) -> Fields[Array]:
    """Return the inputs of a step without requests.

    Sequences of padding have a row each on the dummy slot in plain steps, none in steps with drafts.
    """
    n, r, width = size * (ahead + 1), size * ahead, padded(size * (ahead + 1), multiple)

    def of(dtype: type[np.generic], *shape: int) -> Array:
        return np.zeros(shape, dtype=dtype)

    i64, i32, f32 = np.int64, np.int32, np.float32
    starts_B1 = of(i32, size + 1) if ahead else np.arange(size + 1, dtype=i32)
    return Fields(
        *(of(i64, width), of(i64, width), np.full(n, -1, dtype=i64), of(i64, n), of(i64, size, 2 * ahead)),
        *(np.arange(n, dtype=i64), np.arange(n, n + r, dtype=i64), of(i64, r), of(i64, r)),
        np.tile(np.arange(ahead, dtype=i64), size),  # the dummy slot's
        *(of(f32, n), of(f32, size), starts_B1, of(i32, size), of(i32, size), of(i32, size)),
        *(of(i32, size + 1), of(i32, size), of(i32, size), of(i32, 1), of(i32, 1)),
    )


def filled(
    to: Fields[Array], works: Sequence[Work], requests: Sequence[Request], pages_BP: Array, page_size: int
) -> None:
    """Write a plan's requests to the inputs of a step without any. `pages_BP`: of the works."""
    live, ahead = len(works), to.draft_keys_BX.shape[1] // 2
    counts_B = np.array([work.num_rows for work in works])
    starts_B1 = np.concatenate(([0], counts_B.cumsum()))
    n = starts_B1[-1]
    contexts_B = np.array([work.start for work in works])
    sequence_N = np.repeat(np.arange(live), counts_B)
    place_N = np.arange(n) - starts_B1[:-1][sequence_N]
    positions_N = contexts_B[sequence_N] + place_N
    page_N, offset_N = np.divmod(positions_N, page_size)
    both = zip(works, requests, strict=True)
    to.token_ids_T[:n] = [token for work, request in both for token in (request.output[-1], *work.drafts)]
    to.positions_T[:n] = positions_N
    to.kv_index_N[:n] = pages_BP[sequence_N, page_N].astype(np.int64) * page_size + offset_N
    to.row_starts_B1[: live + 1] = starts_B1
    if ahead:
        to.row_starts_B1[live + 1 :] = n
    to.contexts_B[:live] = contexts_B
    to.slots_B[:live] = [work.slot for work in works]
    to.proposals_B[:live] = [work.proposals for work in works]
    to.live_rows_1[0], to.live_sequences_1[0] = n, live
    _draws(to, requests, positions_N, sequence_N, contexts_B)
    if ahead:
        _replays(to, np.array([work.accepted for work in works]), counts_B, sequence_N, place_N)


def _draws(
    to: Fields[Array], requests: Sequence[Request], positions_N: Array, sequence_N: Array, contexts_B: Array
) -> None:
    """Write temperatures, and the keys where something is drawn."""
    temperature_B = np.array([request.params.temperature for request in requests], dtype=np.float32)
    if not temperature_B.any():
        return
    live, n = len(requests), len(positions_N)
    streams_B = np.array([request.sample.stream for request in requests], dtype=np.uint64)
    to.draft_temperature_B[:live] = temperature_B
    to.temperature_N[:n] = temperature_B[sequence_N]
    to.keys_N[:n] = rng.row_keys(streams_B[sequence_N], positions_N.astype(np.uint64) + np.uint64(1))
    after_BX = contexts_B[:, None] + 2 + np.arange(to.draft_keys_BX.shape[1])
    keys = rng.row_keys(np.repeat(streams_B, after_BX.shape[1]), after_BX.reshape(-1).astype(np.uint64))
    to.draft_keys_BX[:live] = keys.reshape(after_BX.shape)


def _replays(to: Fields[Array], accepted_B: Array, counts_B: Array, sequence_N: Array, place_N: Array) -> None:
    """Lay out the extended rows, as ops/replay.py does; what is left over of each kind stands behind them."""
    live, n, replayed = len(counts_B), len(sequence_N), int(accepted_B.sum())
    ahead = to.draft_keys_BX.shape[1] // 2
    slots_B = to.slots_B[:live].astype(np.int64)
    extended_B1 = np.concatenate(([0], (accepted_B + counts_B).cumsum()))
    to.extended_B1[: live + 1] = extended_B1
    to.extended_B1[live + 1 :] = extended_B1[-1]
    to.extended_contexts_B[:live] = to.contexts_B[:live] - accepted_B
    to.commits_B[:live] = accepted_B + 1
    to.own_N[:n] = (extended_B1[:-1] + accepted_B)[sequence_N] + place_N
    sequence_R = np.repeat(np.arange(live), accepted_B)
    place_R = np.arange(replayed) - (accepted_B.cumsum() - accepted_B)[sequence_R]
    to.replayed_R[:replayed] = extended_B1[:-1][sequence_R] + place_R
    to.sources_R[:replayed] = slots_B[sequence_R] * ahead + place_R
    behind = replayed + len(to.own_N)
    to.own_N[n:] = np.arange(n + replayed, behind)
    to.replayed_R[replayed:] = np.arange(behind, behind + len(to.replayed_R) - replayed)
    (drafts_D,) = place_N.nonzero()
    to.drafts_D[: len(drafts_D)] = drafts_D
    to.targets_D[: len(drafts_D)] = slots_B[sequence_N[drafts_D]] * ahead + place_N[drafts_D] - 1
