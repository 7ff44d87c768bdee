"""Inputs of gdn_chunk that matter."""

from __future__ import annotations

from functools import partial

from rocm_serve.ops.contract import Case
from rocm_serve.ops.gdn_cases import gdn_case

CASES: dict[str, Case] = {
    "no sequences": partial(gdn_case, rows=()),
    "one row": partial(gdn_case, rows=(1,)),
    "one sub-chunk": partial(gdn_case, rows=(64,), fresh=True),
    "odd lengths": partial(gdn_case, rows=(63, 65, 7), fresh=True),
    "carried states": partial(gdn_case, rows=(130, 20)),
    "keys longer than values": partial(gdn_case, rows=(70,), key=64, value=32),
    "one head": partial(gdn_case, rows=(70,), heads=1, key_heads=1),
    "long memory": partial(gdn_case, rows=(150,), decay=-4.0),
    "quick forgetting": partial(gdn_case, rows=(150,), decay=3.0),
    "not the first rows": partial(gdn_case, rows=(5, 70), first_row=11),
    "2.4T heads at tp 8": partial(gdn_case, rows=(80,), heads=16, key_heads=2, key=128, value=128),
}
