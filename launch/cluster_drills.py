"""The drills of `launch.rehearse` about who takes part: others come to the coordinator or the folder, and hosts go."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ejdist.cluster.presence import START
from ejdist.cluster.verdict import FILE
from launch.errors import BAD_CHECKPOINT, BUG, DONE, HOST_LOST, WRONG
from launch.processes import Job, free_port
from launch.scenes import GONE, Disturbance, Scene

_TIMES = 3  # how often others come, at random moments, in one run
_LASTS = 60.0  # seconds that the steps of a run take to which others come
_MOST = 120.0  # seconds in which whoever is turned away must have ended
# What any program of JAX does, without the commands of this project.
_STRAY = (
    "import jax, sys; jax.config.update('jax_platforms', 'cpu'); "
    "jax.distributed.initialize(sys.argv[1], {count}, {index}, initialization_timeout=5)"
)


def _second_start(s: Scene) -> Disturbance:
    return _intruded(s, f"the same command is started again {_TIMES} times", "launch.train")


def _doctor_beside(s: Scene) -> Disturbance:
    return _intruded(s, f"launch.doctor is started {_TIMES} times with the arguments of the run", "launch.doctor")


def _stray_client(s: Scene) -> Disturbance:
    return _intruded(s, f"other programs connect to the coordinator's port as processes of the run, {_TIMES} times", "")


def _intruded(s: Scene, description: str, command: str) -> Disturbance:
    moments = sorted(s.chance.uniform(0.0, _LASTS) for _ in range(_TIMES))

    def beside(job: Job, arguments: Sequence[str]) -> list[str]:
        wrong, began = [], time.monotonic()
        for n, moment in enumerate(moments):
            time.sleep(max(0.0, began + moment - time.monotonic()))
            if all(p.poll() is not None for p in job.processes):
                return [*wrong, f"the run had ended {moment:.0f} s after its start, before others came"]
            wrong += _come(job, command, s.folder / "others" / str(n), s.chance)
        return wrong

    pace: Mapping[int, Mapping] = {i: {"do": "sleep", "seconds": 2 * _LASTS / s.steps} for i in range(s.hosts)}
    expected = ("turned away at port",) if s.hosts > 1 else ()
    return Disturbance(description, (DONE,), inside=pace, beside=beside, says=expected)


def _come(job: Job, command: str, logs: Path, chance: random.Random) -> list[str]:
    """Starts others beside the processes of a run; returns what is wrong with how they end."""
    logs.mkdir(parents=True)
    address = next((w.partition("=")[2] for w in job.lines[0] if w.startswith("cluster.coordinator=")), "")
    # By hand, and not by the launcher of the run.
    variables = {k: v for k, v in job.variables.items() if k not in (START, FILE)}
    processes = []
    for i, line in enumerate(job.lines):
        if command:
            position = next(n for n, word in enumerate(line) if word in ("launch.train", "launch.disturbed"))
            words = [w for w in line[position + 1 :] if not w.startswith("{")]
            line = [sys.executable, "-P", "-m", command, *words]
        else:
            line = [sys.executable, "-c", _STRAY.format(count=job.count, index=max(1, i)), address]
        with (logs / f"host-{i}.log").open("wb") as log:
            processes.append(subprocess.Popen(line, stdout=log, stderr=log, env=variables, process_group=0))
    end, wrong = time.monotonic() + _MOST, []
    for i, process in enumerate(processes):
        try:
            code = process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            wrong.append(f"process {i} of {command or 'a stray client'} had not ended after {_MOST:g} s, see {logs}")
            continue
        output = (logs / f"host-{i}.log").read_text(errors="replace")
        if command and code != WRONG:
            wrong.append(f"process {i} of {command} ended with {code}, and not with {WRONG}, see {logs}")
        elif command and job.count > 1 and "launch.train with run.dir = " not in output:
            wrong.append(f"process {i} of {command} does not say which run has the address, see {logs}")
        elif not command and code == 0:
            wrong.append(f"process {i} of a stray client has joined, see {logs}")
    return wrong


def _twice(s: Scene) -> Disturbance:
    """Two starts in one folder, each with an address of its own: a user who is impatient, or a job that is queued again."""
    delay = s.chance.choice([0.0, 0.0, s.chance.uniform(0, 20)])

    def beside(job: Job, arguments: Sequence[str]) -> list[str]:
        time.sleep(delay)
        other = Job(job.count, s.folder / "others", job.devices, (sys.executable, "-P", "-m", "launch.train"))
        other.start(arguments)
        codes = [other.wait(600), [p.wait() for p in job.processes]]
        if sorted(codes) != [[DONE] * job.count, [WRONG] * job.count]:
            return [f"the two starts ended with {codes}: one must end its run, and one be refused"]
        refused = other if codes[0][0] == WRONG else job
        if "another process" not in refused.log(0).read_text():
            return ["the start that was refused does not say that another one has the folder"]
        return []

    # Shorter than the patience with an owner, but not by far: one that ends sooner is waited for.
    pace: Mapping[int, Mapping] = {i: {"do": "sleep", "seconds": 1.5 * _LASTS / s.steps} for i in range(s.hosts)}
    return Disturbance(
        f"the run is started twice in one folder, {delay:.1f} s apart",
        (DONE, WRONG),
        inside=pace,
        beside=beside,
        again=False,
    )


def _crash(s: Scene) -> Disturbance:
    host, step = s.host(), s.step()
    number = s.chance.choice([signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT])
    doing = {"do": "signal", "number": int(number), "step": step}
    return Disturbance(
        f"host {host} dies by {number.name} at step {step}",
        (*GONE, -int(number)),
        inside={host: doing},
        says=(f"host {host} (",) if s.hosts > 1 else (),
    )


def _silent(s: Scene) -> Disturbance:
    host, step = s.host(), s.step()
    doing = {"do": "signal", "number": int(signal.SIGSTOP), "step": step}
    return Disturbance(
        f"host {host} is stopped (SIGSTOP) at step {step}, and gives no sign of life",
        (*GONE, None),
        inside={host: doing},
        says=(f"host {host} (", "has shown no sign of life for 3"),
    )


def _bug(s: Scene) -> Disturbance:
    host, step = s.host(), s.step()
    return Disturbance(
        f"an assertion fails on host {host} at step {step}",
        (BUG, HOST_LOST, -6),
        inside={host: {"do": "bug", "step": step}},
        says=("Traceback",),
        says_all=("a bug of the drill",),
        again=False,
    )


def _device(s: Scene) -> Disturbance:
    host, step = s.host(), s.step()
    return Disturbance(
        f"a device of host {host} raises an ECC error at step {step}",
        (HOST_LOST, -6),
        inside={host: {"do": "device", "step": step}},
        says_all=("ECC_UNCORRECTABLE",),
    )


def _disk_full_on_one(s: Scene) -> Disturbance:
    step = s.save()
    return Disturbance(
        f"no room for files of host 0 from the save of step {step} on",
        (BAD_CHECKPOINT, WRONG, *GONE),
        inside={0: {"do": "no_room", "step": step}},
        says_all=("could not be written",),
        again=False,
    )


def _replaced(s: Scene) -> Disturbance:
    """Each host has a disk of its own for `checkpoint.local`, and that of the one that is killed is empty afterwards."""
    from recipes.schema import compose

    host, step = s.host(), s.step()
    if (step - 1) % s.every == 0:  # then the step before is saved in run.dir
        step += 1 if step + 1 < s.steps else -1
    disks = {i: s.folder / "disks" / str(i) for i in range(s.hosts)}
    actions: dict[int, dict[str, Any]] = {i: {"do": "sleep", "seconds": 0.2, "disk": str(d)} for i, d in disks.items()}
    tier = [f"checkpoint.local={s.folder / 'disks'}", "checkpoint.local_every=1"]
    kill = {"do": "signal", "number": int(signal.SIGKILL), "step": step}
    # With one replica the state may be divided among the hosts: what was on that disk is then on no other.
    elsewhere = compose(list(s.arguments)).mesh.dp > 1
    return Disturbance(
        f"the machine of host {host} is replaced at step {step} by one with an empty disk",
        GONE,
        arguments=tier,
        inside=actions | {host: actions[host] | kill},
        after=lambda run: shutil.rmtree(disks[host]),
        resumed=Disturbance("", (DONE,), arguments=tier, inside=actions),
        says_after=(f"resuming from step {step - 1} of", f" pieces for host {host} from others") if elsewhere else (),
    )


def _port_taken(s: Scene) -> Disturbance:
    other = socket.create_server(("localhost", free_port()))
    address = f"cluster.coordinator=localhost:{other.getsockname()[1]}"
    return Disturbance(
        "another program listens at the coordinator's address",
        (WRONG, HOST_LOST),
        of_host={i: [address] for i in range(s.hosts)},
        arguments=["cluster.timeout=20"],
        says=("cannot listen on port",),
        says_all=(address.partition(":")[2],),
        again=False,
        held=other,
        goes_on=False,
        writes=False,
    )


CLUSTER_DRILLS: dict[str, Callable[[Scene], Disturbance]] = {
    "second_start": _second_start,
    "doctor_beside": _doctor_beside,
    "stray_client": _stray_client,
    "twice": _twice,
    "crash": _crash,
    "silent": _silent,
    "bug": _bug,
    "device": _device,
    "disk_full_on_one": _disk_full_on_one,
    "port_taken": _port_taken,
    "replaced": _replaced,
}
