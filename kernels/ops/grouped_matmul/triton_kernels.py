"""Triton kernels of grouped_matmul: persistent programs over a map of tiles that is computed on the device.

`grouped_matmul_kernel` is the product of rows with the matrix of their group: the forward, the gradient of the rows,
and the gradient of the activation's input. `ragged_contraction_kernel` is the gradient of the matrices, whose
contracted dim is the rows of a group. No size is transferred to the host, and no group is rounded up: the rows of a
tile belong to one group.
"""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.matmul.triton_codes import upcast


@triton.jit
def tile_map_kernel(
    sizes_ptr,  # [G]
    offset_ptr,  # the group of the first matrix, or None
    tiles_ptr,  # [3, BOUND]: for each row tile the matrix (-1: the rows are zero), its first row, the end of its group
    bounds_ptr,  # [3 * E + 2]: the first row of each matrix, one past its last, the number of tiles with a matrix, and
    # of all tiles; then the matrices, those with the most rows first
    turn_ptr,  # [1]: zero-initialised: number of tiles taken from the queue
    ROWS: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    BOUND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    first = 0
    if offset_ptr is not None:
        first = tl.load(offset_ptr)
    g = tl.arange(0, BLOCK_G)
    before = tl.sum(tl.load(sizes_ptr + g, mask=(g < G) & (g < first), other=0), axis=0)
    # Segments are the matrices, the rows after the last of them, and the rows before the first: zeros, with no products.
    e = tl.arange(0, BLOCK_E)
    valid = (e < E) & (first + e >= 0) & (first + e < G)
    size = tl.load(sizes_ptr + first + e, mask=valid, other=0)
    end = tl.minimum(before + tl.cumsum(size, axis=0), ROWS)
    begin = tl.minimum(before + tl.cumsum(size, axis=0) - size, ROWS)
    last = tl.max(end, axis=0)
    begin = tl.where(e < E, begin, tl.where(e == E, last, 0))
    end = tl.where(e < E, end, tl.where(e == E, ROWS, tl.where(e == E + 1, tl.minimum(before, ROWS), 0)))
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    tile_end = tl.cumsum(tiles, axis=0)
    tile_begin = tile_end - tiles
    if tl.program_id(0) == 0:
        tl.store(bounds_ptr + e, begin, mask=e < E)
        tl.store(bounds_ptr + E + e, end, mask=e < E)
        tl.store(bounds_ptr + 2 * E, tl.sum(tl.where(e < E, tiles, 0), axis=0))
        tl.store(bounds_ptr + 2 * E + 1, tl.sum(tiles, axis=0))
        tl.store(turn_ptr, 0)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    of = (tile_begin[None, :] <= t[:, None]) & (t[:, None] < tile_end[None, :])
    expert = tl.sum(tl.where(of, tl.where(e < E, e, -1)[None, :], 0), axis=1)
    row = tl.sum(tl.where(of, (begin - tile_begin * BLOCK_M)[None, :], 0), axis=1) + t * BLOCK_M
    row_end = tl.sum(tl.where(of, end[None, :], 0), axis=1)
    tl.store(tiles_ptr + t, expert, mask=t < BOUND)
    tl.store(tiles_ptr + BOUND + t, row, mask=t < BOUND)
    tl.store(tiles_ptr + 2 * BOUND + t, row_end, mask=t < BOUND)
    # The rank of matrix t: how many come before it.
    rows = tl.where(e < E, end - begin, -1)
    rows_of_group = tl.sum(tl.where(t[:, None] == e[None, :], rows[None, :], 0), axis=1)
    before_it = (rows[None, :] > rows_of_group[:, None]) | (
        (rows[None, :] == rows_of_group[:, None]) & (e[None, :] < t[:, None])
    )
    tl.store(bounds_ptr + 2 * E + 2 + tl.sum(before_it.to(tl.int32), axis=1), t, mask=t < E)


@triton.jit
def activated(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return z * tl.sigmoid(z)
    if ACTIVATION == "gelu":
        return 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2 u)
        return z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    if ACTIVATION == "relu":
        return tl.where(z < 0, 0.0, z)  # a maximum would turn NaN into 0
    return z


@triton.jit
def slope(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        s = tl.sigmoid(z)
        return s * (1 + z * (1 - s))
    if ACTIVATION == "gelu":
        return 0.5 * (1 + tl.erf(z * 0.7071067811865476)) + z * tl.exp(-0.5 * z * z) * 0.3989422804014327
    if ACTIVATION == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        return s + z * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * z * z)
    return (z > 0).to(tl.float32)  # "relu"


@triton.jit
def _matrix_tile(b_ptr, b_desc, expert, k, n, K: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, AT: tl.constexpr,
                 TRANSPOSED: tl.constexpr, TMA: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Returns [BLOCK_K, BLOCK_N] of a matrix [K, WIDTH], or [WIDTH, K] transposed, at column AT + n; undefined past its
    end."""
    if TMA:
        if TRANSPOSED:
            tile = tl.trans(b_desc.load([expert * WIDTH + AT + n, k]))
        else:
            tile = b_desc.load([expert * K + k, AT + n])
    else:
        k_index = k + tl.arange(0, BLOCK_K)
        cols = n + tl.arange(0, BLOCK_N)
        mask = (k_index < K)[:, None] & (cols < N)[None, :]
        matrix = b_ptr + expert.to(tl.int64) * (K * WIDTH)
        if TRANSPOSED:
            tile = tl.load(matrix + (AT + cols)[None, :] * K + k_index[:, None], mask=mask, other=0)
        else:
            tile = tl.load(matrix + k_index[:, None] * WIDTH + (AT + cols)[None, :], mask=mask, other=0)
    return tile


@triton.jit
def _finish(acc, up, bias_ptr, scale_ptr, d_ptr, out_ptr, expert, rows, end, n, N: tl.constexpr, WIDTH: tl.constexpr,
            GATED: tl.constexpr, ACTIVATION: tl.constexpr, SCALES: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Stores the rows of a tile before `end`: of the result or, given its cotangent, of the cotangents of the
    products."""
    cols = n + tl.arange(0, BLOCK_N)
    inner = cols < N
    rows64 = rows.to(tl.int64)[:, None]
    mask = (rows < end)[:, None] & inner[None, :]
    if SCALES == "columns":
        scale = scale_ptr + expert * WIDTH + cols
        acc *= tl.load(scale, mask=inner, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up *= tl.load(scale + N, mask=inner, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        bias = bias_ptr + expert * WIDTH + cols
        acc += tl.load(bias, mask=inner, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + N, mask=inner, other=0.0).to(tl.float32)[None, :]
    if d_ptr is None:
        y = activated(acc, ACTIVATION)
        if GATED:
            y *= up
        tl.store(out_ptr + rows64 * N + cols[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        d = tl.load(d_ptr + rows64 * N + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        out = out_ptr + rows64 * WIDTH + cols[None, :]
        if GATED:
            tl.store(out + N, (d * activated(acc, ACTIVATION)).to(out_ptr.dtype.element_ty), mask=mask)
            d *= up
        tl.store(out, (d * slope(acc, ACTIVATION)).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _halves(x, M: tl.constexpr, N: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def grouped_matmul_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [E, K, WIDTH], or transposed [E, WIDTH, K]; WIDTH is N, or 2 N for a gate and an up projection
    scale_ptr,  # for 8-bit matrices: [E, WIDTH], or [E, K] if SCALES are per row; or None
    bias_ptr,  # [E, WIDTH] or None
    d_ptr,  # [M, N]: the cotangent of the result, or None
    rows_ptr,  # [M]: the row of a of each row, which may be negative, of zeros; None if a has them in order
    a_desc,  # for TMA: descriptors of a, and of b as a matrix; None if the kernel creates them
    b_desc,
    tiles_ptr,
    bounds_ptr,
    out_ptr,  # [M, N]; with a cotangent, that of the products, [M, WIDTH]
    M: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    BOUND: tl.constexpr,
    GATED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CODE: tl.constexpr,
    SCALES: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    PARTS: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    WIDTH: tl.constexpr = 2 * N if GATED else N
    WRITTEN: tl.constexpr = N if d_ptr is None else WIDTH
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    if TMA and b_desc is None:
        if rows_ptr is None:
            a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
        if TRANSPOSED:
            b_desc = tl.make_tensor_descriptor(b_ptr, [E * WIDTH, K], [K, 1], [BLOCK_N, BLOCK_K])
        else:
            b_desc = tl.make_tensor_descriptor(b_ptr, [E * K, WIDTH], [WIDTH, 1], [BLOCK_K, BLOCK_N])
    tiles_m = tl.load(bounds_ptr + 2 * E)
    for tile in tl.range(tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0), flatten=FLATTEN):
        # Bands of row tiles, expert after expert; inside a band the rows change first.
        band = tile // (BAND * TILES_N)
        height = tl.minimum(tiles_m - band * BAND, BAND)
        inside = tile % (BAND * TILES_N)
        which = band * BAND + inside % height
        n = inside // height * BLOCK_N
        expert = tl.load(tiles_ptr + which)
        row = tl.load(tiles_ptr + BOUND + which)
        end = tl.load(tiles_ptr + 2 * BOUND + which)
        rows = row + tl.arange(0, BLOCK_M)
        source = rows
        if rows_ptr is not None:
            source = tl.load(rows_ptr + rows, mask=rows < end, other=-1)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N] if GATED else [1, 1], tl.float32)
        for k in range(0, K, BLOCK_K):
            k_index = k + tl.arange(0, BLOCK_K)
            if TMA and rows_ptr is None:
                a = a_desc.load([row, k])
            else:
                mask = ((rows < end) & (source >= 0))[:, None] & (k_index < K)[None, :]
                a = tl.load(a_ptr + source.to(tl.int64)[:, None] * K + k_index[None, :], mask=mask, other=0.0)
            if SCALES == "rows":
                scale = tl.load(scale_ptr + expert * K + k_index, mask=k_index < K, other=0.0).to(tl.float32)
                a = (a.to(tl.float32) * scale[None, :]).to(a.dtype)
            b = _matrix_tile(b_ptr, b_desc, expert, k, n, K, N, WIDTH, 0, TRANSPOSED, TMA, BLOCK_N, BLOCK_K)
            if CODE is not None:
                b = upcast(b, CODE, a.dtype)
            acc = tl.dot(a, b, acc, input_precision="ieee")
            if GATED:
                b = _matrix_tile(b_ptr, b_desc, expert, k, n, K, N, WIDTH, N, TRANSPOSED, TMA, BLOCK_N, BLOCK_K)
                if CODE is not None:
                    b = upcast(b, CODE, a.dtype)
                up = tl.dot(a, b, up, input_precision="ieee")
        # In two parts if a whole tile, with its accumulators, exceeds the registers.
        PART: tl.constexpr = BLOCK_N // PARTS
        if PARTS == 2:
            acc, acc_right = _halves(acc, BLOCK_M, BLOCK_N)
            up_right = up
            if GATED:
                up, up_right = _halves(up, BLOCK_M, BLOCK_N)
            _finish(acc, up, bias_ptr, scale_ptr, d_ptr, out_ptr, expert, rows, end, n,
                    N, WIDTH, GATED, ACTIVATION, SCALES, PART)  # fmt: skip
            _finish(acc_right, up_right, bias_ptr, scale_ptr, d_ptr, out_ptr, expert, rows, end, n + PART,
                    N, WIDTH, GATED, ACTIVATION, SCALES, PART)  # fmt: skip
        else:
            _finish(acc, up, bias_ptr, scale_ptr, d_ptr, out_ptr, expert, rows, end, n,
                    N, WIDTH, GATED, ACTIVATION, SCALES, PART)  # fmt: skip
    # Rows without a group.
    empty = tl.load(bounds_ptr + 2 * E + 1) - tiles_m
    COLUMNS: tl.constexpr = (WRITTEN + BLOCK_N - 1) // BLOCK_N
    for tile in tl.range(tl.program_id(0), empty * COLUMNS, tl.num_programs(0), num_stages=1):
        which = tiles_m + tile // COLUMNS
        rows = tl.load(tiles_ptr + BOUND + which) + tl.arange(0, BLOCK_M)
        cols = tile % COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (rows < tl.load(tiles_ptr + 2 * BOUND + which))[:, None] & (cols < WRITTEN)[None, :]
        zeros = tl.zeros([BLOCK_M, BLOCK_N], out_ptr.dtype.element_ty)
        tl.store(out_ptr + rows.to(tl.int64)[:, None] * WRITTEN + cols[None, :], zeros, mask=mask)


@triton.jit
def ragged_contraction_kernel(
    a_ptr,  # [M, P]
    b_ptr,  # [M, Q]
    rows_ptr,  # [M]: the row of a of each row, as above, or None
    bounds_ptr,
    turn_ptr,
    a_desc,  # as above
    b_desc,
    out_ptr,  # [E, P, Q]: of each group, its rows of a, transposed, times those of b
    M: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    E: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    TILES_P: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    TILES_Q: tl.constexpr = (Q + BLOCK_Q - 1) // BLOCK_Q
    if TMA and a_desc is None:
        a_desc = tl.make_tensor_descriptor(a_ptr, [M, P], [P, 1], [BLOCK_K, BLOCK_P])
        b_desc = tl.make_tensor_descriptor(b_ptr, [M, Q], [Q, 1], [BLOCK_K, BLOCK_Q])
    # Tiles are as long as their groups: each program takes the longest remaining one when it is done. Which program
    # computes a tile does not affect the result.
    tile = tl.program_id(0)
    while tile < E * TILES_P * TILES_Q:
        expert = tl.load(bounds_ptr + 2 * E + 2 + tile // (TILES_P * TILES_Q))
        inside = tile % (TILES_P * TILES_Q)
        band = inside // (BAND * TILES_Q)
        height = tl.minimum(TILES_P - band * BAND, BAND)
        p = (band * BAND + inside % (BAND * TILES_Q) % height) * BLOCK_P
        q = inside % (BAND * TILES_Q) // height * BLOCK_Q
        begin, end = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + E + expert)
        cols_p, cols_q = p + tl.arange(0, BLOCK_P), q + tl.arange(0, BLOCK_Q)
        acc = tl.zeros([BLOCK_P, BLOCK_Q], tl.float32)
        rest = begin
        if TMA:
            rest = begin + (end - begin) // BLOCK_K * BLOCK_K
            for row in range(begin, rest, BLOCK_K):
                acc = tl.dot(tl.trans(a_desc.load([row, p])), b_desc.load([row, q]), acc, input_precision="ieee")
        # The remainder has fewer rows than a step; without TMA it is everything.
        for row in tl.range(rest, end, BLOCK_K, num_stages=STAGES):
            rows = row + tl.arange(0, BLOCK_K)
            row64, inner = rows.to(tl.int64), rows < end
            source, there = row64, inner
            if rows_ptr is not None:
                source = tl.load(rows_ptr + rows, mask=inner, other=-1).to(tl.int64)
                there = source >= 0
            a_mask, b_mask = there[None, :] & (cols_p < P)[:, None], inner[:, None] & (cols_q < Q)[None, :]
            a = tl.load(a_ptr + source[None, :] * P + cols_p[:, None], mask=a_mask, other=0.0)
            b = tl.load(b_ptr + row64[:, None] * Q + cols_q[None, :], mask=b_mask, other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        out = out_ptr + expert.to(tl.int64) * (P * Q) + cols_p[:, None] * Q + cols_q[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(cols_p < P)[:, None] & (cols_q < Q)[None, :])
        tile = tl.num_programs(0) + tl.atomic_add(turn_ptr, 1, sem="relaxed")


@triton.jit
def group_sum_kernel(
    x_ptr,  # [M, N]
    bounds_ptr,
    out_ptr,  # [E, N]: the sum of the rows of each group
    N: tl.constexpr,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    expert = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + E + expert)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for row in range(begin, end, BLOCK_M):
        rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask = (rows < end)[:, None] & (cols < N)[None, :]
        total += tl.load(x_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + expert.to(tl.int64) * N + cols, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=cols < N
    )


@triton.jit
def products_fwd_kernel(
    z_ptr,  # [M, N], or [M, 2 N] of a gate and an up projection
    out_ptr,  # [M, N]
    N: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    z = z_ptr + row * (2 * N if GATED else N) + cols
    y = activated(tl.load(z, mask=cols < N, other=0.0).to(tl.float32), ACTIVATION)
    if GATED:
        y *= tl.load(z + N, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + cols, y.to(out_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def products_bwd_kernel(
    z_ptr,  # as above
    d_ptr,  # [M, N]
    bounds_ptr,  # of `tile_map_kernel`: rows without a matrix are left as they are, and nothing reads them
    out_ptr,  # as z
    E: tl.constexpr,
    N: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if (row >= tl.load(bounds_ptr)) & (row < tl.load(bounds_ptr + 2 * E - 1)):
        first = row * (2 * N if GATED else N) + cols
        z = tl.load(z_ptr + first, mask=cols < N, other=0.0).to(tl.float32)
        d = tl.load(d_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(z_ptr + first + N, mask=cols < N, other=0.0).to(tl.float32)
            tl.store(out_ptr + first + N, (d * activated(z, ACTIVATION)).to(out_ptr.dtype.element_ty), mask=cols < N)
            d *= up
        tl.store(out_ptr + first, (d * slope(z, ACTIVATION)).to(out_ptr.dtype.element_ty), mask=cols < N)
