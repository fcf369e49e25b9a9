"""A stable counting sort of small integers in two kernels: counts of each program's part, then where each entry goes.

Neither scales with entries times groups in memory: programs are as many as the GPU has multiprocessors, each with a row of
counts. A block is sorted in registers, by its group and then by its place: so an entry's rank in its group is its place among
the sorted less the first of its group, and what is written to the order lies together.
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

MOST = 2048  # entries of a block, which a program has in registers


@triton.jit
def _groups(ids_ptr, i, SIZE: tl.constexpr, GROUPS: tl.constexpr):
    """Returns the groups of entries; GROUPS of one that has none, or that there is not."""
    ids = tl.load(ids_ptr + i, mask=i < SIZE, other=-1)
    return tl.where((ids >= 0) & (ids < GROUPS), ids, GROUPS)


@triton.jit
def group_count_kernel(
    ids_ptr,  # [SIZE]
    counts_ptr,  # [programs, BLOCK_E]: of each program's part; what has no group is counted after the last group
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    PART: tl.constexpr,  # entries of a program
    BLOCK: tl.constexpr,  # divides PART
    BLOCK_E: tl.constexpr,  # more than GROUPS
):
    total = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, PART, BLOCK):
        i = tl.program_id(0) * PART + start + tl.arange(0, BLOCK)
        total += tl.histogram(_groups(ids_ptr, i, SIZE, GROUPS), BLOCK_E)
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
    BLOCK_P: tl.constexpr,  # programs whose counts are added at a time
):
    e = tl.arange(0, BLOCK_E)
    total, earlier = tl.zeros([BLOCK_E], tl.int32), tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, PROGRAMS, BLOCK_P):
        program = start + tl.arange(0, BLOCK_P)
        mask = (program < PROGRAMS)[:, None] & (e < GROUPS)[None, :]
        counts = tl.load(counts_ptr + program[:, None] * BLOCK_E + e[None, :], mask=mask, other=0)
        total += tl.sum(counts, axis=0)
        earlier += tl.sum(tl.where((program < tl.program_id(0))[:, None], counts, 0), axis=0)
    if tl.program_id(0) == 0:
        tl.store(sizes_ptr + e, total, mask=e < GROUPS)
    used = tl.sum(total, axis=0)
    first = tl.cumsum(total, axis=0) - total + earlier  # where the next entry of each group goes
    inside = tl.arange(0, BLOCK)
    for start in range(0, PART, BLOCK):
        part = tl.program_id(0) * PART + start
        groups = _groups(ids_ptr, part + inside, SIZE, GROUPS)
        counts = tl.histogram(groups, BLOCK_E)
        order = tl.sort(groups * BLOCK + inside)
        group, i = order // BLOCK, part + order % BLOCK
        slot = inside + tl.gather(first - (tl.cumsum(counts, axis=0) - counts), group, 0)
        first += counts
        valid = group < GROUPS
        tl.store(slots_ptr + i, tl.where(valid, slot, -1), mask=i < SIZE)
        tl.store(pairs_ptr + slot, i, mask=valid)
        tl.store(tokens_ptr + slot, i // TOP_K, mask=valid)
        i = part + inside
        past = (i >= used) & (i < SIZE)
        tl.store(pairs_ptr + i, tl.full([BLOCK], -1, tl.int32), mask=past)
        tl.store(tokens_ptr + i, tl.full([BLOCK], -1, tl.int32), mask=past)


def sorted_by_counting(ids: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns (slots, pairs, tokens, sizes) of ids [T, k], see `ordering.GroupOrder`."""
    size, top_k = ids.size, ids.shape[1]
    block_e = max(16, triton.next_power_of_2(num_groups + 1))
    each = triton.cdiv(size, MULTIPROCESSORS)
    block = max(32, min(MOST, triton.next_power_of_2(each)))
    part = triton.cdiv(each, block) * block
    programs = triton.cdiv(size, part)
    shared = {"SIZE": size, "GROUPS": num_groups, "PART": part, "BLOCK": block, "BLOCK_E": block_e}
    num_warps = max(1, min(8, block // 128))
    (counts,) = triton_launch(
        group_count_kernel,
        ids.reshape(-1),
        out_shape=(jax.ShapeDtypeStruct((programs, block_e), jnp.int32),),
        grid=(programs,),
        num_warps=num_warps,
        **shared,
    )
    shapes = (size,), (size,), (size,), (num_groups,)
    slots, pairs, tokens, sizes = triton_launch(
        group_order_kernel,
        ids.reshape(-1),
        counts,
        out_shape=tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes),
        grid=(programs,),
        num_warps=num_warps,
        TOP_K=top_k,
        PROGRAMS=programs,
        BLOCK_P=max(1, min(triton.next_power_of_2(programs), 8192 // block_e)),
        **shared,
    )
    return slots.reshape(ids.shape), pairs, tokens, sizes
