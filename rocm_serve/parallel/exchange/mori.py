"""Rows go to the ranks that hold their experts by MORI's kernels (amd-mori, its flat API of version 1).

The only importer of mori, and late: where ROCm's libraries are missing its import fails with OSError. Letters as in
contract.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from rocm_serve.errors import UserError
from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.exchange.contract import Dispatched, ExchangeSpec
from rocm_serve.parallel.exchange.mori_limits import (
    HEAP_VARIABLE,
    MODE_VARIABLE,
    OpShape,
    check_heap,
    check_settings,
    group_gpus,
    heap_bytes,
    op_shapes,
    total_heap,
)
from rocm_serve.parallel.exchange.shares import Shares, local_slots, padding_rows
from rocm_serve.platform import mori_abi

_UNIQUE_ID_BYTES = 128

# Libraries that MORI links and the packages that bring them, by Debian's names.
_PACKAGES = {
    "libpci": "libpci3",
    "libibverbs": "libibverbs1",
    "libmlx5": "ibverbs-providers",
    "libbnxt_re": "ibverbs-providers",
    "libnuma": "libnuma1",
    "libdrm": "libdrm2 and libdrm-amdgpu1",
    "libgrpc": "libgrpc++1",
    "libprotobuf": "libprotobuf32",
    "libamdhip64": "ROCm 7",
    "libhsa-runtime64": "ROCm 7",
}


@dataclass(frozen=True, slots=True)
class MoriSetup:
    """What MORI needs beyond a spec.

    `host`: the same ranks as the exchange's, over gloo. `environ`: this process's environment, of which MORI reads some
    variables itself. The GPU of this rank is the current device before MORI is started.
    """

    host: Comm
    gpus_per_node: int
    compute_units: int
    environ: Mapping[str, str] = field(default_factory=dict)


class MoriWorld:
    """MORI's shared memory between the ranks of one stage: from `__init__` to `close`.

    MORI's own start over a torch group tells the id from the *global* rank 0, which a later pipeline stage does not
    contain; here the group's own first rank tells it.
    Errors: UserError where MORI is missing, too old, does not load, or its heap is too small for `specs`.
    """

    def __init__(self, setup: MoriSetup, specs: Sequence[ExchangeSpec]) -> None:
        self.setup = setup
        world, gpus = setup.host.size, setup.gpus_per_node
        self._shapes = {spec: op_shapes(world, gpus, spec.capacity, setup.compute_units) for spec in specs}
        check_settings(setup.environ)
        needed = total_heap(self._heap_bytes(spec, shape) for spec in specs for shape in self._shapes[spec])
        check_heap(needed, setup.environ.get(HEAP_VARIABLE), setup.environ.get(MODE_VARIABLE))
        self._ops, self._shmem = _load()
        mine = self._shmem.shmem_get_unique_id() if setup.host.rank == 0 else bytes(_UNIQUE_ID_BYTES)
        told = setup.host.all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8))[0]
        with _compiling():
            status = self._shmem.shmem_init_attr(
                flags=self._shmem.MORI_SHMEM_INIT_WITH_UNIQUEID,
                rank=setup.host.rank,
                nranks=world,
                unique_id=bytes(told.tolist()),
            )
        if status:
            raise RuntimeError(f"MORI's shared memory did not start between the {world} ranks: status {status}")

    def _heap_bytes(self, spec: ExchangeSpec, shape: OpShape) -> int:
        return heap_bytes(
            shape,
            world=self.setup.host.size,
            gpus_per_node=self.setup.gpus_per_node,
            hidden_size=spec.hidden_size,
            top_k=spec.top_k,
            slots_per_rank=spec.slots_per_rank,
            row_type_bytes=spec.dtype.itemsize,
            scales_a_row=spec.scales_a_row,
        )

    def build(self, spec: ExchangeSpec) -> list[tuple[OpShape, Any]]:
        """Build the ops of one spec. Waits for every rank of the *world*: see `Exchanges`."""
        return [(shape, self._build(spec, shape)) for shape in self._shapes[spec]]

    def _build(self, spec: ExchangeSpec, shape: OpShape) -> Any:
        world = self.setup.host.size
        config = self._ops.EpDispatchCombineConfig(
            data_type=spec.dtype,
            rank=self.setup.host.rank,
            world_size=world,
            hidden_dim=spec.hidden_size,
            scale_dim=spec.scales_a_row,
            scale_type_size=4 if spec.fp8_rows else 0,
            max_token_type_size=spec.dtype.itemsize,
            max_num_inp_token_per_rank=shape.capacity,
            num_experts_per_rank=spec.slots_per_rank,
            num_experts_per_token=spec.top_k,
            warp_num_per_block=shape.warp_per_block,
            block_num=shape.block_num,
            max_total_recv_tokens=0,  # the worst case: beyond a bound rows would be dropped in silence
            use_external_inp_buf=True,
            kernel_type=getattr(self._ops.EpDispatchCombineKernelType, shape.kernel),
            gpu_per_node=group_gpus(world, self.setup.gpus_per_node),
            rdma_block_num=shape.rdma_block_num,
            num_qp_per_pe=2 if shape.rdma_block_num else 1,
            quant_type="none",
        )
        with _compiling():
            return self._ops.EpDispatchCombineOp(config=config)

    def close(self) -> None:
        """Give the shared memory back. The ops must be gone; every rank calls it."""
        self._shmem.shmem_finalize()


def _load() -> tuple[Any, Any]:
    why = mori_abi.refusal()
    if why is not None:
        raise UserError(f"--expert-exchange mori: mori {why}")
    try:
        import mori.ops
        import mori.shmem
    except (ImportError, OSError) as error:
        text = str(error)
        package = next((package for library, package in _PACKAGES.items() if library in text), "")
        advice = f"install {package}" if package else "it needs ROCm's libraries and libpci on this host"
        raise UserError(f"--expert-exchange mori: mori is installed but does not load ({text}): {advice}") from None
    return mori.ops, mori.shmem


@contextmanager
def _compiling() -> Iterator[None]:
    """Say what is missing where MORI, which compiles its kernels on the spot, cannot."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) or "not compiled" in str(error):
            raise UserError(
                f"--expert-exchange mori: MORI could not compile its kernels ({error}): it needs hipcc, of ROCm's"
                " package hip-dev, and a home folder that it may write to"
            ) from error
        raise


