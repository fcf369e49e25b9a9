"""The public functions of linear attention: one recurrence, and the decays that each kind of it has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels._core import recurrence
from kernels._core.binding import is_array, is_float_array
from kernels._core.public import Prepared, public
from kernels.ops.linear_attention.contract import op

_NAMES = ("query", "key", "value")


def _check(name: str, arrays: tuple[Any, Any, Any], names: tuple[str, ...] = _NAMES) -> None:
    """Raises ValueError unless the three are float [B, T, N, H], [B, T, K, H] and [B, T, K, Hv], and N a multiple of K."""
    for x, called, dims in zip(arrays, names, ("B, T, N, H", "B, T, K, H", "B, T, K, Hv"), strict=True):
        if not is_array(x) or not is_float_array(x) or x.ndim != 4:
            got = f"{x.dtype} of shape {x.shape}" if is_array(x) else type(x).__name__
            raise ValueError(f"{name}: argument {called!r} must be a float array [{dims}], got {got}")
        if any(isinstance(n, int) and n == 0 for n in x.shape):
            raise ValueError(
                f"{name}: argument {called!r} of shape {x.shape} has no elements; give it at least one token"
            )
    q, k, v = arrays
    for x, called, like, what in (
        (k, 1, (*q.shape[:2], k.shape[2], q.shape[3]), 0),
        (v, 2, (*k.shape[:3], v.shape[3]), 1),
    ):
        if x.shape != like:
            raise ValueError(
                f"{name}: argument {names[called]!r} must have the shape {like} beside {names[what]!r} of shape "
                f"{arrays[what].shape}, got {x.shape}"
            )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{name}: argument {names[0]!r} has N = {q.shape[2]} heads, which must be a multiple of the K = {k.shape[2]} of "
            f"{names[1]!r}"
        )


def _decay(name: str, called: str, x: Any, query: jax.Array, heads: int, width: int | None) -> Any:
    """Returns a decay that comes with each token as [B, T, N, ...]; that of a key head is that of its query heads.

    Args:
      heads: of keys. width: of the last dim; None: there is none.
    """
    if x is None:
        return None
    B, T, N, _ = query.shape
    tail = () if width is None else (width,)
    if not is_array(x) or not is_float_array(x) or x.shape not in {(B, T, n, *tail) for n in (N, heads)}:
        got = f"{x.dtype} of shape {x.shape}" if is_array(x) else type(x).__name__
        raise ValueError(
            f"{name}: argument {called!r} must be a float array of log decays {[B, T, N, *tail]}, one for each token and query "
            f"head (or key head, {heads}), got {got}"
        )
    return x if x.shape[2] == N else jnp.repeat(x, N // heads, axis=2)


def _constant(name: str, called: str, x: Any, N: int) -> jax.Array | None:
    """Returns a number for each head, [N]."""
    if x is None:
        return None
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.shape not in {(), (N,)}:
        raise ValueError(
            f"{name}: argument {called!r} must be a float or a float array [N] = {[N]}, one for each head, got {x.dtype} of "
            f"shape {x.shape}"
        )
    return jnp.broadcast_to(x, (N,))


def _prepare(
    name: str, arrays: tuple[Any, Any, Any], softmax_scale: float | None, where: dict[str, Any], **decays: Any
) -> Prepared:
    """Returns the call of checked arrays.

    Args:
      where: segment_ids, cum_seqlens, cu_seqlens, initial_state, state and return_state of the public function.
    """
    query, key, value = arrays
    B, T, N, H = query.shape
    initial = recurrence.either(name, initial_state=where.pop("initial_state"), state=where.pop("state"))
    at = recurrence.sequences(name, (B, T), (N, H, value.shape[-1]), initial_state=initial, **where)
    given = {n: x for n, x in decays.items() if x is not None}
    call = op.bind(query, key, value, **given, **at.arguments, softmax_scale=softmax_scale)
    if not where["return_state"]:
        return Prepared(call)

    def finish(out: jax.Array, final_state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return out, at.state(final_state)

    return Prepared(call, finish=finish, dims=(("B", "T", "N", "Hv"), at.state_dims(("N", "H", "Hv"))))


def _where(arguments: dict[str, Any]) -> dict[str, Any]:
    names = ("segment_ids", "cum_seqlens", "cu_seqlens", "initial_state", "state", "return_state")
    return {n: arguments[n] for n in names}


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
    segment_ids: Any = None,
    cum_seqlens: Any = None,
    cu_seqlens: Any = None,
    initial_state: Any = None,
    state: Any = None,
    return_state: bool = False,
) -> Prepared:
    """Returns gated linear attention [B, T, N, Hv], in the dtype of query; with `return_state` (out, state).

    S_t = exp(g_t) * S_{t-1} + k_t v_tᵀ and o_t = scale · S_tᵀ q_t for each head, with S [H, Hv] in float32. Linear in T.
    Source: Yang et al., *Gated Linear Attention Transformers with Hardware-Efficient Training*, 2023, arXiv:2312.06635.

    Args:
      query: [B, T, N, H]. key: [B, T, K, H]. value: [B, T, K, Hv]. N is a multiple of K: head n reads key head n // (N / K).
      g, gate: two names of the log decay, at most 0 where the state is to fade: [B, T, N, H] for each channel of the key, or
        [B, T, N] for the whole of a head. With K heads: each for its query heads.
      g_gamma: [N], a log decay of each head that is the same at all tokens. Both given are added; none: nothing fades.
      softmax_scale: default 1 / sqrt(H).
      segment_ids: int [B, T]. Where the id changes the state begins anew; a negative one is padding: out is 0, and the state
        passes it.
      cum_seqlens, cu_seqlens: two names of [0, n1, n1 + n2, ...], int [sequences + 1], which cuts one row (B = 1) there.
      initial_state, state: two names of the state before the first token, [B, N, H, Hv], or with cuts [sequences, N, H, Hv].
      return_state: whether the state after the last token is returned, in that shape.

    Raises:
      ValueError: naming the argument.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 3, 1, 1))
    >>> out, state = gla_attention(x, x, x, jnp.log(x / 2), return_state=True)
    >>> print(out.ravel(), state.ravel())
    [1.   1.5  1.75] [1.75]
    """
    name, where = "gla_attention", _where(locals())
    _check(name, (query, key, value))
    decay = recurrence.either(name, g=g, gate=gate)
    called = "gate" if g is None else "g"
    of_head = is_array(decay) and decay.ndim == 3
    decay = _decay(name, called, decay, query, key.shape[2], None if of_head else query.shape[3])
    gamma = _constant(name, "g_gamma", g_gamma, query.shape[2])
    given = {"g": decay} if of_head else {"gk": decay}
    return _prepare(name, (query, key, value), softmax_scale, where, **given, g_gamma=gamma)


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
    segment_ids: Any = None,
    cum_seqlens: Any = None,
    cu_seqlens: Any = None,
    initial_state: Any = None,
    state: Any = None,
    return_state: bool = True,
) -> Prepared:
    """Returns (out [B, T, N, Hv], state [B, N, H, Hv]), for streaming: what one call returns as the state the next one takes.

    As `gla_attention`, with a decay of the value's channels too:
    S_t = exp(g_gamma + g_t + gk_t) exp(gv_t)ᵀ * S_{t-1} + k_t v_tᵀ.
    One token is one step of the recurrence; many are computed in chunks, with the same numbers.

    Args:
      g: log decay of a head, [B, T, N], or of the channels of its key, [B, T, N, H]; then it is added to gk.
      g_gamma: [N], the same at all tokens. gk: [B, T, N, H], of the key's channels. gv: [B, T, N, Hv], of the value's.
      state, initial_state: the state before the first token, or None for 0. The rest: see `gla_attention`.
      return_state: False for the output alone.

    Raises:
      ValueError: naming the argument.

    >>> import jax.numpy as jnp
    >>> x, state = jnp.ones((1, 1, 1, 1)), None
    >>> for _ in range(3):
    ...     out, state = recurrent_attention(x, x, x, g_gamma=-0.6931472, state=state)
    >>> print(out.ravel())
    [1.75]
    """
    name, where = "recurrent_attention", _where(locals())
    _check(name, (query, key, value))
    (N, H), K = query.shape[2:], key.shape[2]
    of_head = is_array(g) and g.ndim == 3
    g = _decay(name, "g", g, query, K, None if of_head else H)
    gk = _decay(name, "gk", gk, query, K, H)
    if g is not None and not of_head:
        g, gk = None, g if gk is None else g + gk
    gv = _decay(name, "gv", gv, query, K, value.shape[3])
    gamma = _constant(name, "g_gamma", g_gamma, N)
    return _prepare(name, (query, key, value), softmax_scale, where, g=g, gk=gk, gv=gv, g_gamma=gamma)


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
    segment_ids: Any = None,
    cum_seqlens: Any = None,
    cu_seqlens: Any = None,
    initial_state: Any = None,
    state: Any = None,
    return_state: bool = False,
) -> Prepared:
    """Returns linear attention [B, T, N, Hv] with a constant decay of each head: S_t = exp(-decay) S_{t-1} + k_t v_tᵀ.

    By `layer_idx` l and `num_layers` L, decay = 8 n / N · (1 - l / L) of head n = 0, 1, ...: later layers see farther.
    Source: Qin et al., *Lightning Attention-2*, 2024, arXiv:2401.04658, with the decays of *TransNormerLLM*, 2023,
    arXiv:2307.14995, section 3.1.

    Args:
      layer_idx: of the layer, from 0; may be traced. num_layers: of the model.
      decay: [N] (or one number), in the place of both: the state is multiplied by exp(-decay) at each token. The rest: see
        `gla_attention`.

    Raises:
      ValueError: naming the argument, as where neither a decay nor a layer is given.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 3, 1, 1))
    >>> print(lightning_attention(x, x, x, decay=0.6931472).ravel())
    [1.   1.5  1.75]
    """
    name, where = "lightning_attention", _where(locals())
    _check(name, (query, key, value))
    N = query.shape[2]
    if (layer_idx is None) != (num_layers is None) or (layer_idx is None) == (decay is None):
        raise ValueError(
            f"{name}: argument 'decay' [N] says how fast heads forget, or 'layer_idx' and 'num_layers' together do; give "
            "one or the other"
        )
    if decay is not None:
        gamma = _constant(name, "decay", decay, N)
        return _prepare(name, (query, key, value), softmax_scale, where, g_gamma=None if gamma is None else -gamma)
    if not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(f"{name}: argument 'num_layers' must be a positive integer, got {num_layers!r}")
    if isinstance(layer_idx, int) and not 0 <= layer_idx < num_layers:
        raise ValueError(f"{name}: argument 'layer_idx' must be in [0, num_layers = {num_layers}), got {layer_idx}")
    gamma = -8 / N * (1 - jnp.asarray(layer_idx, jnp.float32) / num_layers) * jnp.arange(N, dtype=jnp.float32)
    return _prepare(name, (query, key, value), softmax_scale, where, g_gamma=gamma)


@public(op)
def retention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g_gamma: Any = None,
    *,
    softmax_scale: float | None = None,
    segment_ids: Any = None,
    cum_seqlens: Any = None,
    cu_seqlens: Any = None,
    initial_state: Any = None,
    state: Any = None,
    return_state: bool = False,
) -> Prepared:
    """Returns retention [B, T, N, Hv]: linear attention that forgets by a constant factor, exp(g_gamma), of each head.

    The positions of RetNet (xPos) are of the query and key, and are the caller's: see `rotary_embedding`.
    Source: Sun et al., *Retentive Network*, 2023, arXiv:2307.08621, eq. 5 to 8.

    Args:
      g_gamma: [N], log decay; default: log(1 - 2^(-5 - n)) of head n = 0, 1, ..., as in RetNet. The rest: see
        `gla_attention`.

    Raises:
      ValueError: naming the argument.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 3, 1, 1))
    >>> print(retention(x, x, x, jnp.log(jnp.array([0.5]))).ravel())
    [1.   1.5  1.75]
    """
    name, where = "retention", _where(locals())
    _check(name, (query, key, value))
    N = query.shape[2]
    gamma = _constant(name, "g_gamma", g_gamma, N)
    if gamma is None:
        gamma = jnp.log1p(-jnp.exp2(-5 - jnp.arange(N, dtype=jnp.float32)))
    return _prepare(name, (query, key, value), softmax_scale, where, g_gamma=gamma)


@public(op, module="RWKV6")
def rwkv6(
    r: jax.Array,
    k: jax.Array,
    v: jax.Array,
    w: jax.Array,
    u: jax.Array,
    *,
    softmax_scale: float | None = None,
    segment_ids: Any = None,
    cum_seqlens: Any = None,
    cu_seqlens: Any = None,
    initial_state: Any = None,
    state: Any = None,
    return_state: bool = False,
) -> Prepared:
    """Returns the time mixing of RWKV-6, [B, T, N, Hv]: o_t = scale · (S_{t-1} + (u * k_t) v_tᵀ)ᵀ r_t and then
    S_t = exp(w_t) * S_{t-1} + k_t v_tᵀ. A token reads the state before it, and itself with weight u.

    Source: Peng et al., *Eagle and Finch*, 2024, arXiv:2404.05892, eq. 19.

    Args:
      r: receptance, [B, T, N, H]. k: [B, T, K, H]. v: [B, T, K, Hv].
      w: [B, T, N, H], the LOG of the decay: the state is multiplied by exp(w). RWKV's decay exp(-exp(x)) is w = -exp(x).
      u: [N, H], the bonus of a token's own key.
      softmax_scale: default 1 / sqrt(H), as in all of these functions; the models themselves have 1. The rest: see
        `gla_attention`.

    Raises:
      ValueError: naming the argument.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 3, 1, 1))
    >>> print(rwkv6(x, x, x, jnp.log(x / 2), jnp.ones((1, 1))).ravel())
    [1.  2.  2.5]
    """
    name, where = "rwkv6", _where(locals())
    _check(name, (r, k, v), ("r", "k", "v"))
    N, H = r.shape[2:]
    if w is None:
        raise ValueError(f"{name}: argument 'w' must be a float array of log decays [B, T, N, H], got None")
    w = _decay(name, "w", w, r, k.shape[2], H)
    if not is_array(u) or not is_float_array(u) or u.shape != (N, H):
        got = f"{u.dtype} of shape {u.shape}" if is_array(u) else type(u).__name__
        raise ValueError(f"{name}: argument 'u' must be a float array [N, H] = {[N, H]}, got {got}")
    return _prepare(name, (r, k, v), softmax_scale, where, gk=w, bonus=u)
