"""The passes of attention on TPUs, each with a grid over the active pairs of tiles. The forward has one pass by queries. The
backward has one by queries, for dQ, and one by keys, for dK and dV, so nothing is accumulated in memory.

The pair of a step is prefetched as one scalar, so its blocks are loading before the step begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.engines.attention.pallas_calls import (
    Call,
    Input,
    Output,
    Plan,
    heads_first,
    of_keys,
    of_queries,
    per_query,
    tokens_first,
)
from kernels.engines.attention.pallas_kernels import bwd_dkv_kernel, bwd_dq_kernel, fwd_kernel
from kernels.engines.attention.pallas_visits import Step, Visits, decoded
from kernels.framework.execute import Saved
from kernels.framework.work import Work, nbytes
from kernels.toolchains.pallas import pallas_launch

__all__ = ["attend", "gradients", "launch", "of_saved"]

VMEM_BYTES = 48 * 2**20


def launch(
    kernel: Callable[[Plan, dict[str, Any], Step], None],
    call: Call,
    visits: Visits,
    grid: tuple[int, int, int] | tuple[int, int],
    where: Callable[..., tuple[Any, Any]],
    outputs: list[Output],
    scratch: dict[str, tuple[int, int]],
    extra: tuple[Input, ...] = (),
    matmuls: int = 2,
    start: Sequence[jax.Array] = (),
) -> Sequence[jax.Array]:
    """Runs a kernel over a grid (rows, heads, visits), optionally with one more dim, and returns its outputs.

    Args:
      where: grid indices except the visit -> (batch row, query head).
      start: initial contents of the outputs; undefined if omitted.
    """
    how = kernel, call, grid, where, outputs, scratch, extra, matmuls
    if visits.parts == 1:
        return _launch(visits, start, *how)
    # The lists do not fit in scalar memory at once, so each launch takes a part of them and writes its own blocks.
    packed = visits.packed.reshape(visits.parts, -1)

    def part(n: Any, written: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(_launch(visits._replace(packed=packed[n], steps=visits.steps[n]), written, *how))

    return lax.fori_loop(0, visits.parts, part, tuple(jnp.zeros(x.shape, x.dtype) for x in outputs))


def _launch(
    visits: Visits,
    start: Sequence[jax.Array],
    kernel: Callable[[Plan, dict[str, Any], Step], None],
    call: Call,
    grid: tuple[int, int, int] | tuple[int, int],
    where: Callable[..., tuple[Any, Any]],
    outputs: list[Output],
    scratch: dict[str, tuple[int, int]],
    extra: tuple[Input, ...],
    matmuls: int,
) -> list[jax.Array]:
    plan, inputs = call.plan, (*call.inputs, *extra)
    scalars = {"visits": jnp.asarray(visits.packed), **call.scalars}

    def step(packed: Any, *ids: Any) -> Step:
        b, n = where(ids[0], ids[1], *ids[3:])
        return decoded(visits, packed, b, n, ids[2], ids[1])

    def spec(x: Any) -> pl.BlockSpec:
        def index_map(*args: Any) -> tuple:
            current = step(args[len(grid) + 1], *args[: len(grid) + 1])
            return x.index_map(current.b, current.n, current.i, current.j)

        return pl.BlockSpec(x.block, index_map)

    names = [*scalars, *(x.name for x in inputs), *("start" for _ in start), *(x.name for x in outputs), *scratch]

    def body(*refs: Any) -> None:
        named = dict(zip(names, refs, strict=True))
        kernel(plan, named, step(named["visits"], *(pl.program_id(d) for d in range(len(grid) + 1))))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
    flops = matmuls * (plan.H + plan.Hv) * visits.length * plan.block_q * plan.block_k * call.B * plan.N
    return pallas_launch(
        body,
        *scalars.values(),
        *(x.array for x in inputs),
        *start,
        out_shape=shapes,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(*grid[:2], visits.steps, *grid[2:]),
            in_specs=[spec(x) for x in inputs] + [pl.BlockSpec(memory_space=pl.ANY) for _ in start],
            out_specs=[spec(x) for x in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch.values()],
        ),
        dimension_semantics=("parallel", "parallel", *("arbitrary" for _ in grid[1:])),
        vmem_limit_bytes=VMEM_BYTES,
        input_output_aliases={len(scalars) + len(inputs) + n: n for n in range(len(start))},
        work=Work(flops, nbytes(*(x.array for x in inputs), *shapes)),
        name=f"{plan.op}_{kernel.__name__}",
    )


def attend(call: Call, by_queries: Visits, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, N, Hv] in that dtype, lse float32 [B, T, N])."""
    plan = call.plan
    B, N, Hv, bq = call.B, plan.N, plan.Hv, plan.block_q
    rows = -(-plan.T // bq) * bq
    out_shape = (B, N, rows, Hv) if plan.value_width == 1 else (B, N, Hv, rows)
    out, lse = launch(
        fwd_kernel,
        call,
        by_queries,
        (B, N),
        lambda b, n: (b, n),
        [
            Output("out", out_shape, dtype, *of_queries(Hv, bq)),
            Output("lse", (B, N, 1, rows), jnp.float32, (None, None, 1, bq), lambda b, n, i, j: (b, n, 0, i)),
        ],
        {"largest": (1, bq), "total": (1, bq), "turned": (Hv, bq)},
    )
    return tokens_first(out, Hv, plan.T), lse[:, :, 0, : plan.T].swapaxes(1, 2)


def _of_query(bq: int) -> tuple[tuple, Callable]:
    """Returns the block of a per-query array, and its index map."""
    return (None, None, 1, bq), lambda b, n, i, j: (b, n, 0, i)


def of_saved(call: Call, saved: Saved, dtype: Any) -> tuple[Input, ...]:
    """Returns the inputs of a backward besides those of the forward. `dtype` is that of the queries."""
    plan = call.plan
    bq = plan.block_q
    # A query without keys contributes nothing, whatever the cotangents of its infinite lse are: its weights are exp(-inf).
    some = saved.lse != -jnp.inf
    return (
        Input("d_out", heads_first(saved.d_out.astype(dtype), bq), *of_queries(plan.Hv, bq)),
        Input("lse", per_query(jnp.where(some, saved.lse, jnp.inf), bq, jnp.inf), *_of_query(bq)),
        Input("delta", per_query(jnp.where(some, saved.delta, 0), bq), *_of_query(bq)),
    )


def gradients(call: Call, extra: tuple[Input, ...], by_queries: Visits, by_keys: Visits) -> dict[str, jax.Array]:
    """Returns the gradients of query, key and value; with ALiBi also `slopes`, [B, N]. `extra` comes from `of_saved`."""
    plan, B, G = call.plan, call.B, call.G
    bq, bk = plan.block_q, plan.block_k
    arrays = {x.name: x.array for x in call.inputs}
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    outputs = [Output("d_query", query.shape, query.dtype, *of_queries(plan.H, bq))]
    scratch = {"turned": (plan.H, bq)}
    if plan.alibi:
        outputs.append(Output("d_slopes", (B, plan.N, 1, -(-plan.T // bq) * bq), jnp.float32, *_of_query(bq)))
        scratch["slope_sum"] = (1, bq)
    dq, *of_rows = launch(
        bwd_dq_kernel,
        call,
        by_queries,
        (B, plan.N),
        lambda b, n: (b, n),
        outputs,
        scratch,
        extra,
        matmuls=3,
    )
    # If the lists already iterate over the query heads of a group, the last grid dim has one step.
    group = 1 if by_keys.per_head else G
    dk, dv = launch(
        bwd_dkv_kernel,
        call,
        by_keys,
        (B, plan.N // G, group),
        lambda b, n, g: (b, n * G + g),
        [
            Output("d_key", key.shape, key.dtype, *of_keys(plan.H, bk, G)),
            Output("d_value", value.shape, value.dtype, *of_keys(plan.Hv, bk, G)),
        ],
        {"key_sum": (bk, plan.H), "value_sum": (bk, plan.Hv)},
        extra,
        matmuls=4,
    )
    grads = {
        "query": tokens_first(dq, plan.H, plan.T),
        "key": tokens_first(dk, plan.H, plan.S),
        "value": tokens_first(dv, plan.Hv, plan.S),
    }
    return grads | ({"slopes": of_rows[0].sum((2, 3))} if plan.alibi else {})
