"""Everything that crosses a process boundary: msgspec structs, msgpack on the wire, one version for all. No pickle.

Four links: server <-> core, core -> workers (plans), workers -> core (results), supervisor <-> supervisor (control).
"""

from __future__ import annotations

import msgspec

from rocm_serve.types import FinishReason, SamplingParams, TokenLogprob

WIRE_VERSION = 12  # raised with every change of a struct below; both ends compare it before anything else


# --- server -> core -------------------------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One choice of one API request. `request_id` is unique for the life of the server."""

    request_id: str
    prompt: tuple[int, ...]  # never empty
    params: SamplingParams


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget these requests. Unknown ids are fine: they may just have ended. No Output follows.

    `finished`: their answers are complete, a stop string ended them; they count as finished, not as aborted.
    """

    request_ids: tuple[str, ...]
    finished: bool = False


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Finish what runs and waits, then stop executor and core."""


ToCore = AddRequest | AbortRequests | Drain


# --- core -> server -------------------------------------------------------------------------------------------------


class Output(msgspec.Struct, frozen=True, array_like=True):
    """News of one request. The last one has `finish_reason`."""

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # parallel to tokens, or empty
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # next slice for prompt positions 1.. (position 0 has none)
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the EOS or stop id that ended it (it is the last of `tokens`)
    error: str | None = None


class DraftSpeed(msgspec.Struct, frozen=True, array_like=True):
    """What drafting gains with about `requests` running: more than half as many, and not more, a power of two.

    Times are seconds per token that came out, of all requests together; 0: not measured yet. Each rests on so many
    `steps`, the last ones measured.
    """

    requests: int
    drafting: bool  # plans draft at this size, but for the few that measure the other way
    on_s: float
    off_s: float
    on_steps: int = 0
    off_steps: int = 0

    @property
    def net(self) -> float:
        """Speed with drafts as a multiple of that without; 0: not known yet."""
        return self.off_s / self.on_s if self.on_s else 0.0


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot for /metrics. Counters only grow; gauges are of this moment.

    Drafts count when the result that judged them is back and their request lives; also those behind an end that was
    only seen then. `by_position`: entry i counts the i-th draft of a verification; empty where nothing drafts.
    """

    running: int = 0
    waiting: int = 0
    peak_running: int = 0
    pages_used: int = 0
    pages_total: int = 0
    slots_used: int = 0
    slots_total: int = 0
    steps: int = 0
    prefill_steps: int = 0  # steps with prompt rows only
    decode_steps: int = 0  # steps with output rows only
    mixed_steps: int = 0  # steps with both
    prompt_tokens: int = 0  # prompt rows computed, recomputed ones counted again
    generation_tokens: int = 0
    preemptions: int = 0
    aborted: int = 0
    finished: int = 0
    decode_forwards: int = 0  # times one request went through the model with output rows, and tokens came out
    decode_tokens: int = 0  # tokens that came out of these, and not behind an end
    draft_tokens: int = 0  # drafts verified
    accepted_draft_tokens: int = 0
    draft_tokens_by_position: tuple[int, ...] = ()
    accepted_draft_tokens_by_position: tuple[int, ...] = ()
    draft_speeds: tuple[DraftSpeed, ...] = ()  # by size


class EffectiveLimits(msgspec.Struct, frozen=True, array_like=True):
    """What the running server can do, each with the reason that set it ("effective limits" of the start-up report)."""

    max_model_len: int
    max_running_requests: int
    chunked_prefill_size: int
    page_size: int
    num_pages: int
    num_slots: int
    draft_tokens: int = 0  # most drafts of one request in one step; 0: no drafting
    graph_max_batch: int = 0  # decode batches up to this size are replayed as device graphs; 0: none are
    plan_ahead: bool = False  # a step is planned, and started, before the tokens of the one before it are known
    reasons: dict[str, str] = {}
    by_reference: dict[str, str] = {}  # ops whose kernel a probe refused: what that costs, and why it was


class Outputs(msgspec.Struct, frozen=True, array_like=True, tag=True):
    outputs: tuple[Output, ...]
    stats: Stats


class CoreReady(msgspec.Struct, frozen=True, array_like=True, tag=True):
    version: int
    limits: EffectiveLimits


class CoreFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine is dead: every open request failed with this sentence, and the process will exit."""

    error: str


