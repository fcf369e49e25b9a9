"""launch.tpu_vm: stubs of ssh, gcloud and rsync, which do on this machine what the real ones do on another."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_run import TINY, losses

from launch import tpu_vm, tpu_vm_gcloud
from launch.errors import DIVERGED, DONE, HOST_LOST, PIPE_CLOSED, PREEMPTED, WRONG
from launch.processes import free_port

ROOT = Path(__file__).resolve().parent.parent
# As sshd does: the words are joined by spaces and given to the shell of the user, in a folder of the machine.
SSH = """#!{python}
import os, sys
words = sys.argv[1:]
while words[0] == "-o":
    words = words[2:]
host, *command = words
if host in os.environ.get("STUB_DEAD", "").split(","):
    print("ssh: connect to host", host, "port 22: no route", file=sys.stderr); sys.exit(255)
home = os.path.join(os.environ["STUB_HOMES"], host.rpartition("@")[2])
os.makedirs(home, exist_ok=True); os.chdir(home)
os.environ["HOME"] = home
os.execvp("sh", ["sh", "-c", " ".join(command)])
"""
GCLOUD = """#!{python}
import json, os, sys
with open(os.environ["STUB_CALLS"], "a") as calls: print(json.dumps(sys.argv[1:]), file=calls)
words = [a for a in sys.argv[1:] if a != "alpha"]
kind, verb, name = words[2:5]
state = os.environ.get("STUB_STATE", "READY")
if os.path.exists(state): state = open(state).read().strip()
if name == "there-queued":
    spec = {{"nodeId": "there"}}
    if "MANY" in os.environ: spec = {{"multisliceParams": {{"nodeCount": 2, "nodeIdPrefix": "there"}}}}
    print(json.dumps({{"state": {{"state": state}}, "tpu": {{"nodeSpec": [spec]}}}})); sys.exit()
if not name.startswith("there"): print("ERROR: NOT_FOUND: no TPU of this name\\n- set zone", file=sys.stderr); sys.exit(1)
if name == "there-odd": print("null")
elif name == "there-soon": print(json.dumps({{"state": "CREATING"}}))
elif name == "there-empty": print(json.dumps({{"state": "READY", "networkEndpoints": []}}))
elif verb == "describe": print(json.dumps({{"state": state, "networkEndpoints": [{{}}, {{}}]}}))
else:
    given = dict(a[2:].split("=", 1) for a in sys.argv[6:] if a.startswith("--") and "=" in a)
    os.environ["WORKER"] = given["worker"]
    os.execvp("sh", ["sh", "-c", given["command"]])
