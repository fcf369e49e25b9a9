"""What is said before processes end, and by whom once one is aborted: real processes and sockets, without JAX."""

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from door_start import soon, starts

from ejdist.cluster import door as door_module
from ejdist.cluster import ending, verdict
from ejdist.cluster import hosts as hosts_module
from ejdist.cluster import line as line_module
from ejdist.cluster.presence import presence
from ejdist.cluster.witness import Witness
from launch.processes import Job


@pytest.fixture
def start(monkeypatch):
    soon(monkeypatch)
    with starts() as make:
        yield make


# Process 0 with connections to the test at a port, which ends in a way of its own once that of host 3 is closed.
PROCESS_0 = """
import os, signal, socket, sys
sys.path.insert(0, sys.argv[1])
from witness import Witness
others = [socket.create_connection(("localhost", int(sys.argv[2]))) for _ in range(3)]
witness = Witness("host 0 (n0)", {other.fileno(): f"host {i} (n{i})" for i, other in enumerate(others, 1)})
assert others[2].recv(1) == b""
if sys.argv[3] == "word":
    witness.dismiss()
elif sys.argv[3] == "abort":
    os.abort()
else:
    os.kill(os.getpid(), int(sys.argv[3]))
"""
NAMED = (
    "host 0 (n0) has ended without a word. Before it these had, the first one first: host 3 (n3); check their logs\n"
)


@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [("abort", -signal.SIGABRT, NAMED), (str(int(signal.SIGKILL)), -signal.SIGKILL, NAMED), ("word", 0, "")],
)
def test_who_had_ended_before_process_0_is_named_though_it_is_aborted(ends, code, says):
    """By another process, as nobody else knows: the others hear of process 0 alone, and JAX aborts them."""
    with socket.create_server(("localhost", 0)) as server:
        port, folder = server.getsockname()[1], Path(door_module.__file__).parent
        line = [sys.executable, "-I", "-B", "-c", PROCESS_0, str(folder), str(port), ends]
        process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
        held = [server.accept()[0] for _ in range(3)]
        held[2].close()
        assert process.communicate(timeout=30)[1] == says and process.returncode == code
        for other in held[:2]:  # they hear that process 0 has ended, though the witness had their connections too
            with other:
                other.settimeout(5)
                assert other.recv(1) == b""


def test_a_machine_without_room_for_a_witness_has_none(monkeypatch):
    def no_room(*arguments, **options):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", no_room)
    witness = Witness("host 0 (n0)", {})
    witness.dismiss()
    witness.close()


@pytest.mark.parametrize("reason", ["", "no room"])
def test_the_witness_knows_all_and_says_nothing_of_an_end_with_a_word(start, monkeypatch, reason):
    made = []

    class Known:
        def __init__(self, me, others):
            self.me, self.others, self.dismissed = me, others, 0
            made.append(self)

        def dismiss(self):
            self.dismissed += 1

        close = dismiss

    monkeypatch.setattr(door_module, "Witness", Known)
    s = start()
    s.complete()
    (witness,) = made
    members = {guest.lines.socket.fileno(): str(guest.who) for guest in s.door._members.values()}
    assert witness.me == "host 0 (n0, pid 10)" and witness.others == members and len(members) == 2
    assert witness.dismissed == 0
    s.door.bye(3 if reason else 0, reason)
    assert witness.dismissed == 1


@pytest.mark.parametrize("failing", [0, 1])
def test_who_fails_ends_only_once_all_others_say_why(start, monkeypatch, failing):
    """Its connections of Gloo end with it, and may abort a host that has not said anything yet."""
    for module in (door_module, line_module):
        monkeypatch.setattr(module, "HEARD", 60.0)
    s = start()
    s.complete()
    send, held = s.lines[2]._lines.send, []
    monkeypatch.setattr(s.lines[2]._lines, "send", lambda m: held.append(m) if m and "heard" in m else send(m))
    side = s.door if failing == 0 else s.lines[1]
    bye = threading.Thread(target=side.bye, args=(3, "no room"), daemon=True)
    bye.start()
    for i in {0, 1, 2} - {failing}:
        s.hears(i, f"host {failing}" if failing else "host 0 failed")
        s.hears(i, "failed, which ends all hosts: no room")
    bye.join(0.3)
    assert bye.is_alive(), "host 2 has not confirmed"
    send(held[0])
    bye.join(5)
    assert not bye.is_alive()


