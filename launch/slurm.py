"""`python -m launch.slurm nodes=4 gpus_per_node=8 time=1-00:00:00 [KEY=VALUE ...]`: a batch script that trains on Slurm.

Prints the script, or hands it to sbatch with submit=true. The run ends by itself before the time is up, saves, and is queued
again, as it is when it is preempted or loses a process; it then goes on. One that would only end in the same way is not.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ejdist.cluster.presence import START
from ejdist.cluster.verdict import FILE, NO_USE
from launch.errors import run_command
from launch.flags import FLAGS, GPU, variable_of
from launch.options import (
    check_run,
    command_option,
    flags_option,
    help_of,
    option,
    read,
    shared_cache,
    show_or_submit,
)  # fmt: skip

# What sbatch reads in a line of a script as it is: to it, too, quotes and "#" mean something.
_PLAIN = (", of letters, digits and %+,-./:=@_", r"[\w%+,\-./:=@]+")
# Options of sbatch and srun that the script has by others of this command.
_OWN = {
    "-N": "nodes", "--nodes": "nodes", "-n": "tasks_per_node", "--ntasks": "tasks_per_node",
    "--ntasks-per-node": "tasks_per_node", "-G": "gpus_per_node", "--gpus": "gpus_per_node",
    "--gpus-per-node": "gpus_per_node", "-t": "time", "--time": "time", "-J": "name",
    "--job-name": "name", "-p": "partition", "--partition": "partition", "-A": "account", "--account": "account",
    "-q": "qos", "--qos": "qos", "-o": "log", "--output": "log", "--signal": "grace",
    "--requeue": "restarts", "--no-requeue": "restarts", "-c": "cpus_per_task", "--cpus-per-task": "cpus_per_task",
    "--exclusive": "exclusive", "--mem": "mem", "--mem-per-cpu": "mem", "--mem-per-gpu": "mem",
}  # fmt: skip
_OF_STEP = ("-l", "--label", "-W", "--wait", "--gpu-bind")  # options of srun that the script always has
_FREE = ("-o", "--output")  # of srun, where it may be a file for each task
# Of a job: the range of ports that JAX takes one from, above those that Linux gives to connections.
_PORTS, _FIRST_PORT = 4096, 61440


@dataclass(frozen=True)
class Options:
    """The Slurm options; the rest of the command line is the recipe's."""

    nodes: int = option(1, "machines")
    tasks_per_node: int | None = option(None, "processes per machine; default: one per GPU, or one")
    gpus_per_node: int = option(0, "GPUs of a machine", least=0)
    exclusive: bool = option(True, "whole machines: all their CPUs and memory, and no other job on them")
    cpus_per_task: int | None = option(None, "CPUs of each process; default: those of the machine, shared equally")
    mem: str = option(
        "", "memory of a machine, as 64G; default: all of it, or the partition's with exclusive=false",
        pattern=r"\d+[KMGT]?",
    )  # fmt: skip
    time: str = option(
        "",
        "as Slurm writes it: minutes, HH:MM:SS or DAYS-HH:MM:SS",
        pattern=r"(\d+-)?\d+(:\d+){0,2}",
    )
    name: str = option("ejdist", f"of the job{_PLAIN[0]}", pattern=_PLAIN[1])
    partition: str = option("", f"where it is queued{_PLAIN[0]}", pattern=_PLAIN[1])
    account: str = option("", f"who pays for it{_PLAIN[0]}", pattern=_PLAIN[1])
    qos: str = option("", f"the quality of service{_PLAIN[0]}", pattern=_PLAIN[1])
    log: str = option("%x-%j.log", f"one file for all restarts of the job{_PLAIN[0]}", pattern=_PLAIN[1])
    grace: int = option(300, "seconds before the time limit at which the run is told to stop", least=0, most=65535)
    restarts: int = option(100, "how often it may be requeued", least=0)
    gpu: str = option(
        "", "the kind of GPU, for its compiler flags", choices=[k for k in FLAGS if GPU in variable_of(k)]
    )
    flags: bool = flags_option()
    python: str = option("python", "the Python command on a node", program=True)
    sbatch: str = option("", "other options of sbatch, as they are", program=True)
    srun: str = option("", "other options of srun, as they are, such as those for a container", program=True)
    command: str = command_option()
    submit: bool = option(False, "submit the script with sbatch")

    @property
    def tasks(self) -> int:
        return self.tasks_per_node or max(1, self.gpus_per_node)


