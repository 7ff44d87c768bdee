"""What flags of SGLang and vLLM are called here. Pure data; `config/spelling.py` reads command lines by it.

A flag that neither we nor these tables know is refused by the command line itself. docs/coming_from.md shows the same
tables to users, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Another spelling -> our key.
SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "--model-path": "model",
        "--tp-size": "tp",
        "--tensor-parallel-size": "tp",
        "-tp": "tp",
        "--pp-size": "pp",
        "--pipeline-parallel-size": "pp",
        "-pp": "pp",
        "--ep-size": "ep",
        "--expert-parallel-size": "ep",
        "--moe-a2a-backend": "expert_exchange",
        "--all2all-backend": "expert_exchange",
        "--speculative-moe-a2a-backend": "speculative_expert_exchange",
        "--speculative-algorithm": "speculative",
        "--speculative-num-steps": "draft_tokens",
        "--nccl-init-addr": "dist_init_addr",
        "--mem-fraction-static": "mem_fraction",
        "--gpu-memory-utilization": "mem_fraction",
        "--max-num-batched-tokens": "chunked_prefill_size",
        "--max-num-seqs": "max_running_requests",
        "--context-length": "max_model_len",
        "--context-len": "max_model_len",
        "--block-size": "page_size",
        "--random-seed": "seed",
        "--cuda-graph-max-bs": "graph_max_batch",
        "--max-cudagraph-capture-size": "graph_max_batch",
    }
)

# Another switch -> our switch.
SWITCHES: Mapping[str, str] = MappingProxyType({"--disable-cuda-graph": "enforce_eager"})

# A switch -> our key and the value that it stands for.
SETTINGS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "--disable-custom-all-reduce": ("all_reduce", "library"),
        "--disable-overlap-schedule": ("plan_ahead", "off"),
        "--async-scheduling": ("plan_ahead", "on"),
        "--no-async-scheduling": ("plan_ahead", "off"),
    }
)

# Words that others use for values of a key, on the command line only.
WORDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "attention_backend": {"torch_native": "reference", "TRITON_ATTN": "triton", "ROCM_AITER_FA": "aiter"},
        "dtype": {"bf16": "bfloat16", "float": "float32"},
        "kv_cache_dtype": {"fp8": "fp8_e4m3", "bf16": "bfloat16"},
        "load_format": {"safetensors": "auto"},
        "expert_exchange": {
            "none": "local",
            "allgather_reducescatter": "all_gather",
            "mori_high_throughput": "mori",
            "mori_low_latency": "mori",
        },
        "speculative": {"NEXTN": "mtp", "EAGLE": "mtp"},
        "speculative_expert_exchange": {"none": "local"},
    }
)


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A flag that is taken and changes nothing; the start-up report says why.

    `takes`: None for a switch, () for any value, else the values that are legal because they change nothing.
    """

    because: str
    takes: tuple[str, ...] | None = None


NO_EFFECT: Mapping[str, NoEffect] = MappingProxyType(
    {
        "--disable-radix-cache": NoEffect("there is no prefix cache: every prompt is computed"),
        "--no-enable-prefix-caching": NoEffect("there is no prefix cache: every prompt is computed"),
        "--disable-cuda-graph-padding": NoEffect("few sizes are captured, and batches are padded to them"),
        "--trust-remote-code": NoEffect("no code is ever taken from a checkpoint"),
        "--quantization": NoEffect("each tensor's format is read from the checkpoint", ("fp8",)),
        "--dp-size": NoEffect("there is one replica", ("1",)),
        "--data-parallel-size": NoEffect("there is one replica", ("1",)),
        "--ep-dispatch-algorithm": NoEffect("a row's own experts choose among replicas", ("static",)),
        "--ep-num-redundant-experts": NoEffect("--expert-placement says how often each is held", ("0",)),
        "--distributed-executor-backend": NoEffect("ranks are always processes of their own", ("mp",)),
        "--schedule-policy": NoEffect("the queue is first come, first served", ("fcfs",)),
        "--scheduling-policy": NoEffect("the queue is first come, first served", ("fcfs",)),
        "--enable-metrics": NoEffect("/metrics is always there"),
        "--enable-chunked-prefill": NoEffect("prefill always goes in chunks"),
        "--enable-mixed-chunk": NoEffect("rows of prompts and of answers always share steps"),
        "--enable-auto-tool-choice": NoEffect("--tool-call-parser alone decides"),
        "--language-model-only": NoEffect("only text is served"),
        "--disable-log-requests": NoEffect("requests are never logged"),
        "--disable-log-stats": NoEffect("numbers are in /metrics only"),
        "--decode-log-interval": NoEffect("numbers are in /metrics only", ()),
        "--skip-server-warmup": NoEffect("no request is made up for a warm-up"),
        "--speculative-eagle-topk": NoEffect("each draft has one successor", ("1",)),
        "--speculative-num-draft-tokens": NoEffect("with one successor each it follows from --draft-tokens", ()),
        "--stream-interval": NoEffect("every token is streamed as it comes", ("1",)),
        "--mamba-ssm-dtype": NoEffect("the recurrent state is always float32", ("float32",)),
        "--mamba-ssm-cache-dtype": NoEffect("the recurrent state is always float32", ("auto", "float32")),
        "--sampling-backend": NoEffect("there is one sampler", ("pytorch",)),
        "--grammar-backend": NoEffect("there is no constrained decoding", ("none",)),
        "--sampling-defaults": NoEffect("a request without sampling fields gets OpenAI's defaults", ("openai",)),
        "--generation-config": NoEffect("a request without sampling fields gets OpenAI's defaults", ("vllm",)),
        "--tokenizer-mode": NoEffect("tokenizer.json is read as it is", ("auto",)),
        "--headless": NoEffect("nodes above 0 have no HTTP server anyway"),
    }
)

