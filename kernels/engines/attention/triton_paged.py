"""Attention over pages in Triton: a program owns a tile of one request, its queries times the heads of a group, and loops over
blocks of keys that it looks up in the request's table of pages.

The grid is static and what it does is data: `plan` deals the blocks of keys of all requests to about `PIECES` programs a head,
so that a long request is split over many programs and short ones are not. Each program works out its own part from the lengths
(a few sums over the requests), so nothing is launched before. `paged_merge_kernel` merges the pieces of a request in the order
of their keys, in float32: the same bits each time.

Two instances of one kernel serve a batch: tiles of few rows for requests with few queries, which are bound by memory, and tall
ones for prompts. Each skips the requests of the other (`LEAST`, `MOST`).
"""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.attention.triton_paged_plan import E4M3, E5M2, PLAIN, first_of, piece_of, plan, request_of
from kernels.engines.attention.triton_parts import LN2, LOG2E, tanh

# 0x6400 with a byte below is the float16 1024 + byte, and a byte without its sign bit is 128 more: one instruction for four
# numbers, and four for the halves that they become. Triton's conversion to bfloat16 takes eight.
HALVES = tl.constexpr("""{
    .reg .b32 bytes, low, high, bias;
    xor.b32 bytes, $2, 0x80808080;
    prmt.b32 low, bytes, 0x64646464, 0x4140;
    prmt.b32 high, bytes, 0x64646464, 0x4342;
    mov.b32 bias, 0x64806480;
    sub.rn.f16x2 $0, low, bias;
    sub.rn.f16x2 $1, high, bias;
}""")


@triton.jit
def halves_of(q):
    """Returns (queries as float16, exactly but for numbers 2^-24 times smaller than the row's largest; what their rows were
    divided by, a power of 2)."""
    largest = tl.max(tl.abs(q.to(tl.float32)), axis=1)
    power = (tl.maximum(largest.to(tl.int32, bitcast=True), 0x00800000) & 0x7F800000).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) / power[:, None]).to(tl.float16), power


@triton.jit
def bytes_of(q):
    """Returns (high bytes, low bytes, unit): queries as int8, 256 high + low times the unit of their row, so that int8 keys are
    multiplied as they are. Exactly, but for numbers 2^-6 times smaller than the row's largest: those to 2^-14 of it."""
    largest = tl.max(tl.abs(q.to(tl.float32)), axis=1)
    power = (tl.maximum(largest.to(tl.int32, bitcast=True), 0x07000000) & 0x7F800000).to(tl.float32, bitcast=True)
    unit = power / 8192
    whole = (q.to(tl.float32) / unit[:, None] + 32768.5).to(tl.int32) - 32768
    high = (whole + 128) >> 8
    return high.to(tl.int8), (whole - high * 256).to(tl.int8), unit


@triton.jit
def _numbers(x, like, KIND: tl.constexpr):
    """Returns what a cache holds in the dtype of the queries: exactly, since 8 bits fit."""
    if KIND == E4M3:
        # Its exponent and fraction are the upper bits of a float16 whose exponents are 8 larger.
        bits = x.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        x = tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    elif KIND == E5M2:
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return x.to(like.dtype)


