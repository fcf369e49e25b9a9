"""`python -m benchmarks.small_operations [ops=rms_norm,cross_entropy] [quick=0] [candidates=0] [divide=1] [out=FILE] [commit=]`

On one GPU, the operations beside attention, forward and backward by themselves, on Triton and on XLA, beside a copy on the
device that moves as many bytes as the operation must (its declared `work`). Then a gated MLP, and projection with cross
entropy, value and gradients, beside a program that keeps whole logits. Numbers first: a contestant that is not within 1% of
the contract in float32, in every output and gradient, is not timed, and the program ends with 1.

Times are medians of shuffled rounds, each of calls back to back. quick=1: half of the shapes and fewer rounds. candidates=1:
every configuration that tuning would try. divide: rows divided by that, for a try on a small device.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import statistics
import sys
import time

import jax
import jax.numpy as jnp

import kernels
from benchmarks.cases import as_tuple
from benchmarks.measure import provenance
from benchmarks.options import read, recorded
from kernels.framework.binding import floats_apart, is_float_array, merged
from kernels.ops.cross_entropy import CrossEntropyConfig

OPS = kernels.operations()
# operation -> cases; those after the first are left out by `quick`
BOUND_BY_MEMORY = {
    "rotary_embedding_pair": ("llama_8b",),
    "rotary_embedding": ("llama_8b",),
    "rms_norm": ("model_4k", "model_8k"),
    "fused_add_rms_norm": ("model_4k", "model_8k"),
    "layer_norm": ("model_4k", "model_8k"),
    "fused_add_layer_norm": ("model_4k", "model_8k"),
    "gated_activation": ("llama_8b",),
    "cross_entropy_of_logits": ("llama_8b",),
    "kl_divergence_of_logits": ("llama_8b",),
}
# The gradient of x and of the residual are one array. As two results of a program they would be two, by a copy that no model
# makes: one of them is timed.
THE_SAME = {"fused_add_rms_norm": ("residual",), "fused_add_layer_norm": ("residual",)}
OPTIONS = {"ops": "", "quick": 0, "candidates": 0, "divide": 1, "out": "", "commit": ""}
FLOOR = 1e-2  # of bfloat16, in the 2-norm
ROUNDS, SECONDS = 9, 0.02


@jax.jit
def distance(x, y):
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((x - y) ** 2) / jnp.maximum(jnp.sum(y**2), 1e-20))


def shrunk(case, divide):
    """Returns the case with its rows divided."""
    dims = {
        k: tuple(max(1, n // divide) for n in v) if isinstance(v, tuple) else max(1, v // divide) if k == "T" else v
        for k, v in case.dims.items()
    }
    return dataclasses.replace(case, dims=dims)


def inputs_of(op, case):
    """Returns the arguments of a case in bfloat16, random numbers made on the device: a host takes seconds for each array."""
    arguments = op.case_inputs(case, dtype="bfloat16", shapes_only=True)
    drawn = [n for n, v in arguments.items() if isinstance(v, jax.ShapeDtypeStruct)]
    keys = dict(zip(drawn, jax.random.split(jax.random.key(0), len(drawn))))
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return {n: draw(keys[n], v.shape, v.dtype) if n in keys else v for n, v in arguments.items()}


def race(contestants, rounds):
    """Returns name -> seconds, the median of rounds in an order shuffled anew."""
    calls, times = {}, {name: [] for name in contestants}
    for name, f in contestants.items():
        jax.block_until_ready(f())
        start = time.perf_counter()
        jax.block_until_ready(f())
        calls[name] = max(1, min(200, int(SECONDS / max(time.perf_counter() - start, 1e-5))))
    for _ in range(rounds):
        for name in random.sample(list(contestants), len(contestants)):
            start, result = time.perf_counter(), None
            for _ in range(calls[name]):
                result = contestants[name]()
            jax.block_until_ready(result)
            times[name].append((time.perf_counter() - start) / calls[name])
    return {name: statistics.median(t) for name, t in times.items()}


def copy_of(num_bytes):
    """Returns a function that reads and writes that many bytes on the device, together."""
    x = jnp.zeros(max(1, int(num_bytes) // 4), jnp.uint16)
    copy = jax.jit(jnp.copy)
    return lambda: copy(x)


def truth_of(op, arguments):
    """Returns (outputs, cotangents, gradients) of the contract in float32."""
    traced = {k: v for k, v in arguments.items() if hasattr(v, "dtype")}
    static = {k: v for k, v in arguments.items() if k not in traced}

    @jax.jit
    def run(traced):
        wide = {k: v.astype(jnp.float32) if is_float_array(v) else v for k, v in traced.items()}
        floats, others = floats_apart(wide, op.no_gradient)
        outputs, pull = jax.vjp(lambda f: as_tuple(op.function(**static, **merged(f, others))), floats)
        keys = jax.random.split(jax.random.key(7), len(outputs))
        d = tuple(jax.random.normal(k, y.shape) for k, y in zip(keys, outputs))
        return outputs, d, pull(d)[0]

    return run(traced)


def _once(op, gradients):
    return {n: g for n, g in gradients.items() if n not in THE_SAME.get(op.name, ())}


def contestants_of(op, arguments, d, candidates):
    """Yields (name, forward, outputs -> (backward, backward to be timed)) for each backend, and for each configuration of
    Triton's."""
    backends = [b for b in op.backends.values() if "cuda" in b.platforms]
    for backend in backends:
        # Arrays are arguments, not constants of the program.
        configurations = {"": None}
        if candidates and backend.candidates:
            configurations |= {f" {i}": c for i, c in enumerate(backend.candidates(op.bind(**arguments)))}
        for label, cfg in configurations.items():
            how = {"platform": backend.name, "cfg": cfg}
            traced = {k: v for k, v in arguments.items() if hasattr(v, "dtype")}
            static = {k: v for k, v in arguments.items() if k not in traced}
            run = jax.jit(lambda traced, how=how, static=static: as_tuple(op(**traced, **static, **how)))
            pull = jax.jit(lambda saved, traced, how=how, static=static: op.backward(saved, **traced, **static, **how))
            timed = jax.jit(lambda saved, traced, pull=pull: _once(op, pull(saved, traced)))

            def forward(run=run, traced=traced):
                return run(traced)

            def backward_of(outputs, pull=pull, timed=timed, traced=traced):
                saved = {n: y for n, y in zip(op.outputs, outputs) if n in op.residuals}
                saved |= {f"d_{n}": c.astype(y.dtype) for n, y, c in zip(op.outputs, outputs, d)}
                return (lambda: pull(saved, traced)), (lambda: timed(saved, traced))

            yield backend.name + label + (f" {cfg}" if cfg else ""), forward, backward_of


