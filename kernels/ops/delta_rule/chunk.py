"""The mathematics of one chunk of a delta rule: its transition of the state and its outputs, as matmuls.

The recurrence of all operations in this folder is S_t = diag(e^{g_t}) S_{t-1} + b_t u_t^T + k_t v_t^T, where u_t is a
read of the state, u_t = S_{t-1}^T a_t ("before" the decay) or (diag(e^{g_t}) S_{t-1})^T a_t ("after" it). The reads
among the tokens of a chunk are a strictly triangular system, whose inverse is computed in float32. README.md derives
it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Tokens per sub-chunk. Per-channel decays of pairs within one are summed individually.
SUB_CHUNK = 16


def _shifted(x: jax.Array, axis: int) -> jax.Array:
    """Returns x shifted by one along a (negative) axis, with 0 first."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (1, 0)
    return jax.lax.slice_in_dim(jnp.pad(x, pad), 0, x.shape[axis], axis=axis % x.ndim)


def _sums_between(x: jax.Array) -> jax.Array:
    """Returns [..., t, i, H]: the sum of x [..., s, H] over i < s <= t, each summed separately.

    A difference of two cumulative sums would lose the digits of a small sum after a large one, and turn infinities into
    NaN.
    """
    s = jnp.arange(x.shape[-2])
    later = (s[:, None] > s)[..., None]
    return jnp.cumsum(jnp.where(later, x[..., :, None, :], 0), axis=-3)


