"""Gluon kernels for Hopper of the walks of a delta rule over the chunks of a row: that of states, and that of their gradients.

They do what `delta_walk_kernel` and `delta_reverse_kernel` of `triton_delta.py` do for rows of whole chunks of 64 tokens, with
one state each that is not split. A program has 64 columns of the state of a head. One warpgroup walks, with the state
transposed in its registers, [columns, channels]: then the left operand of every product is what registers hold, and nothing
that the next product waits for passes through shared memory. One warp loads chunks ahead; another warpgroup stores results.
"""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index, not-iterable]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from kernels.engines.scan.gluon_tiles import SQUARE, WIDTH, C, product_of
from kernels.engines.scan.gluon_walk_parts import (
    FIRST,
    KEYS,
    OF_STATE,
    SECOND,
    SMALL,
    arrived,
    hand_over,
    hands_of,
    load_chunks,
    place,
    ring_of,
    store_results,
)

STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # [columns, channels]
LEFT = gl.constexpr(gl.DotOperandLayout(0, SQUARE, 2))
WIDE_KEYS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def _state_at(ptr, head, column, h):
    """Returns pointers to columns of a state [columns, channels] of an array [B, 1, N, 128, 128]."""
    v = column + gl.arange(0, C, gl.SliceLayout(1, STATE))
    return ptr + head.to(gl.int64) * (WIDTH * WIDTH) + v[:, None] + h[None, :] * WIDTH


@gluon.jit
def _padding(runs_ptr, token, t, CHANNELS: gl.constexpr):
    """Returns whether keys of a chunk have padding. With decays of channels in them they are 0 there."""
    padded = False
    if runs_ptr is not None:
        if not CHANNELS:
            padded = gl.max(gl.where(gl.load(runs_ptr + token + t) < 0, 1, 0), axis=0) > 0
    return padded


@gluon.jit
def _clean(tile, runs_ptr, token, padded, CHANNELS: gl.constexpr):
    """Sets tokens of padding to zero in a tile of keys: they may hold anything, even NaN."""
    if runs_ptr is not None:
        if not CHANNELS:
            if padded:
                there = gl.load(runs_ptr + token + gl.arange(0, C, gl.SliceLayout(1, WIDE_KEYS))) >= 0
                x = tile.load(WIDE_KEYS)
                tile.store(gl.where(there[:, None], x, gl.zeros_like(x)))
                fence_async_shared()


@gluon.jit
def _valid(x, runs_ptr, token, t):
    """Returns x [columns, tokens], 0 at padding."""
    if runs_ptr is not None:
        x = gl.where((gl.load(runs_ptr + token + t) >= 0)[None, :], x, gl.zeros_like(x))
    return x


@gluon.jit
def _whole(whole_ptr, index, h, CHANNELS: gl.constexpr):
    """Returns the decays over a chunk, of channels [128] or of the head."""
    return gl.load(whole_ptr + index * WIDTH + h) if CHANNELS else gl.load(whole_ptr + index)


