"""Requests that draft, through one Gated DeltaNet layer: every true row against the same rows one step at a time.

Rows are random; a draft that will be accepted is the true next row, one that will not is another. What the layer
returns for known rows and for true drafts, and the states of a slot after each step, must have the bits of the plain
run. Padding rows hold numbers, not zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rocm_serve.cache.allocate import allocate_stage_cache, clear_slots
from rocm_serve.cache.layout import StageLayout
from rocm_serve.checkpoint.synthetic_configs import DIMS, SpecialIds, model_config
from rocm_serve.layers.gated_delta_net import GatedDeltaNet
from rocm_serve.layers.weights import Weights
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, parse_config, stage_params
from rocm_serve.ops.batch import ForwardBatch, Replay, Sequences, StageCache
from rocm_serve.ops.bind import BoundOps
from rocm_serve.ops.replay import replay_of
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.layout import Place
from rocm_serve.parallel.mesh import Mesh

PREFIX = "model.layers.0.linear_attn"
SLOTS = 16
Bits = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Turn:
    """One step of one request past its prompt: known rows, then drafts, the first `right` of which are accepted."""

    known: int = 1
    drafts: int = 0
    right: int = 0


@dataclass
class Request:
    """One request. `rows`: the true ones; from the plain run: `results` by row, `states` by number of rows taken in."""

    slot: int
    prompt: int
    turns: Sequence[Turn]
    rows: torch.Tensor = field(init=False)
    results: list[torch.Tensor] = field(default_factory=list)
    states: dict[int, Bits] = field(default_factory=dict)
    taken: int = 0  # rows known so far
    accepted: int = 0  # of its last drafts
    turn: int = -1  # of `turns`; -1: its prompt is next


@dataclass(frozen=True)
class Rows:
    """What one request brings to a step."""

    request: Request
    context: int
    rows: torch.Tensor
    recurrent: bool
    accepted: int = 0
    drafts: int = 0


def facts_of(key: int, value: int, *, key_heads: int = 2, value_heads: int = 4, hidden: int = 48) -> ModelFacts:
    values = model_config("text-bf16", "none", DIMS["default"], SpecialIds(1, 2, 3, 4, 5, 6))
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "linear_key_head_dim": key,
        "linear_value_head_dim": value,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
    }
    return parse_config(values | sizes, None)


def layer_of(facts: ModelFacts, ops: BoundOps, g: torch.Generator, device: str = "cpu") -> GatedDeltaNet:
    """Make the layer with weights that nothing hides: states that last, gates on either side."""
    params = stage_params(facts, Mesh(1, 1).coord(0), formats=ConfigFormats(facts), mtp=False)
    layer = GatedDeltaNet(
        Weights(params, Place(), torch.float32, torch.device(device), PREFIX),
        ops,
        SoloComm(),
        cache_key=0,
        key_heads=facts.linear_num_key_heads,
        value_heads=facts.linear_num_value_heads,
        key_dim=facts.linear_key_head_dim,
        value_dim=facts.linear_value_head_dim,
        eps=facts.rms_norm_eps,
        gate_activation=facts.gate_activation,
    )
    for name, p in layer.named_parameters():
        scale = {"A_log": 1.0, "dt_bias": 1.0, "conv1d.weight": 0.5}.get(name, p.shape[-1] ** -0.5)
        p.data.copy_(torch.randn(p.shape, generator=g) * scale)
    return layer


class Run:
    """A layer, its caches, and the steps of many requests."""

    def __init__(self, layer: GatedDeltaNet, facts: ModelFacts, g: torch.Generator, draft_tokens: int) -> None:
        self.layer, self.g, self.draft_tokens = layer, g, draft_tokens
        self.multiple = 32  # of the rows of a step
        self.device = layer.A_log.device
        self.hidden = facts.hidden_size
        self.layout = StageLayout(
            kv_layers=(),
            gdn_layers=(0,),
            page_size=16,
            kv_heads=1,
            head_dim=1,
            conv_rows=facts.conv_kernel - 1,
            conv_channels=2 * facts.key_dim + facts.value_dim,
            value_heads=facts.linear_num_value_heads,
            value_dim=facts.linear_value_head_dim,
            key_dim=facts.linear_key_head_dim,
            draft_tokens=draft_tokens,
        )
        self.plan: Callable[..., Replay | None] = replay_of

    def cache(self) -> StageCache:
        made = allocate_stage_cache(
            self.layout,
            num_pages=1,
            num_slots=SLOTS,
            kv_dtype=torch.float32,
            conv_dtype=torch.float32,
            device=self.device,
        )
        for held in (made.conv, made.ssm, made.pending_u, made.pending_ba):  # of requests that have left
            for x in held.values():
                x.copy_(torch.randn(x.shape, generator=self.g))
        return made

    def batch(self, works: Sequence[Rows], cache: StageCache) -> tuple[torch.Tensor, ForwardBatch]:
        """Lay out the works, recurrent ones first: rows and what the layer is told of them."""
        counts = [len(work.rows) for work in works]
        starts = [sum(counts[:b]) for b in range(len(counts) + 1)]
        padding = torch.randn(-starts[-1] % self.multiple, self.hidden, generator=self.g)
        x_TH = torch.cat([*(work.rows for work in works), padding]).to(self.device)
        contexts, slots = [work.context for work in works], [work.request.slot for work in works]
        sequences = Sequences(
            row_starts=tuple(starts),
            contexts=tuple(contexts),
            slots=tuple(slots),
            num_recurrent=sum(work.recurrent for work in works),
            row_starts_B1=torch.tensor(starts, dtype=torch.int32, device=self.device),
            contexts_B=torch.tensor(contexts, dtype=torch.int32, device=self.device),
            slots_B=torch.tensor(slots, dtype=torch.int32, device=self.device),
            page_table_BP=torch.zeros(len(works), 1, dtype=torch.int32, device=self.device),
        )
        replay = self.plan(sequences, [w.accepted for w in works], [w.drafts for w in works], self.draft_tokens)
        nothing = torch.zeros(0, dtype=torch.int64)
        return x_TH, ForwardBatch(nothing, nothing, nothing, sequences, cache, replay)

    def step(self, works: Sequence[Rows], cache: StageCache) -> list[torch.Tensor]:
        """Run the works; return the results of each one's rows."""
        x_TH, batch = self.batch(works, cache)
        with torch.inference_mode():
            y_TH = self.layer(x_TH, batch).cpu()
        return list(y_TH[: batch.num_rows].split([len(work.rows) for work in works]))

    def states(self, request: Request, cache: StageCache) -> Bits:
        return cache.conv[0][request.slot].clone(), cache.ssm[0][request.slot].clone()

    def plainly(self, requests: Sequence[Request]) -> None:
        """Run every request alone, its prompt at once and then row by row, and note what comes out."""
        for r in requests:
            total = r.prompt + sum(turn.known + turn.right for turn in r.turns)
            r.rows = torch.randn(total, self.hidden, generator=self.g)
            cache = self.cache()
            clear_slots(cache, (r.slot,))
            cuts = [0, *range(r.prompt, total + 1)]
            for first, last in zip(cuts, cuts[1:], strict=False):
                (result,) = self.step([Rows(r, first, r.rows[first:last], first > 0)], cache)
                r.results += result
                r.states[last] = self.states(r, cache)

    def differences(self, requests: Sequence[Request], steps: Sequence[Sequence[int]]) -> list[str]:
        """Run steps, each with the next turn of these requests; say where bits differ from the plain run."""
        cache, found = self.cache(), list[str]()
        for number, names in enumerate(steps):
            works = [self.next(requests[i], cache) for i in names]
            works.sort(key=lambda work: not work.recurrent)
            for work, result in zip(works, self.step(works, cache), strict=True):
                r = work.request
                true = len(work.rows) - work.drafts + r.accepted
                expected = torch.stack(r.results[work.context : work.context + true])
                if not torch.equal(result[:true], expected):
                    found.append(f"step {number}, slot {r.slot}: results")
                if not all(torch.equal(a, b) for a, b in zip(self.states(r, cache), r.states[r.taken], strict=True)):
                    found.append(f"step {number}, slot {r.slot}: states")
        return found

    def next(self, r: Request, cache: StageCache) -> Rows:
        """Take the request's next turn; afterwards `taken` and `accepted` say what is known once it has run."""
        start, accepted = r.taken + r.accepted, r.accepted
        if r.turn < 0:
            clear_slots(cache, (r.slot,))
            r.turn, r.taken = 0, r.prompt
            return Rows(r, 0, r.rows[: r.prompt], recurrent=False)
        turn = r.turns[r.turn]
        r.turn, r.taken, r.accepted = r.turn + 1, start + turn.known, turn.right
        wrong = torch.randn(turn.drafts - turn.right, self.hidden, generator=self.g)
        rows = torch.cat([r.rows[start : r.taken + turn.right], wrong])
        return Rows(r, start, rows, recurrent=True, accepted=accepted, drafts=turn.drafts)


