"""Sampling's Triton kernels on a GPU: real sizes, noise in its tails, no waiting for the device. Run by hand there."""

from __future__ import annotations

import pytest
import torch

from rocm_serve.ops.bind import OPS
from rocm_serve.ops.contract import Arguments
from rocm_serve.ops.sampling.cases import draw_case
from tests.ops.on_gpu import SEED
from tests.ops.poison import poisoned
from tests.ops.test_triton_gpu import SAID, no_waiting, provider

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.filterwarnings("ignore:::triton"),
]
SHARD = 31_040  # of the 2.4T model's vocabulary, on one of eight ranks


def call(g: torch.Generator, rows: int) -> tuple[Arguments, Arguments]:
    """Return one call with keys, and the same tensors on the GPU."""
    made = draw_case(
        g, torch.float32, r=rows, v=SHARD, used=30_797, first_id=7 * SHARD, temperatures=(1.0, 0.0, 0.6, 2.0)
    )
    return made, {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in made.items()}


@pytest.mark.parametrize("rows", [1, 256])
def test_tokens_are_those_of_the_cpu(rows: int) -> None:
    made, there = call(torch.Generator().manual_seed(SEED), rows)
    with poisoned():
        finite, score, token = provider("draw_token")(**there)
    expected_finite, expected_score, expected = OPS["draw_token"].reference(**made)
    assert torch.equal(token.cpu(), expected), f"{(token.cpu() != expected).sum()} tokens differ; {SAID}"
    assert torch.equal(finite.cpu(), expected_finite)
    assert ((score.cpu() - expected_score).abs() <= 4e-7 * expected_score.abs().clamp_min(8.0)).all(), SAID


def test_noise_is_that_of_float64_in_its_tails_too() -> None:
    from tests.ops.noise_kernel import worst_noise

    assert worst_noise(torch.Generator().manual_seed(SEED), "cuda") <= 4e-7, SAID


def test_the_host_never_waits_for_the_device() -> None:
    _, there = call(torch.Generator().manual_seed(SEED), 33)
    for op, made in (("draw_token", there), ("log_sum_exp", {"logits_RV": there["logits_RV"]})):
        function = provider(op)
        function(**made)
        with no_waiting():
            function(**made)


def test_a_row_has_the_same_bits_alone_and_among_many() -> None:
    _, there = call(torch.Generator().manual_seed(SEED), 65)
    alone = there | {k: v[40:41] for k, v in there.items() if isinstance(v, torch.Tensor)}
    for op in ("draw_token", "log_sum_exp"):
        names = ("logits_RV",) if op == "log_sum_exp" else tuple(there)
        many, one = (provider(op)(**{k: made[k] for k in names}) for made in (there, alone))
        assert all(torch.equal(a[40:41], b) for a, b in zip(many, one, strict=True)), f"{op}; {SAID}"
