"""`python -m launch.doctor [KEY=VALUE ...]`: is this cluster fit for this run?

Started as the run is, on the same hosts with the same arguments (launchers take command=doctor), it trains nothing. It looks
whether the processes find each other and have the same code, packages and recipe, clocks that agree, one folder that all may
write to with room for the checkpoints, and the devices that the mesh asks for. Then it measures how fast each mesh axis
communicates, and keeps that for planning in bandwidth=FILE (run.dir/bandwidth.json). Each failure is one sentence.
"""

from __future__ import annotations

import glob
import json
import math
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import DONE, HOST_LOST, WRONG, run_command
from launch.options import help_of, option, read
from launch.train import ACCELERATORS, command, start_jax


@dataclass(frozen=True)
class Options:
    """The doctor's own options; the rest of the command line is the recipe's."""

    bandwidth: str = option("", "the file for what was measured; run.dir/bandwidth.json", free=True)


class Doctor:
    """One examination. `failures` are those of all hosts, the same on each."""

    def __init__(self, recipe: Any, hosts: Any, log: Callable[[str], object]) -> None:
        from ejdist.paths import is_url, place

        self._recipe, self._hosts, self.failures = recipe, hosts, []
        self._log = log if hosts.index == 0 else lambda line: None
        self._folder = Path(recipe.run.dir).expanduser()
        self._checkpoints: Any = self._folder / "checkpoints"
        if (directory := recipe.checkpoint.dir) is not None:
            self._checkpoints = (
                place("checkpoint.dir", directory) if is_url(directory) else Path(directory).expanduser()
            )

    def _found(self, failures: Sequence[str], otherwise: str) -> None:
        """Logs a check's failures, or that it passed."""
        self.failures += failures
        for line in failures or [otherwise]:
            self._log(f"{'FAILED' if failures else 'ok    '}  {line}")

    def before_devices(self) -> None:
        """The checks that need no device: JAX creates devices only when all processes are there, and may hang if they
        differ."""
        from ejdist.cluster import health
        from ejdist.cluster.agreement import code_digest, software
        from ejdist.cluster.hosts import differences
        from ejdist.sections import flat

        hosts = self._hosts
        machines, listed = hosts.reduce("the examination", health.machine(), _machines)
        count = f"{hosts.count} process{'es' * (hosts.count > 1)} on {machines} machine{'s' * (machines > 1)}"
        self._found([], f"{count}: {listed}")
        recipe = {key: value for key, value in flat(self._recipe).items() if not key.startswith("cluster.")}
        self._found(
            hosts.reduce("recipe and software", recipe | software(), _few(differences)),
            f"the same recipe, packages and code ({code_digest()}) on all",
        )
        ahead = self._ahead()
        worst = hosts.reduce("the time", ahead, lambda reports: max(abs(seconds) for _, seconds in reports.values()))
        self._found(
            hosts.reduce("the clocks", {"ahead": ahead}, _few(health.clock_failures)), f"clocks within {worst:.2f} s"
        )
        if self._recipe.checkpoint.dir is None:
            self._free = self._storage("run.dir", self._folder)
        else:
            self._results()
            self._free = self._storage("checkpoint.dir", self._checkpoints)

    def _ahead(self) -> float:
        """Returns by how many seconds this host's clock is ahead of host 0's, or a little more: what it took to hear of it."""
        offsets = []
        for _ in range(3):
            self._hosts.reduce("the time", None, lambda reports: None)  # all are here
            theirs = self._hosts.broadcast("its time", time.time())
            offsets.append(time.time() - theirs)
        return 0.0 if self._hosts.index == 0 else min(offsets)

    def _storage(self, key: str, folder: Any) -> float:
        """Returns the bytes that may still be written to a folder, the fewest of all hosts."""
        from ejdist.cluster import health

        hosts = self._hosts
        token = uuid.uuid4().hex
        # Host 0 makes the folder before the others look, and removes it after they have left it.
        shared = health.SharedFolder(folder, 0, token) if hosts.index == 0 else None
        token = hosts.broadcast("a token", token)
        shared = shared or health.SharedFolder(folder, hosts.index, token)
        try:
            facts = {"writes": shared.failure, "sees": shared.failure is None and shared.sees_first()}
            failures = hosts.reduce(f"the look into {key}", facts, _few(health.folder_failures(key, folder)))
            free = shared.free_bytes()
            if hosts.index > 0:
                shared.close()
            free = hosts.reduce("the disk", free, lambda reports: min(mine for _, mine in reports.values()))
        finally:
            shared.close()
        room = "" if math.isinf(free) else f", {free / 1e9:,.1f} GB free"
        self._found(failures, f"{key} = {folder}: written and seen by all{room}")
        return free

    def _results(self) -> None:
        """Checks that host 0 can write to run.dir: without checkpoints in it, it may be another folder on each host."""
        from ejdist.cluster import health

        folder = health.SharedFolder(self._folder, 0, uuid.uuid4().hex, writes=self._hosts.index == 0)
        folder.close()
        facts = {"writes": folder.failure, "sees": True}
        failures = self._hosts.reduce(
            "the look into run.dir", facts, _few(health.folder_failures("run.dir", self._folder))
        )
        self._found(failures, f"run.dir = {self._folder}: written by host 0")

    def devices(self) -> Any:
        """Checks the devices, and that the run fits on them and on the disk; returns the mesh, None if it does not fit."""
        import jax

        from ejdist.cluster import health
        from ejdist.training.curriculum import stages_of
        from ejdist.training.setup import stage_program

        hosts, s, stages = self._hosts, self._recipe, stages_of(self._recipe)
        mine = jax.local_devices()
        facts = {
            "platform": mine[0].platform, "kind": mine[0].device_kind, "count": len(mine),
            "accelerators": sorted(f for pattern in ACCELERATORS for f in glob.glob(pattern)),
        }  # fmt: skip
        self._found(
            hosts.reduce("the devices", facts, _few(health.device_failures)),
            f"{jax.device_count()} x {facts['kind']}, {facts['count']} of each process",
        )
        try:
            program = [stage_program(stage) for stage in stages][-1]
        except ValueError as error:
            self._found([str(error)], "")
            return None
        mesh = program.mesh
        used = {axis: size for axis, size in mesh.shape.items() if size > 1}
        idle = f"; {jax.device_count() - mesh.size} devices are left idle" * (mesh.size < jax.device_count())
        self._found([], f"mesh {used or 'of one device'}, {program.num_parameters:,} parameters{idle}")
        leaves = jax.tree.leaves(program.state)
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        if math.isfinite(self._free):
            checkpoints = [p for p in self._checkpoints.glob("*") if p.name.isdigit()]
            self._found(
                health.disk_failures(self._free, size, s.checkpoint.keep, len(checkpoints)),
                f"room for {s.checkpoint.keep} checkpoints of {size / 1e9:,.3f} GB, and the one that is being written",
            )
        return mesh

    def bandwidth(self, mesh: Any, file: Path) -> None:
        """Measures the bandwidth and writes the file. Raises OSError."""
        from ejdist.cluster.bandwidth import measure
        from ejdist.training.metrics import write_atomic

        report = measure(mesh) | {
            "made_by": "python -m launch.doctor",
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        for axis, facts in report["axes"].items():
            largest = max(row["message_bytes"] for row in facts["measured"])
            rows = [row for row in facts["measured"] if row["message_bytes"] == largest]
            each = ", ".join(f"{row['collective']} {row['bytes_per_second'] / 1e9:.3g}" for row in rows)
            over = {"devices": "inside of a host", "hosts": "between hosts", "slices": "between slices"}[
                facts["crosses"]
            ]
            self._log(f"ok      {axis} ({facts['size']}, {over}): GB/s per device, for {largest / 2**20:g} MiB: {each}")
        if self._hosts.index == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, json.dumps(report, indent=1) + "\n")
            self._log(f"ok      bandwidth is kept in {file}")


