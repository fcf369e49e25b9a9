"""The selected branch in Triton: attention of tiles of queries over the union of their blocks, forward and backward.

The rows of a tile are neighbouring queries, each with all query heads of a key head. Forward and dq loop over the blocks that
any of its queries reads. dk and dv are summed by tiles of keys, over the pairs (query, block) of the transposed list, so all of
their rows are queries that read it; no two programs add to the same place.
"""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels.engines.attention.triton_parts import LN2, LOG2E, rows_of, store_rows
from kernels.framework.work import Work
from kernels.ops.native_sparse_attention import triton_lists
from kernels.ops.native_sparse_attention.blocks import overlapped
from kernels.ops.native_sparse_attention.triton_lists import Lists, Pairs
from kernels.ops.native_sparse_attention.triton_sizes import Sizes, place_of, queries_of, rows_of_tile
from kernels.toolchains.triton import triton_launch

# Rows of a tile of the gradient of keys, by the bytes of a number.
ROWS = {2: 64, 4: 32}


@triton.jit
def _entry(union_ptr, members_ptr, row, n, q, position, O: tl.constexpr):
    """Returns (keys of a part of block n of a list, which pairs attend)."""
    e = row.to(tl.int64) * (O.BLOCK_Q * O.NAMED) + n // O.PARTS
    first, members = tl.load(union_ptr + e), tl.load(members_ptr + e)
    inside = n % O.PARTS * O.BLOCK_K + tl.arange(0, O.BLOCK_K)
    keys = first + inside
    reads = ((members >> q) & 1) != 0
    last = tl.minimum(position, O.S - 1)  # queries may be after all keys, which may end within a block
    return keys, reads[:, None] & (inside < O.SIZE)[None, :] & (keys[None, :] <= last[:, None])


@triton.jit
def selected_fwd_kernel(
    q_ptr,  # [B, T, N, H]
    k_ptr,  # [B, S, K, H]
    v_ptr,  # [B, S, K, HV]
    union_ptr,  # `Lists`
    members_ptr,
    ends_ptr,
    q_start_ptr,  # [1]
    out_ptr,  # [B, T, N, HV]
    lse_ptr,  # [B, T, N]
    O: tl.constexpr,  # `Sizes`
):
    TILES: tl.constexpr = (O.T + O.BLOCK_Q - 1) // O.BLOCK_Q
    tile, head, b = place_of(tl.program_id(0), TILES, O)
    b64 = b.to(tl.int64)
    t, n, q_in_tile = rows_of_tile(tile, head, O)
    position = tl.load(q_start_ptr) + t
    q = rows_of(q_ptr + b64 * (O.T * O.N * O.H), t, O.N, n, O.H, O.T, O.BLOCK_H)
    k_ptr += b64 * (O.S * O.K * O.H)
    v_ptr += b64 * (O.S * O.K * O.HV)
    row = (b * O.K + head) * TILES + tile
    acc = tl.zeros([O.BLOCK_Q * O.BLOCK_G, O.BLOCK_V], tl.float32)
    row_max = tl.full([O.BLOCK_Q * O.BLOCK_G], float("-inf"), tl.float32)
    row_sum = tl.zeros([O.BLOCK_Q * O.BLOCK_G], tl.float32)
    for i in range(0, tl.load(ends_ptr + row) * O.PARTS):
        keys, seen = _entry(union_ptr, members_ptr, row, i, q_in_tile, position, O)
        k = rows_of(k_ptr, keys, O.K, head, O.H, O.S, O.BLOCK_H)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * (O.SCALE * LOG2E)
        x = tl.where(seen, x, float("-inf"))
        new = tl.maximum(row_max, tl.max(x, axis=1))
        anchor = tl.where(new == float("-inf"), 0.0, new)  # a row that has not seen any key yet
        p = tl.exp2(x - anchor[:, None])
        rescale = tl.exp2(row_max - anchor)
        row_sum = row_sum * rescale + tl.sum(p, axis=1)
        row_max = new
        v = rows_of(v_ptr, keys, O.K, head, O.HV, O.S, O.BLOCK_V)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    nonempty = row_sum != 0  # true for NaN too
    row_sum = tl.where(nonempty, row_sum, 1.0)
    lse = tl.where(nonempty, (row_max + tl.log2(row_sum)) * LN2, float("-inf"))
    tl.store(lse_ptr + (b64 * O.T + t) * O.N + n, lse, mask=t < O.T)
    store_rows(out_ptr + b64 * (O.T * O.N * O.HV), acc / row_sum[:, None], t, O.N, n, O.HV, O.T, O.BLOCK_V)


