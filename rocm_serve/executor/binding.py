"""Which providers a world of ranks runs: tried by a probe on every node, decided by one rank, the same on all."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from rocm_serve.cache.layout import stage_layout
from rocm_serve.config.experts import EXCHANGES
from rocm_serve.config.schema import Resolved
from rocm_serve.errors import UserError
from rocm_serve.executor.graphs import lost_by_reference
from rocm_serve.executor.probe_node import CALL_S, NodeProber, Task
from rocm_serve.models.qwen3_5.spec import ModelFacts
from rocm_serve.ops.bind import REFERENCE, Binding, choose
from rocm_serve.ops.contract import Op
from rocm_serve.ops.facts import LinearShape, OpFacts
from rocm_serve.ops.probe_cases import probe_cases
from rocm_serve.ops.probe_child import Verdict
from rocm_serve.parallel.board import Board, read
from rocm_serve.parallel.layout import Param, shape_at
from rocm_serve.parallel.mesh import Coord

Refusals = dict[Task, str]
_DECIDES = 0
# One round: every call of every op may compile a kernel. A leader that hangs beyond its own deadlines is found by this.
ROUND_S = 12 * CALL_S
_HEARD_S = 10.0


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user said of providers: `op` is held to (also by layer), `preferred` is tried first."""

    op: Mapping[str, str]
    preferred: Mapping[str, str] = field(default_factory=dict)

    def choose(self, ops: Mapping[str, Op], facts: OpFacts, refused: Refusals) -> list[Binding]:
        """Say what would be bound. Errors: UserError."""
        known = facts.mapping()
        return choose(self.op, facts.arch, facts=known, table=ops, refused=refused, preferred=self.preferred)


class _Round(msgspec.Struct, frozen=True):
    """What rank 0 wants to know next. No tasks: it is decided. `error`: it cannot be."""

    tasks: tuple[Task, ...] = ()
    refused: tuple[tuple[str, str, str], ...] = ()  # op, provider, why
    error: str | None = None


class _Answer(msgspec.Struct, frozen=True):
    arch: str
    verdicts: tuple[Verdict, ...]


def op_facts(
    facts: ModelFacts,
    params: Mapping[str, Param],
    coord: Coord,
    resolved: Resolved,
    *,
    arch: str,
    compute_units: int,
    dialect: str,
    activation: str,
) -> OpFacts:
    """Say what is static on this rank, for providers."""
    tp = coord.mesh.tp
    layout = stage_layout(facts, coord, resolved.page_size)
    shapes = {name: shape_at(p, coord.place) for name, p in params.items()}
    linears = {
        LinearShape(rows=shape[0], columns=shape[1], fp8=params[name].dtype == "fp8")
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight") and not name.endswith("embed_tokens.weight")
    }
    experts = [name for name in shapes if name.endswith(".experts.down_proj")]  # of unequal layers the largest counts
    expert_fp8 = bool(experts) and params[experts[0]].dtype == "fp8"
    exchanges = (resolved.expert_exchange, *((resolved.speculative_expert_exchange,) if resolved.draft_tokens else ()))
    mlp = [name for name in shapes if name.endswith((".mlp.down_proj.weight", ".shared_expert.down_proj.weight"))]
    return OpFacts(
        arch=arch,
        compute_units=compute_units,
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_cache_dtype,
        fp8_dialect=dialect,
        activation=activation,
        tp=tp,
        hidden_size=facts.hidden_size,
        eps=facts.rms_norm_eps,
        heads=facts.num_heads // tp,
        kv_heads=layout.kv_heads,
        head_dim=facts.head_dim,
        rotary_dim=facts.rotary_dim,
        page_size=resolved.page_size,
        key_heads=facts.linear_num_key_heads // tp,
        value_heads=layout.value_heads,
        key_dim=layout.key_dim,
        value_dim=layout.value_dim,
        conv_kernel=facts.conv_kernel,
        gate_activation=facts.gate_activation,
        num_experts=facts.num_experts,
        local_experts=max((shapes[name][0] for name in experts), default=0),
        top_k=facts.top_k,
        renormalise=facts.renormalise_top_k,
        expert_width=shapes[experts[0]][2] if experts else 0,
        expert_fp8=expert_fp8,
        fp8_dispatch=expert_fp8 and activation == "fp8_1x128" and any(EXCHANGES[name].sends for name in exchanges),
        mlp_width=shapes[mlp[0]][1] if mlp else 0,
        linears=tuple(sorted(linears)),
        vocab=facts.vocab_size // tp if coord.last_stage else 0,
        max_rows=resolved.chunked_prefill_size + resolved.max_running_requests * (1 + resolved.draft_tokens),
        max_running=resolved.max_running_requests,
        max_model_len=resolved.max_model_len,
        draft_tokens=resolved.draft_tokens,
    )


def settle(
    ops: Mapping[str, Op],
    wishes: Wishes,
    facts: OpFacts,
    board: Board,
    leaders: tuple[int, ...],
    prober: NodeProber,
) -> Refusals:
    """Return what the probes refused, the same on every rank, after as many rounds as it takes to find providers.

    Where the reference alone is bound nothing is probed, said or waited for. `leaders`: one rank of every node, which
    probes for it; rank 0 decides.
    Errors: UserError, the same on all ranks.
    """
    if not _tasks(wishes.choose(ops, facts, {})):
        return {}
    if board.rank == _DECIDES:
        return _decide(ops, wishes, facts, board, leaders, prober)
    return _follow(board, leaders, facts, prober)


