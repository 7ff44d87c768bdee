"""The user's wishes (ServeConfig, "auto" allowed) and what they came to (Resolved, nothing left open). Frozen."""

from __future__ import annotations

from typing import Literal

import msgspec

Auto = Literal["auto"]
DeviceName = Literal["cpu", "cuda", "rocm"]
DtypeName = Literal["bfloat16", "float32"]
KvDtypeName = Literal["float32", "bfloat16", "fp8_e4m3"]


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`rocm-serve serve`, flag for flag (docs of each flag: `rocm-serve serve --help`)."""

    model: str
    served_model_name: str | None = None  # default: the path given
    host: str = "127.0.0.1"
    port: int = 8000
    tp: int = 1
    pp: int = 1
    ep: int = 1
    nnodes: int = 1
    node_rank: int | None = None  # None: 0, or what the launcher says
    dist_init_addr: str | None = None
    dist_timeout: int = 600  # seconds
    watchdog_timeout: int = 300  # seconds
    device: Auto | DeviceName = "auto"
    dtype: Auto | DtypeName = "auto"
    kv_cache_dtype: Auto | KvDtypeName = "auto"
    page_size: int = 16
    chunked_prefill_size: int = 512
    max_running_requests: int = 64
    max_queued_requests: int = 4096
    max_model_len: int | None = None  # None: what the model allows
    max_total_tokens: int | None = None  # tokens the KV pages may hold over all requests; None: what memory allows
    mem_fraction: float | None = None  # None: 0.9 of a GPU's memory, 0.5 of free RAM
    load_format: Literal["auto", "dummy"] = "auto"
    enforce_eager: bool = False
    op: dict[str, str] = {}  # op name, or "layers.N.op", -> provider
    seed: int = 0
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
    op: dict[str, str]
    seed: int
    log_level: str
    vocab_size: int  # rows of lm_head
    vocab_used: int  # ids the tokenizer knows; higher ones are never sampled
    eos_token_ids: tuple[int, ...]
    torch_threads: int  # per worker
    run_dir: str  # sockets and logs of this run
    max_total_tokens: int | None = None  # a cap below what memory allows, or None
    trace: str | None = None
    watchdog_timeout: int = 300  # a rank that owes progress and makes none for so long is dead
    members: int = 1  # processes like this one: one per host, or per rank under torchrun
    member: int = 0  # this one's place; 0 also runs core and HTTP server
    first_device: int = 0  # GPU of this member's first rank
    address: str = ""  # this member's, for the others; empty when there are none
    interface: str = ""
    reasons: dict[str, str] = {}

    @property
    def local_ranks(self) -> range:
        """Ranks that this member starts."""
        each = self.tp * self.pp // self.members
        return range(self.member * each, (self.member + 1) * each)
