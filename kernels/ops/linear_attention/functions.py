"""Public functions of linear attention: one recurrence with different kinds of decay."""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from kernels.engines.scan import recurrence
from kernels.engines.scan.recurrence import Where, described
from kernels.framework.binding import is_array, is_float_array
from kernels.framework.public import Prepared, public
from kernels.ops.linear_attention.contract import op


def _heads(name: str, **arrays: jax.Array) -> tuple[Any, Any, Any]:
    """Returns (N, K, H) of the three arrays, after checking them under the function's names for them."""
    (q, query), (k, key), (v, value) = arrays.items()
    shape = recurrence.sizes(name, {q: (query, "B T N H"), k: (key, "B T K H"), v: (value, "B T K Hv")})
    N, K, H = (shape[d] for d in ("N", "K", "H"))
    if N % K:
        raise ValueError(f"{name}: argument {q!r} has N = {N} heads, which must be a multiple of the K = {K} of {k!r}")
    return N, K, H


def _decay(name: str, called: str, x: Any, query: jax.Array, heads: int, width: int | None) -> Any:
    """Returns a decay per token as [B, T, N, ...]; decays of key heads are repeated for their query heads.

    Args:
      heads: number of key heads. width: size of the last dim, or None without one.
    """
    if x is None:
        return None
    B, T, N, _ = query.shape
    tail = () if width is None else (width,)
    if not is_array(x) or not is_float_array(x) or x.shape not in {(B, T, n, *tail) for n in (N, heads)}:
        raise ValueError(
            f"{name}: argument {called!r} must be a float array of log decays {[B, T, N, *tail]}, one per token and query "
            f"head (or key head, {heads}), got {described(x)}"
        )
    return x if x.shape[2] == N else jnp.repeat(x, N // heads, axis=2)


def _constant(name: str, called: str, x: Any, N: int) -> jax.Array | None:
    """Returns one number per head, [N]."""
    if x is None:
        return None
    each = recurrence.array_of(x)
    if not is_float_array(each) or each.shape not in {(), (N,)}:
        raise ValueError(
            f"{name}: argument {called!r} must be a float or a float array [N] = {[N]}, one for each head, got "
            f"{described(x if each is None else each)}"
        )
    return jnp.broadcast_to(each if is_array(x) else jnp.asarray(x, jnp.float32), (N,))


def _layer(name: str, layer_idx: Any, num_layers: Any) -> jax.Array:
    """Returns the relative depth of the layer, in [0, 1)."""
    if not isinstance(num_layers, (int, np.integer)) or num_layers < 1:
        raise ValueError(f"{name}: argument 'num_layers' must be a positive integer, got {num_layers!r}")
    layer = recurrence.integers(layer_idx)
    if layer is None or layer.shape != ():
        raise ValueError(f"{name}: argument 'layer_idx' must be an integer, got {layer_idx!r}")
    if not isinstance(layer, jax.core.Tracer) and not 0 <= layer < num_layers:
        raise ValueError(f"{name}: argument 'layer_idx' must be in [0, num_layers = {num_layers}), got {layer}")
    return jnp.asarray(layer, jnp.float32) / num_layers


def _prepared(
    name: str, arrays: tuple[Any, Any, Any], state: Any, return_state: bool, where: Where, **more: Any
) -> Prepared:
    """Returns the call for checked arrays; `more` holds the other arguments of the contract."""
    query, key, value = arrays
    arguments = {"query": query, "key": key, "value": value, **more}
    shape = (*query.shape, value.shape[-1])
    return recurrence.prepared(op, name, arguments, shape, where, state=state, return_state=return_state)


@public(op, module="GLAttention")
def gla_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: Any = None,
    g_gamma: Any = None,
    *,
    gate: Any = None,
    softmax_scale: float | None = None,
    state: Any = None,
    return_state: bool = False,
    **where: Unpack[Where],
) -> Prepared:
    """Returns gated linear attention [B, T, N, Hv], in the dtype of query; with `return_state` (out, state).

    S_t = exp(g_t) * S_{t-1} + k_t v_tᵀ and o_t = scale · S_tᵀ q_t for each head, with S [H, Hv] in float32. Linear in
    T. Source: Yang et al., *Gated Linear Attention Transformers with Hardware-Efficient Training*, 2023,
    arXiv:2312.06635.

    Args:
      query: [B, T, N, H]. key: [B, T, K, H]. value: [B, T, K, Hv]. N is a multiple of K: head n reads key head n // (N
        / K).
      g, gate: two names for the log decay, at most 0 for the state to fade: [B, T, N, H] per channel of the key, or [B,
        T, N] per head. With K heads instead of N, each applies to its query heads.
      g_gamma: [N], a log decay per head that is constant over time. It is added to g; without either, nothing decays.
      softmax_scale: default 1 / sqrt(H).
      state: [B, N, H, Hv], float32: the state before the first token; default: zeros.
      return_state: whether to return the state after the last token too.

    Raises:
      ValueError: names the argument.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 3, 1, 1))
    >>> out, state = gla_attention(x, x, x, jnp.log(x / 2), return_state=True)
    >>> print(out.ravel(), state.ravel())
    [1.   1.5  1.75] [1.75]
    """
    name = "gla_attention"
    N, K, H = _heads(name, query=query, key=key, value=value)
    decay = recurrence.either(name, g=g, gate=gate)
    called = "gate" if g is None else "g"
    of_head = is_array(decay) and decay.ndim == 3
    decay = _decay(name, called, decay, query, K, None if of_head else H)
    decays = {"g" if of_head else "gk": decay, "g_gamma": _constant(name, "g_gamma", g_gamma, N)}
    return _prepared(name, (query, key, value), state, return_state, where, softmax_scale=softmax_scale, **decays)


