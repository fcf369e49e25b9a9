"""launch.slurm: its script is run by a stub of srun that sets what Slurm sets, and one of scontrol that keeps its call."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_run import PLAIN, losses

from ejdist.cluster.verdict import again as starts_again
from launch import slurm
from launch.cluster import _place
from launch.errors import DONE, PREEMPTED, WRONG
from recipes.schema import compose

SRUN = """#!{python}
import json, os, signal, subprocess, sys
line = [a for a in sys.argv[1:]]
options = []
while line[0].startswith("-"):
    options.append(line.pop(0))
if "STUB_OPTIONS" in os.environ: open(os.environ["STUB_OPTIONS"], "w").write("\\n".join(options))
count, made = int(os.environ["STUB_TASKS"]), []
for i in range(count):
    task = dict(SLURM_STEP_NODELIST="localhost", SLURM_NTASKS=str(count), SLURM_PROCID=str(i), SLURM_LOCALID=str(i))
    here = line
    if spec := json.loads(os.environ.get("STUB_SPECS", "{{}}")).get(str(i)):
        here = [w for word in line for w in (["launch.disturbed", json.dumps(spec)] if word == "launch.train" else [word])]
    made.append(subprocess.Popen(here, env=os.environ | task))
signal.signal(signal.SIGTERM, lambda *_: [p.send_signal(signal.SIGTERM) for p in made])
# As srun says: the highest exit code of all tasks, or 128 and the signal.
sys.exit(max(128 - code if code < 0 else code for code in [p.wait() for p in made]))
"""
SCONTROL = """#!/bin/sh
if [ "$1 $2" = "show hostnames" ]; then echo localhost; echo "$3"; else echo "$@" >> "$STUB_CALLS"; fi
"""


@pytest.fixture
def cluster(tmp_path):
    """Returns a function that runs a batch script as Slurm does, and gives the process back."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (stubs / name).write_text(text)
        (stubs / name).chmod(stat.S_IRWXU)
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    environment = os.environ | {
        "PATH": f"{stubs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XLA_FLAGS": " ".join([*flags, "--xla_force_host_platform_device_count=1"]), "STUB_TASKS": "2",
        "STUB_CALLS": str(tmp_path / "calls"), "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "rack[1-4]node[1-8]", "SLURM_CPUS_ON_NODE": "96",
    }  # fmt: skip

    def run(text, **variables):
        log = (tmp_path / "log").open("ab")
        return subprocess.Popen(["bash", "-c", text], env=environment | variables, stdout=log, stderr=log)

    return run


def batch(*arguments):
    return slurm.script(*slurm.parse(arguments))


def in_place_of_srun(text, command):
    """Returns the script with another command in the place of srun and what it starts."""
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    return text.replace(line, f"{command} &")


@pytest.mark.slow  # three starts of two processes; what the script decides by their codes is in the rows below
def test_a_job_that_is_stopped_is_queued_again_and_goes_on(cluster, corpus, tmp_path):
    """Two tasks that find each other by what Slurm says; a signal to the job, as before its time is up; and once more."""
    run, calls = tmp_path / "run", tmp_path / "calls"
    own = [*PLAIN, *corpus, "mesh.dp=2", f"run.dir={run}"]
    text = batch("nodes=2", "tasks_per_node=1", "time=60", *own, "run.steps=400")
    job = cluster(text)
    rows = run / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (rows.exists() and rows.read_text().count("\n") > 1):
        assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
        time.sleep(0.1)
    # Slurm tells the batch shell and every task.
    job.send_signal(signal.SIGTERM)
    subprocess.run(["pkill", "-TERM", "-P", str(job.pid), "-f", "srun"], check=True)
    assert job.wait(120) == PREEMPTED, (tmp_path / "log").read_text()[-3000:]
    assert calls.read_text().split() == ["requeue", str(os.getpid())]
    made = len(losses(run))
    assert 0 < made < 400 and "stopped by SIGTERM after step" in (tmp_path / "log").read_text()
    go_on = batch("nodes=2", "tasks_per_node=1", *own, "run.steps=400", f"run.stop_after={made + 2}")
    assert cluster(go_on, SLURM_RESTART_COUNT="1").wait(200) == DONE, (tmp_path / "log").read_text()[-3000:]
    assert len(losses(run)) == made + 2 and calls.read_text().count("requeue") == 1


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [
        (75, "", True),
        (69, "", True),
        (134, "3", True),
        *(
            (code, "", True) for code in (135, 137, 139, 253)
        ),  # SIGBUS, SIGKILL, SIGSEGV, and Slurm's own for lack of memory
        (75, "100", False),
        *((code, "", False) for code in (0, 1, 2, 3, 4, 6, 127, 130)),
    ],
)
def test_which_ends_are_queued_again(cluster, tmp_path, code, restarts, again):
    text = in_place_of_srun(batch("recipe=long_context"), f"sh -c 'exit {code}'")
    assert cluster(text, SLURM_RESTART_COUNT=restarts or "0").wait(20) == code
    assert (tmp_path / "calls").exists() is again
    assert ("a new start would end in the same way" in (tmp_path / "log").read_text()) is (
        code != 0 and starts_again(code) is False
    )


