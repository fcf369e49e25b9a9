"""`python -m launch.tpu_vm tpu=NAME zone=ZONE [KEY=VALUE ...]`, or with hosts=a,b,c: one run on all machines of a slice.

Starts the command on each by ssh, prints what each says with its number, and ends with the first exit code that is not 0, after
the others have ended too; with restarts= it starts a run again that was stopped or lost a machine. The first SIGINT or SIGTERM
is passed on as SIGTERM, at which the run ends its step and saves; a further one ends it at once. A run whose connection ends is
told to stop too: nothing is left behind on a machine.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

from ejdist.cluster.presence import START
from ejdist.cluster.verdict import again, of_start
from launch.errors import HOST_LOST, PREEMPTED, WRONG, run_command
from launch.flags import variable_of
from launch.options import help_of
from launch.tpu_vm_gcloud import ready, ssh_to
from launch.tpu_vm_options import Options, parse

_PAUSE = 10  # seconds before a run is started again
_PATIENCE = 150  # seconds that the others have to end once one has failed
_NO_CONNECTION = 255  # the exit code of ssh where it was the connection that failed
# A machine that does not answer, or is gone, is noticed in a minute.
_ALIVE = ["-o", "ConnectTimeout=60", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
_CODE = ("ejdist", "kernels", "launch", "recipes")
# Says that the connection stands, takes variables, as NAME=VALUE until a line with a dot, and runs the command. Then it passes
# on the names of signals that come in. Where nothing can come any more, the command is to stop.
_REMOTE = """exec 3<&0
echo {up}
while IFS= read -r -u 3 line && [ "$line" != . ]; do export "$line"; done
{command} 3<&- </dev/null &
run=$!
(while read -r name; do kill -s "$name" $run; done; kill -s TERM $run) <&3 >/dev/null 2>&1 &
reader=$!
wait $run; code=$?
kill $reader
exit $code"""


def remote(o: Options, arguments: Sequence[str], index: int, start: str) -> str:
    """Returns the command line for a machine's shell. `start`: an id that all machines have."""
    facts = ["cluster=auto"]
    if o.cluster == "manual":
        first = o.machines[0].rpartition("@")[2]
        facts = ["cluster=manual", f"cluster.coordinator={o.coordinator or f'{first}:8476'}"]
        facts += [f"cluster.num_processes={len(o.machines)}", f"cluster.process_id={index}"]
    command = [*shlex.split(o.python), "-m", f"launch.{o.command}"]
    lines = [_REMOTE.format(command=shlex.join([*command, *arguments, *facts]), up=shlex.quote(up(start)))]
    if o.dir:
        lines.insert(0, f"cd {_quoted_path(o.dir)} || exit {WRONG}")
    return f"bash -c {shlex.quote(chr(10).join(lines))}"


def up(start: str) -> str:
    """Returns the line by which a machine says that its connection stands."""
    return f"ejdist {start} is connected"


def variables(o: Options, start: str) -> list[str]:
    """Returns the environment of every process, as NAME=VALUE. It goes over the connection, and is on no command line."""
    passed = {name: os.environ[name] for name in o.passed}
    for name, value in passed.items():
        if "\n" in value:
            raise ValueError(f"secrets: the value of {name} has several lines; give it in one")
    flags = variable_of(o.generation, max(1, len(o.slices))) if o.flags else {}
    return [f"{name}={value}" for name, value in ({START: start} | flags | o.env | passed).items()]


def _quoted_path(path: str) -> str:
    """Returns a path for a shell, in which a first ~ or ~USER is that of the machine."""
    home, slash, rest = path.partition("/")
    return f"{home}{slash}{shlex.quote(rest) if rest else ''}" if re.fullmatch(r"~[\w.-]*", home) else shlex.quote(path)


