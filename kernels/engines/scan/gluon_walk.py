"""Gluon kernels for Hopper of the walks of a delta rule over the chunks of a row: that of states, and that of their gradients.

They do what `delta_walk_kernel` and `delta_reverse_kernel` of `triton_delta.py` do for rows of whole chunks of 64 tokens, with
one state each; the maps of parts of rows are those kernels' alone. A program has 64 columns of the state of a head. One
warpgroup walks, with the state transposed in its registers, [columns, channels]: then the left operand of every product is what
registers hold, and nothing that the next product waits for passes through shared memory. One warp loads chunks ahead; another
warpgroup stores results.
"""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index, not-iterable]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from kernels.engines.scan.gluon_tiles import SQUARE, WIDTH, C, again, product_of
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
BY_TOKEN, BY_CHANNEL = gl.constexpr(gl.SliceLayout(0, SQUARE)), gl.constexpr(gl.SliceLayout(0, STATE))
EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # a number a thread
WIDE_KEYS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def _state_at(ptr, head, column, h):
    """Returns pointers to columns of a state [columns, channels] of an array [..., 128, 128]."""
    v = column + gl.arange(0, C, gl.SliceLayout(1, STATE))
    return ptr + head.to(gl.int64) * (WIDTH * WIDTH) + v[:, None] + h[None, :] * WIDTH


@gluon.jit
def _ahead(inputs, index, token):
    """Returns (rates, decays until tokens and after them, the decay over the chunk, documents) of a chunk, anything for None.

    A thread has one number of each. They are loaded a chunk before they are needed: what comes from memory takes longer than
    a product."""
    beta_ptr, enters_ptr, leaves_ptr, whole_ptr, runs_ptr = inputs
    t = gl.arange(0, C, EACH)
    beta = gl.load(beta_ptr + index * C + t)
    enters, leaves, runs = beta, beta, t
    if enters_ptr is not None:
        enters, leaves = gl.load(enters_ptr + index * C + t), gl.load(leaves_ptr + index * C + t)
        whole = gl.load(whole_ptr + index)
    else:
        whole = gl.load(whole_ptr + index * WIDTH + gl.arange(0, WIDTH, EACH))
    if runs_ptr is not None:
        runs = gl.load(runs_ptr + token + t)
    return beta, enters, leaves, whole, runs


@gluon.jit
def _first_state(starts_ptr, of_rows_ptr, head, part, END: gl.constexpr, column, h, SPLITS: gl.constexpr):
    """Returns the state that a part starts from: its own, to which its row's is added at the END of the row, part 0 or the
    last; 0 for None."""
    state = gl.zeros([C, WIDTH], gl.float32, STATE)
    if starts_ptr is not None:
        state = gl.load(_state_at(starts_ptr, head * SPLITS + part, column, h))
    if of_rows_ptr is not None:
        if SPLITS == 1:
            state = gl.load(_state_at(of_rows_ptr, head, column, h))
        else:
            wide = column + gl.arange(0, C, gl.SliceLayout(1, STATE))
            mask = wide[:, None] + h[None, :] < gl.where(part == END, 2 * WIDTH, 0)
            state += gl.load(_state_at(of_rows_ptr, head, column, h), mask=mask, other=0.0)
    return state


@gluon.jit
def _valid(x, runs, of: gl.constexpr, PADDED: gl.constexpr):
    """Returns x [columns, tokens] in a layout whose rows are as `of`, 0 at padding."""
    if PADDED:
        x = gl.where((gl.convert_layout(runs, of) >= 0)[None, :], x, gl.zeros_like(x))
    return x


@gluon.jit
def _clean(tile, runs, padded, PADDED: gl.constexpr):
    """Sets tokens of padding to zero in a tile of keys without decays: they may hold anything, even NaN."""
    if PADDED:
        if padded:
            x, there = tile.load(WIDE_KEYS), gl.convert_layout(runs, gl.SliceLayout(1, WIDE_KEYS)) >= 0
            tile.store(gl.where(there[:, None], x, gl.zeros_like(x)))
            fence_async_shared()


@gluon.jit
def _padding(runs, PADDED: gl.constexpr):
    padded = False
    if PADDED:
        padded = gl.max(gl.where(runs < 0, 1, 0), axis=0) > 0
    return padded