@triton.jit
def _scale(scale_ptr, page, entry, head, seen, S: tl.constexpr):
    """Returns the scale of each slot, 0 where it is no key."""
    where = scale_ptr + page.to(tl.int64) * S[0] + entry * S[1] + head * S[2]
    return tl.load(where, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def _bytes(ptr, KIND: tl.constexpr):
    """Returns a pointer to 8-bit floats as one to their bits, which every GPU can load."""
    if KIND == E4M3 or KIND == E5M2:
        ptr = ptr.to(tl.pointer_type(tl.uint8))
    return ptr


@triton.jit
def _attend(acc, row_max, row_sum, begin, end, q, lower, unit, at, slope, key_ptr, value_ptr, k_scale_ptr, v_scale_ptr,
            table_ptr, request, head, key, keys, O: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Returns the state of the rows after the blocks of keys `begin` to `end` - 1."""
    SLOT_K: tl.constexpr = O.K_SCALES[0] + O.K_SCALES[1] > 0
    SLOT_V: tl.constexpr = O.V_SCALES[0] + O.V_SCALES[1] > 0
    h, hv = tl.arange(0, O.BLOCK_H), tl.arange(0, O.BLOCK_V)
    key_ptr += head * O.K_WIDTH + h
    value_ptr += head * O.V_WIDTH + O.V_FIRST + hv
    for n in range(begin, end):
        kj = n * O.BLOCK_K + tl.arange(0, O.BLOCK_K)
        real = (kj >= key) & (kj < keys)
        if table_ptr is None:
            page, entry = request + 0 * kj, kj
        else:
            page = tl.load(table_ptr + kj // O.C, mask=kj < keys, other=0)
            page, entry = tl.minimum(tl.maximum(page, 0), O.PAGES - 1), kj % O.C
        slot = (page.to(tl.int64) * O.C + entry) * O.K
        k_there, v_there = real[:, None], real[:, None]
        if not MASKED:  # all are keys
            k_there, v_there = kj[:, None] >= 0, kj[:, None] >= 0
        if O.BLOCK_H != O.H:
            k_there = k_there & (h < O.H)[None, :]
        if O.BLOCK_V != O.HV:
            v_there = v_there & (hv < O.HV)[None, :]
        k = tl.load(key_ptr[None, :] + (slot * O.K_WIDTH)[:, None], mask=k_there, other=0)
        if lower is not None:
            x = tl.dot(lower, tl.trans(k), tl.dot(q, tl.trans(k)) * 256).to(tl.float32)
        else:
            if O.HALVES:
                k = tl.inline_asm_elementwise(HALVES, "=r,=r,r", [k], dtype=tl.float16, is_pure=True, pack=4)
            else:
                k = _numbers(k, q, O.KIND)
            x = tl.dot(q, tl.trans(k), input_precision="ieee")
        if unit is not None:
            x *= unit[:, None]
        if k_scale_ptr is not None and SLOT_K:
            x *= _scale(k_scale_ptr, page, entry, head, real, O.K_SCALES)[None, :]
        if O.CAP is None:
            x *= O.SCALE * LOG2E
        else:
            x = tanh(x * (O.SCALE / O.CAP)) * (O.CAP * LOG2E)
        if slope is not None:
            x -= slope[:, None] * tl.abs(at[:, None] - kj[None, :]).to(tl.float32)
        if MASKED:
            seen = real[None, :]
            if O.LOW is not None:
                seen = seen & (kj[None, :] >= at[:, None] + O.LOW)
            if O.HIGH is not None:
                seen = seen & (kj[None, :] <= at[:, None] + O.HIGH)
            x = tl.where(seen, x, float("-inf"))
        new = tl.maximum(row_max, tl.max(x, axis=1))
        anchor = tl.where(new == float("-inf"), 0.0, new)  # a row that has not seen any key yet
        p = tl.exp2(x - anchor[:, None])
        rescale = tl.exp2(row_max - anchor)
        row_sum = row_sum * rescale + tl.sum(p, axis=1)
        row_max = new
        v = tl.load(value_ptr[None, :] + (slot * O.V_WIDTH)[:, None], mask=v_there, other=0)
        if O.HALVES:
            v = tl.inline_asm_elementwise(HALVES, "=r,=r,r", [v], dtype=tl.float16, is_pure=False, pack=4)
        elif O.KIND != PLAIN:
            # In the layout of its load. In that of the product, which Triton would choose, a thread holds slots of one column:
            # it would copy 4 bytes at a time and read single ones.
            v = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [v], dtype=v.dtype, is_pure=False, pack=4)
        if not O.HALVES:
            v = _numbers(v, q, O.KIND)
        if SLOT_V:
            scale = _scale(v_scale_ptr, page, entry, head, real, O.V_SCALES)
            if q.dtype == tl.float16:  # weights times small scales would leave its range
                v = (v.to(tl.float32) * scale[:, None]).to(tl.float16)
            else:
                p *= scale[None, :]
        p = p.to(tl.float16) if O.HALVES else p.to(q.dtype)
        acc = tl.dot(p, v, acc * rescale[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def fill(out_ptr, cuts_ptr, number, head, O: tl.constexpr):
    """Sets rows before the first request and after the last to 0: those of the programs without a piece, the first FILLS."""
    G: tl.constexpr = O.N // O.K
    m, hv = tl.arange(0, O.BLOCK_M), tl.arange(0, O.BLOCK_V)
    if O.FILLS > 0 and number < O.FILLS:
        first, last = tl.load(cuts_ptr), tl.load(cuts_ptr + O.R)
        ahead = (first + O.QUERIES - 1) // O.QUERIES
        behind = (O.M - last + O.QUERIES - 1) // O.QUERIES
        zeros = tl.zeros([O.BLOCK_M, O.BLOCK_V], out_ptr.dtype.element_ty)
        for place in range(number, ahead + behind, O.FILLS):
            row = tl.where(place < ahead, place * O.QUERIES, last + (place - ahead) * O.QUERIES) + m // G
            empty = (row < tl.where(place < ahead, first, O.M)) & (row >= 0) & (row < O.M) & (m < O.QUERIES * G)
            where = (row.to(tl.int64) * O.N + head * G + m % G) * O.HV
            tl.store(out_ptr + where[:, None] + hv[None, :], zeros, mask=empty[:, None] & (hv < O.HV)[None, :])


@triton.jit
def store(
    acc, row_max, row_sum, row, rows, index, head, split, first, out_ptr, log_ptr, part_ptr, lse_ptr, O: tl.constexpr
):
    """Stores the first `rows` rows of a tile, from column `first` on: the output, and its lse unless `log_ptr` is None; or the
    piece `index` of one that is split."""
    m, hv = tl.arange(0, O.BLOCK_M), first + tl.arange(0, acc.shape[1])
    some = row_sum != 0  # true for NaN too
    acc /= tl.where(some, row_sum, 1.0)[:, None]
    kept = (m < rows)[:, None] & (hv < O.HV)[None, :]
    if split == 1:
        tl.store(out_ptr + row[:, None] * O.HV + hv[None, :], acc.to(out_ptr.dtype.element_ty), mask=kept)
        if log_ptr is not None:
            lse = tl.where(some, row_max + tl.log2(tl.where(some, row_sum, 1.0)), float("-inf"))
            tl.store(log_ptr + row, lse * LN2, mask=(m < rows) & (first == 0))
    elif O.PIECES > 0:
        part = (index.to(tl.int64) * O.K + head) * O.BLOCK_M + m
        tl.store(part_ptr + part[:, None] * O.HV + hv[None, :], acc, mask=kept)
        lse = tl.where(some, row_max + tl.log2(tl.where(some, row_sum, 1.0)), float("-inf"))
        # The program of the first columns alone: those of others may differ by the order of their sums.
        tl.store(lse_ptr + part, lse, mask=(m < rows) & (first == 0))


@triton.jit
def paged_kernel(
    q_ptr,  # [M, N, H]
    key_ptr,  # [PAGES, C, K, K_WIDTH]
    value_ptr,  # [PAGES, C, K, V_WIDTH]
    k_scale_ptr,  # or None, like those below
    v_scale_ptr,
    cuts_ptr,  # int32 [R + 1]
    lens_ptr,  # int32 [R]
    starts_ptr,  # int32 [R]
    tables_ptr,  # int32 [R, LONGEST]; None: page r is that of request r
    sinks_ptr,  # [N, SINKS]
    slopes_ptr,  # [N]
    before_ptr,  # [M, N, HV]: rows of the other instance, in the output's place
    out_ptr,  # [M, N, HV]
    part_ptr,  # [pieces, K, BLOCK_M, HV] float32: outputs of the pieces of tiles that are split
    lse_ptr,  # [pieces, K, BLOCK_M] float32, in units of log 2
    log_ptr,  # [M, N] float32, or None: the lse of tiles of one piece
    O: tl.constexpr,  # `Paged`
):
    if before_ptr is not None:
        out_ptr = before_ptr
    G: tl.constexpr = O.N // O.K
    head = tl.program_id(0) % O.K  # heads of a slot lie side by side: read at the same time
    index = tl.program_id(0) // O.K
    request, _, place, split, total = plan(cuts_ptr, lens_ptr, starts_ptr, index, False, O)
    m = tl.arange(0, O.BLOCK_M)
    n = head * G + m % G
    if index >= total:
        fill(out_ptr, cuts_ptr, index - total, head, O)
        return
    begin, rows, position, key, keys, low, high = piece_of(cuts_ptr, lens_ptr, starts_ptr, request, place, split, O)
    at = position + m // G
    row = (begin + m // G).to(tl.int64) * O.N + n
    h = tl.arange(0, O.BLOCK_H)
    q = tl.load(q_ptr + row[:, None] * O.H + h[None, :], mask=(m < rows)[:, None] & (h < O.H)[None, :], other=0.0)
    unit = None  # what products are multiplied by, beside the scales of slots
    if k_scale_ptr is not None and O.K_SCALES[0] + O.K_SCALES[1] == 0:
        unit = tl.zeros([O.BLOCK_M], tl.float32) + tl.load(k_scale_ptr + head * O.K_SCALES[2]).to(tl.float32)
    lower = None
    if O.HALVES:
        if O.BLOCK_M == 16:
            q, lower, power = bytes_of(q)
        else:
            q, power = halves_of(q)
        unit = power if unit is None else unit * power
    slope = None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + n, mask=m < rows, other=0.0).to(tl.float32) * LOG2E
    table_ptr = None
    if tables_ptr is not None:
        table_ptr = tables_ptr + request.to(tl.int64) * O.LONGEST

    acc = tl.zeros([O.BLOCK_M, O.BLOCK_V], tl.float32)
    row_max = tl.full([O.BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([O.BLOCK_M], tl.float32)
    SINKS: tl.constexpr = O.SINKS
    if SINKS > 0:  # they act as keys before the first, with value zero
        for s in tl.static_range(SINKS):
            real = (m < rows) & (place % split == 0)
            sink = tl.load(sinks_ptr + n * SINKS + s, mask=real, other=float("-inf")).to(tl.float32) * LOG2E
            new = tl.maximum(row_max, sink)
            anchor = tl.where(new == float("-inf"), 0.0, new)
            row_sum = row_sum * tl.exp2(row_max - anchor) + tl.exp2(sink - anchor)
            row_max = new
    full, full_end = high, high
    SPLIT: tl.constexpr = O.BLOCK_M > 16 or O.HALVES
    if SPLIT:  # blocks that all queries of the tile see need no mask
        seen, until = key, keys
        if O.LOW is not None:
            seen = tl.maximum(seen, position + rows // G - 1 + O.LOW)
        if O.HIGH is not None:
            until = tl.minimum(until, position + O.HIGH + 1)
        full = tl.minimum(tl.maximum((seen + O.BLOCK_K - 1) // O.BLOCK_K, low), high)
        full_end = tl.minimum(tl.maximum(until // O.BLOCK_K, full), high)
    key_ptr, value_ptr = _bytes(key_ptr, O.KIND), _bytes(value_ptr, O.KIND)
    acc, row_max, row_sum = _attend(acc, row_max, row_sum, low, full, q, lower, unit, at, slope, key_ptr, value_ptr,
                                    k_scale_ptr, v_scale_ptr, table_ptr, request, head, key, keys, O, True)  # fmt: skip
    if SPLIT:
        acc, row_max, row_sum = _attend(acc, row_max, row_sum, full, full_end, q, lower, unit, at, slope, key_ptr, value_ptr,
                                        k_scale_ptr, v_scale_ptr, table_ptr, request, head, key, keys, O, False)  # fmt: skip
        acc, row_max, row_sum = _attend(acc, row_max, row_sum, full_end, high, q, lower, unit, at, slope, key_ptr, value_ptr,
                                        k_scale_ptr, v_scale_ptr, table_ptr, request, head, key, keys, O, True)  # fmt: skip
    if v_scale_ptr is not None and O.V_SCALES[0] + O.V_SCALES[1] == 0:
        acc *= tl.load(v_scale_ptr + head * O.V_SCALES[2]).to(tl.float32)
    store(acc, row_max, row_sum, row, rows, index, head, split, 0, out_ptr, log_ptr, part_ptr, lse_ptr, O)


@triton.jit
def paged_merge_kernel(
    part_ptr,  # [pieces, K, BLOCK_M, HV] float32
    lse_ptr,  # [pieces, K, BLOCK_M] float32
    cuts_ptr,
    lens_ptr,
    starts_ptr,
    out_ptr,  # [M, N, HV]: the outputs of tiles of one piece
    log_ptr,  # [M, N] float32, or None: their lse
    O: tl.constexpr,  # `Paged`
    BLOCK_P: tl.constexpr,  # pieces that are loaded at once
    BLOCK_ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Merges the pieces of BLOCK_ROWS rows of a tile and head, and of BLOCK_C columns: so that pieces of wide rows are loaded
    many at once as well."""
    G: tl.constexpr = O.N // O.K
    PARTS: tl.constexpr = (O.ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    head = tl.program_id(0) // PARTS % O.K
    index = tl.program_id(0) // (PARTS * O.K)
    request, begins, tile, split, total = plan(cuts_ptr, lens_ptr, starts_ptr, index, True, O)
    if index >= total:
        return
    if split == 1:
        return
    begin, count, _, _, _ = request_of(cuts_ptr, lens_ptr, starts_ptr, request, O)
    first = first_of(tile, count, O)
    m = tl.program_id(0) % PARTS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = m < tl.minimum(count - first, O.QUERIES) * G
    hv = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_C], tl.float32)
    row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    for p in range(0, split, BLOCK_P):
        piece = p + tl.arange(0, BLOCK_P)
        part = ((begins + tile * split + piece).to(tl.int64) * O.K + head) * O.BLOCK_M
        there = (piece < split)[:, None] & real[None, :]
        lse = tl.load(lse_ptr + part[:, None] + m[None, :], mask=there, other=float("-inf"))
        where = part_ptr + (part[:, None] + m[None, :])[:, :, None] * O.HV + hv[None, None, :]
        x = tl.load(where, mask=there[:, :, None] & (hv < O.HV)[None, None, :], other=0.0)
        new = tl.maximum(row_max, tl.max(lse, axis=0))
        anchor = tl.where(new == float("-inf"), 0.0, new)
        weight, rescale = tl.exp2(lse - anchor[None, :]), tl.exp2(row_max - anchor)
        row_sum = row_sum * rescale + tl.sum(weight, axis=0)
        acc = acc * rescale[:, None] + tl.sum(weight[:, :, None] * x, axis=0)
        row_max = new
    some = row_sum != 0  # true for NaN too
    acc /= tl.where(some, row_sum, 1.0)[:, None]
    row = (begin + first + m // G).to(tl.int64) * O.N + head * G + m % G
    kept = real[:, None] & (hv < O.HV)[None, :]
    tl.store(out_ptr + row[:, None] * O.HV + hv[None, :], acc.to(out_ptr.dtype.element_ty), mask=kept)
    if log_ptr is not None:
        lse = tl.where(some, row_max + tl.log2(tl.where(some, row_sum, 1.0)), float("-inf"))
        tl.store(log_ptr + row, lse * LN2, mask=real & (tl.program_id(1) == 0))
