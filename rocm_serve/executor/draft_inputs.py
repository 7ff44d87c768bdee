"""What a step of fixed size reads when a server drafts: where each array lies, and how a plan fills it.

Letters: B sequences of a size, K drafts of each at most (0: plain steps), T rows (N padded to the row multiple),
N = B (K + 1) rows, R = D = B K replayed rows and drafts, X = 2 K places after the newest token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from rocm_serve.executor.inputs import Request
from rocm_serve.executor.step_rows import padded
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
    live, drafting = len(works), to.draft_keys_BX.shape[1] > 0
    tokens: list[int] = []
    positions: list[int] = []
    sequence: list[int] = []
    starts = [0]
    for b, (work, request) in enumerate(zip(works, requests, strict=True)):
        tokens.append(request.output[-1])
        tokens += work.drafts
        positions += range(work.start, work.start + work.num_rows)
        sequence += (b,) * work.num_rows
        starts.append(len(tokens))
    n = starts[-1]
    to.token_ids_T[:n], to.positions_T[:n] = tokens, positions
    positions_N = to.positions_T[:n]
    to.kv_index_N[:n] = pages_BP[sequence, positions_N // page_size]
    to.kv_index_N[:n] *= page_size
    to.kv_index_N[:n] += positions_N % page_size
    to.contexts_B[:live] = [work.start for work in works]
    to.slots_B[:live] = [work.slot for work in works]
    to.live_rows_1[0], to.live_sequences_1[0] = n, live
    if any([request.params.temperature for request in requests]):  # noqa: C419 - twice as fast
        _draws(to, requests, positions_N, sequence)
    if drafting:
        to.row_starts_B1[: live + 1] = starts
        to.row_starts_B1[live + 1 :] = n
        to.proposals_B[:live] = [work.proposals for work in works]
        _replays(to, works, starts)


def _draws(to: Fields[Array], requests: Sequence[Request], positions_N: Array, sequence: Sequence[int]) -> None:
    live, n = len(requests), len(sequence)
    temperature_B = np.array([request.params.temperature for request in requests], dtype=np.float32)
    streams_B = np.array([request.sample.stream for request in requests], dtype=np.uint64)
    to.draft_temperature_B[:live] = temperature_B
    to.temperature_N[:n] = temperature_B[sequence]
    to.keys_N[:n] = rng.row_keys(streams_B[sequence], positions_N.astype(np.uint64) + np.uint64(1))
    after_BX = to.contexts_B[:live, None].astype(np.uint64) + np.arange(
        2, 2 + to.draft_keys_BX.shape[1], dtype=np.uint64
    )
    keys = rng.row_keys(np.repeat(streams_B, after_BX.shape[1]), after_BX.reshape(-1))
    to.draft_keys_BX[:live] = keys.reshape(after_BX.shape)


def _replays(to: Fields[Array], works: Sequence[Work], starts: Sequence[int]) -> None:
    """Lay out the extended rows, as ops/replay.py does; what is left over of each kind stands behind them."""
    live, ahead = len(works), to.draft_keys_BX.shape[1] // 2
    own: list[int] = []
    replayed: list[int] = []
    sources: list[int] = []
    drafts: list[int] = []
    targets: list[int] = []
    extended = [0]
    for work, start in zip(works, starts, strict=False):
        at, first, pending, tried = extended[-1], work.slot * ahead, work.accepted, len(work.drafts)
        replayed += range(at, at + pending)
        sources += range(first, first + pending)
        own += range(at + pending, at + pending + work.num_rows)
        drafts += range(start + 1, start + 1 + tried)
        targets += range(first, first + tried)
        extended.append(at + pending + work.num_rows)
    own += range(extended[-1], extended[-1] + len(to.own_N) - len(own))
    replayed += range(own[-1] + 1, own[-1] + 1 + len(to.replayed_R) - len(replayed))
    to.own_N[:], to.replayed_R[:] = own, replayed
    to.sources_R[: len(sources)] = sources
    to.drafts_D[: len(drafts)], to.targets_D[: len(targets)] = drafts, targets
    to.extended_B1[: live + 1] = extended
    to.extended_B1[live + 1 :] = extended[-1]
    to.extended_contexts_B[:live] = [work.start - work.accepted for work in works]
    to.commits_B[:live] = [work.accepted + 1 for work in works]
