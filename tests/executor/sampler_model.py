"""An independent model of the sampler: numpy, float64, plain-integer random numbers, from the documented order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from rocm_serve.executor.sample_rows import SampledToken, SampleRow
from rocm_serve.executor.sampler import Sampler
from rocm_serve.ops.sampling.cases import CASES
from rocm_serve.parallel.comm import Comm, SoloComm, run_ranks
from rocm_serve.types import SamplingParams

V, USED = 192, 181
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def make(vocab: int = V, used: int = USED, comm: Comm | None = None, device: str = "cpu") -> Sampler:
    comm = comm or SoloComm()
    width = vocab // comm.size
    return Sampler(comm, vocab_start=comm.rank * width, vocab_local=width, vocab_used=used, device=device)


def shard(logits: torch.Tensor, comm: Comm) -> torch.Tensor:
    width = logits.shape[-1] // comm.size
    return logits[:, comm.rank * width : (comm.rank + 1) * width].contiguous()


def sample(
    logits: torch.Tensor, rows: Sequence[SampleRow], tp: int = 1, used: int = USED, device: str = "cpu"
) -> list[SampledToken]:
    """Sample on `tp` simulated ranks; every rank must say the same."""

    def body(comm: Comm) -> list[SampledToken]:
        return make(logits.shape[-1], used, comm, device).sample(shard(logits, comm).to(device), rows)

    results = run_ranks(tp, body)
    assert all(result == results[0] for result in results)
    return results[0]


def row(position: int = 3, prompt: Sequence[int] = (), output: Sequence[int] = (), **params: object) -> SampleRow:
    return SampleRow(
        SamplingParams(max_tokens=100, **params),  # type: ignore[arg-type]
        position=position,
        num_generated=len(output),
        prompt_ids=prompt,
        output_ids=output,
    )


def normal(rows: int, vocab: int = V, seed: int = 0) -> torch.Tensor:
    return CASES["normal"](torch.Generator().manual_seed(seed), rows, vocab)


def edited(logits: np.ndarray, r: SampleRow, used: int = USED) -> np.ndarray:
    """Bias, mask and penalties in float64, one id after the other."""
    x = logits.astype(np.float64).copy()
    out = Counter(r.output_ids)
    p = r.params
    for i in range(x.size):
        x[i] += p.logit_bias.get(i, 0.0)
        if r.num_generated < p.min_tokens and i in p.eos_token_ids + p.stop_token_ids:
            x[i] = -np.inf
        if out[i] or i in r.prompt_ids:
            x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
        x[i] -= p.frequency_penalty * out[i] + (p.presence_penalty if out[i] else 0.0)
    x[used:] = -np.inf
    return x


def distribution(logits: np.ndarray, r: SampleRow, used: int = USED) -> np.ndarray:
    """The distribution that the row is to be drawn from: each filter removes ids and renormalises."""
    x = edited(logits, r, used) / r.params.temperature
    prob = np.exp(x - x.max())
    prob /= prob.sum()
    order = sorted(range(prob.size), key=lambda i: (-prob[i], i))
    if r.params.top_k:
        prob[order[r.params.top_k :]] = 0.0
        prob /= prob.sum()
    if r.params.top_p < 1.0:
        mass, keep = 0.0, []
        for i in order:
            keep.append(i)
            mass += prob[i]
            if mass >= r.params.top_p:
                break
        prob[[i for i in order if i not in keep]] = 0.0
        prob /= prob.sum()
    prob[prob < r.params.min_p * prob.max()] = 0.0
    return prob / prob.sum()


def splitmix(z: int) -> int:
    z %= 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def predicted(logits: np.ndarray, r: SampleRow, used: int = USED) -> tuple[int, float]:
    """Return the token to expect and by how much it wins."""
    if r.params.temperature == 0:
        score = edited(logits, r, used)
    else:
        gamma = 0x9E3779B97F4A7C15
        start = splitmix(splitmix(splitmix(r.params.seed) + (r.params.choice + 1) * gamma) + (r.position + 1) * gamma)
        u = np.array([((splitmix(start + (i + 1) * gamma) >> 12) + 0.5) / 2**52 for i in range(logits.size)])
        with np.errstate(divide="ignore"):
            score = np.log(distribution(logits, r, used)) - np.log(-np.log1p(-u))
    best = int(np.argmax(score))
    return best, float(score[best] - np.max(np.delete(score, best)))


GREEDY_FIELDS: dict[str, dict[str, object]] = {
    "nothing": {},
    "bias": {"logit_bias": {5: 9.0, 100: -100.0, 180: 4.5}},
    "bias on padding": {"logit_bias": {185: 100.0}},
    "min_tokens": {"min_tokens": 4, "eos_token_ids": tuple(range(0, 90)), "stop_token_ids": (120, 121)},
    "min_tokens reached": {"min_tokens": 3, "eos_token_ids": tuple(range(0, 90))},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.4},
    "presence": {"presence_penalty": 2.0},
    "negative presence": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 1.1},
    "negative frequency": {"frequency_penalty": -1.1},
    "all": {
        "logit_bias": {3: 5.0, 7: -6.0},
        "min_tokens": 9,
        "eos_token_ids": (20, 21),
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
    },
}
SAMPLED_FIELDS: dict[str, dict[str, object]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 5.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.05},
    "qwen": {"top_k": 20, "top_p": 0.95},
    "everything": GREEDY_FIELDS["all"] | {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
}
PROMPT, OUTPUT = (3, 7, 7, 40, 150, 180), (9, 3, 9)
