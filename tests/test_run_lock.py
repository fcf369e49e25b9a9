"""One owner of a folder: processes that are threads, and others of this machine; no file locks, which NFS lacks."""

import fcntl
import json
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest

from ejdist.cluster import HostLost
from ejdist.training import run_lock
from ejdist.training.run_lock import OWNER, Lock


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    def no_lock(*_):
        raise OSError(37, "No locks available")  # as NFS for a folder

    monkeypatch.setattr(fcntl, "flock", no_lock)
    for name, seconds in {"_RENEW": 0.05, "_STALE": 0.4, "_PATIENCE": 0.15, "_EVERY": 0.02}.items():
        monkeypatch.setattr(run_lock, name, seconds)
    # Threads are processes here: none ends the run of another.
    monkeypatch.setattr(run_lock, "_HELD", type("", (dict,), {"__setitem__": lambda *_: None})())


def lock(folder, limit=900.0):
    return Lock("run.dir", folder, True, limit)


def elsewhere(**other):
    """Returns an owner on another machine, of which nothing is known."""
    return replace(run_lock._me(), machine="another", hostname="n7", pid=77, **other)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_one_of_many_at_once_owns_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_born", lambda pid: "1")
    for n in range(6):
        folder = tmp_path / str(n)
        folder.mkdir()
        locks = [lock(folder) for _ in range(4)]
        together = threading.Barrier(4)

        def take(one, together=together):
            together.wait()
            try:
                return one.take(print)
            except ValueError as error:
                return str(error)

        with ThreadPoolExecutor(4) as pool:
            found = [*pool.map(take, locks)]
        assert found.count(True) == 1 and names(folder) == [OWNER], found
        assert all(
            f is True or f"run.dir = '{folder}': another process trains in it (pid {os.getpid()} on" in f for f in found
        )
        for one in locks:
            one.release()
        assert names(folder) == []


def test_who_holds_it_keeps_it_while_it_lives(tmp_path):
    """For longer than it takes an owner to be stale."""
    holder = lock(tmp_path)
    assert holder.take(print) and not holder.take(print)
    renewed = (tmp_path / OWNER).stat().st_mtime_ns
    time.sleep(0.6)
    assert (tmp_path / OWNER).stat().st_mtime_ns > renewed
    with pytest.raises(
        ValueError, match=r"another process trains in it .* last seen 0 s ago\); stop it or let it finish"
    ):
        lock(tmp_path).take(print)
    holder.check()
    holder.release()
    assert lock(tmp_path).take(print)


@pytest.mark.parametrize("how", ["killed", "its pid is another's", "stale", "half written"])
def test_what_a_process_left_is_taken_over(tmp_path, how):
    owner = elsewhere() if how in ("stale", "half written") else run_lock._me()
    if how == "killed":
        with subprocess.Popen(["true"]) as ended:
            owner = replace(owner, pid=ended.pid, born="5")
    elif how == "its pid is another's":
        owner = replace(owner, pid=1, born="not when it began")
    (tmp_path / OWNER).write_text("{" if how == "half written" else json.dumps(asdict(owner)))
    said, began = [], time.monotonic()
    one = lock(tmp_path)
    assert one.take(said.append) and names(tmp_path) == [OWNER]
    waits = how in ("stale", "half written")
    assert (time.monotonic() - began > 0.3) is waits and any("which is gone" in line for line in said)
    one.check()
    if waits:  # what has long been stale is not waited for
        one.release()
        (tmp_path / OWNER).write_text(json.dumps(asdict(owner)))
        os.utime(tmp_path / OWNER, (time.time() - 100,) * 2)
        began = time.monotonic()
        assert lock(tmp_path).take(print) and time.monotonic() - began < 0.2


@pytest.mark.slow
def test_one_of_many_takes_over(tmp_path):
    for n in range(6):
        folder = tmp_path / str(n)
        folder.mkdir()
        (folder / OWNER).write_text(json.dumps(asdict(elsewhere())))
        os.utime(folder / OWNER, (time.time() - 100,) * 2)
        together = threading.Barrier(4)

        def take(one, together=together):
            together.wait()
            try:
                return one.take(lambda line: None)
            except ValueError:
                return False

        locks = [lock(folder) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            assert [*pool.map(take, locks)].count(True) == 1
        for one in locks:
            one.check()  # those that do not own it have nothing to lose
            one.release()


def test_an_owner_elsewhere_that_may_live_is_left_alone_and_the_run_may_be_started_again(tmp_path, monkeypatch):
    """With the launcher's table: 69, and not 2, as a later start takes the folder over."""
    monkeypatch.setattr(run_lock, "_STALE", 60.0)
    (tmp_path / OWNER).write_text(json.dumps(asdict(elsewhere())))
    with pytest.raises(
        HostLost, match=r"pid 77 on n7, last seen 0 s ago\); if it was killed, this command takes the folder over"
    ):
        lock(tmp_path, limit=0.4).take(print)
    assert names(tmp_path) == [OWNER]


def test_an_owner_that_was_taken_for_gone_writes_no_more(tmp_path, monkeypatch):
    """As a process that was stopped for minutes, and comes back."""
    first = lock(tmp_path)
    assert first.take(print)
    first._ended.set()  # it renews nothing
    time.sleep(0.5)
    with pytest.raises(ValueError, match="another process trains in it"):
        lock(tmp_path).take(print)  # but is known to live
    monkeypatch.setattr(run_lock.Owner, "lives", lambda self: None)
    second = lock(tmp_path)
    assert second.take(print)
    first.renew()
    with pytest.raises(ValueError, match=r"belongs to this run no more: pid .* has taken it over"):
        first.check()
    first.release()
    second.check()
    assert names(tmp_path) == [OWNER]


def test_a_file_that_somebody_removes_is_made_again(tmp_path):
    one = lock(tmp_path)
    assert one.take(print)
    (tmp_path / OWNER).unlink()
    one.check()
    assert names(tmp_path) == [OWNER]
    (tmp_path / OWNER).unlink()
    end = time.monotonic() + 5
    while names(tmp_path) != [OWNER]:
        assert time.monotonic() < end
        time.sleep(0.01)
    one.check()
    one.release()
    assert names(tmp_path) == []


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def link(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", link)
    one = lock(tmp_path)
    assert one.take(print) and json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()
    with pytest.raises(ValueError, match="another process trains in it"):
        lock(tmp_path).take(print)
    one.check()
    assert names(tmp_path) == [OWNER]


def test_a_full_disk_does_not_take_a_folder_away(tmp_path, monkeypatch):
    one = lock(tmp_path)
    assert one.take(print)
    monkeypatch.setattr(run_lock.Path, "write_text", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    before = (tmp_path / OWNER).stat().st_mtime_ns
    time.sleep(0.3)
    one.check()
    assert (tmp_path / OWNER).stat().st_mtime_ns > before
    with pytest.raises(OSError, match="No space left"):
        lock(tmp_path).take(print)


def test_others_than_host_0_own_nothing(tmp_path):
    one = Lock("run.dir", tmp_path, False, 900)
    assert not one.take(print) and names(tmp_path) == []
    assert not lock(tmp_path / "missing").take(print) and names(tmp_path) == []
    assert lock(tmp_path / "made" / "by it").take(print, make=True) and names(tmp_path / "made" / "by it") == [OWNER]