def every_pair(most: int, known: int) -> list[Request]:
    """Make a request for each m <= n <= `most`: n drafts of which m are accepted, three times, then one without."""
    pairs = [(m, n) for n in range(most + 1) for m in range(n + 1)]
    return [
        Request(slot, 1 + slot % 3, [Turn(known, n, m), Turn(1, n, m), Turn(2, n, m), Turn()])
        for slot, (m, n) in enumerate(pairs, 1)
    ]


def at_random(g: torch.Generator, count: int, most: int) -> tuple[list[Request], list[list[int]]]:
    """Make requests, and steps with some of them at a time: a slot is used again when its request has ended."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    requests: list[Request] = []
    steps: list[list[int]] = []
    for _ in range(count):
        drafts = [number(0, most) for _ in range(number(1, 4))]
        turns = [Turn(number(1, 3), n, number(0, n)) for n in drafts]
        requests.append(Request(0, number(1, 70), turns))
    left = {i: 1 + len(r.turns) for i, r in enumerate(requests)}
    waiting, running, slots = list(range(count)), list[int](), [1, 2, 3]
    while waiting or running:
        while waiting and slots:
            requests[waiting[0]].slot = slots.pop(number(0, len(slots) - 1))
            running.append(waiting.pop(0))
        now = [i for i in running if number(0, 3)] or running[:1]
        steps.append(now)
        for i in now:
            left[i] -= 1
            if not left[i]:
                running.remove(i)
                slots.append(requests[i].slot)
    return requests, steps


def in_step(requests: Sequence[Request]) -> list[list[int]]:
    """Have all requests take every turn together."""
    return [list(range(len(requests)))] * (1 + len(requests[0].turns))


def altered(run: Run, change: Callable[[Replay], Replay]) -> None:
    """Have every step of the run laid out otherwise."""

    def plan(*arguments: Any) -> Replay | None:
        made = replay_of(*arguments)
        return None if made is None else change(made)

    run.plan = plan


def all_rows(sequences: Sequences) -> Sequences:
    return replace(sequences, commits=None, commits_B=None)