@public(op)
def recurrent_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: Any = None,
    g_gamma: Any = None,
    gk: Any = None,
    gv: Any = None,
    *,
    softmax_scale: float | None = None,
    state: Any = None,
    return_state: bool = True,
    **where: Unpack[Where],
) -> Prepared:
    """Returns (out [B, T, N, Hv], state [B, N, H, Hv]), for streaming: pass the returned state to the next call.

    Like `gla_attention`, with decays of the value's channels too:
    S_t = exp(g_gamma + g_t + gk_t) exp(gv_t)ᵀ * S_{t-1} + k_t v_tᵀ.
    A single token is one step of the recurrence; several are computed in chunks, with the same result.

    Args:
      g: log decay per head, [B, T, N], or per channel of its key, [B, T, N, H], which is added to gk.
      g_gamma: [N], constant over time. gk: [B, T, N, H], per channel of the key. gv: [B, T, N, Hv], of the value.
      state, initial_state: two names for the state before the first token; None for 0. For the rest see
        `gla_attention`.
      return_state: False for the output alone.

    Raises:
      ValueError: names the argument.

    >>> import jax.numpy as jnp
    >>> x, state = jnp.ones((1, 1, 1, 1)), None
    >>> for _ in range(3):
    ...     out, state = recurrent_attention(x, x, x, g_gamma=-0.6931472, state=state)
    >>> print(out.ravel())
    [1.75]
    """
    name = "recurrent_attention"
    N, K, H = _heads(name, query=query, key=key, value=value)
    of_head = is_array(g) and g.ndim == 3
    g = _decay(name, "g", g, query, K, None if of_head else H)
    gk = _decay(name, "gk", gk, query, K, H)
    if g is not None and not of_head:
        g, gk = None, g if gk is None else g + gk
    gv = _decay(name, "gv", gv, query, K, value.shape[3])
    decays = {"g": g, "gk": gk, "gv": gv, "g_gamma": _constant(name, "g_gamma", g_gamma, N)}
    return _prepared(name, (query, key, value), state, return_state, where, softmax_scale=softmax_scale, **decays)


