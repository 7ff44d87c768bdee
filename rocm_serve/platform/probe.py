"""Ask the machine. The only file that reads core counts, free memory and GPU properties.

GPUs are asked for in a child process (`python -m rocm_serve.platform.probe`), so that a supervisor which starts one
worker per GPU neither loads torch nor opens a device itself.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from rocm_serve.errors import UserError
from rocm_serve.platform.facts import GpuFacts, Platform
from rocm_serve.platform.host import HostFacts
from rocm_serve.platform.network import Interface, Network, check_resolved, network_of
from rocm_serve.platform.rdma import read_ports

_CGROUP = Path("/sys/fs/cgroup")
_NET = Path("/sys/class/net")
_CAP_IPC_LOCK = 14
# Without one of these no driver is loaded, and `auto` need not pay seconds for importing torch.
_GPU_FILES = (Path("/dev/kfd"), Path("/dev/nvidiactl"), Path("/dev/dxg"))


def probe(device: Literal["auto", "cpu", "cuda", "rocm"]) -> Platform:
    """Describe this host, with its GPUs when they are asked for or `auto` finds a driver.

    Errors: UserError when a GPU is asked for and torch sees none of that kind.
    """
    gpu = GpuFacts(kind="none")
    if device in ("cuda", "rocm") or (device == "auto" and any(path.exists() for path in _GPU_FILES)):
        gpu = _ask_child_for_gpus()
    if device in ("cuda", "rocm") and gpu.kind != device:
        seen = "no GPU" if gpu.kind == "none" else f"{gpu.kind} GPUs"
        raise UserError(f"--device {device}: torch {gpu.torch_build} sees {seen} here; legal: auto, cpu")
    cores = usable_cores()
    free = free_ram_bytes()
    if gpu.kind == "none":
        return Platform(device="cpu", arch=platform.machine(), cores=cores, free_ram_bytes=free)
    return Platform(
        device=gpu.kind,
        arch=gpu.arch,
        num_gpus=gpu.num_gpus,
        compute_units=gpu.compute_units,
        hbm_bytes=gpu.hbm_bytes,
        gpu_name=gpu.name,
        cores=cores,
        free_ram_bytes=free,
    )


def usable_cores() -> int:
    """Count the cores this process may use: affinity mask and container quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def free_ram_bytes() -> int:
    """Bytes that can be allocated without swapping: the host's, or what the container's limit leaves."""
    free = int(psutil.virtual_memory().available)
    limit = _read(_CGROUP / "memory.max")
    used = _read(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        reclaimable = 0
        for line in _read(_CGROUP / "memory.stat").splitlines():
            name, _, value = line.partition(" ")
            if name == "inactive_file":
                reclaimable = int(value)
        free = min(free, max(0, int(limit) - int(used) + reclaimable))
    return free


def free_device_bytes(index: int) -> tuple[int, int]:
    """Free and total memory of one GPU, in bytes, as its driver says now."""
    import torch

    free, total = torch.cuda.mem_get_info(index)
    return int(free), int(total)


def free_port(host: str = "127.0.0.1") -> int:
    """Find a TCP port that nobody listens on now. It is not reserved: bind it soon."""
    with socket.socket() as probe_socket:
        probe_socket.bind((host, 0))
        return int(probe_socket.getsockname()[1])


def interfaces() -> tuple[Interface, ...]:
    """List the network interfaces of this host with their IP addresses."""
    stats = psutil.net_if_stats()
    found = psutil.net_if_addrs()
    families = (socket.AF_INET, socket.AF_INET6)
    return tuple(
        Interface(
            name,
            tuple(a.address.partition("%")[0] for a in found.get(name, ()) if a.family in families),
            up=bool(stats[name].isup) if name in stats else False,
            mtu=int(stats[name].mtu) if name in stats else 0,
            inside=bridge_is_inside(_NET / name),
        )
        for name in {**found, **stats}
    )


def bridge_is_inside(interface: Path) -> bool:
    """Whether `interface`, a folder of /sys/class/net, is a bridge none of whose ports leaves this host.

    Ports that do: hardware, and what is stacked upon others (bonds, VLANs, tunnels, which the kernel gives a type).
    """
    ports = interface / "brif"
    if not ports.is_dir():
        return False
    for port in (interface.parent / one.name for one in ports.iterdir()):
        stacked = "DEVTYPE=" in _read(port / "uevent") or any(port.glob("lower_*"))
        if stacked or (port / "device").exists():
            return False
    return True


def numeric_host(host: str) -> str:
    """Look up a host name. Errors: UserError when there is no such host."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UserError(f"--dist-init-addr {host}: {error.strerror or error}") from None


def source_address(to: str) -> str | None:
    """Say from which address this host would reach `to`; None without a route. Nothing is sent."""
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((to, 9))
        except OSError:
            return None
        return str(asking.getsockname()[0])


def find_network(member: int, host: str, environ: Mapping[str, str]) -> Network:
    """Find the addresses that member `member` of a world around `host` uses. Errors: UserError."""
    address = numeric_host(host)
    check_resolved(host, address)
    return network_of(member, host, address, source_address(address), interfaces(), environ)


def host_facts(root: Path = Path("/")) -> HostFacts:
    """Look at what a launch over several hosts needs. `root`: below it /dev, /proc and /sys are read."""
    hostname = socket.gethostname()
    soft, hard = (None if one == resource.RLIM_INFINITY else one for one in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    numa = _read(root / "proc/sys/kernel/numa_balancing")
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", _read(root / "proc/self/status"), re.MULTILINE)
    return HostFacts(
        hostname=hostname,
        hostname_address=_own_name(hostname),
        has_gpu=any((root / path.relative_to("/")).exists() for path in _GPU_FILES),
        memlock_soft=soft,
        memlock_hard=hard,
        may_lock=capabilities is not None and bool(int(capabilities[1], 16) >> _CAP_IPC_LOCK & 1),
        shm_free=_free_bytes(root / "dev/shm"),
        rdma_files=len(list((root / "dev/infiniband").glob("uverbs*"))),
        rdma_ports=read_ports(root),
        numa_balancing=int(numa) if numa.isdigit() else None,
    )


def _own_name(hostname: str) -> str | None:
    try:
        return str(socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None  # nobody knows the name, this host included


def _free_bytes(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None  # no such folder
    return found.f_bavail * found.f_frsize


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""  # no such controller here: no limit


def _ask_child_for_gpus() -> GpuFacts:
    child = subprocess.run([sys.executable, "-m", __name__], capture_output=True, check=False)
    if child.returncode != 0:
        last_line = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UserError(f"torch cannot be asked for GPUs: {last_line}; legal without it: --device cpu")
    return msgspec.json.decode(child.stdout, type=GpuFacts)


def gpus_seen_by_torch() -> GpuFacts:
    """Ask torch in this process. Loads torch and opens the first GPU."""
    import torch

    build = str(torch.__version__)
    if not torch.cuda.is_available():
        return GpuFacts(kind="none", torch_build=build)
    first = torch.cuda.get_device_properties(0)
    is_rocm = torch.version.hip is not None
    arch = first.gcnArchName.split(":")[0] if is_rocm else f"sm_{first.major}{first.minor}"
    return GpuFacts(
        kind="rocm" if is_rocm else "cuda",
        arch=arch,
        num_gpus=torch.cuda.device_count(),
        compute_units=first.multi_processor_count,
        hbm_bytes=first.total_memory,
        name=first.name,
        torch_build=build,
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(gpus_seen_by_torch()))
