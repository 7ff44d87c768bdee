"""What a launch over several hosts needs of this one, apart from its GPUs. One value, filled by platform/probe.py."""

from __future__ import annotations

from dataclasses import dataclass

from rocm_serve.platform.rdma import RdmaPort


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Sizes in bytes; None is unlimited for `memlock_*`, and not there or not known for the others."""

    hostname: str
    hostname_address: str | None  # what the name resolves to here
    has_gpu: bool
    memlock_soft: int | None
    memlock_hard: int | None
    may_lock: bool  # CAP_IPC_LOCK: the limit does not bind
    shm_free: int | None
    rdma_files: int  # /dev/infiniband/uverbs*
    rdma_ports: tuple[RdmaPort, ...]
    numa_balancing: int | None
