"""The `cluster` section: what JAX is told of it."""

import os
import socket
import subprocess
import sys
import threading

import jax
import pytest
from jax._src.clusters import ClusterEnv
from small_run import TINY, losses

from ejdist.cluster import HostLost, line
from ejdist.cluster.door import Door, listening
from ejdist.cluster.presence import Presence, presence, whoami
from launch import cluster, train
from launch.cluster import join
from launch.errors import DONE
from launch.processes import free_port
from recipes.schema import compose


@pytest.fixture
def joined(monkeypatch):
    """Returns a function that joins with these arguments, and gives what JAX was given. All processes are there."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *facts, **more: calls.append((facts, more)))
    monkeypatch.setattr(cluster, "_open_door", lambda section, place, me: 7777)
    monkeypatch.setattr(cluster, "_knock", lambda section, place, me: 8888)
    monkeypatch.setattr(presence(), "me", None)

    def act(*arguments):
        join(compose(arguments).cluster)
        return calls.pop() if calls else None

    return act


MANUAL = ["cluster=manual", "cluster.coordinator=a:1", "cluster.num_processes=3", "cluster.process_id=2"]


def test_manual_asks_nobody(joined, monkeypatch):
    """Else JAX would look for a cluster, to ask which of the GPUs are its own."""
    monkeypatch.setattr(ClusterEnv, "auto_detect_unset_distributed_params", lambda *_: pytest.fail("it is asked"))
    facts, more = joined(*MANUAL)
    assert facts == ("a:8888", 3, 2, None) and more["cluster_detection_method"] == "deactivate"
    facts, _ = joined(*MANUAL, "cluster.local_device_ids=[2,3]")
    assert facts[3] == [2, 3]
    facts, _ = joined(*MANUAL[:-1], "cluster.process_id=0", 'cluster.coordinator="[::1]:1"')
    assert facts == ("[::1]:7777", 3, 0, None), "JAX's own port is not the one that is known"


def test_what_is_given_goes_before_what_is_detected(joined, monkeypatch):
    slurm = {"JOB_ID": 5, "STEP_NODELIST": "n[3-4]", "NTASKS": 2, "PROCID": 1, "LOCALID": 6}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    facts, more = joined("cluster=auto", "cluster.coordinator=b:5")
    assert facts == ("b:8888", 2, 1, [6]) and more["cluster_detection_method"] == "deactivate"
    assert joined("cluster=auto", "cluster.local_device_ids=[0,1]")[0] == ("n3:8888", 2, 1, [0, 1])
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "4,5")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "c:7")
    assert joined("cluster=auto")[0] == ("c:8888", 2, 1, [4, 5])


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
        (["cluster.service_port=8"], "cluster.service_port = 8 is for several processes"),
        ([*MANUAL, "cluster.service_port=0"], "cluster.service_port = 0 must be from 1 to 65535"),
        ([*MANUAL, "cluster.service_port=1"], "cluster.service_port = 1 is the port of cluster.coordinator"),
    ],
)
def test_called_wrongly(joined, arguments, message):
    with pytest.raises(ValueError) as error:
        joined(*arguments)
    assert message in str(error.value)


def opened(address, *more):
    """Returns the port that process 0 of this address opens for JAX, and closes its door again."""
    section = compose(["cluster=manual", f"cluster.coordinator={address}", *more]).cluster
    place = cluster._Place(address, section.num_processes, 0, None)
    try:
        return cluster._open_door(section, place, whoami(0, place.count, "launch.train", "/runs/a"))
    finally:
        if presence().side is not None:
            presence().side.close()
            presence().side = None


ALONE = ("cluster.num_processes=1", "cluster.process_id=0", "cluster.timeout=2")


def test_a_port_that_is_taken_is_named_before_jax_takes_it(monkeypatch):
    monkeypatch.setattr(cluster, "_CLOSING", 0.2)
    monkeypatch.setattr(line, "_TAKEN", 0.3)
    with socket.create_server(("localhost", 0), reuse_port=True) as other:  # as the coordinator of another run has it
        address = f"localhost:{other.getsockname()[1]}"
        taken = f"cluster.coordinator = '{address}': process 0 cannot listen on port .* in use.*stop the process that uses it"
        with pytest.raises(ValueError, match=taken):
            opened(address, *ALONE)
        with pytest.raises(ValueError, match=r"cluster.service_port = .* cannot listen on it .* in use"):
            opened(f"localhost:{free_port()}", *ALONE, f"cluster.service_port={other.getsockname()[1]}")
    assert opened(address, *ALONE) not in (0, other)
    free = free_port()
    assert opened(address, *ALONE, f"cluster.service_port={free}") == free


@pytest.mark.slow
def test_a_port_that_a_run_has_is_told_with_the_run():
    server = listening("", 0)
    address = f"localhost:{server.getsockname()[1]}"
    door = Door(whoami(0, 1, "launch.train", "/runs/first"), server, Presence(), print)
    try:
        with pytest.raises(
            ValueError, match=r"cannot listen on port .*launch.train with run.dir = /runs/first, started at"
        ):
            opened(address, *ALONE)
        door.bye(0, "")  # it is ending, and is waited for
        threading.Timer(0.5, door.close).start()
        assert opened(address, *ALONE) > 0
    finally:
        door.close()


@pytest.mark.slow
def test_process_0_names_those_that_never_came():
    with pytest.raises(
        HostLost, match=r"process 1 of 2 never came, while host 0 .* is there, within 1 s .*look at their logs"
    ):
        opened(f"localhost:{free_port()}", "cluster.num_processes=2", "cluster.process_id=0", "cluster.timeout=1")


def test_a_process_that_reaches_nobody_says_why():
    section = compose(
        [*MANUAL[:1], f"cluster.coordinator=localhost:{free_port()}", *MANUAL[2:], "cluster.timeout=1"]
    ).cluster
    place = cluster._Place(section.coordinator, 3, 2, None)
    with pytest.raises(
        HostLost, match=r"the coordinator did not answer within 1 s .*this machine itself, where nothing listens"
    ):
        cluster._knock(section, place, whoami(2, 3, "launch.train", "/runs/a"))


@pytest.mark.slow
def test_behind_a_proxy_both_ports_are_known(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", f"127.0.0.1:{free_port()}")
    with pytest.raises(ValueError, match=r"must forward that of JAX's service too; give cluster.service_port=PORT"):
        opened("proxy:1", *ALONE)
    assert opened("proxy:1", *ALONE, f"cluster.service_port={(port := free_port())}") == port


@pytest.mark.parametrize(
    ("arguments", "platforms", "kept"), [(MANUAL, "cpu", False), ([], "cpu", True), (MANUAL, "cuda,cpu", True)]
)
def test_processes_of_cpu_devices_read_no_program_from_a_cache(monkeypatch, arguments, platforms, kept):
    """Of one that is read, collectives have lost their order: a run hung as often as its programs were in the cache."""
    monkeypatch.setattr(train, "join", lambda *_: None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # as this process was started
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", platforms)
        train.start_jax(compose(arguments))
        assert jax.config.jax_enable_compilation_cache is kept
    finally:
        jax.config.update("jax_platforms", before)
        jax.config.update("jax_enable_compilation_cache", True)


IN_TURN = "--xla_cpu_enable_concurrency_optimized_scheduler"


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
    monkeypatch.setattr(train, "join", lambda *_: None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # as this process was started
    monkeypatch.setenv("PJRT_NPROC", asked or "")
    if asked is None:
        monkeypatch.delenv("PJRT_NPROC")
    train.start_jax(compose(arguments))
    threads = os.environ.pop("PJRT_NPROC", None)
    assert threads == asked if least is None else int(threads) >= least


@pytest.mark.parametrize(
    ("words", "given", "flags"),
    [
        (["mesh.sp=4"], "", [f"{IN_TURN}=false"]),
        (["mesh.sp=4"], f"{IN_TURN}=true", [f"{IN_TURN}=true"]),
        (["mesh.sp=1"], "", []),
    ],
)
def test_virtual_devices_begin_one_transfer_after_the_other(monkeypatch, words, given, flags):
    """Unless the flags of a user say otherwise."""
    monkeypatch.setattr(train, "join", lambda *_: None)
    count = "--xla_force_host_platform_device_count=8"  # as this process was started
    monkeypatch.setenv("XLA_FLAGS", f"{count} {given}".strip())
    monkeypatch.setenv("PJRT_NPROC", "16")
    train.start_jax(compose(words))
    assert os.environ["XLA_FLAGS"].split() == [count, *flags]


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
