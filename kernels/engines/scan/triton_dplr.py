"""Triton kernels of one chunk of a recurrence whose transition is diagonal plus low rank ("DPLR"), as that of RWKV-7:

    u_t = S_{t-1}ᵀ a_t,  S_t = diag(exp w_t) S_{t-1} + b_t u_tᵀ + k_t v_tᵀ,  out_t = scale · S_tᵀ q_t

With S the state before a chunk, what its tokens read is u = solve (P(a, k) v + (a · decay) S), where P(x, y) are the pairs of a
reader x and a writer y, and solve is the inverse of I - P(a, b). All that does not need S is computed for all chunks at once:

    u = keeps S + local,  out = reads S + beside,  S' = whole S + writesᵀ u + added

Then a program walks the chunks of a row and head, two products after one another a chunk. The gradient of the state goes the same
way from the end, with keeps and writes exchanged. Pairs are taken in the steps of `triton_channel_steps.py`.
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
    runs_of,
    square_at,
    store_rows,
    store_state,
    tokens_by_channels,
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
def leaving(
    sums_at, here, h, leaves, count, N: tl.constexpr, H: tl.constexpr, EXACT: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Returns the decay of what each token writes until the end of its chunk [C, H]; 0 unless it `leaves` [C]. See `entering`."""
    i = tl.arange(0, BLOCK_C)
    own = load_rows(sums_at, here, h, N, H, BLOCK_C)
    if EXACT:
        e = interval_sums(own, i + 1, tl.zeros([BLOCK_C], tl.int32) + BLOCK_C, BLOCK_C)
    else:
        e = tl.sum(tl.where((i == count - 1)[:, None], own, 0.0), 0, keep_dims=True) - own
    return tl.where(leaves[:, None], tl.exp(tl.minimum(e, 0.0)), 0.0)


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
    d_out_ptr,  # [B, T, N, Hv], or None
    sums_ptr,  # [B, T, N, H] float32: log decays if EXACT, else their sums since the beginning of their chunk
    first_ptr,  # int32 [B, N, CHUNKS, BLOCKS]: what `first_level` returns
    whole_ptr,  # [B, N, CHUNKS, H] float32: the decay over the chunk
    keeps_ptr,  # [B, T, N, H]: what a reads of the state before the chunk, in it
    writes_ptr,  # [B, T, N, H]: b, as it writes the state after the chunk
    local_ptr,  # [B, T, N, Hv]: what a reads of the chunk's own values
    added_ptr,  # [B, N, CHUNKS, H, Hv]: what values add to the state after the chunk
    reads_ptr,  # [B, T, N, H]: what outputs read of the state before the chunk; None, as the next, with d_out_ptr
    beside_ptr,  # [B, T, N, Hv]: what outputs read of the chunk's own values
    leaves_ptr,  # [B, T, N, H]: keys, as they write the state after it; None, as all below but the last, without d_out_ptr
    qb_ptr,  # [B, N, CHUNKS, C, C]: what out_t reads of b at s
    qk_ptr,  # [B, N, CHUNKS, C, C]: what out_t reads of k at s
    solve_ptr,  # [B, N, CHUNKS, C, C]: the inverse
    product_ptr,  # [B, N, CHUNKS, C, C]: the inverse times what a_t reads of k at s
    d_local_ptr,  # [B, T, N, Hv]: gradients of u by the chunk's own outputs
    d_added_ptr,  # [B, N, CHUNKS, H, Hv]: of the state before the chunk by the chunk's outputs
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
    dtype = keeps_ptr.dtype.element_ty
    q_at = tokens_by_channels(q_ptr, row, first, n, T, N, H)
    k_at = tokens_by_channels(k_ptr, row, first, n, T, N, H)
    a_at = tokens_by_channels(a_ptr, row, first, n, T, N, H)
    b_at = tokens_by_channels(b_ptr, row, first, n, T, N, H)
    v_at = tokens_by_channels(v_ptr, row, first, n, T, N, Hv)
    sums_at = tokens_by_channels(sums_ptr, row, first, n, T, N, H)
    own_b, own_k = tl.zeros([BLOCK_C], tl.float32), tl.zeros([BLOCK_C], tl.float32)
    qb, qk = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_C], tl.float32)
    ab, ak = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_C], tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=1):
        h = block * BLOCK_H + tl.arange(0, BLOCK_H)
        w = load_rows(tokens_by_channels(w_ptr, row, first, n, T, N, H), valid, h, N, H, BLOCK_C).to(tl.float32)
        w = tl.where(w < FORGETS, FORGETS, w)
        total = tl.sum(w, 0)
        at_level = first_level(w, total, REACH, LEVELS, BLOCK_C, BLOCK_H)
        tl.store(first_ptr + index * BLOCKS + block, at_level)
        tl.store(whole_ptr + index * H + h, tl.where(before == last, tl.exp(total), 0.0), mask=h < H)
        store_rows(sums_at, w if EXACT else tl.cumsum(w, 0), here, h, N, H, BLOCK_C)
        tl.debug_barrier()  # sums that other threads have stored are read below
        if at_level == 0:
            wide = load_rows(q_at, valid, h, N, H, BLOCK_C).to(tl.float32)
            own_b += tl.sum(wide * load_rows(b_at, valid, h, N, H, BLOCK_C).to(tl.float32), 1)
            own_k += tl.sum(wide * load_rows(k_at, valid, h, N, H, BLOCK_C).to(tl.float32), 1)
        if REACH > 0:
            if at_level > 0:
                size = 1 << at_level
                wanted, strictly = within_blocks(size, True, BLOCK_C), within_blocks(size, False, BLOCK_C)
                reads, writes = middle_decay(sums_at, here, h, size, count, False, N, H, REACH, BLOCK_C)
                writer = tl.trans((load_rows(b_at, valid, h, N, H, BLOCK_C).to(tl.float32) * writes).to(dtype))
                key = tl.trans((load_rows(k_at, valid, h, N, H, BLOCK_C).to(tl.float32) * writes).to(dtype))
                query = (load_rows(q_at, valid, h, N, H, BLOCK_C).to(tl.float32) * reads).to(dtype)
                qb += tl.where(wanted, tl.dot(query, writer, input_precision=PRECISION), 0.0)
                qk += tl.where(wanted, tl.dot(query, key, input_precision=PRECISION), 0.0)
                reads, _ = middle_decay(sums_at, here, h, size, count, True, N, H, REACH, BLOCK_C)
                query = (load_rows(a_at, valid, h, N, H, BLOCK_C).to(tl.float32) * reads).to(dtype)
                ab += tl.where(strictly, tl.dot(query, writer, input_precision=PRECISION), 0.0)
                ak += tl.where(strictly, tl.dot(query, key, input_precision=PRECISION), 0.0)
        for number in tl.range(at_level, LEVELS, num_stages=1):
            late, middle, wanted = level(1 << number, BLOCK_C)
            f = level_decay(sums_at, here, h, late, middle, False, N, H, EXACT, BLOCK_C)
            writer = tl.trans((load_rows(b_at, valid, h, N, H, BLOCK_C).to(tl.float32) * f).to(dtype))
            key = tl.trans((load_rows(k_at, valid, h, N, H, BLOCK_C).to(tl.float32) * f).to(dtype))
            query = (load_rows(q_at, valid, h, N, H, BLOCK_C).to(tl.float32) * f).to(dtype)
            qb += tl.where(wanted, tl.dot(query, writer, input_precision=PRECISION), 0.0)
            qk += tl.where(wanted, tl.dot(query, key, input_precision=PRECISION), 0.0)
            f = level_decay(sums_at, here, h, late, middle, True, N, H, EXACT, BLOCK_C)
            query = (load_rows(a_at, valid, h, N, H, BLOCK_C).to(tl.float32) * f).to(dtype)
            ab += tl.where(wanted, tl.dot(query, writer, input_precision=PRECISION), 0.0)
            ak += tl.where(wanted, tl.dot(query, key, input_precision=PRECISION), 0.0)
    same, diagonal = run[:, None] == run[None, :], i[:, None] == i[None, :]
    of_b = (tl.where(same, qb + tl.where(diagonal, own_b[:, None], 0.0), 0.0) * SCALE).to(dtype)
    of_k = (tl.where(same, qk + tl.where(diagonal, own_k[:, None], 0.0), 0.0) * SCALE).to(dtype)
    inverted = inverse(tl.where(same, -ab, 0.0), scratch_ptr + index * (BLOCK_C * 16), BLOCK_C)
    solve = inverted.to(dtype)
    product = tl.dot(solve, tl.where(same, ak, 0.0).to(dtype), input_precision=PRECISION).to(dtype)
    if d_out_ptr is not None:
        tl.store(square_at(qb_ptr, index, BLOCK_C), of_b)
        tl.store(square_at(qk_ptr, index, BLOCK_C), of_k)
        tl.store(square_at(solve_ptr, index, BLOCK_C), solve)
        tl.store(square_at(product_ptr, index, BLOCK_C), product)
    for start in tl.range(0, Hv, BLOCK_V, num_stages=1):
        v = start + tl.arange(0, BLOCK_V)
        x = load_rows(v_at, valid, v, N, Hv, BLOCK_C)
        local = tl.dot(product, x, input_precision=PRECISION)
        store_rows(tokens_by_channels(local_ptr, row, first, n, T, N, Hv), local, here, v, N, Hv, BLOCK_C)
        if beside_ptr is not None:
            own = tl.dot(of_k, x, input_precision=PRECISION)
            own = tl.dot(of_b, local.to(dtype), own, input_precision=PRECISION)
            store_rows(tokens_by_channels(beside_ptr, row, first, n, T, N, Hv), own, here, v, N, Hv, BLOCK_C)
    for block in tl.range(0, BLOCKS, num_stages=1):
        h = block * BLOCK_H + tl.arange(0, BLOCK_H)
        wide = load_rows(a_at, valid, h, N, H, BLOCK_C).to(tl.float32)
        wide *= entering(sums_at, here, h, enters, True, N, H, EXACT, BLOCK_C)
        keeps = tl.dot(solve, wide.to(dtype), input_precision=PRECISION).to(dtype)
        store_rows(tokens_by_channels(keeps_ptr, row, first, n, T, N, H), keeps, here, h, N, H, BLOCK_C)
        if reads_ptr is not None:
            wide = load_rows(q_at, valid, h, N, H, BLOCK_C).to(tl.float32) * SCALE
            wide *= entering(sums_at, here, h, enters, False, N, H, EXACT, BLOCK_C)
            wide = tl.dot(of_b, keeps, wide, input_precision=PRECISION)
            store_rows(tokens_by_channels(reads_ptr, row, first, n, T, N, H), wide, here, h, N, H, BLOCK_C)
        left = leaving(sums_at, here, h, leaves, count, N, H, EXACT, BLOCK_C)
        wide = load_rows(b_at, valid, h, N, H, BLOCK_C).to(tl.float32) * left
        store_rows(tokens_by_channels(writes_ptr, row, first, n, T, N, H), wide, here, h, N, H, BLOCK_C)
        key = (load_rows(k_at, valid, h, N, H, BLOCK_C).to(tl.float32) * left).to(dtype)
        if leaves_ptr is not None:
            store_rows(tokens_by_channels(leaves_ptr, row, first, n, T, N, H), key, here, h, N, H, BLOCK_C)
        if d_out_ptr is not None:
            wide = load_rows(q_at, valid, h, N, H, BLOCK_C).to(tl.float32) * SCALE
            wide *= entering(sums_at, here, h, enters, False, N, H, EXACT, BLOCK_C)
        for start in tl.range(0, Hv, BLOCK_V, num_stages=1):
            v = start + tl.arange(0, BLOCK_V)
            x = load_rows(v_at, valid, v, N, Hv, BLOCK_C)
            added = tl.dot(tl.trans(key), x, input_precision=PRECISION)
            store_state(added_ptr, index, h, v, added, True, H, Hv)
            if d_out_ptr is not None:
                x = load_rows(tokens_by_channels(d_out_ptr, row, first, n, T, N, Hv), valid, v, N, Hv, BLOCK_C)
                added = tl.dot(tl.trans(wide.to(dtype)), x, input_precision=PRECISION)
                store_state(d_added_ptr, index, h, v, added, True, H, Hv)
    if d_out_ptr is not None:
        tl.debug_barrier()  # what other threads have stored is read below: a transposed result of a product is no operand
        of_b = tl.load(tl.trans(square_at(qb_ptr, index, BLOCK_C)))
        for start in tl.range(0, Hv, BLOCK_V, num_stages=1):
            v = start + tl.arange(0, BLOCK_V)
            x = load_rows(tokens_by_channels(d_out_ptr, row, first, n, T, N, Hv), valid, v, N, Hv, BLOCK_C)
            du = tl.dot(of_b, x, input_precision=PRECISION)
            store_rows(tokens_by_channels(d_local_ptr, row, first, n, T, N, Hv), du, here, v, N, Hv, BLOCK_C)
