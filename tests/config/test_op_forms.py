"""Which pairs of wishes for providers leave one of them without effect, and which do not."""

from __future__ import annotations

import pytest

from rocm_serve.config.op_forms import ruled_out
from rocm_serve.config.resolve import resolve
from rocm_serve.config.schema import ServeConfig
from rocm_serve.ops.bind import OPS
from rocm_serve.platform.table import PARTS
from tests.config.test_ops import MOE
from tests.config.test_resolve import MI300X


def said(*wishes: str, drafts: bool = False) -> list[str]:
    op = dict(wish.split("=") for wish in wishes)
    config = ServeConfig(model="some/dir", op=op, speculative="mtp" if drafts else "off")
    made = resolve(config, MOE, MI300X, vocab_used=2010, run_dir="run", free_port=lambda: 1)
    return list(ruled_out(made, MOE))


@pytest.mark.parametrize(
    ("idle", "other"),
    [
        ("gdn_decode=triton", "gdn_step=triton"),
        ("kv_write=aiter", "qk_norm_rope_kv_write=triton"),
        ("layers.3.qk_norm_rope=reference", "layers.3.qk_norm_rope_kv_write=triton"),
        ("gdn_extend=triton", "gdn_step=reference"),
        ("gdn_extend=triton", "causal_conv=reference"),
        ("shared_down_add=triton", "shared_expert_add=reference"),
        ("layers.4.shared_down_add=triton", "sigmoid_mul=reference"),
        ("layers.1.add_norm_linear=triton", "gdn_step=reference"),
        ("add_norm_linear=triton", "shared_expert_add=reference"),
    ],
)
def test_a_wish_that_another_rules_out_is_named_with_it(idle: str, other: str) -> None:
    drafts = "gdn_extend" in idle
    op = idle.split("=")[0].rpartition(".")[2]
    assert said(idle, other, drafts=drafts) == [
        f"--op {idle} has no effect: --op {other} has its layers do without {op}"
    ]
    assert not said(idle, drafts=drafts) and not said(other, drafts=drafts)


@pytest.mark.parametrize(
    "wishes",
    [
        ("layers.3.qk_norm_rope=reference", "qk_norm_rope_kv_write=triton"),  # that layer then runs by parts
        ("gdn_decode=triton", "gdn_step=reference"),
        ("gdn_decode=triton", "layers.0.gdn_step=triton"),
        ("causal_conv=triton", "gdn_step=triton"),
        ("add_norm_linear=triton", "linear=aiter"),
        ("add_norm_linear=triton", "gdn_step=reference"),
        ("layers.3.add_norm_linear=triton", "gdn_step=reference"),
        ("shared_down_add=reference", "shared_expert_add=reference"),
        ("shared_down_add=triton", "shared_expert_add=triton", "sigmoid_mul=reference"),
    ],
)
def test_wishes_that_some_layer_can_have_together_pass(wishes: tuple[str, ...]) -> None:
    assert not said(*wishes)


def test_parts_are_those_of_the_ops() -> None:
    assert {op.name: op.parts for op in OPS.values() if op.parts} == dict(PARTS)