"""
RSYNC = '#!/bin/sh\necho "$@" >> "$STUB_CALLS"\nexit ${RSYNC_CODE:-0}\n'


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """Puts the stubs where they are found, and returns the file of their calls."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, text in (("ssh", SSH), ("gcloud", GCLOUD), ("rsync", RSYNC)):
        (stubs / name).write_text(text.format(python=sys.executable) if name != "rsync" else text)
        (stubs / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{stubs}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("STUB_HOMES", str(tmp_path / "homes"))
    monkeypatch.setenv("STUB_CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


@pytest.fixture
def program(tmp_path):
    """Returns a function that writes what stands for Python on every machine, and gives the option that names it."""

    def write(text):
        (tmp_path / "program").write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "program").chmod(stat.S_IRWXU)
        return f"python={tmp_path / 'program'}"

    return write


@pytest.mark.slow
def test_two_machines_train_and_a_signal_stops_both(machines, corpus, tmp_path):
    """Real processes, which find each other by what the launcher tells them, are told to stop, save, and say so."""
    run = tmp_path / "run"
    arguments = [
        "hosts=first,user@second", "cluster=manual", f"coordinator=localhost:{free_port()}", f"python={sys.executable}",
        "env.XLA_FLAGS=--xla_force_host_platform_device_count=2", *TINY, *corpus, "mesh.dp=2", f"run.dir={run}",
        "run.steps=400",
    ]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        made = subprocess.Popen([sys.executable, "-m", "launch.tpu_vm", *arguments], stdout=log, stderr=log)
    rows, deadline = run / "metrics.jsonl", time.monotonic() + 200
    while not (rows.exists() and rows.read_text().count("\n") > 1):
        assert made.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
        time.sleep(0.1)
    made.send_signal(signal.SIGTERM)
    said = (tmp_path / "log").read_text
    assert made.wait(120) == PREEMPTED, said()[-3000:]
    assert "[0] stopped by SIGTERM after step" in said() and 0 < len(losses(run)) < 400
    assert sorted(p.name for p in (tmp_path / "homes").iterdir()) == ["first", "second"]


def test_arguments_arrive_as_they_are(machines, program, tmp_path, capfd):
    """Through two shells: what has spaces, quotes and dollars, the environment, and the folder."""
    (tmp_path / "homes" / "a" / "the code").mkdir(parents=True)
    odd = "data.source='its $HOME \"x\" `y`/*.txt'"
    given = ["hosts=a", "dir=~/the code", "env.GREETING=a  'b' $c", "recipe=long_context", odd, "run.dir=/tmp/x"]
    shows = program('printf "<%s>" "$@"; echo; echo "$GREETING|$PWD"')
    assert tpu_vm.main([*given, shows]) == DONE
    out = capfd.readouterr().out.splitlines()
    assert out[0] == f"[0] <-m><launch.train><recipe=long_context><{odd}><run.dir=/tmp/x><cluster=auto>"
    assert out[1] == f"[0] a  'b' $c|{tmp_path / 'homes' / 'a' / 'the code'}"


@pytest.mark.parametrize("given", ["~", "~/", "~/a b", "~/it's"])
def test_a_folder_may_be_of_the_home_of_the_machine(tmp_path, monkeypatch, given):
    home = tmp_path / "home"
    (home / given[2:]).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    options = tpu_vm.parse(["hosts=a", f"dir={given}", "python=pwd", "recipe=long_context"])[0]
    line = tpu_vm.remote(options, [], 0, "x").replace("pwd -m launch.train cluster=auto", "pwd")
    with subprocess.Popen(["sh", "-c", line], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ran:
        assert ran.stdout.readline() == "ejdist x is connected\n"
        print(".", file=ran.stdin, flush=True)
        assert Path(ran.stdout.read().strip()) == home / given[2:]


def test_each_machine_has_its_number(machines, program, capfd):
    given = ["hosts=me@a,b,c", "cluster=manual", "recipe=long_context", program('echo "${@: -3}"')]
    assert tpu_vm.main([*given, "command=doctor"]) == DONE
    facts = "cluster.coordinator=a:8476 cluster.num_processes=3 cluster.process_id="
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[{i}] {facts}{i}" for i in range(3)]


def test_a_tpu_vm_by_gcloud(machines, program, capfd):
    given = ["tpu=there", "zone=us-east5-a", "project=p", "recipe=long_context", program('echo "worker $WORKER"')]
    assert tpu_vm.main(given) == DONE
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] worker 0", "[1] worker 1"]
    calls = [json.loads(line) for line in machines.read_text().splitlines()]
    where = ["--zone=us-east5-a", "--project=p", "--quiet"]
    assert calls[0] == ["compute", "tpus", "tpu-vm", "describe", "there", *where, "--format=json"]
    assert {c[8] for c in calls[1:]} == {"--worker=0", "--worker=1"}
    assert tpu_vm.main(["tpu=there,there-too", *given[1:]]) == DONE
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[{i}] worker {i % 2}" for i in range(4)]
    assert tpu_vm.main([given[0].replace("there", "gone"), *given[1:]]) == WRONG
    assert "tpu = 'gone': gcloud says: ERROR: NOT_FOUND: no TPU of this name - set zone" in capfd.readouterr().err
    assert tpu_vm.main(["tpu=there-soon", *given[1:]]) == WRONG
    assert "tpu = 'there-soon' has no machines; its state is CREATING" in capfd.readouterr().err
    assert tpu_vm.main(["tpu=there-empty", *given[1:]]) == WRONG
    assert "tpu = 'there-empty' has no machines; its state is READY" in capfd.readouterr().err
    assert tpu_vm.main(["tpu=there-odd", *given[1:]]) == WRONG
    assert "gcloud describes it as 'null', which is not a TPU VM" in capfd.readouterr().err


def test_how_gcloud_connects(machines, program, capfd):
    words = [
        "tpu=there",
        "zone=z",
        "recipe=long_context",
        program("true"),
        "key=~/k",
        "gcloud=--ssh-flag='-p 22' --plain",
    ]
    for more in (["internal_ip=true"], ["iap=true"]):
        assert tpu_vm.main([*words, *more]) == DONE
    calls = [json.loads(line) for line in machines.read_text().splitlines()]
    inside, tunnel = calls[2], calls[5]
    assert {"--internal-ip", "--ssh-key-file=~/k", "--ssh-flag=-p 22", "--plain"} <= set(inside[: inside.index("--")])
    assert tunnel[:5] == ["alpha", "compute", "tpus", "tpu-vm", "ssh"] and "--tunnel-through-iap" in tunnel
    assert "--internal-ip" not in tunnel and "ConnectTimeout=60" in inside[inside.index("--") :]


@pytest.mark.slow
def test_a_queued_resource_has_its_slices(machines, program, monkeypatch, capfd):
    words = ["queued=there-queued", "zone=z", "recipe=long_context", program('echo "worker $WORKER"')]
    monkeypatch.setenv("STUB_STATE", "ACTIVE")
    for many, count in (("", 2), ("1", 4)):
        if many:
            monkeypatch.setenv("MANY", many)
        assert tpu_vm.main(words if not many else [w.replace("tpu=", "") for w in words]) == DONE
        assert len(capfd.readouterr().out.splitlines()) == count
    names = {json.loads(line)[4] for line in machines.read_text().splitlines() if '"ssh"' in line}
    assert names == {"there", "there-0", "there-1"}
    monkeypatch.setenv("STUB_STATE", "WAITING_FOR_RESOURCES")
    assert tpu_vm.main(words) == WRONG
    assert (
        "queued = 'there-queued' has no machines; its state is WAITING_FOR_RESOURCES: start this again once it is ACTIVE"
        in (capfd.readouterr().err)
    )


def test_machines_are_waited_for_and_made_again(machines, program, tmp_path, monkeypatch, capfd):
    """A babysitter: preempted machines are made again, those that are being made are waited for, and the run goes on."""
    state, made = tmp_path / "state", tmp_path / "made"
    create = tmp_path / "create"
    create.write_text(f"#!/bin/sh\necho $1 >> {made}\necho CREATING > {state}\n(sleep 0.4; echo READY > {state}) &\n")
    create.chmod(stat.S_IRWXU)
    monkeypatch.setenv("STUB_STATE", str(state))
    monkeypatch.setattr(tpu_vm_gcloud, "_EVERY", 0.1)
    monkeypatch.setattr(tpu_vm, "_PAUSE", 0.0)
    state.write_text("READY")
    preempted = f"echo PREEMPTED > {state}; if [ -e {made} ]; then echo READY > {state}; exit 0; fi; exit 137"
    words = ["tpu=there", "zone=z", "recipe=long_context", "restarts=3", "wait=20", program(preempted)]
    assert tpu_vm.main([*words, f"create={create} again"]) == DONE
    out = capfd.readouterr().out
    assert "the run ended with exit code 137, and is started again, 3 of 3 times left" in out
    assert f"tpu = 'there' is PREEMPTED; it is made again: {create} again" in out and made.read_text() == "again\n"
    state.write_text("PREEMPTED")
    assert tpu_vm.main(words) == WRONG
    assert "its state is PREEMPTED; make it again, or say how with create=" in capfd.readouterr().err
    assert tpu_vm.main([*words, "create=false"]) == WRONG
    assert "create = 'false' ended with exit code 1" in capfd.readouterr().err


def test_variables_are_on_no_command_line(machines, program, monkeypatch, tmp_path, capfd):
    """They go over the connection, as `ps` shows command lines to everybody."""
    monkeypatch.setenv("HF_TOKEN", " hf_$x \\ 'y' ")
    given = ["hosts=a,b", "cluster=manual", "recipe=long_context", "env.PLAIN=in the open", "secrets=HF_TOKEN"]
    shows = program('echo "<$HF_TOKEN|$PLAIN>"; tr "\\0" " " < /proc/$PPID/cmdline; echo')
    assert tpu_vm.main([*given, shows]) == DONE
    out = capfd.readouterr().out
    assert out.count("< hf_$x \\ 'y' |in the open>") == 2 and "hf_$x" not in out.replace("< hf_$x \\ 'y' |", "")
    assert "bash -c" in out and out.count("in the open") == 2
    monkeypatch.setenv("HF_TOKEN", "two\nlines")
    assert tpu_vm.main([*given, shows]) == WRONG
    assert "the value of HF_TOKEN has several lines" in capfd.readouterr().err


def test_connections_are_made_in_batches(machines, program, tmp_path, monkeypatch, capfd):
    """No more at once than said: counted by the stub of ssh, which holds each back before it stands."""
    ssh = Path(shutil.which("ssh"))
    slow = SSH.format(python=sys.executable).replace(
        "home =", f"import time; f = {str(tmp_path)!r} + '/making-' + host; open(f, 'w').close(); n = len([x for x in "
        f"os.listdir({str(tmp_path)!r}) if x.startswith('making-')]); print(n, file=open({str(tmp_path)!r} + '/most', 'a'))\n"
        "time.sleep(0.15); os.remove(f)\nhome =", 1,
    )  # fmt: skip
    ssh.write_text(slow)
    assert tpu_vm.main(["hosts=a,b,c,d,e", "batch=2", "recipe=long_context", program("echo here")]) == DONE
    assert capfd.readouterr().out.count("here") == 5
    assert max(map(int, (tmp_path / "most").read_text().split())) <= 2


@pytest.mark.parametrize(
    ("first", "last", "code"), [(DIVERGED, 69, DIVERGED), (PREEMPTED, 69, PREEMPTED), (69, DIVERGED, DIVERGED)]
)
def test_it_ends_with_the_first_bad_code_after_the_others(machines, program, capfd, first, last, code):
    """Unless a later one says that to start again is of no use, as of a loss that diverged."""
    given = ["hosts=a,b", "cluster=manual", "recipe=long_context"]
    text = f'if [[ "$*" == *process_id=0 ]]; then sleep 0.5; echo last; exit {last}; fi; exit {first}'
    assert tpu_vm.main([*given, program(text)]) == code
    assert "[0] last" in capfd.readouterr().out


def test_the_others_have_an_end_too(machines, program, monkeypatch):
    monkeypatch.setattr(tpu_vm, "_PATIENCE", 0.5)
    given = ["hosts=a,b", "cluster=manual", "recipe=long_context"]
    start = time.monotonic()
    assert tpu_vm.main([*given, program('if [[ "$*" == *process_id=0 ]]; then exit 3; fi; exec sleep 60')]) == 3
    assert time.monotonic() - start < 20


def test_a_machine_that_cannot_be_reached_ends_the_others(machines, program, monkeypatch, capfd):
    monkeypatch.setenv("STUB_DEAD", "b")
    given = ["hosts=a,b", "cluster=manual", "recipe=long_context"]
    start = time.monotonic()
    waits = program("trap 'echo told; exit 75' TERM; for i in {1..600}; do sleep 0.1; done")
    assert tpu_vm.main([*given, waits]) == HOST_LOST and time.monotonic() - start < 30
    said = capfd.readouterr()
    assert "the connection to host 1 (b) cannot be made" in said.err and "[1] ssh: connect to host b" in said.out


def test_who_reads_no_further_stops_all_machines(machines, program, monkeypatch):
    """A line that nobody takes would hold up the machine that prints it."""
    reads, writes = os.pipe()
    os.close(reads)
    waits = program("trap 'exit 75' TERM; echo up; for i in {1..600}; do sleep 0.1; done")
    start = time.monotonic()
    with os.fdopen(writes, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        assert tpu_vm.main(["hosts=a,b", "cluster=manual", "recipe=long_context", waits]) == PIPE_CLOSED
    assert time.monotonic() - start < 30


def test_a_connection_that_ends_stops_its_command(machines, program, tmp_path):
    """As when the machine that ssh was started on is switched off."""
    waits = program(
        f"trap 'touch {tmp_path}/told; exit 75' TERM; touch {tmp_path}/up; for i in {{1..600}}; do sleep 0.1; done"
    )
    ((_, line),) = tpu_vm.connections_of(*tpu_vm.parse(["hosts=a", "recipe=long_context", waits]), "x")
    made = subprocess.Popen(line, stdin=subprocess.PIPE)
    made.stdin.write(b".\n")
    made.stdin.flush()
    deadline = time.monotonic() + 20
    while not (tmp_path / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    made.stdin.close()
    assert made.wait(20) == PREEMPTED and (tmp_path / "told").exists()


def test_the_code_is_copied_first(machines, program, capfd, monkeypatch):
    given = ["hosts=a,b", "sync=true", "dir=code", "recipe=long_context", program("true")]
    (Path(os.environ["STUB_HOMES"]) / "a" / "code").mkdir(parents=True)
    (Path(os.environ["STUB_HOMES"]) / "b" / "code").mkdir(parents=True)
    assert tpu_vm.main(given) == DONE
    calls = machines.read_text().splitlines()
    assert len(calls) == 2 and all(
        f" {ROOT}/{name} " in calls[0] for name in ("ejdist", "kernels", "launch", "recipes")
    )
    assert {c.split()[-1] for c in calls} == {"a:code/", "b:code/"}
    monkeypatch.setenv("RSYNC_CODE", "12")
    assert tpu_vm.main(given) == WRONG
    assert "sync=true: the code cannot be copied to a:code: exit code 12" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give tpu=NAME zone=ZONE for a TPU VM, queued=NAME zone=ZONE for a queued resource, or hosts=a,b,c"),
        (["hosts=a", "tpu=b"], "give tpu=NAME zone=ZONE for a TPU VM"),
        (["hosts=a,b,a"], "hosts = 'a,b,a' must name each once"),
        (["hosts=a,,b"], "hosts = 'a,,b' must name each once"),
        (["hosts=a", "zone=z"], "zone= is of tpu= and queued=, which is not given"),
        (["hosts=a", "iap=true"], "iap= is of tpu= and queued=, which is not given"),
        (["tpu=a", "zone=z", "sync=true", "dir=x"], "sync= is of hosts=, which is not given"),
        (["tpu=a", "zone=z", "ssh=ssh -v"], "ssh= is of hosts=, which is not given"),
        (["tpu=a", "queued=b", "zone=z"], "give tpu=NAME zone=ZONE for a TPU VM, queued=NAME zone=ZONE"),
        (["queued=a"], "queued= needs zone="),
        (["tpu=a", "zone=z", "iap=true", "internal_ip=true"], "are two ways to a machine: give one"),
        (["hosts=a", "env.HF_TOKEN=hf_x"], "env.HF_TOKEN is named as secrets are, and everybody would see it there"),
        (["hosts=a", "secrets=NOT_THERE"], "there is no NOT_THERE in this command's environment"),
        (["tpu=a,a", "zone=z"], "tpu = 'a,a' must name each once"),
        (["tpu=a"], "tpu= needs zone="),
        (["tpu=a", "zone=z", "cluster=manual"], "tpu= needs zone=, and cluster=auto"),
        (["hosts=a", "cluster=slurm"], "cluster=slurm is unknown; use one of auto, manual"),
        (["hosts=a", "coordinator=a:1"], "coordinator= is of cluster=manual"),
        (["hosts=a", "sync=true"], "sync=true needs dir="),
        (["hosts=a", "cluster.process_id=2"], "cluster.process_id=2 cannot be set here"),
        (["hosts=a", "modle=8b"], "did you mean 'model'"),
        (["hosts=-oProxyCommand=x,b"], "begins with a dash"),
        (["hosts=a", "cluster=manual", "coordinator=a:99999"], "coordinator = 'a:99999' must be HOST:PORT"),
        (["hosts=a", "ssh='"], 'ssh = "\'" cannot be read as a shell does'),
        (["hosts="], "hosts is empty"),
    ],
)
def test_called_wrongly(arguments, message, capsys):
    assert tpu_vm.main([*arguments, "recipe=long_context"]) == WRONG
    assert message in capsys.readouterr().err


def test_what_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert tpu_vm.main(["tpu=a", "zone=z", "recipe=long_context"]) == WRONG
    assert "there is no gcloud here" in capsys.readouterr().err
    assert tpu_vm.main(["hosts=a", "recipe=long_context"]) == WRONG
    assert "there is no ssh here" in capsys.readouterr().err
