"""Products with quantised weights on NVIDIA GPUs in Triton.

Few rows of x: the words are unpacked in the registers from which tensor cores multiply them. Many: the weights are
dequantised once, and XLA multiplies.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import triton

from kernels.engines.matmul.dot import dot
from kernels.framework.target import MULTIPROCESSORS
from kernels.framework.work import Work, nbytes
from kernels.ops.quantized_matmul.contract import QuantizedMatmulConfig, op
from kernels.ops.quantized_matmul.formats import NF4, RUN
from kernels.ops.quantized_matmul.gluon_kernels import EXPONENTS, SCALES, WORDS, unpacked_matmul_kernel
from kernels.ops.quantized_matmul.triton_kernels import (
    dequantize_kernel,
    gathered_matmul_kernel,
    quantized_matmul_kernel,
)
from kernels.toolchains.gluon import SWIZZLED
from kernels.toolchains.triton import compute_capability, tensor_descriptor, triton_launch

# Of more rows, a product takes as long as the dense one, which needs no unpacking.
MOST_ROWS = 255
# Codes of a group that a product takes at once, at most.
MOST_OF_A_GROUP = 128
# Programs per multiprocessor that a split makes, and the fewest steps of a part.
PROGRAMS_EACH, LEAST_STEPS = 3, 8
# Widths of codes that are unpacked where they lie, and the fewest of a group: those of the words of four threads.
JOINED = {4: 32, 8: 16}
# Codes that the turned kernel unpacks.
TURNED = (("affine", 4), ("affine", 8), ("nf4", 4), ("mxfp4", 4), ("mxfp8", 8))


def _chunk(bits: int, group_size: int, itemsize: int) -> int:
    """Returns the entries of D with one scale that are multiplied at once, or 0 if they are unpacked one by one."""
    chunk = math.gcd(group_size, MOST_OF_A_GROUP)
    return chunk if itemsize == 2 and bits in JOINED and chunk >= JOINED[bits] else 0


def _aligned(x: jax.Array | None) -> bool:
    """Returns whether TMA can read a matrix: its rows are aligned to 16 bytes."""
    return x is None or x.shape[-1] * x.dtype.itemsize % 16 == 0


def _table(mode: str, dtype: Any) -> jax.Array | None:
    return jnp.asarray(NF4, dtype) if mode == "nf4" else None


def _few(x, w, scales, biases, mode, bits, group_size, cfg):
    """Returns x [M, D] times the weights."""
    (M, D), F = x.shape, w.shape[1]
    if cfg.turned:
        return _summed(_turned(x, w, scales, biases, mode, bits, group_size, cfg), x.dtype)
    chunk = _chunk(bits, group_size, x.dtype.itemsize)
    out = jax.ShapeDtypeStruct((cfg.splits, M, F), jnp.float32 if cfg.splits > 1 else x.dtype)
    sizes = {"M": M, "D": D, "F": F, "MODE": mode, "BITS": bits, "GROUP": group_size, "SPLITS": cfg.splits}
    launch = functools.partial(
        triton_launch,
        out_shape=(out,),
        grid=(triton.cdiv(F, cfg.block_f), cfg.splits, triton.cdiv(M, cfg.block_m)),
        num_warps=cfg.num_warps,
        num_stages=cfg.num_stages,
        work=Work(2 * M * D * F, nbytes(x, w, scales, biases, out)),
        **sizes,
        STAGES=cfg.num_stages,
        BLOCK_M=cfg.block_m,
        BLOCK_F=cfg.block_f,
    )
    if chunk:
        chunks = cfg.chunks if chunk == group_size else 1
        blocks = [(x, cfg.block_m, chunks * chunk), (w, chunks * chunk * bits // 32, cfg.block_f)]
        blocks += [(scales, chunks, cfg.block_f), (biases, chunks, cfg.block_f)]
        tma = all(_aligned(a) for a, *_ in blocks) and compute_capability() >= 90
        (parts,) = launch(
            quantized_matmul_kernel,
            x,
            w,
            scales,
            biases,
            # Of two bytes each: Triton would copy longer ones through shared memory.
            _table(mode, x.dtype),
            *(tensor_descriptor(a, a.shape, tuple(block)) if tma and a is not None else None for a, *block in blocks),
            TMA=tma,
            CHUNKS=chunks,
            BLOCK_D=chunk,
            WIDTH=min(cfg.block_f, 8 * cfg.num_warps),
        )
    else:
        (parts,) = launch(gathered_matmul_kernel, x, w, scales, biases, _table(mode, jnp.float32), BLOCK_D=2 * RUN)
    return _summed(parts, x.dtype)


def _summed(parts: jax.Array, dtype: Any) -> jax.Array:
    """Returns the sum of parts, in a fixed order, for bitwise reproducible results."""
    return parts[0] if parts.shape[0] == 1 else jnp.sum(parts, axis=0).astype(dtype)


def _turns(x, w, scales, biases, mode, bits, group_size, chunks) -> bool:
    """Returns whether the turned kernel computes a call, in steps of so many chunks: TMA reads every operand, and scales are of
    x's dtype, in which it multiplies codes by them."""
    chunk = _chunk(bits, group_size, x.dtype.itemsize)
    step = chunk * (chunks if chunk == group_size else 1)
    # The numbers of exponents are too large for float16.
    dtype = jnp.uint8 if x.dtype == jnp.bfloat16 and mode.startswith("mx") else x.dtype
    alike = scales.dtype == dtype and (biases is None or biases.dtype == dtype)
    reads = all(_aligned(a) for a in (x, w, scales, biases))
    return (mode, bits) in TURNED and step in (64, 128, 256) and alike and reads and compute_capability() == 90


