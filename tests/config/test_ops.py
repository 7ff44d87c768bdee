"""Wishes for providers that bear on nothing, or cannot run here: refused before anything is started."""

from __future__ import annotations

import msgspec
import pytest

from rocm_serve.config.ops import check_called
from rocm_serve.config.resolve import resolve
from rocm_serve.config.schema import Resolved, ServeConfig
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import ModelFacts, parse_config
from rocm_serve.ops.bind import OPS
from rocm_serve.platform.facts import Platform
from rocm_serve.platform.network import Network
from rocm_serve.platform.table import archs_of
from tests.config.test_resolve import LAPTOP, MI300X, TINY_CONFIG

MOE = parse_config(TINY_CONFIG | {"mtp_num_hidden_layers": 1})
DENSE = parse_config(
    {name: value for name, value in TINY_CONFIG.items() if "exper" not in name and "moe" not in name}
    | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "intermediate_size": 512}
)


def resolved(
    wish: str, facts: ModelFacts = MOE, platform: Platform = LAPTOP, *, launches: bool = True, **wishes: object
) -> Resolved:
    name, _, provider = wish.partition("=")
    config = msgspec.convert({"model": "some/dir", "op": {name: provider}} | wishes, ServeConfig)
    found = resolve(
        config,
        facts,
        platform,
        vocab_used=2010,
        run_dir="run",
        free_port=lambda: 4242,
        find_network=lambda member, host, environ: Network(host, host, "eth0"),
    )
    if launches:
        check_called(found, facts)
    return found


def refusal(wish: str, facts: ModelFacts = MOE, platform: Platform = LAPTOP, **wishes: object) -> str:
    with pytest.raises(UserError) as refused:
        resolved(wish, facts, platform, **wishes)
    said = f"--op {wish}: "
    assert str(refused.value).startswith(said)
    return str(refused.value).removeprefix(said)


@pytest.mark.parametrize(
    ("op", "layer", "where"),
    [
        ("gdn_chunk", 3, "layers 0 to 2, 4 to 6"),
        ("attention_decode", 0, "layers 3, 7"),
        ("rms_norm", 1, "layer 0, the first of each stage of --pp 1"),
        ("add_norm_linear", 0, "layers 1 to 7"),
    ],
)
def test_a_layer_that_does_not_call_the_op_is_refused_with_those_that_do(op: str, layer: int, where: str) -> None:
    said = f"layer {layer} does not call {op}; it runs in {where}"
    assert refusal(f"layers.{layer}.{op}=reference") == said


def test_layers_are_those_of_the_model_on_all_stages_and_members() -> None:
    where = "layers 0, 2, 4, 6, the first of each stage of --pp 4"
    for rank in (0, 1):
        place = {"pp": 4, "nnodes": 2, "node_rank": rank, "dist_init_addr": "10.0.0.1:29500"}
        assert resolved("layers.6.rms_norm=reference", **place).op
        assert refusal("layers.3.rms_norm=reference", **place).endswith(where)


def test_an_op_beside_the_layers_has_no_layer() -> None:
    assert resolved("draw_token=reference").op == {"draw_token": "reference"}
    beside = "layer 3 does not call draw_token; it runs beside the layers, and --op draw_token=PROVIDER says what it"
    assert refusal("layers.3.draw_token=reference").startswith(beside)
    draft = "the model has layers 0..7; the draft layer has what --op linear=PROVIDER says"
    assert refusal("layers.8.linear=reference") == draft


@pytest.mark.parametrize("name", ["layers.03.linear", "layers.-1.linear", "layers.٣.linear", "layers.mtp.linear"])
def test_a_layer_has_one_spelling(name: str) -> None:
    assert refusal(f"{name}=reference").startswith("no such op; ops are rms_norm, ")


@pytest.mark.parametrize("form", ["", "layers.0."])
@pytest.mark.parametrize(
    ("op", "facts", "why"),
    [
        ("moe_route", DENSE, "this model calls no moe_route; leave it out"),
        ("fp8_linear", MOE, "this model calls no fp8_linear; leave it out"),
        ("gdn_extend", MOE, "gdn_extend runs in layers of Gated DeltaNet where drafts are verified, and none are here"),
        ("quantise_rows", MOE, "quantise_rows runs where rows are sent to FP8 experts as FP8, and none are here"),
    ],
)
def test_an_op_that_nothing_calls_is_refused(op: str, facts: ModelFacts, why: str, form: str) -> None:
    assert refusal(f"{form}{op}=reference", facts).startswith(why)


@pytest.mark.parametrize("form", ["", "layers.0."])
@pytest.mark.parametrize(
    ("op", "facts"), [("moe_route", DENSE), ("fp8_linear", MOE), ("gdn_extend", MOE), ("quantise_rows", MOE)]
)
def test_where_nothing_is_launched_an_op_that_nothing_calls_may_be_asked_about(
    op: str, facts: ModelFacts, form: str
) -> None:
    assert resolved(f"{form}{op}=reference", facts, launches=False).op == {f"{form}{op}": "reference"}


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ("layers.8.gdn_extend=reference", "the model has layers 0..7"),
        ("layers.3.gdn_chunk=reference", "layer 3 does not call gdn_chunk"),
        ("layers.3.draw_token=reference", "it runs beside the layers"),
        ("gdn_extend=triton", "triton runs on gfx*, sm_*, not on cpu"),
        ("nothing=reference", "no such op"),
    ],
)
def test_where_nothing_is_launched_names_layers_and_architectures_are_checked(wish: str, why: str) -> None:
    with pytest.raises(UserError) as refused:
        resolved(wish, launches=False)
    assert why in str(refused.value)


def test_what_calls_it_lets_it_through() -> None:
    assert resolved("layers.0.gdn_extend=reference", speculative="mtp").op
    assert refusal("layers.3.gdn_extend=reference", speculative="mtp").endswith("layers 0 to 2, 4 to 6")
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    facts = parse_config(TINY_CONFIG | {"quantization_config": fp8})
    sent = {"tp": 2, "ep": 2, "expert_exchange": "torch", "fp8_activation": "fp8_1x128"}
    assert resolved("layers.5.quantise_rows=reference", facts, **sent).op
    assert refusal("quantise_rows=reference", facts, **sent | {"expert_exchange": "local"})


@pytest.mark.parametrize("form", ["", "layers.0."])
def test_a_provider_that_the_device_cannot_run_is_refused_with_those_it_can(form: str) -> None:
    said = refusal(f"{form}moe_experts=triton")
    assert said == ("triton runs on gfx942, gfx950, sm_89, sm_90, sm_100 and later, not on cpu; legal there: reference")
    h200 = msgspec.structs.replace(MI300X, device="cuda", arch="sm_90")
    assert refusal(f"{form}linear=aiter", platform=h200) == (
        "aiter runs on gfx942, gfx950, not on sm_90; legal there: reference, torch, triton"
    )
    assert resolved(f"{form}linear=aiter", platform=MI300X).op  # whether it is installed, a rank knows


def test_what_is_known_of_architectures_without_torch_is_what_providers_say() -> None:
    for op in OPS.values():
        for provider in op.providers.values():
            assert provider.archs == archs_of(op.name, provider.name), (op.name, provider.name)
