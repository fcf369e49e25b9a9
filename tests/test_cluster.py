"""The `cluster` section: what JAX is told of it."""

import os
import socket
import subprocess
import sys

import jax
import pytest
from small_run import TINY, losses

from launch import train
from launch.cluster import join
from launch.errors import DONE
from recipes.schema import compose


@pytest.fixture
def joined(monkeypatch):
    """Returns a function that joins with these arguments, and gives what JAX was given."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *facts, **more: calls.append((facts, more)))

    def act(*arguments):
        join(compose(arguments).cluster)
        return calls.pop() if calls else None

    return act


MANUAL = ["cluster=manual", "cluster.coordinator=a:1", "cluster.num_processes=3", "cluster.process_id=2"]


def test_manual_asks_nobody(joined):
    """Else JAX would look for a cluster, to ask which of the GPUs are its own."""
    facts, more = joined(*MANUAL)
    assert facts == ("a:1", 3, 2, None) and more["cluster_detection_method"] == "deactivate"
    facts, _ = joined(*MANUAL, "cluster.local_device_ids=[2,3]")
    assert facts[3] == [2, 3]


def test_what_is_given_goes_before_what_is_detected(joined):
    facts, more = joined("cluster=auto", "cluster.coordinator=b:5")
    assert facts == ("b:5", None, None, None) and "cluster_detection_method" not in more
    assert joined("cluster=auto")[0] == (None,) * 4


def test_a_run_of_one_process_joins_nobody(joined):
    assert joined("cluster=local") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cluster.process_id=1"], "cluster.process_id = 1 is for several processes: add cluster=manual"),
        (["cluster.local_device_ids=[0]"], "cluster.local_device_ids = [0] is for several processes"),
        (MANUAL[:3], "cluster=manual needs cluster.coordinator, cluster.num_processes and cluster.process_id"),
        ([*MANUAL[:-1], "cluster.process_id=7"], "cluster.process_id = 7 must be from 0 to cluster.num_processes - 1"),
        ([*MANUAL[:-1], "cluster.process_id=-1"], "cluster.process_id = -1 must be from 0"),
        (["cluster=auto", "cluster.coordinator=b"], "must be HOST:PORT"),
        (["cluster.kind=slurm"], "cluster.kind = 'slurm' is unknown"),
        (["cluster.timeout=0"], "cluster.timeout = 0 must be positive"),
    ],
)
def test_called_wrongly(joined, arguments, message):
    with pytest.raises(ValueError) as error:
        joined(*arguments)
    assert message in str(error.value)


def test_a_port_that_is_taken_is_named_before_jax_takes_it(joined):
    with socket.create_server(("localhost", 0), reuse_port=True) as other:  # as the coordinator of another run has it
        address = f"localhost:{other.getsockname()[1]}"
        given = ["cluster=manual", f"cluster.coordinator={address}", "cluster.num_processes=2"]
        with pytest.raises(
            ValueError, match=f"cluster.coordinator = '{address}': process 0 cannot listen on port .* in use"
        ):
            joined(*given, "cluster.process_id=0")
        assert joined(*given, "cluster.process_id=1"), "which does not listen"
    assert joined(*given, "cluster.process_id=0")


@pytest.mark.parametrize(
    ("arguments", "platforms", "kept"), [(MANUAL, "cpu", False), ([], "cpu", True), (MANUAL, "cuda,cpu", True)]
)
def test_processes_of_cpu_devices_read_no_program_from_a_cache(monkeypatch, arguments, platforms, kept):
    """Of one that is read, collectives have lost their order: a run hung as often as its programs were in the cache."""
    monkeypatch.setattr(train, "join", lambda cluster: None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # as this process was started
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", platforms)
        train.start_jax(compose(arguments))
        assert jax.config.jax_enable_compilation_cache is kept
    finally:
        jax.config.update("jax_platforms", before)
        jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.parametrize(
    ("arguments", "asked", "least"),
    [
        (["mesh.sp=1"], None, None),
        (["mesh.sp=4"], "5", None),
        ([], None, 16),
        (["mesh.sp=32"], None, 128),
    ],
)
def test_whoever_waits_in_a_collective_leaves_threads_for_the_others(monkeypatch, arguments, asked, least):
    monkeypatch.setattr(train, "join", lambda cluster: None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # as this process was started
    monkeypatch.setenv("PJRT_NPROC", asked or "")
    if asked is None:
        monkeypatch.delenv("PJRT_NPROC")
    train.start_jax(compose(arguments))
    threads = os.environ.pop("PJRT_NPROC", None)
    assert threads == asked if least is None else int(threads) >= least


@pytest.mark.slow
def test_a_run_of_programs_from_a_cache_comes_to_its_end(corpus, tmp_path):
    """XLA begins the collectives of such a program in any order: on as many threads as cores they waited for each other."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}
    environment |= {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    for name in ("first", "second"):
        line = [sys.executable, "-m", "launch.train", *TINY, *corpus, "mesh.sp=4", f"run.dir={tmp_path / name}"]
        ran = subprocess.run(line, env=environment, capture_output=True, text=True, check=False, timeout=180)
        assert ran.returncode == DONE, ran.stderr[-2000:]
    assert losses(tmp_path / "first") == losses(tmp_path / "second")
