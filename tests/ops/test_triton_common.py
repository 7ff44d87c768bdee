"""What the Triton providers share that runs without a GPU."""

from __future__ import annotations

import importlib

import pytest
import torch


def test_counters_stay_where_graphs_have_seen_them() -> None:
    """A call that needs more than there are gets others; what a graph holds the address of is not given back."""
    pytest.importorskip("triton")
    common = importlib.import_module("rocm_serve.ops.triton_common.triton")
    counters, cpu = common.Counters(first=8), torch.device("cpu")
    few = counters.of(3, cpu)
    assert few.dtype == torch.int32 and len(few) == 8 and not few.any()
    assert counters.of(8, cpu) is few
    address = few.data_ptr()
    del few
    many = counters.of(9, cpu)
    assert len(many) == 9 and counters.of(2, cpu) is many
    assert address in [held.data_ptr() for held in counters.made(cpu)]
