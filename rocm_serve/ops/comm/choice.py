"""Who sums over the tensor-parallel ranks: the library of the process group, or AITER where it was asked for."""

from __future__ import annotations

import importlib

import torch

from rocm_serve.errors import UserError
from rocm_serve.parallel.comm import Comm, GlooComm
from rocm_serve.platform import aiter_abi


def summing(name: str, inner: Comm, host: Comm | None, device: torch.device) -> Comm:
    """Return the Comm that `--all-reduce name` stands for: `inner` itself, or AITER in front of it.

    `host`: the same ranks over gloo, on which AITER exchanges memory handles. Every rank calls this, before the model
    is built. Errors: UserError when the installed AITER does not have it, or not for these ranks.
    """
    if name == "library" or inner.size == 1:
        return inner
    assert name == "aiter", name
    why = aiter_abi.refusal("all_reduce")
    if why is not None:
        raise UserError(f"--all-reduce aiter: aiter {why}; legal: library")
    try:
        adapter = importlib.import_module("rocm_serve.ops.comm.aiter")
    except Exception as error:  # AITER fails to import with whatever its build, ROCm or a missing GPU raise
        raise UserError(
            f"--all-reduce aiter: AITER is installed and has what we call, but importing it fails:"
            f" {type(error).__name__}: {error}; legal: library"
        ) from error
    assert isinstance(host, GlooComm), "AITER's ranks meet over gloo, too"
    comm: Comm = adapter.AiterComm(inner, host.group, device)
    return comm