@triton.jit
def _statistics(lse_ptr, delta_ptr, t, n, O: tl.constexpr):
    """Returns (lse in units of log 2, delta) of rows; those of rows without keys make all weights zero."""
    lse = tl.load(lse_ptr + t * O.N + n, mask=t < O.T, other=float("-inf"))
    delta = tl.load(delta_ptr + t * O.N + n, mask=t < O.T, other=0.0)
    nonempty = lse > float("-inf")
    return tl.where(nonempty, lse * LOG2E, float("inf")), tl.where(nonempty, delta, 0.0)


@triton.jit
def selected_dq_kernel(
    d_out_ptr,  # [B, T, N, HV]
    lse_ptr,  # [B, T, N]
    delta_ptr,
    q_ptr,  # as in the forward
    k_ptr,
    v_ptr,
    union_ptr,
    members_ptr,
    ends_ptr,
    q_start_ptr,
    dq_ptr,  # [B, T, N, H]
    O: tl.constexpr,  # `Sizes`
):
    TILES: tl.constexpr = (O.T + O.BLOCK_Q - 1) // O.BLOCK_Q
    tile, head, b = place_of(tl.program_id(0), TILES, O)
    b64 = b.to(tl.int64)
    t, n, q_in_tile = rows_of_tile(tile, head, O)
    position = tl.load(q_start_ptr) + t
    q = rows_of(q_ptr + b64 * (O.T * O.N * O.H), t, O.N, n, O.H, O.T, O.BLOCK_H)
    d_out = rows_of(d_out_ptr + b64 * (O.T * O.N * O.HV), t, O.N, n, O.HV, O.T, O.BLOCK_V)
    lse, delta = _statistics(lse_ptr + b64 * (O.T * O.N), delta_ptr + b64 * (O.T * O.N), t, n, O)
    k_ptr += b64 * (O.S * O.K * O.H)
    v_ptr += b64 * (O.S * O.K * O.HV)
    row = (b * O.K + head) * TILES + tile
    dq = tl.zeros([O.BLOCK_Q * O.BLOCK_G, O.BLOCK_H], tl.float32)
    for i in range(0, tl.load(ends_ptr + row) * O.PARTS):
        keys, seen = _entry(union_ptr, members_ptr, row, i, q_in_tile, position, O)
        k = rows_of(k_ptr, keys, O.K, head, O.H, O.S, O.BLOCK_H)
        v = rows_of(v_ptr, keys, O.K, head, O.HV, O.S, O.BLOCK_V)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * (O.SCALE * LOG2E)
        p = tl.exp2(tl.where(seen, x, float("-inf")) - lse[:, None])
        dp = tl.dot(d_out, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None]) * O.SCALE
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    store_rows(dq_ptr + b64 * (O.T * O.N * O.H), dq, t, O.N, n, O.H, O.T, O.BLOCK_H)


