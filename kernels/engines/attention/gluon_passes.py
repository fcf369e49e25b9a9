"""Parts shared by the two passes of attention's backward in Gluon, for Hopper. Results are deterministic, because each
gradient has one owner and there are no atomic adds.

One pass owns a block of keys and loops over the queries that see it, for the gradients of keys and values. The other
owns a block of queries and loops over the keys that they see, for the gradient of the queries. That takes seven
products per pair of tiles; a single pass takes five (`gluon_gradients.py`). Resident and streamed tiles both have 64
rows. A program has one or two consumer warpgroups with 64 resident rows each, and a producer warp that loads the
streamed tiles for both. Weights and gradients of logits never leave the registers of the warpgroup that computes them:
they are the left operands of the following products.

In each iteration a warpgroup computes the products for the gradients of the weights while it computes the weights, and
starts the logits of the next tile before it finishes the gradients of this one. The other warpgroup fills the remaining
gaps.
"""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, not-iterable]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.engines.attention.gluon_parts import (
    BLOCK,
    ROW,
    ends_of,
    masks_of,
    positions_of,
    segments_of,
    tile_of,
    visible,
)
from kernels.toolchains.gluon import SWIZZLED

ROWS = gl.constexpr(64)  # rows of resident and streamed tiles: the minimum of one instruction
PADDED = gl.constexpr(128)  # rows of statistics are padded to a multiple of this


@gluon.constexpr_function
def count_of(length, block):
    return (length + block - 1) // block


@gluon.jit
def place_of(order_ptr, LENGTH: gl.constexpr, BLOCK_ROWS: gl.constexpr, ALL: gl.constexpr, GROUP: gl.constexpr, O: gl.constexpr,
           HEADS: gl.constexpr):  # fmt: skip
    """Returns the batch row, the head (of ALL) and the block of a program. Blocks with the longest lists come first, or
    without lists the last ones. A few heads run side by side, so that what they read stays in the cache."""
    BLOCKS: gl.constexpr = count_of(LENGTH, BLOCK_ROWS)
    pid = gl.program_id(0)
    group = pid // (BLOCKS * HEADS)
    b, n, rank = group // (ALL // HEADS), group % (ALL // HEADS) * HEADS + pid % HEADS, pid // HEADS % BLOCKS
    if order_ptr is None:
        block = BLOCKS - 1 - rank
    else:
        block = tile_of(order_ptr, b, n, rank, BLOCKS, GROUP, O)
    return b, n, block


@gluon.jit
def make_ring(STAGES: gl.constexpr, dtype: gl.constexpr, WIDE: gl.constexpr, TALL: gl.constexpr, READERS: gl.constexpr):
    """Allocates a ring: (tiles of queries or keys, tiles of cotangents or values, rows of the two statistics, and per
    stage a barrier for "is full" and one for "is free")."""
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
    """Allocates (a tile of keys or queries per warpgroup, one of values or cotangents, a barrier for "are full")."""
    wide = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, WIDE], SWIZZLED)
    tall = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, TALL], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    return wide, tall, full


@gluon.jit
def seen_of(p, qi, kj, b, masks, BY_QUERY: gl.constexpr, O: gl.constexpr):
    """Returns the weights of queries qi and keys kj, zero where a pair does not attend. BY_QUERY: queries are the
    rows."""
    q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr = masks_of(masks, b, O)
    q_at, q_segment = positions_of(q_at_ptr, qi, O.S - O.T, O.T), segments_of(q_segment_ptr, qi, O.T)
    k_at, k_segment = positions_of(k_at_ptr, kj, 0, O.S), segments_of(k_segment_ptr, kj, O.S)
    if BY_QUERY:
        ends = ends_of(ends_ptr, qi[:, None], O)
        seen = visible(kj[None, :], q_at[:, None], k_at[None, :], q_segment[:, None], k_segment[None, :], ends, O)
    else:
        ends = ends_of(ends_ptr, qi[None, :], O)
        seen = visible(kj[:, None], q_at[None, :], k_at[:, None], q_segment[None, :], k_segment[:, None], ends, O)
    return gl.where(seen, p, 0.0)
