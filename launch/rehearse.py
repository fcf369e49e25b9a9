"""`python -m launch.rehearse recipe=long_context hosts=2 devices_per_host=2 fault=kill`: what if a host dies, and so on?

Trains the recipe as several processes of this machine, each of which plays a host: the command, the data, the checkpoints and
the coordinator are the real ones. Once with nothing in its way, and once with a fault; then it says what that cost.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ejdist.cluster.verdict import Verdict, again, of_start
from ejdist.cluster.verdict import read as read_verdict
from ejdist.training import goodput
from ejdist.training.metrics import read_rows
from launch.drills import DRILLS, NEED_TWO
from launch.errors import DONE, FAILED_DRILL, INTERRUPTED, WRONG, run_command
from launch.options import check_spelling, refuse_cluster
from launch.processes import Job
from launch.scenes import Disturbance, Scene
from launch.series import IN_SERIES, Round, rehearse_series

USAGE = f"""usage: python -m launch.rehearse [hosts=2] [devices_per_host=2] [fault=NAME[,NAME]|all] [KEY=VALUE ...]

  python -m launch.rehearse recipe=long_context hosts=2 devices_per_host=2 fault=kill
  python -m launch.rehearse recipe=moe hosts=4 devices_per_host=2 fault=all run.steps=40 checkpoint.every=10

All other keys are the recipe's. Writes to run.dir (default outputs/rehearsal) a folder for the run without a fault and one for
each drill, with the log of every host, and the verdicts as rehearsal.json.

keys:
  hosts=2              processes of this machine, each of which plays a host
  devices_per_host=2   virtual CPU devices of each
  fault=kill           one of those below, several with commas, or all
  times=1              how often each fault is made, at other steps and on other hosts
  seed=0               of the chance in that
  series=0             disturbs one run so often, by those of {", ".join(IN_SERIES)} that fault= names, and starts
                       it again each time

