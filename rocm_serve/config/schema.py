"""The user's wishes (ServeConfig, "auto" allowed) and what they came to (Resolved, nothing left open). Frozen."""

from __future__ import annotations

from typing import Literal

import msgspec

Auto = Literal["auto"]
DeviceName = Literal["cpu", "cuda", "rocm"]
DtypeName = Literal["bfloat16", "float32"]
KvDtypeName = Literal["float32", "bfloat16", "fp8_e4m3"]
AttentionBackendName = Literal["aiter", "triton", "reference"]
SpeculativeName = Literal["off", "mtp"]
ReasoningParserName = Literal["qwen3"]
ToolCallParserName = Literal["qwen3_coder"]
ExchangeName = Literal["local", "torch", "all_gather", "mori"]  # parallel/exchange/: how rows come to experts
Fp8ActivationName = Literal["bf16", "fp8_1x128"]
PlanAheadName = Literal["off", "on", "graphs"]  # graphs: on if decode steps are captured
AllReduceName = Literal["library", "aiter"]  # of a stage's ranks: that of their process group, or AITER's own kernels


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`rocm-serve serve`, flag for flag (docs of each flag: `rocm-serve serve --help`)."""

    model: str
    served_model_name: str | None = None  # default: the path given
    host: str = "127.0.0.1"
    port: int = 8000
    tp: int = 1
    pp: int = 1
    ep: int = 1
    expert_exchange: Auto | ExchangeName = "auto"
    expert_capacity: int | None = None  # rows a rank may send to experts in a step; None: what a step can need
    expert_placement: str | None = None  # file of which expert is in which slot; None: in order
    expert_counts: str | None = None  # file for how often each expert was chosen; None: not counted
    speculative: Auto | SpeculativeName = "off"  # auto: mtp, but not at sizes of batch where it loses
    draft_tokens: int | None = None  # most drafts of a request in a step; None: DRAFT_TOKENS
    speculative_expert_exchange: Literal["inherit"] | ExchangeName = "inherit"  # the draft layer's
    allow_unvalidated: bool = False  # of pairs of architecture and exchange
    nnodes: int = 1
    node_rank: int | None = None  # None: 0, or what the launcher says
    dist_init_addr: str | None = None
    dist_timeout: int = 600  # seconds
    watchdog_timeout: int = 300  # seconds
    device: Auto | DeviceName = "auto"
    dtype: Auto | DtypeName = "auto"
    kv_cache_dtype: Auto | KvDtypeName = "auto"
    fp8_activation: Auto | Fp8ActivationName = "auto"  # what FP8 weights are multiplied with
    all_reduce: Auto | AllReduceName = "auto"
    page_size: int = 16
    chunked_prefill_size: int | None = None  # prompt rows of a step; None: see config/chunk.py
    max_running_requests: int = 64
    max_queued_requests: int = 4096
    max_model_len: int | None = None  # None: what the model allows
    max_total_tokens: int | None = None  # tokens the KV pages may hold over all requests; None: what memory allows
    mem_fraction: float | None = None  # None: 0.9 of a GPU's memory, 0.5 of free RAM
    load_format: Literal["auto", "dummy"] = "auto"
    enforce_eager: bool = False
    graph_max_batch: int | None = None  # largest decode batch that is captured; None: see config/graphs.py; 0: none
    plan_ahead: Auto | Literal["on", "off"] = "auto"  # steps before the tokens of those before them are known
    attention_backend: Auto | AttentionBackendName = "auto"  # a wish: the first choice wherever the device has it
    op: dict[str, str] = {}  # op name, or "layers.N.op", -> provider
    seed: int = 0
    reasoning_parser: ReasoningParserName | None = None
    tool_call_parser: ToolCallParserName | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    trace: str | None = None  # folder for one line per step of the core and of each rank


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What every process of the server is started with. `reasons` says where each decided value came from."""

    model: str
    served_model_name: str
    host: str
    port: int
    tp: int
    pp: int
    ep: int
    nnodes: int
    node_rank: int
    dist_init_addr: str  # host:port of the store of torch.distributed; with several members the host is a number
    dist_timeout: int
    device: DeviceName
    dtype: DtypeName
    kv_cache_dtype: KvDtypeName
    page_size: int
    chunked_prefill_size: int
    max_running_requests: int
    max_queued_requests: int
    max_model_len: int
    mem_fraction: float
    load_format: Literal["auto", "dummy"]
    enforce_eager: bool
    op: dict[str, str]  # held to: a provider that cannot is an error
    seed: int
    log_level: str
    vocab_size: int  # rows of lm_head
    vocab_used: int  # ids the tokenizer knows; higher ones are never sampled
    eos_token_ids: tuple[int, ...]
    torch_threads: int  # per worker
    run_dir: str  # sockets and logs of this run
    preferred: dict[str, str] = {}  # op -> provider that is tried first
    graph_max_batch: int = 0  # largest decode batch that is captured as a device graph; 0: none
    plan_ahead: PlanAheadName = "off"
    fp8_activation: Fp8ActivationName = "bf16"
    all_reduce: AllReduceName = "library"
    expert_exchange: ExchangeName = "local"
    expert_capacity: int = 0  # rows a rank may send to experts in a step; 0: `local` sends none
    expert_placement: str | None = None
    expert_counts: str | None = None
    draft_tokens: int = 0  # most drafts of a request in a step; 0: nothing drafts
    adaptive_drafting: bool = False  # sizes of batch at which drafting loses do without
    speculative_expert_exchange: ExchangeName = "local"
    speculative_expert_capacity: int = 0
    max_total_tokens: int | None = None  # a cap below what memory allows, or None
    reasoning_parser: ReasoningParserName | None = None  # which part of a chat answer is its reasoning
    tool_call_parser: ToolCallParserName | None = None  # how the calls in a chat answer are written
    trace: str | None = None
    watchdog_timeout: int = 300  # a rank that owes progress and makes none for so long is dead
    members: int = 1  # processes like this one: one per host, or per rank under torchrun
    member: int = 0  # this one's place; 0 also runs core and HTTP server
    first_device: int = 0  # GPU of this member's first rank
    address: str = ""  # this member's, for the others; empty when there are none
    interface: str = ""
    mtu: int = 0  # of that interface, in bytes; equal on all hosts
    reasons: dict[str, str] = {}
    notes: tuple[str, ...] = ()  # what was asked for and has no effect; variables of other servers

    @property
    def local_ranks(self) -> range:
        """Ranks that this member starts."""
        each = self.tp * self.pp // self.members
        return range(self.member * each, (self.member + 1) * each)
