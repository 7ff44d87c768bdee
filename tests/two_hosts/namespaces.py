"""Two network namespaces joined by a pair of veth: two hosts as far as addresses, routes, names and cables go.

They share this machine's kernel, files and processor. Names carry the id of the process that made them; what a process
that is gone has left behind is removed by the next one. iproute2 does the work, and needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

INTERFACE = "eth0"  # of both, facing the other
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PREFIX = "rs"
_NAME = re.compile(rf"{_PREFIX}(\d+)n\d+[ab]")
_CARRIER_S = 10.0
_CLONE_NEWNET = 0x40000000
_ETC = Path("/etc/netns")  # `ip netns exec` puts the files of /etc/netns/NAME over those of /etc
_libc = ctypes.CDLL(None, use_errno=True)


def ip(*words: str) -> str:
    """Run `ip words...` and return its output. Errors: CalledProcessError, with what it said as a note."""
    return run("ip", *words)


def run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr)
        raise


def why_not() -> str | None:
    """Say in a sentence why no namespaces can be made here; None when they can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "no iproute2 here (the programs ip and tc): make two-hosts-tools installs it"
    name = f"{_PREFIX}{os.getpid()}n0a"
    tried = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if tried.returncode != 0:
        said = tried.stderr.strip().splitlines()[-1:] or [f"exit code {tried.returncode}"]
        return f"network namespaces cannot be made here ({said[0]}): it takes root (in a container: --privileged)"
    ip("netns", "delete", name)
    return None


@dataclass(frozen=True)
class Host:
    """One namespace; `name` is also its hostname, which resolves to `address`."""

    name: str
    address: str
    rank: int

    def command(self, *words: str) -> list[str]:
        """Wrap a command so that it runs on this host; its process id stays that of the first process."""
        set_name = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return ["ip", "netns", "exec", self.name, *set_name, *words]

    def run(self, *words: str) -> str:
        """Run a command to its end on this host; return its output. Errors: CalledProcessError."""
        return run(*self.command(*words))

    def resolve(self, hosts: str) -> None:
        """Replace what /etc/hosts says on this host, for commands that start from now on."""
        folder = _ETC / self.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(hosts, encoding="utf-8")

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Have this thread on this host: sockets that it makes meanwhile belong there for good."""
        with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{self.name}") as there:
            _set_namespace(there.fileno())
            try:
                yield
            finally:
                _set_namespace(home.fileno())


class TwoHosts:
    """Make both with `with`; leaving it removes them. Processes there are the caller's to end."""

    _made = 0

    def __init__(self) -> None:
        stem = f"{_PREFIX}{os.getpid()}n{TwoHosts._made}"
        TwoHosts._made += 1
        first, second = (Host(f"{stem}{letter}", ADDRESSES[rank], rank) for rank, letter in enumerate("ab"))
        self.hosts = (first, second)

    def __enter__(self) -> Self:
        remove_stale()
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.remove()

    def _make(self) -> None:
        first, second = self.hosts
        for host in self.hosts:
            ip("netns", "add", host.name)
        ip(*("link", "add", INTERFACE, "netns", first.name, "type", "veth"), *("peer", INTERFACE, "netns", second.name))
        for host in self.hosts:
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                ip("-n", host.name, "link", "set", interface, "up")
            known = "".join(f"{other.address} {other.name}\n" for other in self.hosts)
            host.resolve(f"127.0.0.1 localhost\n::1 localhost\n{known}")
        end = time.monotonic() + _CARRIER_S
        while not all("state UP" in ip("-n", host.name, "link", "show", INTERFACE) for host in self.hosts):
            assert time.monotonic() < end, "the cable between the namespaces does not come up"
            time.sleep(0.01)

    def pids(self, rank: int) -> list[int]:
        """Processes on a host."""
        return [int(pid) for pid in ip("netns", "pids", self.hosts[rank].name).split()]

    def remove(self) -> None:
        for host in self.hosts:
            _remove(host.name)

    def cut(self, rank: int) -> None:
        """Take down the interface of a host: both ends see that the cable is gone."""
        ip("-n", self.hosts[rank].name, "link", "set", INTERFACE, "down")

    def silence(self) -> None:
        """Lose every packet between the two, in both directions; nobody is told."""
        for host in self.hosts:
            run("tc", "-n", host.name, "qdisc", "replace", "dev", INTERFACE, "root", "blackhole")


def remove_stale() -> None:
    """Remove namespaces, and end processes in them, whose maker is gone."""
    for name in sorted({*_listed(), *(path.name for path in _ETC.glob(f"{_PREFIX}*"))}):
        found = _NAME.fullmatch(name)
        if found is not None and not psutil.pid_exists(int(found[1])):
            for pid in ip("netns", "pids", name).split() if name in _listed() else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _remove(name)


def _listed() -> list[str]:
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line]


def _remove(name: str) -> None:
    if name in _listed():
        ip("netns", "delete", name)
    shutil.rmtree(_ETC / name, ignore_errors=True)


def _set_namespace(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")