@pytest.mark.parametrize(
    ("codes", "left", "again"),
    [
        ((134, 2), "2 host 1 (n1, pid 5): the disk is full", False),
        ((1, 134), "1 host 0 (n0, pid 4): a bug", False),
        ((134, 137), "69 host 0 (n0, pid 4): host 1 is gone", True),
        ((134, 139), None, True),
        ((134, 137), "0 host 1 (n1, pid 5): all is well", True),
    ],
)
def test_the_reason_decides_and_not_the_highest_code_of_all_tasks(cluster, tmp_path, codes, left, again):
    leaves = f'echo "{left}" > "$EJDIST_VERDICT"; ' if left else ""
    text = in_place_of_srun(
        batch("recipe=long_context"), f"bash -c '[ -n \"$EJDIST_START\" ] || exit 0; {leaves}exit {max(codes)}'"
    )
    code = cluster(text).wait(20)
    stated = int(left.split()[0]) if left else 0
    assert code == (stated or max(codes)) and (tmp_path / "calls").exists() is again
    if stated:
        assert f"the run ended with exit code {code}, by {left.split(' ', 1)[1]}" in (tmp_path / "log").read_text()
    assert not list(Path.cwd().glob(".ejdist*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "spec", "code", "again", "word"),
    [
        (1, {"do": "signal", "number": 9}, 69, True, "host 1 ("),
        (0, {"do": "signal", "number": 9}, 69, True, "host 0 ("),
        (1, {"do": "signal", "number": 11}, 69, True, "host 1 ("),
        (0, {"do": "signal", "number": 7}, 69, True, "host 0 ("),
        (0, {"do": "bug"}, 1, False, "a bug of the drill"),
        (1, {"do": "bug"}, 1, False, "a bug of the drill"),
        (1, {"do": "device"}, 69, True, "ECC_UNCORRECTABLE"),
        (0, {"do": "no_room"}, 3, False, "could not be written"),
    ],
    ids=lambda value: str(value.get("number", value["do"])) if isinstance(value, dict) else None,
)
def test_a_fault_of_one_task_is_queued_again_where_that_helps(cluster, corpus, tmp_path, task, spec, code, again, word):
    """Two real processes under a srun that returns the highest code, with a fault in one of them."""
    own = [
        *PLAIN,
        *corpus,
        "mesh.dp=2",
        f"run.dir={tmp_path / 'run'}",
        "run.steps=40",
        "checkpoint.every=4",
        "run.host_timeout=120",
    ]
    job = cluster(batch("nodes=2", "tasks_per_node=1", *own), STUB_SPECS=json.dumps({task: spec | {"step": 8}}))
    ended = job.wait(400)
    said = (tmp_path / "log").read_text()
    assert ended == code and (tmp_path / "calls").exists() is again, said[-3000:]
    assert f"the run ended with exit code {code}, by " in said and word in said.rpartition("the run ended with")[2], (
        said[-3000:]
    )


def test_what_the_script_asks_for():
    text = batch(
        "nodes=4", "gpus_per_node=8", "time=1-00:00:00", "partition=h200", "name=long-run", "sbatch=--comment=x",
        "recipe=long_context", "data.source='a b/*.txt'",
    )  # fmt: skip
    lines = text.splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    for line in ("nodes=4", "ntasks-per-node=8", "gpus-per-node=8", "time=1-00:00:00", "partition=h200", "requeue",
                 "signal=TERM@300", "open-mode=append", "job-name=long-run"):  # fmt: skip
        assert f"#SBATCH --{line}" in lines
    assert "#SBATCH --comment=x" in lines and "account" not in text and "--gpu-bind=none" in text
    assert """'data.source='"'"'a b/*.txt'"'"''""" in text and "cluster=auto" in text
    assert subprocess.run(["bash", "-n", "-c", text], check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "on_both", "cpus", "seen"),
    [
        (["gpus_per_node=8"], ["mem=0"], "12", [None] * 8),
        (["gpus_per_node=8", "tasks_per_node=1"], ["mem=0"], "96", ["[0,1,2,3,4,5,6,7]"]),
        (
            ["gpus_per_node=8", "tasks_per_node=2", "cpus_per_task=20"],
            ["mem=0", "cpus-per-task=20"],
            "20",
            ["0,1,2,3", "4,5,6,7"],
        ),
        (["mem=64G"], ["mem=64G"], "96", [None]),
        (["exclusive=false", "cpus_per_task=4"], ["cpus-per-task=4"], "4", [None]),
        (["tasks_per_node=200"], ["mem=0"], "1", [None] * 2),
    ],
)
def test_each_task_has_its_share_of_a_machine(cluster, tmp_path, monkeypatch, options, on_both, cpus, seen):
    """Its CPUs, memory and GPUs: by what srun is given, and by what JAX makes of what a task is given."""
    show = tmp_path / "show"
    show.write_text(
        f"#!{sys.executable} -S\nimport json, os, sys\n"
        f"with open({str(tmp_path)!r} + '/task' + os.environ['SLURM_PROCID'], 'w') as file:\n"
        "    json.dump([sys.argv[3:], {k: v for k, v in os.environ.items() if k[:3] in ('SLU', 'JAX')}], file)\n"
    )
    show.chmod(stat.S_IRWXU)
    mesh = ["mesh.fsdp=8", "mesh.sp=1", "data.global_batch=8"] if "gpus_per_node=8" in options else []
    text = batch(*options, "recipe=long_context", *mesh, f"python={show}", "srun=--mpi=none --container-image='a b'")
    exclusive = "exclusive=false" not in options
    assert ("#SBATCH --exclusive" in text.splitlines()) is exclusive
    variables = {"STUB_TASKS": str(len(seen)), "STUB_OPTIONS": str(tmp_path / "options")}
    assert cluster(text, **variables).wait(60) == DONE, (tmp_path / "log").read_text()[-3000:]
    given = (tmp_path / "options").read_text().split("\n")
    for option in on_both:
        assert f"#SBATCH --{option}" in text.splitlines() and f"--{option}" in given
    assert f"--cpus-per-task={cpus}" in given and {"--label", "--mpi=none", "--container-image=a b"} <= set(given)
    for i, devices in enumerate(seen):
        arguments, environment = json.loads((tmp_path / f"task{i}").read_text())
        with monkeypatch.context() as task:
            for name, value in environment.items():
                task.setenv(name, value)
            place = _place(compose(arguments).cluster)
        # Without a word about GPUs JAX takes the one of the task's number.
        wanted = [i] if devices is None else json.loads(f"[{devices.strip('[]')}]")
        address = f"localhost:{os.getpid() % 4096 + 61440}"
        assert (place.coordinator, place.count, place.devices) == (address, len(seen), wanted)


