"""The passes of attention on TPUs: a grid over the pairs of tiles that exist. One pass by queries for the output; in the
backward one by queries for dQ and one by keys for dK and dV, so that nothing is added in memory.

Which pair a step is for is prefetched as one scalar, so that its blocks are on their way before its turn.
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
    """Returns the outputs of a kernel over (rows, heads, visits) and one more dim, if the grid has it.

    Args:
      where: of the indices of the grid without the visit, the row of the batch and the query head.
      start: what is in each output before it is written; nothing that is known if it is not given.
    """
    how = kernel, call, grid, where, outputs, scratch, extra, matmuls
    if visits.parts == 1:
        return _launch(visits, start, *how)
    # Lists that do not fit into scalar memory at once: each part of them writes its own blocks of the same outputs.
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
    """Returns the block of what there is one of for each query, and where it is."""
    return (None, None, 1, bq), lambda b, n, i, j: (b, n, 0, i)


def of_saved(call: Call, saved: Saved, dtype: Any) -> tuple[Input, ...]:
    """Returns the inputs that a backward has beside those of its forward. `dtype` is that of the queries."""
    plan = call.plan
    bq = plan.block_q
    # A query with no key gives nothing, whatever the cotangents of its infinite lse may be: its weights are exp(-inf).
    some = saved.lse != -jnp.inf
    return (
        Input("d_out", heads_first(saved.d_out.astype(dtype), bq), *of_queries(plan.Hv, bq)),
        Input("lse", per_query(jnp.where(some, saved.lse, jnp.inf), bq, jnp.inf), *_of_query(bq)),
        Input("delta", per_query(jnp.where(some, saved.delta, 0), bq), *_of_query(bq)),
    )


def gradients(call: Call, extra: tuple[Input, ...], by_queries: Visits, by_keys: Visits) -> dict[str, jax.Array]:
    """Returns the gradients of query, key and value; with slopes also `slopes`, [B, N]. `extra` is of `of_saved`."""
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
    # Where a list goes over the query heads of a group itself, the last dim of the grid is one step.
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
