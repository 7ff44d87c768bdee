"""One rank's shard of the vocabulary, and log-probs over all shards: of given ids, and of the best ones beside them.

Letters: R rows, V ids of this shard, K best ids, S shards, H hidden size, F fields of a packet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from rocm_serve.executor.sample_rows import SamplingFailed
from rocm_serve.ops.contract import OpFunction
from rocm_serve.ops.rows import ROW_MULTIPLE, pad_rows
from rocm_serve.ops.sampling import reference
from rocm_serve.parallel.comm import Comm
from rocm_serve.types import TokenLogprob

SLICE_ROWS = 256  # rows of lm_head output held at once when a prompt is scored


class VocabShard:
    """One vocabulary shard of `comm.size` equal ones, which scores.

    `vocab_start` and `vocab_local` place this shard among the rows of lm_head; ids from `vocab_used` on are padding
    that no tokenizer knows: normalised over, never an alternative. `log_sum_exp` is the op of that name.
    """

    def __init__(
        self,
        comm: Comm,
        *,
        vocab_start: int,
        vocab_local: int,
        vocab_used: int,
        device: torch.device | str,
        log_sum_exp: OpFunction,
    ) -> None:
        assert vocab_start == comm.rank * vocab_local, "vocabulary shards are equal and in rank order"
        assert 0 < vocab_used <= vocab_local * comm.size
        self._comm = comm
        self._start = vocab_start
        self._width = vocab_local
        self._used = min(max(vocab_used - vocab_start, 0), vocab_local)
        self._device = torch.device(device)
        self._log_sum_exp = log_sum_exp

    def prompt_logprobs(
        self,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
        hidden_RH: torch.Tensor,
        targets: Sequence[int],
        ks: Sequence[int],
    ) -> list[TokenLogprob]:
        """Score `targets[i]` under the logits of hidden row i, with `ks[i]` alternatives; rows of any requests mixed.

        At most SLICE_ROWS x vocab_local logits exist at a time. `logits_of` is called with a multiple of ROW_MULTIPLE
        rows and returns this rank's shard in float32; every rank calls with the same targets.
        Errors: SamplingFailed when a logit is NaN or infinite.
        """
        scored: list[TokenLogprob] = []
        for start in range(0, len(targets), SLICE_ROWS):
            part = slice(start, min(start + SLICE_ROWS, len(targets)))
            logits_RV = self._rows_in_blocks(logits_of(pad_rows(hidden_RH[part])))
            scored += self._score(logits_RV, targets[part], ks[part], first_row=start)
        return scored

    def _score(
        self, raw_RV: torch.Tensor, targets: Sequence[int], ks: Sequence[int], first_row: int = 0
    ) -> list[TokenLogprob]:
        """Return log-probs of `targets` and of each row's best ids; raw_RV is padded to whole blocks."""
        k = max(ks)
        target_R1 = functional.pad(self._local(targets), (0, raw_RV.shape[0] - len(targets))).unsqueeze(-1)
        packets = [
            self._score_packet(raw_RV[start : start + ROW_MULTIPLE], target_R1[start : start + ROW_MULTIPLE], k)
            for start in range(0, raw_RV.shape[0], ROW_MULTIPLE)
        ]
        packet_SRF = self._comm.all_gather(torch.cat(packets))
        finite_R = packet_SRF[..., 0].amin(0)[: len(targets)] > 0
        if not bool(finite_R.all()):
            bad = [first_row + i for i, fine in enumerate(finite_R.tolist()) if not fine]
            raise SamplingFailed(f"logits of scored rows {bad} are not finite (NaN or infinity)")
        lse_R = reference.combine_log_sum_exp(packet_SRF[..., 1], packet_SRF[..., 2])
        own = (packet_SRF[..., 3].amax(0) - lse_R).tolist()
        values_RK, ids_RK = reference.top_of_all(packet_SRF[..., 4 : 4 + k], packet_SRF[..., 4 + k :].long(), k)
        best = (values_RK - lse_R.unsqueeze(-1)).tolist()
        ids = ids_RK.tolist()
        scored = []
        for i, (target, k_of_row) in enumerate(zip(targets, ks, strict=True)):
            count = min(k_of_row, sum(token >= 0 for token in ids[i]))
            scored.append(TokenLogprob(target, own[i], tuple(ids[i][:count]), tuple(best[i][:count])))
        return scored

    def _score_packet(self, raw_RV: torch.Tensor, target_R1: torch.Tensor, k: int) -> torch.Tensor:
        """Say of one block, in float64: finite?, maximum, sum, own logit, k best values, their ids.

        What this shard has not got is -inf, as an id -1.
        """
        max_R, sum_R = self._log_sum_exp(raw_RV)
        own_R1 = raw_RV.gather(-1, target_R1.clamp(0, self._width - 1))
        own_R1 = own_R1.masked_fill((target_R1 < 0) | (target_R1 >= self._width), reference.NOTHING)
        values_RK, ids_RK = reference.top_of_shard(raw_RV[:, : self._used], k)
        missing = (0, k - values_RK.shape[-1])
        parts = (
            reference.finite_rows(raw_RV).unsqueeze(-1),
            max_R.unsqueeze(-1),
            sum_R.unsqueeze(-1),
            own_R1,
            functional.pad(values_RK, missing, value=reference.NOTHING),
            functional.pad(ids_RK + self._start, missing, value=-1),
        )
        return torch.cat([part.double() for part in parts], -1)

    def _rows_in_blocks(self, logits_RV: torch.Tensor) -> torch.Tensor:
        assert logits_RV.dtype == torch.float32 and logits_RV.shape[-1] == self._width, "float32 logits of this shard"
        return pad_rows(logits_RV)

    def _owns(self, token: int) -> bool:
        return self._start <= token < self._start + self._used

    def _local(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device) - self._start
