"""Expert parallelism: what is legal, and what every rank is to build. Decided before anything is started. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from rocm_serve.config.drafting import DRAFT_TOKENS
from rocm_serve.config.schema import DeviceName, ExchangeName, Fp8ActivationName, Resolved, ServeConfig
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import ModelFacts, promised_fp8
from rocm_serve.parallel.expert_map import ExpertMap, ExpertPlan
from rocm_serve.parallel.expert_placement import MoeShape, read_placement

SCALE_WIDTH = 128  # columns of a row that share one scale
DRAFT = " draft"  # after an architecture's name: its draft layer


@dataclass(frozen=True, slots=True)
class ExchangeFacts:
    """What an exchange can do. None: anything.

    `sends`: rows go to the ranks of their experts, each rank has the shared expert whole. `top_k`: the most choices of
    a row. `ranks`: legal sizes of the stage's tensor-parallel group; `whole_experts`: --ep must be that size.
    Capacities are multiples of `capacity_step`, at least `least_capacity`. `host_group`: ranks also meet on the host.
    """

    sends: bool
    top_k: int | None = None
    devices: tuple[DeviceName, ...] | None = None
    ranks: tuple[int, ...] | None = None
    whole_experts: bool = False
    capacity_step: int = 1
    least_capacity: int = 1
    host_group: bool = False


# MORI: a stage lies inside a node, of which it asks a power of two of GPUs, 8 at most; slots are allotted in whole
# wavefronts of 64; a capacity of 32 has given wrong answers in silence elsewhere.
EXCHANGES: Mapping[ExchangeName, ExchangeFacts] = MappingProxyType(
    {
        "local": ExchangeFacts(sends=False),
        "torch": ExchangeFacts(sends=True),
        "all_gather": ExchangeFacts(sends=True),
        "mori": ExchangeFacts(
            sends=True,
            devices=("rocm",),
            ranks=(2, 4, 8),
            whole_experts=True,
            capacity_step=64,
            least_capacity=256,
            host_group=True,
        ),
    }
)

# Pairs that the tests run end to end with worker processes; MORI has never been run on a GPU by us.
VALIDATED: frozenset[tuple[str, ExchangeName]] = frozenset(
    {
        ("Qwen3_5MoeForCausalLM", "local"),
        ("Qwen3_5MoeForCausalLM", "torch"),
        ("Qwen3_5MoeForCausalLM", "all_gather"),
        ("Qwen3_5MoeForConditionalGeneration", "local"),
        ("Qwen3_5MoeForCausalLM" + DRAFT, "local"),
        ("Qwen3_5MoeForCausalLM" + DRAFT, "torch"),
        ("Qwen3_5MoeForCausalLM" + DRAFT, "all_gather"),
        ("Qwen3_5MoeForConditionalGeneration" + DRAFT, "local"),
    }
)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """One exchange under judgement: the model's, or its draft layer's. `flag` is what chose it."""

    name: ExchangeName
    flag: str
    architecture: str
    fp8: bool  # its layers' experts are, by the configuration
    rows: int  # the most that one rank may have to send in a step

    @property
    def facts(self) -> ExchangeFacts:
        return EXCHANGES[self.name]

    @property
    def others(self) -> str:
        return ", ".join(name for name in EXCHANGES if name != self.name)


def decide(
    config: ServeConfig,
    facts: ModelFacts,
    device: DeviceName,
    activation: Fp8ActivationName,
    reasons: dict[str, str],
    notes: list[str],
) -> dict[str, object]:
    """Decide exchanges and capacities, and return these fields of Resolved; `reasons` and `notes` are added to.

    Errors: UserError naming the flag and what is legal.
    """
    if not facts.is_moe:
        _check_dense(config)
    name: ExchangeName = "local" if config.expert_exchange == "auto" else config.expert_exchange
    if config.expert_exchange == "auto" and config.ep > 1:
        reasons["expert_exchange"] = "auto: every rank has every row already, and one all-reduce completes them"
    main = _Chosen(
        name,
        "--expert-exchange",
        facts.architecture,
        promised_fp8(facts, "model.layers.0.mlp.experts.0.down_proj.weight"),
        _sent_rows(config),
    )
    _check(main, config, facts, device, activation, notes)
    draft = _draft(config, facts, name)
    if draft is not None:
        _check(draft, config, facts, device, activation, notes)
        if config.speculative_expert_exchange != "inherit" and config.speculative == "off":
            notes.append(f"{draft.flag} {draft.name} has no effect without --speculative mtp or auto")
    return {
        "expert_exchange": name,
        "expert_capacity": _capacity(main, config.expert_capacity, config, reasons),
        "speculative_expert_exchange": draft.name if draft else name,
        "speculative_expert_capacity": _capacity(draft, None, config, {}) if draft else 0,
    }


def rows_of_a_request(config: ServeConfig) -> int:
    """Return the most rows of a request that decodes: its newest token, and the drafts behind it."""
    return 1 if config.speculative == "off" else 1 + (config.draft_tokens or DRAFT_TOKENS)


def greatest_rows(chunk: int, running: int, tp: int) -> int:
    """Return the most rows that one of `tp` ranks has in a step of `chunk` prompt rows and `running` others."""
    return -(-(chunk + running) // tp)


def meets_on_host(resolved: Resolved) -> bool:
    """Say whether an exchange of this launch needs its ranks to meet on the host, too."""
    draft = [resolved.speculative_expert_exchange] if resolved.draft_tokens else []
    return any(EXCHANGES[name].host_group for name in (resolved.expert_exchange, *draft))


def expert_plan(resolved: Resolved, facts: ModelFacts) -> ExpertPlan:
    """Say how the experts lie over the ranks of a stage; reads the file of --expert-placement, if there is one.

    Errors: UserError for a placement of another model or degree.
    """
    names = resolved.expert_exchange, resolved.speculative_expert_exchange
    return plan_of(facts, resolved.ep, *names, placement=resolved.expert_placement)


def plan_of(
    facts: ModelFacts, ep: int, exchange: ExchangeName, of_draft: ExchangeName, *, placement: str | None
) -> ExpertPlan:
    """As `expert_plan`, before everything else is decided. `placement`: a file, or None."""
    maps: Mapping[int, ExpertMap] = {}
    if placement is not None:
        maps = read_placement(placement, moe_shape(facts), ep, draft=facts.mtp_layers > 0)
    return ExpertPlan(
        ep=ep, shared_whole=EXCHANGES[exchange].sends, draft_shared_whole=EXCHANGES[of_draft].sends, maps=maps
    )


def moe_shape(facts: ModelFacts) -> MoeShape:
    """What a placement and counts of this model's experts are known by."""
    return MoeShape(
        architecture=facts.architecture,
        num_layers=facts.num_layers,
        num_experts=facts.num_experts,
        top_k=facts.top_k,
    )


