"""Triton kernels of one chunk of a recurrence whose transition is diagonal plus low rank ("DPLR"), as that of RWKV-7:

    u_t = S_{t-1}ᵀ a_t,  S_t = diag(exp w_t) S_{t-1} + b_t u_tᵀ + k_t v_tᵀ,  out_t = scale · S_tᵀ q_t

With S the state before a chunk, what its tokens read is u = solve (P(a, k) v + (a · decay) S), where P(x, y) are the pairs of a
reader x and a writer y, and solve is the inverse of I - P(a, b). What needs no S is computed for all chunks at once:

    u = keeps S + local,  out = reads S + beside,  S' = whole S + writesᵀ u + added

Then a program walks the chunks of a row and head: two products after one another a chunk. The gradient of the state goes the
same way from the end, with keeps and writes exchanged. Pairs are taken in the steps of `triton_channel_steps.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.scan.triton_channel_steps import first_level, interval_sums, level, within_blocks
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
def decays_of(
    w_at, valid, h, FORGETS: tl.constexpr, N: tl.constexpr, H: tl.constexpr, EXACT, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Returns (log decays [C, H], 0 for padding, their sums since the beginning of the chunk, or if EXACT themselves again)."""
    w = load_rows(w_at, valid, h, N, H, BLOCK_C).to(tl.float32)
    w = tl.where(w < FORGETS, FORGETS, w)
    return w, (w if EXACT else tl.cumsum(w, 0))


