"""Turn logits into tokens and log-probabilities on the last stage, every tensor-parallel rank holding its vocabulary
shard.

Order of operations for a token (vLLM's): logit_bias; the mask of min_tokens on end ids; repetition penalty over prompt
and output; presence and frequency over output; temperature; top_k; top_p; min_p; a draw. Log-probs are taken before
all of it.

The draw is an arg max of logit + temperature x Gumbel noise (the same arg max as logit / temperature + noise, without
overflow at tiny temperatures), and noise belongs to the id, not to its place. So a plain draw, greedy or not, needs one
(score, id) per shard. What crosses the wire, per row:
  every row                       finite?, score, id
  top_k up to NARROW_LIMIT        the shard's best ids, as many as top_k
  other top_k, top_p, min_p       the shard's whole row
  log-probs                       maximum, sum of exponentials, own logit, the shard's best ids
All ranks then compute on the same gathered bytes and come to the same tokens.

Letters: R rows, V ids of this shard, K best ids, S shards, W candidates of a row, F fields of a packet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rocm_serve.executor.sample_rows import SampledToken, SampleRow, SamplingFailed, TokenCounts, keys_of
from rocm_serve.executor.upload import Array, Upload
from rocm_serve.executor.vocab_shard import VocabShard
from rocm_serve.ops.contract import OpFunction
from rocm_serve.ops.rows import ROW_MULTIPLE
from rocm_serve.ops.sampling import reference, rng
from rocm_serve.parallel.comm import Comm

DRAWN_ROWS = 32  # whole vocabularies that are sorted at one time, each some 12 copies of a row in float32


@dataclass(slots=True)
class _Pass:
    """What this shard says about the rows of one call, block by block."""

    packets: list[torch.Tensor] = field(default_factory=list)
    narrow: list[torch.Tensor] = field(default_factory=list)
    wide: list[torch.Tensor] = field(default_factory=list)


class Sampler(VocabShard):
    """A vocabulary shard that also samples; ids from `vocab_used` on are never sampled.

    `draw_token` is the op of that name. `upload`: shared with the owner, else one of its own.
    """

    def __init__(
        self,
        comm: Comm,
        *,
        vocab_start: int,
        vocab_local: int,
        vocab_used: int,
        device: torch.device | str = "cpu",
        draw_token: OpFunction = reference.draw_token,
        log_sum_exp: OpFunction = reference.log_sum_exp,
        upload: Upload | None = None,
    ) -> None:
        super().__init__(
            comm,
            vocab_start=vocab_start,
            vocab_local=vocab_local,
            vocab_used=vocab_used,
            device=device,
            log_sum_exp=log_sum_exp,
        )
        self._draw_token = draw_token
        self._upload = upload or Upload(self._device)

    def draw(self, logits_RV: torch.Tensor, keys_R: torch.Tensor, temperature_R: torch.Tensor) -> torch.Tensor:
        """Draw a token for each row whose draw is plain, and say what `tokens_of` reads: float64 [R, 3] on the device.

        Shapes: logits float32 of this rank's shard; keys and temperature as of the op draw_token. Asks the device for
        nothing: it can be part of a captured graph, where the op and the collective can.
        """
        return self._best(self._drawn(logits_RV, keys_R, temperature_R))

    def draw_rows(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        """Draw one token for each of `rows`, and say what `tokens_of` reads: float64 [R, 3], on the device.

        Shapes: as for `sample`. Where no row is edited, the device is asked for nothing.
        """
        raw_RV = logits_RV[: len(rows)]
        assert raw_RV.dtype == torch.float32 and raw_RV.shape[-1] == self._width, "float32 logits of this shard"
        found = _Pass()
        if any([row.edited or row.filtered for row in rows]):  # noqa: C419 - twice as fast as a generator
            width = max((row.params.top_k for row in rows if row.narrow), default=0)
            for start in range(0, len(rows), ROW_MULTIPLE):
                block = slice(start, start + ROW_MULTIPLE)
                self._shard_pass(raw_RV[block], rows[block], width, found)
        else:
            found.packets.append(self._packet(raw_RV, rows))
        drawn_R3 = self._best(torch.cat(found.packets))
        self._draw_filtered(found, rows, drawn_R3[:, 2])
        return drawn_R3

    def tokens_of(self, found_R3: torch.Tensor, positions: Sequence[int]) -> list[int]:
        """Wait for what `draw` has said and return the tokens, which get these positions in their sequences.

        Errors: SamplingFailed when a logit is NaN or infinite, or when masks leave no id.
        """
        finite_R, score_R, token_R = found_R3.cpu().numpy().T  # the one wait of a plain step
        _refuse(positions, finite_R > 0, score_R)
        tokens: list[int] = token_R.astype(np.int64).tolist()
        return tokens

    def sample(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """Draw one token for each of `rows`; the same list on every rank.

        Shapes: logits_RV float32, this rank's shard; rows of logits past len(rows) are padding.
        Errors: SamplingFailed when a logit is NaN or infinite, or when masks leave no id.
        """
        if not rows:
            return []
        tokens = self.tokens_of(self.draw_rows(logits_RV, rows), [row.position for row in rows])
        return self._with_logprobs(logits_RV[: len(rows)], rows, tokens)

    def _shard_pass(self, raw_RV: torch.Tensor, rows: Sequence[SampleRow], width: int, found: _Pass) -> None:
        """Take one block through everything that this shard can do alone."""
        x_RV = raw_RV
        if edited := [i for i, row in enumerate(rows) if row.edited]:
            x_RV = raw_RV.clone()
            for i in edited:
                self._edit(x_RV[i], rows[i])
        if narrow := [i for i, row in enumerate(rows) if row.narrow]:
            values_RK, ids_RK = reference.top_of_shard(
                self._without_padding(x_RV.index_select(0, self._index(narrow))), width
            )
            found.narrow.append(torch.stack((values_RK.double(), (ids_RK + self._start).double()), -1))
        if wide := [i for i, row in enumerate(rows) if row.filtered and not row.narrow]:
            found.wide.append(self._without_padding(x_RV.index_select(0, self._index(wide))))
        packet_RF = self._packet(x_RV, rows)
        if edited:  # what an edit masks is not a logit that is not finite
            packet_RF[:, 0] = reference.finite_rows(raw_RV).double()
        found.packets.append(packet_RF)

    def _without_padding(self, x_RV: torch.Tensor) -> torch.Tensor:
        """Mask ids that no tokenizer knows, in place: the rows keep the width that all shards have."""
        x_RV[:, self._used :] = reference.NOTHING
        return x_RV

    def _packet(self, x_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        """Say of each row: logits finite?, best score, its id. Rows that are filtered are drawn later: greedy here."""
        temperatures = [0.0 if row.filtered else row.params.temperature for row in rows]
        if not any(temperatures):
            return self._drawn(x_RV, None, None)
        return self._drawn(x_RV, *self._upload(keys_of(rows), np.array(temperatures, dtype=np.float32)))

    def _drawn(
        self, x_RV: torch.Tensor, keys_R: torch.Tensor | None, temperature_R: torch.Tensor | None
    ) -> torch.Tensor:
        finite_R, score_R, id_R = self._draw_token(x_RV, keys_R, temperature_R, first_id=self._start, used=self._used)
        packet_R3 = x_RV.new_empty((len(id_R), 3), dtype=torch.float64)
        for column, said_R in enumerate((finite_R, score_R, id_R)):
            packet_R3[:, column].copy_(said_R)  # one launch each: a stack of doubles takes as many and two more
        if self._start:
            packet_R3[:, 2] += self._start
        return packet_R3

    def _best(self, packet_R3: torch.Tensor) -> torch.Tensor:
        """Reduce packets over the shards: the same [R, 3] on every rank."""
        if self._comm.size == 1:
            return packet_R3
        finite_SR, score_SR, id_SR = self._comm.all_gather(packet_R3).unbind(-1)
        return torch.stack((finite_SR.amin(0), *reference.best_of_all(score_SR, id_SR)), -1)

    def _edit(self, x_V: torch.Tensor, row: SampleRow) -> None:
        """Apply bias, mask and penalties of one row in place, to the ids of this shard."""
        p = row.params
        bias = {i: value for i, value in p.logit_bias.items() if self._owns(i)}
        if bias:
            x_V[self._local(list(bias))] += torch.tensor(list(bias.values()), device=self._device)
        if row.num_generated < p.min_tokens:
            x_V[self._local([i for i in p.end_token_ids if self._owns(i)])] = reference.NOTHING
        if p.repetition_penalty == 1.0 and p.presence_penalty == 0.0 and p.frequency_penalty == 0.0:
            return
        counts = row.counts or TokenCounts(row.prompt_ids)
        output = counts.output(row.output_ids)
        prompt = counts.prompt() if p.repetition_penalty != 1.0 else frozenset()
        seen = [i for i in sorted(prompt | output.keys()) if self._owns(i)]
        reference.apply_penalties(
            x_V,
            self._local(seen),
            torch.tensor([float(output[i]) for i in seen], device=self._device),
            repetition=p.repetition_penalty,
            presence=p.presence_penalty,
            frequency=p.frequency_penalty,
        )

    def _index(self, rows: Sequence[int]) -> torch.Tensor:
        (rows_R,) = self._upload(np.array(rows, dtype=np.int64))
        return rows_R

    def _draw_filtered(self, found: _Pass, rows: Sequence[SampleRow], tokens_R: torch.Tensor) -> None:
        """Replace the tokens of filtered rows, in place; every rank sees all candidates of them."""
        if found.narrow:
            narrow = [i for i, row in enumerate(rows) if row.narrow]
            most = max(rows[i].params.top_k for i in narrow)
            for packet_RKF, *asked in self._few_at_a_time(found.narrow, narrow, rows):
                packet_SRKF = self._comm.all_gather(packet_RKF)
                best = reference.top_of_all(packet_SRKF[..., 0].float(), packet_SRKF[..., 1].long(), most)
                self._draw(*best, asked, tokens_R)
        if found.wide:
            wide = [i for i, row in enumerate(rows) if row.filtered and not row.narrow]
            for x_RV, *asked in self._few_at_a_time(found.wide, wide, rows):
                row_RW = self._comm.all_gather(x_RV).transpose(0, 1).flatten(1)
                self._draw(*row_RW.sort(dim=-1, descending=True, stable=True), asked, tokens_R)

    def _few_at_a_time(
        self, found: list[torch.Tensor], indices: Sequence[int], rows: Sequence[SampleRow]
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Cut what was found, which is emptied, and what `_draw` asks of its rows; one upload for all parts.

        Parts have as many candidates, over all shards, as whole vocabularies of DRAWN_ROWS rows: that bounds memory.
        """
        found_RK = torch.cat(found)
        found.clear()
        chosen = [rows[i] for i in indices]
        asked = self._upload(
            np.array([row.params.temperature for row in chosen], dtype=np.float64),
            np.array([row.params.top_k for row in chosen], dtype=np.int64),
            np.array([row.params.top_p for row in chosen], dtype=np.float64),
            np.array([row.params.min_p for row in chosen], dtype=np.float64),
            keys_of(chosen),
            np.array(indices, dtype=np.int64),
        )
        at_once = DRAWN_ROWS * self._width // found_RK.shape[1]
        return zip(*(x.split(at_once) for x in (found_RK, *asked)), strict=True)

    def _draw(
        self, values_RW: torch.Tensor, ids_RW: torch.Tensor, asked: Sequence[torch.Tensor], tokens_R: torch.Tensor
    ) -> None:
        temperature_R, top_k_R, top_p_R, min_p_R, keys_R, at_R = asked
        kept_R = reference.kept_prefix(values_RW, temperature_R, top_k_R, top_p_R, min_p_R)
        noise_RW = rng.gumbel(keys_R.unsqueeze(-1), (ids_RW + 1) * rng.as_signed(rng.GAMMA))
        scores_RW = values_RW + noise_RW.mul_(temperature_R.float().unsqueeze(-1))
        dropped_RW = torch.arange(values_RW.shape[-1], device=self._device) >= kept_R.unsqueeze(-1)
        scores_RW.masked_fill_(dropped_RW, reference.NOTHING)
        tied_RW = scores_RW == scores_RW.amax(-1, keepdim=True)
        last = self._width * self._comm.size - 1  # an id that exists, should logits be no numbers
        tokens_R.index_copy_(0, at_R, ids_RW.masked_fill(~tied_RW, last).amin(-1).double())

    def _with_logprobs(
        self, raw_RV: torch.Tensor, rows: Sequence[SampleRow], tokens: Sequence[int]
    ) -> list[SampledToken]:
        wanted: dict[int, int] = {}
        for i, row in enumerate(rows):
            if row.params.logprobs is not None:
                wanted[i] = row.params.logprobs
        if not wanted:
            return [SampledToken(token) for token in tokens]
        picked_RV = raw_RV if len(wanted) == len(rows) else raw_RV[list(wanted)]
        scored = self._score(self._rows_in_blocks(picked_RV), [tokens[i] for i in wanted], list(wanted.values()))
        logprobs = dict(zip(wanted, scored, strict=True))
        return [SampledToken(token, logprobs.get(i)) for i, token in enumerate(tokens)]


def _refuse(positions: Sequence[int], finite_R: Array, score_R: Array) -> None:
    """Raise SamplingFailed, on every rank alike, when some row has no token to give."""
    if bool((finite_R & (score_R != reference.NOTHING)).all()):
        return
    finite = finite_R.tolist()
    bad = [f"row {i} (token {positions[i]} of its sequence)" for i, fine in enumerate(finite) if not fine]
    if bad:
        raise SamplingFailed(f"logits are not finite (NaN or infinity): {', '.join(bad)}")
    scores = score_R.tolist()
    empty = [f"row {i} (token {positions[i]} of its sequence)" for i, s in enumerate(scores) if s == reference.NOTHING]
    if empty:
        raise SamplingFailed(f"every token is masked: {', '.join(empty)}")
