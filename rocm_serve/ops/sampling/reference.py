"""Sampling and log-probabilities on one vocabulary shard, in plain torch: what is asked of every shard, and how the
answers of all shards come together.

A row's bits depend on that row alone. The one reduction whose result depends on the order of additions (log-sum-exp)
is called with blocks of ROW_MULTIPLE rows; everything else is elementwise, an exact selection, or a running sum along
one row. Selections are exact about ties: of equal values the lowest id comes first, whatever the shard layout.

Letters: R rows, V ids of this shard, K best ids, S shards, W sorted candidates of a row.
"""

from __future__ import annotations

import torch

from rocm_serve.ops.rows import ROW_MULTIPLE, pad_rows, steady_
from rocm_serve.ops.sampling import rng

NOTHING = float("-inf")


def draw_token(
    logits_RV: torch.Tensor,
    keys_R: torch.Tensor | None = None,
    temperature_R: torch.Tensor | None = None,
    *,
    first_id: int,
    used: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Say of each row of this shard whether its logits are finite, its best score, and which id has that.

    Shapes: logits float32 [R, V], keys int64 [R] (`rng.row_keys`), temperature float32 [R] (0: greedy) -> bool [R],
    float32 [R], int64 [R]. Without keys every row is greedy. Ids count from 0 here; column 0 is token `first_id`.
    Columns from `used` on are padding: they must be finite too, and are never chosen. Of equal scores the lowest id.
    A row with a NaN or +infinity has some legal id and any score; all columns at -infinity: id 0, and that score.
    Source: arg max of logit + temperature x Gumbel noise of (key, token), noise and sum each rounded to float32.
    """
    finite_R = finite_rows(logits_RV)
    scores_RV = logits_RV[:, :used]
    if not used:
        return finite_R, logits_RV.new_full(finite_R.shape, NOTHING), torch.zeros_like(finite_R, dtype=torch.int64)
    if keys_R is None:
        return finite_R, *best_of_shard(scores_RV)
    assert temperature_R is not None, "keys and temperatures come together"
    offsets_V = rng.id_offsets(first_id, used, logits_RV.device)
    blocks = (x.split(ROW_MULTIPLE) for x in (scores_RV, keys_R, temperature_R))
    found = [best_of_shard(_noisy(*block, offsets_V)) for block in zip(*blocks, strict=True)]
    return finite_R, torch.cat([score for score, _ in found]), torch.cat([token for _, token in found])


def _noisy(
    scores_RV: torch.Tensor, keys_R: torch.Tensor, temperature_R: torch.Tensor, offsets_V: torch.Tensor
) -> torch.Tensor:
    drawn = (temperature_R > 0).nonzero().flatten()
    if not len(drawn):
        return scores_RV
    noise = rng.gumbel(keys_R[drawn].unsqueeze(-1), offsets_V)
    return scores_RV.index_add(0, drawn, noise.mul_(temperature_R[drawn].unsqueeze(-1)))


def log_sum_exp(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's maximum and the sum of exp(logit - maximum) over this shard, padding ids counted.

    Shapes: float32 [R, V] -> float32 [R] twice; `combine_log_sum_exp` puts shards together. Logits are finite.
    """
    parts = [log_sum_exp_parts(block) for block in pad_rows(logits_RV).split(ROW_MULTIPLE)]
    max_R, sum_R = (torch.cat(piece)[: logits_RV.shape[0]] for piece in zip(*parts, strict=True))
    return max_R, sum_R


def finite_rows(logits_RV: torch.Tensor) -> torch.Tensor:
    """Say for each row whether every logit is a finite number.

    The sum of a row is finite unless a logit is not, or it overflows: only then each logit is looked at.
    """
    finite_R = logits_RV.sum(-1).isfinite()
    if not bool(finite_R.all()):
        finite_R = logits_RV.isfinite().all(-1)
    return finite_R


def apply_penalties(
    logits_V: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """Penalise the ids of one row that were seen before, in place.

    `ids` (int64, local to the shard, each once) were in the prompt or the output, `counts` (float32) says how often in
    the output. Repetition: positive logits are divided, negative ones multiplied. Then presence is taken off once and
    frequency per occurrence, for output ids only.
    Source: repetition, CTRL (Keskar et al. 2019) as in HF's RepetitionPenaltyLogitsProcessor; the other two, OpenAI.
    """
    x = logits_V[ids]
    if repetition != 1.0:
        x = torch.where(x > 0, x / repetition, x * repetition)
    logits_V[ids] = x - (frequency * counts + presence * (counts > 0))


def best_of_shard(scores_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest score of each row and its local id; of equal scores the lowest id.

    On the CPU numpy looks for it: torch's own arg max is not vectorised there and takes twelve times as long.
    """
    if scores_RV.device.type == "cpu":
        id_R = torch.from_numpy(scores_RV.numpy().argmax(-1))
    else:
        id_R = scores_RV.argmax(-1)
    return scores_RV.gather(-1, id_R.unsqueeze(-1)).squeeze(-1), id_R


def best_of_all(scores_SR: torch.Tensor, ids_SR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce `best_of_shard` over shards in rank order; shards hold ascending ids, so ties go to the first shard."""
    if len(scores_SR) == 1:
        return scores_SR[0], ids_SR[0]
    shard_1R = scores_SR.argmax(0, keepdim=True)
    return scores_SR.gather(0, shard_1R).squeeze(0), ids_SR.gather(0, shard_1R).squeeze(0)


def top_of_shard(x_RV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k best values of each row, descending, and their local ids; equal values by ascending id.

    Shapes: RV -> RK, RK (int64) with K = min(k, V). torch.topk picks any of the ids that tie for the last place, so
    it is asked for one more; rows where that one ties are picked again by keys that no two ids share. A GPU would
    have to be waited for to know whether there are any: all rows are picked by such keys there.
    """
    width = x_RV.shape[-1]
    k = min(k, width)
    if k == 0 or x_RV.shape[0] == 0:
        return x_RV[:, :0], torch.zeros(x_RV.shape[0], 0, dtype=torch.int64, device=x_RV.device)
    ids_RK = (_best_ids if x_RV.device.type == "cpu" else best_ids_by_keys)(x_RV, k).sort(-1).values
    values_RK, order_RK = x_RV.gather(-1, ids_RK).sort(dim=-1, descending=True, stable=True)
    return values_RK, ids_RK.gather(-1, order_RK)


def _best_ids(x_RV: torch.Tensor, k: int) -> torch.Tensor:
    width = x_RV.shape[-1]
    values, ids_RK = x_RV.topk(min(k + 1, width), -1)
    if k == width:
        return ids_RK
    tied_R = values[:, k - 1] == values[:, k]
    ids_RK = ids_RK[:, :k]
    if bool(tied_R.any()):
        ids_RK = ids_RK.clone()
        ids_RK[tied_R] = best_ids_by_keys(x_RV[tied_R], k)
    return ids_RK


def best_ids_by_keys(x_RV: torch.Tensor, k: int) -> torch.Tensor:
    """Return the ids of the k best values of each row, of equal values the lowest, in any order: RV -> RK (int64)."""
    return _distinct_keys(x_RV).topk(k, -1).indices


def _distinct_keys(x_RV: torch.Tensor) -> torch.Tensor:
    """Map float32 to int64 keys in the same order, ties broken by ascending id (IEEE 754 totalOrder in integers)."""
    bits_RV = (x_RV + 0.0).view(torch.int32)  # + 0.0 makes one zero of the two
    ordered_RV = bits_RV ^ (bits_RV >> 31).bitwise_and_(0x7FFFFFFF)
    ids_V = torch.arange(x_RV.shape[-1], device=x_RV.device)
    return (ordered_RV.long() << 32) + (0x7FFFFFFF - ids_V)


def top_of_all(values_SRK: torch.Tensor, ids_SRK: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the shards' `top_of_shard` (global ids) into the k best of all: RK, RK, or fewer when there are fewer."""
    values = values_SRK.transpose(0, 1).flatten(1)
    ids = ids_SRK.transpose(0, 1).flatten(1)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], ids.gather(-1, order)[:, :k]


def kept_prefix(
    values_RW: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
) -> torch.Tensor:
    """Return how many of each row's candidates, sorted in descending order, survive top-k, then top-p, then min-p.

    Shapes: values_RW (logits before temperature), one number a row of the rest (top_k 0, top_p 1, min_p 0: off) -> R.
    top-k keeps exactly k. top-p works on what top-k left, renormalised, and keeps the smallest prefix whose mass is
    >= p, so the token that crosses p stays. min-p keeps probabilities >= min_p x the largest. At least one stays.
    Every one of the three keeps a prefix, so ties at a boundary are decided by the order of the candidates.
    Numerics: float64; mass is a running sum from the largest down, so trailing candidates do not change its bits.
    Source: HF's TopK-, TopP- and MinPLogitsWarper, in HF's order (vLLM applies min-p before the other two).
    """
    width = values_RW.shape[-1]
    # a difference first: a tiny temperature then makes zeros of the small ones, never inf - inf
    below_RW = (values_RW.double() - values_RW[:, :1].double()) / temperature_R.double().unsqueeze(-1)
    weight_RW = steady_(torch.exp_, below_RW)
    mass_RW = weight_RW.cumsum(-1)
    rank_W = torch.arange(width, device=values_RW.device)
    kept_R = torch.where(top_k_R > 0, top_k_R.clamp(max=width), width)
    total_R = mass_RW.gather(-1, kept_R.unsqueeze(-1) - 1)
    short_RW = (mass_RW < top_p_R.double().unsqueeze(-1) * total_R) & (rank_W < kept_R.unsqueeze(-1))
    nucleus_R = torch.where(top_p_R < 1.0, short_RW.sum(-1) + 1, width)
    likely_R = (weight_RW >= min_p_R.double().unsqueeze(-1)).sum(-1)
    return torch.minimum(torch.minimum(kept_R, nucleus_R), likely_R.clamp(min=1))


def log_sum_exp_parts(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's maximum and the sum of exp(logit - maximum) over this shard; call with ROW_MULTIPLE rows."""
    max_R = logits_RV.amax(-1)
    return max_R, steady_(torch.exp_, logits_RV - max_R.unsqueeze(-1)).sum(-1)


def combine_log_sum_exp(max_SR: torch.Tensor, sum_SR: torch.Tensor) -> torch.Tensor:
    """Return the log-sum-exp over all shards, added in rank order, in float64."""
    max_R = max_SR.amax(0).double()
    total_R = torch.zeros_like(max_R)
    for max_of_shard_R, sum_of_shard_R in zip(max_SR, sum_SR, strict=True):
        total_R += sum_of_shard_R.double() * steady_(torch.exp_, max_of_shard_R.double() - max_R)
    return max_R + steady_(torch.log_, total_R)
