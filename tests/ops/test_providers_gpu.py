"""Every provider that runs on this GPU, on all cases of its op, against the reference. Run by hand where a GPU is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_serve.ops.bind import OPS
from tests.ops.on_gpu import SEED, SEED_VARIABLE, arguments, every_case, limit, outputs
from tests.ops.test_references import error
from tests.ops.test_references import outputs as reference_outputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.filterwarnings("ignore:::triton"),
    pytest.mark.usefixtures("compiled"),
]


@pytest.mark.parametrize(("name", "provider", "case", "dtype"), every_case(), ids=str)
def test_provider_equals_the_reference(name: str, provider: str, case: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    made = arguments(name, case, dtype)
    judge = op.providers[provider].semantics or op.reference
    expected = reference_outputs(replace(op, reference=judge), made)
    got = outputs(op, provider, made)
    assert len(got) == len(expected)
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        where = f"output {i} of {name} by {provider}, {case}, {dtype}, {SEED_VARIABLE}={SEED}"
        assert g.is_cuda and g.shape == e.shape and g.dtype == e.dtype, f"{where}: {g.dtype} {tuple(g.shape)}"
        strange = (g.cpu().float().isnan() != e.float().isnan()).nonzero()
        assert g.is_floating_point() or torch.equal(g.cpu(), e), f"{where}: {(g.cpu() != e).sum()} integers differ"
        assert not len(strange), f"{where}: NaN on one side only at {strange[:4].tolist()} ({len(strange)} places)"
        found, most = error(g.cpu().float(), e.double()), limit(op, provider, made, dtype)
        assert found <= most, f"{where}: relative L2 {found:.2e} > {most:.1e}; {worst(g, e)}"


def worst(got: torch.Tensor, expected: torch.Tensor) -> str:
    """Say where the largest difference is, and how many rows are wrong: a tile, a tail, or everything."""
    difference = (got.cpu().double() - expected.double()).nan_to_num().abs()
    at = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    rows = difference.flatten(1).amax(1) if difference.dim() > 1 else difference
    wrong = (rows > 0.02 * expected.double().nan_to_num().abs().max()).nonzero().flatten().tolist()
    return (
        f"at {at}: {got[at].item():.6g}, expected {expected[at].item():.6g}; rows far off: {wrong[:8]} ({len(wrong)})"
    )
