"""Recurrent cells and RWKV-4's time mix in plain XLA.

Cells: matmuls over tokens are hoisted out of the loop; inside it only the one with `weight_hh` remains, forward and
backward. RWKV-4: chunks, in which a Hillis-Steele scan computes the sums of all tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.scan import chunks
from kernels.ops.recurrent.contract import EMPTY, FORGET, cell_of, op, rwkv4_op
from kernels.ops.recurrent.directions import directions, dot, gradients_of_weights, merged

EVERYWHERE: dict[str, Any] = {
    "platforms": {"cpu", "cuda", "rocm", "tpu"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "symbolic": {"B"},
}
CHUNK = 64


# -- cells -------------------------------------------------------------------------------------------------------------


def _where(condition, a, b):
    return b if condition is None else jnp.where(condition.reshape(-1, *(1,) * (b.ndim - 1)), a, b)


def _run(inputs, w, tokens, initial, cell, keep):
    """Returns (final state [B, G, n, F], h after each token [T, B, F], or with `keep` the state before each one)."""
    of_inputs = dot("btd,gd->tbg", inputs, w["weight_ih"]) + w.get("bias_ih", 0)
    bias, G, rows = w.get("bias_hh", 0), initial.shape[1], jnp.arange(initial.shape[0])

    def step(carry, token):
        state, finals = carry
        x, now = token
        fresh = 0.0 if G == 1 else initial[rows, jnp.clip(now.owner, 0, G - 1)]
        before = _where(now.begins, fresh, state)
        after = cell(x, dot("bf,gf->bg", before[:, 0], w["weight_hh"]) + bias, before)
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
    of_inputs = dot("btd,gd->tbg", inputs, w["weight_ih"]) + w.get("bias_ih", 0)
    of_hidden = dot("tbf,gf->tbg", before[:, :, 0], w["weight_hh"]) + w.get("bias_hh", 0)
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
        d_old = d_old.at[:, 0].add(dot("bg,gf->bf", d_gates, w["weight_hh"]))
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
    d_inputs, d_weights = gradients_of_weights(d_x, d_gates, inputs, before[:, :, 0], w)
    return d_inputs, d_weights, d_initial if several else d_state[:, None]


def forward(inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states):
    outs, finals, cell = [], [], cell_of(cell_type, activation)
    arguments = (inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states)
    for of in directions(*arguments):
        final, out = _run(of.inputs, of.weights, of.tokens, of.initial, cell, keep=False)
        outs.append(jnp.moveaxis(out, 0, 1)[:, :: of.way])
        finals.append(final)
    return jnp.concatenate(outs, axis=-1).astype(inputs.dtype), jnp.concatenate(finals, axis=2)


def backward(saved, inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states):
    cell, parts = cell_of(cell_type, activation), []
    arguments = (inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states)
    ways = list(directions(*arguments))
    d_outs = jnp.split(saved.d_out.astype(jnp.float32), len(ways), axis=-1)
    d_finals = jnp.split(saved.d_final_state.astype(jnp.float32), len(ways), axis=2)
    for of, d_out, d_final in zip(ways, d_outs, d_finals, strict=True):
        x = of.inputs, of.weights, of.tokens, of.initial
        parts.append((of, *_run_back(*x, cell, cell_type != "gru", d_out[:, :: of.way], d_final)))
    return merged(parts, segment_ids, initial_state)


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
