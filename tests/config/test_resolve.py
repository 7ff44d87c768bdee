"""What "auto" becomes on which machine, and which wishes are refused."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from rocm_serve.config.resolve import resolve
from rocm_serve.config.schema import Resolved, ServeConfig
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import ModelFacts, parse_config
from rocm_serve.platform.facts import Platform

LAPTOP = Platform(device="cpu", arch="x86_64", cores=6, free_ram_bytes=16_000_000_000)
MI300X = Platform(
    device="rocm",
    arch="gfx942",
    num_gpus=8,
    compute_units=304,
    hbm_bytes=206_000_000_000,
    cores=96,
    free_ram_bytes=10**12,
)
TINY_CONFIG = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 2048,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 1024,
    "max_position_embeddings": 16384,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25},
    "eos_token_id": [2000, 2001],
    "dtype": "bfloat16",
}


@pytest.fixture
def facts() -> ModelFacts:
    return parse_config(TINY_CONFIG)


def resolved(facts: ModelFacts, platform: Platform = LAPTOP, **wishes: object) -> Resolved:
    config = msgspec.convert({"model": "some/dir"} | wishes, ServeConfig)
    return resolve(config, facts, platform, vocab_used=2010, run_dir="run", free_port=lambda: 4242)


def test_on_a_cpu_auto_means_float32_everywhere_and_one_thread_per_core(facts: ModelFacts) -> None:
    out = resolved(facts)
    assert (out.device, out.dtype, out.kv_cache_dtype, out.torch_threads) == ("cpu", "float32", "float32", 6)
    assert out.max_model_len == 16384
    assert out.eos_token_ids == (2000, 2001)
    assert (out.vocab_size, out.vocab_used) == (2048, 2010)


def test_on_a_gpu_auto_means_what_the_checkpoint_asks_for(facts: ModelFacts) -> None:
    out = resolved(facts, MI300X, tp=2)
    assert (out.device, out.dtype, out.kv_cache_dtype) == ("rocm", "bfloat16", "bfloat16")


A100 = Platform(device="cuda", arch="sm_80", num_gpus=8, gpu_name="A100", cores=8, free_ram_bytes=10**12)
MI250 = msgspec.structs.replace(MI300X, arch="gfx90a", gpu_name="MI250")


@pytest.mark.parametrize("gpu", [A100, MI250], ids=lambda gpu: gpu.arch)
def test_fp8_is_refused_on_a_gpu_without_instructions_for_it(facts: ModelFacts, gpu: Platform) -> None:
    where = rf"{gpu.gpu_name} \({gpu.arch}\) has no FP8 instructions"
    with pytest.raises(UserError, match=f"--kv-cache-dtype fp8_e4m3: {where}; legal: auto, bfloat16, float32, or GPUs"):
        resolved(facts, gpu, kv_cache_dtype="fp8_e4m3")
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    fp8 = parse_config(TINY_CONFIG | {"quantization_config": quantization})
    with pytest.raises(UserError, match=f"--model some/dir has FP8 weights, and {where}; legal: a checkpoint in bf"):
        resolved(fp8, gpu)
    assert resolved(facts, gpu).kv_cache_dtype == "bfloat16"
    assert resolved(fp8, MI300X, kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8_e4m3"
    assert resolved(fp8, LAPTOP, kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8_e4m3"


def test_memory_is_shared_on_a_cpu_and_nearly_all_taken_on_a_gpu(facts: ModelFacts) -> None:
    assert resolved(facts).mem_fraction == 0.5
    assert resolved(facts, MI300X).mem_fraction == 0.9
    assert resolved(facts, MI300X, mem_fraction=0.95).mem_fraction == 0.95


def test_the_cache_follows_a_dtype_that_was_asked_for(facts: ModelFacts) -> None:
    assert resolved(facts, dtype="bfloat16").kv_cache_dtype == "bfloat16"
    assert resolved(facts, dtype="bfloat16", kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8_e4m3"


def test_every_decided_value_has_a_reason_and_no_asked_one_has(facts: ModelFacts) -> None:
    decided = resolved(facts, tp=2)
    assert set(decided.reasons) == {
        "served_model_name",
        "chunked_prefill_size",
        "device",
        "dtype",
        "kv_cache_dtype",
        "max_model_len",
        "mem_fraction",
        "dist_init_addr",
        "torch_threads",
        "plan_ahead",
    }
    asked = resolved(
        facts,
        served_model_name="m",
        chunked_prefill_size=64,
        device="cpu",
        dtype="float32",
        kv_cache_dtype="float32",
        max_model_len=99,
        mem_fraction=0.5,
        dist_init_addr="h:1",
        plan_ahead="off",
    )
    assert set(asked.reasons) == {"torch_threads"}


@pytest.mark.parametrize(("tp", "pp", "threads"), [(1, 1, 6), (2, 1, 3), (2, 2, 1), (4, 2, 1)])
def test_threads_share_the_cores_and_are_never_zero(facts: ModelFacts, tp: int, pp: int, threads: int) -> None:
    assert resolved(facts, tp=tp, pp=pp).torch_threads == threads


def test_ranks_of_one_host_meet_on_a_free_port_unless_told_where(facts: ModelFacts) -> None:
    assert resolved(facts).dist_init_addr == ""
    assert resolved(facts, pp=2).dist_init_addr == "127.0.0.1:4242"
    assert resolved(facts, pp=2, dist_init_addr="[::1]:99").dist_init_addr == "[::1]:99"


def test_the_default_name_is_the_path_given(facts: ModelFacts) -> None:
    assert resolved(facts).served_model_name == "some/dir"
    assert resolved(facts, served_model_name="m").served_model_name == "m"


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"port": 65536}, "--port 65536: legal: 0..65535"),
        ({"port": -1}, "--port -1: legal: 0..65535"),
        ({"tp": 0}, "--tp 0: legal: 1 or more"),
        ({"pp": 9}, "--pp 9: 8 layers cannot be cut so; legal: 1..8"),
        ({"ep": 2}, "--ep 2: it does not divide --tp 1; legal: 1"),
        ({"nnodes": 2}, "--nnodes 2 needs --node-rank; legal: 0..1"),
        ({"nnodes": 2, "node_rank": 0}, "--nnodes 2: 1 ranks do not divide by it; legal: 1"),
        ({"node_rank": 1}, "--node-rank 1: legal with --nnodes 1: 0"),
        ({"page_size": 0}, "--page-size 0: legal: 1 or more"),
        ({"page_size": 24}, "--page-size 24: legal: powers of two from 1 to 256"),
        ({"page_size": 512}, "--page-size 512: legal: powers of two from 1 to 256"),
        ({"mem_fraction": 0.0}, "--mem-fraction 0.0: legal: above 0, up to 1"),
        ({"mem_fraction": 1.01}, "--mem-fraction 1.01: legal: above 0, up to 1"),
        ({"mem_fraction": float("nan")}, "--mem-fraction nan: legal: above 0, up to 1"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size 0: legal: 1 or more"),
        ({"max_running_requests": 0}, "--max-running-requests 0: legal: 1 or more"),
        ({"max_model_len": 0}, "--max-model-len 0: legal with this model: 2..16384"),
        ({"max_model_len": 1}, "--max-model-len 1: legal with this model: 2..16384"),
        ({"max_model_len": 16385}, "--max-model-len 16385: legal with this model: 2..16384"),
        ({"dist_init_addr": "host"}, "--dist-init-addr 'host': legal: HOST:PORT, port 1..65535"),
        ({"dist_init_addr": "host:0"}, "--dist-init-addr 'host:0': legal: HOST:PORT, port 1..65535"),
        ({"seed": -1}, f"--seed -1: legal: 0..{2**63 - 1}"),
        ({"device": "rocm"}, "--device rocm: this host has cpu; legal: auto, cpu"),
        ({"op": {"layers.8.linear": "reference"}}, "--op layers.8.linear=reference: the model has layers 0..7"),
        (
            {"enforce_eager": True, "graph_max_batch": 8},
            "--enforce-eager and --graph-max-batch 8 contradict; legal: one of them",
        ),
        ({"model": ""}, "--model is empty; legal: the folder of a checkpoint"),
    ],
)
def test_an_illegal_wish_is_one_line_with_the_legal_values(
    facts: ModelFacts, wishes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError) as refused:
        resolved(facts, **wishes)
    assert str(refused.value) == message


@pytest.mark.parametrize("tp", [3, 8, 32])
def test_a_degree_that_cuts_a_head_or_a_block_names_the_legal_ones(facts: ModelFacts, tp: int) -> None:
    with pytest.raises(UserError, match=rf"tp {tp} .*legal: 1, 2, 4$"):
        resolved(facts, tp=tp)


def test_more_ranks_than_gpus_are_refused(facts: ModelFacts) -> None:
    with pytest.raises(UserError, match="needs 8 GPUs, this host has 4; legal: products up to 4"):
        resolved(facts, msgspec.structs.replace(MI300X, num_gpus=4), tp=4, pp=2)


def test_a_tokenizer_larger_than_the_model_is_refused(facts: ModelFacts) -> None:
    with pytest.raises(UserError, match="ids up to 2009, the model has 2000 rows"):
        resolved(replace(facts, vocab_size=2000, eos_token_ids=(1,)))


def test_an_attention_backend_that_the_device_lacks_is_a_note_and_not_an_error(
    facts: ModelFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = resolved(facts, attention_backend="aiter", op={"attention_decode": "reference"})
    assert on_cpu.op == {"attention_decode": "reference"}  # asked for by name: not a matter of the wish
    assert on_cpu.notes == (
        "--attention-backend aiter: no such provider of attention_prefill on cpu; reference is bound (of reference)",
    )
    assert resolved(facts, attention_backend="aiter").notes == (
        "--attention-backend aiter: no such provider of attention_prefill and attention_decode on cpu;"
        " reference is bound (of reference)",
    )
    has_aiter = {"gfx942": {"attention_decode": ("triton", "aiter"), "*": ("reference",)}, "*": {"*": ("reference",)}}
    monkeypatch.setattr("rocm_serve.platform.table.PROVIDER_ORDER", has_aiter)
    providers = {"attention_prefill": ("reference",), "attention_decode": ("reference", "triton", "aiter")}
    monkeypatch.setattr("rocm_serve.platform.table.PROVIDERS", providers)
    on_gpu = resolved(facts, MI300X, attention_backend="aiter")
    assert on_gpu.op == {} and on_gpu.preferred == {"attention_decode": "aiter"}
    assert on_gpu.reasons["op attention_decode"] == "--attention-backend"
    assert len(on_gpu.notes) == 1 and "attention_prefill on gfx942" in on_gpu.notes[0]
    assert resolved(facts, attention_backend="reference").notes == ()


def test_a_wish_that_has_no_effect_here_is_a_note(facts: ModelFacts) -> None:
    assert resolved(facts, fp8_activation="fp8_1x128").notes == (
        "--fp8-activation fp8_1x128 has no effect: the model has no FP8 weights",
    )
    both = dict.fromkeys(("attention_prefill", "attention_decode"), "reference")
    assert resolved(facts, attention_backend="triton", op=both).notes == (
        "--attention-backend triton has no effect: --op names the providers of both ops",
    )


def test_notes_of_the_command_line_and_of_foreign_variables_are_kept(facts: ModelFacts) -> None:
    config = ServeConfig(model="some/dir")
    out = resolve(
        config,
        facts,
        LAPTOP,
        vocab_used=2010,
        run_dir="run",
        free_port=lambda: 4242,
        environ={"VLLM_LOGGING_LEVEL": "DEBUG"},
        notes=("said before",),
    )
    assert out.notes == ("said before", "VLLM_LOGGING_LEVEL is not read here: --log-level says it")


def test_a_length_or_cap_that_cannot_be_is_refused_before_the_network_is_asked(facts: ModelFacts) -> None:
    place = {"pp": 2, "nnodes": 2, "node_rank": 0, "dist_init_addr": "10.0.0.1:29500"}
    for wish, why in (({"max_model_len": 1}, "--max-model-len 1"), ({"max_total_tokens": 16}, "--max-total-tokens 16")):
        config = msgspec.convert({"model": "some/dir"} | place | wish, ServeConfig)
        with pytest.raises(UserError, match=why):
            resolve(
                config,
                facts,
                LAPTOP,
                vocab_used=2010,
                run_dir="run",
                free_port=lambda: 4242,
                find_network=lambda member, host, environ: pytest.fail("the network was asked"),
            )
