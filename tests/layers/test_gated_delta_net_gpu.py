"""Gated DeltaNet under drafts on a GPU, by the Triton kernels. Run by hand where a GPU is."""

from __future__ import annotations

import secrets
from contextlib import nullcontext

import pytest
import torch

from rocm_serve.ops.bind import OPS, bind_ops
from tests.layers.replaying import Request, Run, Turn, every_pair, facts_of, in_step, layer_of
from tests.ops.test_triton_gpu import no_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
DEVICE = "cuda"
WALKING = ("causal_conv", "gdn_chunk", "gdn_decode")


def run_of(key: int, value: int) -> Run:
    """Make a run whose steps all have 128 rows: products then give a row the same bits in each of them."""
    seed = secrets.randbits(31)
    print(f"seed {seed}")
    g = torch.Generator().manual_seed(seed)
    ops = bind_ops({name: "triton" if name in WALKING else "reference" for name in OPS}, "sm_90")
    facts = facts_of(key, value)
    run = Run(layer_of(facts, ops, g, DEVICE), facts, g, 4)
    run.multiple = 128
    return run


@pytest.mark.parametrize(("key", "value"), [(128, 128), (20, 36)])
def test_accepting_m_of_n_drafts_is_m_plain_steps(key: int, value: int) -> None:
    run, requests = run_of(key, value), every_pair(4, 1)
    run.plainly(requests)
    assert not run.differences(requests, in_step(requests))


def test_the_host_never_waits_for_the_device() -> None:
    run = run_of(128, 128)
    requests = [Request(1, 3, [Turn(1, 4, 2), Turn(1, 3, 1), Turn(1, 3, 0)]), Request(2, 5, [Turn()] * 3)]
    run.plainly(requests)
    cache = run.cache()
    run.step([run.next(r, cache) for r in requests], cache)
    for waits in (True, False, False):  # kernels are compiled in the first
        x_TH, batch = run.batch([run.next(r, cache) for r in requests], cache)
        with torch.inference_mode(), nullcontext() if waits else no_waiting():
            run.layer(x_TH, batch)
        assert batch.replay is not None and (waits or len(batch.replay.replayed_R))
