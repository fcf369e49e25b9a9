"""`python -m launch.slurm nodes=4 gpus_per_node=8 time=1-00:00:00 [KEY=VALUE ...]`: a batch script that trains on Slurm.

Prints the script, or hands it to sbatch with submit=true. The run ends by itself before the time is up, saves, and is queued
again, as it is when it is preempted or loses a node; it then goes on. One that is refused, or whose loss is no number, is not.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields

from launch.errors import ABORTED, DONE, HOST_LOST, PREEMPTED, WRONG, run_command


@dataclass(frozen=True)
class Options:
    """What the script asks Slurm for; the rest of the command line is the recipe's."""

    nodes: int = 1
    tasks_per_node: int | None = None  # processes of a node; default: one for each GPU, else one
    gpus_per_node: int = 0
    time: str = ""  # as Slurm writes it: minutes, hours:minutes:seconds, days-hours:minutes:seconds
    name: str = "ejdist"
    partition: str = ""
    account: str = ""
    qos: str = ""
    log: str = "%x-%j.log"  # one file for all times that the job is queued
    grace: int = 300  # seconds before the end of the time at which the run is told to stop
    restarts: int = 100  # how often it may be queued again
    python: str = "python"
    sbatch: str = ""  # other options of sbatch, as they are
    submit: bool = False

    @property
    def tasks(self) -> int:
        return self.tasks_per_node or max(1, self.gpus_per_node)


def options_of(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Returns (what Slurm is asked for, the recipe's arguments). Raises ValueError, naming the argument."""
    from recipes.arguments import read
    from recipes.schema import compose

    kinds = {f.name: f.type for f in fields(Options)}
    own: dict[str, object] = {}
    rest = []
    for argument in read(argv).words():
        name, equals, value = argument.partition("=")
        if name not in kinds:
            rest.append(argument)
            continue
        if "int" in str(kinds[name]):
            least = 0 if name in ("gpus_per_node", "grace", "restarts") else 1
            if not value.isdigit() or int(value) < least:
                raise ValueError(f"{name} must be a number from {least} on, got {value!r}")
            own[name] = int(value)
        elif name == "submit":
            if value not in ("true", "false"):
                raise ValueError(f"submit must be true or false, got {value!r}")
            own[name] = value == "true"
        else:
            if not equals or (re.search(r"\s", value) and name not in ("sbatch", "python")) or "\n" in value:
                raise ValueError(f"{name} must be written {name}=VALUE, in one word")
            own[name] = value
    made = Options(**own)  # pyrefly: ignore[bad-argument-type]
    if made.time and not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", made.time):
        raise ValueError(f"time = {made.time!r} must be as Slurm writes it: minutes, HH:MM:SS or DAYS-HH:MM:SS")
    if made.gpus_per_node and made.gpus_per_node % made.tasks:
        raise ValueError(f"gpus_per_node = {made.gpus_per_node} must be a multiple of tasks_per_node = {made.tasks}")
    cluster = [
        a for a in rest if a.split("=")[0] == "cluster" or re.match(r"cluster\.(kind|coordinator|num_|process)", a)
    ]
    if cluster:
        raise ValueError(f"{cluster[0]} cannot be given here: Slurm itself says how the processes find each other")
    compose([*rest, "cluster=auto"])  # a wrong recipe is told now, and not in a log when the job begins
    return made, rest


def script(o: Options, arguments: Sequence[str]) -> str:
    """Returns the batch script."""
    asked = {
        "job-name": o.name, "nodes": o.nodes, "ntasks-per-node": o.tasks, "gpus-per-node": o.gpus_per_node or None,
        "time": o.time, "partition": o.partition, "account": o.account, "qos": o.qos, "output": o.log,
        "open-mode": "append", "signal": f"TERM@{o.grace}", "requeue": "",
    }  # fmt: skip
    lines = [
        f"#SBATCH --{name}" + (f"={value}" if value else "")
        for name, value in asked.items()
        if value or name == "requeue"
    ]
    lines += [f"#SBATCH {o.sbatch}"] if o.sbatch else []
    step = ["srun", "--wait=300"]  # seconds that the other tasks have once one has ended
    if o.gpus_per_node:
        # All GPUs of a node are visible to each of its tasks, and JAX takes its own: so they reach each other by NVLink.
        step += ["--gpu-bind=none"]
    command = shlex.join([*step, *shlex.split(o.python), "-m", "launch.train", *arguments, "cluster=auto"])
    again = "|".join(map(str, (PREEMPTED, HOST_LOST, ABORTED)))
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# Made by python -m launch.slurm for {o.nodes} nodes of {o.tasks} processes. Queue it with sbatch.",
            *lines,
            "set -u",
            "# A batch shell that is told to stop waits for the run, which is told too, saves, and ends.",
            "trap : TERM",
            f"{command} &",
            "run=$!",
            "wait $run; code=$?",
            "while kill -0 $run 2>/dev/null; do wait $run; code=$?; done",
            'echo "launch.train ended with exit code $code, queued again ${SLURM_RESTART_COUNT:-0} times"',
            "case $code in",
            f"  {again})  # stopped by a signal and saved, or a node was lost: the same command goes on",
            f'    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {o.restarts} ]; then scontrol requeue "$SLURM_JOB_ID"; fi ;;',
            "esac",
            "exit $code",
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the command."""
    return run_command(argv, _main, _usage)


def _usage(arguments: Sequence[str]) -> str:
    defaults = " ".join(f"{f.name}={f.default}" for f in fields(Options))
    return f"{__doc__}\nwhat Slurm is asked for, with what it is by default: {defaults}"


def _main(arguments: list[str]) -> int:
    options, rest = options_of(arguments)
    text = script(options, rest)
    if not options.submit:
        print(text, end="")
        return DONE
    try:
        made = subprocess.run(["sbatch"], input=text, text=True, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise ValueError(
            "submit=true: there is no sbatch here; print the script with submit=false, and queue it where there is"
        ) from error
    print(made.stdout + made.stderr, end="")
    return DONE if made.returncode == 0 else WRONG


if __name__ == "__main__":
    sys.exit(main())
