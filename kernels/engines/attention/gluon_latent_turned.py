"""Latent attention over pages in Gluon, for Hopper and few rows: the products are computed transposed.

With entries as the rows of the first operand, the 64 rows of an instruction are entries and columns of latents, not queries,
of which there are 16 or 32. A block of entries is copied to shared memory once, by one warp, and read there by both products.
One warpgroup has the outputs of all columns in its registers. Programs wait for memory: one fills a multiprocessor with two
blocks, of which one at least is on its way.
"""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.engines.attention import triton_paged_plan
from kernels.engines.attention.gluon_latent import PANEL, load_entries, load_queries, weights_of_block
from kernels.engines.attention.gluon_loads import clear, ring_of
from kernels.engines.attention.triton_parts import LN2
from kernels.toolchains.gluon import SWIZZLED, after

# The same source as in the Triton kernels, so that the work of a program is defined once.
tiles_of = gluon.jit(triton_paged_plan.tiles_of.fn)
pieces_of = gluon.jit(triton_paged_plan.pieces_of.fn)
piece_of = gluon.jit(triton_paged_plan.piece_of.fn)


@gluon.constexpr_function
def _layout_of_requests(O):
    """Returns a layout [BLOCK_R, BLOCK_R] of which every warp has all, so that sums need no other."""
    return gl.BlockedLayout([max(1, O.BLOCK_R // 32), O.BLOCK_R], [32, 1], [4, 1], [1, 0])


@gluon.jit
def _plan(cuts_ptr, lens_ptr, index, O: gl.constexpr):
    """Returns (request, place of piece `index` within it, pieces of its tile, number of all pieces), as `plan` of
    `triton_paged_plan`, of few requests. A piece that there is not has a tile of 0 pieces."""
    LAYOUT: gl.constexpr = _layout_of_requests(O)
    r = gl.arange(0, O.BLOCK_R, gl.SliceLayout(1, LAYOUT))
    tiles, blocks = tiles_of(cuts_ptr, lens_ptr, None, r, O)
    each = 1
    if O.PIECES > 0:
        each = gl.maximum((gl.sum(tiles * blocks, axis=0) + O.PIECES - 1) // O.PIECES, O.LEAST_BLOCKS)
    pieces = pieces_of(blocks, each, O)
    items = tiles * pieces
    others = gl.arange(0, O.BLOCK_R, gl.SliceLayout(0, LAYOUT))
    of_others = gl.convert_layout(items, gl.SliceLayout(0, LAYOUT))
    before = gl.sum(gl.where(others[None, :] < r[:, None], of_others[None, :], 0), axis=1)
    here = (before <= index) & (index < before + items)
    request, place, split = (
        gl.sum(gl.where(here, r, 0), axis=0),
        gl.sum(gl.where(here, index - before, 0), axis=0),
        gl.sum(gl.where(here, pieces, 0), axis=0),
    )
    return request, place, split, gl.sum(items, axis=0)


@gluon.jit
def _fill(out_ptr, cuts_ptr, number, O: gl.constexpr):
    """Sets rows before the first request and after the last to 0: those of the programs without a piece, the first FILLS."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    c = gl.arange(0, O.BLOCK_V, LAYOUT)
    if (number >= 0) & (number < O.FILLS):
        first, last = gl.load(cuts_ptr), gl.load(cuts_ptr + O.R)
        row_ptr = out_ptr + number.to(gl.int64) * (O.N * O.HV) + c
        for row in range(number, O.M, O.FILLS):
            if (row < first) | (row >= last):
                for head in range(O.N):
                    zeros = gl.zeros([O.BLOCK_V], out_ptr.dtype.element_ty, LAYOUT)
                    gl.store(row_ptr + head * O.HV, zeros, mask=c < O.HV)
            row_ptr += O.FILLS * O.N * O.HV


@gluon.jit
def _load(q_desc, rope_desc, cache_desc, tables_ptr, request, row, low, high, queries, entries, ropes, O: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    if low < high:
        load_queries(q_desc, rope_desc, row * O.N, queries)
    load_entries(cache_desc, tables_ptr, request, low, high, entries, ropes, O, STAGES)


@gluon.jit
def _attend(out_ptr, part_ptr, lse_ptr, log_ptr, row, rows, position, keys, low, high, split, queries, entries, ropes,
            p_tile, O: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    # Of products of blocks of entries with queries, and of columns of latents with weights.
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O.BLOCK_M, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, SUMS)
    dtype: gl.constexpr = queries[0].dtype
    tiles, full, free = entries
    m = gl.arange(0, O.BLOCK_M, ROW)
    at = position + m // O.N
    zeros = gl.zeros([O.BLOCK_K, O.BLOCK_M], gl.float32, SUMS)
    acc = gl.zeros([O.H, O.BLOCK_M], gl.float32, SUMS)
    row_max = gl.full([O.BLOCK_M], float("-inf"), gl.float32, ROW)
    row_sum = gl.zeros([O.BLOCK_M], gl.float32, ROW)
    stage, phase = 0, 0
    if low < high:
        mbarrier.wait(queries[2], 0)
    for n in range(low, high):
        mbarrier.wait(full.index(stage), phase)
        x = warpgroup_mma(tiles.index(stage), queries[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
        x = warpgroup_mma(ropes.index(stage), queries[1].permute((1, 0)), x, is_async=True)
        x = warpgroup_mma_wait(0, (x,))
        clear(entries, stage, phase, keys - n * O.BLOCK_K, 1)
        p, row_max, row_sum, rescale = weights_of_block(x, n, keys, at, row_max, row_sum, 0, O)
        p_tile.permute((1, 0)).store(p.to(dtype))
        fence_async_shared()
        acc = acc * rescale[None, :]
        acc = warpgroup_mma(tiles.index(stage).permute((1, 0)), p_tile.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(free.index(stage))
        stage, phase = after(stage, phase, STAGES)
    some = row_sum != 0  # true for NaN too
    acc = acc * (1 / gl.where(some, row_sum, 1.0))[None, :]
    lse = gl.where(some, row_max + gl.log2(gl.where(some, row_sum, 1.0)), float("-inf"))
    c = gl.arange(0, O.H, gl.SliceLayout(1, SUMS))
    where = c[:, None] + m[None, :] * O.HV
    first = row.to(gl.int64) * O.N
    if split == 1:
        gl.store(out_ptr + first * O.HV + where, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[None, :])
        if log_ptr is not None:
            gl.store(log_ptr + first + m, lse * LN2, mask=m < rows)
    elif O.PIECES > 0:
        piece = gl.program_id(0).to(gl.int64) * O.BLOCK_M
        gl.store(part_ptr + piece * O.HV + where, acc, mask=(m < rows)[None, :])
        gl.store(lse_ptr + piece + m, lse, mask=m < rows)


@gluon.jit
def turned_latent_kernel(
    q_desc,  # [M * N, H] in blocks [BLOCK_M, H]
    rope_desc,  # [M * N, K_WIDTH - H] in blocks [BLOCK_M, 64]
    cache_desc,  # [PAGES, C, 1, K_WIDTH] in blocks [1, slots, 1, 64]
    cuts_ptr,  # int32 [R + 1]
    lens_ptr,  # int32 [R]
    tables_ptr,  # int32 [R, LONGEST]; None: page r is that of request r
    before_ptr,  # [M, N, HV] or None: rows of another instance, in the output's place
    out_ptr,  # [M, N, HV]
    part_ptr,  # [pieces, 1, BLOCK_M, HV] float32
    lse_ptr,  # [pieces, 1, BLOCK_M] float32, in units of log 2
    log_ptr,  # [M, N] float32, or None: lse of the output
    O: gl.constexpr,  # `Paged`, of which all heads are one group and all requests one block
    STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    if before_ptr is not None:
        out_ptr = before_ptr
    dtype: gl.constexpr = q_desc.dtype
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    q_tile = gl.allocate_shared_memory(dtype, [O.BLOCK_M, O.H], SWIZZLED)
    queries = q_tile, gl.allocate_shared_memory(dtype, [O.BLOCK_M, PANEL], SWIZZLED), q_full
    entries = ring_of(STAGES, 1, dtype, O.BLOCK_K, O.H, 1)
    ropes = gl.allocate_shared_memory(dtype, [STAGES, O.BLOCK_K, PANEL], SWIZZLED)
    p_tile = gl.allocate_shared_memory(dtype, [O.BLOCK_M, O.BLOCK_K], SWIZZLED)
    request, place, split, total = _plan(cuts_ptr, lens_ptr, gl.program_id(0), O)
    row, rows, position, _, keys, low, high = piece_of(
        cuts_ptr, lens_ptr, None, request, place, gl.maximum(split, 1), O
    )
    rows, high = gl.where(split > 0, rows, 0), gl.where(split > 0, high, low)  # or there is no such piece
    if O.FILLS > 0:
        _fill(out_ptr, cuts_ptr, gl.program_id(0) - total, O)
    gl.warp_specialize(
        [
            (_attend, (out_ptr, part_ptr, lse_ptr, log_ptr, row, rows, position, keys, low, high, split, queries, entries,
                       ropes, p_tile, O, STAGES)),
            (_load, (q_desc, rope_desc, cache_desc, tables_ptr, request, row, low, high, queries, entries, ropes, O, STAGES)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
