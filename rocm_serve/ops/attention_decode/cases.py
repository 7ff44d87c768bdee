"""Inputs of attention_decode that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.attention_cases import attention_case
from rocm_serve.ops.contract import Case

CASES: dict[str, Case] = {
    "no sequences": partial(attention_case, rows=(), contexts=()),
    "one sequence": partial(attention_case, rows=(1,), contexts=(9,)),
    "many lengths": partial(attention_case, rows=(1,) * 6, contexts=(1, 63, 127, 128, 129, 400)),
    "drafts to verify": partial(attention_case, rows=(4, 1, 3), contexts=(126, 5, 0)),
    "one kv head": partial(attention_case, rows=(1, 1), contexts=(5, 30), heads=3, kv_heads=1, d=40),
    "small pages": partial(attention_case, rows=(1,), contexts=(21,), page_size=1),
    "large pages": partial(attention_case, rows=(1,), contexts=(21,), page_size=200),
    "not the first rows": partial(attention_case, rows=(1, 1), contexts=(3, 8), first_row=5),
    "scale matters": partial(attention_case, rows=(1,), contexts=(30,), scale=0.6),
    "fp8 pages": partial(attention_case, rows=(1,), contexts=(30,), stored=torch.float8_e4m3fn),
    "fp8 pages, scales": partial(
        attention_case, rows=(1,), contexts=(30,), stored=torch.float8_e4m3fn, k_scale=0.5, v_scale=3.0
    ),
    "float32 pages": partial(attention_case, rows=(1,), contexts=(30,), stored=torch.float32),
    "2.4T heads at tp 8": partial(attention_case, rows=(1, 1), contexts=(64, 300), heads=8, kv_heads=1, d=256),
}
