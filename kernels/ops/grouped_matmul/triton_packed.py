"""Grouped matmul with packed matrices on NVIDIA GPUs in Triton.

Few rows of a group: its matrix is read packed, once for each tile of rows, and unpacked where tensor cores read it. Many rows,
and dx: all matrices are unpacked once, for the kernels of `grouped_matmul`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import triton

from kernels.engines.matmul.formats import RUN
from kernels.engines.matmul.triton_unpacked import table_of, unpacked
from kernels.framework.work import Work, nbytes
from kernels.ops.grouped_matmul.composed import dense, too_many
from kernels.ops.grouped_matmul.packed import QuantizedGroupedMatmulConfig, packed_op
from kernels.ops.grouped_matmul.packed_kernels import packed_matmul_kernel
from kernels.ops.grouped_matmul.triton_gpu import tile_map
from kernels.toolchains.triton import triton_launch

# Rows of a matrix, on average. Of 128 matrices of 2048 by 1536 on an H200 tiles take 192 us with 16 rows, and 936 with 64, for
# which unpacking all of them and the product take 713.
MOST_ROWS = 32
# Widths of codes that are unpacked where they lie -> the fewest with one scale: those of the words of four threads.
JOINED = {4: 32, 8: 16}
MOST_OF_A_GROUP = 128  # that a step multiplies

_FORWARD, backward_of = dense("triton", unpacked)


def _step(bits: int, group_size: int, itemsize: int) -> int:
    """Returns the entries of D with one scale that a step multiplies, or 0 if they are unpacked one by one."""
    step = math.gcd(group_size, MOST_OF_A_GROUP)
    return step if itemsize == 2 and step >= JOINED.get(bits, step + 1) else 0


def _few(x, w, scales, biases, group_sizes, mode, bits, group_size, cfg):
    (M, D), (E, _, F) = x.shape, w.shape
    step = _step(bits, group_size, x.dtype.itemsize)
    block_d = step or cfg.block_d
    where = tile_map(group_sizes, None, M, E, cfg.block_m)
    sums = None
    if step and mode == "affine":  # what each bias is multiplied by
        sums = x.astype(jnp.float32).reshape(M, D // step, step).sum(-1)
    # Of two bytes each: Triton would copy longer ones through shared memory.
    table = table_of(mode, x.dtype if step else jnp.float32)
    out = jax.ShapeDtypeStruct((M, F), x.dtype)
    (result,) = triton_launch(
        packed_matmul_kernel,
        x,
        sums,
        w,
        scales,
        biases,
        table,
        where.tiles,
        out_shape=(out,),
        grid=(triton.cdiv(F, cfg.block_f), where.bound),
        num_warps=cfg.num_warps,
        num_stages=cfg.num_stages,
        work=Work(2 * M * D * F, nbytes(x, w, scales, biases, out)),
        D=D,
        F=F,
        BOUND=where.bound,
        MODE=mode,
        BITS=bits,
        GROUP=group_size,
        JOINED=step > 0,
        STAGES=cfg.num_stages,
        BLOCK_D=block_d,
        BLOCK_M=cfg.block_m,
        BLOCK_F=cfg.block_f,
    )
    return result


def forward(x, w, scales, biases, group_sizes, mode, bits, group_size, cfg):
    if cfg.dense:
        return _FORWARD(x, w, scales, biases, group_sizes, mode, bits, group_size)
    return _few(x, w, scales, biases, group_sizes, mode, bits, group_size, cfg)


def backward(saved, x, w, scales, biases, group_sizes, mode, bits, group_size, cfg):
    return backward_of(saved, x, w, scales, biases, group_sizes, mode, bits, group_size)


def heuristic(call, platform):
    """Returns tiles of about as many rows as a group has, as wide as an accumulator allows; matrices that are too many to be
    unpacked together are read packed for any number of rows."""
    M, E, F = (call.dims[n] for n in "MEF")
    rows = triton.cdiv(M, E)
    joined = _step(call.bits, call.group_size, call.x.dtype.itemsize)
    block_m = max(16, min(64, triton.next_power_of_2(rows)))
    block_f = max(16, min(128 if joined else 64, triton.next_power_of_2(F)))
    return QuantizedGroupedMatmulConfig(
        block_m, block_f, block_d=RUN, num_warps=4, num_stages=4 if joined else 2,
        dense=rows > MOST_ROWS and too_many(call) is None,
    )  # fmt: skip


packed_op.register(
    forward,
    backward,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    rejects=lambda call: "an array has no elements" if 0 in (*call.x.shape, *call.w.shape) else None,
    heuristic=heuristic,
    name="triton_packed",
)
