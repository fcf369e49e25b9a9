"""`python -m benchmarks.comparisons.scaled_matmul_gpu [shapes=8192x8192x8192] [scalings=row,block] [tiles=chosen] [groups=]
[draws=0] [seed=0] [out=FILE]`

On one GPU, products of 8-bit floats with scales: scaled_matmul with the tile that a call gets (`tiles=candidates`: with those
that the tuner tries; `tiles=every`: in other bands too), torch._scaled_mm where it takes such scales, and a product in bfloat16
of as many FLOPs. Then `quantize_scaled` of an operand. `groups=65536x2048x768x128`: grouped products, rows, D, F and matrices.
`draws=12 seed=1`: besides these 12 shapes that nobody chose, drawn from the seed.
Numbers first: a contestant that is not within 1% of the contract (3% where sums may stay in the tensor cores) is not timed.

TFLOP/s are of the median of shuffled rounds, by the profiler's times of kernels. `out=FILE` keeps them, and
`table=FILE` prints what a file says of the tile that a call got.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.comparisons.grouped_matmul_gpu import distance, wait
from benchmarks.timing import kernel_seconds_of_each
from kernels import quantize_both_ways, quantize_scaled
from kernels.ops.scaled_matmul import op

OFF = {False: 0.01, True: 0.03}
# name -> rows and entries that share a scale, of a and of b
SCALINGS = {
    "tensor": ((None, None), (None, None)),
    "row": ((1, None), (1, None)),
    "block": ((1, 128), (128, 128)),
    "block_of_rows": ((1, 128), (1, 128)),
}


def race(contestants, flops, rounds=9):
    """Returns name -> TFLOP/s, the median of rounds in an order shuffled anew."""
    names = [name for _ in range(rounds) for name in random.sample(list(contestants), len(contestants))]
    for f in contestants.values():
        wait(f())
    times = kernel_seconds_of_each([lambda f=contestants[name]: wait(f()) for name in names])
    by_name = {name: [t for n, t in zip(names, times, strict=True) if n == name] for name in contestants}
    return {name: flops / statistics.median(t) / 1e12 for name, t in by_name.items()}


def ours(operands, tiles):
    """Yields (name, function of no arguments, whether sums may stay in the tensor cores) for each tile."""
    from kernels.ops.scaled_matmul import triton_gpu as gpu

    for fast in (False, True) if operands[2].shape[1] == 1 else (False,):
        tried = gpu.candidates(op.bind(*operands, fast_accumulation=fast))
        chosen = tried[0]
        if tiles == "every":
            tried = [replace(cfg, band=band) for cfg, band in itertools.product(tried, (4, 8, 16))]
            tried += [replace(cfg, num_stages=3) for cfg in tried if cfg.num_stages == 4 and cfg.band == 8]
        for cfg in dict.fromkeys([chosen] if tiles == "chosen" else tried):
            name = f"ours{' fast' * fast} {cfg.block_m}x{cfg.block_n} s{cfg.num_stages} h{cfg.num_buffers} b{cfg.band}"
            run = jax.jit(functools.partial(op, platform="triton", cfg=cfg, fast_accumulation=fast))
            yield name + " (heuristic)" * (cfg == chosen), functools.partial(run, *operands), fast


def torch_scaled(operands):
    """Yields torch._scaled_mm's, for the scales that it has."""
    import torch

    a, b = (
        torch.from_dlpack(jax.lax.bitcast_convert_type(x, jnp.uint8)).view(torch.float8_e4m3fn) for x in operands[:2]
    )
    sa, sb = (torch.from_dlpack(x) for x in operands[2:])
    if sa.shape[1] > 1:  # cuBLAS reads such scales by columns
        sa = sa.t().contiguous().t()
        sb = sb.t().contiguous().t() if sb.shape[0] == b.shape[0] else sb
    for fast in (True, False):
        how = {"scale_a": sa, "scale_b": sb.t(), "out_dtype": torch.bfloat16, "use_fast_accum": fast}
        yield f"torch{' fast' * fast}", functools.partial(torch._scaled_mm, a, b.t(), **how), fast