class Decay:
    """The decays of a chunk, from log decays g: [..., C, H], [..., C, 1] if channels share one, or None.

    Every exponent is a sum of g over an interval, so for g <= 0 none is positive, and nothing is divided by a decay.
    """

    def __init__(self, g: jax.Array | None, precision: Any) -> None:
        self.g, self.precision = g, precision

    def since_start(self, before: bool = False) -> jax.Array | float:
        """Returns the decay from the start of the chunk to each token, including its own unless `before`."""
        if self.g is None:
            return 1.0
        total = jnp.cumsum(self.g, axis=-2)
        return jnp.exp(_shifted(total, -2) if before else total)

    def until_end(self) -> jax.Array | float:
        """Returns the decay of each token's write until the end of the chunk."""
        if self.g is None:
            return 1.0
        return jnp.exp(jnp.flip(_shifted(jnp.cumsum(jnp.flip(self.g, -2), axis=-2), -2), -2))

    def whole(self) -> jax.Array | float:
        """Returns the decay of the incoming state over the chunk, [..., H or 1, 1]."""
        return 1.0 if self.g is None else jnp.exp(jnp.sum(self.g, axis=-2))[..., None]

    def pairs(self, x: jax.Array, y: jax.Array, before: bool = False) -> jax.Array:
        """Returns [..., t, i]: x_t^T diag(decay from i to t) y_i for i < t; also i = t, unless `before`. Other entries
        are undefined.

        Args:
          x: reads, y: writes, [..., C, H].
          before: whether x_t reads before the decay of token t.
        """
        dot = functools.partial(jnp.einsum, precision=self.precision)
        if self.g is None:
            return dot("...th,...ih->...ti", x, y)
        if self.g.shape[-1] == 1:
            between = _sums_between(self.g)[..., 0]
            return dot("...th,...ih->...ti", x, y) * jnp.exp(_shifted(between, -2) if before else between)
        # As few dims as possible: see kernels/engines/scan/chunks.py.
        lead, (C, H) = x.shape[:-2], x.shape[-2:]
        c = min(SUB_CHUNK, C)
        x, y, g = (z.reshape(-1, C // c, c, H) for z in (x, y, self.g))
        # Within a sub-chunk each pair has its own exponents.
        between = _sums_between(g)
        within = jnp.exp(_shifted(between, -3) if before else between)
        near = jnp.sum(x[..., :, None, :] * y[..., None, :, :] * within, axis=-1)
        blocks = jnp.eye(C // c, dtype=near.dtype)
        near = near[..., :, :, None, :] * blocks[:, None, :, None]
        # Across sub-chunks: to the end of the first, over those between, and from the start of the last.
        total = jnp.cumsum(g, axis=-2)
        x = x * jnp.exp(_shifted(total, -2) if before else total)
        to_end = jnp.flip(_shifted(jnp.cumsum(jnp.flip(g, -2), axis=-2), -2), -2)
        over = _shifted(_sums_between(total[..., -1, :]), -3)
        I = jnp.arange(C // c)
        earlier = (I[:, None] > I)[:, :, None, None]
        y = jnp.where(
            earlier, y[..., None, :, :, :] * jnp.exp(to_end[..., None, :, :, :] + over[..., :, :, None, :]), 0
        )
        far = dot("...xth,...xyih->...xtyi", x, y)
        return (near + far).reshape(*lead, C, C)


class Parts(NamedTuple):
    """A chunk as linear maps of its incoming state S [B, N, H, Hv].

    What its tokens read of all earlier ones is u = read S + local [B, N, C, Hv]. The final state is
    passing * S + write^T u + added, and the outputs are query S + out.

    Attributes:
      read, write, query: [B, N, C, H]; local, out: [B, N, C, Hv].
      passing: [B, N, H or 1, 1], not a matrix, so that a pure decay is not rounded by a product.
      added: [B, N, H, Hv] or None.
    """

    read: jax.Array
    local: jax.Array
    write: jax.Array
    passing: jax.Array
    added: jax.Array | None
    query: jax.Array
    out: jax.Array


def inverse(A: jax.Array) -> jax.Array:
    """Returns (I - A)^{-1} [..., C, C] for A strictly lower triangular and C a power of two.

    Given the inverses P, Q of two diagonal blocks with A21 below, the inverse of both is [[P, 0], [Q A21 P, Q]]:
    forward substitution by blocks, using only matmuls, always in full float32.
    """
    shape, C = A.shape, A.shape[-1]
    A = A.reshape(-1, C, C)
    inverted, size = jnp.ones((A.shape[0], C, 1, 1), A.dtype), 1
    multiply = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    while size < C:
        m, w = C // (2 * size), 2 * size
        on_diagonal = jnp.eye(m, dtype=bool)[:, None, :, None]
        diagonal = jnp.sum(jnp.where(on_diagonal, A.reshape(-1, m, w, m, w), 0), axis=-2)
        P, Q = inverted[..., 0::2, :, :], inverted[..., 1::2, :, :]
        between = multiply(multiply(Q, diagonal[..., size:, :size]), P)
        upper = jnp.concatenate([P, jnp.zeros_like(P)], axis=-1)
        inverted, size = jnp.concatenate([upper, jnp.concatenate([between, Q], axis=-1)], axis=-2), w
    return inverted.reshape(shape)


def prepare(
    resets: jax.Array | None,
    g: jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array | None = None,
    *,
    precision: Any,
) -> Parts:
    """Returns a chunk's maps of its incoming state. All float32.

    Args:
      resets: bool [B, C], whether the state is reset before a token; None: nowhere.
      g: [B, N, C, 1 or H], log decays.
      q, k, a: [B, N, C, H]; v: [B, N, C, Hv].
      b: written with u_t, [B, N, C, H], for reads before the decay. None: k writes u_t + v_t, and a reads after the
        decay, as in a delta rule: one triangular solve less.
    """
    dot = functools.partial(jnp.einsum, precision=precision)
    decay, before = Decay(g, precision), b is not None
    t = jnp.arange(q.shape[-2])
    strictly, until, enters, leaves, passes = t[:, None] > t, t[:, None] >= t, True, True, True
    if resets is not None:  # tokens interact only between resets
        run = jnp.cumsum(resets, axis=1)
        same = (run[:, :, None] == run[:, None, :])[:, None]
        strictly, until = same & strictly, same & until
        enters, leaves = ((run == of)[:, None, :, None] for of in (0, run[:, -1:]))
        passes = (run[:, -1] == 0)[:, None, None, None]

    def between(x: jax.Array, y: jax.Array, mask: jax.Array, before: bool = False) -> jax.Array:
        return jnp.where(mask, decay.pairs(x, y, before), 0)

    def leaving(x: jax.Array) -> jax.Array:
        return jnp.where(leaves, x * decay.until_end(), 0)

    write = k if b is None else b
    solve = inverse(between(a, write, strictly, before))
    read = dot("bnti,bnih->bnth", solve, jnp.where(enters, a * decay.since_start(before), 0))
    local = v if b is None else dot("bnti,bniv->bntv", between(a, k, strictly, True), v)
    local = dot("bnti,bniv->bntv", solve, local)
    seen = between(q, write, until)
    query = jnp.where(enters, q * decay.since_start(), 0) + dot("bnti,bnih->bnth", seen, read)
    out, added = dot("bnti,bniv->bntv", seen, local), None
    if b is not None:
        out += dot("bnti,bniv->bntv", between(q, k, until), v)
        added = dot("bnth,bntv->bnhv", leaving(k), v)
    passing = jnp.where(passes, jnp.ones((*k.shape[:2], 1, 1), jnp.float32) * decay.whole(), 0)
    return Parts(read, local, leaving(write), passing, added, query, out)


def advance(parts: Parts, state: jax.Array, *, precision: Any) -> jax.Array:
    """Returns the state after a chunk."""
    u = parts.local + jnp.einsum("bnth,bnhv->bntv", parts.read, state, precision=precision)
    state = parts.passing * state + jnp.einsum("bnth,bntv->bnhv", parts.write, u, precision=precision)
    return state if parts.added is None else state + parts.added


def read(parts: Parts, state: jax.Array, *, precision: Any) -> jax.Array:
    """Returns o [B, N, C, Hv], o_t = S_t^T q_t, given the state before the chunk."""
    return parts.out + jnp.einsum("bnth,bnhv->bntv", parts.query, state, precision=precision)
