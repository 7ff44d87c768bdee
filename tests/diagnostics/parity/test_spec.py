"""SPECs of sides: what is read, and how what cannot be read is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rocm_serve.diagnostics.parity.spec import in_words_of, parse_side, words_of_a_spec
from rocm_serve.errors import UserError

MODEL = Path("nowhere")


def test_a_spec_is_topology_options_and_ops() -> None:
    text = "tp=2,pp=2,dtype=float32,op.moe_experts=reference,op.layers.3.linear=reference,chunk=16"
    config = parse_side(text, MODEL, "--a", longest=70).config
    assert config is not None
    assert (config.tp, config.pp, config.dtype, config.chunked_prefill_size) == (2, 2, "float32", 16)
    assert config.op == {"moe_experts": "reference", "layers.3.linear": "reference"}
    assert config.max_model_len == 70


def test_hf_is_a_side_without_a_configuration() -> None:
    assert parse_side("hf", MODEL, "--b", longest=70).is_hf
    assert not parse_side("tp=1", MODEL, "--b", longest=70).is_hf


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp", ("--a tp", "KEY=VALUE")),
        ("tp=", ("KEY=VALUE",)),
        ("op.=reference", ("--a op.=reference: 'op.=reference' is no KEY=VALUE",)),
        ("speed=3", ("unknown key 'speed'", "chunk", "op.OP")),
        ("tp=two", ("--a tp 'two'", "a whole number")),
        ("dtype=float16", ("bfloat16, float32",)),
        ("tp=1,tp=2", ("tp is given twice",)),
        ("tp=0", ("--a tp=0: legal: 1 or more",)),
        ("tp=4,ep=3", ("--a tp=4,ep=3: ep=3: it does not divide tp=4; legal: 1, 2, 4",)),
        ("expert_exchange=deepep", ("auto, local, torch, all_gather, mori",)),
        ("fp8_activation=int8", ("auto, bf16, fp8_1x128",)),
        ("pp=2,tp=0", ("--a pp=2,tp=0: tp=0: legal: 1 or more",)),
        ("page_size=7", ("--a page_size=7: legal: powers of two",)),
        ("chunk=0", ("--a chunk=0: legal: 1 or more",)),
        ("running=0", ("--a running=0: legal: 1 or more",)),
        ("mem_fraction=1.5", ("--a mem_fraction=1.5: legal: above 0, up to 1",)),
        ("op.attention=reference", ("--a op.attention=reference: no such op",)),
        ("op.linear=fast", ("--a op.linear=fast: no such provider",)),
        (
            "op.linear=reference,op.linear=triton",
            ("--a op.linear=reference,op.linear=triton: op.linear is given twice",),
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_is_legal(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refused:
        parse_side(text, MODEL, "--a", longest=70)
    for word in words:
        assert word in str(refused.value)
    assert not re.search(r"--(?!a\b)", str(refused.value)), "parity has no such flag"


@pytest.mark.parametrize(
    ("text", "sentence", "said"),
    [
        ("op.linear=hip", "--op linear=hip: not here", "op.linear=hip: not here"),
        ("tp=2,op.linear=hip", "--op linear=hip: not here", "tp=2,op.linear=hip: op.linear=hip: not here"),
        ("device=rocm", "--device rocm: no GPU", "device=rocm: no GPU"),
        ("expert_exchange=mori", "--expert-exchange mori runs on rocm", "expert_exchange=mori runs on rocm"),
        ("tp=1", "--tp 16 x --pp 1", "tp=1: tp=16 x pp=1"),
    ],
)
def test_what_serve_refuses_is_said_in_words_of_the_spec_and_once(text: str, sentence: str, said: str) -> None:
    with pytest.raises(UserError) as refused, words_of_a_spec("--a", text):
        raise UserError(sentence)
    assert str(refused.value) == f"--a {said}"


def test_notes_are_in_words_of_the_spec() -> None:
    note = "--attention-backend triton: no such provider"
    assert in_words_of("attention_backend=triton", note) == "attention_backend=triton: no such provider"
    assert in_words_of("tp=1", note) == "attention_backend triton: no such provider"