@gluon.jit
def _walk(
    inputs, wanted, rings, hands, CHUNKS: gl.constexpr, N: gl.constexpr, SPLITS: gl.constexpr, SCALE: gl.constexpr
):
    of_chunks, entries_ptr, starts_ptr, exits_ptr = inputs
    beta_ptr, enters_ptr, leaves_ptr, whole_ptr, runs_ptr = of_chunks
    states_ptr, written_ptr, out_ptr = wanted
    keys, small = rings
    of_states, of_tokens, ready, free = hands
    CHANNELS: gl.constexpr = enters_ptr is None
    PADDED: gl.constexpr = runs_ptr is not None
    PADDED_KEYS: gl.constexpr = PADDED and not CHANNELS  # with decays of channels in them they are 0 there
    READS: gl.constexpr = out_ptr is not None
    dtype: gl.constexpr = of_tokens.dtype
    hand = ready, free
    head, n, column, part, begin, first, count = place(CHUNKS, N, SPLITS)
    h = gl.arange(0, WIDTH, BY_CHANNEL)
    zeros = gl.zeros([C, C], gl.float32, SQUARE)
    state = _first_state(starts_ptr, entries_ptr, head, part, 0, column, h, SPLITS)
    slot, phase, small_slot, small_phase = 0, 0, 0, 0
    near_out, last_key, last_small = zeros.to(dtype), 0, 0
    following = _ahead(of_chunks, first, begin)
    for c in range(count):
        now = c & 1
        beta, enters, leaves, whole, runs = following
        later = gl.minimum(c + 1, count - 1)
        following = _ahead(of_chunks, first + later, begin + later * C)
        near = state.to(dtype)
        left = gl.convert_layout(near, gl.DotOperandLayout(0, SQUARE, 2))
        own_slot = slot
        k, k_free, slot, phase = arrived(keys, slot, phase, KEYS)
        padded = _padding(runs, PADDED_KEYS)
        _clean(k, runs, padded, PADDED_KEYS)
        old = product_of(left, k.permute((1, 0)), zeros, False)
        if READS:
            q, q_free, slot, phase = arrived(keys, slot, phase, KEYS)
            _clean(q, runs, padded, PADDED_KEYS)
            out = product_of(left, q.permute((1, 0)), zeros, False)
            if c > 0:
                hand_over(of_tokens.index(1), hand, SECOND, now ^ 1, near_out)
                mbarrier.arrive(small[2].index(last_small))
        if c > 0:  # what the chunk before leaves to do: now products hide it
            mbarrier.arrive(keys[2].index(last_key))
        rates = gl.convert_layout(beta, BY_TOKEN)
        if CHANNELS:
            fading = gl.convert_layout(whole, BY_CHANNEL)[None, :]
        else:
            fading = whole
            enters, leaves = gl.convert_layout(enters, BY_TOKEN), gl.convert_layout(leaves, BY_TOKEN)
        if states_ptr is not None:
            hand_over(of_states.index(0), hand, OF_STATE, now, near)
        values, v_free, small_slot, small_phase = arrived(small, small_slot, small_phase, SMALL)
        solve, solve_free, small_slot, small_phase = arrived(small, small_slot, small_phase, SMALL)
        old = warpgroup_mma_wait(1 if READS else 0, (old,))
        x = _valid(values.permute((1, 0)).load(SQUARE), runs, BY_TOKEN, PADDED)
        if not CHANNELS:
            old *= enters[None, :]
        x = gl.convert_layout(((x.to(gl.float32) - old) * rates[None, :]).to(dtype), LEFT)
        written = product_of(x, solve.permute((1, 0)), zeros, False)
        if CHANNELS:
            mbarrier.arrive(k_free)
        else:  # not before the products above, whose waits the assembler would then take for this
            fading = again(fading.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
        state *= fading
        writes, last_key, last_small = k, own_slot, small_slot
        if CHANNELS:
            last_key = slot
            writes, _, slot, phase = arrived(keys, slot, phase, KEYS)
        if READS:
            weights, _, small_slot, small_phase = arrived(small, small_slot, small_phase, SMALL)
            written, out = warpgroup_mma_wait(0, (written, out))
            if not CHANNELS:
                out *= (enters * SCALE)[None, :]
        else:
            written = warpgroup_mma_wait(0, (written,))
        near_written = written.to(dtype)
        if CHANNELS:
            state = product_of(gl.convert_layout(near_written, LEFT), writes, state, True)
        else:
            state = product_of(gl.convert_layout((written * leaves[None, :]).to(dtype), LEFT), writes, state, True)
        if READS:
            out = product_of(gl.convert_layout(near_written, LEFT), weights.permute((1, 0)), out, True)
            mbarrier.arrive(q_free)
        mbarrier.arrive(v_free)
        mbarrier.arrive(solve_free)
        if written_ptr is not None:
            hand_over(of_tokens.index(0), hand, FIRST, now, near_written)
        if READS:
            state, out = warpgroup_mma_wait(0, (state, out))
            near_out = out.to(dtype)
        else:
            state = warpgroup_mma_wait(0, (state,))
    if READS:
        hand_over(of_tokens.index(1), hand, SECOND, count - 1 & 1, near_out)
    if exits_ptr is not None:
        if part == SPLITS - 1:
            gl.store(_state_at(exits_ptr, head, column, h), state)


@gluon.jit
def _reverse(inputs, wanted, rings, hands, CHUNKS: gl.constexpr, N: gl.constexpr, SPLITS: gl.constexpr,
             SCALE: gl.constexpr):  # fmt: skip
    of_chunks, d_exits_ptr, starts_ptr = inputs
    d_states_ptr, du_ptr, d_entries_ptr, added_ptr = wanted
    beta_ptr, enters_ptr, leaves_ptr, whole_ptr, runs_ptr = of_chunks
    keys, small = rings
    of_states, of_tokens, ready, free = hands
    CHANNELS: gl.constexpr = enters_ptr is None
    PADDED: gl.constexpr = runs_ptr is not None
    PADDED_KEYS: gl.constexpr = PADDED and not CHANNELS  # with decays of channels in them they are 0 there
    dtype: gl.constexpr = of_tokens.dtype
    hand = ready, free
    head, n, column, part, begin, first, count = place(CHUNKS, N, SPLITS)
    h = gl.arange(0, WIDTH, BY_CHANNEL)
    zeros = gl.zeros([C, C], gl.float32, SQUARE)
    d_state = _first_state(starts_ptr, d_exits_ptr, head, part, SPLITS - 1, column, h, SPLITS)
    slot, phase, small_slot, small_phase = 0, 0, 0, 0
    last_key, last_queries = 0, 0
    following = _ahead(of_chunks, first + count - 1, begin + (count - 1) * C)
    for step in range(count):
        now = step & 1
        beta, enters, leaves, whole, runs = following
        later = gl.maximum(count - 2 - step, 0)
        following = _ahead(of_chunks, first + later, begin + later * C)
        near = d_state.to(dtype)
        left = gl.convert_layout(near, gl.DotOperandLayout(0, SQUARE, 2))
        own_slot = slot
        writes, writes_free, slot, phase = arrived(keys, slot, phase, KEYS)
        padded = _padding(runs, PADDED_KEYS)
        _clean(writes, runs, padded, PADDED_KEYS)
        d_written = product_of(left, writes.permute((1, 0)), zeros, False)
        if step > 0:  # what the chunk before leaves to do: now a product hides it
            mbarrier.arrive(keys[2].index(last_queries))
            mbarrier.arrive(keys[2].index(last_key))
        d_outs, d_out_free, small_slot, small_phase = arrived(small, small_slot, small_phase, SMALL)
        d_out = _valid(d_outs.permute((1, 0)).load(LEFT), runs, gl.SliceLayout(0, LEFT), PADDED)
        weights, weights_free, small_slot, small_phase = arrived(small, small_slot, small_phase, SMALL)
        back = gl.convert_layout(-beta * enters if not CHANNELS else -beta, BY_TOKEN)
        d_read = d_out
        if CHANNELS:
            fading = gl.convert_layout(whole, BY_CHANNEL)[None, :]
        else:
            fading = whole
            of_reads = gl.convert_layout(enters * SCALE, gl.SliceLayout(0, LEFT))
            d_read = (d_out.to(gl.float32) * of_reads[None, :]).to(dtype)
            leaves = gl.convert_layout(leaves, BY_TOKEN)
            d_written = warpgroup_mma_wait(0, (d_written,))
            d_written *= leaves[None, :]
        d_written = product_of(d_out, weights, d_written, True)
        if d_states_ptr is not None:
            hand_over(of_states.index(0), hand, OF_STATE, now, near)
        solve, solve_free, small_slot, small_phase = arrived(small, small_slot, small_phase, SMALL)
        last_queries, last_key = slot, own_slot
        q, _, slot, phase = arrived(keys, slot, phase, KEYS)
        _clean(q, runs, padded, PADDED_KEYS)
        if not CHANNELS:  # see `_walk`
            fading = again(fading.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
        d_state *= fading
        d_written = warpgroup_mma_wait(0, (d_written,))
        du = product_of(gl.convert_layout(d_written.to(dtype), LEFT), solve, zeros, False)
        d_state = product_of(d_read, q, d_state, True)
        mbarrier.arrive(d_out_free)
        mbarrier.arrive(weights_free)
        k = writes
        if CHANNELS:
            mbarrier.arrive(writes_free)
            last_key = slot
            k, _, slot, phase = arrived(keys, slot, phase, KEYS)
        du = warpgroup_mma_wait(1, (du,))
        d_state = product_of(gl.convert_layout((du * back[None, :]).to(dtype), LEFT), k, d_state, True)
        mbarrier.arrive(solve_free)
        if du_ptr is not None:
            hand_over(of_tokens.index(0), hand, FIRST, now, du.to(dtype))
        d_state = warpgroup_mma_wait(0, (d_state,))
    if d_entries_ptr is not None:
        if part == 0:
            gl.store(_state_at(d_entries_ptr, head, column, h), d_state)
    if added_ptr is not None:
        gl.store(_state_at(added_ptr, head * SPLITS + part, column, h), d_state)


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
    starts_ptr,  # [B, N, SPLITS, 128, 128] float32: states that parts start from; None for one part
    out_ptr,  # as in `triton_delta.delta_walk_kernel`; each may be None
    written_ptr,
    states_ptr,
    exits_ptr,
    N: gl.constexpr,
    KQ: gl.constexpr,
    KK: gl.constexpr,
    CHUNKS: gl.constexpr,
    SPLITS: gl.constexpr,
    SCALE: gl.constexpr,
    STORER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = k_desc.dtype
    rings, hands = (ring_of(dtype, KEYS, WIDTH), ring_of(dtype, SMALL, C)), hands_of(dtype)
    descs = q_desc, k_desc, writes_desc, v_desc, pairs_desc, solve_desc
    inputs = (beta_ptr, enters_ptr, leaves_ptr, whole_ptr, runs_ptr), entries_ptr, starts_ptr, exits_ptr
    wanted = states_ptr, written_ptr, out_ptr
    gl.warp_specialize(
        [
            (_walk, (inputs, wanted, rings, hands, CHUNKS, N, SPLITS, SCALE)),
            (store_results, (wanted, hands, CHUNKS, N, SPLITS, False)),
            (load_chunks, (descs, rings, CHUNKS, N, SPLITS, KQ, KK, False)),
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
    starts_ptr,  # [B, N, SPLITS, 128, 128] float32: gradients of the states after parts; None for one part, or with added_ptr
    du_ptr,  # as in `triton_delta.delta_reverse_kernel`; each may be None
    d_states_ptr,
    d_entries_ptr,
    added_ptr,
    N: gl.constexpr,
    KQ: gl.constexpr,
    KK: gl.constexpr,
    CHUNKS: gl.constexpr,
    SPLITS: gl.constexpr,
    SCALE: gl.constexpr,
    STORER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = k_desc.dtype
    rings, hands = (ring_of(dtype, KEYS, WIDTH), ring_of(dtype, SMALL, C)), hands_of(dtype)
    descs = q_desc, k_desc, writes_desc, d_out_desc, pairs_desc, solve_desc
    inputs = (beta_ptr, enters_ptr, leaves_ptr, whole_ptr, runs_ptr), d_exits_ptr, starts_ptr
    wanted = d_states_ptr, du_ptr, d_entries_ptr, added_ptr
    gl.warp_specialize(
        [
            (_reverse, (inputs, wanted, rings, hands, CHUNKS, N, SPLITS, SCALE)),
            (store_results, ((d_states_ptr, du_ptr, None), hands, CHUNKS, N, SPLITS, True)),
            (load_chunks, (descs, rings, CHUNKS, N, SPLITS, KQ, KK, True)),
        ],
        [4, 1],
        [STORER_REGISTERS, PRODUCER_REGISTERS],
    )