def contestants(operands, tiles):
    found = list(ours(operands, tiles))
    try:
        found += torch_scaled(operands)
    except Exception as error:
        print(f"torch cannot: {error}"[:200], flush=True)
    return found


def right(made, wanted):
    """Returns those that run and whose numbers are right; what is said of the others is printed."""
    ready = {}
    for name, f, fast in made:
        try:
            out = f()
            off = float(distance(out if isinstance(out, jax.Array) else jnp.from_dlpack(out.contiguous()), wanted))
        except Exception as error:
            print(f"{name} failed: {str(error).splitlines()[0][:200]}", flush=True)
            continue
        print(f"{name}: off by {off:.1e}", flush=True)
        if off < OFF[fast]:
            ready[name] = f
        else:
            print(f"{name} IS WRONG", flush=True)
    return ready


def of_groups(shape, tiles):
    """Yields a line for each contestant of a grouped product "MxDxFxE", of about equal groups: this project's in 8 bits, with
    scales of blocks and of rows; a dense one in 8 bits of as many FLOPs; and the grouped one in bfloat16. Numbers first."""
    from kernels import grouped_matmul
    from kernels.ops.scaled_matmul import grouped_op
    from kernels.ops.scaled_matmul import triton_gpu as gpu

    M, D, F, E = map(int, shape.split("x"))
    sizes = jnp.asarray(
        np.random.default_rng(0).multinomial(M, np.random.default_rng(1).dirichlet(np.full(E, 8.0))), jnp.int32
    )
    x, w = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(((M, D), (E, F, D))))
    plain = jax.jit(lambda x, w: grouped_matmul(x, w, sizes, transpose_rhs=True))
    wanted = plain(x, w)
    for scaling in ("block", "row"):
        one, other = SCALINGS[scaling]
        (a, a_scale), (b, b_scale) = (
            quantize_scaled(x, one),
            jax.jit(jax.vmap(lambda w, by=other: quantize_scaled(w, by)))(w),
        )
        operands = a, b, a_scale, b_scale, sizes
        ready = {"bfloat16": functools.partial(plain, x, w)}
        tried = gpu.grouped_candidates(grouped_op.bind(*operands))
        for cfg in tried if tiles != "chosen" else tried[:1]:
            f = functools.partial(jax.jit(functools.partial(grouped_op, platform="triton", cfg=cfg)), *operands)
            off = float(distance(f(), wanted))
            name = f"ours {cfg.block_m}x{cfg.block_n} s{cfg.num_stages} h{cfg.num_buffers}" + " (heuristic)" * (
                cfg == tried[0]
            )
            print(f"{shape} {scaling} {name}: {off:.1e} off bfloat16's" + " IS WRONG" * (off > 0.06), flush=True)
            if off <= 0.06:
                ready[name] = f
        dense = jax.jit(functools.partial(op, platform="triton"))
        ready["dense"] = functools.partial(dense, a, b[0], a_scale, b_scale[0])
        for name, speed in race(ready, 2 * M * D * F).items():
            print(f"  {speed:7.1f}  {name}", flush=True)
            yield {"shape": shape, "scaling": scaling, "name": name, "TFLOP_s": speed}