# Refused -> what to do instead.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "--enable-prefix-caching": "there is no prefix cache; nothing replaces it, leave the flag out",
        "--max-prefill-tokens": "the prompt rows of a step are --chunked-prefill-size",
        "--cuda-graph-bs": "the sizes are powers of two up to --graph-max-batch",
        "--cuda-graph-capture-sizes": "the sizes are powers of two up to --graph-max-batch",
        "--compilation-config": "the model is not compiled; leave the flag out",
        "--enable-torch-compile": "the model is not compiled; leave the flag out",
        "--tokenizer": "the tokenizer is read from the folder of --model",
        "--tokenizer-path": "the tokenizer is read from the folder of --model",
        "--chat-template": "the template is read from the folder of --model: chat_template.jinja",
        "--hf-overrides": "edit config.json in the folder of --model",
        "--json-model-override-args": "edit config.json in the folder of --model",
        "--download-dir": "nothing is downloaded: --model is a folder",
        "--revision": "nothing is downloaded: --model is a folder",
        "--api-key": "there is no authentication; put a proxy in front of --host and --port that asks for the key",
        "--enable-dp-attention": "attention is split by --tp only",
        "--enable-expert-parallel": "expert parallelism is --ep N; theirs is --ep with the number of --tp",
        "--enable-eplb": "experts do not move while serving; --expert-placement FILE places them at the start",
        "--eplb-config": "experts do not move while serving; --expert-placement FILE places them at the start",
        "--init-expert-location": "where experts are is --expert-placement FILE, made by `rocm-serve experts`",
        "--expert-distribution-recorder-mode": "how often experts are chosen is counted into --expert-counts FILE",
        "--moe-runner-backend": "the provider of experts is --op moe_experts=PROVIDER",
        "--fp8-gemm-backend": "the provider of FP8 products is --op fp8_linear=PROVIDER",
        "--linear-attn-backend": "the providers are --op gdn_chunk=PROVIDER and --op gdn_decode=PROVIDER",
        "--prefill-attention-backend": "the provider of one op is --op attention_prefill=PROVIDER",
        "--decode-attention-backend": "the provider of one op is --op attention_decode=PROVIDER",
        "--master-addr": "where nodes meet is --dist-init-addr HOST:PORT",
        "--master-port": "where nodes meet is --dist-init-addr HOST:PORT",
        "--nccl-port": "all ports follow from --dist-init-addr HOST:PORT",
        "--base-gpu-id": "which GPUs are used is HIP_VISIBLE_DEVICES (CUDA_VISIBLE_DEVICES on NVIDIA)",
        "--enable-multimodal": "only text is served; leave the flag out",
        "--limit-mm-per-prompt": "only text is served; leave the flag out",
        "--max-mamba-cache-size": "there is one state slot for each of --max-running-requests",
        "--mamba-full-memory-ratio": "there is one state slot for each of --max-running-requests",
        "--schedule-conservativeness": "the only limits are --max-running-requests and --max-total-tokens",
        "--cpu-offload-gb": "nothing is offloaded; leave the flag out",
        "--swap-space": "nothing is swapped: a preempted request is computed again; leave the flag out",
        "--log-level-http": "there is one level, --log-level; HTTP requests are never logged",
        "--uvicorn-log-level": "there is one level, --log-level; HTTP requests are never logged",
        "--enable-log-requests": "requests are never logged; --trace DIR writes a line a step",
        "--soft-watchdog-timeout": "the one deadline is --watchdog-timeout",
    }
)

