"""Latent attention over pages in Triton: as `triton_paged`, for one cache that all heads share.

An entry of the cache is a latent, which is key and value alike, followed by a rotary key. A block of entries is loaded once and
multiplied twice, for all heads of a tile. Outputs of tall tiles are too wide for the registers of one warpgroup: two programs,
with half of the columns each, compute the same weights, and one of them reads its entries from the GPU's cache.

`Paged.K` counts groups of heads, H and HV are the width of a latent, and K_WIDTH that of an entry.
"""

# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.attention.triton_paged import fill, store
from kernels.engines.attention.triton_paged_plan import piece_of, plan
from kernels.engines.attention.triton_parts import LOG2E, tanh


@triton.jit
def latent_kernel(
    q_ptr,  # [M, N, H]
    rope_ptr,  # [M, N, K_WIDTH - H]
    cache_ptr,  # [PAGES, C, K_WIDTH]
    cuts_ptr,  # int32 [R + 1]
    lens_ptr,  # int32 [R]
    starts_ptr,  # None, like in a call of `paged_kernel` with tables
    tables_ptr,  # int32 [R, LONGEST]; None: page r is that of request r
    before_ptr,  # [M, N, HV] or None: rows of the other instance, in the output's place
    out_ptr,  # [M, N, HV]
    part_ptr,  # [pieces, K, BLOCK_M, HV] float32
    lse_ptr,  # [pieces, K, BLOCK_M] float32, in units of log 2
    log_ptr,  # [M, N] float32, or None: lse of the output
    O: tl.constexpr,  # `Paged`
    BLOCK_ROPE: tl.constexpr,  # columns of a rotary key
    PARTS: tl.constexpr,  # programs that share the columns of a tile: 1 or 2
):
    if before_ptr is not None:
        out_ptr = before_ptr
    G: tl.constexpr = O.N // O.K
    ROPE: tl.constexpr = O.K_WIDTH - O.H
    BLOCK_C: tl.constexpr = O.BLOCK_H // PARTS
    part = tl.program_id(0) % PARTS  # they and the groups of a request read the same entries at the same time
    head = tl.program_id(0) // PARTS % O.K
    index = tl.program_id(0) // (PARTS * O.K)
    request, _, place, split, total = plan(cuts_ptr, lens_ptr, starts_ptr, index, False, O)
    if index >= total:
        fill(out_ptr, cuts_ptr, index - total, head, O)
        return
    begin, rows, position, key, keys, low, high = piece_of(cuts_ptr, lens_ptr, starts_ptr, request, place, split, O)
    m = tl.arange(0, O.BLOCK_M)
    at = position + m // G
    row = (begin + m // G).to(tl.int64) * O.N + head * G + m % G
    c, t = part * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_ROPE)
    others = (1 - part) * BLOCK_C + tl.arange(0, BLOCK_C)
    real_c, real_t, real_row = (c < O.H)[None, :], (t < ROPE)[None, :], (m < rows)[:, None]
    real_others = (others < O.H)[None, :]
    q = tl.load(q_ptr + row[:, None] * O.H + c[None, :], mask=real_row & real_c, other=0.0)
    if PARTS == 2:
        other_q = tl.load(q_ptr + row[:, None] * O.H + others[None, :], mask=real_row & real_others, other=0.0)
    turned = tl.load(rope_ptr + row[:, None] * ROPE + t[None, :], mask=real_row & real_t, other=0.0)
    if tables_ptr is not None:
        table_ptr = tables_ptr + request.to(tl.int64) * O.LONGEST
    acc = tl.zeros([O.BLOCK_M, BLOCK_C], tl.float32)
    row_max = tl.full([O.BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([O.BLOCK_M], tl.float32)
    WHOLE: tl.constexpr = False if tables_ptr is None else O.C % O.BLOCK_K == 0  # a block lies in one page
    following = 0
    if WHOLE:
        following = tl.load(table_ptr + low * O.BLOCK_K // O.C, mask=low < high, other=0)
    for n in range(low, high):
        kj = n * O.BLOCK_K + tl.arange(0, O.BLOCK_K)
        real = (kj >= key) & (kj < keys)
        if WHOLE:
            page = tl.minimum(tl.maximum(following, 0), O.PAGES - 1)
            following = tl.load(table_ptr + (n + 1) * O.BLOCK_K // O.C, mask=n + 1 < high, other=0)
            block_ptr = cache_ptr + (page.to(tl.int64) * O.C + n * O.BLOCK_K % O.C) * O.K_WIDTH
            entry_ptr = block_ptr + tl.arange(0, O.BLOCK_K) * O.K_WIDTH
        elif tables_ptr is None:
            entry_ptr = cache_ptr + (request.to(tl.int64) * O.C + kj) * O.K_WIDTH
        else:
            page = tl.load(table_ptr + kj // O.C, mask=kj < keys, other=0)
            page = tl.minimum(tl.maximum(page, 0), O.PAGES - 1)
            entry_ptr = cache_ptr + (page.to(tl.int64) * O.C + kj % O.C) * O.K_WIDTH
        there_c, there_t, there_others = real[:, None], real[:, None], real[:, None]
        if O.BLOCK_H != O.H:
            there_c, there_others = there_c & real_c, there_others & real_others
        if BLOCK_ROPE != ROPE:
            there_t = there_t & real_t
        latent = tl.load(entry_ptr[:, None] + c[None, :], mask=there_c, other=0.0)
        rope = tl.load(entry_ptr[:, None] + O.H + t[None, :], mask=there_t, other=0.0)
        x = tl.dot(q, tl.trans(latent), input_precision="ieee")
        if PARTS == 2:
            other = tl.load(entry_ptr[:, None] + others[None, :], mask=there_others, other=0.0)
            x = tl.dot(other_q, tl.trans(other), x, input_precision="ieee")
        x = tl.dot(turned, tl.trans(rope), x, input_precision="ieee")
        if O.CAP is None:
            x *= O.SCALE * LOG2E
        else:
            x = tanh(x * (O.SCALE / O.CAP)) * (O.CAP * LOG2E)
        seen = real[None, :] & (kj[None, :] <= at[:, None])
        if O.LOW is not None:
            seen = seen & (kj[None, :] >= at[:, None] + O.LOW)
        x = tl.where(seen, x, float("-inf"))
        new = tl.maximum(row_max, tl.max(x, axis=1))
        anchor = tl.where(new == float("-inf"), 0.0, new)  # a row that has not seen any entry yet
        p = tl.exp2(x - anchor[:, None])
        rescale = tl.exp2(row_max - anchor)
        row_sum = row_sum * rescale + tl.sum(p, axis=1)
        row_max = new
        acc = tl.dot(p.to(latent.dtype), latent, acc * rescale[:, None], input_precision="ieee")
    store(acc, row_max, row_sum, row, rows, index, head, split, part * BLOCK_C, out_ptr, log_ptr, part_ptr, lse_ptr, O)


@triton.jit
def list_kernel(
    cuts_ptr,
    lens_ptr,
    starts_ptr,
    before_ptr,  # these as in `latent_kernel`
    items_ptr,  # int32 [pieces, 8]
    out_ptr,
    O: tl.constexpr,  # `Paged`
):
    """Writes what each piece is, as `piece_of` says except for the first key: its request, first row, number of rows and heads,
    position, one past the last key, blocks of keys from and to; and in how many pieces its tile is. Pieces that there are not
    have no rows. Sets rows without a request to 0."""
    if before_ptr is not None:
        out_ptr = before_ptr
    head, index = tl.program_id(0) % O.K, tl.program_id(0) // O.K
    request, _, place, split, total = plan(cuts_ptr, lens_ptr, starts_ptr, index, False, O)
    if index >= total:
        fill(out_ptr, cuts_ptr, index - total, head, O)
    row, rows, position, key, keys, low, high = piece_of(
        cuts_ptr, lens_ptr, starts_ptr, request, place, tl.maximum(split, 1), O
    )
    if head == 0:
        there = index < total
        item_ptr = items_ptr + index * 8
        tl.store(item_ptr, request)
        tl.store(item_ptr + 1, row)
        tl.store(item_ptr + 2, tl.where(there, rows, 0))
        tl.store(item_ptr + 3, position)
        tl.store(item_ptr + 4, keys)
        tl.store(item_ptr + 5, low)
        tl.store(item_ptr + 6, tl.where(there, high, low))
        tl.store(item_ptr + 7, split)
