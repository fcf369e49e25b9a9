"""State spaces in plain XLA: chunks of tokens with matmuls or a Hillis-Steele scan inside, and one state passed between
them.

This module defines one chunk; `kernels.engines.scan.chunks` runs it over all chunks, in both directions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.scan import chunks
from kernels.engines.scan.recurrence import resets
from kernels.framework.execute import backward_of
from kernels.ops.state_space.contract import check_activation, conv_op, v1_op, v2_op

EVERYWHERE: dict[str, Any] = {
    "platforms": {"cpu", "cuda", "rocm", "tpu"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "symbolic": {"B"},
    "name": "xla",
}
# Tokens per chunk. Mamba-2 trades larger matmuls against one stored state per chunk; Mamba holds a chunk of states.
CHUNK_V2, CHUNK_V1 = 64, 32


def _einsum(subscripts, *arrays):
    precision = jax.lax.Precision.HIGHEST if arrays[0].dtype == jnp.float32 else None
    return jnp.einsum(subscripts, *arrays, precision=precision, preferred_element_type=jnp.float32)


# -- Mamba-2 -----------------------------------------------------------------------------------------------------------


def _decays(log_decay, tokens):
    """Returns the factors of a chunk, float32, all exponentials of sums of `log_decay` [B, C, K, R]: between each two
    tokens [B, K, R, t, s], from the incoming state to each token [B, C, K, R], and from each token to the final state.

    Each sum between two tokens is computed separately. A difference of two running sums would lose a weak decay after a
    strong one.
    """
    C = log_decay.shape[1]
    index = jnp.arange(C)
    until = (index[:, None] >= index[None]).astype(jnp.float32)
    a = jnp.moveaxis(log_decay, 1, -1)  # [B, K, R, C]
    after = jnp.where(index[:, None] > index[None], a[..., None], 0)  # [.., u, s]: what u adds to the sum from s
    between = jnp.einsum("tu,bkrus->bkrts", until, after, precision=jax.lax.Precision.HIGHEST)
    incoming = jnp.moveaxis(jnp.cumsum(a, axis=-1), -1, 1)
    leaving = jnp.moveaxis(between[..., -1, :], -1, 1)
    sees = until.astype(bool)[None]
    if tokens.resets is None:
        return jnp.exp(jnp.where(sees[:, None, None], between, -jnp.inf)), jnp.exp(incoming), jnp.exp(leaving)
    run = jnp.cumsum(tokens.resets, axis=1)
    sees = sees & (run[:, :, None] == run[:, None])
    first, last = ((run == r)[..., None, None] for r in (0, run[:, -1:]))
    return (
        jnp.exp(jnp.where(sees[:, None, None], between, -jnp.inf)),
        jnp.exp(jnp.where(first, incoming, -jnp.inf)),
        jnp.exp(jnp.where(last, leaving, -jnp.inf)),
    )


def _prepare_v2(shared, xs, tokens):
    """Returns the parts of a chunk: masked attention among its tokens."""
    A, D = shared
    x, dt, B, C = xs
    (rows, length, heads, width), groups = x.shape, B.shape[2]
    each = (rows, length, groups, heads // groups)
    dt = dt.astype(jnp.float32)
    pair, incoming, leaving = _decays((dt * A.astype(jnp.float32)).reshape(each), tokens)
    dt_x = (dt[..., None] * x).reshape(*each, width)
    scores = _einsum("btkh,bskh->bkts", C, B)[:, :, None] * pair
    out = _einsum("bkrts,bskrp->btkrp", scores.astype(x.dtype), dt_x.astype(x.dtype))
    out = out if D is None else out + (D.astype(jnp.float32)[:, None] * x).reshape(dt_x.shape)
    contribution = _einsum("bskh,bskrp->bkrhp", B, (dt_x * leaving[..., None]).astype(x.dtype))
    return {
        "out": out,
        "C": C,
        "incoming": incoming,
        "given": contribution.reshape(rows, heads, *contribution.shape[3:]),
    }


def _advance_v2(parts, state):
    passing = parts["incoming"][:, -1].reshape(*state.shape[:2], 1, 1)
    return passing * state + parts["given"]


def _read_v2(_, parts, state):
    C, incoming = parts["C"], parts["incoming"]
    chunk_state = state.reshape(state.shape[0], *incoming.shape[2:], *state.shape[2:]).astype(C.dtype)
    out = parts["out"] + _einsum("btkh,bkrhp->btkrp", C, chunk_state) * incoming[..., None]
    return out.reshape(*out.shape[:2], -1, out.shape[-1]).astype(C.dtype)


# -- Mamba -------------------------------------------------------------------------------------------------------------


def _prepare_v1(shared, xs, tokens):
    """Returns the parts of a chunk. All its states exist at once, by a Hillis-Steele scan (1986): after step i each is
    the sum of what the last 2^i tokens added."""
    A = shared[0]
    x, dt, B = (y.astype(jnp.float32) for y in xs[:3])
    decay = jnp.exp(dt[..., None] * A.astype(jnp.float32))  # [B, C, F, H]
    if tokens.resets is not None:
        decay = jnp.where(tokens.resets[..., None, None], 0, decay)
    states = (dt * x)[..., None] * B[:, :, None]
    length, by = x.shape[1], 1
    while by < length:
        shift = ((0, 0), (by, 0), (0, 0), (0, 0))
        states += decay * jnp.pad(states[:, :-by], shift)
        decay *= jnp.pad(decay[:, :-by], shift, constant_values=1)
        by *= 2
    # Without the barrier a CPU recomputes the scan for each consumer: three times as long with the gradient.
    decay, states = jax.lax.optimization_barrier((decay, states))
    return {"decay": decay, "states": states, "x": xs[0], "C": xs[3]}


def _advance_v1(parts, state):
    return parts["states"][:, -1] + parts["decay"][:, -1] * state


def _read_v1(shared, parts, state):
    states, x, D = parts["states"] + parts["decay"] * state[:, None], parts["x"], shared[1]
    out = jnp.einsum("bcfh,bch->bcf", states, parts["C"].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    out = out if D is None else out + D.astype(jnp.float32) * x.astype(jnp.float32)
    return out.astype(x.dtype)


def _both_ways(step, state_shape):
    """Returns (forward, backward) of a state space, given the `Step` of one chunk."""

    def start(x, dt, A, B, segment_ids, initial_state, num_states, cfg):
        layout = chunks.Chunks(x.shape[0], x.shape[1], cfg, segment_ids, num_states)
        if initial_state is None:
            initial_state = jnp.zeros((x.shape[0], num_states, *state_shape(x, A, B)), jnp.float32)
        return layout, initial_state.astype(jnp.float32)

    def forward(x, dt, A, B, C, D, segment_ids, initial_state, num_states, cfg):
        layout, initial = start(x, dt, A, B, segment_ids, initial_state, num_states, cfg)
        final, out = chunks.forward(step, layout, initial, (x, dt, B, C), (A, D))
        return out, final

    def backward(saved, x, dt, A, B, C, D, segment_ids, initial_state, num_states, cfg):
        layout, initial = start(x, dt, A, B, segment_ids, initial_state, num_states, cfg)
        d_initial, (dx, ddt, dB, dC), (dA, dD) = chunks.backward(
            step, layout, initial, (x, dt, B, C), saved.d_final_state, saved.d_out, (A, D)
        )
        gradients = {"x": dx, "dt": ddt, "A": dA, "B": dB, "C": dC}
        gradients |= {} if D is None else {"D": dD}
        return gradients | ({} if initial_state is None else {"initial_state": d_initial})

    return forward, backward


v2_op.register(
    *_both_ways(chunks.Step(_prepare_v2, _advance_v2, _read_v2), lambda x, A, B: (x.shape[2], B.shape[3], x.shape[3])),
    **EVERYWHERE,
    **chunks.tunables(CHUNK_V2, lambda d: d["B"] * d["N"] * max(d["Hv"], CHUNK_V2)),
)
v1_op.register(
    *_both_ways(chunks.Step(_prepare_v1, _advance_v1, _read_v1), lambda x, A, B: A.shape),
    **EVERYWHERE,
    **chunks.tunables(CHUNK_V1, lambda d: d["B"] * d["F"] * d["H"], chunks.DiagonalConfig),
)


# -- the convolution ---------------------------------------------------------------------------------------------------


def _rows(x, index):
    """Returns x[b, index[b, t]] for distinct indices."""
    return jax.vmap(lambda row, positions: row.at[positions].get(unique_indices=True, mode="promise_in_bounds"))(
        x, index
    )


PADDING = (
    2**31 - 1
)  # key of padding, past that of every segment: of a few tokens there may be more sequences than tokens


def _arrange(segment_ids, num_states):
    """Returns (order, key, begin, count): positions of the tokens [B, T] sorted by segment, with padding at the end;
    the segment of each; and, [B, G], where the tokens that continue a state begin and how many they are."""
    valid = segment_ids >= 0
    if num_states == 1:
        key = jnp.where(valid, jnp.cumsum(resets(segment_ids), axis=1), PADDING)
    else:
        key = jnp.where(valid & (segment_ids < num_states), segment_ids, PADDING)
    order = jnp.argsort(key, axis=1, stable=True)
    key = jnp.take_along_axis(key, order, axis=1)
    edges = jax.vmap(lambda row: jnp.searchsorted(row, jnp.arange(num_states + 1)))(key)
    return order, key, edges[:, :-1], jnp.diff(edges)


def _conv(x, weight, bias, segment_ids, initial_state, activation, num_states):
    """Each tap is a shift of the tokens. Padding is moved to the end first, so that nothing separates two tokens of a
    segment."""
    check_activation(activation)
    (rows, length, width), taps = x.shape, weight.shape[1]
    weight = weight.astype(jnp.float32)
    state = jnp.zeros((rows, num_states, width, taps - 1), jnp.float32) if initial_state is None else initial_state
    state = jnp.swapaxes(state.astype(jnp.float32), 2, 3)  # [B, G, W - 1, F]
    if segment_ids is None and num_states > 1:
        segment_ids = jnp.zeros((rows, length), jnp.int32)  # all tokens continue the first state
    order = key = None
    begin, count = jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), length)
    if segment_ids is not None:
        order, key, begin, count = _arrange(segment_ids, num_states)
        x = jnp.where((key < PADDING)[..., None], _rows(x, order), 0)
    out = x * weight[:, -1]
    for back in range(1, min(taps, length)):
        before = jnp.pad(x[:, :-back], ((0, 0), (back, 0), (0, 0)))
        if key is not None:
            same = key == jnp.pad(key[:, :-back], ((0, 0), (back, 0)), constant_values=-1)
            before = jnp.where(same[..., None], before, 0)
        out += before * weight[:, taps - 1 - back]
    if taps > 1:
        out += _of_state(state, weight, begin, count, length)
        final = _last_inputs(x, state, key, begin, count, num_states)
    else:
        final = state
    out = out if bias is None else out + bias.astype(jnp.float32)
    out = (jax.nn.silu(out) if activation else out).astype(x.dtype)
    if order is not None and key is not None:
        out = _rows(jnp.where((key < PADDING)[..., None], out, 0), jnp.argsort(order, axis=1))
    return out, jnp.swapaxes(final, 2, 3)


def _of_state(state, weight, begin, count, length):
    """Returns [B, T, F]: the contribution of a state [B, G, W - 1, F] to the first W - 1 tokens after it."""
    rows, states, num_taps, width = state.shape
    padded = jnp.pad(state, ((0, 0), (0, 0), (0, num_taps), (0, 0)))
    seen = jnp.zeros_like(state)
    for j in range(num_taps):  # token i sees state[i:], so its tap j is state[i + j]
        seen += padded[:, :, j : j + num_taps] * weight[:, j]
    index = jnp.arange(num_taps)
    where = jnp.where(index < count[..., None], begin[..., None] + index, length)
    where = jnp.broadcast_to(where, (rows, states, num_taps)).reshape(rows, -1)
    seen = seen.reshape(rows, -1, width)
    zeros = jnp.zeros((length, width), jnp.float32)
    return jax.vmap(lambda index, s: zeros.at[index].add(s, mode="drop"))(where, seen)


def _last_inputs(x, state, key, begin, count, num_states):
    """Returns [B, G, W - 1, F]: the last inputs of each sequence, preceded by those of its state if they are fewer."""
    rows, length = x.shape[:2]
    num_taps = state.shape[2]
    continues = jnp.ones((1, 1, 1, 1), bool)
    if key is not None and num_states == 1:  # the state is that of the last segment
        end = jnp.sum(key < PADDING, axis=1, keepdims=True)
        last = jnp.take_along_axis(key, jnp.maximum(end - 1, 0), axis=1)
        last = jnp.where(end > 0, last, 0)
        begin = jax.vmap(jnp.searchsorted)(key, last)
        count, continues = end - begin, (last == 0)[..., None, None]
    back = jnp.arange(num_taps) - num_taps
    in_sequence = jnp.broadcast_to((count[..., None] + back >= 0), (rows, num_states, num_taps))
    position = jnp.broadcast_to((begin + count)[..., None] + back, in_sequence.shape).clip(0, length - 1)
    old = jnp.broadcast_to(count[..., None] + jnp.arange(num_taps), in_sequence.shape).clip(0, num_taps - 1)
    tokens = jax.vmap(lambda row, position: row[position])(x, position).astype(jnp.float32)
    before = jnp.where(continues, jnp.take_along_axis(state, old[..., None], axis=2), 0)
    return jnp.where(in_sequence[..., None], tokens, before)


conv_op.register(_conv, backward_of(conv_op, _conv), **EVERYWHERE)
