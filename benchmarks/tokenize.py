"""`python -m benchmarks.tokenize [mb=1000] [tokenizer=bytes] [processes=1,2] [rounds=1] [folder=DIR] [out=FILE]
[do=scale,threads,resume,memory,start,text]`: what tokenizing costs, and a start of training on its result.

The text is the standard library's: a document is some of its lines from a random place, in four files of jsonl, the same for
the same size.

- scale: the same files with each number of processes, one thread in each, one after the other; all must give the same bytes.
- threads: one process with as many threads of the tokenizer as the last number of processes.
- resume: with the last number of processes, killed (SIGKILL) when some shards are done, and started again: the same bytes.
- memory: the peak of the largest process, for a tenth of the size and for all of it; and that of a process that reads batches.
- start: from the start of a process's work to its first batch, imports apart, with documents cut and whole.
- text: one file of text of 200 MB: the peak of the largest process.

CPU seconds are given beside those of the clock: on a machine that does other work the clock says little, and the CPU seconds of
a process, had they all the same, are how long it takes where every process has a core.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.options import read

OPTIONS = {
    "mb": 1000, "tokenizer": "bytes", "processes": "1,2", "rounds": 1, "folder": "", "out": "",
    "do": "scale,threads,resume,memory,start,text",
}  # fmt: skip
_SHARD_MB, _TEXT_MB = 32, 200

_START = """
import json, resource, sys, time
import ejdist.training.loop
from ejdist.training.data import DataSection, build
begin = time.perf_counter()
section = DataSection(source=sys.argv[1], tokenizer="dataset", packing=sys.argv[2], cache_dir=sys.argv[3], global_batch=16)
data = build(section, seed=0)
data.batch(0)
first = time.perf_counter() - begin
for step in range(1, 101):
    data.batch(step)