faults: {", ".join(DRILLS)}
"""
_OWN = {"hosts": 2, "devices_per_host": 2, "fault": "kill", "seed": 0, "times": 1, "series": 0}
_DEFAULTS = {
    "run.dir": "outputs/rehearsal",
    "run.steps": "24",
    "checkpoint.every": "6",
    "run.host_timeout": "120",
    "guards.hang_seconds": "300",
}
_MOST_SECONDS = 3600  # of one start of the run
_AFTER_FIRST = 150  # seconds in which the other hosts must notice that one has ended


@dataclass(frozen=True)
class Options:
    hosts: int
    devices_per_host: int
    faults: tuple[str, ...]
    seed: int
    times: int
    series: int
    folder: Path
    steps: int
    every: int
    arguments: tuple[str, ...]  # of the run, without run.dir


@dataclass(frozen=True)
class Ended:
    """A finished run: the exit codes of each start, its time, losses and digests."""

    codes: list[list[int | None]]
    seconds: float
    losses: dict[int, float | None]
    digest: dict[str, int] | None  # of each array of the last checkpoint


def parse(argv: Sequence[str]) -> Options:
    """Parses a command line. Raises ValueError, naming the argument."""
    from ejdist.sections import validate
    from recipes.arguments import read
    from recipes.schema import compose

    words = read(argv).words()
    refuse_cluster(words, "a rehearsal sets how its processes find each other")
    names = [a.partition("=")[0] for a in words]
    if twice := [name for name in _OWN if names.count(name) > 1]:
        raise ValueError(f"{twice[0]} is given twice; give it once")
    settings = {name: value for name, _, value in (a.partition("=") for a in words)}
    options: dict[str, Any] = {name: settings.pop(name, default) for name, default in _OWN.items()}
    for name in ("hosts", "devices_per_host", "seed", "times", "series"):
        least = 0 if name in ("seed", "series") else 1
        if not re.fullmatch("[0-9]{1,9}", str(options[name])) or int(options[name]) < least:
            raise ValueError(f"{name} must be a number from {least} on, got {options[name]!r}")
        options[name] = int(options[name])
    for key in settings:
        check_spelling(key, list(_OWN))
        if key.lstrip("+~") in ("run.stop_after", "run.extend"):
            raise ValueError(f"{key} cannot be given to a rehearsal: it starts and stops the run itself")
    faults = tuple(DRILLS) if options["fault"] == "all" else tuple(options["fault"].split(","))
    if twice := [fault for fault in faults if faults.count(fault) > 1]:
        raise ValueError(f"fault={options['fault']} names {twice[0]} twice; use times=2 to repeat each fault")
    for fault in faults:
        if fault not in DRILLS:
            raise ValueError(f"fault={fault} is unknown; use one of {', '.join(DRILLS)}, and all")
        if fault in NEED_TWO and options["hosts"] == 1:
            if options["fault"] != "all":
                raise ValueError(f"fault={fault} needs hosts=2 or more: one host cannot differ from another")
            faults = tuple(f for f in faults if f not in NEED_TWO)
        if options["series"] and options["times"] > 1:
            raise ValueError(
                f"times = {options['times']} is of drills, and series = {options['series']} makes one run: give one of them"
            )
        if options["series"] and fault not in IN_SERIES:
            raise ValueError(f"fault={fault} cannot be used in a series; use {', '.join(IN_SERIES)}")
    settings = _DEFAULTS | settings
    arguments = tuple(f"{key}={value}" for key, value in settings.items() if key != "run.dir")
    recipe = compose([*arguments, f"run.dir={settings['run.dir']}"])  # its own errors come now, and not from every host
    validate(recipe)
    if recipe.checkpoint.dir is not None:
        raise ValueError(
            f"checkpoint.dir = {recipe.checkpoint.dir!r} cannot be given to a rehearsal: each of its runs has its own "
            "checkpoints, in a folder of run.dir; give checkpoint.dir=null"
        )
    steps, every = recipe.run.steps, recipe.checkpoint.every
    if every < 1 or steps < 2 * every + 2:
        raise ValueError(
            f"run.steps = {steps} with checkpoint.every = {every} leaves no room for a fault between checkpoints: at least "
            "2 * checkpoint.every + 2 steps"
        )
    folder = Path(recipe.run.dir).expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"run.dir = {folder} already exists, and a rehearsal needs an empty folder: remove it, or name another"
        )
    return Options(
        options["hosts"], options["devices_per_host"], faults, options["seed"], options["times"], options["series"],
        folder, steps, every, arguments,
    )  # fmt: skip


def run(
    o: Options,
    folder: Path,
    d: Disturbance | None,
    extra: Sequence[str] = (),
    sigterm: tuple[float, int] | None = None,
    since: str = "",
    wrong: list[str] | None = None,
) -> tuple[list[int | None], str, float]:
    """Returns the exit codes of one start of the run in a folder, the output of its hosts, and its seconds.

    Args:
      sigterm: seconds after which SIGTERM is sent, and the host.
      since: what host 0 says from when they count; nothing: from the start.
      wrong: takes what `d.beside` finds wrong, and which hosts do not say what all should.
    """
    from recipes.arguments import quoted

    logs = folder / "logs"
    job = Job(o.hosts, logs, o.devices_per_host, (sys.executable, "-P", "-m", "launch.train"))
    began = [job.log(i).stat().st_size if job.log(i).exists() else 0 for i in range(o.hosts)]
    start = time.monotonic()
    commands = {
        i: (sys.executable, "-P", "-m", "launch.disturbed", json.dumps(spec))
        for i, spec in (d.inside if d else {}).items()
    }
    arguments = [*o.arguments, f"run.dir={quoted(str(folder / 'run'))}", *extra, *(d.arguments if d else ())]
    of_host, environment = (d.of_host, d.environment) if d else ({}, {})
    try:
        job.start(arguments, of_host=of_host, environment=environment, commands=commands)
        if sigterm is not None:
            threading.Thread(target=_signal, args=(job, *sigterm, since, began[0]), daemon=True).start()
        with _beside(d, job, arguments, wrong):
            codes = job.wait(_MOST_SECONDS, _AFTER_FIRST)
    finally:
        job.kill()
    logs_of = [job.log(i).read_bytes()[began[i] :].decode(errors="replace") for i in range(o.hosts)]
    if d is not None and wrong is not None:
        wrong += [
            f"host {i} did not say {word!r}"
            for word in d.says_all
            for i, text in enumerate(logs_of)
            if word not in text and codes[i] not in (None, -signal.SIGKILL)
        ]
    return codes, "\n".join(logs_of), time.monotonic() - start


@contextlib.contextmanager
def _beside(d: Disturbance | None, job: Job, arguments: Sequence[str], wrong: list[str] | None) -> Iterator[None]:
    """Lets others come while the processes run."""
    if d is None or d.beside is None or wrong is None:
        yield
        return
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(d.beside, job, arguments)
        yield
    wrong += others.result()


def _decided(d: Disturbance, codes: Sequence[int | None], left: Verdict | None) -> list[str]:
    """Returns what is wrong with the decision that a launcher would take."""
    code = of_start(codes, left)
    if not code or again(code) is d.again:
        return []
    what = "would start the run again" if again(code) else "would not start the run again"
    return [f"a launcher {what} after {code}, of {list(codes)} and the verdict {left}"]


def _signal(job: Job, seconds: float, host: int, since: str, began: int) -> None:
    """Sends SIGTERM to a host a number of seconds after a text appears in host 0's log, past a byte offset."""
    while since.encode() not in job.log(0).read_bytes()[began:]:
        if all(p.poll() is not None for p in job.processes):
            return
        time.sleep(0.1)
    time.sleep(seconds)
    job.signal(signal.SIGTERM, host)


