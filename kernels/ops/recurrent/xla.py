"""Recurrent cells and RWKV-4's time mix in plain XLA.

Cells: matmuls over tokens are hoisted out of the loop; inside it only the one with `weight_hh` remains, forward and
backward. RWKV-4: chunks, in which a Hillis-Steele scan computes the sums of all tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.engines.scan import chunks
from kernels.engines.scan.recurrence import last_valid_before, resets
from kernels.ops.recurrent.contract import CELLS, EMPTY, FORGET, cell_of, check_weights, of_direction, op, rwkv4_op

EVERYWHERE: dict[str, Any] = {
    "platforms": {"cpu", "cuda", "rocm", "tpu"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "symbolic": {"B"},
}
CHUNK = 64


def _dot(subscripts, a, b):
    """Returns a product of arrays of the same dtype, in the second's, accumulated in float32."""
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a.astype(b.dtype), b, precision=precision, preferred_element_type=jnp.float32)


# -- cells -------------------------------------------------------------------------------------------------------------


class _Tokens(NamedTuple):
    """Per token, [T, B]; all None if each row is one segment.

    Attributes:
      valid: whether it is not padding.
      begins: whether the state is reset before it.
      owner: with several states, the index of its state; `num_states` for none.
      ends: with several states, whether it is the last of its segment.
    """

    valid: Any = None
    begins: Any = None
    owner: Any = None
    ends: Any = None


def _tokens(segment_ids, num_states):
    if segment_ids is None:
        return _Tokens()
    valid = segment_ids >= 0
    if num_states == 1:
        return _Tokens(valid.T, resets(segment_ids).T)
    valid &= segment_ids < num_states
    ids = jnp.where(valid, segment_ids, -1)
    begins = valid & (ids != last_valid_before(ids))
    ends = valid & (ids != last_valid_before(ids[:, ::-1])[:, ::-1])
    return _Tokens(valid.T, begins.T, jnp.where(valid, ids, num_states).T, ends.T)


def _where(condition, a, b):
    return b if condition is None else jnp.where(condition.reshape(-1, *(1,) * (b.ndim - 1)), a, b)


def _run(inputs, w, tokens, initial, cell, keep):
    """Returns (final state [B, G, n, F], h after each token [T, B, F], or with `keep` the state before each one)."""
    of_inputs = _dot("btd,gd->tbg", inputs, w["weight_ih"]) + w.get("bias_ih", 0)
    bias, G, rows = w.get("bias_hh", 0), initial.shape[1], jnp.arange(initial.shape[0])

    def step(carry, token):
        state, finals = carry
        x, now = token
        fresh = 0.0 if G == 1 else initial[rows, jnp.clip(now.owner, 0, G - 1)]
        before = _where(now.begins, fresh, state)
        after = cell(x, _dot("bf,gf->bg", before[:, 0], w["weight_hh"]) + bias, before)
        state = after if now.valid is None else _where(now.valid, after, before)
        out = state[:, 0] if now.valid is None else _where(now.valid, state[:, 0], jnp.zeros_like(state[:, 0]))
        if G > 1:
            finals = finals.at[rows, now.owner].set(state, mode="drop")
        return (state, finals), before if keep else out

    several = G > 1
    first = (jnp.zeros_like(initial[:, 0]) if several else initial[:, 0], initial if several else None)
    (state, finals), states = jax.lax.scan(step, first, (of_inputs, tokens))
    return (finals if several else state[:, None]), states


