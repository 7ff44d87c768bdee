"""The stage itself: two hosts reach each other, cables can be cut in two ways, and nothing is left behind."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.two_hosts.namespaces import INTERFACE, Host, TwoHosts, ip, remove_stale

LISTENS_S = 5.0


def listen(host: Host) -> socket.socket:
    with host.inside():
        return socket.create_server((host.address, 0))


def connect(host: Host, to: socket.socket) -> socket.socket:
    with host.inside():
        return socket.create_connection(to.getsockname(), timeout=LISTENS_S)


def test_two_hosts_have_names_addresses_and_a_cable(hosts: TwoHosts) -> None:
    first, second = hosts.hosts
    assert first.run("hostname").strip() == first.name
    assert first.run("getent", "hosts", second.name).split()[0] == second.address
    with listen(first) as listening, connect(second, listening), listening.accept()[0] as accepted:
        assert accepted.getpeername()[0] == second.address
    with socket.socket() as outside, pytest.raises(OSError, match="assign requested address"):
        outside.bind((first.address, 0))


@pytest.mark.parametrize("how", ["cut", "silence"])
def test_nothing_passes_a_cut_cable_and_nothing_closes(hosts: TwoHosts, how: str) -> None:
    first, second = hosts.hosts
    with listen(first) as listening, connect(second, listening) as calling, listening.accept()[0] as accepted:
        calling.sendall(b"before")
        assert accepted.recv(6) == b"before"
        if how == "cut":
            hosts.cut(1)
        else:
            hosts.silence()
        calling.sendall(b"after")
        accepted.settimeout(0.5)
        with pytest.raises(TimeoutError):
            accepted.recv(1)
    link = ip("-n", first.name, "link", "show", INTERFACE)
    assert ("NO-CARRIER" in link) == (how == "cut")


def test_what_a_dead_process_left_behind_is_removed(hosts: TwoHosts) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    name = f"rs{dead.pid}n0a"
    ip("netns", "add", name)
    with subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as left:
        while str(left.pid) not in ip("netns", "pids", name).split():
            assert left.poll() is None
        remove_stale()
        assert left.wait(10) < 0, "it lived in a namespace that is removed"
    listed = ip("netns", "list")
    assert name not in listed and all(host.name in listed for host in hosts.hosts), "those in use stay"
