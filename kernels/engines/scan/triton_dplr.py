"""Triton kernels of one chunk of a recurrence whose transition is diagonal plus low rank ("DPLR"), as that of RWKV-7:

    u_t = S_{t-1}ᵀ a_t,  S_t = diag(exp w_t) S_{t-1} + b_t u_tᵀ + k_t v_tᵀ,  out_t = scale · S_tᵀ q_t

With S the state before a chunk, what its tokens read is u = solve (P(a, k) v + (a · decay) S), where P(x, y) are the pairs of a
reader x and a writer y, and solve is the inverse of I - P(a, b). Its products are taken here, for all chunks at once: u = local -
keeps S, with local = solve P(a, k) v and keeps = -solve (a · decay). The walks of `triton_delta.py` then need no inverse, and
write u by b and v by k. Pairs are taken in the steps of `triton_channel_steps.py`; a reads before its token's decay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.scan.triton_channel_steps import (
    first_level,
    interval_sums,
    level,
    level_decay,
    middle_decay,
    within_blocks,
)
from kernels.engines.scan.triton_inverse import inverse
from kernels.engines.scan.triton_parts import (
    chunk_of,
    load_rows,
    load_state,
    runs_of,
    square_at,
    store_rows,
    tokens_by_channels,
    tokens_of,
)


@triton.jit
def entering(
    sums_at, here, h, enters, BEFORE: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, EXACT: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Returns the decay of the state before a chunk until each token [C, H], without its own if BEFORE; 0 unless `enters` [C].

    Args:
      sums_at: what `channel_decays_kernel` stores at the chunk: log decays if EXACT, else their sums since its beginning.
    """
    i = tl.arange(0, BLOCK_C)
    if EXACT:
        own = load_rows(sums_at, here, h, N, H, BLOCK_C)
        e = interval_sums(own, tl.zeros([BLOCK_C], tl.int32), i if BEFORE else i + 1, BLOCK_C)
    elif BEFORE:
        e = load_rows(sums_at - N * H, here & (i > 0), h, N, H, BLOCK_C)
    else:
        e = load_rows(sums_at, here, h, N, H, BLOCK_C)
    return tl.where(enters[:, None], tl.exp(tl.minimum(e, 0.0)), 0.0)


