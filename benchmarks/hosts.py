"""`python -m benchmarks.hosts [counts=64,1024] [steps=2000,20000] [folder=DIR] [out=FILE]`: what hosts agree on, and what a
start reads of a long run.

- counts: that many clients of a coordinator's real store, all on this machine, so that its cores do the work of all hosts. A
  start compares facts of a real recipe three times, has five words of host 0 and two rounds about a restore; a save has a word
  of host 0 and two barriers. Seconds until all hosts are through, and bytes and requests of the store.
- steps: rows of a mixture of 58 layers with 256 experts. Seconds and memory of a process that goes on from a hundred steps
  before the end, and of what it does at its end.
"""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.options import read

# part: how a process of some of the hosts is started, ADDRESS,COUNT,FIRST.
OPTIONS = {"counts": "64,1024", "steps": "2000,20000", "folder": "", "out": "", "part": ""}
_LAYERS, _EXPERTS, _LOAD_EVERY = 58, 256, 10
_TOGETHER = 128  # clients of one process, as threads
# Seconds without a sign of life that a client may have: thousands of them share the cores of one machine.
_SILENT = 3600

_GO_ON = """
import json, resource, sys, time
from pathlib import Path
import ejdist.training.loop
from ejdist.training import metrics, summary
folder, start = Path(sys.argv[1]), int(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
writer = metrics.MetricsWriter(folder, start, 10**9)
writer.close()
opened = time.perf_counter() - began
rows = metrics.RowsOfRun(folder)
summary.summarise(rows, devices=1, peak=None)
shown = rows.for_pictures()
ended = time.perf_counter() - began - opened
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"start_s": opened, "end_s": ended, "more_mb": (peak - before) / 1024, "rows_kept": len(shown)}))
"""


class Counting:
    """A client of the store that counts what it sends and reads."""

    def __init__(self, client: Any) -> None:
        self.client, self.requests, self.sent, self.read = client, 0, 0, 0

    def key_value_set(self, key: str, value: str, **how: Any) -> None:
        self.requests, self.sent = self.requests + 1, self.sent + len(value)
        self.client.key_value_set(key, value, **how)

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        self.requests += 1
        value = self.client.blocking_key_value_get(key, milliseconds)
        self.read += len(value)
        return value

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        self.requests += 1
        values = self.client.key_value_dir_get(prefix)
        self.read += sum(len(value) for _, value in values)
        return values


def agreements(count: int) -> dict[str, Any]:
    """Returns what a start and a save take with that many hosts."""
    from jax._src.lib import _jax

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, count, heartbeat_timeout=_SILENT)
    parts = range(0, count, _TOGETHER)
    try:
        command, part = [sys.executable, "-m", "benchmarks.hosts"], f"part={address},{count}"
        processes = [subprocess.Popen([*command, f"{part},{i}"], stdout=subprocess.PIPE, text=True) for i in parts]
        outputs = [one.communicate()[0] for one in processes]
    finally:
        service.shutdown()
    if any(one.returncode for one in processes):
        raise RuntimeError(f"{count} hosts: a process of theirs ended with {[one.returncode for one in processes]}")
    of_parts = [json.loads(text.splitlines()[-1]) for text in outputs]
    hosts = [host for part in of_parts for host in part["hosts"]]
    first, others = hosts[0], hosts[1:]
    return {
        "hosts": count,
        "start_s": round(max(host["start"] for host in hosts), 2),
        "save_s": round(max(host["save"] for host in hosts), 2),
        "start_cpu_s": round(sum(part["start_cpu"] for part in of_parts), 2),
        "start_cpu_of_host_0_s": round(first["start own"], 3),
        "host_0_read_mb": round(first["read"] / 1e6, 3),
        "sent_mb": round(sum(host["sent"] for host in hosts) / 1e6, 3),
        "others_read_mb": round(sum(host["read"] for host in others) / 1e6, 3),
        "requests_of_a_host": max(host["requests"] for host in others),
    }