def _sent_rows(config: ServeConfig) -> int:
    assert config.chunked_prefill_size is not None, "decided before"
    return greatest_rows(
        config.chunked_prefill_size, rows_of_a_request(config) * config.max_running_requests, config.tp
    )


def _draft(config: ServeConfig, facts: ModelFacts, main: ExchangeName) -> _Chosen | None:
    wish = config.speculative_expert_exchange
    if not facts.mtp_layers or not facts.is_moe:
        if wish != "inherit":
            raise UserError(f"--speculative-expert-exchange {wish}: the model has no draft layer; legal: inherit")
        return None
    return _Chosen(
        main if wish == "inherit" else wish,
        "--expert-exchange" if wish == "inherit" else "--speculative-expert-exchange",
        facts.architecture + DRAFT,
        promised_fp8(facts, "mtp.layers.0.mlp.experts.0.down_proj.weight"),
        _sent_rows(config),
    )


def _check_dense(config: ServeConfig) -> None:
    """Refuse for a model without experts what is about experts."""
    wishes = {
        "--expert-exchange": config.expert_exchange not in ("auto", "local"),
        "--expert-placement": config.expert_placement is not None,
        "--expert-counts": config.expert_counts is not None,
    }
    for flag, given in wishes.items():
        if given:
            raise UserError(f"{flag}: the model has no experts; leave the flag out")


def _check(
    one: _Chosen,
    config: ServeConfig,
    facts: ModelFacts,
    device: DeviceName,
    activation: Fp8ActivationName,
    notes: list[str],
) -> None:
    said, limits = f"{one.flag} {one.name}", one.facts
    if limits.devices is not None and device not in limits.devices:
        raise UserError(f"{said} runs on {', '.join(limits.devices)}, and this is {device}; legal: {one.others}")
    if limits.ranks is not None and config.tp not in limits.ranks:
        raise UserError(f"{said} with --tp {config.tp}; legal: --tp {', '.join(map(str, limits.ranks))}")
    if limits.whole_experts and config.ep != config.tp:
        raise UserError(
            f"{said} sends a row to whole experts, and --ep {config.ep} with --tp {config.tp} cuts them;"
            f" legal: --ep {config.tp}, or {one.others}"
        )
    if limits.top_k is not None and facts.top_k > limits.top_k:
        raise UserError(
            f"{said} takes up to {limits.top_k} experts a row, and the model chooses {facts.top_k}; legal: {one.others}"
        )
    if limits.sends and one.fp8 and activation == "fp8_1x128" and facts.hidden_size % SCALE_WIDTH:
        raise UserError(
            f"{said} sends FP8 rows with a scale for {SCALE_WIDTH} columns, and rows have {facts.hidden_size};"
            " legal: local, or --fp8-activation bf16"
        )
    pair = (one.architecture, one.name)
    if one.name == "local" and config.ep == 1:
        return  # plain tensor parallelism
    if facts.is_moe and pair not in VALIDATED:
        known = [name for name in get_args(ExchangeName) if (one.architecture, name) in VALIDATED]
        if not config.allow_unvalidated:
            raise UserError(
                f"{said} has not been tried with {one.architecture}; legal: {', '.join(known)}, or --allow-unvalidated"
            )
        notes.append(f"{said} has not been tried with {one.architecture} by any test; --allow-unvalidated lets it run")


def _capacity(one: _Chosen, wish: int | None, config: ServeConfig, reasons: dict[str, str]) -> int:
    limits = one.facts
    if not limits.sends:
        if wish is not None:
            senders = ", ".join(name for name, other in EXCHANGES.items() if other.sends)
            raise UserError(f"--expert-capacity {wish}: --expert-exchange {one.name} sends no rows; legal: {senders}")
        return 0
    step = limits.capacity_step
    least = max(limits.least_capacity, -(-one.rows // step) * step)
    each = rows_of_a_request(config)
    step_of = (
        f"--chunked-prefill-size {config.chunked_prefill_size} and --max-running-requests"
        f" {config.max_running_requests}{f' of {each} rows each (--draft-tokens)' if each > 1 else ''}"
        f" over {config.tp} ranks"
    )
    if wish is None:
        reasons["expert_capacity"] = f"auto: {step_of} are {one.rows} rows"
        return least
    if wish < least or wish % step:
        legal = f"{least} or more" if step == 1 else f"multiples of {step} from {least} on"
        raise UserError(
            f"--expert-capacity {wish} with --expert-exchange {one.name}: {step_of} may need {one.rows} rows;"
            f" legal: {legal}"
        )
    return wish