def test_who_fails_waits_for_nobody_that_is_gone_or_silent(start, monkeypatch):
    monkeypatch.setattr(line_module, "HEARD", 0.2)
    s = start()
    s.complete()
    monkeypatch.setattr(s.lines[2]._lines, "send", lambda message: None)
    s.lines[1].bye(3, "no room")  # as long as it may take
    monkeypatch.setattr(door_module, "HEARD", 60.0)
    s.lines[2].close()
    s.door.bye(3, "no room")


def test_a_log_names_the_first_host_alone(start):
    """What others fail by later is a consequence."""
    s = start(4)
    s.complete()
    s.lines[3].close()
    for i in (0, 1, 2):
        s.hears(i, "host 3 (n3, pid 13) is gone: its process has ended without a word")
    s.lines[1].bye(69, "Gloo: connection closed by peer")
    s.door.bye(69, "Gloo: connection closed by peer")
    assert [(i, text) for i, text in s.said if "Gloo" in text] == []


def test_a_process_that_ends_without_process_0_names_who_was_gone_before(start):
    s = start()
    s.complete()
    s.lines[2].close()
    s.hears(1, "host 2 (n2, pid 12) is gone")
    s.door.close()
    assert s.presence[1].gone(5).text.startswith("host 2 (n2, pid 12)")
    while not s.left:
        time.sleep(0.01)
    assert s.left[0].text.startswith("host 2 (n2, pid 12) is gone")


def test_a_bye_from_a_line_that_has_ended_waits_for_nothing(start, monkeypatch):
    """As process 0 is gone: the thread that says so is the one that would hear the answer."""
    monkeypatch.setattr(line_module, "HEARD", 60.0)
    s = start(2)
    s.complete()
    ended = threading.Event()
    monkeypatch.setattr(s, "left", type("Left", (), {"append": lambda self, gone: bye(gone)})())

    def bye(gone):
        s.lines[1].bye(69, gone.text)
        ended.set()

    s.door.close()
    assert ended.wait(5)


def test_an_error_is_printed_and_in_the_file_before_others_are_told(monkeypatch, tmp_path):
    """Each of these may take as long as what has failed lets it."""
    order, file = [], tmp_path / "verdict"
    monkeypatch.setattr(hosts_module, "_tell", lambda error: order.append("printed"))
    monkeypatch.setattr(hosts_module, "notify_failure", lambda *told, **more: order.append("told"))
    for error in (ValueError("a"), hosts_module.HostLost("b", known=False)):
        with pytest.raises(type(error)), hosts_module.Hosts(1).together():
            raise error
    assert order == ["printed", "told"] * 2
    monkeypatch.setattr(verdict, "_given", None)
    monkeypatch.setenv(verdict.FILE, str(file))
    side = type("Side", (), {"bye": lambda self, code, reason: order.append(verdict.read(file).code)})()
    monkeypatch.setattr(presence(), "side", side)
    verdict.give(3, "no room")
    assert order[-1] == 3


@pytest.mark.parametrize(("stated", "code"), [(1, 1), (0, 69), (None, 69)])
def test_a_process_that_others_leave_behind_ends_with_its_own_code(monkeypatch, stated, code):
    """Process 0 may end first of what this one has told it: a launcher that sees 69 would start a bug again."""
    ends = []
    monkeypatch.setattr(verdict, "_given", None if stated is None else verdict.Verdict(stated, "a bug"))
    monkeypatch.setattr(ending.os, "_exit", ends.append)
    ending.leave("error: host 0 is gone", 69)
    assert ends == [code]


@pytest.mark.slow
def test_a_launcher_reads_the_last_word_of_a_witness(tmp_path):
    job = Job(1, tmp_path / "logs", command=("sh", "-c", "(sleep 0.5; echo the last word) & kill -9 $$"))
    assert job.start([]).wait(20) == [-signal.SIGKILL]
    assert job.log(0).read_text() == "the last word\n"
