"""Inputs of gdn_decode that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.gdn_cases import gdn_case


def _with_row_states(g: torch.Generator, dtype: torch.dtype) -> Arguments:
    arguments = gdn_case(g, dtype, rows=(1, 4, 2))
    state, out = arguments["state"], arguments["out_THV"]
    assert isinstance(state, torch.Tensor) and isinstance(out, torch.Tensor)
    return arguments | {"row_states": torch.zeros(out.shape[0], *state.shape[1:])}


CASES: dict[str, Case] = {
    "no sequences": partial(gdn_case, rows=()),
    "one row": partial(gdn_case, rows=(1,)),
    "a fresh state": partial(gdn_case, rows=(1, 1), fresh=True),
    "many sequences": partial(gdn_case, rows=(1,) * 7),
    "drafts to verify": partial(gdn_case, rows=(4, 1, 3)),
    "states of rows": _with_row_states,
    "keys longer than values": partial(gdn_case, rows=(2,), key=64, value=32),
    "one head": partial(gdn_case, rows=(2,), heads=1, key_heads=1),
    "not the first rows": partial(gdn_case, rows=(1, 2), first_row=11),
    "2.4T heads at tp 8": partial(gdn_case, rows=(1, 1), heads=16, key_heads=2, key=128, value=128),
}
