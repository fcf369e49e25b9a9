"""Why a run ends, and what its launcher makes of that."""

import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from ejdist.cluster import HostLost, ending, verdict
from ejdist.cluster import hosts as hosts_module
from ejdist.cluster.lost import failed_device, lost, patience
from ejdist.cluster.presence import Who, presence, write_hosts
from ejdist.cluster.verdict import NO_USE, Verdict, again, give, of_start, read, write
from ejdist.training.stop import Diverged
from launch import errors, local, tpu_vm
from launch.errors import BUG, DONE, HOST_LOST, PREEMPTED


def test_the_table_is_of_the_codes_that_commands_end_with():
    no_use = {BUG, errors.WRONG, errors.BAD_CHECKPOINT, errors.DIVERGED, errors.REPLICAS, errors.INTERRUPTED}
    assert no_use | {126, 127} == NO_USE and not again(DONE)
    assert all(again(code) for code in (PREEMPTED, HOST_LOST, errors.ABORTED, 135, 137, 139, 143, 253, 255))


@pytest.mark.parametrize(
    ("codes", "left", "code"),
    [
        ([0, 0], None, 0),
        ([-9, -6], None, 137),
        ([134, 2], None, 2),
        ([69, 75, 0], None, 69),
        ([None, -15], None, 137),
        ([-6, -6], Verdict(2, "the disk is full"), 2),
        ([-9, 134], Verdict(69, "host 1 is gone"), 69),
        ([0, 0], Verdict(2, "of no process that failed"), 0),
    ],
)
def test_the_code_of_a_start(codes, left, code):
    assert of_start(codes, left) == code


def test_a_reason_stays_and_one_of_no_use_takes_the_place_of_others(tmp_path):
    file = tmp_path / "verdict"
    assert read(file) is None
    for code, stays in ((69, 69), (75, 69), (2, 2), (3, 2), (69, 2)):
        write(file, Verdict(code, f"a reason: {code}"))
        assert read(file) == (stays, f"a reason: {stays}")
    assert [p.name for p in tmp_path.iterdir()] == ["verdict"]
    file.write_text("")  # as Kubernetes makes it
    assert read(file) is None
    (tmp_path / "odd").write_text("not a code\n")
    assert read(tmp_path / "odd") is None


