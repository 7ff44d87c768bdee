"""Both forms of the gated delta rule against HF Transformers' functions, with keys and values of different sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from rocm_serve.ops.bind import OPS
from rocm_serve.ops.gdn_cases import gdn_case


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("sizes", [(32, 80), (128, 64), (128, 128)])
@pytest.mark.parametrize("name", ["gdn_chunk", "gdn_decode"])
def test_equals_hf_from_a_carried_state(name: str, sizes: tuple[int, int], rows: int) -> None:
    key, value = sizes
    made: dict[str, Any] = gdn_case(
        torch.Generator().manual_seed(rows), torch.float32, rows=(rows,), heads=8, key_heads=2, key=key, value=value
    )
    slot = made["sequences"].slots[0]
    g = -made["a_log_H"].exp() * F.softplus(made["a_TH"] + made["dt_bias_H"])
    hf = {"gdn_chunk": torch_chunk_gated_delta_rule, "gdn_decode": torch_recurrent_gated_delta_rule}[name]
    expected, state = hf(
        *(made[k][None, :rows] for k in ("q_ThK", "k_ThK", "v_THV")),
        g=g[None, :rows],
        beta=made["b_TH"].sigmoid()[None, :rows],
        initial_state=made["state"][slot].transpose(1, 2)[None].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    out = OPS[name].reference(**made)
    torch.testing.assert_close(out[:rows], expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made["state"][slot], state[0].transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_chunked_and_step_by_step_forms_agree_within_noise() -> None:
    made: dict[str, Any] = gdn_case(torch.Generator().manual_seed(1), torch.float32, rows=(150, 64))
    other = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in made.items()}
    chunked, stepped = OPS["gdn_chunk"].reference(**made), OPS["gdn_decode"].reference(**other)
    torch.testing.assert_close(chunked, stepped, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made["state"], other["state"], rtol=1e-4, atol=1e-5)