def some_hosts(address: str, count: int, first: int) -> dict[str, Any]:
    """Is the hosts from `first` on, as many as one process has, and returns what each took."""
    import itertools

    import jax
    from jax._src.lib import _jax

    from ejdist.cluster import hosts as module
    from ejdist.cluster.agreement import software
    from ejdist.sections import flat
    from recipes.schema import compose

    own = range(first, min(first + _TOGETHER, count))
    here, local = json.loads(json.dumps(flat(compose([])) | software())), threading.local()
    clients: dict[int, Counting] = {}
    turns = {index: itertools.count() for index in own}
    module._store, module._index = (lambda: clients[local.index]), (lambda: local.index)
    module._numbers = type("", (), {"__next__": lambda self: next(turns[local.index])})()
    jax.process_index, jax.process_count = (lambda: local.index), (lambda: count)
    meetings, leaders = itertools.count(), list(range(0, count, _TOGETHER))

    def all_processes() -> None:
        clients[first].client.wait_at_barrier(f"meeting {next(meetings)}", _SILENT * 1000, leaders)

    meet = threading.Barrier(len(own), action=all_processes)

    def host(index: int) -> dict[str, float]:
        local.index, times = index, {}
        how = {"init_timeout": _SILENT, "shutdown_timeout": _SILENT, "heartbeat_timeout": _SILENT}
        client = _jax.get_distributed_runtime_client(address, index, **how)
        client.connect()
        counted = clients[index] = Counting(client)
        one = module.Hosts(_SILENT)

        def timed(name: str, act: Callable[[], None]) -> None:
            meet.wait()
            began, used, thread = time.perf_counter(), time.process_time(), time.thread_time()
            act()
            times[name] = time.perf_counter() - began
            times[f"{name} of all"], times[f"{name} own"] = time.process_time() - used, time.thread_time() - thread

        def start() -> None:
            for moment in ("the start", "the first step", "the check"):
                one.compare(moment, here)
            for i in range(5):
                one.broadcast(f"word {i}", i)
            for i in range(2):
                one.first_error(f"the reading {i}", None)

        def save() -> None:
            one.broadcast("whether a checkpoint is due", True)
            for i in range(2):
                client.wait_at_barrier(f"save {i}", _SILENT * 1000)

        timed("start", start)
        times["requests"] = counted.requests
        timed("save", save)
        meet.wait()
        client.shutdown()
        return {**times, "sent": counted.sent, "read": counted.read}

    threading.stack_size(1 << 20)
    with ThreadPoolExecutor(len(own)) as pool:
        hosts = list(pool.map(host, own))
    return {"start_cpu": max(host["start of all"] for host in hosts), "hosts": hosts}


def long_run(folder: Path, steps: int) -> dict[str, Any]:
    """Returns what a start and an end take after that many steps."""
    run = folder / f"{steps}"
    run.mkdir()
    layers = [0.123456 + i for i in range(_LAYERS)]
    row = {"loss": 1.5, "tokens": 1.0, "step_time": 1.0, "flops_causal": 1.0, "flops_full": 1.0}
    row |= {f"experts/{name}": layers for name in ("entropy", "max_violation", "balance_loss", "z_loss", "dropped")}
    counts = [[4096 + i for i in range(_EXPERTS)]] * _LAYERS
    text, table = json.dumps(row)[1:], json.dumps({"experts/counts": counts})[1:]
    with (run / "metrics.jsonl").open("w") as rows, (run / "tables.jsonl").open("w") as tables:
        for step in range(1, steps + 1):
            rows.write(f'{{"step": {step}, {text}\n')
            if step % _LOAD_EVERY == 0:
                tables.write(f'{{"step": {step}, {table}\n')
    size = sum(p.stat().st_size for p in run.iterdir())
    output = subprocess.run(
        [sys.executable, "-c", _GO_ON, str(run), str(steps - 100)], capture_output=True, text=True, check=True
    ).stdout
    costs = json.loads(output.splitlines()[-1])
    return {"steps": steps, "file_mb": round(size / 1e6, 1)} | {name: round(x, 2) for name, x in costs.items()}


def table(results: dict[str, Any]) -> str:
    """Returns the Markdown of a result."""
    rows = [
        "| hosts | a start | its CPU, of all hosts and of host 0 | a save | sent by all | read by host 0 | by the others |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results["counts"]:
        rows.append(
            f"| {r['hosts']:,} | {r['start_s']:.2f} s | {r['start_cpu_s']:.2f} s, {r['start_cpu_of_host_0_s']:.2f} s | "
            f"{r['save_s']:.2f} s | {r['sent_mb']:.2f} MB | {r['host_0_read_mb']:.2f} MB | {r['others_read_mb']:.2f} MB |"
        )
    more = [
        "| steps of the run | its rows and tables | going on 100 steps before the end | at its end | more memory |",
        "|---|---|---|---|---|",
    ]
    for r in results["steps"]:
        more.append(
            f"| {r['steps']:,} | {r['file_mb']:,.0f} MB | {r['start_s']:.2f} s | {r['end_s']:.2f} s | {r['more_mb']:.0f} MB |"
        )
    return "\n\n".join("\n".join(part) for part in (rows, more) if len(part) > 2)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code of the command."""
    o = read(OPTIONS, list(sys.argv[1:] if argv is None else argv))
    counts, steps = ([int(n) for n in o[name].split(",") if n] for name in ("counts", "steps"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if soft < hard else (soft, hard))
    if o["part"]:
        address, count, first = o["part"].split(",")
        print(json.dumps(some_hosts(address, int(count), int(first))))
        return 0
    with tempfile.TemporaryDirectory(prefix="hosts-", dir=o["folder"] or None) as folder:
        results: dict[str, Any] = {"steps": [long_run(Path(folder), n) for n in steps]}
    results["counts"] = [agreements(n) for n in counts]
    from benchmarks.measure import provenance_on_cpu

    results = {**provenance_on_cpu(), **results}
    print(table(results))
    if o["out"]:
        Path(o["out"]).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