@gluon.jit
def _walk(inputs, wanted, rings, hands, CHUNKS: gl.constexpr, N: gl.constexpr, SCALE: gl.constexpr):
    beta_ptr, enters_ptr, leaves_ptr, whole_ptr, runs_ptr, entries_ptr, exits_ptr = inputs
    states_ptr, written_ptr, out_ptr = wanted
    keys, small = rings
    of_states, of_tokens, ready, free = hands
    CHANNELS: gl.constexpr = enters_ptr is None
    READS: gl.constexpr = out_ptr is not None
    dtype: gl.constexpr = of_tokens.dtype
    hand = ready, free
    head, n, column, begin = place(CHUNKS, N)
    t, h = gl.arange(0, C, gl.SliceLayout(0, SQUARE)), gl.arange(0, WIDTH, gl.SliceLayout(0, STATE))
    zeros = gl.zeros([C, C], gl.float32, SQUARE)
    state = gl.zeros([C, WIDTH], gl.float32, STATE)
    if entries_ptr is not None:
        state = gl.load(_state_at(entries_ptr, head, column, h))
    slot, phase, small_slot, small_phase = 0, 0, 0, 0
    for c in range(CHUNKS):
        index, token = head * CHUNKS + c, begin + c * C
        now = c & 1
        near = state.to(dtype)
        left = gl.convert_layout(near, gl.DotOperandLayout(0, SQUARE, 2))
        beta, whole = gl.load(beta_ptr + index * C + t), _whole(whole_ptr, index, h, CHANNELS)
        k, k_free, slot, phase = arrived(keys, slot, phase, KEYS)
        padded = _padding(runs_ptr, token, t, CHANNELS)
        _clean(k, runs_ptr, token, padded, CHANNELS)
        old = product_of(left, k.permute((1, 0)), zeros, False)
        if READS:
            q, q_free, slot, phase = arrived(keys, slot, phase, KEYS)
            _clean(q, runs_ptr, token, padded, CHANNELS)
            out = product_of(left, q.permute((1, 0)), zeros, False)
        if states_ptr is not None:
            hand_over(of_states.index(0), hand, OF_STATE, now, near)
        values, v_free, small_slot, small_phase = arrived(small, small_slot, small_phase, SMALL)
        solve, solve_free, small_slot, small_phase = arrived(small, small_slot, small_phase, SMALL)
        old = warpgroup_mma_wait(1 if READS else 0, (old,))
        x = _valid(values.permute((1, 0)).load(SQUARE), runs_ptr, token, t)
        if not CHANNELS:
            enters, leaves = gl.load(enters_ptr + index * C + t), gl.load(leaves_ptr + index * C + t)
            old *= enters[None, :]
        x = gl.convert_layout(((x.to(gl.float32) - old) * beta[None, :]).to(dtype), LEFT)
        written = product_of(x, solve.permute((1, 0)), zeros, False)
        if CHANNELS:
            mbarrier.arrive(k_free)
            state *= whole[None, :]
        else:
            state *= whole
        if READS:
            written, out = warpgroup_mma_wait(0, (written, out))
        else:
            written = warpgroup_mma_wait(0, (written,))
        near_written = written.to(dtype)
        writes, writes_free, weights_free = k, k_free, k_free
        if CHANNELS:
            writes, writes_free, slot, phase = arrived(keys, slot, phase, KEYS)
            state = product_of(gl.convert_layout(near_written, LEFT), writes, state, True)
        else:
            state = product_of(gl.convert_layout((written * leaves[None, :]).to(dtype), LEFT), writes, state, True)
        if READS:
            if not CHANNELS:
                out *= (enters * SCALE)[None, :]
            weights, weights_free, small_slot, small_phase = arrived(small, small_slot, small_phase, SMALL)
            out = product_of(gl.convert_layout(near_written, LEFT), weights.permute((1, 0)), out, True)
            mbarrier.arrive(q_free)
        mbarrier.arrive(v_free)
        mbarrier.arrive(solve_free)
        if written_ptr is not None:
            hand_over(of_tokens.index(0), hand, FIRST, now, near_written)
        if READS:
            state, out = warpgroup_mma_wait(0, (state, out))
            mbarrier.arrive(weights_free)
        else:
            state = warpgroup_mma_wait(0, (state,))
        mbarrier.arrive(writes_free)
        if READS:
            hand_over(of_tokens.index(1), hand, SECOND, now, out.to(dtype))
    if exits_ptr is not None:
        gl.store(_state_at(exits_ptr, head, column, h), state)


@gluon.jit
def _reverse(inputs, rings, hands, CHUNKS: gl.constexpr, N: gl.constexpr, SCALE: gl.constexpr):
    beta_ptr, enters_ptr, leaves_ptr, whole_ptr, runs_ptr, d_exits_ptr, d_entries_ptr = inputs
    keys, small = rings
    of_states, of_tokens, ready, free = hands
    CHANNELS: gl.constexpr = enters_ptr is None
    dtype: gl.constexpr = of_tokens.dtype
    hand = ready, free
    head, n, column, begin = place(CHUNKS, N)
    t, h = gl.arange(0, C, gl.SliceLayout(0, SQUARE)), gl.arange(0, WIDTH, gl.SliceLayout(0, STATE))
    by_left = gl.arange(0, C, gl.SliceLayout(0, LEFT))
    zeros = gl.zeros([C, C], gl.float32, SQUARE)
    d_state = gl.load(_state_at(d_exits_ptr, head, column, h))
    slot, phase, small_slot, small_phase = 0, 0, 0, 0
    for step in range(CHUNKS):
        c = CHUNKS - 1 - step
        index, token = head * CHUNKS + c, begin + c * C
        now = step & 1
        near = d_state.to(dtype)
        left = gl.convert_layout(near, gl.DotOperandLayout(0, SQUARE, 2))
        beta, whole = gl.load(beta_ptr + index * C + t), _whole(whole_ptr, index, h, CHANNELS)
        writes, writes_free, slot, phase = arrived(keys, slot, phase, KEYS)
        padded = _padding(runs_ptr, token, t, CHANNELS)
        _clean(writes, runs_ptr, token, padded, CHANNELS)
        d_written = product_of(left, writes.permute((1, 0)), zeros, False)
        d_outs, d_out_free, small_slot, small_phase = arrived(small, small_slot, small_phase, SMALL)
        d_out = _valid(d_outs.permute((1, 0)).load(LEFT), runs_ptr, token, by_left)
        weights, weights_free, small_slot, small_phase = arrived(small, small_slot, small_phase, SMALL)
        d_read = d_out
        if not CHANNELS:
            d_written = warpgroup_mma_wait(0, (d_written,))
            d_written *= gl.load(leaves_ptr + index * C + t)[None, :]
            enters = gl.load(enters_ptr + index * C + t)
            of_reads = gl.load(enters_ptr + index * C + by_left) * SCALE
            d_read = (d_out.to(gl.float32) * of_reads[None, :]).to(dtype)
        d_written = product_of(d_out, weights, d_written, True)
        hand_over(of_states.index(0), hand, OF_STATE, now, near)
        solve, solve_free, small_slot, small_phase = arrived(small, small_slot, small_phase, SMALL)
        q, q_free, slot, phase = arrived(keys, slot, phase, KEYS)
        _clean(q, runs_ptr, token, padded, CHANNELS)
        d_written = warpgroup_mma_wait(0, (d_written,))
        du = product_of(gl.convert_layout(d_written.to(dtype), LEFT), solve, zeros, False)
        d_state *= whole[None, :] if CHANNELS else whole
        d_state = product_of(d_read, q, d_state, True)
        mbarrier.arrive(d_out_free)
        mbarrier.arrive(weights_free)
        k, k_free = writes, writes_free
        if CHANNELS:
            mbarrier.arrive(writes_free)
            k, k_free, slot, phase = arrived(keys, slot, phase, KEYS)
        du = warpgroup_mma_wait(1, (du,))
        back = du * -beta[None, :]
        if not CHANNELS:
            back *= enters[None, :]
        d_state = product_of(gl.convert_layout(back.to(dtype), LEFT), k, d_state, True)
        mbarrier.arrive(solve_free)
        hand_over(of_tokens.index(0), hand, FIRST, now, du.to(dtype))
        d_state = warpgroup_mma_wait(0, (d_state,))
        mbarrier.arrive(q_free)
        mbarrier.arrive(k_free)
    if d_entries_ptr is not None:
        gl.store(_state_at(d_entries_ptr, head, column, h), d_state)


