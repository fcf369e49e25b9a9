"""`python -m launch.tpu_vm tpu=NAME zone=ZONE [KEY=VALUE ...]`, or with hosts=a,b,c: one run on all machines of a slice.

Starts the command on each by ssh, prints what each says with its number, and ends with the first exit code that is not 0, after
the others have ended too; with restarts= it starts a run again that was stopped or lost a machine. The first SIGINT or SIGTERM
is passed on as SIGTERM, at which the run ends its step and saves; a further one ends it at once. A run whose connection ends is
told to stop too: nothing is left behind on a machine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ejdist.cluster.presence import START
from ejdist.cluster.verdict import again, of_start
from launch.errors import HOST_LOST, WRONG, run_command
from launch.options import VARIABLES, check_run, command_option, help_of, option, read

_PAUSE = 10  # seconds before a run is started again
_PATIENCE = 150  # seconds that the others have to end once one has failed
_NO_CONNECTION = 255  # the exit code of ssh where it was the connection that failed
_ALIVE = [
    "-o",
    "ServerAliveInterval=15",
    "-o",
    "ServerAliveCountMax=4",
]  # a machine that is gone is noticed in a minute
_CODE = ("ejdist", "kernels", "launch", "recipes")
# Runs the command, and passes on the names of signals that come in. Where nothing can come any more, the command is to stop.
_REMOTE = """exec 3<&0
{command} 3<&- </dev/null &
run=$!
(while read -r name; do kill -s "$name" $run; done; kill -s TERM $run) <&3 >/dev/null 2>&1 &
reader=$!
wait $run; code=$?
kill $reader
exit $code"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The machines; the rest of the command line is the recipe's."""

    tpu: str = option("", "the name of a TPU VM, whose machines gcloud knows; of several slices, as a,b in their order")
    zone: str = option("", "of the TPU VMs")
    project: str = option("", "of the TPU VMs; else that of gcloud")
    hosts: str = option("", "machines, as a,b,c, for plain ssh; the first is process 0")
    cluster: str = option(
        "auto", "auto: the machines of a slice find each other; manual: any machines", choices=("auto", "manual")
    )
    coordinator: str = option("", "HOST:PORT of process 0 for the others; default: port 8476 of the first of hosts")
    dir: str = option("", "the folder on each machine to start the command in", free=True)
    sync: bool = option(False, "copy this project's code into dir first, by rsync")
    ssh: str = option("ssh", "how ssh is started", program=True)
    python: str = option("python3", "the Python command on a machine", program=True)
    restarts: int = option(0, "how often a run that was stopped or lost a machine is started again", least=0)
    env: dict[str, str] = field(default_factory=dict, metadata=VARIABLES)
    command: str = command_option()

    @property
    def machines(self) -> list[str]:
        return self.hosts.split(",") if self.hosts else []

    @property
    def slices(self) -> list[str]:
        return self.tpu.split(",") if self.tpu else []


