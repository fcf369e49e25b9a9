"""A stable counting sort of small integers in two kernels: counts of each program's part, then where each entry goes.

Neither scales with entries times groups in memory: programs are as many as the GPU has multiprocessors, and each has a row of
counts. An entry's rank within a block is a product with a triangular matrix of ones, exact in float32.
"""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels.framework.target import MULTIPROCESSORS
from kernels.toolchains.triton import triton_launch

# Groups times entries of a block: its matrix of ones is in registers.
MOST = 16384


@triton.jit
def group_count_kernel(
    ids_ptr,  # [SIZE]
    counts_ptr,  # [programs, BLOCK_E]: of each program's part; what has no group is counted by the last entry
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    PART: tl.constexpr,  # entries of a program
    BLOCK: tl.constexpr,  # divides PART
    BLOCK_E: tl.constexpr,  # more than GROUPS
):
    total = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, PART, BLOCK):
        i = tl.program_id(0) * PART + start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + i, mask=i < SIZE, other=-1)
        total += tl.histogram(tl.where((ids >= 0) & (ids < GROUPS), ids, BLOCK_E - 1), BLOCK_E)
    tl.store(counts_ptr + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), total)


@triton.jit
def group_order_kernel(
    ids_ptr,  # [SIZE], SIZE / TOP_K rows
    counts_ptr,  # [PROGRAMS, BLOCK_E]
    slots_ptr,  # [SIZE]
    pairs_ptr,  # [SIZE]
    tokens_ptr,  # [SIZE]
    sizes_ptr,  # [GROUPS]
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    e = tl.arange(0, BLOCK_E)
    total, earlier = tl.zeros([BLOCK_E], tl.int32), tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, PROGRAMS, 16):
        program = start + tl.arange(0, 16)
        mask = (program < PROGRAMS)[:, None] & (e < GROUPS)[None, :]
        counts = tl.load(counts_ptr + program[:, None] * BLOCK_E + e[None, :], mask=mask, other=0)
        total += tl.sum(counts, axis=0)
        earlier += tl.sum(tl.where((program < tl.program_id(0))[:, None], counts, 0), axis=0)
    if tl.program_id(0) == 0:
        tl.store(sizes_ptr + e, total, mask=e < GROUPS)
    used = tl.sum(total, axis=0)
    first = tl.cumsum(total, axis=0) - total + earlier  # where the next entry of each group goes
    inside = tl.arange(0, BLOCK)
    before = (inside[:, None] > inside[None, :]).to(tl.float16)
    for start in range(0, PART, BLOCK):
        i = tl.program_id(0) * PART + start + inside
        ids = tl.load(ids_ptr + i, mask=i < SIZE, other=-1)
        valid = (ids >= 0) & (ids < GROUPS)
        of = (ids[:, None] == e[None, :]) & valid[:, None]
        rank = tl.dot(before, of.to(tl.float16)).to(tl.int32)
        slot = tl.sum(tl.where(of, rank + first[None, :], 0), axis=1)
        first += tl.sum(of.to(tl.int32), axis=0)
        tl.store(slots_ptr + i, tl.where(valid, slot, -1), mask=i < SIZE)
        tl.store(pairs_ptr + slot, i, mask=valid)
        tl.store(tokens_ptr + slot, i // TOP_K, mask=valid)
        past = (i >= used) & (i < SIZE)
        tl.store(pairs_ptr + i, tl.full([BLOCK], -1, tl.int32), mask=past)
        tl.store(tokens_ptr + i, tl.full([BLOCK], -1, tl.int32), mask=past)


def sorted_by_counting(ids: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns (slots, pairs, tokens, sizes) of ids [T, k], see `ordering.GroupOrder`."""
    size, top_k = ids.size, ids.shape[1]
    block_e = max(16, triton.next_power_of_2(num_groups + 1))
    block = max(16, min(128, MOST // block_e))
    part = triton.cdiv(triton.cdiv(size, MULTIPROCESSORS), block) * block
    programs = triton.cdiv(size, part)
    shared = {"SIZE": size, "GROUPS": num_groups, "PART": part, "BLOCK": block, "BLOCK_E": block_e}
    (counts,) = triton_launch(
        group_count_kernel,
        ids.reshape(-1),
        out_shape=(jax.ShapeDtypeStruct((programs, block_e), jnp.int32),),
        grid=(programs,),
        **shared,
    )
    shapes = (size,), (size,), (size,), (num_groups,)
    slots, pairs, tokens, sizes = triton_launch(
        group_order_kernel,
        ids.reshape(-1),
        counts,
        out_shape=tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes),
        grid=(programs,),
        num_warps=8,
        TOP_K=top_k,
        PROGRAMS=programs,
        **shared,
    )
    return slots.reshape(ids.shape), pairs, tokens, sizes
