"""Which provider an op shall have (`--op`): what is illegal is refused here, before anything is started. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rocm_serve.config.experts import EXCHANGES
from rocm_serve.config.schema import Resolved
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import ModelFacts
from rocm_serve.models.qwen3_5.spec_calls import Calls, calls_of
from rocm_serve.platform.table import PROVIDERS, archs_of, not_on, split_wish

# Ops that a launch can do without.
_WANTED = {
    "gdn_extend": "gdn_extend runs in layers of Gated DeltaNet where drafts are verified, and none are here",
    "quantise_rows": "quantise_rows runs where rows are sent to FP8 experts as FP8, and none are here",
}


def check_names(wishes: Mapping[str, str]) -> None:
    """Refuse what is no op or no provider of it. Errors: UserError naming the legal ones."""
    for name, provider in wishes.items():
        _, op = split_wish(name)
        if op not in PROVIDERS:
            raise UserError(
                f"--op {name}={provider}: no such op; ops are {', '.join(PROVIDERS)}, each also as layers.N.OP"
            )
        if provider not in PROVIDERS[op]:
            raise UserError(f"--op {name}={provider}: no such provider; {op} has {', '.join(PROVIDERS[op])}")


def check_archs(wishes: Mapping[str, str], arch: str) -> None:
    """Refuse a provider that does not run on `arch`, whatever is installed. Errors: UserError naming those that do."""
    for name, provider in wishes.items():
        _, op = split_wish(name)
        why = not_on(arch, archs_of(op, provider))
        if why is not None:
            here = [other for other in PROVIDERS[op] if not_on(arch, archs_of(op, other)) is None]
            raise UserError(f"--op {name}={provider}: {provider} {why}; legal there: {', '.join(here)}")


def checked(resolved: Resolved, facts: ModelFacts) -> Resolved:
    """Return `resolved`, once no wish of it is for a layer that never calls the op, or that the model does not have.

    An op that this configuration calls nowhere passes: who asks about providers may name it. A refusal is the same on
    all ranks: layers are those of the model, on whichever stage they are.
    Errors: UserError naming the layers that call the op.
    """
    calls = calls_in(resolved, facts)
    for name, provider in resolved.op.items():
        layer, op = split_wish(name)
        said, layers = f"--op {name}={provider}", calls.layers(op)
        if layer is not None and layer >= facts.num_layers:
            raise UserError(f"{said}: the model has layers 0..{facts.num_layers - 1}{_of_draft_layer(facts, op)}")
        if layer is not None and layer not in layers and calls.anywhere(op):
            raise UserError(f"{said}: layer {layer} does not call {op}; {_where(op, layers, resolved.pp)}")
    return resolved


def check_called(resolved: Resolved, facts: ModelFacts) -> None:
    """Refuse what a launch must not have: a wish for an op that nothing in it calls. Errors: UserError."""
    calls = calls_in(resolved, facts)
    for name, provider in resolved.op.items():
        _, op = split_wish(name)
        if not calls.anywhere(op):
            raise UserError(f"--op {name}={provider}: {_WANTED.get(op, f'this model calls no {op}')}; leave it out")


def calls_in(resolved: Resolved, facts: ModelFacts) -> Calls:
    """List the ops of each layer, as this was decided."""
    return calls_of(
        facts,
        resolved.pp,
        drafts=resolved.draft_tokens > 0,
        sends=EXCHANGES[resolved.expert_exchange].sends,
        draft_sends=EXCHANGES[resolved.speculative_expert_exchange].sends,
        fp8_rows=resolved.fp8_activation == "fp8_1x128",
    )


def _of_draft_layer(facts: ModelFacts, op: str) -> str:
    return f"; the draft layer has what --op {op}=PROVIDER says" if facts.mtp_layers else ""


def _where(op: str, layers: Sequence[int], pp: int) -> str:
    if not layers:
        return f"it runs beside the layers, and --op {op}=PROVIDER says what it has there"
    stages = f", the first of each stage of --pp {pp}" if op == "rms_norm" else ""
    return f"it runs in layer{'s' * (len(layers) > 1)} {_runs(layers)}{stages}"


def _runs(numbers: Sequence[int]) -> str:
    """Write ascending numbers in words: 0 to 2, 4, 6 to 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