def parse(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Returns (the machines, the run's arguments). Raises ValueError, naming the argument."""
    o, rest = read(Options, argv)
    if bool(o.tpu) == bool(o.hosts):
        raise ValueError("give tpu=NAME zone=ZONE for a TPU VM, or hosts=a,b,c for plain ssh")
    foreign = ("coordinator", "sync") if o.tpu else ("zone", "project")
    if misplaced := [name for name in foreign if getattr(o, name)]:
        raise ValueError(f"{misplaced[0]}= is of {'hosts=' if o.tpu else 'tpu='}, which is not given")
    if o.tpu and (not o.zone or o.cluster != "auto"):
        raise ValueError("tpu= needs zone=, and cluster=auto: its machines know each other")
    for name, machines in (("hosts", o.machines), ("tpu", o.slices)):
        if not all(machines) or len(set(machines)) < len(machines):
            raise ValueError(f"{name} = {','.join(machines)!r} must name each once, with a comma between two")
        if any(one.startswith("-") for one in machines):
            raise ValueError(f"{name} = {','.join(machines)!r}: a name that begins with a dash would be an ssh option")
    if o.coordinator and o.cluster != "manual":
        raise ValueError("coordinator= is of cluster=manual, which is not given")
    if o.coordinator:
        from ejdist.cluster.section import check_address

        check_address("coordinator", o.coordinator)
    if o.sync and not o.dir:
        raise ValueError("sync=true needs dir=, the folder of each machine that the code is copied to")
    check_run(rest, "launch.tpu_vm sets how the processes find each other")
    return o, rest


def remote(o: Options, arguments: Sequence[str], index: int, start: str) -> str:
    """Returns the command line for a machine's shell. `start`: an id that all machines have."""
    facts = ["cluster=auto"]
    if o.cluster == "manual":
        first = o.machines[0].rpartition("@")[2]
        facts = ["cluster=manual", f"cluster.coordinator={o.coordinator or f'{first}:8476'}"]
        facts += [f"cluster.num_processes={len(o.machines)}", f"cluster.process_id={index}"]
    variables = [f"{name}={value}" for name, value in ({START: start} | o.env).items()]
    command = ["env", *variables, *shlex.split(o.python), "-m", f"launch.{o.command}"]
    lines = [_REMOTE.format(command=shlex.join([*command, *arguments, *facts]))]
    if o.dir:
        lines.insert(0, f"cd {_quoted_path(o.dir)} || exit {WRONG}")
    return f"bash -c {shlex.quote(chr(10).join(lines))}"


def _quoted_path(path: str) -> str:
    """Returns a path for a shell, in which a first ~ or ~USER is that of the machine."""
    home, slash, rest = path.partition("/")
    return f"{home}{slash}{shlex.quote(rest) if rest else ''}" if re.fullmatch(r"~[\w.-]*", home) else shlex.quote(path)


def _of_gcloud(o: Options, verb: str, name: str, *more: str) -> list[str]:
    project = [f"--project={o.project}"] if o.project else []
    return ["gcloud", "compute", "tpus", "tpu-vm", verb, name, f"--zone={o.zone}", *project, *more]


def _workers(o: Options, name: str) -> int:
    """Returns how many machines a TPU VM has. Raises ValueError with what gcloud says, or if it has none yet."""
    ran = subprocess.run(_of_gcloud(o, "describe", name, "--format=json"), capture_output=True, text=True, check=False)
    if ran.returncode:
        raise ValueError(f"tpu = {name!r}: gcloud says: {' '.join(ran.stderr.split()) or 'nothing'}")
    try:
        description = json.loads(ran.stdout)
        count, state = len(description.get("networkEndpoints", ())), description.get("state", "unknown")
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"tpu = {name!r}: gcloud describes it as {ran.stdout.strip()[:80]!r}, which is not a TPU VM"
        ) from error
    if not count:
        raise ValueError(f"tpu = {name!r} has no machines; its state is {state}: start this again once it is READY")
    return count


def connections_of(o: Options, arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns (the name of the machine, the command line) of each connection of a new start. Raises ValueError."""
    start = uuid.uuid4().hex
    if o.machines:
        ssh = [*shlex.split(o.ssh), "-o", "BatchMode=yes", *_ALIVE]
        return [(host, [*ssh, host, remote(o, arguments, i, start)]) for i, host in enumerate(o.machines)]
    workers = [(name, i) for name in o.slices for i in range(_workers(o, name))]
    return [
        (
            f"worker {worker} of {name}",
            _of_gcloud(
                o, "ssh", name, f"--worker={worker}", f"--command={remote(o, arguments, i, start)}", "--", *_ALIVE
            ),
        )
        for i, (name, worker) in enumerate(workers)
    ]


def copy_code(o: Options) -> None:
    """Copies this project's packages to every machine. Raises ValueError, naming the machine."""
    root = Path(__file__).resolve().parent.parent
    sources = [str(root / name) for name in _CODE]

    def one(host: str) -> str | None:
        line = ["rsync", "-a", "--delete", "--exclude=__pycache__", "-e", o.ssh, *sources, f"{host}:{o.dir}/"]
        ran = subprocess.run(line, capture_output=True, text=True, check=False)
        return None if ran.returncode == 0 else (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]

    with ThreadPoolExecutor(16) as pool:
        for host, failure in zip(o.machines, pool.map(one, o.machines)):
            if failure is not None:
                raise ValueError(f"sync=true: the code cannot be copied to {host}:{o.dir}: {failure}")


class Connections:
    """The commands on all machines: their lines are printed as they come, and signals go to all of them."""

    def __init__(self, commands: Sequence[tuple[str, Sequence[str]]]) -> None:
        """Starts the commands: a list of (machine name, command line)."""
        self._names, self._told, self._unread = [name for name, _ in commands], 0, False
        self.told_by_signal = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._failed: list[tuple[int, int]] = []  # (machine, exit code), in the order of time
        for _, line in commands:
            # Of a session of their own: Ctrl-C is for this process, which passes it on.
            process = subprocess.Popen(
                line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
            self._processes.append(process)
        self._readers = [threading.Thread(target=self._tell, args=(i,), daemon=True) for i in range(len(commands))]
        for reader in self._readers:
            reader.start()

    def _tell(self, index: int) -> None:
        for line in self._processes[index].stdout or ():
            text = line.decode(errors="replace").rstrip("\r\n")
            try:
                sys.stdout.write(f"[{index}] {text}\n")
                sys.stdout.flush()
            except BrokenPipeError:
                # The rest is read all the same: a machine whose output is not read would block for ever.
                self._unread = True

    def stop(self, *of_signal: Any) -> None:
        """Tells all commands to stop: the first time to save, and then at once."""
        self.told_by_signal = self.told_by_signal or bool(of_signal)
        self._told += 1
        self._send("TERM" if self._told == 1 else "KILL")

    def _send(self, name: str) -> None:
        for process in self._processes:
            if process.poll() is None and process.stdin is not None:
                try:
                    os.write(process.stdin.fileno(), f"{name}\n".encode())
                except OSError:  # it has just ended
                    continue

    def wait(self) -> int:
        """Returns the exit code of the start, after all have ended. Raises BrokenPipeError, after they have been told to stop,
        where nobody reads what they print."""
        ended: set[int] = set()
        end = float("inf")
        while len(ended) < len(self._processes):
            for i, process in enumerate(self._processes):
                if i not in ended and (code := process.poll()) is not None:
                    ended.add(i)
                    if code:
                        end = min(end, time.monotonic() + _PATIENCE)
                        self._note(i, code)
            if self._unread and self._told == 0:
                self.stop()
            if time.monotonic() > end:
                self._send("KILL")
                end = time.monotonic() + _PATIENCE
            time.sleep(0.05)
        for reader in self._readers:
            reader.join(10)
        if self._unread:
            raise BrokenPipeError
        return of_start([HOST_LOST if code == _NO_CONNECTION else code for _, code in self._failed])

    def _note(self, index: int, code: int) -> None:
        self._failed.append((index, code))
        if code == _NO_CONNECTION:
            print(
                f"error: the connection to host {index} ({self._names[index]}) cannot be made, or has ended; the others are "
                "told to stop, and the same command resumes from the last checkpoint",
                file=sys.stderr,
            )
            if self._told == 0:
                self.stop()

    def close(self) -> None:
        """Closes the remaining connections."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                try:
                    process.stdin.close()
                except OSError:
                    continue


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    usage = f"{__doc__}\nmachine options, with their defaults:\n{help_of(Options)}"
    return run_command(argv, _main, lambda _: usage)


def _main(arguments: list[str]) -> int:
    options, rest = parse(arguments)
    try:
        if options.sync:
            copy_code(options)
        for left in range(options.restarts, -1, -1):
            code, stopped = _start(options, rest)
            if stopped or not left or not again(code):
                break
            print(f"the run ended with exit code {code}, and is started again, {left} of {options.restarts} times left")
            time.sleep(_PAUSE)
    except FileNotFoundError as error:
        raise ValueError(f"there is no {error.filename} here; install it, or start this where there is") from error
    return code


def _start(options: Options, rest: Sequence[str]) -> tuple[int, bool]:
    """Returns the exit code of a start, and whether this process was told to stop."""
    connections = Connections(connections_of(options, rest))
    before = {number: signal.signal(number, connections.stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return connections.wait(), connections.told_by_signal
    finally:
        connections.close()
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
