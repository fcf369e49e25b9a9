"""The train command as several processes, as on several hosts: real `jax.distributed` on the CPU, stopped and resumed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from small_run import TINY, losses

from launch.errors import DONE, PREEMPTED
from launch.export import main as export

ROOT = Path(__file__).resolve().parent.parent
HERE = ["run.steps=300", "mesh.dp=2"]


def start(count, directory, *overrides):
    """Returns the processes of one run, started."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT)}
    cluster = ["cluster=manual", f"cluster.coordinator=localhost:{port}", f"cluster.num_processes={count}"]
    directory.mkdir(exist_ok=True)
    processes = []
    for i in range(count):
        command = [sys.executable, "-m", "launch.train", *TINY, *HERE, *(cluster if count > 1 else []), *overrides]
        command += [f"run.dir={directory}", *([f"cluster.process_id={i}"] if count > 1 else [])]
        log = (directory / f"log.{i}").open("w")
        processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT))
    return processes


def finish(processes, directory, code):
    try:
        for i, process in enumerate(processes):
            assert process.wait(timeout=240) == code, (directory / f"log.{i}").read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()


def has_rows(directory, count, processes):
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and all(p.poll() is None for p in processes):
        path = directory / "metrics.jsonl"
        if path.exists() and path.read_text().count("\n") >= count:
            return
        time.sleep(0.05)
    raise AssertionError((directory / "log.0").read_text()[-3000:])


def test_two_processes_stopped_by_a_signal_to_one_go_on_bit_for_bit(corpus, tmp_path):
    """Every process stops after the same step though only one was told; any number of them may go on."""
    parts, whole, alone = (tmp_path / name for name in ("parts", "whole", "alone"))
    processes = start(2, parts, *corpus)
    has_rows(parts, 2, processes)
    processes[1].send_signal(signal.SIGTERM)
    finish(processes, parts, PREEMPTED)
    stopped_at = len(losses(parts))
    assert [p.name for p in (parts / "checkpoints").iterdir()] == [str(stopped_at)] and 2 <= stopped_at < 300
    end = f"run.stop_after={stopped_at + 3}"
    for directory, count in ((parts, 2), (whole, 2), (alone, 1)):
        finish(start(count, directory, *corpus, end), directory, DONE)
    assert f"going on from step {stopped_at}" in (parts / "log.0").read_text()
    assert len(losses(parts)) == stopped_at + 3 and losses(parts) == losses(whole)
    np.testing.assert_allclose(losses(parts), losses(alone), rtol=1e-4)


@pytest.mark.slow
def test_two_processes_start_from_the_same_files_as_one(corpus, tmp_path):
    """Each reads what its own devices hold; parameters are split over both."""
    finish(start(1, tmp_path / "first", *corpus, "mesh.dp=1", "run.steps=2"), tmp_path / "first", DONE)
    assert export([f"run.dir={tmp_path}/first", f"to={tmp_path}/files"]) == DONE
    for name, count in (("alone", 1), ("both", 2)):
        keys = [f"model.init_from={tmp_path}/files", "mesh.dp=1", "mesh.fsdp=2", "run.steps=2"]
        finish(start(count, tmp_path / name, *corpus, *keys), tmp_path / name, DONE)
        assert f"parameters read from {tmp_path}/files" in (tmp_path / name / "log.0").read_text()
    np.testing.assert_allclose(losses(tmp_path / "both"), losses(tmp_path / "alone"), rtol=1e-5)
    assert losses(tmp_path / "both")[0] < losses(tmp_path / "first")[0]