def _run_back(inputs, w, tokens, initial, cell, one_gate, d_out, d_final):
    """Returns (d_inputs, d_weights, d_initial). The loop computes the gradients of the gates; those of the weights are
    one matmul each after it."""
    _, before = _run(inputs, w, tokens, initial, cell, keep=True)
    of_inputs = _dot("btd,gd->tbg", inputs, w["weight_ih"]) + w.get("bias_ih", 0)
    of_hidden = _dot("tbf,gf->tbg", before[:, :, 0], w["weight_hh"]) + w.get("bias_hh", 0)
    G, rows, several = initial.shape[1], jnp.arange(initial.shape[0]), initial.shape[1] > 1

    def step(carry, token):
        d_state, d_initial = carry
        x, h, old, d_h, now = token
        if several:
            d_state = _where(now.ends, d_final[rows, jnp.clip(now.owner, 0, G - 1)], d_state)
        d_after = d_state.at[:, 0].add(d_h)
        if now.valid is not None:
            d_after = _where(now.valid, d_after, jnp.zeros_like(d_after))
        d_x, d_gates, d_old = jax.vjp(cell, x, h, old)[1](d_after)
        d_old = d_old.at[:, 0].add(_dot("bg,gf->bf", d_gates, w["weight_hh"]))
        if now.valid is not None:
            d_old = _where(now.valid, d_old, d_state)
        if several:
            d_initial = d_initial.at[rows, jnp.where(now.begins, now.owner, G)].set(d_old, mode="drop")
        # Both terms of a sum have the same gradient.
        return (_where(now.begins, 0.0, d_old), d_initial), (d_x,) if one_gate else (d_x, d_gates)

    # A sequence without tokens ends in its initial state, and so does its gradient.
    last = (jnp.zeros_like(d_final[:, 0]), d_final) if several else (d_final[:, 0], None)
    xs = (of_inputs, of_hidden, before, jnp.moveaxis(d_out, 0, 1), tokens)
    (d_state, d_initial), gates = jax.lax.scan(step, last, xs, reverse=True)
    d_x, d_gates = gates[0], gates[-1]
    d = {
        "weight_ih": _dot("tbg,btd->gd", d_x, inputs),
        "weight_hh": _dot("tbg,tbf->gf", d_gates, before[:, :, 0].astype(inputs.dtype)),
        "bias_ih": jnp.sum(d_x, axis=(0, 1)),
        "bias_hh": jnp.sum(d_gates, axis=(0, 1)),
    }
    d_inputs = jnp.moveaxis(_dot("tbg,gd->tbd", d_x, w["weight_ih"]), 0, 1)
    return d_inputs, {n: d[n] for n in w}, d_initial if several else d_state[:, None]


def _directions(inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states):
    """Yields (suffix of the names, step in time, rows of the state, arguments of `_run`) for each direction."""
    F = check_weights(weights, inputs.shape[2], cell_type, activation, bidirectional)
    n, cell = CELLS[cell_type][1], cell_of(cell_type, activation)
    for i, end in enumerate(("", "_reverse") if bidirectional else ("",)):
        way, rows = -1 if end else 1, slice(i * n, (i + 1) * n)
        ids = None if segment_ids is None else segment_ids[:, ::way]
        zeros = jnp.zeros((inputs.shape[0], num_states, n, F), jnp.float32)
        layer_state = zeros if initial_state is None else initial_state[:, :, rows]
        tokens = _tokens(ids, num_states)
        x = inputs[:, ::way]
        x = x if ids is None else jnp.where((ids >= 0)[..., None], x, 0)
        yield end, way, (x, of_direction(weights, end), tokens, layer_state.astype(jnp.float32), cell)


def forward(inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states):
    outs, finals = [], []
    ways = _directions(inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states)
    for _, way, arguments in ways:
        final, out = _run(*arguments, keep=False)
        outs.append(jnp.moveaxis(out, 0, 1)[:, ::way])
        finals.append(final)
    return jnp.concatenate(outs, axis=-1).astype(inputs.dtype), jnp.concatenate(finals, axis=2)


def backward(saved, inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states):
    d_inputs, d_weights, d_initial = 0, {}, []
    ways = list(
        _directions(inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states)
    )
    d_outs = jnp.split(saved.d_out.astype(jnp.float32), len(ways), axis=-1)
    d_finals = jnp.split(saved.d_final_state.astype(jnp.float32), len(ways), axis=2)
    for (end, way, arguments), d_out, d_final in zip(ways, d_outs, d_finals, strict=True):
        dx, dw, d_state = _run_back(*arguments, cell_type != "gru", d_out[:, ::way], d_final)
        d_inputs += dx[:, ::way]
        d_weights |= {n + end: g for n, g in dw.items()}
        d_initial.append(d_state)
    if segment_ids is not None:
        d_inputs = jnp.where((segment_ids >= 0)[..., None], d_inputs, 0)
    gradients = {"inputs": d_inputs, "weights": d_weights}
    return gradients | ({} if initial_state is None else {"initial_state": jnp.concatenate(d_initial, axis=2)})


op.register(forward, backward, name="xla", **EVERYWHERE)


