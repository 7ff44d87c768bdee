"""(wishes, model facts, machine facts) -> Resolved: every "auto" decided here, each with its reason. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from rocm_serve.config import ahead, all_reduce, chunk, drafting, experts, graphs, ops
from rocm_serve.config.aliases import foreign_variables
from rocm_serve.config.launcher import MAX_PORT, Membership, join_address, membership, split_address
from rocm_serve.config.load import flag_name
from rocm_serve.config.schema import (
    DeviceName,
    DtypeName,
    Fp8ActivationName,
    KvDtypeName,
    Resolved,
    ServeConfig,
)
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, one_of_each, stage_params
from rocm_serve.parallel.expert_map import ExpertPlan
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.platform.facts import GPUS_WITH_FP8, Platform
from rocm_serve.platform.network import Network
from rocm_serve.platform.table import fp8_activation, provider_order

MAX_PAGE_SIZE = 256
MAX_SEED = 2**63 - 1
_NOT_EMPTY = {
    "model": "the folder of a checkpoint",
    "host": "an address or a name of this host; 0.0.0.0 is all of them",
    "served_model_name": "a name",
}
GPU_MEM_FRACTION = 0.9  # the rest is for communicators, device graphs and the driver
CPU_MEM_FRACTION = 0.5
_ATTENTION = ("attention_prefill", "attention_decode")
LEAST_MODEL_LEN = 2  # a prompt of one token, and one token of an answer


def check_wishes(config: ServeConfig) -> None:
    """Refuse what is illegal for any model on any machine.

    Errors: UserError naming the flag and its legal values.
    """
    _within(config, "port", 0, MAX_PORT)
    _within(config, "seed", 0, MAX_SEED)
    for field in ("tp", "pp", "ep", "nnodes", "dist_timeout", "watchdog_timeout", "page_size"):
        _within(config, field, 1, None)
    for field in (
        "max_running_requests",
        "max_queued_requests",
        "max_total_tokens",
        "chunked_prefill_size",
        "expert_capacity",
    ):
        if getattr(config, field) is not None:
            _within(config, field, 1, None)
    if config.page_size > MAX_PAGE_SIZE or config.page_size & (config.page_size - 1):
        raise UserError(f"--page-size {config.page_size}: legal: powers of two from 1 to {MAX_PAGE_SIZE}")
    if config.mem_fraction is not None and not 0 < config.mem_fraction <= 1:
        raise UserError(f"--mem-fraction {config.mem_fraction}: legal: above 0, up to 1")
    if config.tp % config.ep:
        legal = ", ".join(str(ep) for ep in range(1, config.tp + 1) if config.tp % ep == 0)
        raise UserError(f"--ep {config.ep}: it does not divide --tp {config.tp}; legal: {legal}")
    for field, legal in _NOT_EMPTY.items():
        if getattr(config, field) == "":
            raise UserError(f"{flag_name(field)} is empty; legal: {legal}")
    if config.dist_init_addr is not None:
        split_address(config.dist_init_addr)
    if config.enforce_eager and config.graph_max_batch is not None and config.graph_max_batch > 0:
        raise UserError(
            f"--enforce-eager and --graph-max-batch {config.graph_max_batch} contradict; legal: one of them"
        )
    ops.check_names(config.op)


def check_degrees(config: ServeConfig, facts: ModelFacts) -> None:
    """Refuse tensor-, pipeline- and expert-parallel degrees that would cut what must stay whole.

    Errors: UserError naming the legal degrees.
    """
    if not 1 <= config.pp <= facts.num_layers:
        raise UserError(f"--pp {config.pp}: {facts.num_layers} layers cannot be cut so; legal: 1..{facts.num_layers}")
    short = one_of_each(facts)
    where = Mesh(config.tp, 1, config.ep).coord(0)
    stage_params(short, where, formats=ConfigFormats(short), mtp=False, experts=ExpertPlan(config.ep))


def check_total_tokens(max_total_tokens: int | None, page_size: int, max_model_len: int) -> None:
    """Refuse a cap on cached tokens that holds no request of full length. Errors: UserError with the least legal."""
    least = -(-max_model_len // page_size) * page_size
    if max_total_tokens is not None and max_total_tokens < least:
        raise UserError(
            f"--max-total-tokens {max_total_tokens} holds no request of --max-model-len {max_model_len};"
            f" legal: at least {least}"
        )


def resolve(
    config: ServeConfig,
    facts: ModelFacts,
    platform: Platform,
    *,
    vocab_used: int,
    run_dir: str,
    free_port: Callable[[], int],
    environ: Mapping[str, str] | None = None,
    find_network: Callable[[int, str, Mapping[str, str]], Network] | None = None,
    notes: tuple[str, ...] = (),
) -> Resolved:
    """Decide everything that was left open.

    `vocab_used` is one above the highest id the tokenizer knows. `free_port` is asked only when the ranks of this
    host need a place to meet and none was given. `environ` may hold what a launcher has set; `find_network` (member,
    host of --dist-init-addr, environ) is asked only when there are several members. `notes` come from the command line.
    Errors: UserError naming the flag and its legal values.
    """
    check_wishes(config)
    check_degrees(config, facts)
    environ = environ or {}
    place = membership(config, environ)
    reasons = dict(place.reasons)
    device = _device(config, platform, reasons)
    arch = "cpu" if device == "cpu" else platform.arch
    ops.check_archs(config.op, arch)
    workers = config.tp * config.pp // place.nnodes
    _check_gpus(config, place, device, platform, workers)
    _check_fp8(config, facts, device, platform)
    _check_vocabulary(vocab_used, facts)
    dtype = _dtype(config, facts, device, reasons)
    config = _with_memory(config, facts, platform, device, dtype, reasons)
    preferred, unmet = _attention(config, arch, reasons)
    activation = _fp8_activation(config, facts, arch, reasons, unmet)
    decided: dict[str, object] = {  # what may be refused without the network comes before `_where` asks for it
        "max_model_len": _max_model_len(config, facts, reasons),
        "served_model_name": _name(config, reasons),
        **_where(config, place, environ, free_port, find_network, reasons),
        "device": device,
        "dtype": dtype,
        "kv_cache_dtype": _kv_dtype(config, dtype, reasons),
        "fp8_activation": activation,
        "all_reduce": all_reduce.decide(config, device, arch, place.nnodes, reasons),
        **experts.decide(config, facts, device, activation, reasons, unmet),
        **drafting.decide(config, facts, reasons, unmet),
        "vocab_size": facts.vocab_size,
        "vocab_used": vocab_used,
        "eos_token_ids": facts.eos_token_ids,
        "torch_threads": _threads(platform, workers, reasons),
        "run_dir": run_dir,
        "op": dict(config.op),
        "preferred": preferred,
        "reasons": reasons,
    }
    decided |= graphs.decide(config, device, place.nnodes, decided, reasons, unmet)
    decided |= ahead.decide(config, device, decided, reasons, unmet)
    taken_over = {name: value for name, value in msgspec.structs.asdict(config).items() if name not in decided}
    said = {"notes": (*notes, *unmet, *foreign_variables(environ))}
    return ops.checked(msgspec.convert(taken_over | decided | said, Resolved), facts)


def _check_gpus(config: ServeConfig, place: Membership, device: DeviceName, platform: Platform, workers: int) -> None:
    if device != "cpu" and workers > platform.num_gpus:
        legal = f"products up to {platform.num_gpus * place.nnodes}" + (
            f" on {place.nnodes} such hosts" if place.nnodes > 1 else ""
        )
        raise UserError(
            f"--tp {config.tp} x --pp {config.pp} needs {workers} GPUs{' a host' if place.nnodes > 1 else ''},"
            f" this host has {platform.num_gpus}; legal: {legal}"
        )


def _check_vocabulary(vocab_used: int, facts: ModelFacts) -> None:
    if not 0 < vocab_used <= facts.vocab_size:
        raise UserError(
            f"the tokenizer knows ids up to {vocab_used - 1}, the model has {facts.vocab_size} rows for them"
        )


def _check_fp8(config: ServeConfig, facts: ModelFacts, device: DeviceName, platform: Platform) -> None:
    if device == "cpu" or platform.fp8_dialect != "none":
        return
    gpu = f"{platform.gpu_name or 'this GPU'} ({platform.arch})"
    if facts.quantization is not None:
        raise UserError(
            f"--model {config.model} has FP8 weights, and {gpu} has no FP8 instructions;"
            f" legal: a checkpoint in bfloat16, or GPUs that are {GPUS_WITH_FP8}"
        )
    if config.kv_cache_dtype == "fp8_e4m3":
        raise UserError(
            f"--kv-cache-dtype fp8_e4m3: {gpu} has no FP8 instructions; legal: auto, bfloat16, float32,"
            f" or GPUs that are {GPUS_WITH_FP8}"
        )


def _within(config: ServeConfig, field: str, least: int, most: int | None) -> None:
    value = getattr(config, field)
    if value < least or (most is not None and value > most):
        legal = f"{least} or more" if most is None else f"{least}..{most}"
        raise UserError(f"{flag_name(field)} {value}: legal: {legal}")


def _name(config: ServeConfig, reasons: dict[str, str]) -> str:
    if config.served_model_name is not None:
        return config.served_model_name
    reasons["served_model_name"] = "the path of --model, as given"
    return config.model


def _device(config: ServeConfig, platform: Platform, reasons: dict[str, str]) -> DeviceName:
    if config.device == "auto":
        reasons["device"] = f"auto: this host is {platform.describe()}"
        return platform.device
    if config.device != platform.device:
        raise UserError(f"--device {config.device}: this host has {platform.device}; legal: auto, {platform.device}")
    return config.device


def _dtype(config: ServeConfig, facts: ModelFacts, device: DeviceName, reasons: dict[str, str]) -> DtypeName:
    if config.dtype != "auto":
        return config.dtype
    if device == "cpu":
        reasons["dtype"] = "auto: a CPU without native bf16 multiplies bf16 matrices about 8 times slower than float32"
        return "float32"
    reasons["dtype"] = f"auto: config.json asks for {facts.dtype}"
    return facts.dtype


def _kv_dtype(config: ServeConfig, dtype: DtypeName, reasons: dict[str, str]) -> KvDtypeName:
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    reasons["kv_cache_dtype"] = "auto: that of the model's activations, so caching changes no bit"
    return dtype


def _fp8_activation(
    config: ServeConfig, facts: ModelFacts, arch: str, reasons: dict[str, str], notes: list[str]
) -> Fp8ActivationName:
    if config.fp8_activation != "auto":
        if facts.quantization is None:
            notes.append(f"--fp8-activation {config.fp8_activation} has no effect: the model has no FP8 weights")
        return config.fp8_activation
    chosen = fp8_activation(arch)
    if facts.quantization is not None:
        how = "as Transformers computes" if chosen == "bf16" else "as kernels of GPUs want it"
        reasons["fp8_activation"] = f"auto: {how}"
    return chosen


def _max_model_len(config: ServeConfig, facts: ModelFacts, reasons: dict[str, str]) -> int:
    length = config.max_model_len
    if length is None:
        reasons["max_model_len"] = "auto: the positions that config.json allows"
        length = facts.max_position
    if not LEAST_MODEL_LEN <= length <= facts.max_position:
        raise UserError(f"--max-model-len {length}: legal with this model: {LEAST_MODEL_LEN}..{facts.max_position}")
    check_total_tokens(config.max_total_tokens, config.page_size, length)
    return length


def _with_memory(
    config: ServeConfig,
    facts: ModelFacts,
    platform: Platform,
    device: DeviceName,
    dtype: DtypeName,
    reasons: dict[str, str],
) -> ServeConfig:
    """Decide the share of memory, and the prompt rows of a step that fit into what is left of it."""
    share = _mem_fraction(config, device, reasons)
    rows = chunk.decide(config, facts, platform, device, share, 4 if dtype == "float32" else 2, reasons)
    return msgspec.structs.replace(config, mem_fraction=share, chunked_prefill_size=rows)


def _mem_fraction(config: ServeConfig, device: DeviceName, reasons: dict[str, str]) -> float:
    if config.mem_fraction is not None:
        return config.mem_fraction
    if device == "cpu":
        reasons["mem_fraction"] = "auto: half of the free RAM, which other programs want too"
        return CPU_MEM_FRACTION
    reasons["mem_fraction"] = "auto: the rest of a GPU is for communicators, graphs and the driver"
    return GPU_MEM_FRACTION


def _where(
    config: ServeConfig,
    place: Membership,
    environ: Mapping[str, str],
    free_port: Callable[[], int],
    find_network: Callable[[int, str, Mapping[str, str]], Network] | None,
    reasons: dict[str, str],
) -> dict[str, object]:
    """Decide where this process stands and where the ranks meet."""
    where: dict[str, object] = {
        "nnodes": place.nnodes,
        "node_rank": place.node_rank,
        "members": place.members,
        "member": place.member,
        "first_device": place.first_device,
        "dist_init_addr": place.init_addr or "",
    }
    if place.members > 1:
        assert place.init_addr is not None and find_network is not None
        host, port = split_address(place.init_addr)
        network = find_network(place.member, host, environ)
        reasons.update(network.reasons)
        if network.init_host != host:
            reasons["dist_init_addr"] = f"{host} is {network.init_host}"
        return where | {
            "dist_init_addr": join_address(network.init_host, port),
            "address": network.address,
            "interface": network.interface,
            "mtu": network.mtu,
        }
    if place.init_addr is None and config.tp * config.pp > 1:
        reasons["dist_init_addr"] = "auto: all workers are on this host; a free port"
        return where | {"dist_init_addr": f"127.0.0.1:{free_port()}"}
    if place.init_addr is None:
        reasons["dist_init_addr"] = "one worker has nobody to meet"
    return where


def _attention(config: ServeConfig, arch: str, reasons: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Turn --attention-backend into the first choice of the ops that have it on `arch`; say which do not have it."""
    wish = config.attention_backend
    preferred: dict[str, str] = {}
    if wish == "auto":
        return preferred, []
    open_ops = [op for op in _ATTENTION if op not in config.op]
    if not open_ops:
        return preferred, [f"--attention-backend {wish} has no effect: --op names the providers of both ops"]
    without = [op for op in open_ops if wish not in provider_order(op, arch)]
    for op in open_ops:
        if op not in without:
            preferred[op] = wish
            reasons[f"op {op}"] = "--attention-backend"
    notes = []
    for has in dict.fromkeys(provider_order(op, arch) for op in without):
        names = " and ".join(op for op in without if provider_order(op, arch) == has)
        bound = f"{has[0]} is bound (of {', '.join(has)})"
        notes.append(f"--attention-backend {wish}: no such provider of {names} on {arch}; {bound}")
    return preferred, notes


def _threads(platform: Platform, workers: int, reasons: dict[str, str]) -> int:
    threads = max(1, platform.cores // workers)
    reasons["torch_threads"] = f"{platform.cores} cores / {workers} workers"
    if workers > platform.cores:
        reasons["torch_threads"] += ": fewer cores than workers, they take turns"
    return threads
