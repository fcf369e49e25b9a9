"""A product of 8-bit floats with scales in plain XLA, any device.

8-bit operands are multiplied in bfloat16, which has all of their numbers. The products of the entries that share scales are
summed in float32 and then scaled, so no operand is rounded; scales that are powers of two multiply the operand, exactly.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from kernels.engines.matmul.dot import dot
from kernels.ops.scaled_matmul.contract import op
from kernels.ops.scaled_matmul.formats import column, exact, spread, step_of


def forward(a, b, a_scale, b_scale, dtype, fast_accumulation):  # in float32, whether it may be less or not
    (M, D), F = a.shape, b.shape[0]
    if a_scale.dtype == b_scale.dtype == jnp.uint8:
        left, right = (exact(x) * spread(s, x.shape).astype(exact(x).dtype) for x, s in ((a, a_scale), (b, b_scale)))
        return dot("md,fd->mf", left, right).astype(dtype)
    width = step_of(D, a_scale, b_scale)
    steps = D // width

    def step(i, out):
        left, right = (exact(lax.dynamic_slice_in_dim(x, i * width, width, 1)) for x in (a, b))
        of_rows, of_columns = column(a_scale, i, steps, M), column(b_scale, i, steps, F)
        return out + dot("md,fd->mf", left, right) * of_rows[:, None] * of_columns[None, :]

    start = jnp.zeros((M, F), jnp.float32)
    return (step(0, start) if steps == 1 else lax.fori_loop(0, steps, step, start)).astype(dtype)


op.register(
    forward,
    platforms={"cpu", "cuda", "rocm", "tpu"},
    dtypes={"float8_e4m3fn", "float8_e5m2", "float32", "bfloat16", "float16"},
)