def _turned(x, w, scales, biases, mode, bits, group_size, cfg):
    """Returns the parts of x [M, D] times the weights, of the kernel that transposes the product."""
    (M, D), F = x.shape, w.shape[1]
    if not _turns(x, w, scales, biases, mode, bits, group_size, cfg.chunks) or cfg.block_f % (32 * cfg.num_warps):
        raise ValueError(
            f"quantized_matmul: argument 'cfg' has turned = True, which is for compute capability 90, x of 16 bits, scales of x's "
            f"dtype, {' and '.join(f'{bits}-bit {mode}' for mode, bits in TURNED)}, chunks of 64 to 256 entries of D together, and "
            "block_f a multiple of 32 * num_warps; this call is not of those: leave turned out"
        )
    chunk = _chunk(bits, group_size, 2)
    chunks = cfg.chunks if chunk == group_size else 1
    block_d, block_m = chunks * chunk, min(128, cfg.block_m)
    of_scales = (EXPONENTS if scales.dtype == jnp.uint8 else SCALES).value
    out = jax.ShapeDtypeStruct((cfg.splits, M, F), jnp.float32 if cfg.splits > 1 else x.dtype)
    registers = 65536 // (32 * (cfg.num_warps + 4) * cfg.programs) // 8 * 8
    (parts,) = triton_launch(
        unpacked_matmul_kernel,
        tensor_descriptor(x, x.shape, (block_m, block_d), SWIZZLED.value),
        tensor_descriptor(w, w.shape, (block_d * bits // 32, cfg.block_f), WORDS.value),
        *(a if a is None else tensor_descriptor(a, a.shape, (chunks, cfg.block_f), of_scales) for a in (scales, biases)),
        out_shape=(out,),
        grid=(triton.cdiv(F, cfg.block_f) * cfg.splits * triton.cdiv(M, block_m),),
        num_warps=cfg.num_warps,
        max_registers=min(255, registers),
        work=Work(2 * M * D * F, nbytes(x, w, scales, biases, out)),
        M=M,
        D=D,
        F=F,
        MODE=mode,
        BITS=bits,
        GROUP=group_size,
        SPLITS=cfg.splits,
        WARPS=cfg.num_warps,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        STAGES=cfg.num_stages,
        FEEDING=88 if registers >= 128 else 40,
    )
    return parts


def _dequantized(w, scales, biases, dtype, mode, bits, group_size, cfg):
    """Returns the weights [D, F], rounded to a dtype."""
    D, F = w.shape[0] * 32 // bits, w.shape[1]
    out = jax.ShapeDtypeStruct((D, F), dtype)
    block_f = min(cfg.dequantize_block_f, max(16, triton.next_power_of_2(F)))
    (weights,) = triton_launch(
        dequantize_kernel,
        w,
        scales,
        biases,
        _table(mode, jnp.float32),
        out_shape=(out,),
        grid=(triton.cdiv(F, block_f), triton.cdiv(D, cfg.dequantize_block_d)),
        num_warps=cfg.dequantize_num_warps,
        work=Work(2 * D * F, nbytes(w, scales, biases, out)),
        D=D,
        F=F,
        MODE=mode,
        BITS=bits,
        GROUP=group_size,
        BLOCK_D=cfg.dequantize_block_d,
        BLOCK_F=block_f,
    )
    return weights


def forward(x, w, scales, biases, mode, bits, group_size, cfg):
    rows = x.reshape(-1, x.shape[-1])
    if cfg.dense:
        out = dot("md,df->mf", rows, _dequantized(w, scales, biases, x.dtype, mode, bits, group_size, cfg)).astype(
            x.dtype
        )
    else:
        out = _few(rows, w, scales, biases, mode, bits, group_size, cfg)
    return out.reshape(*x.shape[:-1], w.shape[1])


def backward(saved, x, w, scales, biases, mode, bits, group_size, cfg):
    weights = _dequantized(w, scales, biases, x.dtype, mode, bits, group_size, cfg)
    return {"x": dot("...f,df->...d", saved.d_out.astype(x.dtype), weights).astype(x.dtype)}


def _rows(call) -> int:
    return call.x.size // call.dims["D"]


def heuristic(call, platform):
    M, F, D = _rows(call), call.dims["F"], call.dims["D"]
    chunk = _chunk(call.bits, call.group_size, call.x.dtype.itemsize)
    block_m = max(16, min(128 if chunk else 64, triton.next_power_of_2(M)))
    block_f = max(16, min(128 if chunk else 64, triton.next_power_of_2(F)))
    programs = triton.cdiv(F, block_f) * triton.cdiv(M, block_m)
    steps = D // (chunk or RUN)
    splits = max(1, min(triton.cdiv(PROGRAMS_EACH * MULTIPROCESSORS, programs), steps // LEAST_STEPS))
    splits = 1 << (splits.bit_length() - 1)  # parts of equal length, as a rule
    chunks = 1 if block_m > 16 else 4 if call.bits == 4 or chunk == 32 else 2
    return QuantizedMatmulConfig(
        block_m, block_f, splits=splits, chunks=chunks, num_warps=8 if block_m > 64 else 4, num_stages=3,
        turned=False, programs=1, dense=M > MOST_ROWS, dequantize_block_d=32, dequantize_block_f=256, dequantize_num_warps=4,
    )  # fmt: skip


op.register(
    forward,
    backward,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    rejects=lambda call: "x has no rows" if 0 in call.x.shape else None,
    heuristic=heuristic,
)
