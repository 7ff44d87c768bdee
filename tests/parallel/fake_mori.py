"""A MORI for the CPU that refuses whatever the real one takes in silence: what the package of mori_package.py does.

Ranks are processes (where torch.distributed has a world; rows go over gloo) or threads of one process, as in
`run_ranks`. It behaves as amd-mori 1.2.4 was read to do; what is wrong tokens, a fault of the GPU or a hang there is a
ContractError here. Not here: the kernels AsyncLL, 3-D layouts, quantised combine, graphs.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rocm_serve.parallel.comm import Meeting

MORI_SHMEM_INIT_WITH_UNIQUEID = 1
TIMEOUT_S = 30.0
_DATA_ARGUMENTS = {"dispatch": 4, "combine": 3}  # what may be passed by position; launch arguments may not
_ROW_TYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


class ContractError(RuntimeError):
    """The real library would give wrong tokens, fault or hang."""


def require(right: bool, words: str) -> None:
    if not right:
        raise ContractError(words)


def strict(function: Callable[..., Any]) -> Callable[..., Any]:
    """Bind a call to the signature, refuse launch arguments by position, and run what this file has by that name."""
    signature, name = inspect.signature(function), function.__name__
    method = "self" in signature.parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        limit = _DATA_ARGUMENTS.get(name)
        if limit is not None and len(args) - method > limit:
            raise ContractError(f"{name}: launch arguments by position, where the third is not the number of warps")
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        if method:
            return getattr(given.pop("self"), f"run_{name.strip('_')}")(**given)
        return globals()[name](**given)

    return call


# ---- mori.shmem


class Link(Protocol):
    """Brings a piece of memory from each rank to each other."""

    def exchange(self, pieces: list[torch.Tensor]) -> list[torch.Tensor]: ...


class _Threads:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def exchange(self, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        def mine(brought: list[list[torch.Tensor]]) -> list[torch.Tensor]:
            return [one[self._rank].clone() for one in brought]

        try:
            return self._meeting.meet(self._rank, "mori", pieces, mine)
        except threading.BrokenBarrierError:
            raise ContractError(f"a rank did not come within {TIMEOUT_S} s, or failed") from None


class _Gloo:
    def __init__(self, address: str, rank: int, size: int) -> None:
        host, port = address.split(":")
        limit = timedelta(seconds=TIMEOUT_S)
        self._store = dist.TCPStore(host, int(port), is_master=False, timeout=limit)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("mori", self._store), rank, size, limit)

    def exchange(self, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        flat = [piece.contiguous().view(torch.uint8).flatten() for piece in pieces]
        sizes = torch.tensor([piece.numel() for piece in flat])
        coming = torch.empty_like(sizes)
        self._group.alltoall_base(coming, sizes, [], []).wait()
        out = torch.empty(int(coming.sum()), dtype=torch.uint8)
        self._group.alltoall_base(out, torch.cat(flat), coming.tolist(), sizes.tolist()).wait()
        width = pieces[0].shape[1]
        return [part.view(pieces[0].dtype).view(-1, width) for part in out.split(coming.tolist())]


class _Here(threading.local):
    """What one rank knows."""

    link: Link | None = None
    rank = -1
    size = 0


_here = _Here()
_meetings: dict[bytes, Meeting | None] = {}
_numbers = itertools.count()
_lock = threading.Lock()
_servers: list[dist.TCPStore] = []  # kept until the process ends


def shmem_get_unique_id() -> bytes:
    if dist.is_initialized():
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        _servers.append(server)
        return f"127.0.0.1:{server.port}".encode().ljust(128, b"\0")
    unique = f"threads {next(_numbers)}".encode().ljust(128, b"\0")
    _meetings[unique] = None
    return unique


def shmem_init_attr(flags: int, rank: int, nranks: int, unique_id: bytes) -> int:
    require(flags == MORI_SHMEM_INIT_WITH_UNIQUEID and len(unique_id) == 128, "wants the flag and an id of 128 bytes")
    require(_here.link is None, "shared memory is started already")
    require(0 <= rank < nranks, f"rank {rank} of {nranks}")
    if dist.is_initialized():
        link: Link = _Gloo(unique_id.rstrip(b"\0").decode(), rank, nranks)
    else:
        require(unique_id in _meetings, "nobody made this id: it never came from the first rank")
        with _lock:
            meeting = _meetings[unique_id] or Meeting(nranks, timeout_s=TIMEOUT_S)
            _meetings[unique_id] = meeting
        link = _Threads(meeting, rank)
    _here.link, _here.rank, _here.size = link, rank, nranks
    return 0


def shmem_torch_process_group_init(group_name: str) -> int:
    """Start as the real one does: the id is told from the global rank 0, whichever ranks the group has."""
    group = dist.distributed_c10d._resolve_process_group(group_name)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    box = [shmem_get_unique_id() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0, group=group)
    assert box[0] is not None
    return shmem_init_attr(MORI_SHMEM_INIT_WITH_UNIQUEID, rank, size, box[0])


def shmem_finalize() -> int:
    require(_here.link is not None, "shared memory is not started")
    forget()
    return 0


def forget() -> None:
    """Leave shared memory, if this rank is in it: for tests that do not come to their end."""
    _here.link, _here.rank, _here.size = None, -1, 0


def shmem_mype() -> int:
    return _here.rank


def shmem_npes() -> int:
    return _here.size


# ---- mori.ops


class Op:
    """The base of the package's EpDispatchCombineOp."""

    def run_init(self, config: Any) -> None:
        require(_here.link is not None, "an op before shared memory is started")
        if dist.is_initialized():
            dist.barrier()  # of the world, whatever the group
        self.config, self._link = config, _here.link
        size, gpus, kernel = config.world_size, config.gpu_per_node, config.kernel_type.name
        require((config.rank, size) == (_here.rank, _here.size), "rank and world_size are not those of shared memory")
        require(
            gpus > 0 and not gpus & (gpus - 1) and size % gpus == 0, "gpu_per_node: a power of 2 dividing the world"
        )
        require(config.max_num_inp_token_per_rank % 64 == 0, "max_num_inp_token_per_rank: whole wavefronts of 64")
        require(kernel in ("IntraNode", "InterNodeV1", "InterNodeV1LL"), f"kernel {kernel} is not modelled")
        require(kernel != "IntraNode" or size == gpus <= 8, "IntraNode, and the group is not inside a node")
        require(kernel == "IntraNode" or config.rdma_block_num < config.block_num, "all blocks are for RDMA")
        require(config.quant_type == "none" and config.max_total_recv_tokens == 0, "not modelled")
        require((config.scale_dim == 0) == (config.scale_type_size == 0), "scales without a size, or a size without")
        self.rows = size * config.max_num_inp_token_per_rank
        self._memory: dict[str, torch.Tensor] = {}
        self._sent: tuple[torch.Tensor, list[torch.Tensor], int] | None = None
        if dist.is_initialized():
            dist.barrier()

    def _check_launch(self, block_num: int, rdma_block_num: int, warp_per_block: int) -> None:
        """A call's own geometry wins. Without it IntraNode takes 256 blocks of 16, more than some GPUs have CUs."""
        kernel = self.config.kernel_type.name
        require(kernel != "IntraNode" or block_num > 0, "IntraNode without block_num: 256 blocks, a hang on 80 CUs")
        require(warp_per_block <= 16, f"{warp_per_block} warps a block")
        require(kernel == "IntraNode" or 0 < rdma_block_num < block_num, "rdma_block_num is not below block_num")

    def _check_rows(self, rows: torch.Tensor, what: str) -> None:
        require(rows.is_contiguous(), f"{what} is not contiguous: only its pointer is read")
        require(rows.dtype in _ROW_TYPES, f"{what} of {rows.dtype}: no kernel")
        require(rows.shape[1] == self.config.hidden_dim, f"{what} has another width than hidden_dim")
        require(rows.element_size() <= self.config.max_token_type_size, f"{what} is wider than max_token_type_size")

    def run_dispatch(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int,
        rdma_block_num: int,
        warp_per_block: int,
        call_local_expert_count: bool = False,
        routing: object = None,
        return_routing: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        config, n = self.config, input.shape[0]
        require(not (call_local_expert_count or routing or return_routing), "not modelled")
        require(self._sent is None, "dispatch while a dispatch has not been combined")
        require(indices.dtype == torch.int32, f"indices of {indices.dtype}: read as int32")
        require(indices.shape == (n, config.num_experts_per_token) and indices.is_contiguous(), "indices: [n, top-k]")
        require(n <= config.max_num_inp_token_per_rank, f"{n} rows over max_num_inp_token_per_rank")
        self._check_rows(input, "input")
        self._check_launch(block_num, rdma_block_num, warp_per_block)
        width = 0 if scales is None else scales.shape[1]
        require(width == config.scale_dim, f"{width} scales a row, built for {config.scale_dim}: a fault of the GPU")
        if scales is not None:
            require(scales.element_size() == config.scale_type_size and scales.is_contiguous(), "scales' type")
        if weights is not None:
            require(weights.dtype == torch.float32 and weights.is_contiguous(), "weights: fp32, contiguous")
            require(weights.shape == indices.shape, "weights: as many as indices")
        return self._deliver(input, weights, scales, indices.clone())

    def _deliver(
        self, input: torch.Tensor, weights: torch.Tensor | None, scales: torch.Tensor | None, own: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        size, each = self.config.world_size, self.config.num_experts_per_rank
        holder = torch.where((own >= 0) & (own < size * each), own // each, -1)
        picks = [(holder == rank).any(dim=1).nonzero().flatten() for rank in range(size)]
        out, total = self._receive("rows", input, picks)
        ids, _ = self._receive("ids", own, picks)
        # What lies behind the rows that came are rows of earlier batches: ids in range, nothing to tell them by.
        ids[total:] = self.config.rank * each
        came_weights = None if weights is None else self._receive("weights", weights, picks)[0]
        came_scales = None if scales is None else self._receive("scales", scales, picks)[0]
        self._sent = (own, picks, total)
        return out, came_weights, came_scales, ids, torch.tensor([total], dtype=torch.int32)

    def _receive(self, name: str, rows: torch.Tensor, picks: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        assert self._link is not None
        came = self._link.exchange([_bytes(rows)[pick] for pick in picks])
        held = self._held(name, (self.rows, rows.shape[1]), rows.dtype)
        total = sum(part.shape[0] for part in came)
        _bytes(held)[:total] = torch.cat(came)
        return held, total

    def _held(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return the op's own memory for one output, its last content overwritten by NaN."""
        held = self._memory.setdefault(f"{name} {dtype}", torch.empty(shape, dtype=dtype))
        _bytes(held).fill_(0xFF)
        return held

    def run_combine(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int,
        rdma_block_num: int,
        warp_per_block: int,
        use_external_inp_buf: int = -1,
        call_reset: bool = False,
        routing: object = None,
    ) -> tuple[torch.Tensor, None]:
        require(not call_reset and routing is None and use_external_inp_buf != 0 and weights is None, "not modelled")
        require(self._sent is not None, "combine without a dispatch")
        assert self._sent is not None and self._link is not None
        own, picks, total = self._sent
        if indices.shape[0] != own.shape[0]:
            raise ValueError(f"combine: {indices.shape[0]} rows of indices, dispatch had {own.shape[0]}")
        require(torch.equal(indices, own), "combine: not the routing that this rank gave to dispatch")
        self._check_rows(input, "combine's input")
        self._check_launch(block_num, rdma_block_num, warp_per_block)
        require(input.shape[0] >= total, "combine: fewer rows than came")
        came_from = self._counts(picks)
        back = self._link.exchange([_bytes(part) for part in input[:total].split(came_from)])
        sums = torch.zeros(own.shape[0], input.shape[1])
        for pick, part in zip(picks, back, strict=True):
            sums[pick] += part.view(input.dtype).float()
        nowhere = torch.ones(own.shape[0], dtype=torch.bool)
        nowhere[torch.cat(picks)] = False
        sums[nowhere] = torch.nan  # a row that went nowhere: nobody writes its sum
        out = self._held("home", (self.config.max_num_inp_token_per_rank, input.shape[1]), input.dtype)
        out[: own.shape[0]] = sums.to(input.dtype)
        self._sent = None
        return out, None

    def _counts(self, picks: list[torch.Tensor]) -> list[int]:
        """Return how many rows came from each rank."""
        assert self._link is not None
        told = [torch.tensor([[len(pick)]]) for pick in picks]
        return [int(one) for one in self._link.exchange(told)]

    def run_reset(self) -> None:
        self._sent = None

    def run_get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int) -> torch.Tensor:
        raise ContractError("not modelled")


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