@gluon.jit
def delta_walk_hopper_kernel(
    q_desc,  # [B * T, KQ * 128] in blocks of 64 by 128, as the next two; None with out_ptr, as pairs_desc
    k_desc,  # [B * T, KK * 128]
    writes_desc,  # [B * T, N * 128]: keys as they write the state, with decays of channels, which k_desc has too; or None
    v_desc,  # [B * T, N * 128] in blocks of 64 by 64, as the next two
    pairs_desc,  # [B * N * CHUNKS * 64, 64]
    solve_desc,
    beta_ptr,  # [B, N, T]
    enters_ptr,  # [B, N, T] float32, as leaves: what `triton_parts.fades` returns; None with writes_desc
    leaves_ptr,
    whole_ptr,  # [B, N, CHUNKS] float32, or [B, N, CHUNKS, 128]
    runs_ptr,  # int32 [B, T] as in `layout.Layout`, or None
    entries_ptr,  # [B, 1, N, 128, 128] float32, or None for 0
    out_ptr,  # as in `triton_delta.delta_walk_kernel`; each may be None
    written_ptr,
    states_ptr,
    exits_ptr,
    N: gl.constexpr,
    KQ: gl.constexpr,
    KK: gl.constexpr,
    CHUNKS: gl.constexpr,
    SCALE: gl.constexpr,
    STORER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = k_desc.dtype
    rings, hands = (ring_of(dtype, KEYS, WIDTH), ring_of(dtype, SMALL, C)), hands_of(dtype)
    descs = q_desc, k_desc, writes_desc, v_desc, pairs_desc, solve_desc
    inputs = beta_ptr, enters_ptr, leaves_ptr, whole_ptr, runs_ptr, entries_ptr, exits_ptr
    wanted = states_ptr, written_ptr, out_ptr
    gl.warp_specialize(
        [
            (_walk, (inputs, wanted, rings, hands, CHUNKS, N, SCALE)),
            (store_results, (wanted, hands, CHUNKS, N, False)),
            (load_chunks, (descs, rings, CHUNKS, N, KQ, KK, False)),
        ],
        [4, 1],
        [STORER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def delta_reverse_hopper_kernel(
    q_desc,  # as in `delta_walk_hopper_kernel`
    k_desc,
    writes_desc,
    d_out_desc,  # [B * T, N * 128] in blocks of 64 by 64
    pairs_desc,
    solve_desc,
    beta_ptr,
    enters_ptr,
    leaves_ptr,
    whole_ptr,
    runs_ptr,
    d_exits_ptr,  # [B, 1, N, 128, 128] float32
    du_ptr,  # as in `triton_delta.delta_reverse_kernel`
    d_states_ptr,
    d_entries_ptr,
    N: gl.constexpr,
    KQ: gl.constexpr,
    KK: gl.constexpr,
    CHUNKS: gl.constexpr,
    SCALE: gl.constexpr,
    STORER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = k_desc.dtype
    rings, hands = (ring_of(dtype, KEYS, WIDTH), ring_of(dtype, SMALL, C)), hands_of(dtype)
    descs = q_desc, k_desc, writes_desc, d_out_desc, pairs_desc, solve_desc
    inputs = beta_ptr, enters_ptr, leaves_ptr, whole_ptr, runs_ptr, d_exits_ptr, d_entries_ptr
    gl.warp_specialize(
        [
            (_reverse, (inputs, rings, hands, CHUNKS, N, SCALE)),
            (store_results, ((d_states_ptr, du_ptr, None), hands, CHUNKS, N, True)),
            (load_chunks, (descs, rings, CHUNKS, N, KQ, KK, True)),
        ],
        [4, 1],
        [STORER_REGISTERS, PRODUCER_REGISTERS],
    )
