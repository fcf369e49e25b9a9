"""The warp-specialized Gluon kernel of the gradient of grouped_matmul's matrices: `gluon_kernels.py` says how such work."""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from kernels.engines.matmul.gluon_sums import make_hands, write
from kernels.ops.grouped_matmul.gluon_parts import (
    GATHERING,
    gather,
    hand_over,
    has_half,
    indices,
    make_ring,
    multiply,
    skip,
    sums,
)
from kernels.toolchains.gluon import after, claim_tile, make_tile_queue, next_tile


@gluon.jit
def _contraction_tile(tile, bounds_ptr, E: gl.constexpr, TILES_P: gl.constexpr, TILES_Q: gl.constexpr, BAND: gl.constexpr,
                      ROWS: gl.constexpr, BLOCK_Q: gl.constexpr):  # fmt: skip
    """Returns a tile's matrix, its first row and column there, and the rows of its group; the longest groups come
    first."""
    expert = gl.load(bounds_ptr + 2 * E + 2 + tile // (TILES_P * TILES_Q))
    inside = tile % (TILES_P * TILES_Q)
    band = inside // (BAND * TILES_Q)
    height = gl.minimum(TILES_P - band * BAND, BAND)
    p = (band * BAND + inside % (BAND * TILES_Q) % height) * (2 * ROWS)
    q = inside % (BAND * TILES_Q) // height * BLOCK_Q
    return expert, p, q, gl.load(bounds_ptr + expert), gl.load(bounds_ptr + E + expert)


@gluon.jit
def _load_contractions(a_desc, a_ptr, rows_ptr, b_desc, bounds_ptr, turn_ptr, ring, queue, P: gl.constexpr,
                       E: gl.constexpr, TILES_P: gl.constexpr, TILES_Q: gl.constexpr, BAND: gl.constexpr,
                       ROWS: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
                       STAGES: gl.constexpr):  # fmt: skip
    a_tiles, b_tiles, full, free = ring
    tile, turn, stage, phase = gl.program_id(0), 0, 0, 0
    while tile < E * TILES_P * TILES_Q:
        expert, p, q, begin, end = _contraction_tile(tile, bounds_ptr, E, TILES_P, TILES_Q, BAND, ROWS, BLOCK_Q)
        tile = claim_tile(queue, turn_ptr, turn)
        turn += 1
        if rows_ptr is not None:
            index = indices(rows_ptr, begin, end, a_tiles.index(0))
        for row in range(begin, end, BLOCK_K):
            if rows_ptr is not None:  # of the next step, ahead of the copies of this one, behind which they would wait
                following = indices(rows_ptr, row + BLOCK_K, end, a_tiles.index(0))
            mbarrier.wait(free.index(stage), phase ^ 1)
            arrived = full.index(stage)
            if rows_ptr is None:
                mbarrier.expect(arrived, 2 * a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
                tma.async_load(a_desc, [row, p], arrived, a_tiles.index(2 * stage))
                tma.async_load(a_desc, [row, p + ROWS], arrived, a_tiles.index(2 * stage + 1))
                tma.async_load(b_desc, [row, q], arrived, b_tiles.index(stage))
            else:
                mbarrier.expect(arrived, b_desc.nbytes_per_cta)
                tma.async_load(b_desc, [row, q], arrived, b_tiles.index(stage))
                gather(a_tiles.index(2 * stage), a_ptr, index, p, P)
                gather(a_tiles.index(2 * stage + 1), a_ptr, index, p + ROWS, P)
                async_copy.mbarrier_arrive(arrived, increment_count=False)
                index = following
            stage, phase = after(stage, phase, STAGES)


@gluon.jit
def _keep_rows(block, count):
    """Zeroes the rows of a block in shared memory after the first ones, using few registers."""
    ROWS: gl.constexpr = block.shape[0]
    WIDTH: gl.constexpr = block.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    inner = gl.arange(0, ROWS, gl.SliceLayout(1, layout)) < count
    for column in gl.static_range(0, WIDTH, 64):
        part = block.slice(column, 64, 1)
        x = part.load(layout)
        part.store(gl.where(inner[:, None], x, gl.zeros_like(x)))


@gluon.jit
def _multiply_rows(acc, a, b, count):
    """Adds the products of the first rows of a partial step: the following rows belong to the next group, or to none,
    and may hold anything. Both warpgroups zero b in the same way, so their order does not matter."""
    COLUMNS: gl.constexpr = acc.shape[1]
    SLICE: gl.constexpr = 32
    for i in gl.static_range(a.shape[0] // SLICE):
        if count > SLICE * i:
            a_rows, b_rows = a.slice(SLICE * i, SLICE, 0), b.slice(SLICE * i, SLICE, 0).slice(0, COLUMNS, 1)
            if count < SLICE * (i + 1):
                _keep_rows(a_rows, count - SLICE * i)
                _keep_rows(b_rows, count - SLICE * i)
                fence_async_shared()
            acc = warpgroup_mma(a_rows.permute((1, 0)), b_rows, acc)
    return acc


@gluon.jit
def _contract(acc, ring, stage, phase, rows, GATHERED: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
              WHICH: gl.constexpr):  # fmt: skip
    a_tiles, b_tiles, full, free = ring
    acc, stage, phase = multiply(acc, ring, stage, phase, rows // BLOCK_K, WHICH, True, False, GATHERED, STAGES)
    if rows % BLOCK_K > 0:
        mbarrier.wait(full.index(stage), phase)
        if GATHERED:
            fence_async_shared()
        acc = _multiply_rows(acc, a_tiles.index(2 * stage + WHICH), b_tiles.index(stage), rows % BLOCK_K)
        fence_async_shared()
        mbarrier.arrive(free.index(stage))
        stage, phase = after(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def _multiply_contractions(bounds_ptr, ring, queue, hands, P: gl.constexpr, Q: gl.constexpr, E: gl.constexpr,
                           TILES_P: gl.constexpr, TILES_Q: gl.constexpr, GATHERED: gl.constexpr, BAND: gl.constexpr,
                           ROWS: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
                           WHICH: gl.constexpr):  # fmt: skip
    HALF: gl.constexpr = has_half(Q, BLOCK_Q)
    tile, turn, stage, phase, handed = gl.program_id(0), 0, 0, 0, 0
    while tile < E * TILES_P * TILES_Q:
        expert, p, q, begin, end = _contraction_tile(tile, bounds_ptr, E, TILES_P, TILES_Q, BAND, ROWS, BLOCK_Q)
        if p + WHICH * ROWS >= P:
            stage, phase = skip(ring, stage, phase, gl.cdiv(end - begin, BLOCK_K), STAGES)
        elif HALF and Q - q <= BLOCK_Q // 2:
            half, stage, phase = _contract(
                sums(ROWS, BLOCK_Q // 2), ring, stage, phase, end - begin, GATHERED, BLOCK_K, STAGES, WHICH
            )
            handed = hand_over(half, hands, handed, WHICH)
        else:
            acc, stage, phase = _contract(
                sums(ROWS, BLOCK_Q), ring, stage, phase, end - begin, GATHERED, BLOCK_K, STAGES, WHICH
            )
            handed = hand_over(acc, hands, handed, WHICH)
        tile = next_tile(queue, turn)
        turn += 1


@gluon.jit
def _write_contractions(out_ptr, bounds_ptr, queue, hands, P: gl.constexpr, Q: gl.constexpr, E: gl.constexpr,
                        TILES_P: gl.constexpr, TILES_Q: gl.constexpr, BAND: gl.constexpr, ROWS: gl.constexpr,
                        BLOCK_Q: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    HALF: gl.constexpr = has_half(Q, BLOCK_Q)
    tile, turn, handed = gl.program_id(0), 0, 0
    while tile < E * TILES_P * TILES_Q:
        expert, p, q, begin, end = _contraction_tile(tile, bounds_ptr, E, TILES_P, TILES_Q, BAND, ROWS, BLOCK_Q)
        p += WHICH * ROWS
        if p < P:
            out = out_ptr + expert.to(gl.int64) * (P * Q)
            columns = gl.where(HALF and Q - q <= BLOCK_Q // 2, BLOCK_Q // 2, BLOCK_Q)
            handed = write(hands, handed, out, p, P, q, columns, Q, 1, WHICH)
        tile = next_tile(queue, turn)
        turn += 1


@gluon.jit
def warp_specialized_contraction_kernel(
    a_desc,  # [M, P] in blocks [BLOCK_K, ROWS]; None if its rows are gathered
    a_ptr,  # [*, P], and the index there of each row, as above
    rows_ptr,
    b_desc,  # [M, Q] in blocks [BLOCK_K, BLOCK_Q]
    bounds_ptr,
    turn_ptr,
    out_ptr,  # [E, P, Q]
    P: gl.constexpr,
    Q: gl.constexpr,
    E: gl.constexpr,
    BAND: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    MULTIPLYING: gl.constexpr,
    OTHERS: gl.constexpr,
):
    TILES_P: gl.constexpr = (P + 2 * ROWS - 1) // (2 * ROWS)
    TILES_Q: gl.constexpr = (Q + BLOCK_Q - 1) // BLOCK_Q
    GATHERED: gl.constexpr = rows_ptr is not None
    LOADING: gl.constexpr = GATHERING if GATHERED else 1
    ring = make_ring(STAGES, b_desc.dtype, (BLOCK_K, ROWS), BLOCK_K, BLOCK_Q, 32 * GATHERING if GATHERED else 0)
    queue, hands = make_tile_queue(4), make_hands(BUFFERS, b_desc.dtype, ROWS)
    gl.warp_specialize(
        [
            (_multiply_contractions, (bounds_ptr, ring, queue, hands, P, Q, E, TILES_P, TILES_Q, GATHERED, BAND, ROWS, BLOCK_Q,
                                      BLOCK_K, STAGES, 0)),
            (_multiply_contractions, (bounds_ptr, ring, queue, hands, P, Q, E, TILES_P, TILES_Q, GATHERED, BAND, ROWS, BLOCK_Q,
                                      BLOCK_K, STAGES, 1)),
            (_load_contractions, (a_desc, a_ptr, rows_ptr, b_desc, bounds_ptr, turn_ptr, ring, queue, P, E, TILES_P, TILES_Q,
                                  BAND, ROWS, BLOCK_Q, BLOCK_K, STAGES)),
            (_write_contractions, (out_ptr, bounds_ptr, queue, hands, P, Q, E, TILES_P, TILES_Q, BAND, ROWS, BLOCK_Q, 0)),
            (_write_contractions, (out_ptr, bounds_ptr, queue, hands, P, Q, E, TILES_P, TILES_Q, BAND, ROWS, BLOCK_Q, 1)),
        ],
        [4, LOADING, 1, 1],
        [MULTIPLYING, OTHERS, OTHERS, OTHERS],
    )  # fmt: skip