class CoreStopped(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Drained: every request has its last Output, nothing follows."""


FromCore = Outputs | CoreReady | CoreFailed | CoreStopped


# --- core -> workers ------------------------------------------------------------------------------------------------


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """First mention of a request: every stage keeps it until a plan's `released` names it."""

    rid: int  # small integer, unique while the request lives
    prompt: tuple[int, ...]
    params: SamplingParams


class Work(msgspec.Struct, frozen=True, array_like=True):
    """Rows [start, start + num_rows) of one request: known tokens, then `drafts`.

    Rows of the prompt and rows past it are never in one Work: `recurrent` says which. Prompt rows take the chunked
    GDN form, rows past the prompt the step-by-step form, also when a preempted request is computed again, so a
    request's bits do not depend on its batch mates.
    `tokens`: the tokens sampled by this request's last step (its outcome was not known to the workers before);
    appended to the request before the rows are read. `new_pages` are appended to its page table; with start == 0 the
    table is dropped first, and slot `slot` is cleared.

    A slot's state is that after row start - 1 - `accepted`: first it takes in the rows of the `accepted` first drafts
    of this request's last Work, whose KV is in place (they are the first of `tokens`); then the known rows, and there
    it stays; the rows of `drafts` run from it and leave no trace. With start == 0 nothing is accepted: all is computed
    again. `drafts` are in a Work that samples and is recurrent, and are a beginning of what the last result proposed.
    Pages reach `proposals` rows past the last one.

    A `pending` Work is one row, behind all tokens known: it reads the token that a plan before this one draws for the
    request, on the device. That plan is in flight still, and has it in the same slot; no drafts are near.
    """

    rid: int
    start: int
    num_rows: int
    recurrent: bool
    samples: bool  # the last known token is among the rows: a new one comes out of it, and of each draft
    slot: int
    new_pages: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    accepted: int = 0  # drafts of its last Work that the state has yet to take in
    drafts: tuple[int, ...] = ()  # to verify: the last len(drafts) rows
    proposals: int = 0  # most drafts that the result may propose for the next step; 0: the draft head need not
    pending: bool = False


class Plan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One step of every stage. `seq` counts from 0 without a gap; a gap is fatal.

    `reads`: the newest plan that draws a token for one of the pending works; -1: none is pending.
    """

    seq: int
    work: tuple[Work, ...]  # recurrent rows first
    new: tuple[NewRequest, ...] = ()
    released: tuple[int, ...] = ()  # ended or aborted: forget them before this step
    reads: int = -1


class AllocateCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Sent once, after every worker has reported its budget."""

    num_pages: int
    num_slots: int  # without the dummy slot 0: real slots are 1..num_slots


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag=True):
    failed: bool = False  # something has: who is told leaves with an exit code that says so


ToWorker = Plan | AllocateCache | Shutdown


# --- workers -> core ------------------------------------------------------------------------------------------------


class WorkerLoaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Weights are in place; what is left for caches on this rank, and what a page and a slot cost here."""

    rank: int
    version: int
    cache_bytes: int
    page_bytes: int
    slot_bytes: int


class WorkerReady(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Caches allocated, edges warmed, graphs captured: plans may come."""

    rank: int
    graph_max_batch: int = 0
    graphs: str = ""  # what was captured in what time and memory, or why nothing was
    by_reference: dict[str, str] = {}  # ops whose kernel a probe refused: what that costs, and why it was


class WorkerFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    rank: int
    phase: str
    error: str


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """Outcome of one Work. One that samples has accepted + 1 tokens: the accepted drafts, and the token drawn after.

    A draft is accepted when all before it are and it is the token that was drawn one row before, as it would have been
    drawn without drafts. Accepted ones count to the end of that run, also past a token that ends the request.
    `prompt_logprobs` holds each prompt position once: rows that a preempted request computes again are not reported.
    """

    rid: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # parallel to tokens, or empty
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    accepted: int = 0  # of the Work's drafts
    drafts: tuple[int, ...] = ()  # for the rows after the last of `tokens`; at most the Work's `proposals`


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From TP rank 0 of the last stage only. Works without an outcome are left out of `sampled`."""

    seq: int
    sampled: tuple[Sampled, ...]


FromWorker = WorkerLoaded | WorkerReady | WorkerFailed | StepResult


# --- supervisor <-> supervisor ----------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """First word of member `member` to member 0, and member 0's answer once all are there: start your ranks.

    `checks` holds what must be equal on all members, by name. `address` and `port`: a listening socket of the
    sender's, for member 0 to see that it can be reached. `padding`: so much that large packets have to pass.
    """

    member: int
    checks: dict[str, str]
    address: str = ""
    port: int = 0
    padding: bytes = b""


class RankBeat(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank is. `count` grows with every sign of progress; `owes` says that some is due at any time.

    `waiting`: it waits for another rank, so it is not to blame for making none. `step` is the last plan it began.
    """

    rank: int
    count: int
    phase: str
    step: int
    layer: int
    owes: bool
    waiting: bool
    stopped: bool  # by a signal, as the operating system says


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """I live, and this is what my ranks do. From both ends, every half second."""

    ranks: tuple[RankBeat, ...] = ()


class DumpStacks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From member 0: have these ranks write their stacks, and send them."""

    ranks: tuple[int, ...]


class Stacks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    rank: int
    text: str


class GroupDown(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """It is over, for this reason: end your ranks and leave with `exit_code`."""

    error: str
    exit_code: int


class AskToStop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To member 0: somebody wishes an orderly end."""


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From member 0: an orderly end; ranks that were drained leave by themselves within `grace_s`."""

    grace_s: float = 0.0


ControlMessage = Hello | Beat | DumpStacks | Stacks | GroupDown | AskToStop | Leave
