"""The control link: members meet, agree or name what differs, hear each other, and notice who is gone."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rocm_serve.control import Link
from rocm_serve.control_follower import FollowerLink
from rocm_serve.control_leader import LeaderLink
from rocm_serve.doors import CONTROL_PORT
from rocm_serve.frames import Connection, GroupLost
from rocm_serve.messages import AskToStop, Beat, ControlMessage, GroupDown, Hello, Leave, RankBeat
from rocm_serve.platform.probe import free_port
from tests.e2e.two_nodes import free_ports

HOST = "127.0.0.1"
CHECKS = {"tp": "2", "config.json": "abc"}
BEAT = Beat((RankBeat(3, 17, "decode", 5, 2, True, False, False),))


@contextmanager
def leader(members: int = 2, checks: dict[str, str] = CHECKS) -> Iterator[tuple[LeaderLink, int]]:
    port = free_ports(HOST) + CONTROL_PORT
    link = LeaderLink("node", members, HOST, port, checks)
    try:
        yield link, port
    finally:
        link.close()


@contextmanager
def follower(
    port: int, member: int = 1, members: int = 2, checks: dict[str, str] = CHECKS, address: str = HOST
) -> Iterator[FollowerLink]:
    link = FollowerLink("node", member, members, HOST, port, address, checks)
    try:
        yield link
    finally:
        link.close()


def until(links: list[Link], done: Callable[[], bool]) -> list[tuple[int, ControlMessage]]:
    """Poll all ends in turn until `done`; return what they heard."""
    heard: list[tuple[int, ControlMessage]] = []
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end
        for link in links:
            heard += link.poll(0.02)
    return heard


def hear(link: Link, count: int = 1) -> list[tuple[int, ControlMessage]]:
    """Poll one end until it has heard `count` messages."""
    heard: list[tuple[int, ControlMessage]] = []
    end = time.monotonic() + 30
    while len(heard) < count:
        assert time.monotonic() < end
        heard += link.poll(0.02)
    return heard


def test_members_meet_and_hear_each_other() -> None:
    with leader(3) as (first, port), follower(port, 1, 3) as second, follower(port, 2, 3) as third:
        assert (
            "waiting for nodes 1, 2 of 3" in first.waiting_for() and "nothing has connected yet" in first.waiting_for()
        )
        until([first, second, third], lambda: first.complete and second.complete and third.complete)
        second.send(BEAT)
        third.send(AskToStop())
        assert sorted(hear(first, 2), key=lambda one: one[0]) == [(1, BEAT), (2, AskToStop())]
        first.send(Leave())
        assert hear(second) == hear(third) == [(0, Leave())]


def test_a_long_message_arrives_whole() -> None:
    with leader() as (first, port), follower(port) as second:
        until([first, second], lambda: first.complete and second.complete)
        long = GroupDown("x" * 1_000_000, 1)
        thread = threading.Thread(target=second.send, args=(long,))
        thread.start()
        assert hear(first) == [(1, long)]
        thread.join()


def test_what_differs_is_named_on_both_sides_with_both_values() -> None:
    other = {"tp": "4", "config.json": "abc", "extra": "1"}
    with leader() as (first, port), follower(port, checks=other) as second:
        sentence = "node 0 and node 1 differ; tp: 2 on node 0, 4 on node 1; extra: absent on node 0, 1 on node 1"
        with pytest.raises(GroupLost) as lost:
            until([second, first], lambda: False)
        assert str(lost.value) == sentence and lost.value.wish
        assert hear(second) == [(0, GroupDown(sentence, 2))]


def test_another_wire_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with leader() as (first, port), socket.create_connection((HOST, port)) as stranger:
        stranger.sendall(b"rsrv" + (999).to_bytes(2, "little") + (0).to_bytes(4, "little"))
        with pytest.raises(GroupLost, match="speaks wire version 999, this one"):
            until([first], lambda: False)


def test_strangers_are_ignored() -> None:
    with leader() as (first, port), follower(port) as second, socket.create_connection((HOST, port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        socket.create_connection((HOST, port)).close()
        until([first, second], lambda: first.complete and second.complete)


def twin_socket(link: FollowerLink) -> socket.socket:
    assert link._leader is not None
    return link._leader.sock


def test_a_second_node_of_the_same_rank_is_refused_and_the_first_goes_on() -> None:
    with leader(3) as (first, port), follower(port, 1, 3) as second, follower(port, 1, 3) as twin:
        until([first, second], lambda: first.connected)
        twin.poll(0.02)
        until([first], lambda: bool(select.select([twin_socket(twin)], [], [], 0)[0]))
        _, down = hear(twin)[0]
        assert isinstance(down, GroupDown) and "node 1 is already there" in down.error and "legal: 2" in down.error
        first.poll(0.02)


def test_a_node_that_cannot_be_reached_back_is_named_with_its_address() -> None:
    with leader() as (first, port), socket.create_connection((HOST, port)) as pretender:
        closed = free_port()
        Connection(pretender, "x").send(Hello(1, CHECKS, HOST, closed))
        with pytest.raises(GroupLost, match="node 0 cannot reach node 1 at 127.0.0.1"):
            until([first], lambda: False)


def test_a_way_back_from_another_address_is_told_with_the_address_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocm_serve.control_leader._is_loopback", lambda address: False)
    port = free_ports("127.0.0.2") + CONTROL_PORT
    link = LeaderLink("node", 2, "127.0.0.2", port, CHECKS)
    second = FollowerLink("node", 1, 2, "127.0.0.2", port, HOST, CHECKS)
    try:
        with pytest.raises(GroupLost) as lost:
            until([second, link], lambda: False)
        assert "node 0 reaches node 1 at 127.0.0.1 from 127.0.0.1, not from 127.0.0.2" in str(lost.value)
        assert "give 127.0.0.1 there, or a route" in str(lost.value) and lost.value.wish
        assert hear(second) == [(0, GroupDown(str(lost.value), 2))]
    finally:
        link.close()
        second.close()


def test_a_follower_says_why_it_waits() -> None:
    with follower(free_port()) as alone:
        until([alone], lambda: "refused" in alone.waiting_for())
        assert "node 1 of 2 waits for node 0 at 127.0.0.1:" in alone.waiting_for() and not alone.connected


@pytest.mark.parametrize("who", ["leader", "follower"])
def test_a_closed_connection_is_noticed_at_once(who: str) -> None:
    with leader() as (first, port), follower(port) as second:
        until([first, second], lambda: first.complete and second.complete)
        gone, left = (first, second) if who == "leader" else (second, first)
        gone.close()
        with pytest.raises(GroupLost, match=rf"node {0 if who == 'leader' else 1} at .* has gone"):
            until([left], lambda: False)


@pytest.mark.parametrize("who", ["leader", "follower"])
def test_silence_is_noticed(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for end in ("leader", "follower"):
        monkeypatch.setattr(f"rocm_serve.control_{end}.SILENCE_S", 0.3)
    with leader() as (first, port), follower(port) as second:
        until([first, second], lambda: first.complete and second.complete)
        left: Link = first if who == "follower" else second
        with pytest.raises(GroupLost, match="silent"):
            until([left], lambda: False)


def test_a_port_that_is_taken_is_told_as_such() -> None:
    with leader() as (_, port), pytest.raises(GroupLost) as lost:
        LeaderLink("node", 2, HOST, port, CHECKS)
    assert str(lost.value).startswith(f"cannot listen on {HOST}:{port - CONTROL_PORT}: ")
    assert lost.value.wish and CONTROL_PORT == 3