@dataclass(frozen=True, slots=True)
class _Sent:
    """This rank's own routing, which combine wants back, and the op that has the rows."""

    op: Any
    shape: OpShape
    ids: torch.Tensor
    padding_n1: torch.Tensor  # bool


class MoriExchange(Shares):
    """One batch at a time: an op keeps the rows that came in memory of its own until they are combined."""

    name = "mori"
    graph_refusal: str | None = "no graph with MORI's kernels was ever replayed by us"

    def __init__(self, spec: ExchangeSpec, comm: Comm, row_multiple: int, world: MoriWorld) -> None:
        super().__init__(comm, row_multiple)
        self.spec = spec
        self._built = world.build(spec)
        self._in_flight = False

    def dispatch(
        self,
        rows_nH: torch.Tensor,
        scales: torch.Tensor | None,
        ids_nk: torch.Tensor,
        weights_nk: torch.Tensor,
        num_rows: int | torch.Tensor,
    ) -> Dispatched:
        """See contract.py. Errors: RuntimeError where the batch before was not combined."""
        self.spec.refuse_unfit(rows_nH, scales, num_rows)
        if self._in_flight:
            raise RuntimeError("mori: dispatch, while the rows of the dispatch before are not combined yet")
        # Every rank has the same number of rows with padding, so all choose the same op.
        shape, op = next(((s, op) for s, op in self._built if rows_nH.shape[0] <= s.capacity), self._built[-1])
        padding_n1 = padding_rows(rows_nH, num_rows)
        if isinstance(num_rows, int):
            ids = ids_nk[:num_rows].to(torch.int32).contiguous()
            rows_nH, weights_nk = rows_nH[:num_rows], weights_nk[:num_rows]
            scales = None if scales is None else scales[:num_rows]
        else:
            ids = ids_nk.masked_fill(padding_n1, -1).to(torch.int32)  # ids below zero go nowhere
        rows, weights, came_scales, came_ids, count = op.dispatch(
            input=rows_nH.contiguous(),
            weights=weights_nk.contiguous(),
            scales=None if scales is None else scales.contiguous(),
            indices=ids,
            **_launch(shape),
        )
        self._in_flight = True
        local = local_slots(came_ids, self.comm.rank, self.spec.slots_per_rank)
        local = local.masked_fill(padding_rows(rows, count), -1)  # the rest is left over from earlier batches
        return Dispatched(rows, came_scales, local, weights, count, _Sent(op, shape, ids, padding_n1))

    def combine(self, returned_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """See contract.py. MORI adds over the distinct ranks of a row in an order of its own."""
        sent = dispatched.context
        assert isinstance(sent, _Sent)
        home, _ = sent.op.combine(input=returned_RH.contiguous(), weights=None, indices=sent.ids, **_launch(sent.shape))
        self._in_flight = False
        # What MORI returns is its own memory, as long as its capacity, and stale from the last row on.
        rows = sent.ids.shape[0]
        out_nH = returned_RH.new_zeros(sent.padding_n1.shape[0], returned_RH.shape[1])
        out_nH[:rows] = home[:rows].masked_fill(sent.padding_n1[:rows], 0)
        return out_nH

    def close(self) -> None:
        """Drop the ops, whose memory is in the world's heap."""
        self._built.clear()


def _launch(shape: OpShape) -> dict[str, int]:
    """By keyword: the third launch argument is not the number of warps but of the blocks for RDMA."""
    return {
        "block_num": shape.block_num,
        "rdma_block_num": shape.rdma_block_num,
        "warp_per_block": shape.warp_per_block,
    }
