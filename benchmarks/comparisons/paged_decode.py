"""`python -m benchmarks.comparisons.paged_decode [case=decode_8k,...] [tune=true] [out=FILE] [commit=]`

On one GPU, attention over pages: bytes that a step must read over its time, beside a copy of as many bytes, and of prompts
FLOP/s beside flash attention on the same pairs. Numbers first: the first requests of each case are those of the `xla` backend.
Times are of the profiler, in which some kernel of a call ran, of calls whose inputs are not in the cache; those of rows that
are written are of the clock, of programs of many steps. Medians of 9 or more.
With `tune=true`, each of the configurations that the tuner would try.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels
from benchmarks.measure import provenance
from benchmarks.options import read
from benchmarks.race import copies
from benchmarks.timing import cache_bytes, kernel_seconds_of_each
from kernels.framework.backend import Case
from kernels.ops.paged_attention import append_op, op, page_op

DEFAULTS = {"case": "", "tune": False, "out": "", "commit": ""}
LIMIT = 1.6e-2  # of bfloat16, as in benchmarks/check.py
TRIES = 9


def timed(call: Callable[..., Any], *arguments: Any) -> float:
    """Returns the seconds in which some kernel of a call ran, the median of calls that find no input in the cache."""
    run = jax.jit(call)
    number = copies(arguments, cache_bytes(), memory_bound=True)
    inputs = [arguments] if number == 1 else [jax.tree.map(lambda x: x + 0, arguments) for _ in range(number)]
    jax.block_until_ready([run(*one) for one in inputs])
    return statistics.median(kernel_seconds_of_each([functools.partial(run, *one) for one in inputs] * TRIES))


def report(
    asked: dict[str, Any], cases: Iterable[str], row: Callable[[str], dict[str, Any]], *first: dict[str, Any]
) -> None:
    """Prints a row of each case, or of those in `case=`, and writes them, after the first ones, to `out=`."""
    rows = [*first]
    for name in filter(None, asked["case"].split(",")) if asked["case"] else cases:
        rows.append(row(name))
        print({n: round(x, 4) if isinstance(x, float) else x for n, x in rows[-1].items()}, flush=True)
    if asked["out"]:
        result = {"device": jax.devices()[0].device_kind, **provenance(asked["commit"] or None), "rows": rows}
        Path(asked["out"]).write_text(json.dumps(result, indent=1) + "\n")


def copied(size: int) -> float:
    """Returns the bytes per second of a copy that reads and writes `size` bytes in all."""
    half = jnp.ones(size // 8, jnp.float32)
    return size / timed(lambda x: x + 1, half)


def off(which: Any, arguments: dict[str, Any]) -> float:
    """Returns how far the first requests are from the `xla` backend's."""
    few = dict(arguments)
    if which is page_op:
        few |= {n: few[n][:2] for n in ("query", "kv_lens", "block_tables")}
    run = {p: jax.jit(functools.partial(which, platform=p)) for p in ("xla", "triton")}
    a, b = (np.asarray(run[p](**few), np.float32) for p in ("triton", "xla"))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def row(which: Any, case: Case, tune: bool) -> list[dict[str, Any]]:
    """Returns rows of a case: of the default, and with `tune` of every candidate."""
    arguments = which.case_inputs(case, dtype="bfloat16")
    if (error := off(which, arguments)) > LIMIT:
        raise SystemExit(f"{case.name}: off by {error:.1e}, so nothing is timed")
    call = which.bind(**arguments)
    work, _ = which.work(call)
    T = case.dims.get("T", 1)
    rows = []
    for cfg in which.backends["triton_gpu"].candidates(call) if tune else [None]:
        try:
            seconds = timed(functools.partial(which, platform="triton", cfg=cfg), *_positional(which, arguments))
        except Exception as error:  # a candidate that does not fit is a row too
            rows.append({"case": case.name, "cfg": str(cfg), "error": str(error)[:100]})
            continue
        rows.append({"case": case.name, "us": seconds * 1e6, "TB/s": work.bytes / seconds / 1e12})
        if cfg is not None:
            rows[-1]["cfg"] = ", ".join(f"{n}={v}" for n, v in vars(cfg).items() if v is not None)
        if T > 1:
            rows[-1] |= beside_flash(arguments, case, seconds)
        if which is op and not tune:
            rows[-1] |= beside_its_parts(arguments, seconds)
    return rows