@triton.jit
def selected_dkdv_kernel(
    d_out_ptr,  # as above
    lse_ptr,
    delta_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    first_ptr,  # `Lists`
    order_ptr,  # `Pairs`
    bounds_ptr,
    group_ptr,
    part_ptr,
    q_start_ptr,
    dk_ptr,  # [parts, BLOCK_K, H] float32
    dv_ptr,  # [parts, BLOCK_K, HV]
    O: tl.constexpr,  # `Sizes`
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,  # entries of `order` of each entry of `first`
    PART: tl.constexpr,
):
    """The logits are transposed, with keys as rows, so that the weights are the left operand of both sums."""
    G: tl.constexpr = O.N // O.K
    KEY_TILES: tl.constexpr = (O.S + O.BLOCK_K - 1) // O.BLOCK_K
    group = tl.load(group_ptr + tl.program_id(0))
    if group < GROUPS:
        tile, head, b = group % KEY_TILES, group // KEY_TILES % O.K, group // (KEY_TILES * O.K)
        b64 = b.to(tl.int64)
        begin = tl.load(bounds_ptr + group) + (tl.program_id(0) - tl.load(part_ptr + group)) * PART
        end = tl.minimum(begin + PART, tl.load(bounds_ptr + group + 1))
        keys = tile * O.BLOCK_K + tl.arange(0, O.BLOCK_K)
        k = rows_of(k_ptr + b64 * (O.S * O.K * O.H), keys, O.K, head, O.H, O.S, O.BLOCK_H)
        v = rows_of(v_ptr + b64 * (O.S * O.K * O.HV), keys, O.K, head, O.HV, O.S, O.BLOCK_V)
        q_ptr += b64 * (O.T * O.N * O.H)
        d_out_ptr += b64 * (O.T * O.N * O.HV)
        lse_ptr += b64 * (O.T * O.N)
        delta_ptr += b64 * (O.T * O.N)
        q_start = tl.load(q_start_ptr)
        r = tl.arange(0, O.BLOCK_Q * O.BLOCK_G)
        g = r % O.BLOCK_G
        n = head * G + tl.minimum(g, G - 1)
        dk = tl.zeros([O.BLOCK_K, O.BLOCK_H], tl.float32)
        dv = tl.zeros([O.BLOCK_K, O.BLOCK_V], tl.float32)
        for start in range(begin, end, O.BLOCK_Q):
            e = start + r // O.BLOCK_G
            valid = (e < end) & (g < G)
            pair = tl.load(order_ptr + e, mask=valid, other=0) // OVERLAP
            first = tl.load(first_ptr + pair, mask=valid, other=0)
            t = tl.where(valid, pair // (O.NAMED * O.K) % O.T, O.T)
            q = rows_of(q_ptr, t, O.N, n, O.H, O.T, O.BLOCK_H)
            d_out = rows_of(d_out_ptr, t, O.N, n, O.HV, O.T, O.BLOCK_V)
            lse, delta = _statistics(lse_ptr, delta_ptr, t, n, O)
            seen = (keys[:, None] >= first[None, :]) & (keys[:, None] < (first + O.SIZE)[None, :])
            seen = seen & (keys[:, None] <= (q_start + t)[None, :])
            x = tl.dot(k, tl.trans(q), input_precision="ieee") * (O.SCALE * LOG2E)
            p = tl.exp2(tl.where(seen, x, float("-inf")) - lse[None, :])
            dp = tl.dot(v, tl.trans(d_out), input_precision="ieee")
            dv = tl.dot(p.to(d_out.dtype), d_out, dv, input_precision="ieee")
            ds = p * (dp - delta[None, :]) * O.SCALE
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
        part = tl.program_id(0).to(tl.int64) * O.BLOCK_K
        inside = tl.arange(0, O.BLOCK_K)
        store_rows(dk_ptr + part * O.H, dk, inside, 1, 0, O.H, O.BLOCK_K, O.BLOCK_H)
        store_rows(dv_ptr + part * O.HV, dv, inside, 1, 0, O.HV, O.BLOCK_K, O.BLOCK_V)


@triton.jit
def add_parts_kernel(
    parts_ptr,  # [parts, BLOCK_K, WIDTH]
    part_ptr,  # `Pairs`
    total_ptr,  # [B, S, K, WIDTH] float32
    O: tl.constexpr,  # `Sizes`
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the parts of a tile of keys, in their order."""
    KEY_TILES: tl.constexpr = (O.S + O.BLOCK_K - 1) // O.BLOCK_K
    group = tl.program_id(0)
    tile, head, b = group % KEY_TILES, group // KEY_TILES % O.K, group // (KEY_TILES * O.K)
    inside = tl.arange(0, O.BLOCK_K)
    total = tl.zeros([O.BLOCK_K, BLOCK], tl.float32)
    for part in range(tl.load(part_ptr + group), tl.load(part_ptr + group + 1)):
        base = parts_ptr + tl.cast(part, tl.int64) * (O.BLOCK_K * WIDTH)
        total += rows_of(base, inside, 1, 0, WIDTH, O.BLOCK_K, BLOCK)
    keys = tile * O.BLOCK_K + inside
    store_rows(total_ptr + b.to(tl.int64) * (O.S * O.K * WIDTH), total, keys, O.K, head, WIDTH, O.S, BLOCK)


def forward(
    query, key, value, lists: Lists, q_start, sizes: Sizes, cfg: Any, cost: Work
) -> tuple[jax.Array, jax.Array]:
    """Returns (output, log-sum-exp) of the selected branch."""
    B, T, N, _ = query.shape
    return triton_launch(
        selected_fwd_kernel,
        query,
        key,
        value,
        *lists[1:],
        q_start.reshape(1),
        out_shape=(
            jax.ShapeDtypeStruct((B, T, N, value.shape[3]), query.dtype),
            jax.ShapeDtypeStruct((B, T, N), jnp.float32),
        ),
        grid=(sizes.B * sizes.K * sizes.tiles,),
        num_warps=cfg.num_warps,
        num_stages=cfg.num_stages,
        work=cost,
        O=sizes,
    )


def backward(
    d_out, lse, delta, query, key, value, lists: Lists, pairs: Pairs, q_start, sizes: Sizes, cfg: Any, cost: Work,
    aligned: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Returns the gradients of query, and of key and value in float32."""
    first = d_out, lse, delta, query, key, value
    (dq,) = triton_launch(
        selected_dq_kernel,
        *first,
        *lists[1:],
        q_start.reshape(1),
        out_shape=(jax.ShapeDtypeStruct(query.shape, query.dtype),),
        grid=(sizes.B * sizes.K * sizes.tiles,),
        num_warps=cfg.num_warps,
        num_stages=cfg.dq_num_stages,
        work=cost,
        O=sizes,
    )
    groups, count, block = pairs.bounds.size - 1, pairs.group.size, sizes.BLOCK_K
    rows = ROWS[query.dtype.itemsize]
    parts = triton_launch(
        selected_dkdv_kernel,
        *first,
        lists.first,
        *pairs,
        q_start.reshape(1),
        out_shape=tuple(jax.ShapeDtypeStruct((count, block, w), jnp.float32) for w in (sizes.H, sizes.HV)),
        grid=(count,),
        O=dataclasses.replace(sizes, BLOCK_Q=queries_of(rows, sizes.N // sizes.K, rows)),
        GROUPS=groups,
        OVERLAP=overlapped(sizes.SIZE, sizes.BLOCK_K, aligned),
        PART=triton_lists.PART,
        num_warps=cfg.backward_num_warps,
        num_stages=cfg.backward_num_stages,
        work=cost,
    )
    totals = []
    for part, wide in zip(parts, (sizes.BLOCK_H, sizes.BLOCK_V), strict=True):
        width = part.shape[2]
        (total,) = triton_launch(
            add_parts_kernel,
            part,
            pairs.part,
            out_shape=(jax.ShapeDtypeStruct((sizes.B, sizes.S, sizes.K, width), jnp.float32),),
            grid=(groups,),
            O=sizes,
            WIDTH=width,
            BLOCK=wide,
        )
        totals.append(total)
    return dq, *totals
