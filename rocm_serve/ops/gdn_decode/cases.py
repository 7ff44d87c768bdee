"""Inputs of gdn_decode that matter."""

from __future__ import annotations

from functools import partial

from rocm_serve.ops.contract import Case
from rocm_serve.ops.gdn_cases import gdn_case

CASES: dict[str, Case] = {
    "no sequences": partial(gdn_case, rows=()),
    "one row": partial(gdn_case, rows=(1,)),
    "a fresh state": partial(gdn_case, rows=(1, 1), fresh=True),
    "many sequences": partial(gdn_case, rows=(1,) * 7),
    "drafts to verify": partial(gdn_case, rows=(4, 1, 3)),
    "drafts on a copy": partial(gdn_case, rows=(4, 1, 3, 2), commits=(1, 1, 2, 2)),
    "all rows on a copy": partial(gdn_case, rows=(2, 0, 3), commits=(0, 0, 1)),
    "keys longer than values": partial(gdn_case, rows=(2,), key=64, value=32),
    "one head": partial(gdn_case, rows=(2,), heads=1, key_heads=1),
    "not the first rows": partial(gdn_case, rows=(1, 2), first_row=11),
    "2.4T heads at tp 8": partial(gdn_case, rows=(1, 1), heads=16, key_heads=2, key=128, value=128),
}
