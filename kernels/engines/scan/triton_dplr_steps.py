"""Gradients through the decays of a chunk of a recurrence of diagonal plus low rank, in Triton. See `triton_dplr.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.scan.triton_channel_steps import level, sums_over_intervals, within_blocks
from kernels.engines.scan.triton_dplr import block_decays, decays_of, entering, leaving, level_decays
from kernels.engines.scan.triton_parts import chunk_of, load_rows, runs_of, square_at, store_rows, tokens_by_channels


@triton.jit
def _square(at, wanted, factor):
    """Returns the gradients of the pairs that are `wanted` [C, C], times a factor, in their dtype."""
    return (tl.where(wanted, tl.load(at).to(tl.float32), 0.0) * factor).to(at.dtype.element_ty)


@triton.jit
def dplr_step(
    reads, earlier, writes, wanted, strictly, q, a, b, k, qb_at, qk_at, ab_at, ak_at, dq, da, db, dk,
    SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of one step's pairs; returns (dq, da, db, dk, those by the exponents of reads, earlier and writes).

    All have the same rounded factors, so that what sums over reads and over writes have in common cancels to the last bits.

    Args:
      reads, earlier, writes: decays of tokens as q and a read, and as b and k are written, [C, H].
      wanted, strictly: the pairs [t, s] of q and of a.
      qb_at, qk_at, ab_at, ak_at: pointers to the gradients of pairs [C, C].
    """
    dtype = k.dtype
    query, reader = (q.to(tl.float32) * reads).to(dtype), (a.to(tl.float32) * earlier).to(dtype)
    writer, key = (b.to(tl.float32) * writes).to(dtype), (k.to(tl.float32) * writes).to(dtype)
    qb, qk = _square(qb_at, wanted, SCALE), _square(qk_at, wanted, SCALE)
    through = tl.dot(qb, writer, input_precision=PRECISION)
    through = tl.dot(qk, key, through, input_precision=PRECISION)
    dq += through * reads
    by_reads = through * query.to(tl.float32)
    ab, ak = _square(ab_at, strictly, 1.0), _square(ak_at, strictly, 1.0)
    through = tl.dot(ab, writer, input_precision=PRECISION)
    through = tl.dot(ak, key, through, input_precision=PRECISION)
    da += through * earlier
    by_earlier = through * reader.to(tl.float32)
    through = tl.dot(tl.trans(qb), query, input_precision=PRECISION)
    through = tl.dot(tl.trans(ab), reader, through, input_precision=PRECISION)
    db += through * writes
    by_writes = through * writer.to(tl.float32)
    through = tl.dot(tl.trans(qk), query, input_precision=PRECISION)
    through = tl.dot(tl.trans(ak), reader, through, input_precision=PRECISION)
    dk += through * writes
    return dq, da, db, dk, by_reads, by_earlier, by_writes + through * key.to(tl.float32)


