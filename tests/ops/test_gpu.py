"""The references as a GPU computes them: the same semantics within the same tolerances. Run by hand where a GPU is."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.bind import OPS
from tests.ops.oracles import ORACLES
from tests.ops.test_references import DTYPES, EVERY_CASE, arguments, copied, error, outputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


def moved(x: Any) -> Any:
    """Move tensors, also those inside Sequences, to the GPU."""
    if isinstance(x, torch.Tensor):
        return x.cuda()
    if isinstance(x, Sequences):
        tensors = {f.name: getattr(x, f.name) for f in fields(x)}
        return replace(x, **{k: v.cuda() for k, v in tensors.items() if isinstance(v, torch.Tensor)})
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "case"), EVERY_CASE)
def test_reference_on_the_gpu_equals_its_oracle(name: str, case: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    made = arguments(op, case, dtype)
    expected = ORACLES[name](**copied(made))
    got = outputs(op, {k: moved(v) for k, v in made.items()})
    tol = op.tol[str(dtype).removeprefix("torch.")]
    for g, e in zip(got, expected, strict=True):
        assert g.is_cuda
        assert error(g.cpu(), e) <= tol.rel, f"{error(g.cpu(), e):.2e} > {tol.rel} ({tol.why})"