def test_of_many_that_end_at_once_one_of_no_use_is_left(tmp_path):
    for n in range(20):
        file = tmp_path / str(n)
        with ThreadPoolExecutor(8) as pool:
            [
                *pool.map(
                    lambda code, file=file: write(file, Verdict(code, f"host {code}")),
                    (69, 137, 75, 2, 69, 134, 69, 69),
                )
            ]
        assert read(file) == (2, "host 2")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has said nothing yet, and the file of its launcher."""
    monkeypatch.setattr(verdict, "_given", None)
    monkeypatch.setattr(errors, "_told", None)
    monkeypatch.setenv(verdict.FILE, str(tmp_path / "verdict"))
    return tmp_path / "verdict"


def test_a_process_states_its_end_once_to_all(fresh, monkeypatch):
    said = []
    side = type("Side", (), {"bye": lambda self, code, reason: said.append((code, reason))})()
    monkeypatch.setattr(presence(), "side", side)
    give(3, "error: no\n room")
    give(69, "another host is gone")
    assert said == [(3, "no room")] and read(fresh).code == 3 and read(fresh).reason.endswith(": no room")
    assert verdict.given() == (3, "no room")


def test_an_end_that_is_no_failure_leaves_nothing(fresh):
    give(0, "")
    assert not fresh.exists()


def test_an_error_is_printed_once_and_before_anything_is_waited_for(fresh, monkeypatch, capsys):
    """By `together`, as soon as it leaves the body; the command, which sees it last, repeats nothing."""
    monkeypatch.setattr(hosts_module, "_code_of", errors.exit_code_of)
    monkeypatch.setattr(hosts_module, "_tell", errors.state)
    hosts = hosts_module.Hosts(1)
    for error, code, word in (
        (OSError(28, "No space left", "/d/f"), 2, "error: /d/f: No space left\n"),
        (KeyError("a"), 1, None),
    ):
        monkeypatch.setattr(verdict, "_given", None)
        fresh.unlink(missing_ok=True)
        with pytest.raises(type(error)), hosts.together():
            raise error
        printed = capsys.readouterr().err
        assert printed == word if word else "Traceback" in printed and printed.endswith("KeyError: 'a'\n")
        assert (
            read(fresh).code == code
            and (word or "a bug, whose traceback is in the log: KeyError") in f"error: {read(fresh).reason}\n"
        ) or word
        if code == 1:
            with pytest.raises(KeyError):
                errors.tell(error)
        else:
            assert errors.tell(error) == code
        assert errors.state(error) == code and capsys.readouterr().err == ""


def runtime_error(text):
    return jax.errors.JaxRuntimeError(text)


@pytest.mark.parametrize(
    ("text", "stepped", "device"),
    [
        ("INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered", True, True),
        ("UNAVAILABLE: TPU initialization failed: slice health check failed", True, True),
        ("INTERNAL: Mosaic failed to compile TPU kernel", False, False),  # the compiler
        ("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes", True, False),
        ("INVALID_ARGUMENT: bad shape", True, False),
        ("INTERNAL: CpuCallback error calling callback: Traceback ...: KeyError", True, False),
    ],
)
def test_a_device_that_fails_is_no_bug(text, stepped, device, monkeypatch, fresh, capsys):
    monkeypatch.setattr(ending, "_stepped", type("Stepped", (), {"is_set": lambda self: stepped})())
    found = failed_device(runtime_error(text))
    assert isinstance(found, HostLost) is device
    if device:
        assert errors.tell(runtime_error(text)) == HOST_LOST and text in capsys.readouterr().err
    else:
        assert failed_device(ValueError(text)) is None
        assert errors.state(runtime_error(text)) == BUG


def test_a_host_that_is_gone_is_named_in_place_of_the_error_of_a_collective(monkeypatch):
    from ejdist.cluster.presence import Gone, Presence

    there = Presence()
    there.side = "a line"
    monkeypatch.setattr("ejdist.cluster.lost.presence", lambda: there)
    monkeypatch.setattr(hosts_module, "presence", lambda: there)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    there.lose(Gone("host 1 (n1, pid 5) is gone: its process has ended without a word", None))
    found = lost(runtime_error("INTERNAL: Gloo all-reduce failed: Connection closed by peer"))
    assert "host 1 (n1, pid 5) is gone" in str(found) and errors.exit_code_of(found) == HOST_LOST
    assert lost(runtime_error("INTERNAL: something else")) is None


def test_a_save_that_waits_for_others_has_an_end(monkeypatch):
    hosts = hosts_module.Hosts(900)
    assert patience(OSError("disk"), hosts) == 900 and patience(HostLost("gone"), hosts) == 0
    hosts.count = 2
    assert patience(OSError("disk"), hosts) == 5 and patience(Diverged("nan"), hosts) == 900
    calls = []

    def waits():
        calls.append(1)
        __import__("time").sleep(30)

    assert ending.bounded(waits, 0.05) is False and calls == [1]
    assert ending.bounded(waits, 0) is False and calls == [1]
    assert ending.bounded(lambda: 1 / 0, 5) is True


def test_which_machine_a_host_is_is_kept(tmp_path, monkeypatch):
    hosts = [Who(i, 2, "launch.train", "/runs/a", "", f"n{i}", 5 + i, f"rack{i}", f"pod{i}") for i in range(2)]
    monkeypatch.setattr(presence(), "hosts", hosts)
    write_hosts(tmp_path)
    kept = json.loads((tmp_path / "hosts.json").read_text())["hosts"]
    assert kept[1] == {"index": 1, "hostname": "n1", "pid": 6, "node": "rack1", "pod": "pod1"} and len(kept) == 2
    monkeypatch.setattr(presence(), "hosts", [])
    write_hosts(tmp_path)
    (alone,) = json.loads((tmp_path / "hosts.json").read_text())["hosts"]
    assert alone["index"] == 0 and alone["pid"] == os.getpid()


STARTED = """#!/bin/sh
echo "$EJDIST_START" >> "{folder}/starts"
n=$(wc -l < "{folder}/starts")
{then}
"""


@pytest.mark.parametrize(
    ("then", "restarts", "starts", "code"),
    [
        ("[ $n -gt 2 ] && exit 0; kill -9 $$", 5, 3, 0),
        ("kill -9 $$", 1, 2, 137),
        ("exit 2", 5, 1, 2),
        ('[ -n "$EJDIST_VERDICT" ] && echo "3 host 0: no room" > "$EJDIST_VERDICT"; exit 134', 5, 1, 3),
        ("exit 0", 5, 1, 0),
    ],
)
def test_local_and_tpu_vm_follow_the_table(then, restarts, starts, code, tmp_path, monkeypatch, capsys):
    program = tmp_path / "program"
    program.write_text(STARTED.format(folder=tmp_path, then=then))
    program.chmod(stat.S_IRWXU)
    monkeypatch.setattr(sys, "executable", str(program))
    assert local.main(["processes=1", f"restarts={restarts}", "recipe=long_context"]) == code
    ids = (tmp_path / "starts").read_text().split()
    assert len(ids) == len(set(ids)) == starts
    if "VERDICT" in then:
        return  # machines have no file that the launcher reads: each has its own code
    (tmp_path / "starts").unlink()
    monkeypatch.setattr(tpu_vm, "_PAUSE", 0)
    (tmp_path / "ssh").write_text('#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\nshift\nexec sh -c "$*"\n')
    (tmp_path / "ssh").chmod(stat.S_IRWXU)
    given = ["hosts=a", f"ssh={tmp_path / 'ssh'}", f"python={program}", f"restarts={restarts}", "recipe=long_context"]
    assert tpu_vm.main(given) == code
    ids = (tmp_path / "starts").read_text().split()
    assert len(ids) == len(set(ids)) == starts
    assert capsys.readouterr().out.count("is started again") == 2 * (starts - 1)


@pytest.mark.slow
def test_a_command_that_has_a_bug_ends_with_its_traceback_and_the_code_of_one(tmp_path):
    text = (
        "import sys\nfrom launch import train\ndef body():\n    raise KeyError('of ours')\ntrain.command(body=body)\n"
    )
    file = tmp_path / "verdict"
    ran = subprocess.run(
        [sys.executable, "-c", text],
        env=os.environ | {"EJDIST_VERDICT": str(file)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == BUG and "KeyError: 'of ours'" in ran.stderr and ran.stderr.count("Traceback") == 1
    assert read(file).code == BUG and "KeyError: 'of ours'" in read(file).reason
