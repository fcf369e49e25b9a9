"""Decays between the tokens of a chunk, in which each channel has its own, and gradients through them, in Triton.

The weight of a pair is Σ q_t k_s exp(G_t - G_s) over channels, with G the sums of log decays. As one product of queries
exp(G_t) q_t and keys exp(-G_s) k_s it overflows. Steps that do not:

- A *level* of `half` tokens. The chunk is blocks of 2 `half`; a pair belongs to the level if t is in the second half of a
  block and s in the first. The beginning of the second half lies between them, and both are referred to it: exp(sum from
  there to t) and exp(sum from s to there), neither above 1, for any decay. log2(C) levels have all pairs.
- *Blocks*, all pairs of which are referred to the middle of each channel's sums over the block. Both factors are within
  exp(±REACH / 2) if no sum is wider than REACH. Blocks are the whole chunk, or of 32 or 16 tokens with the levels of more,
  the largest whose sums all are narrow enough; if none are, a chunk is levels. Each program decides by its own data.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.scan.triton_parts import (
    chunk_of,
    load_rows,
    per_token,
    runs_of,
    square_at,
    store_rows,
    tokens_by_channels,
)


@triton.jit
def interval_sums(a, begin, end, BLOCK_C: tl.constexpr):
    """Returns the sums of a [C, H] over tokens begin <= u < end, both [C], for each token: each summed by itself."""
    u = tl.arange(0, BLOCK_C)[None, :]
    return tl.dot(tl.where((u >= begin[:, None]) & (u < end[:, None]), 1.0, 0.0), a, input_precision="ieee")


@triton.jit
def sums_over_intervals(z, begin, end, BLOCK_C: tl.constexpr):
    """Returns for each token u the sum of z_t over the tokens t whose interval has it: the transpose of `interval_sums`."""
    u = tl.arange(0, BLOCK_C)[:, None]
    return tl.dot(tl.where((u >= begin[None, :]) & (u < end[None, :]), 1.0, 0.0), z, input_precision="ieee")


@triton.jit
def first_level(a, total, REACH: tl.constexpr, LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr):
    """Returns the least level of a chunk with log decays a [C, H]; pairs below it are those of blocks."""
    found = 0
    if REACH > 0:
        of_16 = tl.sum(tl.reshape(a, [BLOCK_C // 16, 16, BLOCK_H]), 1)
        found = tl.where(tl.min(tl.min(of_16, 1), 0) >= -REACH, 4, found)
        if LEVELS > 5:
            of_32 = tl.sum(tl.reshape(of_16, [BLOCK_C // 32, 2, BLOCK_H]), 1)
            found = tl.where(tl.min(tl.min(of_32, 1), 0) >= -REACH, 5, found)
        found = tl.where(tl.min(total, 0) >= -REACH, LEVELS, found)
    return found


@triton.jit
def level(half, BLOCK_C: tl.constexpr):
    """Returns (whether a token is in the second half of its block [C], where that half begins, the level's pairs [t, s])."""
    i = tl.arange(0, BLOCK_C)
    middle = i // (2 * half) * (2 * half) + half
    late = i >= middle
    return late, middle, late[:, None] & (i < middle)[None, :] & (middle[:, None] == middle[None, :])


@triton.jit
def level_decay(
    sums_at, here, h, late, middle, BEFORE,
    N: tl.constexpr, H: tl.constexpr, EXACT: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Returns the decay between each token and the middle of its block [C, H]; of late tokens without their own if BEFORE.

    Args:
      sums_at: what `channel_decays_kernel` stores at the chunk: log decays if EXACT, else their sums since its beginning.
    """
    i = tl.arange(0, BLOCK_C)
    own = load_rows(sums_at, here, h, N, H, BLOCK_C)
    if EXACT:
        to = i if BEFORE else i + 1
        e = interval_sums(own, tl.where(late, middle, i + 1), tl.where(late, to, middle), BLOCK_C)
    else:
        at = sums_at + (middle - 1)[:, None] * (N * H) + h[None, :]
        count = tl.sum(here.to(tl.int32))
        at_middle = tl.load(at, mask=(middle <= count)[:, None] & (h < H)[None, :], other=0.0)
        if BEFORE:
            own = load_rows(sums_at - N * H, here & (i > 0), h, N, H, BLOCK_C)
        e = tl.where(late[:, None], own - at_middle, at_middle - own)
    return tl.exp(tl.minimum(e, 0.0))


@triton.jit
def within_blocks(size, OWN: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns the pairs [t, s] of one block of `size`; with t = s if OWN."""
    t, s = tl.arange(0, BLOCK_C)[:, None], tl.arange(0, BLOCK_C)[None, :]
    return ((t >= s) if OWN else (t > s)) & (t // size == s // size)


@triton.jit
def middle_decay(
    sums_at, here, h, size, count, BEFORE: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, REACH: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Returns the decays (from the middle of a block's sums until a token reads, from its write until there), [C, H]."""
    i = tl.arange(0, BLOCK_C)
    begin = i // size * size
    end = tl.minimum(begin + size, count)
    channels = (h < H)[None, :]
    at = sums_at + h[None, :]
    low = tl.load(at + (begin - 1)[:, None] * (N * H), mask=(begin > 0)[:, None] & channels, other=0.0)
    high = tl.load(at + (end - 1)[:, None] * (N * H), mask=(end > begin)[:, None] & channels, other=0.0)
    e = load_rows(sums_at, here, h, N, H, BLOCK_C) - 0.5 * (low + high)
    reads = e
    if BEFORE:
        reads = load_rows(sums_at - N * H, here & (i > 0), h, N, H, BLOCK_C) - 0.5 * (low + high)
    # Of tokens past the chunk, whose queries and keys are 0, sums are anything.
    reads, writes = tl.minimum(reads, 0.5 * REACH + 1.0), tl.minimum(-e, 0.5 * REACH + 1.0)
    return tl.exp(reads), tl.exp(writes)


@triton.jit
def channel_step(
    reads, writes, wanted, q, k, d_pairs, d_solved, beta, dq, dk, d_beta, PRECISION: tl.constexpr, DELTA: tl.constexpr
):
    """Adds the gradients of one step's pairs; returns (dq, dk, d_beta, and by log decays: of reads, of writes [C, H]).

    The gradients by log decays are those by the exponents of `reads` and `writes`. Both have the same rounded factors, so that
    what a sum over reads and one over writes have in common cancels to the last bits.

    Args:
      reads, writes: decays of tokens as they read, and as they are written, [C, H]. wanted: the pairs [t, s].
    """
    dtype = k.dtype
    query, key = (q.to(tl.float32) * reads).to(dtype), (k.to(tl.float32) * writes).to(dtype)
    of_pairs = tl.where(wanted, d_pairs, 0.0).to(dtype)
    through = tl.dot(of_pairs, key, input_precision=PRECISION)
    dq += through * reads
    by_reads = through * query.to(tl.float32)
    through = tl.dot(tl.trans(of_pairs), query, input_precision=PRECISION)
    if DELTA:
        reader = (k.to(tl.float32) * reads).to(dtype)
        # Pairs that are not wanted may overflow.
        A = tl.dot(reader, tl.trans(key), input_precision=PRECISION)
        d_beta -= tl.sum(tl.where(wanted, A * d_solved, 0.0), 1)
        of_solved = tl.where(wanted, d_solved * -beta[:, None], 0.0).to(dtype)
        through = tl.dot(tl.trans(of_solved), reader, through, input_precision=PRECISION)
        of_reader = tl.dot(of_solved, key, input_precision=PRECISION)
        dk += of_reader * reads
        by_reads += of_reader * reader.to(tl.float32)
    dk += through * writes
    return dq, dk, d_beta, by_reads, through * key.to(tl.float32)


@triton.jit
def channel_gradients_kernel(
    q_ptr,
    k_ptr,
    bonus_ptr,
    beta_ptr,
    sums_ptr,
    whole_ptr,
    first_ptr,
    runs_ptr,
    table_ptr,
    d_pairs_ptr,  # see `channel_states_kernel`
    d_reads_ptr,
    d_leaves_ptr,
    d_whole_ptr,
    d_solved_ptr,  # see `channel_written_kernel`; None, as the next, without beta_ptr
    d_keeps_ptr,
    dq_ptr,  # [B, T, N, H]
    dk_ptr,  # [B, T, N, H]
    da_ptr,  # [B, T, N, H]
    d_beta_ptr,  # [programs of a chunk, B, N, T] float32: of the channels of each, or None
    d_own_ptr,  # [B, N, T] float32: gradients of q_t · bonus k_t, or None
    T: tl.constexpr,
    N: tl.constexpr,
    KQ: tl.constexpr,
    KK: tl.constexpr,
    H: tl.constexpr,
    CHUNKS: tl.constexpr,
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
    """Gradients of BLOCK_H channels of queries, keys and log decays of one chunk and head."""
    c, head = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, n = head // N, head % N
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid, run, before, last = runs_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    i, zeros = tl.arange(0, BLOCK_C), tl.zeros([BLOCK_C], tl.int32)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    BEFORE: tl.constexpr = tl.constexpr(bonus_ptr is not None)
    DELTA: tl.constexpr = tl.constexpr(beta_ptr is not None)
    OWN: tl.constexpr = tl.constexpr(bonus_ptr is None and beta_ptr is None)  # see `channel_pairs_kernel`
    index = head.to(tl.int64) * CHUNKS + c
    token = head.to(tl.int64) * T + first + i
    q_at = tokens_by_channels(q_ptr, row, first, n // (N // KQ), T, KQ, H)
    k_at = tokens_by_channels(k_ptr, row, first, n // (N // KK), T, KK, H)
    sums_at = tokens_by_channels(sums_ptr, row, first, n, T, N, H)
    at_level = tl.load(first_ptr + index * BLOCKS + tl.program_id(1) * BLOCK_H // WIDTH)
    same = run[:, None] == run[None, :]
    d_pairs = tl.where(same, tl.load(square_at(d_pairs_ptr, index, BLOCK_C)).to(tl.float32) * SCALE, 0.0)
    beta, d_beta, d_solved = tl.zeros([BLOCK_C], tl.float32), tl.zeros([BLOCK_C], tl.float32), d_pairs
    if DELTA:
        beta = per_token(beta_ptr, row, n, first, here, T, N, BLOCK_C)
        d_solved = tl.where(same, tl.load(square_at(d_solved_ptr, index, BLOCK_C)).to(tl.float32), 0.0)
    # Through the states before and after the chunk.
    wide_q = load_rows(q_at, valid, h, KQ, H, BLOCK_C).to(tl.float32)
    wide_k = load_rows(k_at, valid, h, KK, H, BLOCK_C).to(tl.float32)
    sums = load_rows(sums_at, here, h, N, H, BLOCK_C)
    reading = sums
    if EXACT:
        until_end = interval_sums(sums, i + 1, zeros + BLOCK_C, BLOCK_C)
        reading = interval_sums(sums, zeros, i if BEFORE else i + 1, BLOCK_C)
    else:
        until_end = tl.sum(tl.where((i == count - 1)[:, None], sums, 0.0), 0, keep_dims=True) - sums
        if BEFORE:
            reading = load_rows(sums_at - N * H, here & (i > 0), h, N, H, BLOCK_C)
    enters, leaves = (run == before)[:, None], (run == last)[:, None]
    reading = tl.where(enters, tl.exp(tl.minimum(reading, 0.0)), 0.0)
    d_read = load_rows(tokens_by_channels(d_reads_ptr, row, first, n, T, N, H), here, h, N, H, BLOCK_C)
    dq = d_read.to(tl.float32) * reading * SCALE
    by_reads = wide_q * dq
    d_leave = load_rows(tokens_by_channels(d_leaves_ptr, row, first, n, T, N, H), here, h, N, H, BLOCK_C)
    dk = tl.where(leaves, d_leave.to(tl.float32) * tl.exp(tl.minimum(until_end, 0.0)), 0.0)
    by_writes = wide_k * dk
    total = tl.load(whole_ptr + index * H + h, mask=h < H, other=0.0)
    total *= tl.load(d_whole_ptr + index * H + h, mask=h < H, other=0.0)
    if DELTA:
        d_keep = load_rows(tokens_by_channels(d_keeps_ptr, row, first, n, T, N, H), here, h, N, H, BLOCK_C)
        d_keep = d_keep.to(tl.float32) * reading
        d_beta -= tl.sum(d_keep * wide_k, 1)
        d_keep *= -beta[:, None]
        dk += d_keep
        by_reads += d_keep * wide_k
    if EXACT:
        da = sums_over_intervals(by_reads, zeros, i if BEFORE else i + 1, BLOCK_C) + total[None, :]
        da += sums_over_intervals(by_writes, i + 1, zeros + BLOCK_C, BLOCK_C)
    else:
        # What is written until the end passes the decays after it: all, less those until then.
        total += tl.sum(by_writes, 0)
        da = by_reads - by_writes
    if (not OWN) or at_level == 0:
        own = tl.sum(tl.where(i[:, None] == i[None, :], d_pairs, 0.0), 1)
        weighed = tl.expand_dims(own, 1) + tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
        if BEFORE:
            if tl.program_id(1) == 0:
                tl.store(d_own_ptr + token, own, mask=here)
            weighed *= tl.load(bonus_ptr + n * H + h, mask=h < H, other=0.0)[None, :]
        dq += weighed * wide_k
        dk += weighed * wide_q
    if REACH > 0:
        if at_level > 0:
            size = 1 << at_level
            reads, writes = middle_decay(sums_at, here, h, size, count, BEFORE, N, H, REACH, BLOCK_C)
            q = load_rows(q_at, valid, h, KQ, H, BLOCK_C)
            k = load_rows(k_at, valid, h, KK, H, BLOCK_C)
            dq, dk, d_beta, z, less = channel_step(
                reads,
                writes,
                within_blocks(size, OWN, BLOCK_C),
                q,
                k,
                d_pairs,
                d_solved,
                beta,
                dq,
                dk,
                d_beta,
                PRECISION,
                DELTA,
            )
            da += z - less
            if BEFORE:
                by_reads += z
    for number in tl.range(at_level, LEVELS, num_stages=1):
        late, middle, wanted = level(1 << number, BLOCK_C)
        writes = level_decay(sums_at, here, h, late, middle, False, N, H, EXACT, BLOCK_C)
        reads = writes
        if BEFORE:
            reads = level_decay(sums_at, here, h, late, middle, True, N, H, EXACT, BLOCK_C)
        q = load_rows(q_at, valid, h, KQ, H, BLOCK_C)
        k = load_rows(k_at, valid, h, KK, H, BLOCK_C)
        dq, dk, d_beta, z, less = channel_step(
            reads, writes, wanted, q, k, d_pairs, d_solved, beta, dq, dk, d_beta, PRECISION, DELTA
        )
        if EXACT:
            da += sums_over_intervals(z, tl.where(late, middle, i), tl.where(late, i if BEFORE else i + 1, i), BLOCK_C)
            da += sums_over_intervals(less, i + 1, tl.where(late, i + 1, middle), BLOCK_C)
        else:
            da += z - less
            if BEFORE:
                by_reads += z
    if not EXACT:
        da = tl.cumsum(da, 0, reverse=True) + total[None, :]
        if BEFORE:
            da -= by_reads  # a token reads before its own decay
    store_rows(tokens_by_channels(da_ptr, row, first, n, T, N, H), da, here, h, N, H, BLOCK_C)
    store_rows(tokens_by_channels(dq_ptr, row, first, n, T, N, H), dq, here, h, N, H, BLOCK_C)
    store_rows(tokens_by_channels(dk_ptr, row, first, n, T, N, H), dk, here, h, N, H, BLOCK_C)
    if DELTA:
        rows = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // CHUNKS)
        tl.store(d_beta_ptr + rows * T + token, d_beta, mask=here)
