"""Who may join a start: real sockets, and processes that are threads. Real processes are in tests/test_starts.py."""

import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from door_start import soon, starts, who

from ejdist.cluster import line as line_module
from ejdist.cluster.door import Door, listening
from ejdist.cluster.line import NobodyCame, TurnedAway, knock, occupant
from ejdist.cluster.presence import Presence


@pytest.fixture(autouse=True)
def soon_silent(monkeypatch):
    soon(monkeypatch)


@pytest.fixture
def start():
    with starts() as make:
        yield make


def test_those_of_one_start_are_let_in_when_all_are_there(start):
    s = start()
    assert [(h.index, h.hostname) for h in s.complete()] == [(0, "n0"), (1, "n1"), (2, "n2")]
    time.sleep(0.8)  # longer than silence would be: everybody gives signs of life
    assert s.said == [] and s.left == [] and all(p.gone() is None for p in s.presence)


@pytest.mark.parametrize(
    ("index", "other", "word"),
    [
        (1, {}, "all its processes are there: host 1 (n1, pid 11)"),  # the same command once more
        (0, {}, "this is another start"),
        (1, {"command": "launch.doctor"}, "this is another start"),
        (2, {"run": "/runs/b"}, "this is another start"),
        (1, {"start": "two"}, "this is another start"),
        (1, {"count": 2}, "has 3 processes (cluster.num_processes), not 2"),
        (7, {}, "has no process 7"),
    ],
)
@pytest.mark.parametrize("all_there", [True, False])
def test_who_is_of_another_start_is_turned_away_by_name(start, index, other, word, all_there):
    s = start(me=who(0, start="one") if "start" in other else None)
    if all_there and "start" not in other:
        s.complete()
    elif other == {} and index == 1:  # it waits for another one
        came = ThreadPoolExecutor(1).submit(s.knock, 1)
        while not s.door._members:
            time.sleep(0.01)
        word = "its process 1 is there: host 1 (n1, pid 11)"
    with pytest.raises(TurnedAway) as refused:
        s.knock(index, **other)
    text = str(refused.value)
    assert word in text and "launch.train with run.dir = /runs/a, started at" in text and "host 0 (n0, pid 10)" in text
    assert f"cluster.coordinator = {s.address}" in text
    s.hears(0, f"turned away at port {s.port}: {other.get('command', 'launch.train')} as host {index} (n{index}, pid")
    assert s.left == []
    if other == {} and index == 1 and not all_there:
        with pytest.raises(TimeoutError):
            s.door.wait(0)
        with pytest.raises(NobodyCame):
            came.result()


@pytest.mark.parametrize(
    "bytes_", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00\x00\x12\x04", b"[1]\n", b'{"x": 1}\n', b"{" * 99999]
)
def test_any_program_is_turned_away(start, bytes_):
    s = start()
    s.complete()
    with socket.create_connection(("localhost", s.port)) as stray:
        stray.settimeout(5)
        stray.sendall(bytes_)
        try:
            assert stray.recv(10) == b""
        except ConnectionResetError:
            pass
    s.hears(0, "which is no process of ejdist; this run goes on")
    with socket.create_connection(("localhost", s.port)) as silent:
        silent.settimeout(5)
        assert silent.recv(10) == b""
    s.hears(0, "which never said who it is")
    time.sleep(0.2)
    assert s.left == [] and all(p.gone() is None for p in s.presence)


def test_those_that_never_came_are_named_by_all(start):
    s = start(5)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(s.knock, i, 30.0) for i in (1, 3)]
        while len(s.door._members) < 2:
            time.sleep(0.01)
        with pytest.raises(TimeoutError) as missing:
            s.door.wait(0.2)
        wanted = "processes 2, 4 of 5 never came, while host 0 (n0, pid 10), host 1 (n1, pid 11), host 3 (n3, pid 13) are there"
        assert str(missing.value).startswith(wanted)
        for one in waiting:
            with pytest.raises(NobodyCame, match="processes 2, 4 of 5 never came"):
                one.result(5)


def test_a_process_that_waits_longer_than_the_others_knows_who_is_missing(start):
    s = start()
    with pytest.raises(NobodyCame, match="process 2 of 3 never came"):
        s.knock(1, seconds=0.6)


def test_a_process_that_is_started_again_while_others_wait_takes_its_place(start):
    s = start()
    lines = line_module.Lines(socket.create_connection(("localhost", s.port)))
    lines.send({"hello": who(1).__dict__})
    while not s.door._members:
        time.sleep(0.01)
    lines.close()
    s.hears(0, "host 1 (n1, pid 11) ended before all were there")
    assert s.complete()[1] == who(1)