@triton.jit
def dplr_chunks_kernel(
    q_ptr,  # [B, T, N, H], as k, w, a and b
    k_ptr,
    v_ptr,  # [B, T, N, Hv]
    w_ptr,  # log decays
    a_ptr,
    b_ptr,
    runs_ptr,
    table_ptr,
    sums_ptr,  # [B, T, N, H] float32: log decays if EXACT, else their sums since the beginning of their chunk
    first_ptr,  # int32 [B, N, CHUNKS, BLOCKS]: what `first_level` returns
    whole_ptr,  # [B, N, CHUNKS, H] float32: the decay over the chunk
    reads_ptr,  # [B, T, N, H]: queries, as they read the state before the chunk
    writes_ptr,  # [B, T, N, H]: b, as it writes the state after it
    leaves_ptr,  # [B, T, N, H]: keys, as they write the state after it
    keeps_ptr,  # [B, T, N, H]: what a reads of the state before the chunk, through the chunk, with the other sign
    local_ptr,  # [B, T, N, Hv]: what a reads of the chunk's own values
    pairs_ptr,  # [B, N, CHUNKS, C, C]: what out_t reads of b at s
    beside_ptr,  # [B, N, CHUNKS, C, C]: what out_t reads of k at s
    solve_ptr,  # [B, N, CHUNKS, C, C]: the inverse, or None
    product_ptr,  # [B, N, CHUNKS, C, C]: the inverse times what a_t reads of k at s, or None
    scratch_ptr,  # [B, N, CHUNKS, C, 16] float32
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    CHUNKS: tl.constexpr,
    FORGETS: tl.constexpr,
    REACH: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    c, head = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, n = head // N, head % N
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid, run, before, last = runs_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    i, index = tl.arange(0, BLOCK_C), head.to(tl.int64) * CHUNKS + c
    enters, leaves = run == before, run == last
    dtype = pairs_ptr.dtype.element_ty
    q_at, k_at = (
        tokens_by_channels(q_ptr, row, first, n, T, N, H),
        tokens_by_channels(k_ptr, row, first, n, T, N, H),
    )
    a_at, b_at = (
        tokens_by_channels(a_ptr, row, first, n, T, N, H),
        tokens_by_channels(b_ptr, row, first, n, T, N, H),
    )
    sums_at = tokens_by_channels(sums_ptr, row, first, n, T, N, H)
    own_b, own_k = tl.zeros([BLOCK_C], tl.float32), tl.zeros([BLOCK_C], tl.float32)
    qb, qk = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_C], tl.float32)
    ab, ak = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_C], tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=1):
        h = block * BLOCK_H + tl.arange(0, BLOCK_H)
        w = load_rows(tokens_by_channels(w_ptr, row, first, n, T, N, H), valid, h, N, H, BLOCK_C).to(tl.float32)
        w = tl.where(w < FORGETS, FORGETS, w)
        since, total = tl.cumsum(w, 0), tl.sum(w, 0)
        at_level = first_level(w, total, REACH, LEVELS, BLOCK_C, BLOCK_H)
        tl.store(first_ptr + index * BLOCKS + block, at_level)
        tl.store(whole_ptr + index * H + h, tl.where(before == last, tl.exp(total), 0.0), mask=h < H)
        if EXACT:
            until_end = interval_sums(w, i + 1, tl.zeros([BLOCK_C], tl.int32) + BLOCK_C, BLOCK_C)
        else:
            until_end = tl.sum(w, 0, keep_dims=True) - since
        store_rows(sums_at, w if EXACT else since, here, h, N, H, BLOCK_C)
        read = load_rows(q_at, valid, h, N, H, BLOCK_C).to(tl.float32) * tl.exp(since) * SCALE
        read = tl.where(enters[:, None], read, 0.0)
        store_rows(tokens_by_channels(reads_ptr, row, first, n, T, N, H), read, here, h, N, H, BLOCK_C)
        left = tl.where(leaves[:, None], tl.exp(tl.minimum(until_end, 0.0)), 0.0)
        wide = load_rows(b_at, valid, h, N, H, BLOCK_C).to(tl.float32) * left
        store_rows(tokens_by_channels(writes_ptr, row, first, n, T, N, H), wide, here, h, N, H, BLOCK_C)
        wide = load_rows(k_at, valid, h, N, H, BLOCK_C).to(tl.float32) * left
        store_rows(tokens_by_channels(leaves_ptr, row, first, n, T, N, H), wide, here, h, N, H, BLOCK_C)
        tl.debug_barrier()  # sums that other threads have stored are read below
        if at_level == 0:
            wide = load_rows(q_at, valid, h, N, H, BLOCK_C).to(tl.float32)
            own_b += tl.sum(wide * load_rows(b_at, valid, h, N, H, BLOCK_C).to(tl.float32), 1)
            own_k += tl.sum(wide * load_rows(k_at, valid, h, N, H, BLOCK_C).to(tl.float32), 1)
        if REACH > 0:
            if at_level > 0:
                size = 1 << at_level
                reads, writes = middle_decay(sums_at, here, h, size, count, False, N, H, REACH, BLOCK_C)
                earlier, _ = middle_decay(sums_at, here, h, size, count, True, N, H, REACH, BLOCK_C)
                query = (load_rows(q_at, valid, h, N, H, BLOCK_C).to(tl.float32) * reads).to(dtype)
                reader = (load_rows(a_at, valid, h, N, H, BLOCK_C).to(tl.float32) * earlier).to(dtype)
                writer = tl.trans((load_rows(b_at, valid, h, N, H, BLOCK_C).to(tl.float32) * writes).to(dtype))
                key = tl.trans((load_rows(k_at, valid, h, N, H, BLOCK_C).to(tl.float32) * writes).to(dtype))
                wanted, strictly = within_blocks(size, True, BLOCK_C), within_blocks(size, False, BLOCK_C)
                qb += tl.where(wanted, tl.dot(query, writer, input_precision=PRECISION), 0.0)
                qk += tl.where(wanted, tl.dot(query, key, input_precision=PRECISION), 0.0)
                ab += tl.where(strictly, tl.dot(reader, writer, input_precision=PRECISION), 0.0)
                ak += tl.where(strictly, tl.dot(reader, key, input_precision=PRECISION), 0.0)
        for number in tl.range(at_level, LEVELS, num_stages=1):
            late, middle, wanted = level(1 << number, BLOCK_C)
            f = level_decay(sums_at, here, h, late, middle, False, N, H, EXACT, BLOCK_C)
            earlier = level_decay(sums_at, here, h, late, middle, True, N, H, EXACT, BLOCK_C)
            query = (load_rows(q_at, valid, h, N, H, BLOCK_C).to(tl.float32) * f).to(dtype)
            reader = (load_rows(a_at, valid, h, N, H, BLOCK_C).to(tl.float32) * earlier).to(dtype)
            writer = tl.trans((load_rows(b_at, valid, h, N, H, BLOCK_C).to(tl.float32) * f).to(dtype))
            key = tl.trans((load_rows(k_at, valid, h, N, H, BLOCK_C).to(tl.float32) * f).to(dtype))
            qb += tl.where(wanted, tl.dot(query, writer, input_precision=PRECISION), 0.0)
            qk += tl.where(wanted, tl.dot(query, key, input_precision=PRECISION), 0.0)
            ab += tl.where(wanted, tl.dot(reader, writer, input_precision=PRECISION), 0.0)
            ak += tl.where(wanted, tl.dot(reader, key, input_precision=PRECISION), 0.0)
    same, diagonal = run[:, None] == run[None, :], i[:, None] == i[None, :]
    qb = tl.where(same, qb + tl.where(diagonal, own_b[:, None], 0.0), 0.0) * SCALE
    qk = tl.where(same, qk + tl.where(diagonal, own_k[:, None], 0.0), 0.0) * SCALE
    tl.store(square_at(pairs_ptr, index, BLOCK_C), qb.to(dtype))
    tl.store(square_at(beside_ptr, index, BLOCK_C), qk.to(dtype))
    scratch = scratch_ptr + index * (BLOCK_C * 16)
    solve = inverse(tl.where(same, -ab, 0.0), scratch, BLOCK_C).to(dtype)
    product = tl.dot(solve, tl.where(same, ak, 0.0).to(dtype), input_precision=PRECISION).to(dtype)
    if solve_ptr is not None:
        tl.store(square_at(solve_ptr, index, BLOCK_C), solve)
        tl.store(square_at(product_ptr, index, BLOCK_C), product)
    for block in tl.range(0, BLOCKS, num_stages=1):
        h = block * BLOCK_H + tl.arange(0, BLOCK_H)
        reads = load_rows(a_at, valid, h, N, H, BLOCK_C).to(tl.float32)
        reads *= entering(sums_at, here, h, enters, True, N, H, EXACT, BLOCK_C)
        keeps = -tl.dot(solve, reads.to(dtype), input_precision=PRECISION)
        store_rows(tokens_by_channels(keeps_ptr, row, first, n, T, N, H), keeps, here, h, N, H, BLOCK_C)
    for start in tl.range(0, Hv, BLOCK_V, num_stages=1):
        v = start + tl.arange(0, BLOCK_V)
        x = load_rows(tokens_by_channels(v_ptr, row, first, n, T, N, Hv), valid, v, N, Hv, BLOCK_C)
        local = tl.dot(product, x, input_precision=PRECISION)
        store_rows(tokens_by_channels(local_ptr, row, first, n, T, N, Hv), local, here, v, N, Hv, BLOCK_C)


