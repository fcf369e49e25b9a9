"""Products with quantised weights on NVIDIA GPUs in Triton.

Few rows of x: the words are unpacked in the registers from which tensor cores multiply them, on Hopper by a kernel of its
own. Many, and codes that do not lie in the words of a thread: the weights are dequantised once, and XLA multiplies.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import triton

from kernels.engines.matmul.dot import dot
from kernels.engines.matmul.triton_unpacked import table_of, unpacked
from kernels.framework.target import MULTIPROCESSORS
from kernels.framework.work import Work, nbytes
from kernels.ops.quantized_matmul.contract import QuantizedMatmulConfig, op
from kernels.ops.quantized_matmul.gluon_kernels import EXPONENTS, SCALES, WORDS, unpacked_matmul_kernel
from kernels.ops.quantized_matmul.gluon_weights import Product
from kernels.ops.quantized_matmul.triton_kernels import quantized_matmul_kernel
from kernels.toolchains.gluon import SWIZZLED
from kernels.toolchains.triton import compute_capability, tensor_descriptor, triton_launch

# Of more rows, a product takes as long as the dense one, for which weights are dequantised once.
MOST_ROWS = 255
# Codes of a group that a product takes at once, at most.
MOST_OF_A_GROUP = 128
# Programs per multiprocessor that a split makes, and the fewest steps of a part.
PROGRAMS_EACH, LEAST_STEPS = 3, 8
# Widths of codes that are unpacked where they lie, and the fewest of a group: those of the words of four threads.
JOINED = {4: 32, 8: 16}


def _chunk(bits: int, group_size: int, itemsize: int) -> int:
    """Returns the entries of D with one scale that are multiplied at once, or 0 if they are unpacked one by one."""
    chunk = math.gcd(group_size, MOST_OF_A_GROUP)
    return chunk if itemsize == 2 and bits in JOINED and chunk >= JOINED[bits] else 0


def _aligned(x: jax.Array | None) -> bool:
    """Returns whether TMA can read a matrix: its rows are aligned to 16 bytes."""
    return x is None or x.shape[-1] * x.dtype.itemsize % 16 == 0


def _reads_in_steps(x, w, scales, biases, mode, bits, group_size, block_d) -> bool:
    """Returns whether Hopper's kernel computes a call in steps of so many entries of D: it multiplies codes by scales in x's
    dtype, which has no room for most exponents if it is float16, and reads every operand by TMA."""
    if not _chunk(bits, group_size, x.dtype.itemsize):
        return False
    dtype = jnp.uint8 if mode.startswith("mx") and x.dtype == jnp.bfloat16 else x.dtype
    alike = scales.dtype == dtype and (biases is None or biases.dtype == dtype)
    whole = block_d in (64, 128) and (group_size % block_d == 0 or block_d % group_size == 0)
    return alike and whole and all(map(_aligned, (x, w, scales, biases)))


def _few(x, w, scales, biases, mode, bits, group_size, cfg):
    """Returns x [M, D] times the weights."""
    (M, D), F = x.shape, w.shape[1]
    chunk = _chunk(bits, group_size, x.dtype.itemsize)
    if not chunk:
        raise ValueError(
            f"quantized_matmul: argument 'cfg' has dense = False, which is for x of 16 bits and codes of 4 bits in groups of "
            f"{JOINED[4]}, or of 8 bits in groups of {JOINED[8]}, and multiples of those; not for {x.dtype}, {bits} bits and "
            f"groups of {group_size}: leave it out"
        )
    if cfg.turned and compute_capability() == 90:
        return _summed(_turned(x, w, scales, biases, mode, bits, group_size, cfg), x.dtype)
    if cfg.turned:  # other GPUs take the other kernel
        cfg = _tiles(M, D, F, bits, group_size)
    out = jax.ShapeDtypeStruct((cfg.splits, M, F), jnp.float32 if cfg.splits > 1 else x.dtype)
    chunks = cfg.chunks if chunk == group_size else 1
    if chunks not in (1, 2, 4):
        raise ValueError(f"quantized_matmul: argument 'cfg' has chunks = {chunks}, which must be 1, 2 or 4")
    block_m = max(16, cfg.block_m)  # fewer rows are for Hopper's kernel alone
    blocks = [(x, block_m, chunks * chunk), (w, chunks * chunk * bits // 32, cfg.block_f)]
    blocks += [(scales, chunks, cfg.block_f), (biases, chunks, cfg.block_f)]
    tma = all(_aligned(a) for a, *_ in blocks) and compute_capability() >= 90
    (parts,) = triton_launch(
        quantized_matmul_kernel,
        x,
        w,
        scales,
        biases,
        # Of two bytes each: Triton would copy longer ones through shared memory.
        table_of(mode, x.dtype),
        *(tensor_descriptor(a, a.shape, tuple(block)) if tma and a is not None else None for a, *block in blocks),
        out_shape=(out,),
        grid=(triton.cdiv(F, cfg.block_f), cfg.splits, triton.cdiv(M, block_m)),
        num_warps=cfg.num_warps,
        num_stages=cfg.num_stages,
        work=Work(2 * M * D * F, nbytes(x, w, scales, biases, out)),
        M=M,
        D=D,
        F=F,
        MODE=mode,
        BITS=bits,
        GROUP=group_size,
        SPLITS=cfg.splits,
        TMA=tma,
        STAGES=cfg.num_stages,
        CHUNKS=chunks,
        BLOCK_D=chunk,
        BLOCK_M=block_m,
        BLOCK_F=cfg.block_f,
        WIDTH=min(cfg.block_f, 8 * cfg.num_warps),
    )
    return _summed(parts, x.dtype)


def _summed(parts: jax.Array, dtype: Any) -> jax.Array:
    """Returns the sum of parts, in a fixed order, for bitwise reproducible results."""
    return parts[0] if parts.shape[0] == 1 else jnp.sum(parts, axis=0).astype(dtype)


def _turned(x, w, scales, biases, mode, bits, group_size, cfg):
    """Returns the parts of x [M, D] times the weights, of the kernel that transposes the product."""
    (M, D), F = x.shape, w.shape[1]
    reads = _reads_in_steps(x, w, scales, biases, mode, bits, group_size, cfg.block_d)
    teams = cfg.teams or _teams(mode, bits, cfg.block_m, cfg.block_d, cfg.num_warps)
    tiles = cfg.block_m in (8, 16, 32, 64, 128) and cfg.num_warps in (4, 8, 16) and cfg.num_stages > 1
    tiles = tiles and cfg.block_f in (128, 256, 512) and cfg.block_f % (32 * cfg.num_warps) == 0
    tiles = tiles and teams in (1, 2) and cfg.num_warps >= 4 * teams
    if not (reads and tiles):
        fields = ("block_m", "block_f", "block_d", "num_warps", "teams", "num_stages")
        raise ValueError(
            "quantized_matmul: argument 'cfg' has turned = True with "
            + ", ".join(f"{name} = {getattr(cfg, name)}" for name in fields)
            + f": that needs scales of x's dtype ({x.dtype}) or, of MX formats, x in bfloat16, rows of a multiple of 16 bytes, "
            "a block_m that is a power of 2 from 8 to 128, 4, 8 or 16 warps, a block_f of 128, 256 or 512 that 32 * num_warps "
            "divides, one or two teams of 4 warps or more, a block_d of 64 or 128 that groups divide or that divides them, and "
            "two stages; change these, or take turned = False"
        )
    of_scales = (EXPONENTS if scales.dtype == jnp.uint8 else SCALES).value
    # Whole tiles of 128 rows are stored: to leave out some, a thread computes more of places than it has registers for.
    rows = M if cfg.block_m < 128 else triton.cdiv(M, cfg.block_m) * cfg.block_m
    out = jax.ShapeDtypeStruct((cfg.splits, rows, F), jnp.float32 if cfg.splits > 1 else x.dtype)
    registers = 65536 // (32 * (cfg.num_warps + 4) * cfg.programs) // 8 * 8
    # Those of every partition, if there are two teams: as few as one has are what the assembler lets products in flight hold.
    feeding = registers if teams == 2 else 88 if registers >= 128 else 40
    chunks = max(1, cfg.block_d // group_size)
    (parts,) = triton_launch(
        unpacked_matmul_kernel,
        tensor_descriptor(x, x.shape, (cfg.block_m, cfg.block_d), SWIZZLED.value),
        tensor_descriptor(w, w.shape, (cfg.block_d * bits // 32, cfg.block_f), WORDS.value),
        *(
            a if a is None else tensor_descriptor(a, a.shape, (chunks, cfg.block_f), of_scales)
            for a in (scales, biases)
        ),
        out_shape=(out,),
        grid=(triton.cdiv(F, cfg.block_f) * cfg.splits * triton.cdiv(M, cfg.block_m),),
        num_warps=cfg.num_warps // teams,
        max_registers=min(255, registers),
        work=Work(2 * M * D * F, nbytes(x, w, scales, biases, out)),
        P=Product(
            M=rows,
            D=D,
            F=F,
            MODE=mode,
            BITS=bits,
            GROUP=group_size,
            SPLITS=cfg.splits,
            TEAMS=teams,
            WARPS=cfg.num_warps // teams,
            ORDERING=1 if cfg.block_m <= 16 else 2,
            BLOCK_M=cfg.block_m,
            BLOCK_F=cfg.block_f,
            BLOCK_D=cfg.block_d,
            STAGES=cfg.num_stages,
        ),
        MULTIPLYING=registers,
        FEEDING=feeding,
    )
    return parts[:, :M]


def _dequantized(w, scales, biases, dtype, mode, bits, group_size, cfg):
    """Returns the weights [D, F], rounded to a dtype."""
    tile = cfg.dequantize_block_d, cfg.dequantize_block_f, cfg.dequantize_num_warps
    return unpacked(w, scales, biases, dtype, mode=mode, bits=bits, group_size=group_size, tile=tile)


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


def _splits(programs: int, tiles: int, steps: int, least: int) -> int:
    """Returns the parts of D that make so many programs of tiles, but have `least` steps each: a power of 2, so that
    they are of equal length, as a rule."""
    return 1 << (max(1, min(programs // tiles, steps // least)).bit_length() - 1)


def _even_splits(programs: int, tiles: int, steps: int, least: int) -> int:
    """Returns how many parts to split D into: as many as `programs` allow, each of `least` steps or more."""
    each = triton.cdiv(steps, max(1, min(programs // tiles, steps // least)))
    return triton.cdiv(steps, each)


def _tiles(M: int, D: int, F: int, bits: int, group_size: int) -> QuantizedMatmulConfig:
    """Returns the tiles of the kernel for any GPU."""
    chunk = _chunk(bits, group_size, 2)
    block_m, block_f = (max(16, min(128, triton.next_power_of_2(n))) for n in (M, F))
    tiles = triton.cdiv(F, block_f) * triton.cdiv(M, block_m)
    return QuantizedMatmulConfig(
        block_m, block_f, splits=_splits(PROGRAMS_EACH * MULTIPROCESSORS, tiles, D // chunk, LEAST_STEPS),
        chunks=1 if block_m > 16 else 4 if bits == 4 or chunk == 32 else 2,
        num_warps=8 if block_m > 64 else 4, num_stages=3, turned=False,
    )  # fmt: skip


def _teams(mode: str, bits: int, block_m: int, block_d: int, num_warps: int) -> int:
    """Returns how many teams a turned program has: two were faster of 17 to 64 rows, where warps and registers allow them."""
    able = block_m in (32, 64) and num_warps >= 8 and block_m * block_d <= 64 * 64
    return 2 if mode == "affine" and bits == 4 and able else 1


def _turned_tiles(M: int, D: int, F: int, bits: int, block_d: int, mode: str) -> QuantizedMatmulConfig:
    """Returns the tiles of Hopper's kernel: the fastest of those that were tried on an H200, with D and F of 8192."""
    few = M <= 16
    block_m, block_f, programs = max(8, min(128, triton.next_power_of_2(M))), 128 if few else 256, 2 if few else 1
    tiles = triton.cdiv(F, block_f) * triton.cdiv(M, block_m)
    splits = _even_splits(programs * MULTIPROCESSORS, tiles, triton.cdiv(D, block_d), LEAST_STEPS // 2)
    deep = M > 64 or (block_m == 64 and _teams(mode, bits, block_m, block_d, block_f // 32) == 2)
    return QuantizedMatmulConfig(
        block_m, block_f, block_d, splits=splits, chunks=1, num_warps=block_f // 32,
        num_stages=4 if few and bits == 4 else 6 if deep else 5, turned=True, programs=programs,
    )  # fmt: skip


def heuristic(call, platform):
    M, F, D = call.x.size // call.dims["D"], call.dims["F"], call.dims["D"]
    cfg, bits, group_size = QuantizedMatmulConfig(), call.bits, call.group_size
    few = bool(_chunk(bits, group_size, call.x.dtype.itemsize))
    if few:
        # Steps of 128 entries, where registers hold their operands: with two teams, of up to 32 rows.
        steps = (128, 64) if bits == 4 and M <= (32 if call.mode == "affine" else 64) else (64,)
        arrays = call.x, call.w, call.scales, call.biases, call.mode
        block_d = next((n for n in steps if _reads_in_steps(*arrays, bits, group_size, n)), None)
        cfg = _turned_tiles(M, D, F, bits, block_d, call.mode) if block_d else _tiles(M, D, F, bits, group_size)
    return dataclasses.replace(
        cfg, dense=not few or M > MOST_ROWS, dequantize_block_d=32, dequantize_block_f=256, dequantize_num_warps=4
    )


def candidates(call):
    first = heuristic(call, "cuda")
    if first.dense or not first.turned or compute_capability() != 90:
        return [first]
    return [
        first,
        *(
            dataclasses.replace(
                first,
                block_f=f,
                num_warps=f // 32,
                programs=256 // f,
                splits=n * (first.splits or 1),
                num_stages=stages,
            )
            for f in (128, 256)
            for n in (1, 2)
            for stages in (4, 6)
        ),
    ]


op.register(
    forward,
    backward,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    rejects=lambda call: "x has no rows" if 0 in call.x.shape else None,
    heuristic=heuristic,
    candidates=candidates,
)
