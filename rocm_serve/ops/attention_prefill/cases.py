"""Inputs of attention_prefill that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.attention_cases import attention_case
from rocm_serve.ops.contract import Case

CASES: dict[str, Case] = {
    "no sequences": partial(attention_case, rows=(), contexts=()),
    "one row": partial(attention_case, rows=(1,), contexts=(0,)),
    "odd lengths": partial(attention_case, rows=(37, 1, 130), contexts=(0, 0, 0)),
    "contexts": partial(attention_case, rows=(7, 65), contexts=(129, 200)),
    "context ends at a block": partial(attention_case, rows=(3, 128), contexts=(128, 128)),
    "one kv head": partial(attention_case, rows=(40,), contexts=(5,), heads=3, kv_heads=1, d=40),
    "no sharing": partial(attention_case, rows=(40,), contexts=(5,), heads=4, kv_heads=4),
    "small pages": partial(attention_case, rows=(33,), contexts=(21,), page_size=1),
    "large pages": partial(attention_case, rows=(33,), contexts=(21,), page_size=200),
    "not the first rows": partial(attention_case, rows=(9, 4), contexts=(3, 0), first_row=17),
    "scale matters": partial(attention_case, rows=(20,), contexts=(3,), scale=0.6),
    "fp8 pages": partial(attention_case, rows=(20,), contexts=(3,), stored=torch.float8_e4m3fn),
    "fp8 pages, scales": partial(
        attention_case, rows=(20,), contexts=(3,), stored=torch.float8_e4m3fn, k_scale=0.5, v_scale=3.0
    ),
    "float32 pages": partial(attention_case, rows=(20,), contexts=(3,), stored=torch.float32),
    "2.4T heads at tp 8": partial(attention_case, rows=(66,), contexts=(64,), heads=8, kv_heads=1, d=256),
}