# Refused by how they begin -> why.
REFUSED_FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "--speculative-": "drafting is --speculative mtp --draft-tokens K, by the checkpoint's own draft layer",
        "--eplb-": "experts do not move while serving; --expert-placement FILE places them at the start",
        "--disaggregation-": "prefill and decode are not put on different servers; leave the flag out",
        "--hicache-": "there is no prefix cache; leave the flag out",
        "--enable-hierarchical-cache": "there is no prefix cache; leave the flag out",
        "--enable-lora": "there are no adapters; leave the flag out",
        "--lora-": "there are no adapters; leave the flag out",
        "--deepep-": "DeepEP is not there; how rows come to experts is --expert-exchange",
    }
)

# One more name of a flag in the tables above.
SHORT: Mapping[str, str] = MappingProxyType(
    {
        "-dp": "--data-parallel-size",
        "--dp": "--dp-size",
        "-q": "--quantization",
        "--cudagraph-capture-sizes": "--cuda-graph-capture-sizes",
    }
)

FOREIGN_PREFIXES = ("SGLANG_", "SGL_", "VLLM_")
# Variables of others that set what is a flag here.
VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "SGLANG_USE_AITER": "--attention-backend aiter, or --op OP=aiter, asks for AITER's kernels",
        "SGLANG_HOST_IP": "--dist-init-addr and the route to it decide the address",
        "SGLANG_LOGGING_CONFIG_PATH": "--log-level says how much is logged",
        "SGLANG_TORCH_PROFILER_DIR": "--trace DIR writes a line a step",
        "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "--expert-capacity says it",
        "SGLANG_MORI_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "--expert-capacity says it",
        "SGLANG_MORI_DISPATCH_DTYPE": "rows are sent as --fp8-activation and each layer's own weights say",
        "VLLM_ROCM_USE_AITER": "--attention-backend aiter, or --op OP=aiter, asks for AITER's kernels",
        "VLLM_ROCM_USE_AITER_MOE": "--op moe_experts=PROVIDER chooses the kernel",
        "VLLM_ROCM_USE_AITER_LINEAR": "--op fp8_linear=PROVIDER chooses the kernel",
        "VLLM_ALL2ALL_BACKEND": "--expert-exchange says it",
        "VLLM_ATTENTION_BACKEND": "--attention-backend says it",
        "VLLM_HOST_IP": "--dist-init-addr and the route to it decide the address",
        "VLLM_PORT": "all ports between ranks follow from --dist-init-addr",
        "VLLM_LOGGING_LEVEL": "--log-level says it",
        "VLLM_TARGET_DEVICE": "--device says it",
        "VLLM_API_KEY": "there is no authentication; put a proxy in front",
        "VLLM_ENGINE_ITERATION_TIMEOUT_S": "--watchdog-timeout says it",
        "VLLM_CPU_KVCACHE_SPACE": "--mem-fraction and --max-total-tokens bound the caches",
        "VLLM_TORCH_PROFILER_DIR": "--trace DIR writes a line a step",
    }
)


def others(field: str) -> tuple[str, ...]:
    """List the other spellings of one of our keys."""
    return tuple(flag for table in (SPELLINGS, SWITCHES) for flag, ours in table.items() if ours == field)


def ours(name: str) -> str | None:
    """Return our key for a foreign key, spelt as in a file or a variable (tp_size); None when it is no such name."""
    flag = "--" + name.replace("_", "-")
    return SPELLINGS.get(flag) or SWITCHES.get(flag)


def refusal(flag: str) -> str | None:
    """Say what to do instead of a refused flag; None when it is not refused."""
    if flag in SPELLINGS or flag in NO_EFFECT:
        return None
    family = next((why for begin, why in REFUSED_FAMILIES.items() if flag.startswith(begin)), None)
    return REFUSED.get(flag) or family


def foreign_variables(environ: Mapping[str, str]) -> list[str]:
    """Name the variables of other servers that are set, and what says the same here."""
    found = sorted(name for name in environ if name.startswith(FOREIGN_PREFIXES))
    lines = [f"{name} is not read here: {VARIABLES[name]}" for name in found if name in VARIABLES]
    rest = [name for name in found if name not in VARIABLES]
    if rest:
        lines.append(f"not read here, and nothing stands for it: {', '.join(rest)}")
    return lines
