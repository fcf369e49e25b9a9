"""`python -m benchmarks.comparisons.plain_attention [cases=causal_8k,full_8k] [tokens=0] [rounds=9] [out=FILE] [commit=]`

On one GPU, flash attention by Triton's plain kernels, which use nothing that only Hopper has, beside the kernels that a call
gets there and beside cuDNN as JAX calls it: the forward, and the forward with the backward. Numbers first: a contestant whose
output or gradients are not within 1% of the operation's XLA backend is not timed. tokens: of each row instead of the case's,
for a try on a small device; XLA checks 1,024.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp

from benchmarks.measure import provenance
from benchmarks.options import read
from benchmarks.small_operations import FLOOR, distance, race
from kernels import flash_attention
from kernels.engines.attention.triton_calls import plain_tiles

OPTIONS = {"cases": "causal_8k,full_8k", "tokens": 0, "rounds": 9, "out": "", "commit": ""}
# name -> rows of the batch, tokens, heads, entries of a head, causal
CASES = {
    "causal_2k": (8, 2048, 16, 128, True),
    "causal_8k": (2, 8192, 16, 128, True),
    "full_8k": (2, 8192, 16, 128, False),
}
CHECKED = 1024


def contestants(width, causal):
    """Returns name -> attention of query, key and value."""

    def ours(**how):
        return lambda *arrays: flash_attention(*arrays, causal=causal, **how)

    def cudnn(*arrays):
        return jax.nn.dot_product_attention(*arrays, is_causal=causal, implementation="cudnn")

    return {
        "cudnn": cudnn,
        "plain": ours(platform="triton", cfg=plain_tiles(width, 2)),
        "hopper": ours(platform="triton"),
    }


def directions(attention):
    def both(d, *arrays):
        out, pull = jax.vjp(attention, *arrays)
        return out, *pull(d)

    return {"forward": jax.jit(lambda d, *arrays: attention(*arrays)), "both": jax.jit(both)}


def rows_of(name, tokens, rounds):
    """Yields a row for each direction and contestant of a case."""
    B, T, N, H, causal = CASES[name]
    T = tokens or T

    def arrays(T):
        """Returns the cotangent, query, key and value."""
        return [jax.random.normal(key, (B, T, N, H), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4)]

    made, small = {}, arrays(min(T, CHECKED))
    wanted = directions(lambda *x: flash_attention(*x, causal=causal, platform="xla"))["both"](*small)
    for who, attention in contestants(H, causal).items():
        programs = directions(attention)
        off = max(float(distance(x, y)) for x, y in zip(programs["both"](*small), wanted, strict=True))
        if off < FLOOR:
            made[who] = programs
        else:
            yield {"case": name, "who": who, "failed": f"{off:.1e} off"}
    large = arrays(T)
    pairs = B * N * T * (T + 1 if causal else 2 * T) / 2
    for direction, products in (("forward", 2), ("both", 7)):
        runs = {who: functools.partial(programs[direction], *large) for who, programs in made.items()}
        times = race(runs, rounds)
        for who, seconds in times.items():
            row = {"case": name, "direction": direction, "who": who, "us": seconds * 1e6}
            row["TFLOP_s"] = products * 2 * pairs * H / seconds / 1e12
            yield row | ({"of_cudnn": times["cudnn"] / seconds} if "cudnn" in times else {})


def main(argv):
    o = read(OPTIONS, argv)
    names = o["cases"].split(",")
    if unknown := sorted({*names} - {*CASES}):
        raise SystemExit(f"cases names {', '.join(unknown)}; there are {', '.join(CASES)}")
    if o["tokens"] < 0 or o["rounds"] < 1:
        raise SystemExit("tokens must not be negative, and rounds must be positive")
    if jax.default_backend() != "gpu":
        raise SystemExit("attention by cuDNN and on Hopper needs a GPU, and JAX sees none here")
    facts = {"device": jax.devices()[0].device_kind, "dtype": "bfloat16", "options": o, **provenance(o["commit"])}
    rows = []
    for name in names:
        for row in rows_of(name, o["tokens"], o["rounds"]):
            rows.append(row)
            print(", ".join(f"{x:.2f} {n}" if isinstance(x, float) else str(x) for n, x in row.items()), flush=True)
    if o["out"]:
        with open(o["out"], "w") as file:
            json.dump({**facts, "rows": rows}, file, indent=1)
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