def parse(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Returns (the Slurm options, the run's arguments). Raises ValueError, naming the argument."""
    options, rest = read(Options, argv)
    if options.gpus_per_node and options.gpus_per_node % options.tasks:
        raise ValueError(
            f"gpus_per_node = {options.gpus_per_node} must be a multiple of tasks_per_node = {options.tasks}"
        )
    _check_others("sbatch", options.sbatch)
    _check_others("srun", options.srun)
    if not options.exclusive and options.cpus_per_task is None:
        raise ValueError(
            "exclusive=false needs cpus_per_task=: Slurm would give each process one CPU, which XLA, NCCL and the data share"
        )
    seconds = _seconds(options.time)
    if 0 < seconds <= options.grace:
        raise ValueError(
            f"time = {options.time!r} is {seconds} s, and the run is told to stop grace = {options.grace} s before their end: "
            "it would make no step; give more time, or a smaller grace="
        )
    devices = options.nodes * options.gpus_per_node or None
    recipe = check_run(rest, "Slurm sets how the processes find each other", devices)
    if options.gpu and not options.gpus_per_node:
        raise ValueError(f"gpu = {options.gpu!r} says the kind of gpus_per_node=, which is not given")
    keeps = options.gpus_per_node and options.command == "train"  # on CPUs there is no cache
    return options, [*rest, *(shared_cache(rest, recipe, os.environ) if keeps else ())]


def _check_others(key: str, options: str) -> None:
    """Raises ValueError for an option of sbatch or srun that the script has already."""
    for word in shlex.split(options):
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        if key == "srun" and name in _OF_STEP:
            raise ValueError(f"srun = {options!r}: the script has {name} already; leave it out")
        if name in _OWN and not (key == "srun" and name in _FREE):
            raise ValueError(f"{key} = {options!r}: {name} is what {_OWN[name]}= says; give that")


def _seconds(time: str) -> int:
    """Returns the seconds of a Slurm time limit; 0 means no limit, as in Slurm."""
    days, dash, clock = time.rpartition("-")
    numbers = [int(n) for n in clock.split(":")] if clock else [0]
    # With days hours come first; without, one number is minutes, and two are minutes and seconds.
    units = (3600, 60, 1) if dash or len(numbers) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(n * unit for n, unit in zip(numbers, units))


def script(o: Options, arguments: Sequence[str]) -> str:
    """Returns the batch script."""
    asked = {
        "job-name": o.name, "nodes": o.nodes, "ntasks-per-node": o.tasks, "gpus-per-node": o.gpus_per_node or None,
        "exclusive": "", "cpus-per-task": o.cpus_per_task, "mem": _memory(o), "time": o.time, "partition": o.partition,
        "account": o.account, "qos": o.qos, "output": o.log, "open-mode": "append", "signal": f"TERM@{o.grace}",
        "requeue": "",
    }  # fmt: skip
    bare = {"requeue"} | ({"exclusive"} if o.exclusive else set())
    lines = [
        f"#SBATCH --{name}" + (f"={value}" if value else "") for name, value in asked.items() if value or name in bare
    ]
    lines += [f"#SBATCH {o.sbatch}"] if o.sbatch else []
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# Made by python -m launch.slurm for {o.nodes} nodes of {o.tasks} process{'es' * (o.tasks > 1)}. "
            "Queue it with sbatch.",
            *lines,
            "set -u",
            f'export {START}="$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}"  # of which all processes of this start are',
            *(f'export {name}="${{{name}:-{value}}}"' for name, value in _flags(o).items()),
            *(_verdict() if o.command == "train" else ()),
            "# Process 0 is on the first node, by Slurm's own list: it may be of any form, such as rack[1-4]node[1-8].",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"port=$((SLURM_JOB_ID % {_PORTS} + {_FIRST_PORT}))",
            *(() if o.cpus_per_task else _cpus(o)),
            "# A batch shell that is told to stop waits for the run, which is told too, saves, and ends.",
            "trap : TERM",
            *(["# shellcheck disable=SC2016  # what is quoted is for the shell of each task"] if _split(o) else []),
            f"{_step(o, arguments)} &",
            "run=$!",
            "wait $run; code=$?",
            "while kill -0 $run 2>/dev/null; do wait $run; code=$?; done",
            f'echo "launch.{o.command} ended with exit code $code, requeued ${{SLURM_RESTART_COUNT:-0}} times"',
            *(_queued_again(o) if o.command == "train" else ()),
            'exit "$code"',
            "",
        ]
    )