def bound_by_memory(name, case, divide, candidates, rounds):
    """Yields a row for each direction and contestant of an operation."""
    op = OPS[name]
    case = shrunk(case, divide)
    arguments = inputs_of(op, case)
    exact, d, gradients = truth_of(op, arguments)
    works = op.work(op.bind(**arguments))
    right = {"forward": {}, "backward": {}}
    for who, forward, backward_of in contestants_of(op, arguments, d, candidates):
        try:
            outputs = forward()
            off = {n: float(distance(y, w)) for n, y, w in zip(op.outputs, outputs, exact)}
            whole, backward = backward_of(outputs)
            found = whole()
            off |= {f"d {n}": float(distance(found[n], gradients[n])) for n in gradients}
        except Exception as error:
            yield {"op": name, "case": case.name, "who": who, "failed": str(error).splitlines()[0][:200]}
            continue
        wrong = {n: v for n, v in off.items() if not v < FLOOR}
        if wrong:
            yield {"op": name, "case": case.name, "who": who, "failed": f"WRONG: {wrong}"}
            continue
        right["forward"][who], right["backward"][who] = forward, backward
    del exact, gradients
    for direction, work in zip(right, works, strict=True):
        times = race({**right[direction], "copy": copy_of(work.bytes)}, rounds)
        for who, seconds in times.items():
            row = {"op": name, "case": case.name, "direction": direction, "who": who, "us": seconds * 1e6}
            yield row | {"GB_s": work.bytes / seconds / 1e9, "of_copy": times["copy"] / seconds}


def gated_mlp(divide, candidates):
    """Returns (case, name -> function of the arrays, arrays) of a gated MLP, value and gradients."""
    op = OPS["gated_mlp"]
    case = shrunk(next(c for c in op.cases if c.name == "llama_8b"), divide)
    arrays = inputs_of(op, case)
    scaled = {k: v if k == "x" else (v * 0.02).astype(v.dtype) for k, v in arrays.items()}

    def of(platform):
        return lambda **a: jnp.sum(kernels.gated_mlp(**a, platform=platform).astype(jnp.float32) ** 2)

    return case.name, {"xla": of("xla"), "triton": of("triton")}, scaled


def projection(divide, candidates, named="llama_8b"):
    """Returns the same of hidden states, a projection and cross entropy, the mean: with gradients made in the forward, with
    logits computed twice, and with whole logits. `candidates`: in blocks of other sizes too."""
    op = OPS["cross_entropy_sums"]
    case = shrunk(next(c for c in op.cases if c.name == named), divide)
    made = inputs_of(op, case)
    targets = made.pop("targets")
    made["lm_head"] = (made["lm_head"] * 0.02).astype(jnp.bfloat16)

    def of(platform, rows=None):
        cfg = CrossEntropyConfig(block_rows=rows)
        return lambda **a: kernels.fused_cross_entropy(**a, targets=targets, platform=platform, cfg=cfg)

    def twice(**a):
        terms = kernels.fused_token_losses(**a, targets=targets, platform="triton")
        return jnp.sum(terms.loss) / jnp.sum(terms.counted)

    def whole(hidden, lm_head):
        logits = (hidden @ lm_head).astype(jnp.float32)
        counted = targets >= 0
        at = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=1)[:, 0]
        each = jax.nn.logsumexp(logits, axis=-1) - at
        return jnp.sum(jnp.where(counted, each, 0)) / jnp.sum(counted)

    contestants = {"whole logits": whole, "triton": of("triton"), "xla": of("xla"), "triton, logits twice": twice}
    sizes = (512, 2048, 4096) if candidates else ()
    return case.name, contestants | {f"triton, {n} rows": of("triton", n) for n in sizes}, made


