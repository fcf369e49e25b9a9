"""What the two passes of attention's backward in Gluon, for Hopper, have in common. The same call gives the same bits, because
each gradient has one owner and nothing is added to memory.

One pass has a block of keys and goes over the queries that see it, for the gradients of keys and values; the other has a block
of queries and goes over the keys that they see, for the gradient of the queries. That is seven products of a pair of tiles in
place of five in one pass (`gluon_gradients.py`). What stays and what passes by are tiles of 64 rows; a program has one or two
warpgroups with 64 rows that stay each, and a warp that loads what passes by for both. Weights and gradients of logits never
leave the registers of the warpgroup that makes them: they are the left sides of the products that follow.

In every turn of a warpgroup the gradients of the weights are multiplied while the weights are made, and the logits of the next
tile are begun before the gradients of this one are done; the other warpgroup fills what gaps are left.
"""

# Gluon declares tensors where its compiler takes constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, not-iterable]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.engines.attention.gluon_parts import BLOCK, ROW, ends_of, positions_of, segments_of, tile_of, visible
from kernels.toolchains.gluon import SWIZZLED

ROWS = gl.constexpr(64)  # of a tile that stays and of one that passes by: the fewest that an instruction multiplies
PADDED = gl.constexpr(128)  # rows of statistics are filled up to a multiple of these


@gluon.constexpr_function
def count_of(length, block):
    return (length + block - 1) // block


@gluon.jit
def place_of(order_ptr, LENGTH: gl.constexpr, BLOCK_ROWS: gl.constexpr, ALL: gl.constexpr, GROUP: gl.constexpr, O: gl.constexpr,
           HEADS: gl.constexpr):  # fmt: skip
    """Returns the row of the batch, the head (of ALL) and the block of a program; those with the longest lists come first, or
    the last ones, of a few heads side by side, so that what they read stays in the cache."""
    BLOCKS: gl.constexpr = count_of(LENGTH, BLOCK_ROWS)
    pid = gl.program_id(0)
    some = pid // (BLOCKS * HEADS)
    b, n, rank = some // (ALL // HEADS), some % (ALL // HEADS) * HEADS + pid % HEADS, pid // HEADS % BLOCKS
    if order_ptr is None:
        block = BLOCKS - 1 - rank
    else:
        block = tile_of(order_ptr, b, n, rank, BLOCKS, GROUP, O)
    return b, n, block


@gluon.jit
def make_ring(STAGES: gl.constexpr, dtype: gl.constexpr, WIDE: gl.constexpr, TALL: gl.constexpr, READERS: gl.constexpr):
    """Returns (tiles of queries or keys, of cotangents or values, rows of the two statistics, a barrier of each stage for "is
    full", and one for "is free")."""
    wide = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDE], SWIZZLED)
    tall = gl.allocate_shared_memory(dtype, [STAGES, ROWS, TALL], SWIZZLED)
    rows = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, ROWS], ROW)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=READERS)
    return wide, tall, rows, full, free


@gluon.jit
def load_block(desc, b, row, head, barrier, tile):
    WIDTH: gl.constexpr = desc.block_type.shape[3]
    tma.async_load(desc, [b, row, head, 0], barrier, tile.reinterpret(shape=[1, ROWS, 1, WIDTH], layout=BLOCK))


@gluon.jit
def load_what_stays(wide_desc, tall_desc, b, row, head, stays, WARPGROUPS: gl.constexpr):
    wide, tall, full = stays
    mbarrier.expect(full, WARPGROUPS * (wide_desc.nbytes_per_cta + tall_desc.nbytes_per_cta))
    for i in gl.static_range(WARPGROUPS):
        load_block(wide_desc, b, row + i * ROWS, head, full, wide.index(i))
        load_block(tall_desc, b, row + i * ROWS, head, full, tall.index(i))


@gluon.jit
def make_stays(dtype: gl.constexpr, WARPGROUPS: gl.constexpr, WIDE: gl.constexpr, TALL: gl.constexpr):
    """Returns (a tile of keys or queries for each warpgroup, one of values or cotangents, a barrier for "are full")."""
    wide = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, WIDE], SWIZZLED)
    tall = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, TALL], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    return wide, tall, full


@gluon.jit
def seen_of(p, qi, kj, b, masks, BY_QUERY: gl.constexpr, O: gl.constexpr):
    """Returns weights, zero where a pair does not attend, of queries qi and keys kj. BY_QUERY: queries are the
    rows."""
    q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr = masks
    if ends_ptr is not None:
        ends_ptr += b * O.ENDS_BATCH
    if q_at_ptr is not None:
        q_at_ptr += b * O.Q_AT_BATCH
        k_at_ptr += b * O.K_AT_BATCH
    if q_segment_ptr is not None:
        q_segment_ptr += b * O.Q_SEGMENT_BATCH
        k_segment_ptr += b * O.K_SEGMENT_BATCH
    q_at, q_segment = positions_of(q_at_ptr, qi, O.S - O.T, O.T), segments_of(q_segment_ptr, qi, O.T)
    k_at, k_segment = positions_of(k_at_ptr, kj, 0, O.S), segments_of(k_segment_ptr, kj, O.S)
    if BY_QUERY:
        ends = ends_of(ends_ptr, qi[:, None], O)
        seen = visible(kj[None, :], q_at[:, None], k_at[None, :], q_segment[:, None], k_segment[None, :], ends, O)
    else:
        ends = ends_of(ends_ptr, qi[None, :], O)
        seen = visible(kj[:, None], q_at[None, :], k_at[:, None], q_segment[None, :], k_segment[:, None], ends, O)
    return gl.where(seen, p, 0.0)