# -- RWKV-4 ------------------------------------------------------------------------------------------------------------


def _joined(before, decay, after):
    """Combines the sums (a, b, p) of `before`, decayed, with those of `after`."""
    (a, b, p), (c, d, q) = before, after
    p = p + decay
    top = jnp.maximum(p, q)
    first, then = jnp.exp(p - top), jnp.exp(q - top)
    return first * a + then * c, first * b + then * d, top


def _prepare(shared, xs, tokens):
    """Returns the parts of a chunk by a Hillis-Steele scan (1986): after step i a token has the sums over the last 2^i
    tokens, including its own; at the end, over all from the start of the chunk."""
    w = shared[0].astype(jnp.float32)
    k, v = (y.astype(jnp.float32) for y in xs)
    decay = jnp.broadcast_to(-jnp.exp(w), k.shape)
    sums = (v, jnp.ones_like(k), k)
    if tokens.valid is not None:
        valid = tokens.valid[..., None]
        decay = jnp.where(valid, decay, 0)
        sums = (v, valid.astype(jnp.float32), jnp.where(valid, k, EMPTY))
    if tokens.resets is not None:
        decay = jnp.where(tokens.resets[..., None], FORGET, decay)
    length, by = k.shape[1], 1

    def earlier(x, fill):
        return jnp.pad(x[:, :-by], ((0, 0), (by, 0), (0, 0)), constant_values=fill)

    while by < length:
        before = tuple(earlier(x, fill) for x, fill in zip(sums, (0, 0, EMPTY)))
        sums = _joined(before, decay, sums)
        decay = decay + earlier(decay, 0)
        by *= 2
    resets = None if tokens.resets is None else tokens.resets[..., None]
    return {"sums": sums, "decay": decay, "resets": resets, "k": xs[0], "v": xs[1]}


def _incoming(state):
    return tuple(state[:, i][:, None] for i in range(3))


def _advance(parts, state):
    last = _joined(_incoming(state), parts["decay"][:, -1:], tuple(x[:, -1:] for x in parts["sums"]))
    return jnp.concatenate(last, axis=1)


def _read(shared, parts, state):
    incoming, u = _incoming(state), shared[1].astype(jnp.float32)
    k, v = (parts[name].astype(jnp.float32) for name in "kv")
    sums = _joined(incoming, parts["decay"], parts["sums"])
    a, b, p = (jnp.concatenate([first, x[:, :-1]], axis=1) for first, x in zip(incoming, sums))
    if parts["resets"] is not None:
        p = jnp.where(parts["resets"], EMPTY, p)
    top = jnp.maximum(p, u + k)
    before, weight = jnp.exp(p - top), jnp.exp(u + k - top)
    out = (before * a + weight * v) / (before * b + weight)
    return out.astype(parts["k"].dtype)


_STEP = chunks.Step(_prepare, _advance, _read)


def _start(k, segment_ids, initial_state, num_states, cfg):
    rows, length, width = k.shape
    layout = chunks.Chunks(rows, length, cfg, segment_ids, num_states)
    if initial_state is None:
        empty = jnp.asarray([0, 0, EMPTY], jnp.float32)[:, None]
        initial_state = jnp.broadcast_to(empty, (rows, num_states, 3, width))
    return layout, initial_state.astype(jnp.float32)


def rwkv4_forward(w, u, k, v, segment_ids, initial_state, num_states, cfg):
    final, out = chunks.forward(_STEP, *_start(k, segment_ids, initial_state, num_states, cfg), (k, v), (w, u))
    return out, final


def rwkv4_backward(saved, w, u, k, v, segment_ids, initial_state, num_states, cfg):
    layout, initial = _start(k, segment_ids, initial_state, num_states, cfg)
    d_initial, (dk, dv), (dw, du) = chunks.backward(
        _STEP, layout, initial, (k, v), saved.d_final_state, saved.d_out, (w, u)
    )
    gradients = {"w": dw, "u": du, "k": dk, "v": dv}
    return gradients | ({} if initial_state is None else {"initial_state": d_initial})


rwkv4_op.register(
    rwkv4_forward,
    rwkv4_backward,
    name="xla",
    **EVERYWHERE,
    **chunks.tunables(CHUNK, lambda d: d["B"] * d["F"], chunks.DiagonalConfig),
)
