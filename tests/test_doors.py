"""Members that do not come say so, by whatever door is open, and those that wait for them end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from rocm_serve.control_follower import FollowerLink
from rocm_serve.control_leader import LeaderLink
from rocm_serve.doors import CONTROL_PORT, Doors, busy_port, drop_a_letter, tell, tell_followers, tell_leader
from rocm_serve.frames import GroupLost, frame
from rocm_serve.messages import Beat, GroupDown
from tests.e2e.two_nodes import free_ports

HOST = "127.0.0.1"
CHECKS = {"tp": "2"}


@contextmanager
def polled(link: LeaderLink | FollowerLink) -> Iterator[list[GroupLost]]:
    """Poll a link in a thread until it gives up; why is in the list then."""
    lost: list[GroupLost] = []
    over = threading.Event()

    def poll() -> None:
        try:
            while not over.is_set():
                for _, message in link.poll(0.02):
                    if isinstance(message, GroupDown):
                        raise GroupLost(message.error, wish=message.exit_code == 2)
        except GroupLost as error:
            lost.append(error)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield lost
    finally:
        over.set()
        thread.join()
        link.close()


def until(done: Callable[[], object], within_s: float = 30) -> None:
    end = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def leader(port: int) -> LeaderLink:
    return LeaderLink("node", 2, HOST, port + CONTROL_PORT, CHECKS)


def is_open(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex((HOST, port)) == 0


def follower(port: int) -> FollowerLink:
    return FollowerLink("node", 1, 2, HOST, port + CONTROL_PORT, HOST, CHECKS)


def test_a_leader_ends_with_the_word_of_a_member_that_does_not_come() -> None:
    port = free_ports(HOST)
    said: list[str] = []
    with polled(leader(port)) as lost:
        tell("node", 1, 2, f"{HOST}:{port}", "no such model", said.append)
        until(lambda: lost)
    assert str(lost[0]) == "node 1 does not start: no such model" and lost[0].wish
    assert said[0].startswith(f"telling node 0 by {HOST}:{port}, for up to") and said[1] == "node 0: told"


def test_a_follower_ends_with_the_word_of_a_leader_that_does_not_start() -> None:
    port = free_ports(HOST)
    said: list[str] = []
    with polled(follower(port)) as lost:
        tell("node", 0, 2, f"{HOST}:{port}", "no such model", said.append, within_s=30)
        until(lambda: lost)
    assert str(lost[0]) == "node 0 does not start: no such model" and lost[0].wish
    assert said[-1] == "the other nodes: told"


def test_two_that_both_do_not_start_hear_each_other() -> None:
    port = free_ports(HOST) + CONTROL_PORT
    heard: list[bool] = []
    thread = threading.Thread(target=lambda: heard.append(tell_followers(HOST, port, 1, "one", 30)))
    thread.start()
    assert tell_leader(HOST, port, "other", 30)
    thread.join()
    assert heard == [True]


def test_nobody_to_tell_is_said_and_ends_in_time() -> None:
    port = free_ports(HOST)
    said: list[str] = []
    for member in (0, 1):
        began = time.monotonic()
        tell("node", member, 2, f"{HOST}:{port}", "why", said.append, within_s=0.5)
        assert time.monotonic() - began < 10
        assert said[-1].endswith("not told, nobody was there to hear it")


def test_a_host_that_does_not_answer_at_all_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(address: object, timeout: float) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr("rocm_serve.doors._SILENT_S", 0.2)
    monkeypatch.setattr(socket, "create_connection", no_answer)
    began = time.monotonic()
    assert not tell_leader(HOST, 29503, "why", 60)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("how", [TimeoutError("timed out"), ConnectionRefusedError(111, "Connection refused")])
def test_a_leader_whose_control_port_is_shut_is_told_by_another_door(
    how: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_ports(HOST)
    connect = socket.create_connection

    def firewall(address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        if address[1] == port + CONTROL_PORT:
            raise how
        return connect(address, timeout=timeout)

    monkeypatch.setattr(socket, "create_connection", firewall)
    monkeypatch.setattr("rocm_serve.control_follower.UNANSWERED_S", 0.5)
    with polled(leader(port)) as there, polled(follower(port)) as here:
        until(lambda: there and here)
    sentence = f"node 1 reaches {HOST} on port {port} but not on {port + CONTROL_PORT} ({how.strerror or how}): a"
    assert str(here[0]).startswith(sentence) and str(there[0]) == str(here[0])
    assert f"Ports {port} to {port + CONTROL_PORT} must be open" in str(here[0]) and here[0].wish and there[0].wish


@pytest.mark.parametrize("shut", range(CONTROL_PORT))
@pytest.mark.parametrize("how", [TimeoutError("timed out"), ConnectionRefusedError(111, "Connection refused")])
def test_another_port_that_is_shut_is_told_while_the_members_meet(
    shut: int, how: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_ports(HOST)
    connect = socket.create_connection

    def firewall(address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        if address[1] == port + shut:
            raise how
        return connect(address, timeout=timeout)

    monkeypatch.setattr(socket, "create_connection", firewall)
    with polled(leader(port)) as there, polled(follower(port)) as here:
        until(lambda: there and here)
    sentence = f"node 1 reaches {HOST} on port {port + CONTROL_PORT} but not on {port + shut} ({how.strerror or how})"
    assert str(here[0]).startswith(sentence) and str(there[0]) == str(here[0]) and here[0].wish and there[0].wish


def test_a_leader_that_no_connection_reaches_is_told_by_a_datagram(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports(HOST)
    link = leader(port)

    def no_way_back(address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", no_way_back)
    monkeypatch.setattr("rocm_serve.control_follower.UNANSWERED_S", 0.5)
    with polled(link) as there, polled(follower(port)) as here:
        until(lambda: there and here)
    assert str(here[0]) == str(there[0])
    assert "has had no answer" in str(here[0]) and f"node 0 has no route back to {HOST}" in str(here[0])


def test_waiting_for_a_leader_that_has_not_started_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocm_serve.control_follower.UNANSWERED_S", 0.2)
    monkeypatch.setattr("rocm_serve.control_follower._RETRY_S", 0.1)
    port = free_ports(HOST)
    waiting = follower(port)
    with polled(waiting) as lost:
        time.sleep(1)  # five times as long as an answer is waited for
        assert not lost
        with polled(leader(port)):
            until(lambda: waiting.connected)
            time.sleep(0.5)
            assert not lost


def test_large_packets_that_get_lost_are_told_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocm_serve.frames.STALLED_S", 0.5)
    port = free_ports(HOST)

    def without_the_rest(self: object, message: object) -> None:
        whole = frame(message)  # type: ignore[arg-type]
        self.sock.sendall(whole[:1400] if len(whole) > 1400 else whole)  # type: ignore[attr-defined]

    monkeypatch.setattr("rocm_serve.frames.Connection.send", without_the_rest)
    with polled(leader(port)) as there, polled(follower(port)) as here:
        until(lambda: there and here)
    assert "small packets come, but large ones do not: the MTU" in str(there[0])
    assert str(there[0]) == str(here[0]) and there[0].wish and here[0].wish


def test_a_leader_that_does_not_start_is_heard_though_another_program_has_its_control_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rocm_serve.control_follower.SILENCE_S", 0.5)
    port = free_ports(HOST)
    with socket.socket() as other:
        other.bind((HOST, port + CONTROL_PORT))
        other.listen()
        with ThreadPoolExecutor() as pool:
            why = "node 0 does not start: the port is taken"
            told = pool.submit(tell_followers, HOST, port + CONTROL_PORT, 1, why, 30)
            until(lambda: is_open(port + CONTROL_PORT - 1))  # the last one; before that the follower has its own word
            with polled(follower(port)) as lost:
                assert told.result()
                until(lambda: lost)
    assert str(lost[0]) == "node 0 does not start: the port is taken"


def test_a_program_that_has_the_port_and_says_nothing_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocm_serve.control_follower.SILENCE_S", 0.5)
    monkeypatch.setattr("rocm_serve.doors._ANSWER_S", 0.2)
    port = free_ports(HOST)
    with contextlib.closing(Doors(HOST, port + CONTROL_PORT)), polled(follower(port)) as lost:
        until(lambda: lost)
    assert "takes connections and says nothing: another program has that port" in str(lost[0])


@pytest.mark.parametrize("taken", range(CONTROL_PORT + 1))
def test_a_taken_port_is_named_and_the_word_still_goes_out(taken: int) -> None:
    port = free_ports(HOST)
    with socket.socket() as other:
        other.bind((HOST, port + taken))
        other.listen()
        said = busy_port(HOST, port)
        assert said is not None and said.startswith(f"cannot listen on {HOST}:{port + taken}: Address already in use")
        assert "PORT to PORT+3 must be free" in said
        with pytest.raises(GroupLost, match=f"cannot listen on {HOST}:{port + taken}: .* must be free on node 0"):
            leader(port)
        doors = Doors(HOST, port + CONTROL_PORT, all_of_them=False)
        assert len(doors.listening) == CONTROL_PORT
        doors.close()
    assert busy_port(HOST, port) is None


def test_once_all_are_there_only_the_control_port_is_open() -> None:
    port = free_ports(HOST)
    doors = Doors(HOST, port + CONTROL_PORT)
    doors.shut_all_but_the_front()
    with contextlib.closing(doors):
        assert [one.getsockname()[1] for one in doors.sockets] == [port + CONTROL_PORT]
        socket.create_connection((HOST, port + CONTROL_PORT)).close()
        for other in range(port, port + CONTROL_PORT):
            with socket.socket() as free:
                free.bind((HOST, other))


def test_letters_of_strangers_are_thrown_away() -> None:
    port = free_ports(HOST) + CONTROL_PORT
    with contextlib.closing(Doors(HOST, port)) as doors, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for letter in (b"", b"hello, is anybody there?", frame(Beat())):
            stranger.sendto(letter, (HOST, port))
            assert doors.open_mail() is None
        drop_a_letter(HOST, port, "why")
        assert doors.open_mail() == GroupDown("why", 2)