def _flags(o: Options) -> dict[str, str]:
    return variable_of(o.gpu) if o.flags and o.gpu else {}


def _memory(o: Options) -> str:
    return o.mem or ("0" if o.exclusive else "")  # 0: all of the machine's


def _cpus(o: Options) -> list[str]:
    return [
        "# Without a number srun gives each process one CPU, of however many the job has.",
        f"cpus=$((SLURM_CPUS_ON_NODE / {o.tasks})); if [ $cpus -eq 0 ]; then cpus=1; fi",
    ]


def _step(o: Options, arguments: Sequence[str]) -> str:
    """Returns the command that starts the processes, for the shell."""
    # --wait: seconds that the other tasks have once one has ended. --label: whose line it is.
    step = ["srun", "--wait=300", "--label", *([f"--mem={memory}"] if (memory := _memory(o)) else [])]
    cpus = f"--cpus-per-task={o.cpus_per_task}" if o.cpus_per_task else '--cpus-per-task="$cpus"'
    # All GPUs of a node are visible to each of its tasks, and JAX takes its own: so they reach each other by NVLink.
    words = [*(["--gpu-bind=none"] if o.gpus_per_node else []), *shlex.split(o.srun)]
    each = o.gpus_per_node // o.tasks
    if _split(o):
        words += ["bash", "-c", _GPUS.format(each=each, last=each - 1), "gpus"]
    words += [*shlex.split(o.python), "-m", f"launch.{o.command}", *arguments, "cluster=auto"]
    if each > 1 and o.tasks == 1:
        words.append(f"cluster.local_device_ids=[{','.join(map(str, range(each)))}]")
    return f'{shlex.join(step)} {cpus} {shlex.join(words)} "cluster.coordinator=$first:$port"'


def _split(o: Options) -> bool:
    """Returns whether a machine has several tasks with several GPUs each."""
    return 1 < o.tasks < o.gpus_per_node


# Of a task that is one of several of a machine. JAX would take one GPU, by the task's number.
_GPUS = (
    'first=$((SLURM_LOCALID * {each})); export JAX_LOCAL_DEVICE_IDS="$(seq -s , $first $((first + {last})))"; exec "$@"'
)


def _verdict() -> list[str]:
    return [
        f'export {FILE}="$PWD/.ejdist-$SLURM_JOB_ID"  # where a process leaves why the run ends',
        f'rm -f "${FILE}"',
    ]


def _queued_again(o: Options) -> list[str]:
    no_use = "|".join(map(str, sorted(NO_USE)))
    return [
        "# srun returns the highest code of all tasks, and who loses another one ends with a higher one than who has a reason.",
        f'if [ $code -ne 0 ] && [ -s "${FILE}" ]; then',
        f'  read -r left why <"${FILE}"',
        "  # A reason that claims code 0 is no end of a run that has failed.",
        '  if [ "$left" -gt 0 ] 2>/dev/null; then code=$left; echo "the run ended with exit code $code, by $why"; fi',
        "fi",
        f'rm -f "${FILE}"',
        "case $code in",
        "  0) ;;",
        f'  {no_use}) echo "not queued again: a new start would end in the same way" ;;',
        "  *)  # stopped by a signal and saved, or a process or node was lost: the same command resumes",
        f'    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {o.restarts} ]; then scontrol requeue "$SLURM_JOB_ID"; fi ;;',
        "esac",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    usage = f"{__doc__}\nSlurm options, with their defaults:\n{help_of(Options)}"
    return run_command(argv, _main, lambda _: usage)


def _main(arguments: list[str]) -> int:
    options, rest = parse(arguments)
    return show_or_submit(script(options, rest), options.submit, ["sbatch"])


if __name__ == "__main__":
    sys.exit(main())