@triton.jit
def dplr_gradients_kernel(
    q_ptr,  # [B, T, N, H], as k, a and b
    k_ptr,
    a_ptr,
    b_ptr,
    w_ptr,  # log decays
    whole_ptr,  # see `dplr_chunks_kernel`, as of first
    first_ptr,
    runs_ptr,
    table_ptr,
    d_qb_ptr,  # [B, N, CHUNKS, C, C]: see `channel_states_kernel`, as of reads, writes and whole
    d_reads_ptr,
    d_writes_ptr,
    d_whole_ptr,
    d_qk_ptr,  # [B, N, CHUNKS, C, C]: see `dplr_written_kernel`
    d_ab_ptr,
    d_ak_ptr,
    d_entering_ptr,
    d_leaves_ptr,
    dq_ptr,  # [B, T, N, H]
    dk_ptr,
    da_ptr,
    db_ptr,
    dw_ptr,
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    CHUNKS: tl.constexpr,
    FORGETS: tl.constexpr,
    REACH: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,  # channels of one first level
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Gradients of BLOCK_H channels of q, k, a, b and log decays of one chunk and head."""
    c, head = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, n = head // N, head % N
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid, run, before, last = runs_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    i, zeros = tl.arange(0, BLOCK_C), tl.zeros([BLOCK_C], tl.int32)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    index = head.to(tl.int64) * CHUNKS + c
    OWN: tl.constexpr = tl.constexpr(True)
    q_at = tokens_by_channels(q_ptr, row, first, n, T, N, H)
    k_at = tokens_by_channels(k_ptr, row, first, n, T, N, H)
    a_at = tokens_by_channels(a_ptr, row, first, n, T, N, H)
    b_at = tokens_by_channels(b_ptr, row, first, n, T, N, H)
    w_at = tokens_by_channels(w_ptr, row, first, n, T, N, H)
    qb_at, qk_at = square_at(d_qb_ptr, index, BLOCK_C), square_at(d_qk_ptr, index, BLOCK_C)
    ab_at, ak_at = square_at(d_ab_ptr, index, BLOCK_C), square_at(d_ak_ptr, index, BLOCK_C)
    at_level = tl.load(first_ptr + index * BLOCKS + tl.program_id(1) * BLOCK_H // WIDTH)
    same, enters = run[:, None] == run[None, :], run == before
    # Through the states before and after the chunk.
    w, since = decays_of(w_at, valid, h, FORGETS, N, H, EXACT, BLOCK_C)
    left = leaving(w, since, run == last, EXACT, BLOCK_C)
    d_write = load_rows(tokens_by_channels(d_writes_ptr, row, first, n, T, N, H), here, h, N, H, BLOCK_C)
    db = d_write.to(tl.float32) * left
    by_writes = db * load_rows(b_at, valid, h, N, H, BLOCK_C).to(tl.float32)
    d_leave = load_rows(tokens_by_channels(d_leaves_ptr, row, first, n, T, N, H), here, h, N, H, BLOCK_C)
    dk = d_leave.to(tl.float32) * left
    by_writes += dk * load_rows(k_at, valid, h, N, H, BLOCK_C).to(tl.float32)
    d_read = load_rows(tokens_by_channels(d_reads_ptr, row, first, n, T, N, H), here, h, N, H, BLOCK_C)
    dq = d_read.to(tl.float32) * entering(w, since, enters, False, EXACT, BLOCK_C) * SCALE
    by_reads = dq * load_rows(q_at, valid, h, N, H, BLOCK_C).to(tl.float32)
    d_enter = load_rows(tokens_by_channels(d_entering_ptr, row, first, n, T, N, H), here, h, N, H, BLOCK_C)
    da = d_enter.to(tl.float32) * entering(w, since, enters, True, EXACT, BLOCK_C)
    by_earlier = da * load_rows(a_at, valid, h, N, H, BLOCK_C).to(tl.float32)
    total = tl.load(whole_ptr + index * H + h, mask=h < H, other=0.0)
    total *= tl.load(d_whole_ptr + index * H + h, mask=h < H, other=0.0)
    if EXACT:
        dw = sums_over_intervals(by_reads, zeros, i + 1, BLOCK_C) + total[None, :]
        dw += sums_over_intervals(by_earlier, zeros, i, BLOCK_C)
        dw += sums_over_intervals(by_writes, i + 1, zeros + BLOCK_C, BLOCK_C)
    else:
        # What is written until the end passes the decays after it: all, less those until then.
        total += tl.sum(by_writes, 0)
        dw = by_reads + by_earlier - by_writes
    if at_level == 0:
        diagonal = i[:, None] == i[None, :]
        own_b = tl.expand_dims(tl.sum(tl.where(diagonal, tl.load(qb_at).to(tl.float32), 0.0), 1), 1) * SCALE
        own_k = tl.expand_dims(tl.sum(tl.where(diagonal, tl.load(qk_at).to(tl.float32), 0.0), 1), 1) * SCALE
        wide = load_rows(q_at, valid, h, N, H, BLOCK_C).to(tl.float32)
        db += own_b * wide
        dk += own_k * wide
        dq += own_b * load_rows(b_at, valid, h, N, H, BLOCK_C).to(tl.float32)
        dq += own_k * load_rows(k_at, valid, h, N, H, BLOCK_C).to(tl.float32)
    if REACH > 0:
        if at_level > 0:
            reads, earlier, writes = block_decays(w, since, 1 << at_level, REACH, BLOCK_C)
            wanted = within_blocks(1 << at_level, OWN, BLOCK_C) & same
            dq, da, db, dk, z, z_earlier, less = dplr_step(
                reads,
                earlier,
                writes,
                wanted,
                wanted & (i[:, None] != i[None, :]),
                load_rows(q_at, valid, h, N, H, BLOCK_C),
                load_rows(a_at, valid, h, N, H, BLOCK_C),
                load_rows(b_at, valid, h, N, H, BLOCK_C),
                load_rows(k_at, valid, h, N, H, BLOCK_C),
                qb_at,
                qk_at,
                ab_at,
                ak_at,
                dq,
                da,
                db,
                dk,
                SCALE,
                PRECISION,
            )
            dw += z + z_earlier - less
            by_earlier += z_earlier
    for number in tl.range(at_level, LEVELS, num_stages=1):
        late, middle, wanted = level(1 << number, BLOCK_C)
        writes, earlier = level_decays(w, since, late, middle, EXACT, BLOCK_C)
        dq, da, db, dk, z, z_earlier, less = dplr_step(
            writes,
            earlier,
            writes,
            wanted & same,
            wanted & same,
            load_rows(q_at, valid, h, N, H, BLOCK_C),
            load_rows(a_at, valid, h, N, H, BLOCK_C),
            load_rows(b_at, valid, h, N, H, BLOCK_C),
            load_rows(k_at, valid, h, N, H, BLOCK_C),
            qb_at,
            qk_at,
            ab_at,
            ak_at,
            dq,
            da,
            db,
            dk,
            SCALE,
            PRECISION,
        )
        if EXACT:
            start = tl.where(late, middle, i)
            dw += sums_over_intervals(z, start, tl.where(late, i + 1, i), BLOCK_C)
            dw += sums_over_intervals(z_earlier, start, i, BLOCK_C)
            dw += sums_over_intervals(less, i + 1, tl.where(late, i + 1, middle), BLOCK_C)
        else:
            dw += z + z_earlier - less
            by_earlier += z_earlier
    if not EXACT:
        dw = tl.cumsum(dw, 0, reverse=True) + total[None, :] - by_earlier  # a reads before its token's decay
    store_rows(tokens_by_channels(dq_ptr, row, first, n, T, N, H), dq, here, h, N, H, BLOCK_C)
    store_rows(tokens_by_channels(dk_ptr, row, first, n, T, N, H), dk, here, h, N, H, BLOCK_C)
    store_rows(tokens_by_channels(da_ptr, row, first, n, T, N, H), da, here, h, N, H, BLOCK_C)
    store_rows(tokens_by_channels(db_ptr, row, first, n, T, N, H), db, here, h, N, H, BLOCK_C)
    store_rows(tokens_by_channels(dw_ptr, row, first, n, T, N, H), dw, here, h, N, H, BLOCK_C)