def connections_of(o: Options, arguments: Sequence[str], start: str) -> list[tuple[str, list[str]]]:
    """Returns (the name of the machine, the command line) of each connection of a start. Raises ValueError."""
    if o.machines:
        ssh = [*shlex.split(o.ssh), "-o", "BatchMode=yes", *_ALIVE]
        return [(host, [*ssh, host, remote(o, arguments, i, start)]) for i, host in enumerate(o.machines)]
    workers = [(name, i) for name, count in ready(o).items() for i in range(count)]
    return [
        (f"worker {worker} of {name}", [*ssh_to(o, name, worker, remote(o, arguments, i, start)), "--", *_ALIVE])
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

    def __init__(self, commands: Sequence[tuple[str, Sequence[str]]], up: str, variables: Sequence[str]) -> None:
        """Takes a list of (machine name, command line), the line by which a machine says that its connection stands, and what
        it is told then: variables, as NAME=VALUE."""
        self._commands, self._up, self._told, self._unread = [*commands], up, 0, False
        self._hello = "".join(f"{line}\n" for line in [*variables, "."]).encode()
        self.told_by_signal = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._standing: set[int] = set()
        self._failed: list[tuple[int, int]] = []  # (machine, exit code), in the order of time

    def start(self, batch: int) -> None:
        """Starts the commands, `batch` of them at once until their connections stand: each may be a Python of its own."""
        for i, (_, line) in enumerate(self._commands):
            while len(self._in_making()) >= batch and self._told == 0:
                time.sleep(0.02)
            if self._told:
                return
            # Of a session of their own: Ctrl-C is for this process, which passes it on.
            process = subprocess.Popen(
                line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
            self._processes.append(process)
            self._readers.append(threading.Thread(target=self._tell, args=(i,), daemon=True))
            self._readers[-1].start()

    def _in_making(self) -> list[int]:
        return [i for i, p in enumerate(self._processes) if i not in self._standing and p.poll() is None]

    def _tell(self, index: int) -> None:
        for line in self._processes[index].stdout or ():
            text = line.decode(errors="replace").rstrip("\r\n")
            if text == self._up and index not in self._standing:
                self._write(index, self._hello)
                self._standing.add(index)
                if self._told:  # before it was there to hear it
                    self._write(index, b"TERM\n")
                continue
            try:
                sys.stdout.write(f"[{index}] {text}\n")
                sys.stdout.flush()
            except BrokenPipeError:
                # The rest is read all the same: a machine whose output is not read would block for ever.
                self._unread = True

    def _write(self, index: int, what: bytes) -> None:
        stdin = self._processes[index].stdin
        if stdin is not None:
            try:
                os.write(stdin.fileno(), what)
            except OSError:  # it has just ended
                pass

    def stop(self, *of_signal: Any) -> None:
        """Tells all commands to stop: the first time to save, and then at once."""
        self.told_by_signal = self.told_by_signal or bool(of_signal)
        self._told += 1
        self._send("TERM" if self._told == 1 else "KILL")

    def _send(self, name: str) -> None:
        for i, process in enumerate(self._processes):
            if process.poll() is None:
                self._write(i, f"{name}\n".encode())

    def wait(self) -> int:
        """Returns the exit code of the start, after all have ended. Raises BrokenPipeError, after they have been told to stop,
        where nobody reads what they print."""
        if len(self._processes) < len(self._commands):  # told to stop before all were started
            self._send("KILL")
            return PREEMPTED
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
                f"error: the connection to host {index} ({self._commands[index][0]}) cannot be made, or has ended; the others "
                "are told to stop, and the same command resumes from the last checkpoint. ssh asks nothing here: of a new "
                "machine it must know the key first, as after one connection by hand",
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
        left = options.restarts
        while True:
            code, stopped = _start(options, rest)
            if stopped or left < 1 or not again(code):
                return code
            print(f"the run ended with exit code {code}, and is started again, {left} of {options.restarts} times left")
            time.sleep(_PAUSE)
            left -= 1
    except FileNotFoundError as error:
        raise ValueError(f"there is no {error.filename} here; install it, or start this where there is") from error


def _start(options: Options, rest: Sequence[str]) -> tuple[int, bool]:
    """Returns the exit code of a start, and whether this process was told to stop."""
    start = uuid.uuid4().hex
    connections = Connections(connections_of(options, rest, start), up(start), variables(options, start))
    before = {number: signal.signal(number, connections.stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        connections.start(options.batch)
        return connections.wait(), connections.told_by_signal
    finally:
        connections.close()
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
