"""Linear attention in chunks of matmuls. No exponent is positive if no log decay is, and nothing is divided by a decay.

The decay from token s to token t is the exponential of a sum of log decays, never of a difference of two sums, so that
a small decay next to a large one keeps its digits. Sums are matmuls with triangles of ones, in full float32.

- One decay per head: the sums of all pairs are a matrix [C, C], like the scores.
- One decay per channel: a chunk is halved recursively. What the first half of a block contributes to the second crosses
  the boundary between them, so the decay is exp(after_s) · exp(before_t), from s to the boundary and from there to t.
  Both are at most 1, and all pairs across a boundary are one matmul.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.engines.scan import chunks
from kernels.ops.linear_attention.contract import op

_CHUNK = 64


def _faded(x, log_decay):
    return x if log_decay is None else x * jnp.exp(log_decay)


def _sums(subscripts, ones, log_decay):
    return jnp.einsum(subscripts, ones, log_decay, precision=jax.lax.Precision.HIGHEST)


class _Decay:
    """Log decays [..., C, h] of consecutive tokens.

    Attributes:
      passing: decay of the state by each token.
      reading: the part of it that the token's own query sees; None: no part.
    """

    def __init__(self, passing, reading):
        self.passing, self.reading = passing, reading

    def before(self):
        """Returns the sums from before the first token to where each token's query reads."""
        C = self.passing.shape[-2]
        sums = _sums("tj,...jh->...th", jnp.tril(jnp.ones((C, C), jnp.float32), -1), self.passing)
        return sums if self.reading is None else sums + self.reading

    def after(self):
        """Returns the sums from just after each token to the end."""
        C = self.passing.shape[-2]
        return _sums("sj,...jh->...sh", jnp.triu(jnp.ones((C, C), jnp.float32), 1), self.passing)

    def whole(self):
        return jnp.sum(self.passing, axis=-2)

    def between(self):
        """Returns the sums [..., C, C] from just after token s to where the query of token t > s reads, for h = 1."""
        C = self.passing.shape[-2]
        strict = jnp.tril(jnp.ones((C, C), jnp.float32), -1)
        up_to = strict * self.passing[..., None, :, 0]
        if self.reading is not None:
            up_to = up_to + jnp.eye(C) * self.reading[..., None, :, 0]
        return _sums("js,...tj->...ts", strict, up_to)

    def halves(self, m):
        """Returns (before of the second, after of the first) half of each block of 2 m tokens, [..., n, m, h]."""
        first = _Decay(_half(self.passing, m, 0), None)
        second = _Decay(_half(self.passing, m, 1), None if self.reading is None else _half(self.reading, m, 1))
        return second.before(), first.after()


def _half(x, m, which):
    """Returns the first or second half of each block of 2 m tokens in x [..., C, h], as [..., n, m, h]."""
    return x.reshape(*x.shape[:-2], -1, 2, m, x.shape[-1])[..., which, :, :]