@triton.jit
def dplr_written_kernel(
    v_ptr,  # [B, T, N, Hv]
    leaves_ptr,  # see `dplr_chunks_kernel`, as of solve, product and beside
    runs_ptr,
    table_ptr,
    solve_ptr,
    product_ptr,
    beside_ptr,
    d_out_ptr,  # [B, T, N, Hv]
    written_ptr,  # [B, T, N, Hv]: u
    du_ptr,  # [B, T, N, Hv]
    states_ptr,  # [B, N, CHUNKS, H, Hv]: before each chunk
    d_states_ptr,  # [B, N, CHUNKS, H, Hv]: of the states after each chunk
    d_beside_ptr,  # [B, N, CHUNKS, C, C]: gradients of what out_t reads of k at s
    d_ab_ptr,  # [B, N, CHUNKS, C, C]: of what a_t reads of b at s
    d_ak_ptr,  # [B, N, CHUNKS, C, C]: of what a_t reads of k at s
    d_entering_ptr,  # [B, T, N, H]: of a, as it reads the state before the chunk
    d_leaves_ptr,  # [B, T, N, H]: of keys, as they write the state after it
    dv_ptr,  # [B, T, N, Hv]
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    CHUNKS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Gradients of one chunk and head of what `channel_states_kernel` does not have, given u as what b writes; before decays.

    That of u before its product with the inverse is solveᵀ du, and with it come those of pairs that a reads: the inverse is not
    differentiated.
    """
    c, head = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, n = head // N, head % N
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid = tokens_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    h, index = tl.arange(0, BLOCK_H), head.to(tl.int64) * CHUNKS + c
    d_qk, d_ab = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_C], tl.float32)
    d_ak, d_entering = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    d_leaves = tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    left = load_rows(tokens_by_channels(leaves_ptr, row, first, n, T, N, H), valid, h, N, H, BLOCK_C)
    solve = tl.load(tl.trans(square_at(solve_ptr, index, BLOCK_C)))
    product = tl.load(tl.trans(square_at(product_ptr, index, BLOCK_C)))
    weights = tl.load(tl.trans(square_at(beside_ptr, index, BLOCK_C)))
    for start in range(0, Hv, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        x = load_rows(tokens_by_channels(v_ptr, row, first, n, T, N, Hv), valid, v, N, Hv, BLOCK_C)
        d_out = load_rows(tokens_by_channels(d_out_ptr, row, first, n, T, N, Hv), valid, v, N, Hv, BLOCK_C)
        u = load_rows(tokens_by_channels(written_ptr, row, first, n, T, N, Hv), valid, v, N, Hv, BLOCK_C)
        du = load_rows(tokens_by_channels(du_ptr, row, first, n, T, N, Hv), valid, v, N, Hv, BLOCK_C)
        state = load_state(states_ptr, index, h, v, True, H, Hv)
        d_state = load_state(d_states_ptr, index, h, v, True, H, Hv)
        y = tl.dot(solve, du, input_precision=PRECISION).to(du.dtype)
        d_qk = tl.dot(d_out, tl.trans(x), d_qk, input_precision=PRECISION)
        d_ab = tl.dot(y, tl.trans(u), d_ab, input_precision=PRECISION)
        d_ak = tl.dot(y, tl.trans(x), d_ak, input_precision=PRECISION)
        d_entering = tl.dot(y, tl.trans(state), d_entering, input_precision=PRECISION)
        d_leaves = tl.dot(x, tl.trans(d_state), d_leaves, input_precision=PRECISION)
        dv = tl.dot(left, d_state, input_precision=PRECISION)
        dv = tl.dot(weights, d_out, dv, input_precision=PRECISION)
        dv = tl.dot(product, du, dv, input_precision=PRECISION)
        store_rows(tokens_by_channels(dv_ptr, row, first, n, T, N, Hv), dv, here, v, N, Hv, BLOCK_C)
    tl.store(square_at(d_beside_ptr, index, BLOCK_C), d_qk.to(d_beside_ptr.dtype.element_ty))
    tl.store(square_at(d_ab_ptr, index, BLOCK_C), d_ab.to(d_ab_ptr.dtype.element_ty))
    tl.store(square_at(d_ak_ptr, index, BLOCK_C), d_ak.to(d_ak_ptr.dtype.element_ty))
    store_rows(tokens_by_channels(d_entering_ptr, row, first, n, T, N, H), d_entering, here, h, N, H, BLOCK_C)
    store_rows(tokens_by_channels(d_leaves_ptr, row, first, n, T, N, H), d_leaves, here, h, N, H, BLOCK_C)
