"""`python -m benchmarks.rows [do=hosts,reads,start] [folder=DIR] [out=FILE]`: what a host reads of a dataset, counted.

- hosts: on TPU meshes, by their topologies ahead of time: the rows of a step that the devices of a host hold, those that the
  host reads, and those between its first and last row.
- reads: rows of a dataset of 60 MB with documents of 450 tokens on average. Calls of `pread` and bytes a row: when nothing has
  been read before, when all blocks have been verified but none is in memory, and when the dataset is in memory.
- start: a dataset of 1 TB of tokens, whose shards are links to one, with as many offsets as documents of 1000 tokens have:
  seconds from the start of a process's work to its first batch, imports apart, and its peak.

Counted are reads and bytes that the process asks for; seconds are those of the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import read

OPTIONS = {"do": "hosts,reads,start", "folder": "", "out": ""}
# (topology, axes of the mesh, rows of a step)
MESHES = (
    ("v5p:4x4x4", {"fsdp": 64}, 64),
    ("v5p:8x8x8", {"fsdp": 512}, 512),
    ("v5p:8x8x8", {"fsdp": 64, "sp": 8}, 512),
    ("v5p:16x16x16", {"fsdp": 4096}, 4096),
    ("v5p:16x16x16", {"fsdp": 512, "sp": 8}, 4096),
    ("v5e:16x16", {"fsdp": 256}, 256),
)
_MB, _DOCUMENT, _ROWS = 60, 450, 256
_TERABYTE, _SHARD = 10**12, 1 << 28  # bytes of tokens

_START = """
import json, resource, sys, time
import ejdist.training.loop
from ejdist.training.data import DataSection, build
begin = time.perf_counter()
section = DataSection(source=sys.argv[1], tokenizer="dataset", cache_dir=sys.argv[2], global_batch=4096)
data = build(section, seed=0)
opened = time.perf_counter() - begin
rows = __import__("numpy").arange(0, 4096, 1024)
data.batch(0, rows)
first = time.perf_counter() - begin
for step in range(1, 101):
    data.batch(step, rows)