def _step_of(softmax_scale, precision):
    """Returns the `Step` of a chunk, see `kernels.engines.scan.chunks`."""

    def mm(subscripts, *operands):
        return jnp.einsum(subscripts, *operands, precision=precision, preferred_element_type=jnp.float32)

    def by_matrix(q, k, v, decay):
        """Returns the contribution of earlier tokens of the chunk to each token, with one decay per head."""
        C = q.shape[-2]
        scores = mm("...qh,...kh->...qk", q, k)
        earlier = jnp.tril(jnp.ones((C, C), bool), -1)
        scores = scores if decay is None else scores * jnp.exp(jnp.where(earlier, decay.between(), 0))
        return mm("...qk,...kv->...qv", jnp.where(earlier, scores, 0), v)

    def by_halves(q, k, v, decay_k, decay_v):
        """Returns the same with decays per channel."""
        out, m = 0, 1
        while m < q.shape[-2]:
            before, after = (None, None) if decay_k is None else decay_k.halves(m)
            before_v, after_v = (None, None) if decay_v is None else decay_v.halves(m)
            scores = mm("...qh,...kh->...qk", _faded(_half(q, m, 1), before), _faded(_half(k, m, 0), after))
            from_keys = _faded(mm("...qk,...kv->...qv", scores, _faded(_half(v, m, 0), after_v)), before_v)
            out = out + jnp.stack([jnp.zeros_like(from_keys), from_keys], axis=-3).reshape(*q.shape[:-1], v.shape[-1])
            m *= 2
        return out

    def prepare(shared, x, tokens):
        N = x["query"].shape[2]
        # [B, N, C, ...] from here on: heads are a batch of matmuls.
        x = {n: jnp.moveaxis(y.astype(jnp.float32), 2, 1) for n, y in x.items()}
        q = x["query"] * softmax_scale
        k, v = (jnp.repeat(x[n], N // x[n].shape[1], axis=1) for n in ("key", "value"))
        bonus = shared.get("bonus")
        bonus_key = k if bonus is None else k * bonus.astype(jnp.float32)[:, None]
        out = jnp.sum(q * bonus_key, axis=-1, keepdims=True) * v
        decay_k, decay_v = _decays(shared, x, tokens, reads_after=bonus is None)
        if decay_v is None and (decay_k is None or decay_k.passing.shape[-1] == 1):
            out = out + by_matrix(q, k, v, decay_k)
        else:
            out = out + by_halves(q, k, v, decay_k, decay_v)
        return {
            "out": out,
            "query": _faded(q, decay_k and decay_k.before()),
            "reading_v": decay_v and decay_v.before(),
            "given": mm(
                "bnch,bncv->bnhv", _faded(k, decay_k and decay_k.after()), _faded(v, decay_v and decay_v.after())
            ),
            "passing_k": decay_k and decay_k.whole()[..., None],
            "passing_v": decay_v and decay_v.whole()[..., None, :],
        }

    def advance(parts, state):
        return _faded(_faded(state, parts["passing_k"]), parts["passing_v"]) + parts["given"]

    def read(_, parts, state):
        seen = _faded(mm("bnch,bnhv->bncv", parts["query"], state), parts["reading_v"])
        return jnp.moveaxis(parts["out"] + seen, 1, 2)

    return chunks.Step(prepare, advance, read)


# A finite stand-in for -inf: its exponential, and that of sums with it, underflows to 0. An infinity times 0, in the
# sums by matmuls, would be NaN.
_FORGETS = -1e30


def _decays(shared, x, tokens, reads_after):
    """Returns the `_Decay` of the key's channels, with h = H or 1, and of the value's; None for channels without decay.

    Args:
      reads_after: whether a query sees its own token's decay.
    """
    shape = (*x["query"].shape[:3], 1)
    parts = [x["g"][..., None] if "g" in x else None, x.get("gk")]
    if "g_gamma" in shared:
        constant = jnp.broadcast_to(shared["g_gamma"].astype(jnp.float32)[:, None, None], shape)
        if tokens.valid is not None:  # per-token decays are already 0 there
            constant = jnp.where(tokens.valid[:, None, :, None], constant, 0)
        parts.append(constant)
    present = [part for part in parts if part is not None]
    decay_k = decay_v = None
    if present or tokens.resets is not None:
        passing = sum(present, jnp.zeros(shape, jnp.float32))
        reading = passing if reads_after else None
        if tokens.resets is not None:
            # The state is reset before such a token, and its query sees the reset state.
            new = jnp.where(tokens.resets, _FORGETS, 0.0)[:, None, :, None]
            reading = passing + new if reads_after else jnp.broadcast_to(new, passing.shape)
            passing = passing + new
        decay_k = _Decay(*(None if y is None else jnp.maximum(y, _FORGETS) for y in (passing, reading)))
    if "gv" in x:
        passing = jnp.maximum(x["gv"], _FORGETS)
        decay_v = _Decay(passing, passing if reads_after else None)
    return decay_k, decay_v


_PER_TOKEN = ("query", "key", "value", "g", "gk", "gv")


def _prepared(query, key, value, g, gk, gv, g_gamma, bonus, segment_ids, initial_state, softmax_scale, num_states, cfg):
    """Returns the arguments of the scans over chunks."""
    B, T, N, H = query.shape
    tokens = dict(zip(_PER_TOKEN, (query, key, value, g, gk, gv), strict=True))
    xs = {n: x for n, x in tokens.items() if x is not None}
    shared = {n: x for n, x in (("g_gamma", g_gamma), ("bonus", bonus)) if x is not None}
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    step = _step_of(H**-0.5 if softmax_scale is None else softmax_scale, precision)
    if num_states > 1 and segment_ids is None:
        segment_ids = jnp.zeros((B, T), jnp.int32)  # all tokens use the first state
    cut = chunks.Chunks(B, T, cfg, segment_ids, num_states)
    if initial_state is None:
        initial_state = jnp.zeros((B, num_states, N, H, value.shape[-1]), jnp.float32)
    return step, cut, initial_state.astype(jnp.float32), xs, shared


def forward(query, key, value, g, gk, gv, g_gamma, bonus, segment_ids, initial_state, softmax_scale, num_states, cfg):
    step, cut, initial, xs, shared = _prepared(**locals())
    final, out = chunks.forward(step, cut, initial, xs, shared)
    return out.astype(query.dtype), final


def backward(
    saved, query, key, value, g, gk, gv, g_gamma, bonus, segment_ids, initial_state, softmax_scale, num_states, cfg
):
    arguments = {n: x for n, x in locals().items() if n != "saved"}
    step, cut, initial, xs, shared = _prepared(**arguments)
    d_final = saved.d_final_state.astype(jnp.float32)
    d_initial, d_xs, d_shared = chunks.backward(step, cut, initial, xs, d_final, saved.d_out, shared)
    return d_xs | d_shared | ({} if initial_state is None else {"initial_state": d_initial})


op.register(
    forward,
    backward,
    platforms={"cpu", "cuda", "rocm", "tpu"},
    dtypes={"float32", "bfloat16", "float16"},
    **chunks.tunables(_CHUNK, lambda d: d["B"] * d["N"] * max(d["H"], d["Hv"])),
    symbolic={"B"},
)
