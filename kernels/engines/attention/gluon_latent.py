"""Latent attention over pages in Gluon, for Hopper: 64 rows of queries of one request, one producer warp and two warpgroups.

A block of entries is copied to shared memory once, and is keys and values. One warpgroup computes the weights of a block,
which it passes on through shared memory, and the left half of the outputs' columns; the other one computes the right half.
Either half fills half of the registers of a warpgroup. While weights of a block are computed, the tensor cores multiply
those of the block before.

What a program does is in a list that `list_kernel` of `triton_paged_latent.py` writes.
"""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.engines.attention.gluon_loads import clear, copy_pages, ring_of
from kernels.engines.attention.gluon_parts import exact_tanh
from kernels.engines.attention.triton_parts import LN2, LOG2E
from kernels.toolchains.gluon import SWIZZLED, after

ROWS = gl.constexpr(64)  # rows of a program: the minimum of one instruction
PANEL = gl.constexpr(64)  # columns of a copy
ITEM = gl.constexpr(8)  # integers of an entry of the list: see `list_kernel`
PASSED = gl.constexpr(2)  # blocks of weights on their way to the second warpgroup


@gluon.constexpr_function
def _half(O):
    return O.BLOCK_H // 2


@gluon.constexpr_function
def _weights_layout(block_k):
    return gl.NVMMASharedLayout(min(128, 2 * block_k), 16, 2)


@gluon.jit
def _item(items_ptr, O: gl.constexpr):
    """Returns the head of this program and its entry of the list."""
    return gl.program_id(0) % O.K, items_ptr + gl.program_id(0) // O.K * ITEM


@gluon.jit
def load_entries(cache_desc, tables_ptr, request, low, high, entries, ropes, O: gl.constexpr, STAGES: gl.constexpr):
    """Copies the blocks of entries `low` to `high` - 1 of a request into a ring: latents, and rotary keys beside them."""
    tiles, full, free = entries
    PART: gl.constexpr = cache_desc.block_type.shape[1]
    PARTS: gl.constexpr = O.BLOCK_K // PART
    PANELS: gl.constexpr = O.H // PANEL + 1
    stage, phase = 0, 0
    for n in range(low, high):
        pages = ()
        for j in gl.static_range(PARTS):
            entry = (n * O.BLOCK_K + j * PART) // O.C
            page = request
            if tables_ptr is not None:
                page = gl.load(tables_ptr + request.to(gl.int64) * O.LONGEST + gl.minimum(entry, O.LONGEST - 1))
            pages = pages + (gl.minimum(gl.maximum(page, 0), O.PAGES - 1),)
        mbarrier.wait(free.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), PANELS * PARTS * cache_desc.nbytes_per_cta)
        slot = n * O.BLOCK_K % O.C
        copy_pages(cache_desc, pages, slot, 0, tiles.index(stage), 0, full.index(stage))
        copy_pages(cache_desc, pages, slot, 0, ropes.index(stage), O.H, full.index(stage))
        stage, phase = after(stage, phase, STAGES)


@gluon.jit
def load_queries(q_desc, rope_desc, row, queries):
    """Starts copying the queries of a program, from a row of all heads of all tokens on."""
    q_tile, q_rope, q_full = queries
    mbarrier.expect(q_full, q_desc.nbytes_per_cta + rope_desc.nbytes_per_cta)
    tma.async_load(q_desc, [row, 0], q_full, q_tile)
    tma.async_load(rope_desc, [row, 0], q_full, q_rope)


