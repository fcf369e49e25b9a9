"""One owner of a bucket's folder: processes that are threads, and a server that plays the store."""

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
from google.cloud import storage

from ejdist.buckets import BucketPath, is_unreachable
from ejdist.cluster import HostLost
from ejdist.training import bucket_lock, run_lock
from ejdist.training.bucket_lock import BucketLock
from ejdist.training.run_lock import OWNER

NAME = f"runs/one/{OWNER}"


@pytest.fixture
def bucket(server, monkeypatch):
    for name, seconds in {"_RENEW": 0.1, "_STALE": 1.0, "_PATIENCE": 0.2, "_EVERY": 0.05}.items():
        monkeypatch.setattr(run_lock, name, seconds)
    # Threads are processes here: none ends the run of another.
    monkeypatch.setattr(run_lock, "_HELD", type("", (dict,), {"__setitem__": lambda *_: None})())
    server.bucket.objects.clear()
    server.forbidden = ()
    return server.bucket


def lock(limit=900.0, url="gs://a-bucket/runs/one"):
    return BucketLock("checkpoint.dir", BucketPath(url), True, limit)


def left_behind(bucket, seconds, text=None):
    """Writes an owner of another machine, as it was so long ago."""
    owner = replace(run_lock._me(), machine="another", hostname="n7", pid=77)
    generation = bucket.put(NAME, (text or json.dumps(asdict(owner))).encode(), None)
    bucket.updated[generation] -= timedelta(seconds=seconds)
    return owner


def test_one_of_many_at_once_owns_it_and_keeps_it_while_it_lives(bucket):
    locks, together = [lock() for _ in range(4)], threading.Barrier(4)

    def take(one):
        together.wait()
        try:
            return one.take(print)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(take, locks)]
    assert found.count(True) == 1 and sorted(bucket.objects) == [NAME], found
    words = f"checkpoint.dir = 'gs://a-bucket/runs/one': another process trains in it (pid {os.getpid()} on"
    assert all(one is True or words in one for one in found)
    (owner,) = [one for one, held in zip(locks, found, strict=True) if held is True]
    first = bucket.objects[NAME][1]
    time.sleep(0.4)
    owner.check()
    assert bucket.objects[NAME][1] > first, "it is renewed"
    assert not owner.take(print)
    owner.release()
    assert bucket.objects == {} and owner.take(print)
    owner.release()


@pytest.mark.parametrize("text", [None, "{"])
def test_what_was_left_long_ago_is_taken_over_by_one(bucket, text):
    left_behind(bucket, 100, text)
    locks, together, said = [lock() for _ in range(3)], threading.Barrier(3), []

    def take(one):
        together.wait()
        try:
            return one.take(said.append)
        except ValueError:
            return False

    began = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(take, locks)]
    assert found.count(True) == 1 and sorted(bucket.objects) == [NAME]
    for one in locks:
        one.release()
    assert sum("which is gone" in line for line in said) == 1 and time.monotonic() - began < 5


def test_an_owner_that_is_renewed_while_it_is_read_is_read_again(bucket, server, monkeypatch):
    owner, read = left_behind(bucket, 0), storage.Blob.reload

    def renewed(self, **how):
        read(self, **how)
        if not renewed.done:
            renewed.done = True
            bucket.put(NAME, json.dumps(asdict(owner)).encode(), None)

    renewed.done = False
    monkeypatch.setattr(storage.Blob, "reload", renewed)
    assert lock()._look()[0] == owner and renewed.done


@pytest.mark.slow
def test_what_was_renewed_a_moment_ago_is_waited_for(bucket):
    left_behind(bucket, 0)
    with pytest.raises(HostLost, match=r"pid 77 on n7, last seen \d s ago\); if it was killed"):
        lock(limit=0.8).take(print)
    assert sorted(bucket.objects) == [NAME]
    one = lock()
    assert one.take(print), "it is stale by now"
    one.release()
    assert bucket.objects == {}


def test_an_owner_that_was_away_writes_no_more(bucket):
    one = lock()
    assert one.take(print)
    one._ended.set()  # as if its machine were cut off
    time.sleep(0.2)
    other = left_behind(bucket, 0)
    one.renew()
    assert json.loads(bucket.objects[NAME][0])["id"] == other.id, "what another owns is not renewed"
    with pytest.raises(ValueError, match=r"belongs to this run no more: pid 77 on n7 has taken it over"):
        one.check()
    one.release()
    assert json.loads(bucket.objects[NAME][0])["id"] == other.id


def test_a_bucket_that_cannot_be_written_or_is_not_there_has_no_owner(bucket, server, monkeypatch):
    server.forbidden = ("POST",)
    assert not lock().take(print)
    server.forbidden = ()
    one = lock(url="gs://no-bucket/runs/one")
    assert not one.take(print)
    with pytest.raises(OSError, match="no such bucket") as caught:
        one.take(print, make=True)
    assert not is_unreachable(caught.value)
    monkeypatch.setattr(bucket_lock, "_PATIENT", 0.0)
    monkeypatch.setattr(one, "_client", storage.Client(client_options={"api_endpoint": "http://127.0.0.1:9"}))
    with pytest.raises(OSError) as caught:
        one.take(print)
    assert is_unreachable(caught.value)
    one.check()