def programs(name, made, rounds):
    """Yields a row for each program: value and gradients, its time, its speed beside the first, which is plain JAX, and what
    memory it takes beside arguments and results."""
    case, functions, arrays = made
    compiled, memory, wanted = {}, {}, None
    for who, function in functions.items():
        run = jax.jit(jax.value_and_grad(lambda a, function=function: function(**a)))
        try:
            program = run.lower(arrays).compile()
            result = program(arrays)
        except Exception as error:
            yield {"op": name, "case": case, "who": who, "failed": str(error).splitlines()[0][:200]}
            continue
        if wanted is None:  # the first is checked too: by the others
            wanted = jax.tree.leaves(result)
        off = max(float(distance(a, b)) for a, b in zip(jax.tree.leaves(result), wanted, strict=True))
        if not off < 2 * FLOOR:
            yield {"op": name, "case": case, "who": who, "failed": f"WRONG: {off:.2e} from {next(iter(functions))}"}
            continue
        memory[who] = program.memory_analysis().temp_size_in_bytes
        compiled[who] = lambda program=program: program(arrays)
    times = race(compiled, rounds)
    plain = times.get(next(iter(functions)), math.nan)
    for who, seconds in times.items():
        row = {"op": name, "case": case, "direction": "value and gradients", "who": who, "us": seconds * 1e6}
        yield row | {"of_plain": plain / seconds, "scratch_MiB": memory[who] / 2**20}


def table(rows):
    """Returns the rows as Markdown."""
    heads = ("operation", "case", "direction", "by", "us", "GB/s", "of a copy", "of plain JAX", "scratch MiB")
    keys = ("op", "case", "direction", "who", "us", "GB_s", "of_copy", "of_plain", "scratch_MiB")
    digits = {"us": ".0f", "GB_s": ".0f", "of_copy": ".2f", "of_plain": ".2f", "scratch_MiB": ".0f"}
    cells = [[f"{row[k]:{digits.get(k, '')}}" if k in row else "" for k in keys] for row in rows if "failed" not in row]
    said = [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *cells)]
    failed = [f"{row['op']} {row['case']}, {row['who']}: {row['failed']}" for row in rows if "failed" in row]
    return "\n".join([*said, *(f"\nNot timed: {line}." for line in failed)])


def main(argv):
    o = read(OPTIONS, argv)
    start, rows, asked = time.perf_counter(), [], [n for n in o["ops"].split(",") if n]
    there = [*BOUND_BY_MEMORY, "gated_mlp", "cross_entropy"]
    if unknown := sorted({*asked} - {*there}):
        raise SystemExit(f"ops names {', '.join(unknown)}; there are {', '.join(there)}")
    if o["divide"] < 1:
        raise SystemExit(f"divide must be positive, got {o['divide']}")
    quick, candidates = bool(o["quick"]), bool(o["candidates"])
    rounds = 5 if quick else ROUNDS
    facts = {
        "device": jax.devices()[0].device_kind,
        "dtype": "bfloat16",
        "options": recorded(o),
        **provenance(o["commit"]),
    }

    def take(found):
        for row in found:
            rows.append(row)
            share = "".join(f", {row[n]:.2f} {n}" for n in ("of_copy", "of_plain") if n in row)
            said = row.get("failed") or f"{row['us']:.1f} us{share}"
            print(f"{row['op']} {row['case']} {row.get('direction', '')} {row['who']}: {said}", flush=True)
            if o["out"]:  # after each, so that what was measured is not lost with what comes after
                with open(o["out"], "w") as file:
                    json.dump({**facts, "rows": rows}, file, indent=1)

    for name, names in BOUND_BY_MEMORY.items():
        if asked and name not in asked:
            continue
        cases = {c.name: c for c in OPS[name].cases}
        for case in names[:1] if quick else names:
            take(bound_by_memory(name, cases[case], o["divide"], candidates, rounds))
    longer = functools.partial(projection, named="llama_8b_32k")
    for name, make in (("gated_mlp", gated_mlp), ("cross_entropy", projection), ("cross_entropy", longer)):
        if not asked or name in asked:
            take(programs(name, make(o["divide"], candidates), rounds))
    print(f"\n{facts['device']}, bfloat16, {time.perf_counter() - start:.0f} s\n\n{table(rows)}")
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