def _positional(which: Any, arguments: dict[str, Any]) -> list[Any]:
    return [arguments.get(name) for name in which.parameters if which.parameters[name].kind is not None]


def beside_flash(arguments: dict[str, Any], case: Case, seconds: float) -> dict[str, float]:
    """Returns FLOP/s of the pairs that are seen, and the time of flash attention over the same keys in one array."""
    d = case.dims
    B, T, S = d["B"], d["T"], d["pages"] * d["C"] // d["B"]
    pairs = B * d["N"] * (T * S - T * (T - 1) // 2)
    keys, values = (arguments[n].reshape(B, S, d["K"], -1) for n in ("key_cache", "value_cache"))
    flash = functools.partial(kernels.flash_attention, causal=True)
    theirs = timed(flash, arguments["query"], keys, values)
    return {"TFLOP/s": 4e-12 * pairs * d["H"] / seconds, "flash us": theirs * 1e6, "of flash": theirs / seconds}


def beside_its_parts(arguments: dict[str, Any], seconds: float) -> dict[str, float]:
    """Returns the time of each kind of request of a mixed batch by itself, decodes and prompts, and of the batch over their
    sum."""
    counts = np.diff(np.asarray(arguments["query_start_loc"]))
    parts = {}
    for name, chosen in (("decodes", counts == 1), ("prompts", counts > 1)):
        (index,) = np.nonzero(chosen)
        T = counts[index[0]]
        rows = np.concatenate([np.arange(T) + begin for begin in np.asarray(arguments["query_start_loc"])[index]])
        part = {n: arguments[n] for n in ("key_cache", "value_cache")} | {
            n: arguments[n][index] for n in ("kv_lens", "block_tables")
        }
        part["query"] = arguments["query"][rows].reshape(len(index), T, *arguments["query"].shape[1:])
        parts[name] = timed(functools.partial(page_op, platform="triton"), *_positional(page_op, part))
    return {f"{n} us": 1e6 * x for n, x in parts.items()} | {"of its parts": seconds / sum(parts.values())}


def written(case: Case) -> dict[str, Any]:
    """Returns the row of rows written into donated pages, in a program of many steps."""
    arguments = append_op.case_inputs(case, dtype="bfloat16")
    caches = {n: arguments.pop(n) for n in ("key_cache", "value_cache")}
    steps = 50

    def write(caches: Any) -> Any:
        return append_op(**arguments, key_cache=caches[0], value_cache=caches[1], platform="triton")

    def copy(rows: Any) -> Any:  # as many bytes, read and written
        return tuple(x + 1 for x in rows)

    def of(step: Callable[[Any], Any], carried: Any) -> tuple[float, int]:
        loop = jax.jit(lambda x: jax.lax.scan(lambda x, _: (step(x), ()), x, None, steps)[0], donate_argnums=0)
        program = loop.lower(carried).compile()
        carried = jax.block_until_ready(program(carried))
        times = []
        for _ in range(TRIES):
            start = time.perf_counter()
            carried = jax.block_until_ready(program(carried))
            times.append((time.perf_counter() - start) / steps)
        return statistics.median(times), program.memory_analysis().temp_size_in_bytes

    rows = tuple(arguments[n] + 0 for n in ("key", "value"))
    size = 2 * sum(x.nbytes for x in rows)
    (seconds, temporary), (copied, _) = of(write, tuple(caches.values())), of(copy, rows)
    line = {"case": case.name, "us": seconds * 1e6, "TB/s": size / seconds / 1e12, "temporary bytes": temporary}
    return line | {"copy us": copied * 1e6, "of a copy": copied / seconds}


def main() -> None:
    asked = read(DEFAULTS, sys.argv[1:])
    wanted = set(filter(None, asked["case"].split(",")))
    found = [{"case": "a copy of 2 GiB", "TB/s": copied(2**31) / 1e12}]
    print(found[0], flush=True)
    for which in (page_op, op, append_op):
        for case in which.cases:
            if "bench" not in case.tags or (wanted and case.name not in wanted):
                continue
            for line in [written(case)] if which is append_op else row(which, case, asked["tune"]):
                found.append(line)
                print({n: round(x, 3) if isinstance(x, float) else x for n, x in line.items()}, flush=True)
    if asked["out"]:
        result = {"device": jax.devices()[0].device_kind, **provenance(asked["commit"] or None), "rows": found}
        Path(asked["out"]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