rest = time.perf_counter() - begin - first
print(json.dumps({"opened_s": opened, "first_batch_s": first, "ms_a_row": 1e3 * rest / 400,
                  "documents": data.corpus.num_documents, "shards": len(data.corpus.shards),
                  "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


def rows_of_hosts(topology: str, axes: dict[str, int], rows: int) -> dict[str, Any]:
    """Returns how many rows of a step hosts need, read, and have between their first and last: of the host that reads most,
    and the sum over all hosts as a multiple of what they need."""
    from ejdist.layout import ACTIVATIONS, sharding
    from ejdist.mesh import make_mesh
    from ejdist.training.placing import rows_of_indices
    from kernels.toolchains.simulate.ahead_of_time import tpu_topology

    mesh = make_mesh(**axes, devices=tpu_topology(topology).devices)
    placement = sharding(mesh, ("B", "T"), ACTIVATIONS, shape=(rows, 8192), what="the batch")
    held: dict[int, list[Any]] = defaultdict(list)
    for device, index in placement.devices_indices_map((rows, 8192)).items():
        held[device.process_index].append(index)
    needed = {host: {row for b, _ in indices for row in range(*b.indices(rows))} for host, indices in held.items()}
    taken = {host: rows_of_indices(indices, rows).tolist() for host, indices in held.items()}
    spans = {host: max(of) - min(of) + 1 for host, of in needed.items()}
    worst = max(held, key=lambda host: (len(taken[host]) / len(needed[host]), spans[host]))
    return {
        "topology": topology,
        "mesh": " ".join(f"{axis}={size}" for axis, size in axes.items()),
        "hosts": len(held),
        "rows": rows,
        "needed": len(needed[worst]),
        "read": len(taken[worst]),
        "span": spans[worst],
        "read_of_needed": round(sum(map(len, taken.values())) / sum(map(len, needed.values())), 3),
        "span_of_needed": round(sum(spans.values()) / sum(map(len, needed.values())), 2),
        "rows_are_the_same": all(set(taken[host]) == needed[host] for host in held),
    }


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yields the sizes of the reads that this process makes by `pread`."""
    sizes: list[int] = []
    pread = os.pread

    def counting(number: int, size: int, at: int) -> bytes:
        content = pread(number, size, at)
        sizes.append(len(content))
        return content

    os.pread = counting
    try:
        yield sizes
    finally:
        os.pread = pread


def reads_of_rows(folder: Path) -> list[dict[str, Any]]:
    """Returns reads and bytes a row, for rows of several lengths, as in the module docstring."""
    from ejdist.training.data import DataSection, build, dataset
    from ejdist.training.data.tokenizing import make_dataset

    rng = np.random.default_rng(0)
    with (folder / "text.jsonl").open("w") as f:
        written = 0
        while written < _MB * 10**6:
            size = int(rng.lognormal(np.log(_DOCUMENT) - 0.5, 1.0)) + 1
            written += f.write(json.dumps({"text": rng.bytes(size).hex()[:size]}) + "\n")
    made = folder / "made"
    make_dataset(made, str(folder / "text.jsonl"), shard_bytes=_MB * 10**6 // 4)
    states = []
    for length in (2048, 8192, 32768):
        section = DataSection(source=str(made), tokenizer="dataset", sequence_length=length, global_batch=16)

        def measured(data: Any, state: str, rows: int, length: int = length) -> dict[str, Any]:
            with counted() as sizes:
                made = [data.batch(step) for step in range(rows // 16)]
            needed = length * data.corpus.shards[0]._dtype.itemsize
            documents = np.mean([b["segment_ids"].max(axis=1) + 1 for b in made])
            return {
                "length": length,
                "state": state,
                "documents_a_row": round(float(documents), 2),
                "reads_a_row": round(len(sizes) / rows, 2),
                "bytes_of_needed": round(sum(sizes) / rows / needed, 3),
            }

        data = build(section, seed=0)
        count = min(_ROWS, data.packing.rows_per_epoch // 16 * 16)
        states.append(measured(data, "nothing read before", count))
        states.append(measured(data, "in memory", count))
        kept, dataset._KEPT_TOKENS = dataset._KEPT_TOKENS, 0
        data = build(section, seed=0)
        measured(data, "", count)
        states.append(measured(data, "verified, tokens not in memory", count))
        dataset._KEPT_TOKENS = kept
    return states


def start_on_a_terabyte(folder: Path) -> dict[str, Any]:
    """Returns what the start of a process on 1 TB of tokens takes."""
    from ejdist.training.data.blocks import BLOCK
    from ejdist.training.data.cache import checksum_of
    from ejdist.training.data.tokenizing import make_dataset

    (folder / "one.jsonl").write_text(json.dumps({"text": "one"}) + "\n")
    large = folder / "large"
    make_dataset(large, str(folder / "one.jsonl"))
    manifest = json.loads((large / "dataset.json").read_text())["content"]
    one = large / manifest["shards"][0]["name"]
    tokens = _SHARD // 2
    lengths = np.random.default_rng(0).lognormal(np.log(1000) - 0.5, 1.0, tokens // 1000).astype(np.int64) + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    offsets = np.append(offsets[offsets < tokens], tokens).astype("<i8").tobytes()
    os.truncate(one / "tokens.bin", 0)
    os.truncate(one / "tokens.bin", _SHARD)  # a sparse file: all tokens are 0
    (one / "offsets.bin").write_bytes(offsets)
    meta = json.loads((one / "meta.json").read_text())["content"]
    for name, sums in (
        ("tokens.bin", [zlib.crc32(bytes(BLOCK))] * (_SHARD // BLOCK)),
        ("offsets.bin", [zlib.crc32(offsets[i : i + BLOCK]) for i in range(0, len(offsets), BLOCK)]),
    ):
        meta["files"][name] = {"size": (one / name).stat().st_size, "checksums": sums}
    (one / "meta.json").write_text(json.dumps({"content": meta, "checksum": checksum_of(meta)}))
    facts = manifest["shards"][0] | {
        "documents": len(offsets) // 8 - 1,
        "tokens": tokens,
        "checksum": checksum_of(meta),
    }
    names = [f"shard-{i:016x}" for i in range(-(-_TERABYTE // _SHARD))]
    for name in names:
        (large / name).mkdir()
        for file in ("tokens.bin", "offsets.bin", "meta.json"):
            os.link(one / file, large / name / file)
    manifest["shards"] = [facts | {"name": name} for name in names]
    (large / "dataset.json").write_text(json.dumps({"content": manifest, "checksum": checksum_of(manifest)}))
    output = subprocess.run(
        [sys.executable, "-c", _START, str(large), str(folder / "cache")], capture_output=True, text=True, check=True
    ).stdout
    facts = json.loads(output)
    return {"offsets_gb": round((facts["documents"] + facts["shards"]) * 8 / 1e9, 2)} | {
        k: round(v, 3) for k, v in facts.items()
    }


def table(results: dict[str, Any]) -> str:
    """Returns the Markdown of a result."""
    parts = []
    if "hosts" in results:
        rows = [
            "| TPU mesh | hosts | rows a step | a host needs | it reads | its first to its last | all hosts read |",
            "|---|---|---|---|---|---|---|",
        ]
        for r in results["hosts"]:
            rows.append(
                f"| {r['topology']} {r['mesh']} | {r['hosts']:,} | {r['rows']:,} | {r['needed']} | {r['read']} | {r['span']} | "
                f"{r['read_of_needed']:.2f} of what they need (first to last: {r['span_of_needed']:.1f}) |"
            )
        parts.append("\n".join(rows))
    if "reads" in results:
        rows = [
            "| tokens of a row | documents in it | | reads a row | bytes, of its tokens' |",
            "|---|---|---|---|---|",
        ]
        for r in results["reads"]:
            rows.append(
                f"| {r['length']:,} | {r['documents_a_row']:.1f} | {r['state']} | {r['reads_a_row']:.2f} | "
                f"{r['bytes_of_needed']:.2f} |"
            )
        parts.append("\n".join(rows))
    if "start" in results:
        s = results["start"]
        parts.append(
            f"1 TB of tokens in {s['shards']:,} shards, {s['documents'] / 1e6:,.0f} million documents "
            f"({s['offsets_gb']:.1f} GB of offsets): the first batch of a host with 4 rows after {s['first_batch_s']:.2f} s, "
            f"then {s['ms_a_row']:.1f} ms a row, {s['peak_mb']:.0f} MB."
        )
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code of the command."""
    o = read(OPTIONS, list(sys.argv[1:] if argv is None else argv))
    do = o["do"].split(",")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rows-", dir=o["folder"] or None) as folder:
        if "start" in do:
            results["start"] = start_on_a_terabyte(Path(folder))
        if "reads" in do:
            results["reads"] = reads_of_rows(Path(folder))
        if "hosts" in do:
            results["hosts"] = [rows_of_hosts(*mesh) for mesh in MESHES]
    from benchmarks.measure import provenance_on_cpu

    results = {**provenance_on_cpu(), **results}
    print(table(results))
    if o["out"]:
        Path(o["out"]).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