def left(folder: Path) -> tuple[dict[int, float | None], dict[str, int] | None]:
    """Returns the loss of each step of a run, and the digest of each array of its last checkpoint."""
    rows = {row["step"]: row.get("loss") for row in read_rows(folder / "run" / "metrics.jsonl")}
    last = None
    checkpoints = folder / "run" / "checkpoints"
    done = [int(p.name) for p in checkpoints.iterdir() if p.name.isdigit()] if checkpoints.exists() else []
    if done:
        last = json.loads((checkpoints / str(max(done)) / "run" / "metadata").read_text())["digest"]
    return rows, last


def drill(o: Options, name: str, number: int, calm: Ended, log: Any) -> bool:
    """Runs one drill and prints the outcome; returns whether the run behaved as expected."""
    from ejdist.training.metrics import write_atomic

    folder = o.folder / (name if o.times == 1 else f"{name}-{number}")
    folder.mkdir(parents=True)
    chance = random.Random(f"{o.seed}/{name}/{number}")
    scene = Scene(o.hosts, o.steps, o.every, folder, o.folder / "calm" / "run", o.arguments, chance)
    d = DRILLS[name](scene)
    extra = [] if d.stop_after is None else [f"run.stop_after={d.stop_after}"]
    wrong: list[str] = []
    codes, output, seconds = run(o, folder, d, extra, wrong=wrong)
    allowed = sorted(set(d.codes), key=lambda c: (c is None, c or 0))
    faults = [f"exit codes {codes}, which are not of {allowed}"] if not set(codes) <= set(d.codes) else []
    faults += wrong + _decided(d, codes, read_verdict(folder / "logs" / "verdict"))
    faults += [f"no host said {word!r}" for word in d.says if word not in output]
    if not d.writes and (folder / "run" / "checkpoints").exists():
        faults.append("it wrote checkpoints anyway")
    outcome = [f"exit codes {codes}"]
    if d.goes_on:
        reached = max(left(folder)[0], default=0)
        if d.after is not None:
            d.after(folder / "run")
        codes, output_after, more = run(o, folder, d.resumed)
        seconds += more
        faults += [] if codes == [DONE] * o.hosts else [f"started again it ended with {codes}"]
        faults += [f"started again no host said {word!r}" for word in d.says_after if word not in output_after]
        rows, digest = left(folder)
        from_step = next(
            (int(line.split()[3]) for line in output_after.splitlines() if "resuming from step" in line), 0
        )
        if d.codes == (DONE,) and d.stop_after is None:
            outcome.append("nothing to start again")
        else:
            outcome.append(f"started again from step {from_step}, {max(0, reached - from_step)} steps rerun")
        outcome.append(f"{max(0.0, seconds - calm.seconds):.1f} s more than without")
        same = rows == calm.losses and digest == calm.digest
        outcome.append("losses and final state match the run without" if same else "LOSSES OR STATE DIFFER")
        faults += [] if same else [_unlike(calm, rows, digest)]
    ok = not faults
    log(f"{name}: {d.told}\n    {'; '.join(outcome)}")
    log(f"    {_goodput(folder)}")
    for fault in faults:
        log(f"    UNEXPECTED: {fault}; see {folder / 'logs'}")
    log(f"    {'ok' if ok else 'FAILED'}")
    verdict = {
        "fault": folder.name,
        "what": d.told,
        "ok": ok,
        "told": "; ".join(outcome),
        "unexpected": "; ".join(faults),
    }
    path = o.folder / "rehearsal.json"
    before = json.loads(path.read_text()) if path.exists() else []
    write_atomic(path, json.dumps([*before, verdict], indent=1) + "\n")
    return ok


