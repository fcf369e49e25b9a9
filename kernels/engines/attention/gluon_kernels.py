"""The forward kernel of flash attention in Gluon, for Hopper: one producer warp, and one to three consumer warpgroups.

It computes the same as `forward_kernel` of `triton_kernels.py`, for 16-bit arrays and masks of positions and segments,
over the same block ranges or lists. A tile is 128 or 192 queries of a head, or 64 with lists; each warpgroup has 64 of
them. While a warpgroup computes the weights of a block of keys, the tensor cores multiply the weights of the previous
block with its values, and compute the logits of another warpgroup. Three warpgroups take turns to start their products,
and so do two under a window. The block with the last keys, on the diagonal of a causal mask, comes first. The kernel is
persistent: a program has a multiprocessor to itself, or half of one if it has one warpgroup, and takes tiles from a
queue. For heads up to 128, the next tile is loaded while the current one is finished and stored.
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

from kernels.engines.attention.gluon_loads import clear, load_keys, ring_of
from kernels.engines.attention.gluon_outputs import ROWS, leave
from kernels.engines.attention.gluon_parts import (
    BLOCK,
    ends_of,
    first_head,
    heads_of,
    limits_of,
    list_of,
    masks_of,
    positions_in,
    range_of,
    segments_of,
    tile_of,
    weights_of,
)
from kernels.engines.attention.gluon_values import add_values, added, times, value_tiles, value_width
from kernels.engines.attention.triton_parts import LOG2E
from kernels.toolchains.gluon import after, claim_tile, make_tile_queue, next_tile


@gluon.constexpr_function
def _blocks(O):
    return (O.T + O.BLOCK_Q - 1) // O.BLOCK_Q


@gluon.constexpr_function
def _key_blocks(O):
    return (O.S + O.BLOCK_K - 1) // O.BLOCK_K


@gluon.constexpr_function
def _consumers(O):
    """Returns the number of consumer warpgroups."""
    return O.BLOCK_Q // ROWS


@gluon.constexpr_function
def _in_turns(O):
    """Returns whether warpgroups start their products in turn, so that they do not all compute weights at once.

    Three always do. Two fall into that order on their own in long rows, where synchronising costs more than it gains;
    under a window, where rows are short, heads of 128 gain from it.
    """
    return _consumers(O) > 2 or (_consumers(O) == 2 and O.LOW is not None and O.BLOCK_H == 128)


@gluon.constexpr_function
def _head_tiles(O, width):
    """Returns the number of tiles of `width` columns that a head of queries or keys is stored in."""
    return (O.H + width - 1) // width


@gluon.jit
def _tiles(rows_ptr, O: gl.constexpr):
    """Returns the number of tiles of all heads."""
    if rows_ptr is None:
        tiles = _blocks(O) * heads_of(O) * O.B
    else:
        tiles = gl.load(rows_ptr) * heads_of(O)
    return tiles


@gluon.jit
def _place(tile, order_ptr, first_ptr, O: gl.constexpr, HEADS: gl.constexpr):
    """Returns the batch row, the head, its head of keys and the block of queries of a tile. The last blocks, which usually see
    the most keys, come first, or with lists those with the longest. A few heads run side by side, so that their keys stay in
    the cache."""
    BLOCKS: gl.constexpr = _blocks(O)
    group = tile // (BLOCKS * HEADS)
    n = group % (heads_of(O) // HEADS) * HEADS + tile % HEADS
    b = group // (heads_of(O) // HEADS)
    head = n // (heads_of(O) // O.K)
    n += first_head(first_ptr)
    if order_ptr is None:
        block = BLOCKS - 1 - tile // HEADS % BLOCKS
    else:
        block = tile_of(order_ptr, b, n, tile // HEADS % BLOCKS, BLOCKS, 1, O)
    return b, n, head, block


@gluon.jit
def _load(descs, lists, table_ptr, rows_ptr, turn_ptr, queue, queries, keys, values, O: gl.constexpr, HEADS: gl.constexpr,
          STAGES: gl.constexpr, QUEUED: gl.constexpr):  # fmt: skip
    q_desc, k_desc, v_desc, q_rope_desc, k_rope_desc = descs
    WARPGROUPS: gl.constexpr = _consumers(O)
    WIDTH: gl.constexpr = q_desc.block_type.shape[3]
    HEAD_TILES: gl.constexpr = _head_tiles(O, WIDTH)
    VALUE_TILES: gl.constexpr = value_tiles(O, WIDTH)
    q_tiles, q_full, q_free = queries
    spans_ptr, index_ptr, order_ptr, first_ptr, tiles_ptr = lists
    tile, turn, q_stage, q_phase, stage, phase = gl.program_id(0), 0, 0, 0, 0, 0
    tiles = _tiles(rows_ptr, O)
    while tile < tiles:
        b, n, head, block = _place(tile, order_ptr, first_ptr, O, HEADS)
        first, full, full_end, last = limits_of(spans_ptr, index_ptr, b, n, block, _blocks(O), O)
        list_ptr = list_of(index_ptr, b, n, block, _blocks(O), _key_blocks(O), O)
        if tiles_ptr is not None:
            list_ptr = tiles_ptr + b * O.TILES_BATCH
        mbarrier.wait(q_free.index(q_stage), q_phase ^ 1)
        mbarrier.expect(q_full.index(q_stage), WARPGROUPS * HEAD_TILES * q_desc.nbytes_per_cta)
        for i in gl.static_range(WARPGROUPS * HEAD_TILES):
            part = q_tiles.index(WARPGROUPS * HEAD_TILES * q_stage + i).reinterpret(
                shape=[1, ROWS, 1, WIDTH], layout=BLOCK
            )
            batch, rows = b, block * O.BLOCK_Q + i // HEAD_TILES * ROWS
            if rows_ptr is not None:
                batch, rows = 0, range_of(rows_ptr, b, O)[0] + rows
            if q_rope_desc is not None and i % HEAD_TILES == HEAD_TILES - 1:
                tma.async_load(q_rope_desc, [batch, rows, n, 0], q_full.index(q_stage), part)
            else:
                tma.async_load(q_desc, [batch, rows, n, i % HEAD_TILES * WIDTH], q_full.index(q_stage), part)
        q_stage, q_phase = after(q_stage, q_phase, QUEUED)
        # Take the next tile as late as possible, so that the program that finishes first gets the longest remaining
        # tile. Taken when this tile starts, it would go to the program that started first, which also has the longest
        # current one.
        soon = gl.minimum(first + 2, last)
        stage, phase = load_keys(
            k_desc,
            k_rope_desc,
            v_desc,
            list_ptr,
            table_ptr,
            b,
            head,
            last,
            soon,
            keys,
            values,
            stage,
            phase,
            HEAD_TILES,
            VALUE_TILES,
            O,
        )
        tile = claim_tile(queue, turn_ptr, turn)
        turn += 1
        stage, phase = load_keys(
            k_desc,
            k_rope_desc,
            v_desc,
            list_ptr,
            table_ptr,
            b,
            head,
            soon,
            first,
            keys,
            values,
            stage,
            phase,
            HEAD_TILES,
            VALUE_TILES,
            O,
        )


@gluon.jit
def _attend(arrays, queue, queries, keys, values, turns, O: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr,
            QUEUED: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    q_tiles, q_full, q_free = queries
    tile, turn, q_stage, q_phase, stage, phase = gl.program_id(0), 0, 0, 0, 0, 0
    turns_phase = 1 if WHICH == 0 else 0  # the phase before the first counts as complete
    tiles = _tiles(arrays[3], O)
    while tile < tiles:
        b, n, _, block = _place(tile, arrays[0][2], arrays[0][3], O, HEADS)
        mbarrier.wait(q_full.index(q_stage), q_phase)
        if _head_tiles(O, q_tiles.shape[2]) == 1:
            q = (q_tiles.index(_consumers(O) * q_stage + WHICH),)
        else:
            tile_of_q = 3 * (_consumers(O) * q_stage + WHICH)
            q = (q_tiles.index(tile_of_q), q_tiles.index(tile_of_q + 1), q_tiles.index(tile_of_q + 2))
        stage, phase, turns_phase = _attend_tile(
            b, n, block, arrays, q, keys, values, turns, stage, phase, turns_phase, O, STAGES, WHICH)  # fmt: skip
        fence_async_shared()
        mbarrier.arrive(q_free.index(q_stage))
        q_stage, q_phase = after(q_stage, q_phase, QUEUED)
        tile = next_tile(queue, turn)
        turn += 1


@gluon.jit
def _logits(q, k_tiles, stage, zeros):
    """Starts the products of a warpgroup's queries and a block of keys, one tile of columns at a time."""
    HEAD_TILES: gl.constexpr = len(q)
    s = zeros
    for i in gl.static_range(HEAD_TILES):
        k = k_tiles.index(HEAD_TILES * stage + i).permute((1, 0))
        s = warpgroup_mma(q[i], k, s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def _attend_tile(b, n, block, arrays, q, keys, values, turns, stage, phase, turns_phase, O: gl.constexpr,
                 STAGES: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Computes attention for a warpgroup's queries; returns the next stage, its phase, and the next turn's phase."""
    WARPGROUPS: gl.constexpr = _consumers(O)
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O.BLOCK_K, 16])
    VALUE_WIDTH: gl.constexpr = values[0].shape[2]
    VALUE_TILES: gl.constexpr = value_tiles(O, q[0].shape[1])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE_WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    ROW_OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    UNIT: gl.constexpr = (O.SCALE if O.CAP is None else O.CAP) * LOG2E
    dtype: gl.constexpr = q[0].dtype
    lists, masks, lens_ptr, rows_ptr, sink_ptr, sofar, out_ptr, lse_ptr = arrays
    spans_ptr, index_ptr, order_ptr, _, _ = lists
    k_tiles, k_full, k_free = keys
    v_tiles, v_full, v_free = values
    first, full, full_end, last = limits_of(spans_ptr, index_ptr, b, n, block, _blocks(O), O)
    list_ptr = list_of(index_ptr, b, n, block, _blocks(O), _key_blocks(O), O)
    row = block * O.BLOCK_Q + WHICH * ROWS
    qi = row + gl.arange(0, ROWS, ROW)
    q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr = masks_of(masks, b, O)
    q_at = positions_in(q_at_ptr, qi, row, O.S - O.T, O.T, O)
    q_segment = segments_of(q_segment_ptr, qi, O.T)
    ends = ends_of(ends_ptr, qi[:, None], O)

    zeros = gl.zeros([ROWS, O.BLOCK_K], gl.float32, LOGITS)
    acc = (gl.zeros([ROWS, VALUE_WIDTH], gl.float32, SUMS),) * VALUE_TILES
    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    row_sum = gl.zeros([ROWS], gl.float32, ROW)
    if sink_ptr is not None:  # acts as the first key of every row, with value zero
        sink = gl.load(sink_ptr + n) * (LOG2E / UNIT)
        row_max = gl.zeros([ROWS], gl.float32, ROW) + sink
        row_sum = gl.where(row_max > float("-inf"), 1.0, 0.0)
    if last > first:
        mbarrier.wait(k_full.index(stage), phase)
        s = _logits(q, k_tiles, stage, zeros)
        if lens_ptr is not None:
            clear(values, stage, phase, gl.load(lens_ptr + b) - (last - 1) * O.BLOCK_K, VALUE_TILES)
        s = warpgroup_mma_wait(0, (s,))
        mbarrier.arrive(k_free.index(stage))
        masked = (last - 1 >= full_end) | (last - 1 < full)
        weights, row_max, row_sum, rescale = weights_of(
            s, last - 1, list_ptr, masked, row_max, row_sum, q_at, q_segment, k_at_ptr, k_segment_ptr, ends, O)  # fmt: skip
        p = gl.convert_layout(weights.to(dtype), LEFT)
        for i in range(1, last - first):
            j = last - 1 - i
            k_stage, k_phase = after(stage, phase, STAGES)
            mbarrier.wait(k_full.index(k_stage), k_phase)
            if _in_turns(O):
                mbarrier.wait(turns.index(WHICH), turns_phase)
                turns_phase ^= 1
            s = _logits(q, k_tiles, k_stage, zeros)
            mbarrier.wait(v_full.index(stage), phase)
            acc = add_values(p, v_tiles, stage, acc)
            if _in_turns(O):
                mbarrier.arrive(turns.index((WHICH + 1) % WARPGROUPS))
            s = warpgroup_mma_wait(VALUE_TILES, (s,))
            mbarrier.arrive(k_free.index(k_stage))
            masked = (j >= full_end) | (j < full)
            weights, row_max, row_sum, rescale = weights_of(
                s, j, list_ptr, masked, row_max, row_sum, q_at, q_segment, k_at_ptr, k_segment_ptr, ends, O)  # fmt: skip
            acc = added(acc)
            mbarrier.arrive(v_free.index(stage))
            p = gl.convert_layout(weights.to(dtype), LEFT)
            acc = times(acc, gl.convert_layout(rescale, ROW_OF_SUMS))
            stage, phase = k_stage, k_phase
        mbarrier.wait(v_full.index(stage), phase)
        acc = added(add_values(p, v_tiles, stage, acc))
        mbarrier.arrive(v_free.index(stage))
        stage, phase = after(stage, phase, STAGES)
    nonempty = row_sum != 0  # true for NaN too, so that lse becomes NaN
    row_sum = gl.where(nonempty, row_sum, 1.0)
    lse = gl.where(nonempty, row_max * UNIT + gl.log2(row_sum), float("-inf"))
    out = times(acc, 1 / gl.convert_layout(row_sum, ROW_OF_SUMS))
    if O.MERGE and sofar[0] is None:  # in place
        if last > first:
            leave(lse_ptr, out_ptr, (out_ptr, lse_ptr), rows_ptr, lse, out, q, b, n, qi, row, O)
    else:
        leave(lse_ptr, out_ptr, sofar, rows_ptr, lse, out, q, b, n, qi, row, O)
    return stage, phase, turns_phase


@gluon.jit
def warp_specialized_fwd_kernel(
    turn_ptr,  # [1], zero-initialised: number of tiles taken from the queue
    q_desc,  # [B, T, N, H] in blocks [1, 64, 1, columns of a tile]; one or three tiles hold a head
    k_desc,  # [B, S, K, H] in blocks [1, BLOCK_K, 1, columns of a tile], or pages, see `table_ptr`
    v_desc,  # [B, S, K, HV] in blocks [1, BLOCK_K, 1, columns of a tile]; one or three
    spans_ptr,  # this and the following as in `forward_kernel`
    index_ptr,
    order_ptr,
    q_at_ptr,
    k_at_ptr,
    q_segment_ptr,
    k_segment_ptr,
    ends_ptr,
    sink_ptr,
    first_ptr,  # int32 [2] or None: the first of O.PART query heads, those that have the heads of these keys; and 0
    tiles_ptr,  # int32 [B or 1, blocks of keys] or None: where each of them lies; what describes keys is in their order
    q_rope_desc,  # [B, T, N, Hr] or None: the last tile of columns of queries, if it is an array of its own
    k_rope_desc,  # [B, S, 1, Hr] or None: that of keys, which all heads share
    table_ptr,  # int32 [B, O.TABLE] or None: keys and values are pages [O.PAGES, O.PAGE, K, width] in blocks [1, slots, 1, 64],
    lens_ptr,  # and int32 [B] or None: how many slots of a row hold a token
    rows_ptr,  # int32 [1 + B, 2] or None: queries, output and lse are those of [1, rows, ...], of which batch row b has the
    # second number of entry 1 + b, from the first on; entry 0 is how many batch rows there are
    sofar_out_ptr,  # [B, T, N, HV] or None: attention over other keys. With O.MERGE and None it is in `out_ptr`, and
    sofar_lse_ptr,  # [B, T, N] or None: its lse in `lse_ptr`
    out_ptr,  # [B, T, N, HV], of the dtype of the queries or float32
    lse_ptr,  # [B, T, N] float32
    O: gl.constexpr,  # `Options`, with a BLOCK_Q of 64 per consumer warpgroup
    HEADS: gl.constexpr,  # heads that run side by side
    STAGES: gl.constexpr,
    QUEUED: gl.constexpr,  # number of stages for tiles of queries
    CONSUMER_REGISTERS: gl.constexpr,  # registers per consumer thread
    PRODUCER_REGISTERS: gl.constexpr,  # registers per producer thread
):
    WARPGROUPS: gl.constexpr = _consumers(O)
    WIDTH: gl.constexpr = q_desc.block_type.shape[3]
    HEAD_TILES: gl.constexpr = _head_tiles(O, WIDTH)
    dtype: gl.constexpr = q_desc.dtype
    queue = make_tile_queue(WARPGROUPS)
    queries = ring_of(QUEUED, WARPGROUPS * HEAD_TILES, dtype, ROWS, WIDTH, WARPGROUPS)
    keys = ring_of(STAGES, HEAD_TILES, dtype, O.BLOCK_K, WIDTH, WARPGROUPS)
    values = ring_of(STAGES, value_tiles(O, WIDTH), dtype, O.BLOCK_K, value_width(O, WIDTH), WARPGROUPS)
    lists = spans_ptr, index_ptr, order_ptr, first_ptr, tiles_ptr
    descs = q_desc, k_desc, v_desc, q_rope_desc, k_rope_desc
    masks = q_at_ptr, k_at_ptr, q_segment_ptr, k_segment_ptr, ends_ptr
    arrays = lists, masks, lens_ptr, rows_ptr, sink_ptr, (sofar_out_ptr, sofar_lse_ptr), out_ptr, lse_ptr
    if _in_turns(O):
        turns = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(WARPGROUPS):
            mbarrier.init(turns.index(i), count=1)
    else:
        turns: gl.constexpr = None
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (_attend, (arrays, queue, queries, keys, values, turns, O, HEADS, STAGES, QUEUED, 0)),
                (_load, (descs, lists, table_ptr, rows_ptr, turn_ptr, queue, queries, keys, values, O, HEADS, STAGES, QUEUED)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (arrays, queue, queries, keys, values, turns, O, HEADS, STAGES, QUEUED, 0)),
                (_attend, (arrays, queue, queries, keys, values, turns, O, HEADS, STAGES, QUEUED, 1)),
                (_load, (descs, lists, table_ptr, rows_ptr, turn_ptr, queue, queries, keys, values, O, HEADS, STAGES, QUEUED)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (arrays, queue, queries, keys, values, turns, O, HEADS, STAGES, QUEUED, 0)),
                (_attend, (arrays, queue, queries, keys, values, turns, O, HEADS, STAGES, QUEUED, 1)),
                (_attend, (arrays, queue, queries, keys, values, turns, O, HEADS, STAGES, QUEUED, 2)),
                (_load, (descs, lists, table_ptr, rows_ptr, turn_ptr, queue, queries, keys, values, O, HEADS, STAGES, QUEUED)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
