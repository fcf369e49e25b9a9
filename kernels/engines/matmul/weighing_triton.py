"""Rows and cotangents by their weights in Triton: a program for each row, which reads both once."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels.engines.matmul.triton_activations import activation
from kernels.framework.work import Work, nbytes
from kernels.toolchains.triton import triton_launch


@triton.jit
def weigh_rows_kernel(
    d_ptr,  # [M, F]
    rows_ptr,  # [M, F], or products [M, 2 F]
    pairs_ptr,  # [M]
    weights_ptr,  # a weight for each pair
    d_out_ptr,  # as rows
    rows_out_ptr,  # [M, F]
    d_weight_ptr,  # [M]
    F: tl.constexpr,
    ACTIVATION: tl.constexpr,  # None: rows are no products
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    pair = tl.load(pairs_ptr + m)
    if pair >= 0:
        weight = tl.load(weights_ptr + pair).to(tl.float32)
        d_row, row, out = d_ptr + m * F, rows_ptr + m * F, d_out_ptr + m * F
        if ACTIVATION is not None:
            row += m * F
            out += m * F
        # All blocks are read before the first is written: the compiler moves no load over a store.
        ds, rows, ups = (), (), ()
        for start in tl.static_range(0, F, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            ds += (tl.load(d_row + cols, mask=cols < F, other=0.0),)
            rows += (tl.load(row + cols, mask=cols < F, other=0.0),)
            if ACTIVATION is not None:
                ups += (tl.load(row + F + cols, mask=cols < F, other=0.0),)
        total = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(len(ds)):
            cols = i * BLOCK + tl.arange(0, BLOCK)
            d, x = ds[i].to(tl.float32), rows[i].to(tl.float32)
            w_d = weight * d
            if ACTIVATION is not None:
                act, slope = activation(x, ACTIVATION)
                up = ups[i].to(tl.float32)
                tl.store(out + F + cols, (w_d * act).to(d_out_ptr.dtype.element_ty), mask=cols < F)
                w_d *= up * slope
                x = act * up
            total += d * x
            tl.store(out + cols, w_d.to(d_out_ptr.dtype.element_ty), mask=cols < F)
            tl.store(rows_out_ptr + m * F + cols, (weight * x).to(rows_out_ptr.dtype.element_ty), mask=cols < F)
        tl.store(d_weight_ptr + m, tl.sum(total, axis=0))
    else:
        tl.store(d_weight_ptr + m, 0.0)


def weighed(
    d: jax.Array, rows: jax.Array, pairs: jax.Array, weights: jax.Array, activation: str | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (the cotangents by w, the rows by w, <d, rows>), see `weighing.weigh`."""
    M, F = d.shape
    whole = F & -F  # the largest power of two that divides F: without masks, of which a part of the threads is idle
    block = min(512, whole) if whole >= 128 else min(512, max(16, triton.next_power_of_2(F)))
    return triton_launch(
        weigh_rows_kernel,
        d,
        rows,
        pairs.astype(jnp.int32),
        weights.reshape(-1),
        out_shape=(
            jax.ShapeDtypeStruct(rows.shape, rows.dtype),
            jax.ShapeDtypeStruct(d.shape, rows.dtype),
            jax.ShapeDtypeStruct((M,), jnp.float32),
        ),
        grid=(M,),
        # All of a row is in registers.
        num_warps=min(8, max(1, block // 256, triton.next_power_of_2(triton.cdiv(F, 1024)))),
        work=Work(8 * d.size, 2 * nbytes(d, rows)),
        F=F,
        ACTIVATION=activation,
        BLOCK=block,
    )