def _goodput(folder: Path) -> str:
    rows = goodput.read(folder / "run" / goodput.NAME)
    return str(goodput.account(rows)) if rows else "no step was made"


def _series(o: Options, calm: Ended, log: Any) -> bool:
    def start(folder: Path, r: Round | None) -> tuple[list[int | None], str]:
        return run(o, folder, r.disturbance, (), r.signalled, r.since)[:2] if r else run(o, folder, None)[:2]

    def same(folder: Path) -> str | None:
        rows, digest = left(folder)
        return None if rows == calm.losses and digest == calm.digest else _unlike(calm, rows, digest)

    chance, shape = random.Random(f"{o.seed}/series"), (o.hosts, o.steps, o.every)
    return rehearse_series(o.folder / "series", o.series, o.faults, shape, calm.seconds, chance, start, same, log)


def _unlike(calm: Ended, rows: dict[int, float | None], digest: dict[str, int] | None) -> str:
    steps = [s for s in sorted({*calm.losses, *rows}) if calm.losses.get(s) != rows.get(s)]
    if steps:
        s = steps[0]
        return f"the loss of step {s} is {rows.get(s)}, and {calm.losses.get(s)} without a fault ({len(steps)} steps differ)"
    return "the losses are the same, but an array of the last checkpoint is not"


def main(argv: Sequence[str] | None = None, log: Any = None) -> int:
    """Runs the command and returns its exit code: 0 if the run handled every fault as expected."""
    log = log or (lambda line: print(line, flush=True))
    stopped = ("stopped by a signal, and its processes with it", INTERRUPTED)
    with _interrupted_by_signals():
        return run_command(argv, lambda arguments: rehearse(parse(arguments), log), lambda _: USAGE, stopped=stopped)


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Treats SIGTERM and SIGHUP as Ctrl-C: the child processes, in their own process groups, would otherwise outlive this
    one."""
    before = {}
    with contextlib.suppress(ValueError):  # not the main thread: whoever runs this handles signals
        for number in (signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def rehearse(o: Options, log: Any) -> int:
    """Runs the requested drills and prints the outcomes; returns the exit code."""
    o.folder.mkdir(parents=True, exist_ok=True)
    where = (
        f"{o.hosts} hosts of {o.devices_per_host} devices, {o.steps} steps, a checkpoint every {o.every}, in {o.folder}"
    )
    log(f"rehearsing {' '.join(o.arguments)}\n    on {where}")
    codes, output, seconds = run(o, o.folder / "calm", None)
    if codes != [DONE] * o.hosts:
        log(f"without a fault it ended with {codes}:\n{output[-2000:]}")
        return next((c for c in codes if c), WRONG)
    calm = Ended([codes], seconds, *left(o.folder / "calm"))
    log(f"    without a fault: {seconds:.1f} s")
    log(f"    {_goodput(o.folder / 'calm')}")
    if o.series:
        return DONE if _series(o, calm, log) else FAILED_DRILL
    drills = [(name, n) for name in o.faults for n in range(o.times)]
    passed = [drill(o, name, n, calm, log) for name, n in drills]
    log(f"{sum(passed)} of {len(passed)} drills ended as expected")
    return DONE if all(passed) else FAILED_DRILL


if __name__ == "__main__":
    sys.exit(main())