@public(op)
def lightning_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layer_idx: Any = None,
    num_layers: int | None = None,
    *,
    decay: Any = None,
    softmax_scale: float | None = None,
    state: Any = None,
    return_state: bool = False,
    **where: Unpack[Where],
) -> Prepared:
    """Returns linear attention [B, T, N, Hv] with a constant decay per head: S_t = exp(-decay) S_{t-1} + k_t v_tᵀ.

    By `layer_idx` l and `num_layers` L, decay = 8 n / N · (1 - l / L) of head n = 0, 1, ...: later layers see farther.
    Source: Qin et al., *Lightning Attention-2*, 2024, arXiv:2401.04658, with the decays of *TransNormerLLM*, 2023,
    arXiv:2307.14995, section 3.1.

    Args:
      layer_idx: of the layer, from 0; may be traced. num_layers: of the model.
      decay: [N] (or one number), instead of both: the state is multiplied by exp(-decay) at each token. For the rest see
        `gla_attention`.

    Raises:
      ValueError: names the argument; also if neither a decay nor a layer is given.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 3, 1, 1))
    >>> print(lightning_attention(x, x, x, decay=0.6931472).ravel())
    [1.   1.5  1.75]
    """
    name = "lightning_attention"
    N, K, H = _heads(name, query=query, key=key, value=value)
    if (layer_idx is None) != (num_layers is None) or (layer_idx is None) == (decay is None):
        raise ValueError(
            f"{name}: argument 'decay' [N], the rate at which heads forget, is missing; pass it, or 'layer_idx' and "
            "'num_layers', which determine it"
        )
    gamma = _constant(name, "decay", decay, N)
    if gamma is None:
        gamma = 8 / N * (1 - _layer(name, layer_idx, num_layers)) * jnp.arange(N, dtype=jnp.float32)
    return _prepared(name, (query, key, value), state, return_state, where, softmax_scale=softmax_scale, g_gamma=-gamma)


@public(op)
def retention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g_gamma: Any = None,
    *,
    softmax_scale: float | None = None,
    state: Any = None,
    return_state: bool = False,
    **where: Unpack[Where],
) -> Prepared:
    """Returns retention [B, T, N, Hv]: linear attention with a constant decay factor per head, exp(g_gamma).

    RetNet's position encoding (xPos) of query and key is up to the caller: see `rotary_embedding`.
    Source: Sun et al., *Retentive Network*, 2023, arXiv:2307.08621, eq. 5 to 8.

    Args:
      g_gamma: [N], log decay; default: log(1 - 2^(-5 - n)) for head n = 0, 1, ..., as in RetNet. For the rest see
        `gla_attention`.

    Raises:
      ValueError: names the argument.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 3, 1, 1))
    >>> print(retention(x, x, x, jnp.log(jnp.array([0.5]))).ravel())
    [1.   1.5  1.75]
    """
    name = "retention"
    N, K, H = _heads(name, query=query, key=key, value=value)
    gamma = _constant(name, "g_gamma", g_gamma, N)
    if gamma is None:
        gamma = jnp.log1p(-jnp.exp2(-5 - jnp.arange(N, dtype=jnp.float32)))
    return _prepared(name, (query, key, value), state, return_state, where, softmax_scale=softmax_scale, g_gamma=gamma)


@public(op, module="RWKV6")
def rwkv6(
    r: jax.Array,
    k: jax.Array,
    v: jax.Array,
    w: jax.Array,
    u: jax.Array,
    *,
    softmax_scale: float | None = None,
    state: Any = None,
    return_state: bool = False,
    **where: Unpack[Where],
) -> Prepared:
    """Returns the time mixing of RWKV-6, [B, T, N, Hv]: o_t = scale · (S_{t-1} + (u * k_t) v_tᵀ)ᵀ r_t and then
    S_t = exp(w_t) * S_{t-1} + k_t v_tᵀ. A token reads the state before it, and its own key and value with weight u.

    Source: Peng et al., *Eagle and Finch*, 2024, arXiv:2404.05892, eq. 19.

    Args:
      r: receptance, [B, T, N, H]. k: [B, T, K, H]. v: [B, T, K, Hv].
      w: [B, T, N, H], the LOG of the decay: the state is multiplied by exp(w). RWKV's decay exp(-exp(x)) is w = -exp(x).
      u: [N, H], the weight ("bonus") of a token's own key.
      softmax_scale: default 1 / sqrt(H), as in all functions here; the models themselves use 1. For the rest see
        `gla_attention`.

    Raises:
      ValueError: names the argument.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 3, 1, 1))
    >>> print(rwkv6(x, x, x, jnp.log(x / 2), jnp.ones((1, 1))).ravel())
    [1.  2.  2.5]
    """
    name = "rwkv6"
    N, K, H = _heads(name, r=r, k=k, v=v)
    if w is None:
        raise ValueError(f"{name}: argument 'w' must be a float array of log decays [B, T, N, H], got None")
    w = _decay(name, "w", w, r, K, H)
    if not is_array(u) or not is_float_array(u) or u.shape != (N, H):
        raise ValueError(f"{name}: argument 'u' must be a float array [N, H] = {[N, H]}, got {described(u)}")
    return _prepared(name, (r, k, v), state, return_state, where, softmax_scale=softmax_scale, gk=w, bonus=u)
