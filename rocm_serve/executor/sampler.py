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

Letters: R rows, V ids of this shard, K best ids, S shards, W candidates of a row, H hidden size, F fields of a packet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from rocm_serve.executor.upload import Array, Upload
from rocm_serve.ops.contract import OpFunction
from rocm_serve.ops.rows import ROW_MULTIPLE, pad_rows
from rocm_serve.ops.sampling import reference, rng
from rocm_serve.parallel.comm import Comm
from rocm_serve.types import SamplingParams, TokenLogprob

NARROW_LIMIT = 1024  # up to this top_k, the shards exchange candidates instead of rows
SLICE_ROWS = 256  # rows of lm_head output held at once when a prompt is scored


class SamplingFailed(RuntimeError):
    """The logits allow no token. The message names the rows; nothing was sampled for any row of the call."""


class TokenCounts:
    """How often each id occurred in one request: built when first asked, then advanced by the new tokens only."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._prompt_ids = prompt_ids
        self._prompt: frozenset[int] | None = None
        self._output: Counter[int] = Counter()
        self._num_counted = 0

    def output(self, output_ids: Sequence[int]) -> Counter[int]:
        """Count the generated tokens; `output_ids` only ever grows at its end."""
        assert len(output_ids) >= self._num_counted, "the output of a request got shorter"
        self._output.update(output_ids[self._num_counted :])
        self._num_counted = len(output_ids)
        return self._output

    def prompt(self) -> frozenset[int]:
        if self._prompt is None:
            self._prompt = frozenset(self._prompt_ids)
        return self._prompt


@dataclass(slots=True)
class SampleRow:
    """One row of logits and the request it belongs to.

    `position` is the index of the new token in its sequence, the prompt counted; `num_generated` says how many tokens
    this request generated before it; both may be advanced by the owner. `prompt_ids` and `output_ids` are read by
    penalties only. `counts` may be kept by the caller, one object per request, so that penalties cost what the new
    tokens cost. What follows from `params` is found once: `filtered` (top_k, top_p, min_p), `narrow` (of those, by
    candidates), `edited` (bias, masks, penalties), `plain` (none of these, and no log-probs), `stream` (of its random
    numbers; 0 where nothing is drawn).
    """

    params: SamplingParams
    position: int
    num_generated: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    counts: TokenCounts | None = None
    filtered: bool = field(init=False)
    narrow: bool = field(init=False)
    edited: bool = field(init=False)
    plain: bool = field(init=False)
    stream: int = field(init=False)

    def __post_init__(self) -> None:
        p = self.params
        self.filtered = not p.greedy and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)
        self.narrow = self.filtered and 0 < p.top_k <= NARROW_LIMIT
        penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0)
        self.edited = bool(p.logit_bias) or p.min_tokens > 0 or penalties
        self.plain = not self.edited and not self.filtered and p.logprobs is None
        self.stream = 0 if p.greedy else rng.choice_stream(p.seed, p.choice)


class SampledToken(NamedTuple):
    token: int
    logprob: TokenLogprob | None = None


@dataclass(slots=True)
class _Pass:
    """What this shard says about the rows of one call, block by block."""

    packets: list[torch.Tensor] = field(default_factory=list)
    narrow: list[torch.Tensor] = field(default_factory=list)
    wide: list[torch.Tensor] = field(default_factory=list)


class Sampler:
    """Sample and score on one vocabulary shard of `comm.size` equal ones.

    `vocab_start` and `vocab_local` place this shard among the rows of lm_head; ids from `vocab_used` on are padding
    that no tokenizer knows: normalised over, never sampled, never an alternative. `draw_token` and `log_sum_exp` are
    the ops of those names. `upload`: shared with the owner, else one of its own.
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
        assert vocab_start == comm.rank * vocab_local, "vocabulary shards are equal and in rank order"
        assert 0 < vocab_used <= vocab_local * comm.size
        self._comm = comm
        self._start = vocab_start
        self._width = vocab_local
        self._used = min(max(vocab_used - vocab_start, 0), vocab_local)
        self._device = torch.device(device)
        self._draw_token = draw_token
        self._log_sum_exp = log_sum_exp
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

    def _rows_in_blocks(self, logits_RV: torch.Tensor) -> torch.Tensor:
        assert logits_RV.dtype == torch.float32 and logits_RV.shape[-1] == self._width, "float32 logits of this shard"
        return pad_rows(logits_RV)

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
        return self._drawn(x_RV, *self._upload(_keys(rows), np.array(temperatures, dtype=np.float32)))

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

    def _owns(self, token: int) -> bool:
        return self._start <= token < self._start + self._used

    def _local(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device) - self._start

    def _index(self, rows: Sequence[int]) -> torch.Tensor:
        (rows_R,) = self._upload(np.array(rows, dtype=np.int64))
        return rows_R

    def _draw_filtered(self, found: _Pass, rows: Sequence[SampleRow], tokens_R: torch.Tensor) -> None:
        """Replace the tokens of filtered rows, in place; every rank sees all candidates of them."""
        if found.narrow:
            packet_SRKF = self._comm.all_gather(torch.cat(found.narrow))
            narrow = [i for i, row in enumerate(rows) if row.narrow]
            most = max(rows[i].params.top_k for i in narrow)
            values_RW, ids_RW = reference.top_of_all(packet_SRKF[..., 0].float(), packet_SRKF[..., 1].long(), most)
            self._draw(values_RW, ids_RW, narrow, rows, tokens_R)
        if found.wide:
            row_SRV = self._comm.all_gather(torch.cat(found.wide))
            values_RW, ids_RW = row_SRV.transpose(0, 1).flatten(1).sort(dim=-1, descending=True, stable=True)
            wide = [i for i, row in enumerate(rows) if row.filtered and not row.narrow]
            self._draw(values_RW, ids_RW, wide, rows, tokens_R)

    def _draw(
        self,
        values_RW: torch.Tensor,
        ids_RW: torch.Tensor,
        indices: Sequence[int],
        rows: Sequence[SampleRow],
        tokens_R: torch.Tensor,
    ) -> None:
        chosen = [rows[i] for i in indices]
        temperature_R, top_k_R, top_p_R, min_p_R, keys_R, at_R = self._upload(
            np.array([row.params.temperature for row in chosen], dtype=np.float64),
            np.array([row.params.top_k for row in chosen], dtype=np.int64),
            np.array([row.params.top_p for row in chosen], dtype=np.float64),
            np.array([row.params.min_p for row in chosen], dtype=np.float64),
            _keys(chosen),
            np.array(indices, dtype=np.int64),
        )
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


def _keys(rows: Sequence[SampleRow]) -> Array:
    """Return the keys of the rows' random numbers, int64; those of rows that draw nothing mean nothing."""
    streams = np.array([row.stream for row in rows], dtype=np.uint64)
    return rng.row_keys(streams, np.array([row.position for row in rows], dtype=np.uint64))


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