rest = time.perf_counter() - begin - first
print(json.dumps({"first_batch_s": first, "tokens_a_second": 100 * 16 * 2048 / rest,
                  "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


def write_text(folder: Path, mb: float) -> str:
    """Returns the glob of four files of jsonl, of so many MB together, written now."""
    lines: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        lines += path.read_text(errors="ignore").splitlines(keepends=True)
    folder.mkdir()
    for part in range(4):
        chance, written = random.Random(part), 0
        with (folder / f"{part}.jsonl").open("w") as f:
            while written < mb * 1e6 / 4:
                begin = chance.randrange(len(lines))
                row = json.dumps({"text": "".join(lines[begin : begin + chance.randint(5, 200)])}) + "\n"
                written += f.write(row)
    return str(folder / "*.jsonl")


def command(source: str, to: Path, tokenizer: str, processes: int, threads: int = 1) -> list[str]:
    keys = [f"source={source}", f"to={to}", f"tokenizer={tokenizer}", f"processes={processes}", f"threads={threads}"]
    return [sys.executable, "-m", "launch.tokenize", *keys, f"shard_mb={_SHARD_MB}"]


def run(source: str, to: Path, tokenizer: str, processes: int, threads: int = 1) -> dict[str, Any]:
    """Returns what a run took: seconds by the clock and of CPU, and the peak of the largest of its processes."""
    begin = time.perf_counter()
    child = subprocess.Popen(command(source, to, tokenizer, processes, threads), stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - begin
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"launch.tokenize ended with {child.returncode}")
    return {
        "processes": processes,
        "threads": threads,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_mb": round(used.ru_maxrss / 1024, 1),
    }


def digest(folder: Path) -> str:
    """Returns the SHA-256 of the tokens and offsets of every shard and of their names."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("shard-*/*.bin")):
        found.update(path.relative_to(folder).as_posix().encode())
        with path.open("rb") as f:
            found.update(hashlib.file_digest(f, "sha256").digest())
    return found.hexdigest()


def killed(source: str, to: Path, tokenizer: str, processes: int) -> int:
    """Returns how many shards there were when a run was killed: a third of them or more."""
    child = subprocess.Popen(command(source, to, tokenizer, processes), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    shards = int(child.stdout.readline().split()[0])
    while child.poll() is None and len(list(to.glob("shard-????????????????"))) < max(1, shards // 3):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    time.sleep(1)  # its processes notice, and end
    return len(list(to.glob("shard-????????????????")))


def measured(o: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the measurements that the options ask for. Raises SystemExit: bytes differ."""
    do, counts = o["do"].split(","), [int(n) for n in o["processes"].split(",")]
    source, name = write_text(folder / "text", o["mb"]), str(o["tokenizer"])
    size = sum(p.stat().st_size for p in (folder / "text").iterdir()) / 1e6
    found: dict[str, Any] = {"mb": round(size, 1), "tokenizer": Path(name).name}
    runs, digests = [], set()
    ways = [(n, 1) for n in (counts if "scale" in do else counts[-1:])]
    for n, threads in (ways + [(1, counts[-1])] * ("threads" in do)) * int(o["rounds"]):
        to = folder / f"made{n if threads == 1 else 'threads'}"
        shutil.rmtree(to, ignore_errors=True)
        runs.append(run(source, to, name, n, threads))
        digests.add(digest(to))
    if len(digests) != 1:
        raise SystemExit("the number of processes changes the bytes")
    # Of several rounds the least time: what else the machine does only adds.
    best: dict[tuple[int, int], dict[str, Any]] = {}
    for r in runs:
        way = r["processes"], r["threads"]
        best[way] = min(best.get(way, r), r, key=lambda r: r["seconds"])
    runs = list(best.values())
    found["runs"] = [{**r, "mb_a_second": round(size / r["seconds"], 2)} for r in runs]
    made = folder / f"made{counts[-1]}"
    if "scale" in do:
        found["ratio"] = round(best[ways[0]]["seconds"] / best[ways[-1]]["seconds"], 3)
        each = [best[way]["cpu_seconds"] / way[0] for way in (ways[0], ways[-1])]
        found["cpu_ratio"] = round(each[0] / each[1], 3)
    if "resume" in do:
        shards = killed(source, folder / "resumed", name, counts[-1])
        again = run(source, folder / "resumed", name, counts[-1])
        if digest(folder / "resumed") not in digests:
            raise SystemExit("a run that was killed and started again gives other bytes")
        found["resume"] = {
            "shards_when_killed": shards,
            "shards": len(list(made.glob("shard-*"))),
            "seconds": again["seconds"],
        }
    small = folder / "made_small"
    if "memory" in do:
        few = write_text(folder / "small", o["mb"] / 10)
        at_tenth = run(few, small, name, counts[-1])
        found["memory"] = {"tenth_peak_mb": at_tenth["peak_mb"], "peak_mb": best[ways[-1]]["peak_mb"]}
    if "start" in do:
        found["start"] = []
        for where, label in ((small, "tenth"), (made, "all")):
            for packing, times in (("cut", 1), ("whole", 2)):
                for again in range(times if where.exists() else 0):
                    told = subprocess.run(
                        [sys.executable, "-c", _START, str(where), packing, str(folder / "cache")],
                        capture_output=True, text=True, check=True,
                    ).stdout  # fmt: skip
                    facts = {k: round(v, 3) for k, v in json.loads(told).items()}
                    found["start"].append({"of": label, "packing": packing, "again": bool(again), **facts})
    if "text" in do:
        text = folder / "one.txt"
        with text.open("w") as f:
            for row in (folder / "text" / "0.jsonl").open():
                f.write(json.loads(row)["text"])
                if f.tell() > _TEXT_MB * 1e6:
                    break
        alone = run(str(text), folder / "one", name, counts[-1])
        found["text"] = {
            "mb": round(text.stat().st_size / 1e6, 1),
            "peak_mb": alone["peak_mb"],
            "seconds": alone["seconds"],
        }
    return found


def table(found: dict[str, Any]) -> str:
    """Returns the Markdown of a result."""
    rows = ["| what | measured |", "|---|---|"]
    for r in found["runs"]:
        way = (
            f"{r['processes']} process{'es' * (r['processes'] > 1)} of {r['threads']} thread{'s' * (r['threads'] > 1)}"
        )
        rows.append(
            f"| {way} | {r['mb_a_second']} MB/s: {r['seconds']} s, {r['cpu_seconds']} s of CPU, largest process "
            f"{r['peak_mb']:.0f} MB |"
        )
    if "ratio" in found:
        most = max(r["processes"] for r in found["runs"])
        rows.append(
            f"| time of one process over that of {most} | {found['ratio']:.2f} (of CPU seconds in a process "
            f"{found['cpu_ratio']:.2f}), same bytes |"
        )
    if "resume" in found:
        r = found["resume"]
        rows.append(
            f"| killed and started again | killed with {r['shards_when_killed']} of {r['shards']} shards, then {r['seconds']} "
            "s, same bytes |"
        )
    if "memory" in found:
        m = found["memory"]
        rows.append(
            f"| largest process, a tenth of the text and all | {m['tenth_peak_mb']:.0f} MB, {m['peak_mb']:.0f} MB |"
        )
    for s in found.get("start", []):
        what = f"{'a tenth' if s['of'] == 'tenth' else 'all'}, {s['packing']}{', again' if s['again'] else ''}"
        rows.append(
            f"| training on {what} | first batch after {s['first_batch_s']:.2f} s, {s['tokens_a_second'] / 1e6:.1f} M tokens/s "
            f"of batches, {s['peak_mb']:.0f} MB |"
        )
    if "text" in found:
        t = found["text"]
        rows.append(
            f"| one file of text of {t['mb']:.0f} MB | largest process {t['peak_mb']:.0f} MB, {t['seconds']} s |"
        )
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code of the command."""
    o = read(OPTIONS, list(sys.argv[1:] if argv is None else argv))
    with tempfile.TemporaryDirectory(prefix="tokenize-", dir=o["folder"] or None) as folder:
        found = measured(o, Path(folder))
        # Imported after: a process that is started counts the memory of the one that starts it as its own, and this has JAX.
        from benchmarks.measure import provenance

        facts = {
            **provenance(None),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load": round(os.getloadavg()[0], 2),
        }
        found = {**facts, **found}
    print(table(found))
    if o["out"]:
        Path(o["out"]).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