def _tasks(report: list[Binding]) -> list[Task]:
    """List what has to be probed: every provider that is bound but the reference, once."""
    bound = {(line.op.rpartition(".")[2], line.provider): None for line in report if line.provider != REFERENCE}
    return list(bound)


def _decide(
    ops: Mapping[str, Op],
    wishes: Wishes,
    facts: OpFacts,
    board: Board,
    leaders: tuple[int, ...],
    prober: NodeProber,
) -> Refusals:
    refused: Refusals = {}
    passed: set[Task] = set()
    number = 0
    while True:
        try:
            report = wishes.choose(ops, facts, refused)
        except UserError as error:
            _give_up(board, number, str(error), prober.moved)
            raise
        tasks = [task for task in _tasks(report) if task not in passed]
        _say(board, number, _Round(tuple(tasks), tuple((*task, why) for task, why in refused.items())))
        if not tasks:
            return refused
        answers = {board.rank: _Answer(facts.arch, tuple(prober.probe(tasks).values()))}
        for rank in leaders:
            if rank != board.rank:
                answers[rank] = _hear(board, number, rank, prober.moved)
        for rank, answer in answers.items():
            if answer.arch != facts.arch:
                mixed = f"rank {rank} computes on {answer.arch} and rank 0 on {facts.arch}; legal: one kind of GPU"
                _give_up(board, number + 1, mixed, prober.moved)
                raise UserError(mixed)
            for verdict in answer.verdicts:
                if verdict.refused is not None:
                    where = f" (on the node of rank {rank})" if len(leaders) > 1 else ""
                    refused.setdefault((verdict.op, verdict.provider), f"failed its probe{where}: {verdict.refused}")
        passed |= set(tasks) - refused.keys()
        number += 1


def _follow(board: Board, leaders: tuple[int, ...], facts: OpFacts, prober: NodeProber) -> Refusals:
    number = 0
    while True:
        note = read(board, f"round {number}", prober.moved, ROUND_S)
        asked = msgspec.json.decode(note, type=_Round)
        if asked.error is not None:
            board.post(f"heard {board.rank}", "")
            raise UserError(asked.error)
        if not asked.tasks:
            return {(op, provider): why for op, provider, why in asked.refused}
        if board.rank in leaders:
            answer = _Answer(facts.arch, tuple(prober.probe(asked.tasks).values()))
            board.post(f"answer {number} {board.rank}", msgspec.json.encode(answer).decode())
        number += 1


def _say(board: Board, number: int, what: _Round) -> None:
    board.post(f"round {number}", msgspec.json.encode(what).decode())


def _give_up(board: Board, number: int, why: str, moved: Callable[[], None]) -> None:
    """Tell the others, and stay until they have heard: the board may be in this process and end with it."""
    _say(board, number, _Round(error=why))
    with contextlib.suppress(TimeoutError):  # whoever does not read it sees this rank end
        for rank in range(board.size):
            if rank != board.rank:
                read(board, f"heard {rank}", moved, _HEARD_S)


def _hear(board: Board, number: int, rank: int, moved: Callable[[], None]) -> _Answer:
    return msgspec.json.decode(read(board, f"answer {number} {rank}", moved, ROUND_S), type=_Answer)


def of_called(report: Iterable[Binding], facts: OpFacts) -> tuple[Binding, ...]:
    """Return the report in which no op fell back that this model never calls: a kernel that cannot be loaded there."""
    return tuple(replace(line, fell_back=line.fell_back and bool(probe_cases(line.op, facts))) for line in report)


def fallbacks(report: Iterable[Binding], *, graphs: bool) -> dict[str, str]:
    """Say of every op whose kernel a probe refused, so that its reference runs, what that costs and why it is.

    `graphs`: steps were to be captured.
    """
    said = {}
    for line in report:
        if line.fell_back:
            lost = lost_by_reference(line.op) if graphs else None
            cost = f"slow, and {lost}" if lost else "slow"
            why = "; ".join(f"{name} {why}" for name, why in line.refused)
            said[line.op] = f"runs as its reference in torch ({cost}): {why}"
    return said


def check_same(report: tuple[Binding, ...], activation: str, board: Board, moved: Callable[[], None]) -> None:
    """Compare what was bound, by its hash, with rank 0's; the report says who differs.

    Errors: UserError.
    """
    if board.size == 1 or all(line.provider == REFERENCE for line in report):
        return
    bound = "\n".join([activation, *(f"{line.op} {line.provider}" for line in report)])
    mine = hashlib.sha256(bound.encode()).hexdigest()
    board.post(f"bound {board.rank}", mine)
    theirs = read(board, f"bound {_DECIDES}", moved, ROUND_S)
    if theirs != mine:
        raise UserError(
            f"rank {board.rank} has bound other providers ({mine[:8]}) than rank {_DECIDES} ({theirs[:8]});"
            " install the same packages on all hosts"
        )