@gluon.jit
def _load(q_desc, rope_desc, cache_desc, items_ptr, tables_ptr, queries, entries, ropes, O: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    head, item_ptr = _item(items_ptr, O)
    request, row, low, high = gl.load(item_ptr), gl.load(item_ptr + 1), gl.load(item_ptr + 5), gl.load(item_ptr + 6)
    if low < high:
        load_queries(q_desc, rope_desc, row * O.N + head * (O.N // O.K), queries)
    load_entries(cache_desc, tables_ptr, request, low, high, entries, ropes, O, STAGES)


@gluon.jit
def _logits(queries, entries, ropes, stage, zeros):
    """Starts the products of the queries and a block of entries."""
    x = warpgroup_mma(queries[0], entries[0].index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma(queries[1], ropes.index(stage).permute((1, 0)), x, is_async=True)


@gluon.jit
def weights_of_block(x, n, keys, at, row_max, row_sum, AXIS: gl.constexpr, O: gl.constexpr):
    """Returns (weights of block n relative to the row maximum so far, that maximum, row sum, what rescales earlier sums). AXIS:
    that of entries; the other one is that of rows of queries."""
    if O.CAP is None:
        x = x * (O.SCALE * LOG2E)
    else:
        x = exact_tanh(x * (O.SCALE / O.CAP)) * (O.CAP * LOG2E)
    kj = n * O.BLOCK_K + gl.arange(0, O.BLOCK_K, gl.SliceLayout(1 - AXIS, x.type.layout))
    kj, at = gl.expand_dims(kj, 1 - AXIS), gl.expand_dims(at, AXIS)
    seen = (kj < keys) & (kj <= at)
    if O.LOW is not None:
        seen = seen & (kj >= at + O.LOW)
    x = gl.where(seen, x, float("-inf"))
    new = gl.maximum(row_max, gl.max(x, axis=AXIS))
    anchor = gl.where(new == float("-inf"), 0.0, new)  # a row that has not seen any entry yet
    p = gl.exp2(x - gl.expand_dims(anchor, AXIS))
    rescale = gl.exp2(row_max - anchor)
    return p, new, row_sum * rescale + gl.sum(p, axis=AXIS), rescale


@gluon.jit
def _store(acc, row_sum, item_ptr, head, first, out_ptr, part_ptr, O: gl.constexpr):
    """Stores half of the columns, from `first` on: the output, or the piece of one that is split."""
    G: gl.constexpr = O.N // O.K
    layout: gl.constexpr = acc.type.layout
    row, rows, split, index = (
        gl.load(item_ptr + 1),
        gl.load(item_ptr + 2),
        gl.load(item_ptr + 7),
        gl.program_id(0) // O.K,
    )
    m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    c = first + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    acc = acc * (1 / gl.where(row_sum != 0, row_sum, 1.0))[:, None]
    at = m[:, None] * O.HV + c[None, :]
    if split == 1:
        row_ptr = out_ptr + (row.to(gl.int64) * O.N + head * G) * O.HV
        gl.store(row_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None])
    elif O.PIECES > 0:
        piece_ptr = part_ptr + (index.to(gl.int64) * O.K + head) * ROWS * O.HV
        gl.store(piece_ptr + at, acc, mask=(m < rows)[:, None])


@gluon.jit
def _weigh(
    items_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    log_ptr,
    queries,
    entries,
    ropes,
    passed,
    O: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Computes the weights, and the left half of the outputs."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O.BLOCK_K, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _half(O), 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    ROW_OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    G: gl.constexpr = O.N // O.K
    dtype: gl.constexpr = queries[0].dtype
    tiles, full, free = entries
    p_tiles, factors, p_full, p_free = passed
    head, item_ptr = _item(items_ptr, O)
    rows, position, keys = gl.load(item_ptr + 2), gl.load(item_ptr + 3), gl.load(item_ptr + 4)
    low, high = gl.load(item_ptr + 5), gl.load(item_ptr + 6)
    at = position + gl.arange(0, ROWS, ROW) // G
    zeros = gl.zeros([ROWS, O.BLOCK_K], gl.float32, LOGITS)
    acc = gl.zeros([ROWS, _half(O)], gl.float32, SUMS)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    row_sum = gl.zeros([ROWS], gl.float32, ROW)
    stage, phase, place, p_phase = 0, 0, 0, 0
    if low < high:
        mbarrier.wait(queries[2], 0)
        mbarrier.wait(full.index(0), 0)
        x = _logits(queries, entries, ropes, 0, zeros)
        x = warpgroup_mma_wait(0, (x,))
        weights, row_max, row_sum, rescale = weights_of_block(x, low, keys, at, row_max, row_sum, 1, O)
        for n in range(low, high):
            next_stage, next_phase = after(stage, phase, STAGES)
            # In the last iteration these products read stale entries, of which no row sees any.
            mbarrier.wait(full.index(next_stage), next_phase, pred=n + 1 < high)
            x = _logits(queries, entries, ropes, next_stage, zeros)
            clear(entries, stage, phase, keys - n * O.BLOCK_K, 1)
            p = weights.to(dtype)
            mbarrier.wait(p_free.index(place), p_phase ^ 1)
            p_tiles.index(place).store(p)
            factors.index(place).store(rescale)
            fence_async_shared()
            mbarrier.arrive(p_full.index(place))
            place, p_phase = after(place, p_phase, PASSED)
            acc = acc * gl.convert_layout(rescale, ROW_OF_SUMS)[:, None]
            values = tiles.index(stage).slice(0, _half(O), 1)
            acc = warpgroup_mma(gl.convert_layout(p, LEFT), values, acc, is_async=True)
            x = warpgroup_mma_wait(1, (x,))
            seen = gl.where(n + 1 < high, keys, 0)
            weights, row_max, row_sum, rescale = weights_of_block(x, n + 1, seen, at, row_max, row_sum, 1, O)
            acc = warpgroup_mma_wait(0, (acc,))
            mbarrier.arrive(free.index(stage))
            stage, phase = next_stage, next_phase
    mbarrier.wait(p_free.index(place), p_phase ^ 1)
    factors.index(place).store(row_sum)
    mbarrier.arrive(p_full.index(place))
    _store(acc, gl.convert_layout(row_sum, ROW_OF_SUMS), item_ptr, head, 0, out_ptr, part_ptr, O)
    some = row_sum != 0  # true for NaN too
    m = gl.arange(0, ROWS, ROW)
    lse = gl.where(some, row_max + gl.log2(gl.where(some, row_sum, 1.0)), float("-inf"))
    if O.PIECES > 0:
        part = ((gl.program_id(0) // O.K).to(gl.int64) * O.K + head) * ROWS + m
        gl.store(lse_ptr + part, lse, mask=m < rows)
    if log_ptr is not None:
        whole = (m < rows) & (gl.load(item_ptr + 7) == 1)
        gl.store(log_ptr + gl.load(item_ptr + 1).to(gl.int64) * O.N + head * G + m, lse * LN2, mask=whole)


@gluon.jit
def _follow(items_ptr, out_ptr, part_ptr, entries, passed, O: gl.constexpr, STAGES: gl.constexpr):
    """Computes the right half of the outputs."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _half(O), 16])
    ROW_OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    tiles, _, free = entries
    p_tiles, factors, p_full, p_free = passed
    head, item_ptr = _item(items_ptr, O)
    low, high = gl.load(item_ptr + 5), gl.load(item_ptr + 6)
    acc = gl.zeros([ROWS, _half(O)], gl.float32, SUMS)
    stage, phase, place, p_phase = 0, 0, 0, 0
    for _ in range(low, high):
        mbarrier.wait(p_full.index(place), p_phase)
        acc = acc * factors.index(place).load(ROW_OF_SUMS)[:, None]
        acc = warpgroup_mma(p_tiles.index(place), tiles.index(stage).slice(_half(O), _half(O), 1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(p_free.index(place))
        mbarrier.arrive(free.index(stage))
        place, p_phase = after(place, p_phase, PASSED)
        stage, phase = after(stage, phase, STAGES)
    mbarrier.wait(p_full.index(place), p_phase)
    _store(acc, factors.index(place).load(ROW_OF_SUMS), item_ptr, head, _half(O), out_ptr, part_ptr, O)


@gluon.jit
def warp_specialized_latent_kernel(
    q_desc,  # [M * N, H] in blocks [64, BLOCK_H]
    rope_desc,  # [M * N, K_WIDTH - H] in blocks [64, 64]
    cache_desc,  # [PAGES, C, 1, K_WIDTH] in blocks [1, slots, 1, 64]
    items_ptr,  # int32 [pieces, ITEM]
    tables_ptr,  # int32 [R, LONGEST]; None: page r is that of request r
    before_ptr,  # [M, N, HV]: rows that this kernel leaves, in the output's place
    part_ptr,  # [pieces, K, 64, HV] float32
    lse_ptr,  # [pieces, K, 64] float32, in units of log 2
    log_ptr,  # [M, N] float32, or None: lse of the output
    O: gl.constexpr,  # `Paged`
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,  # of a thread of the second warpgroup
    PRODUCER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    q_tile = gl.allocate_shared_memory(dtype, [ROWS, O.BLOCK_H], SWIZZLED)
    queries = q_tile, gl.allocate_shared_memory(dtype, [ROWS, PANEL], SWIZZLED), q_full
    entries = ring_of(STAGES, 1, dtype, O.BLOCK_K, O.BLOCK_H, 2)
    ropes = gl.allocate_shared_memory(dtype, [STAGES, O.BLOCK_K, PANEL], SWIZZLED)
    p_tiles = gl.allocate_shared_memory(dtype, [PASSED, ROWS, O.BLOCK_K], _weights_layout(O.BLOCK_K))
    factors = gl.allocate_shared_memory(gl.float32, [PASSED, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    p_full = gl.allocate_shared_memory(gl.int64, [PASSED, 1], mbarrier.MBarrierLayout())
    p_free = gl.allocate_shared_memory(gl.int64, [PASSED, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PASSED):
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(p_free.index(i), count=1)
    passed = p_tiles, factors, p_full, p_free
    gl.warp_specialize(
        [
            (_weigh, (items_ptr, before_ptr, part_ptr, lse_ptr, log_ptr, queries, entries, ropes, passed, O, STAGES)),
            (_follow, (items_ptr, before_ptr, part_ptr, entries, passed, O, STAGES)),
            (_load, (q_desc, rope_desc, cache_desc, items_ptr, tables_ptr, queries, entries, ropes, O, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
