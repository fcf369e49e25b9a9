"""launch.doctor: what each failure says, among hosts that are threads; an examination of this process; one of two processes."""

import json
import os
import socket
import time

import jax
import pytest
from etils import epath
from small_run import TINY
from test_hosts import together  # noqa: F401

from ejdist import make_mesh
from ejdist.cluster import bandwidth, health
from ejdist.cluster import hosts as hosts_module
from ejdist.cluster.hosts import Hosts
from ejdist.training.curriculum import stages_of
from ejdist.training.setup import stage_program
from launch import doctor, local
from launch.errors import DONE, HOST_LOST, WRONG
from recipes.schema import compose


@pytest.fixture
def examine(together, monkeypatch):  # noqa: F811
    """Returns a function that examines so many hosts before they make devices, and returns (failures, what host 0 said)."""
    monkeypatch.setattr(hosts_module, "_joined", lambda: (jax.process_index(), jax.process_count()))

    def run(count, recipe_of):
        lines = []

        def act(hosts):
            examined = doctor.Doctor(recipe_of(hosts.index), hosts, lines.append)
            examined.before_devices()
            return examined.failures

        found = together(count, act, limit=20)
        assert all(f == found[0] for f in found), found
        return found[0], "\n".join(lines)

    return run


def test_healthy_hosts(examine, tmp_path):
    recipe = compose([*TINY, f"run.dir={tmp_path / 'new' / 'run'}"])
    failures, said = examine(3, lambda i: recipe)
    assert failures == [] and said.count("ok      ") == 4 and "FAILED" not in said
    assert "3 processes on 1 machine" in said and "written and seen by all" in said
    assert not (tmp_path / "new").exists(), "folders created for it must be removed"
    seconds = float(said.split("clocks within ")[1].split()[0])
    assert seconds < 1