@pytest.mark.parametrize("time", ["6", "5:01", "00:06:00", "0-1", "1-0:0", "0", ""])
def test_times_that_leave_room_for_the_grace(time):
    assert batch(*([f"time={time}"] if time else []), "recipe=long_context")


def test_the_doctor_is_started_once():
    text = batch("nodes=2", "command=doctor", "recipe=long_context")
    assert "-m launch.doctor recipe=long_context cluster=auto" in text and "scontrol requeue" not in text
    assert subprocess.run(["bash", "-n", "-c", text], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nodes=0"], "nodes must be a number from 1 on, got '0'"),
        (["nodes=two"], "nodes must be a number from 1 on"),
        (["time=tomorrow"], "time = 'tomorrow' must be as Slurm writes it"),
        (["gpus_per_node=8", "tasks_per_node=3"], "gpus_per_node = 8 must be a multiple of tasks_per_node = 3"),
        (["submit=yes"], "submit must be true or false, got 'yes'"),
        (["cluster=manual"], "cluster=manual cannot be set here"),
        (["cluster.process_id=3"], "cluster.process_id=3 cannot be set here"),
        (["modle=8b"], "did you mean 'model'"),
        (["optimizer.learning_rate=nan"], "optimizer.learning_rate must be positive, got nan"),
        (["checkpoint.dir=s3://bucket/run"], "Orbax writes checkpoints to folders and to gs://BUCKET/FOLDER"),
        (["run.host_timeout=0"], "run.host_timeout must be a positive number of seconds"),
        (["experts.buffer=0"], "experts.buffer must be a number above 0"),
        (["guards.spike=never"], "guards.spike"),
        (["name=a b"], "name must be written name=VALUE, in one word"),
        (["sbatch=--a\n--b"], "sbatch must be written sbatch=VALUE, in one word"),
        (["sbatch=--comment=4G --nodes=8"], "--nodes is what nodes= says"),
        (["sbatch=--cpus-per-task=12"], "--cpus-per-task is what cpus_per_task= says"),
        (["sbatch=--exclusive"], "--exclusive is what exclusive= says"),
        (["srun=--mem-per-cpu=4G"], "--mem-per-cpu is what mem= says"),
        (["srun=-n 3"], "-n is what tasks_per_node= says"),
        (["srun=--mpi=pmix --label"], "the script has --label already; leave it out"),
        (["srun=it's"], "cannot be read as a shell does: No closing quotation"),
        (["exclusive=false"], "exclusive=false needs cpus_per_task=: Slurm would give each process one CPU"),
        (["mem=all"], "mem = 'all' must be memory of a machine, as 64G"),
        (["cpus_per_task=0"], "cpus_per_task must be a number from 1 on"),
        (["sbatch=-N8"], "-N is what nodes= says"),
        (["sbatch=--ntasks=7"], "--ntasks is what tasks_per_node= says"),
        (["checkpoint.every=-1"], "checkpoint.every must be >= 0"),
        (["sbatch=--no-requeue"], "--no-requeue is what restarts= says"),
        (["name=it's#1"], """name = "it's#1" must be of the job, of letters, digits and"""),
        (["name="], "name is empty; write name=VALUE, or leave it out"),
        (["python="], "python is empty"),
        (["python=it's"], "cannot be read as a shell does: No closing quotation"),
        (["nodess=2"], "unknown key 'nodess'; did you mean 'nodes'?"),
        (["grace=70000"], "grace must be a number from 0 to 65535"),
        (["time=5"], "time = '5' is 300 s, and the run is told to stop grace = 300 s before their end"),
        (["time=0-00:04", "grace=240"], "time = '0-00:04' is 240 s"),
        (["time=3:20", "grace=200"], "time = '3:20' is 200 s"),
        (["run.steps=0"], "run.steps must be at least 1, got 0"),
        (["run.dir=s3://bucket/run"], "run.dir = 's3://bucket/run' is a URL"),
        (["sequence.scheme=tree"], "sequence.scheme = 'tree' is unknown; use one of auto, ring, all_gather"),
        (
            ["platform=cud"],
            "platform = 'cud' is unknown; use null or one of triton, pallas, cudnn, cuda, xla, composed, triton_gpu",
        ),
        (["experts.chunks=0"], "experts.chunks must be at least 1 and at most 64 (each is compiled on its own), got 0"),
        (
            ["experts.chunks=100000", "experts.dispatch=all_to_all"],
            "experts.chunks must be at least 1 and at most 64 (each is compiled on its own), got 100000",
        ),
        (["data.packing=loose"], "data.packing = 'loose' is unknown; use cut, even or whole"),
        (["data.prefetch=0"], "data.prefetch must be at least 1 batch"),
        (["curriculum=[{until: 3}]"], "curriculum[0].until = 3: the last stage ends with the run"),
        (["nodes=2", "gpus_per_node=8", "mesh=fsdp"], "data.global_batch"),
        (["nodes=2", "gpus_per_node=8", "mesh.sp=32"], "mesh.sp=32 needs 32 devices, but there are 16"),
    ],
)
def test_called_wrongly(arguments, message, capsys):
    assert slurm.main(["recipe=long_context", *arguments]) == WRONG
    assert message in capsys.readouterr().err


def test_submitting_without_slurm_says_so(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert slurm.main(["recipe=long_context", "submit=true"]) == WRONG
    assert "there is no sbatch here" in capsys.readouterr().err