def test_a_process_that_a_cluster_makes_again_alone_is_a_lost_host(start):
    """And no wrong command, after which nothing would be started again."""
    s = start(me=who(0, start="job.1"))
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(s.knock, i, start="job.1") for i in (1, 2)]
        s.door.wait(5)
        s.door.admit(7777)
        assert [one.result().port for one in others] == [7777, 7777]
    with pytest.raises(NobodyCame, match="all its processes are there: host 1"):
        s.knock(1, start="job.1")
    with pytest.raises(TurnedAway, match="this is another start"):
        s.knock(1, start="job.2")
    assert s.left == []


def test_who_ends_without_a_word_is_named_to_all(start):
    s = start()
    s.complete()
    s.lines[1].close()
    for i in (0, 2):
        gone = s.presence[i].gone(5)
        assert gone.text.startswith("host 1 (n1, pid 11) is gone") and gone.code is None
    assert s.left == []


@pytest.mark.parametrize(("code", "reason"), [(2, "the disk is full"), (0, ""), (75, "")])
def test_who_ends_with_a_word_is_not_gone(start, code, reason):
    s = start()
    s.complete()
    s.lines[1].bye(code, reason)
    s.lines[1].close()
    gone = s.presence[2].gone(5 if reason else 0.3)
    assert (gone is None) is not bool(reason)
    if reason:
        assert gone.code == 2 and "host 1 (n1, pid 11) failed, which ends all hosts: the disk is full" in gone.text


@pytest.mark.parametrize(
    ("bye", "code", "word"),
    [
        (None, None, "is gone: its process has ended"),
        ((3, "no room"), 3, "failed, which ends all hosts: no room"),
        ((0, ""), 0, ""),
    ],
)
def test_nobody_goes_on_without_process_0(start, bye, code, word):
    s = start()
    s.complete()
    if bye:
        s.door.bye(*bye)
    s.door.close()
    end = time.monotonic() + (5 if word else 0.3)
    while len(s.left) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(s.left) == (2 if word else 0)
    assert all(word in gone.text and gone.code == code and gone.text.startswith("host 0") for gone in s.left)


def test_who_is_silent_is_named_before_anything_ends(start, monkeypatch):
    """As a process that is stopped, or whose network is down: its connection stays."""
    s = start()
    s.complete()
    send = s.lines[1]._lines.send
    monkeypatch.setattr(s.lines[1]._lines, "send", lambda message: None)
    for i in (0, 2):
        s.hears(i, "host 1 (n1, pid 11) has shown no sign of life for")
    assert s.presence[0].gone() is None and s.left == []
    monkeypatch.setattr(s.lines[1]._lines, "send", send)
    for i in (0, 2):
        s.hears(i, "host 1 (n1, pid 11) is heard of again")


def test_process_0_is_named_when_it_is_silent(start, monkeypatch):
    s = start(2)
    s.complete()
    monkeypatch.setattr(s.door, "_sign", lambda: None)
    s.hears(1, "host 0 has shown no sign of life for")


def test_a_start_waits_for_one_that_is_ending(start):
    s = start(2)
    s.complete()
    assert occupant(s.port, who(0, 2)) == (s.door._refusal(who(0, 2)), False)
    s.door.bye(69, "host 1 is gone")
    text, ending = occupant(s.port, who(0, 2))
    assert ending and "and is ending" in text
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(knock, s.address, who(1, 2), 5.0)
        time.sleep(0.3)
        s.close()
        with_next = listening("", s.port)
        after = Door(who(0, 2), with_next, Presence(), print)
        after.wait(5)
        after.admit(8888)
        assert later.result().port == 8888
        after.close()


def test_a_process_may_have_many_open_files(start):
    """`select` takes no file past the 1,024th."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this session may not open 1,200 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200) if soft != resource.RLIM_INFINITY else soft, hard))
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try:
        s = start(2)
        s.complete()
        s.door.bye(3, "no room")
        s.door.close()
        while not s.left:
            time.sleep(0.01)
        assert s.left[0].code == 3
    finally:
        for file in others:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_listens_may_be_no_door():
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        assert occupant(port, who(0)) == ("", False)
        with pytest.raises(NobodyCame, match="does not answer as process 0 of a run does"):
            knock(f"localhost:{port}", who(1), 1.0)

    def speaks():
        connection, _ = other.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        connection.close()

    with socket.create_server(("localhost", 0)) as other:
        threading.Thread(target=speaks, daemon=True).start()
        with pytest.raises(TurnedAway, match="another program listens there, not process 0 of a run"):
            knock(f"localhost:{other.getsockname()[1]}", who(1), 5.0)


def test_a_host_has_the_names_of_its_scheduler(monkeypatch):
    from ejdist.cluster.presence import whoami

    assert str(replace(who(3), node="n3", pod="ejdist-0-3")) == "host 3 (n3, pod ejdist-0-3, pid 13)"
    for name, value in {"SLURMD_NODENAME": "rack1", "POD_NAME": "p", "EJDIST_START": "7.0"}.items():
        monkeypatch.setenv(name, value)
    me = whoami(1, 2, "launch.train", "/runs/a")
    assert (me.node, me.pod, me.start) == ("rack1", "p", "7.0") and me.hostname == socket.gethostname()
