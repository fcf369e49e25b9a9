"""The train command as several processes, as on several hosts: real `jax.distributed` on the CPU, disturbed, started again."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_run import TINY, losses

from ejdist.training.flops import step_flops
from ejdist.training.metrics import read_rows
from launch import local, rehearse
from launch.drills import DRILLS, NEED_TWO
from launch.errors import DONE, INTERRUPTED, PREEMPTED, WRONG
from launch.export import main as export
from launch.processes import Job
from launch.scenes import Scene
from launch.train import main as train
from recipes.schema import compose

README = Path(__file__).resolve().parent.parent / "launch" / "README.md"
SMALL = [a for a in TINY if not a.startswith(("run.", "checkpoint.", "mesh."))]
LENGTH = ["run.steps=14", "checkpoint.every=4", "run.host_timeout=120"]


def rehearsed(folder, *arguments):
    """Returns the exit code of a rehearsal, and what it said."""
    lines = []
    return rehearse.main([*SMALL, f"run.dir={folder}", *arguments], log=lines.append), "\n".join(lines)


@pytest.mark.slow  # three runs of two processes, 60 s
def test_a_killed_host_goes_on_bit_for_bit(corpus, tmp_path):
    """A signal to two processes is in tests/test_slurm.py, every fault below, where rows are split too; they are slow."""
    one_device_each = ["devices_per_host=1", "mesh.dp=2", "mesh.sp=1", "model.num_layers=1"]
    code, said = rehearsed(tmp_path / "two", *corpus, *LENGTH, *one_device_each, "fault=kill")
    assert code == DONE and "1 of 1 drills ended as expected" in said, said
    assert said.count("losses and final state match the run without") == 1
    # A host counts its own rows, and the speeds are those of all.
    rows, wanted = (
        read_rows(tmp_path / "two" / "calm" / "run" / "metrics.jsonl"),
        step_flops(compose([*SMALL, "model.num_layers=1"]).model.build().flops, np.zeros((2, 64), np.int32)),
    )
    assert {row["flops_full"] for row in rows} == {wanted.full}


@pytest.mark.slow
def test_hosts_refuse_to_differ_and_one_host_makes_the_losses_of_two(corpus, tmp_path):
    code, said = rehearsed(tmp_path / "two", *corpus, *LENGTH, "mesh.dp=2", "mesh.sp=2", "fault=other_recipe")
    assert code == DONE and "exit codes [2, 2]" in said, said
    alone = tmp_path / "alone"
    assert train([*TINY, *corpus, *LENGTH, "mesh.dp=2", "mesh.sp=2", f"run.dir={alone}"]) == DONE
    together = tmp_path / "two" / "calm" / "run"
    np.testing.assert_allclose(losses(together), losses(alone), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("fault", DRILLS)
@pytest.mark.parametrize("hosts", [2, 4])
def test_every_fault(corpus, tmp_path, fault, hosts):
    own = [] if fault.endswith("_data") else corpus
    mesh = [f"mesh.dp={hosts // 2}", "mesh.sp=4", f"hosts={hosts}", "devices_per_host=2"]
    batch = ["data.global_batch=4"]
    code, said = rehearsed(tmp_path / "r", *own, *LENGTH, *mesh, *batch, f"fault={fault}", f"seed={hosts}")
    assert code == DONE, said


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [["hosts=2"], ["hosts=4", "mesh.fsdp=2"]])
def test_a_replaced_machine_goes_on_from_the_pieces_of_its_replica(corpus, tmp_path, mesh):
    """Of two hosts each has all pieces, of four each has half of them."""
    shape = ["mesh.dp=2", "mesh.sp=1", "devices_per_host=1", "data.global_batch=4", *mesh]
    code, said = rehearsed(tmp_path / "r", *corpus, *LENGTH, *shape, "fault=replaced")
    assert code == DONE and "1 of 1 drills ended as expected" in said, said


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "steps", "every"), [("kill,kill_in_save", 150, 4), ("sigterm", 1000, 20)])
def test_twenty_in_a_row(corpus, tmp_path, fault, steps, every):
    """One run, whose hosts are killed twenty times at steps and in saves, or told to stop at any moment."""
    length = [
        f"run.steps={steps}",
        f"checkpoint.every={every}",
        "run.host_timeout=120",
        "series=20",
        "devices_per_host=1",
    ]
    code, said = rehearsed(tmp_path / "r", *corpus, *length, "mesh.dp=2", "mesh.sp=1", f"fault={fault}")
    assert code == DONE and "20 of 20 ended as expected" in said, said
    assert "losses and final state match the run without" in said


@pytest.mark.slow
def test_any_number_of_hosts_goes_on_with_the_same_tokens(corpus, tmp_path):
    """4, 2, 3 and 1 hosts after each other, on other meshes, as one host that does all of it."""
    common = [*SMALL, *corpus, "data.global_batch=12", "run.steps=12", "checkpoint.every=0"]
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    stages = ((4, 2, ["mesh.dp=2", "mesh.sp=4"]), (2, 2, ["mesh.dp=4"]), (3, 2, ["mesh.dp=6"]), (1, 4, ["mesh.sp=4"]))
    for n, (hosts, devices, mesh) in enumerate(stages):
        job = Job(hosts, tmp_path / f"logs-{n}", devices).start(
            [*common, *mesh, f"run.dir={parts}", f"run.stop_after={3 * (n + 1)}"]
        )
        assert job.wait(600) == [DONE] * hosts, job.log(0).read_text()
    assert train([*common, "mesh.sp=4", f"run.dir={whole}"]) == DONE
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=1e-4)


@pytest.mark.slow  # two processes that end in an error
def test_local_starts_processes_and_tells_what_each_says(corpus, tmp_path, capfd):
    run = [
        *SMALL,
        *corpus,
        "mesh.dp=2",
        "mesh.sp=2",
        "run.steps=2",
        "optimizer.warmup_steps=1",
        f"run.dir={tmp_path / 'run'}",
    ]
    code = local.main(["processes=2", "devices=2", *run, "data.sequence_length=63"])
    out = capfd.readouterr().out
    assert code == WRONG, out
    assert "[0] error: " in out and "[1] error: " in out and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (("kill -9 $$", "exit 0"), 137),  # as by the kernel, where memory has run out
        (("exit 0", "kill -15 $$"), 143),
        (("exit 0", "exit 69"), 69),
        (("exit 0", "exit 0"), DONE),
    ],
)
def test_local_ends_as_the_process_that_failed(ends, code, monkeypatch):
    text = f"case $* in *process_id=0*) {ends[0]};; *) {ends[1]};; esac"
    monkeypatch.setattr(
        local, "Job", lambda count, logs, devices, _: Job(count, logs, devices, ("sh", "-c", text, "sh"))
    )
    assert local.main(["processes=2", "recipe=long_context"]) == code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["devices=2"], "processes= is missing"),
        (["processes=0"], "processes must be a number from 1 on, got '0'"),
        (["processes=2", "cluster.process_id=0"], "cluster.process_id=0 cannot be set here"),
        (["processes=2", "cluster=auto"], "cluster=auto cannot be set here"),
        (["processes=2", "gpus=0"], "names one GPU for each of 2 processes"),
        (["processes=2", "gpus=0,1", "devices=1"], "excludes devices="),
        (["processes=2", "gpus=0,0"], "gpus=0,0 must name a GPU for each process, and each once"),
        (["processes=2", "gpus=0,"], "gpus=0, must name a GPU for each process, and each once"),
        (["processes=2", "deivces=2"], "unknown key 'deivces'; did you mean 'devices'?"),
    ],
)
def test_local_called_wrongly(arguments, message, capsys):
    assert local.main(arguments) == WRONG
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fault=earthquake"], "fault=earthquake is unknown; use one of sigterm, kill"),
        (["fault=other_code", "hosts=1"], "fault=other_code needs hosts=2 or more"),
        (["fault=kill,nan,kill"], "fault=kill,nan,kill names kill twice; use times=2 to repeat each fault"),
        (["hosts=2", "hosts=4"], "hosts is given twice"),
        (["checkpoint.dir=/tmp/all"], "checkpoint.dir = '/tmp/all' cannot be given to a rehearsal"),
        (["hosts=many"], "hosts must be a number from 1 on, got 'many'"),
        (["device_per_host=4"], "unknown key 'device_per_host'; did you mean 'devices_per_host'?"),
        (["times=0"], "times must be a number from 1 on"),
        (["series=3", "fault=nan"], "fault=nan cannot be used in a series; use kill, kill_in_save, sigterm"),
        (["seed=-1"], "seed must be a number from 0 on"),
        (["run.stop_after=3"], "run.stop_after cannot be given to a rehearsal"),
        (["++run.stop_after=3"], "run.stop_after cannot be given to a rehearsal"),
        (["+cluster.num_processes=3"], "cluster.num_processes=3 cannot be set here: a rehearsal sets how"),
        (["times=2", "series=3"], "times = 2 is of drills, and series = 3 makes one run"),
        (["run.steps=10", "checkpoint.every=5"], r"at least 2 * checkpoint.every + 2 steps"),
        (["modle.num_layers=2"], "did you mean 'model.num_layers'"),
        (["run.dir=s3://bucket/run"], "run.dir = 's3://bucket/run' is a URL"),
    ],
)
def test_a_rehearsal_called_wrongly_starts_nothing(arguments, message, capsys, tmp_path):
    code = rehearse.main(["recipe=long_context", f"run.dir={tmp_path / 'run'}", *arguments])
    assert code == WRONG and message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_rehearsal_touches_no_folder_that_is_there(capsys, tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    assert rehearse.main(["recipe=long_context", f"run.dir={tmp_path}"]) == WRONG
    assert "already exists" in capsys.readouterr().err and [p.name for p in tmp_path.iterdir()] == ["kept.txt"]


def test_a_rehearsal_writes_to_no_place_of_the_recipe(tmp_path):
    """All its runs would have the checkpoints of the first."""
    with pytest.raises(ValueError, match=r"checkpoint\.dir = .* cannot be given to a rehearsal"):
        rehearse.parse(["recipe=long_context", f"run.dir={tmp_path / 'r'}", f"checkpoint.dir={tmp_path / 'durable'}"])


def test_a_rehearsal_takes_any_folder(monkeypatch, tmp_path):
    """As the recipe that each process is started with has it."""
    given = []
    monkeypatch.setattr(Job, "start", lambda self, arguments, **rest: given.extend(arguments))
    folder = tmp_path / "my runs, [2]"
    o = rehearse.parse(["recipe=long_context", "hosts=1", f"run.dir='{folder}'"])
    (o.folder / "calm" / "logs").mkdir(parents=True)
    (o.folder / "calm" / "logs" / "host-0.log").touch()
    rehearse.run(o, o.folder / "calm", None)
    assert compose(given).run.dir == str(folder / "calm" / "run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_rehearsal_that_is_told_to_stop_ends_its_processes(number, monkeypatch, tmp_path, capsys):
    started = []

    def start(self, arguments, **rest):
        self.processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10)"], process_group=0)]
        started.extend(self.processes)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(Job, "start", start)
    before = signal.getsignal(number)
    assert rehearse.main(["recipe=long_context", f"run.dir={tmp_path / 'r'}"]) == INTERRUPTED
    assert started[0].poll() == -signal.SIGKILL and signal.getsignal(number) is before
    assert "stopped by a signal, and its processes with it" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["missing_data", "other_data", "other_weights"])
def test_the_drills_of_files_do_not_lean_on_those_of_the_recipe(name, tmp_path):
    """Each host looks for them in a folder of its own, where a tokenizer or a dataset of the recipe is not."""
    (tmp_path / "calm" / "checkpoints" / "4").mkdir(parents=True)
    run = ["recipe=long_context", "data=dataset", "data.mixture=[{source: tokens, weight: 1.0}]"]
    drill = DRILLS[name](Scene(2, 14, 4, tmp_path / name, tmp_path / "calm", run, random.Random(0)))
    data = compose([*run, *drill.arguments]).data
    assert (data.source, data.tokenizer, data.mixture) in [("text.txt", "bytes", None), ("stdlib", "bytes", None)]


def test_the_faults_are_documented():
    text = README.read_text()
    assert not [name for name in DRILLS if f"`{name}`" not in text]
    assert set(NEED_TWO) < set(DRILLS)


@pytest.mark.slow
def test_sigterm_before_the_first_step_ends_at_once(corpus, tmp_path):
    """While Python imports, compiles or waits for another host, and nothing was written."""
    import time

    job = Job(1, tmp_path / "logs", 2, (sys.executable, "-m", "launch.train"))
    # A host that waits for another one, which never comes.
    waits = ["cluster=manual", "cluster.coordinator=localhost:1", "cluster.num_processes=2", "cluster.process_id=1"]
    job.start([*SMALL, *corpus, *waits, f"run.dir={tmp_path / 'run'}"])
    time.sleep(4)
    start = time.monotonic()
    job.signal(signal.SIGTERM)
    assert job.wait(60) == [PREEMPTED] and time.monotonic() - start < 30
    assert "stopped at once by SIGTERM" in job.log(0).read_text() and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("loss", "digest", "codes", "ok", "word"),
    [
        (2.0, 7, [69, -9], True, "losses and final state match the run without"),
        (2.5, 7, [69, -9], False, "the loss of step 2 is 2.5, and 2.0 without a fault (1 steps differ)"),
        (2.0, 8, [69, -9], False, "the losses are the same, but an array of the last checkpoint is not"),
        (2.0, 7, [1, -9], False, "exit codes [1, -9], which are not of [-9, -6, 69]"),
    ],
)
def test_a_rehearsal_tells_a_run_apart(tmp_path, monkeypatch, loss, digest, codes, ok, word):
    def run(o, folder, d, extra=(), wrong=None):
        """A run of two steps, that the fault ends after the first."""
        kept = folder / "run" / "checkpoints" / "2" / "run"
        kept.mkdir(parents=True, exist_ok=True)
        calm = folder.name == "calm"
        rows = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0 if calm else loss}]
        (folder / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows[: 1 if d else 2])))
        (kept / "metadata").write_text(json.dumps({"digest": {"x": 7 if calm else digest}}))
        return codes if d else [DONE] * 2, "" if d or calm else "resuming from step 1 of here", 3.0 if d else 2.0

    monkeypatch.setattr(rehearse, "run", run)
    code, said = rehearsed(tmp_path / "r", *LENGTH, "fault=kill")
    assert (code == DONE) is ok and word in said
    assert "started again from step 1, 0 steps rerun; 3.0 s more than without" in said


@pytest.mark.slow
def test_two_processes_start_from_the_same_files_as_one(corpus, tmp_path):
    """Each reads what its own devices hold; parameters are split over both."""
    common = [*SMALL, *corpus, "mesh.sp=2", "run.steps=2", "optimizer.warmup_steps=1", "checkpoint.every=0"]
    first, files = tmp_path / "first", tmp_path / "files"
    assert train([*common, f"run.dir={first}"]) == DONE
    assert export([f"run.dir={first}", f"to={files}"]) == DONE
    for count in (1, 2):
        job = Job(count, tmp_path / f"logs-{count}", 4 // count).start(
            [*common, f"model.init_from={files}", "mesh.fsdp=2", f"run.dir={tmp_path / str(count)}"]
        )
        assert job.wait(600) == [DONE] * count, job.log(0).read_text()
        assert f"parameters read from {files}" in job.log(0).read_text()
    np.testing.assert_allclose(losses(tmp_path / "2"), losses(tmp_path / "1"), rtol=1e-5)
    assert losses(tmp_path / "2")[0] < losses(first)[0]