@triton.jit
def entering(w, since, enters, BEFORE, EXACT: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns the decay of the state before a chunk until each token [C, H], without its own if BEFORE; 0 unless `enters`."""
    i = tl.arange(0, BLOCK_C)
    if EXACT:
        e = interval_sums(w, tl.zeros([BLOCK_C], tl.int32), i if BEFORE else i + 1, BLOCK_C)
    else:
        e = since - w if BEFORE else since
    return tl.where(enters[:, None], tl.exp(tl.minimum(e, 0.0)), 0.0)


@triton.jit
def leaving(w, since, leaves, EXACT: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns the decay of what each token writes until the end of its chunk [C, H]; 0 unless it `leaves` [C]."""
    i = tl.arange(0, BLOCK_C)
    if EXACT:
        e = interval_sums(w, i + 1, tl.zeros([BLOCK_C], tl.int32) + BLOCK_C, BLOCK_C)
    else:
        e = tl.sum(w, 0, keep_dims=True) - since
    return tl.where(leaves[:, None], tl.exp(tl.minimum(e, 0.0)), 0.0)


@triton.jit
def _combined(weights, since):
    """Returns weights · since [C, H] to 17 bits. What reads and what writes both have it, so that its rounding cancels."""
    weights, high = weights.to(tl.bfloat16), since.to(tl.bfloat16)
    low = (since - high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(weights, low, tl.dot(weights, high))


@triton.jit
def block_decays(w, since, size, REACH: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns the decays from the middle of a block's sums until tokens read, until they read before their own, and from what
    they write until there, [C, H]. See `triton_channel_steps.py`."""
    i, u = tl.arange(0, BLOCK_C)[:, None], tl.arange(0, BLOCK_C)[None, :]
    begin = i // size * size
    ends = tl.where(u == begin - 1, 0.5, 0.0) + tl.where(u == begin + size - 1, 0.5, 0.0)
    e, most = since - _combined(ends, since), 0.5 * REACH + 1.0
    return tl.exp(tl.minimum(e, most)), tl.exp(tl.minimum(e - w, most)), tl.exp(tl.minimum(-e, most))


@triton.jit
def level_decays(w, since, late, middle, EXACT: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns the decays between each token and the middle of its block [C, H], and those of late tokens without their own."""
    i = tl.arange(0, BLOCK_C)
    if EXACT:
        begin = tl.where(late, middle, i + 1)
        e = tl.minimum(interval_sums(w, begin, tl.where(late, i + 1, middle), BLOCK_C), 0.0)
        before = tl.minimum(interval_sums(w, begin, tl.where(late, i, middle), BLOCK_C), 0.0)
    else:
        e = since - _combined(tl.where(tl.arange(0, BLOCK_C)[None, :] == middle[:, None] - 1, 1.0, 0.0), since)
        e, before = tl.where(late[:, None], e, -e), tl.where(late[:, None], e - w, -e)
    return tl.exp(e), tl.exp(before)


@triton.jit
def pairs_of(
    x_at, b_at, k_at, w_at, valid, BEFORE,
    FORGETS: tl.constexpr, N: tl.constexpr, H: tl.constexpr, REACH: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr, LEVELS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Returns what a chunk's readers x read of its writers b and of its writers k, [t, s] each, also across documents.

    Args:
      BEFORE: whether x_t reads before the decay and the write of token t, or after both.
    """
    dtype = k_at.dtype.element_ty
    i = tl.arange(0, BLOCK_C)
    OWN: tl.constexpr = tl.constexpr(not BEFORE)
    xb, xk = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_C], tl.float32)
    own_b, own_k = tl.zeros([BLOCK_C], tl.float32), tl.zeros([BLOCK_C], tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=1):
        h = block * BLOCK_H + tl.arange(0, BLOCK_H)
        w, since = decays_of(w_at, valid, h, FORGETS, N, H, EXACT, BLOCK_C)
        at_level = first_level(w, tl.sum(w, 0), REACH, LEVELS, BLOCK_C, BLOCK_H)
        if OWN:
            if at_level == 0:
                wide = load_rows(x_at, valid, h, N, H, BLOCK_C).to(tl.float32)
                own_b += tl.sum(wide * load_rows(b_at, valid, h, N, H, BLOCK_C).to(tl.float32), 1)
                own_k += tl.sum(wide * load_rows(k_at, valid, h, N, H, BLOCK_C).to(tl.float32), 1)
        if REACH > 0:
            if at_level > 0:
                wanted = within_blocks(1 << at_level, OWN, BLOCK_C)
                reads, earlier, writes = block_decays(w, since, 1 << at_level, REACH, BLOCK_C)
                reads = earlier if BEFORE else reads
                reader = (load_rows(x_at, valid, h, N, H, BLOCK_C).to(tl.float32) * reads).to(dtype)
                writer = tl.trans((load_rows(b_at, valid, h, N, H, BLOCK_C).to(tl.float32) * writes).to(dtype))
                xb += tl.where(wanted, tl.dot(reader, writer, input_precision=PRECISION), 0.0)
                writer = tl.trans((load_rows(k_at, valid, h, N, H, BLOCK_C).to(tl.float32) * writes).to(dtype))
                xk += tl.where(wanted, tl.dot(reader, writer, input_precision=PRECISION), 0.0)
        for number in tl.range(at_level, LEVELS, num_stages=1):
            late, middle, wanted = level(1 << number, BLOCK_C)
            writes, earlier = level_decays(w, since, late, middle, EXACT, BLOCK_C)
            reads = earlier if BEFORE else writes
            reader = (load_rows(x_at, valid, h, N, H, BLOCK_C).to(tl.float32) * reads).to(dtype)
            writer = tl.trans((load_rows(b_at, valid, h, N, H, BLOCK_C).to(tl.float32) * writes).to(dtype))
            xb += tl.where(wanted, tl.dot(reader, writer, input_precision=PRECISION), 0.0)
            writer = tl.trans((load_rows(k_at, valid, h, N, H, BLOCK_C).to(tl.float32) * writes).to(dtype))
            xk += tl.where(wanted, tl.dot(reader, writer, input_precision=PRECISION), 0.0)
    if OWN:
        diagonal = i[:, None] == i[None, :]
        xb += tl.where(diagonal, own_b[:, None], 0.0)
        xk += tl.where(diagonal, own_k[:, None], 0.0)
    return xb, xk


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
    index = head.to(tl.int64) * CHUNKS + c
    enters, leaves = run == before, run == last
    dtype = keeps_ptr.dtype.element_ty
    q_at = tokens_by_channels(q_ptr, row, first, n, T, N, H)
    k_at = tokens_by_channels(k_ptr, row, first, n, T, N, H)
    a_at = tokens_by_channels(a_ptr, row, first, n, T, N, H)
    b_at = tokens_by_channels(b_ptr, row, first, n, T, N, H)
    v_at = tokens_by_channels(v_ptr, row, first, n, T, N, Hv)
    w_at = tokens_by_channels(w_ptr, row, first, n, T, N, H)
    for block in tl.range(0, BLOCKS, num_stages=1):
        h = block * BLOCK_H + tl.arange(0, BLOCK_H)
        w, _ = decays_of(w_at, valid, h, FORGETS, N, H, True, BLOCK_C)
        total = tl.sum(w, 0)
        at_level = first_level(w, total, REACH, LEVELS, BLOCK_C, BLOCK_H)
        tl.store(first_ptr + index * BLOCKS + block, at_level)
        tl.store(whole_ptr + index * H + h, tl.where(before == last, tl.exp(total), 0.0), mask=h < H)
    same = run[:, None] == run[None, :]
    ab, ak = pairs_of(
        a_at, b_at, k_at, w_at, valid, True,
        FORGETS, N, H, REACH, PRECISION, EXACT, LEVELS, BLOCKS, BLOCK_C, BLOCK_H,
    )  # fmt: skip
    product = tl.where(same, ak, 0.0).to(dtype)
    solve = inverse(tl.where(same, -ab, 0.0), scratch_ptr + index * (BLOCK_C * 16), BLOCK_C).to(dtype)
    product = tl.dot(solve, product, input_precision=PRECISION).to(dtype)
    qb, qk = pairs_of(
        q_at, b_at, k_at, w_at, valid, False,
        FORGETS, N, H, REACH, PRECISION, EXACT, LEVELS, BLOCKS, BLOCK_C, BLOCK_H,
    )  # fmt: skip
    of_b, of_k = (tl.where(same, qb, 0.0) * SCALE).to(dtype), (tl.where(same, qk, 0.0) * SCALE).to(dtype)
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
        w, since = decays_of(w_at, valid, h, FORGETS, N, H, EXACT, BLOCK_C)
        wide = load_rows(a_at, valid, h, N, H, BLOCK_C).to(tl.float32)
        wide *= entering(w, since, enters, True, EXACT, BLOCK_C)
        keeps = tl.dot(solve, wide.to(dtype), input_precision=PRECISION).to(dtype)
        store_rows(tokens_by_channels(keeps_ptr, row, first, n, T, N, H), keeps, here, h, N, H, BLOCK_C)
        if reads_ptr is not None:
            wide = load_rows(q_at, valid, h, N, H, BLOCK_C).to(tl.float32) * SCALE
            wide *= entering(w, since, enters, False, EXACT, BLOCK_C)
            wide = tl.dot(of_b, keeps, wide, input_precision=PRECISION)
            store_rows(tokens_by_channels(reads_ptr, row, first, n, T, N, H), wide, here, h, N, H, BLOCK_C)
        left = leaving(w, since, leaves, EXACT, BLOCK_C)
        wide = load_rows(b_at, valid, h, N, H, BLOCK_C).to(tl.float32) * left
        store_rows(tokens_by_channels(writes_ptr, row, first, n, T, N, H), wide, here, h, N, H, BLOCK_C)
        key = (load_rows(k_at, valid, h, N, H, BLOCK_C).to(tl.float32) * left).to(dtype)
        if leaves_ptr is not None:
            store_rows(tokens_by_channels(leaves_ptr, row, first, n, T, N, H), key, here, h, N, H, BLOCK_C)
        if d_out_ptr is not None:
            wide = load_rows(q_at, valid, h, N, H, BLOCK_C).to(tl.float32) * SCALE
            wide *= entering(w, since, enters, False, EXACT, BLOCK_C)
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