def drawn(number, seed):
    """Returns shapes "MxDxF", sizes log-uniform: half of them can have scales of blocks."""
    rng, shapes = np.random.default_rng(seed), []
    for i in range(int(number)):
        step = (128, 16)[i % 2]
        D, F = (int(np.exp(rng.uniform(np.log(512), np.log(16384)))) // step * step for _ in range(2))
        M = int(np.exp(rng.uniform(np.log(512), np.log(min(65536, 4e12 / (D * F))))))
        shapes.append(f"{M}x{D}x{F}")
    return shapes


def divides(shape, scaling):
    """Returns whether the blocks of a scaling divide a shape."""
    _, D, F = map(int, shape.split("x"))
    rows, entries = SCALINGS[scaling][1]
    return not D % (entries or 1) and not F % (rows or 1)


def as_table(rows):
    """Returns TFLOP/s of the tile that a call got and, in brackets, its share of torch's with such sums, and of bfloat16."""
    dense = [r for r in rows if "TFLOP_s" in r and r["shape"].count("x") == 2]
    speeds = {(r["shape"], r["scaling"], r["name"]): r["TFLOP_s"] for r in dense}
    lines = ["| M x D x F | scales | sums | TFLOP/s |", "|---|---|---|---|"]
    for (shape, scaling, name), speed in speeds.items():
        if "(heuristic)" not in name:
            continue
        fast = " fast" in name
        shares = [speed / speeds[shape, scaling, other] for other in ("torch fast" if fast else "torch", "bfloat16")]
        cells = [
            shape,
            scaling,
            "tensor cores" if fast else "float32",
            f"{speed:.0f} ({', '.join(f'{x:.2f}' for x in shares)})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    shapes="8192x8192x8192",
    scalings="row,block,block_of_rows",
    tiles="chosen",
    groups="",
    draws=0,
    seed=0,
    out="",
    table="",
):
    if table:
        return print(as_table(json.loads(Path(table).read_text())["rows"]))
    rows, start = [], time.perf_counter()
    for shape in filter(None, groups.split(",")):
        rows += of_groups(shape, tiles)
    for shape in [*filter(None, shapes.split(",")), *drawn(draws, int(seed))]:
        M, D, F = map(int, shape.split("x"))
        x, w = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(((M, D), (F, D))))
        plain = jax.jit(lambda x, w: jnp.einsum("md,fd->mf", x, w))
        for scaling in (s for s in scalings.split(",") if divides(shape, s)):
            blocks = SCALINGS[scaling]
            quantise = {"a": lambda: quantize_scaled(x, blocks[0]), "b": lambda: quantize_scaled(w, blocks[1])}  # noqa: B023
            (a, a_scale), (b, b_scale) = (f() for f in quantise.values())
            operands = a, b, a_scale, b_scale
            wide = (v.astype(jnp.bfloat16) for v in (a, b)) if scaling in ("row", "tensor") else None
            if wide is None:
                wanted = jax.jit(functools.partial(op, platform="xla"))(*operands)
            else:  # exact in bfloat16, so the product is too but for its sums
                wanted = (
                    jnp.einsum("md,fd->mf", *wide, preferred_element_type=jnp.float32)
                    * a_scale
                    * b_scale.reshape(1, -1)
                )
            ready = right(contestants(operands, tiles), wanted)
            speeds = race(ready | {"bfloat16": functools.partial(plain, x, w)}, 2 * M * D * F)
            print(f"\n{shape} {scaling}, TFLOP/s, of bfloat16")
            for name, speed in sorted(speeds.items(), key=lambda item: -item[1]):
                print(f"  {speed:7.1f}  {speed / speeds['bfloat16']:5.2f}  {name}", flush=True)
                rows.append({"shape": shape, "scaling": scaling, "name": name, "TFLOP_s": speed})
            size = {"a": 3 * M * D, "b": 3 * F * D}
            if scaling == "block":
                quantise |= {"a both ways": lambda: quantize_both_ways(x)}  # noqa: B023
                size["a both ways"] = 4 * M * D
            for operand, f in quantise.items():
                (speed,) = race({operand: lambda f=f: f()[0]}, size[operand]).values()
                print(f"  quantising {operand}: {speed:.2f} TB/s", flush=True)
                rows.append({"shape": shape, "scaling": scaling, "name": f"quantize {operand}", "TB_s": speed})
            print(f"{time.perf_counter() - start:.0f} s", flush=True)
    if out:
        about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "command": " ".join(sys.argv)}
        Path(out).write_text(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main(**dict(argument.split("=", 1) for argument in sys.argv[1:]))