def test_every_failure_is_told_on_all_hosts(examine, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(doctor.Doctor, "_ahead", lambda self: (0.0, 0.3, -90.0)[self._hosts.index])

    rates = ("3e-3", "1e-3", "3e-3")
    recipes = [
        compose([*TINY, f"optimizer.learning_rate={rate}", f"run.dir={tmp_path / 'file' / 'run'}"]) for rate in rates
    ]
    failures, said = examine(3, recipes.__getitem__)
    name = socket.gethostname()
    assert len(failures) == 5 and said.count("FAILED  ") == 5
    assert f"host 1 ({name}) has optimizer.learning_rate = 0.001, and host 0 ({name}) has 0.003" in failures[0]
    assert f"the clock of host 2 ({name}) is 90.0 s behind that of host 0" in failures[1]
    for i, line in enumerate(failures[2:]):
        assert f"host {i} ({name}) cannot write to run.dir" in line and "Not a directory" in line


def test_what_all_hosts_read_does_not_grow_with_their_number():
    reports = {i: [f"name-{i // 4}", f"machine-{i // 4}"] for i in range(4096)}
    assert doctor._machines(reports)[0] == 1024
    assert (
        doctor._machines(reports)[1].startswith("name-0, name-1, ") and "and 1016 more" in doctor._machines(reports)[1]
    )
    behind = {i: [f"name-{i}", {"ahead": -90.0 if i else 0.0}] for i in range(1024)}
    failures = doctor._few(health.clock_failures)(behind)
    assert len(failures) == 9 and "host 1 (name-1)" in failures[0] and "1015 more like these, of 1024" in failures[-1]
    assert doctor._few(health.clock_failures)({0: behind[0], 1: behind[1]}) == failures[:1]


def test_a_folder_of_ones_own_is_not_the_one_of_the_run(tmp_path):
    folders = [health.SharedFolder(tmp_path / name / "run", i, "token") for i, name in enumerate("aab")]
    sees = [f.sees_first(0.1) for f in folders]
    assert sees == [True, True, False]
    said = {i: [f"n{i}", {"writes": f.failure, "sees": seen}] for i, (f, seen) in enumerate(zip(folders, sees))}
    (failure,) = health.folder_failures("run.dir", tmp_path)(said)
    assert "host 2 (n2) does not see" in failure and "what host 0 (n0) writes" in failure
    (tmp_path / "a" / "run" / "kept").write_text("by another")
    for f in folders:
        f.close()
    assert [p.name for p in (tmp_path / "a" / "run").iterdir()] == ["kept"] and not (tmp_path / "b").exists()


@pytest.mark.slow
def test_checkpoints_may_go_elsewhere(examine, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    recipe = compose([*TINY, f"run.dir={tmp_path / 'run'}", f"checkpoint.dir={tmp_path / 'file' / 'kept'}"])
    failures, said = examine(2, lambda i: recipe)
    assert "run.dir = " in said and len(failures) == 2
    assert "cannot write to checkpoint.dir = " in failures[0] and "Not a directory" in failures[0]
    monkeypatch.setattr("ejdist.paths._installed", lambda name: True)
    bucket = epath.Path(tmp_path / "bucket" / "kept")  # as etils knows a bucket: not as a folder of this machine
    monkeypatch.setattr("ejdist.paths.place", lambda key, value: bucket)
    recipe = compose([*TINY, f"run.dir={tmp_path / 'run'}", "checkpoint.dir=gs://bucket/kept"])
    failures, said = examine(2, lambda i: recipe)
    assert failures == [] and f"checkpoint.dir = {bucket}: written and seen by all\n" in f"{said}\n"
    assert list(bucket.iterdir()) == []


def test_devices_that_are_not_there():
    def host(**facts):
        return {"platform": "gpu", "kind": "NVIDIA H200", "count": 8, "accelerators": ["/dev/nvidiactl"]} | facts

    same = {0: ["a", host()], 1: ["b", host()]}
    assert health.device_failures(same) == []
    (lost,) = health.device_failures(same | {2: ["c", host(count=7)]})
    assert "host 2 (c) has 7 x NVIDIA H200, and host 0 (a) has 8 x NVIDIA H200" in lost
    missing, other = health.device_failures(same | {1: ["b", host(platform="cpu", kind="cpu", count=1)]})
    assert "host 1 (b) has /dev/nvidiactl, but JAX finds only its CPU" in missing and "1 x cpu" in other


@pytest.mark.parametrize(("free", "there", "fits"), [(40, 0, True), (39, 0, False), (10, 3, True), (9, 7, False)])
def test_room_for_the_checkpoints(free, there, fits):
    """Three stay, and a fourth is written before the first of them goes."""
    failures = health.disk_failures(free * 10**9, 10 * 10**9, 3, there)
    assert (failures == []) is fits
    assert fits or f"the checkpoint folder has {free} GB free, but" in failures[0]


@pytest.mark.parametrize(
    ("address", "listens", "message"),
    [
        ("localhost", True, None),
        ("localhost", False, "is this machine itself, where nothing listens"),
        ("no-such-host.invalid", False, "has a name that this host cannot resolve"),
    ],
)
def test_why_the_coordinator_cannot_be_reached(address, listens, message):
    with socket.socket() as there:
        there.bind(("localhost", 0))
        if listens:
            there.listen()
        why = health.why_unreachable(f"{address}:{there.getsockname()[1]}", 0.2)
    assert why is None if message is None else message in why and "cluster.coordinator" in why


def test_refused_and_silent_are_not_the_same(monkeypatch):
    for error, message in ((ConnectionRefusedError(), "refuses connections"), (TimeoutError(), "the firewall")):

        def connect(*_, error=error, **__):
            raise error

        monkeypatch.setattr(socket, "create_connection", connect)
        assert message in health.why_unreachable("192.0.2.1:8476", 0)


def test_a_process_that_does_not_reach_the_coordinator_says_so_at_once(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "start_jax", lambda recipe: pytest.fail("it has joined"))
    cluster = ["cluster=manual", "cluster.coordinator=localhost:1", "cluster.num_processes=2", "cluster.timeout=1"]
    start = time.monotonic()
    assert doctor.main([*TINY, *cluster, "cluster.process_id=1"]) == HOST_LOST and time.monotonic() - start < 30
    assert "FAILED  process 1 on " in capsys.readouterr().err


def test_bandwidth_of_each_axis(monkeypatch):
    monkeypatch.setattr(bandwidth, "_seconds", lambda run, given, calls, rounds: given.nbytes / 1e9)
    found = json.loads(json.dumps(bandwidth.measure(make_mesh(dp=2, sp=4), [4096])))
    assert (
        set(found["axes"]) == {"dp", "sp"} and found["mesh"]["sp"] == 4 and set(found["units"]) >= {"bytes", "seconds"}
    )
    rows = {row["collective"]: row for row in found["axes"]["sp"]["measured"]}
    sent = {name: row["bytes"] for name, row in rows.items()}
    # Of a whole array of 4096 bytes on four devices: three quarters leave, twice in an all-reduce, all of it to a neighbour.
    assert sent == {"all_gather": 3072, "reduce_scatter": 3072, "all_reduce": 6144, "all_to_all": 3072, "permute": 4096}
    # 8 devices give their arrays, which for all_gather are a quarter of the whole.
    assert rows["all_reduce"]["seconds"] == 8 * 4096 / 1e9 and rows["all_gather"]["seconds"] == 8 * 1024 / 1e9
    assert rows["all_reduce"]["bytes_per_second"] == round(6144 / (8 * 4096 / 1e9))
    assert {a["crosses"] for a in found["axes"].values()} == {"devices"}


def test_what_an_axis_crosses():
    from test_mesh_layout import chips

    pieces = chips(16, 2)
    for device in pieces:
        device.process_index = device.slice_index * 2 + device.coords[1] // 2
    mesh = make_mesh(dp=2, fsdp=2, sp=4, devices=pieces)
    assert [bandwidth.crosses(mesh, axis) for axis in ("dp", "fsdp", "sp")] == ["slices", "hosts", "devices"]


def test_alone(tmp_path, capsys, monkeypatch):
    """All of it in this process, with real collectives; a second time the folder is there."""
    monkeypatch.setattr(bandwidth, "ON_CPUS", (2**12,))
    kept = tmp_path / "measured" / "links.json"
    arguments = [*TINY, f"run.dir={tmp_path / 'run'}", f"bandwidth={kept}"]
    assert doctor.main(arguments) == DONE
    out = capsys.readouterr().out
    assert out.endswith("fit for the run\n") and "ok      sp (2, inside of a host): GB/s per device" in out
    assert "6 devices are left idle" in out and not (tmp_path / "run").exists()
    row = json.loads(kept.read_text())["axes"]["sp"]["measured"][0]
    assert row["seconds"] > 0 and row["bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"], rel=1e-3)


def test_a_mesh_that_does_not_fit_is_a_failure(tmp_path, capsys):
    assert doctor.main([*TINY, f"run.dir={tmp_path}", "mesh.sp=16", "data.sequence_length=512"]) == WRONG
    out = capsys.readouterr().out
    assert "FAILED  mesh.sp=16 needs 16 devices, but there are 8" in out and out.endswith(
        "1 failure: fix the first, and run it again\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_host_that_has_no_device_of_the_mesh_is_named(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    stages = stages_of(compose([*TINY, "curriculum=[{until: 3}, {}]"]))
    with pytest.raises(
        ValueError, match=r"curriculum\[0\]: the mesh {'sp': 2} uses 2 of 8 devices, and none of host 1"
    ):
        stage_program(stages[0])


def test_every_stage_of_a_curriculum_is_looked_at(tmp_path, capsys):
    stages = "curriculum=[{until: 3, mesh: {sp: 16}, sequence_length: 512}, {}]"
    assert doctor.main([*TINY, f"run.dir={tmp_path}", stages]) == WRONG
    assert "FAILED  curriculum[0]: mesh.sp=16 needs 16 devices, but there are 8" in capsys.readouterr().out


def test_called_wrongly(capsys):
    assert doctor.main(["run.steps=0"]) == WRONG and "run.steps must be at least 1" in capsys.readouterr().err
    assert doctor.main(["curriculum=[{until: 3}]"]) == WRONG and "curriculum[0].until" in capsys.readouterr().err
    assert doctor.main(["modle=8b"]) == WRONG and "did you mean 'model'" in capsys.readouterr().err
    assert doctor.main(["--help"]) == DONE and "bandwidth=" in capsys.readouterr().out


def test_a_single_host_waits_for_nobody_before_it_has_devices():
    hosts = Hosts(1, before_devices=True)
    assert (hosts.index, hosts.count) == (0, 1) and hosts.reduce("x", 3, lambda said: said[0][1] + 1) == 4


@pytest.mark.slow
def test_two_processes(tmp_path, capfd):
    arguments = [*TINY, "mesh.dp=2", f"run.dir={tmp_path / 'run'}", "processes=2", "devices=2", "command=doctor"]
    assert local.main(arguments) == DONE
    out = capfd.readouterr().out
    assert "[0] ok      2 processes on 1 machine" in out and "dp (2, between hosts)" in out
    found = json.loads((tmp_path / "run" / "bandwidth.json").read_text())
    assert found["processes"] == 2 and {r["collective"] for r in found["axes"]["dp"]["measured"]} >= {"all_reduce"}
    assert local.main([*arguments, "cluster.timeout=60", "mesh.dp=1"]) == WRONG
    assert "none of host 1" in capfd.readouterr().out


def test_nothing_is_left_in_the_environment(monkeypatch):
    """On a Cloud TPU VM JAX asks the machine's metadata who the others are, unless this variable is set."""
    from launch.train import main

    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    assert main(["recipe=nothing"]) == WRONG
    assert "TPU_SKIP_MDS_QUERY" not in os.environ