_NAMED = 8  # machines, and failures of one kind, that are named: all hosts read them


def _machines(reports: dict[int, Any]) -> tuple[int, str]:
    """Returns (how many machines there are, some of their names)."""
    hosts = list(dict.fromkeys(host for host, _ in reports.values()))
    machines = len({machine for _, machine in reports.values()})
    return machines, ", ".join(hosts[:_NAMED]) + (f" and {len(hosts) - _NAMED} more" if len(hosts) > _NAMED else "")


def _few(judge: Callable[[dict[int, Any]], list[str]]) -> Callable[[dict[int, Any]], list[str]]:
    """Returns a check whose failures do not grow with the number of hosts."""

    def judged(reports: dict[int, Any]) -> list[str]:
        failures = judge(reports)
        more = len(failures) - _NAMED
        return failures[:_NAMED] + ([f"{more} more like these, of {len(reports)} hosts"] if more > 0 else [])

    return judged


def _examine(recipe: Any, options: Options) -> int:
    from ejdist.cluster.ending import within
    from ejdist.cluster.hosts import Hosts

    hosts = Hosts(recipe.run.host_timeout, before_devices=True)
    doctor = Doctor(recipe, hosts, lambda line: print(line, flush=True))
    with hosts.together():
        doctor.before_devices()
    if not doctor.failures:
        late = (
            f"error: the devices are not all there, or do not communicate, after {hosts.limit:g} s (run.host_timeout)"
        )
        with within(hosts.limit, lambda: f"{late}: look at the logs of the other hosts"), hosts.together():
            mesh = doctor.devices()
            if not doctor.failures:
                file = options.bandwidth or Path(recipe.run.dir).expanduser() / "bandwidth.json"
                doctor.bandwidth(mesh, Path(file).expanduser())
    count = len(doctor.failures)
    if hosts.index == 0:
        print(
            f"{count} failure{'s' * (count > 1)}: fix the first, and run it again" if count else "fit for the run",
            flush=True,
        )
    return WRONG if count else DONE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    usage = f"{__doc__}\nin addition to the keys of launch.train:\n{help_of(Options)}"
    return run_command(argv, _main, lambda _: usage, needs_arguments=False)


def _main(arguments: list[str]) -> int:
    from ejdist.cluster.health import why_unreachable
    from ejdist.paths import check_folder
    from ejdist.sections import validate
    from ejdist.training.curriculum import stages_of
    from recipes.schema import compose

    options, rest = read(Options, arguments)
    check_folder("bandwidth", options.bandwidth)
    recipe = compose(rest)
    validate(recipe)
    stages_of(recipe)
    cluster = recipe.cluster
    if cluster.kind == "manual" and cluster.coordinator and cluster.process_id:
        if why := why_unreachable(cluster.coordinator, cluster.timeout):
            print(f"FAILED  process {cluster.process_id} on {why}", file=sys.stderr)
            return HOST_LOST
    start_jax(recipe, "launch.doctor")
    return _examine(recipe, options)


if __name__ == "__main__":
    command(body=main)
