"""Public functions: the delta rules with the field's usual arguments, converted to the contract's form."""

from __future__ import annotations

from typing import Any, Unpack

import jax

from kernels.engines.scan.recurrence import Where, either, prepared, sizes
from kernels.framework.public import Prepared, public
from kernels.ops.delta_rule.contract import op, rwkv7_op

_SHAPE = ("B", "T", "N", "H", "Hv")  # rows, tokens, and the dims of a state


def check_heads(op_name: str, query: int, key: int, value: int) -> None:
    if query != key or value % key:
        raise ValueError(
            f"{op_name}: argument 'key' must have as many heads as 'query', and 'value' a multiple of that, got "
            f"{query}, {key} and {value} heads of query, key and value; repeat heads with jnp.repeat(x, n, axis=2)"
        )


def _prepared(
    name: str,
    arrays: tuple[Any, Any, Any, Any],
    decays: tuple[Any, str, str] | None,
    state: Any,
    return_state: bool,
    where: Where,
    **options: Any,
) -> Prepared:
    """Returns the call of delta_rule; `decays` is (g, its dims, text to append to an error message about it)."""
    query, key, value, beta = arrays
    named = {
        "query": (query, "B T K H"),
        "key": (key, "B T _ H"),
        "value": (value, "B T N Hv"),
        "beta": (beta, "B T N"),
    }
    g, dims, remedy = decays or (None, "", "")
    named |= {} if decays is None else {"g": (g, dims)}
    dim_sizes = sizes(name, named, {"g": "; without decays it is delta_rule" if g is None else remedy})
    check_heads(name, query.shape[2], key.shape[2], value.shape[2])
    if g is not None:
        options |= {"g": g if g.ndim == 4 else g[..., None]}
    shape = tuple(dim_sizes[d] for d in _SHAPE)
    arguments = {"query": query, "key": key, "value": value, "beta": beta, **options}
    return prepared(op, name, arguments, shape, where, state=state, return_state=return_state)


@public(op)
def delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    *,
    state: Any = None,
    return_state: bool = False,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = False,
    **where: Unpack[Where],
) -> Prepared:
    """Returns the output [B, T, N, Hv] of the delta rule, in the dtype of the values; with `return_state` also the
    state [B, N, H, Hv] after the last token, float32: S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T, out_t =
    softmax_scale * S_t^T q_t.

    Args:
      query, key: [B, T, K, H]. value: [B, T, N, Hv], N a multiple of K: value head n uses key head n // (N / K).
      beta: [B, T, N]: the fraction of the value stored for a key that is replaced; in [0, 1], or up to 2 for
        transitions with negative eigenvalues. With keys of norm above 1 the state can grow without bound, see
        `use_qk_l2norm`.
      state: [B, N, H, Hv], float32: the state before the first token; default: zeros.
      return_state: whether to return the state after the last token too.
      softmax_scale: default 1 / sqrt(H).
      use_qk_l2norm: whether to divide queries and keys by their norms, x / sqrt(|x|^2 + 1e-6), as Qwen3-Next does.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    >>> import jax.numpy as jnp
    >>> key = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2).repeat(2, axis=1)
    >>> value = jnp.array([4.0, 6.0]).reshape(1, 2, 1, 1)
    >>> out = delta_rule(key, key, value, jnp.full((1, 2, 1), 0.5), softmax_scale=1.0)
    >>> print(out.ravel())  # half of 4, then half of the way from 2 to 6
    [2. 4.]
    """
    arrays, options = (query, key, value, beta), {"softmax_scale": softmax_scale, "use_qk_l2norm": use_qk_l2norm}
    return _prepared("delta_rule", arrays, None, state, return_state, where, **options)


@public(op)
def gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    g: jax.Array | None = None,
    *,
    decay: jax.Array | None = None,
    state: Any = None,
    return_state: bool = False,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = False,
    **where: Unpack[Where],
) -> Prepared:
    """Returns the output [B, T, N, Hv] of the gated delta rule (Gated DeltaNet, Qwen3-Next), in the dtype of the values; with
    `return_state` also the state [B, N, H, Hv] after the last token, float32: S' = exp(g_t) S_{t-1}, S_t = S' + beta_t k_t
    (v_t - S'^T k_t)^T, out_t = softmax_scale * S_t^T q_t.

    Args:
      g, decay: two names for the log decays, [B, T, N], at most 0; -inf erases the state.
      query, key, value, beta, state, return_state, softmax_scale, use_qk_l2norm: as in `delta_rule`.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((2, 5, 4, 8))
    >>> gate = jnp.ones((2, 5, 4))
    >>> out, state = gated_delta_rule(x, x, x, gate, -gate, use_qk_l2norm=True, return_state=True)
    >>> out.shape, state.shape
    ((2, 5, 4, 8), (2, 4, 8, 8))
    """
    name, arrays = "gated_delta_rule", (query, key, value, beta)
    decays = either(name, g=g, decay=decay), "B T N", "; for decays per channel use kernel_delta_attention"
    options = {"softmax_scale": softmax_scale, "use_qk_l2norm": use_qk_l2norm}
    return _prepared(name, arrays, decays, state, return_state, where, **options)


@public(op)
def kernel_delta_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    g: jax.Array | None = None,
    *,
    decay: jax.Array | None = None,
    state: Any = None,
    return_state: bool = False,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = False,
    **where: Unpack[Where],
) -> Prepared:
    """Returns the output [B, T, N, Hv] of Kimi Delta Attention, a delta rule with a decay per channel, in the dtype of
    the values; with `return_state` also the state [B, N, H, Hv] after the last token, float32: S' = diag(exp g_t) S_{t-1},
    S_t = S' + beta_t k_t (v_t - S'^T k_t)^T, out_t = softmax_scale * S_t^T q_t.

    Args:
      g, decay: two names for the log decays, [B, T, N, H], at most 0; -inf erases a channel.
      query, key, value, beta, state, return_state, softmax_scale, use_qk_l2norm: as in `delta_rule`.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((2, 5, 4, 8))
    >>> kernel_delta_attention(x, x, x, jnp.ones((2, 5, 4)), -x, use_qk_l2norm=True).shape
    (2, 5, 4, 8)
    """
    name, arrays = "kernel_delta_attention", (query, key, value, beta)
    decays = either(name, g=g, decay=decay), "B T N H", "; for one decay per head use gated_delta_rule"
    options = {"softmax_scale": softmax_scale, "use_qk_l2norm": use_qk_l2norm}
    return _prepared(name, arrays, decays, state, return_state, where, **options)


@public(rwkv7_op, module="RWKV7")
def rwkv7(
    r: jax.Array,
    w: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array,
    *,
    state: Any = None,
    return_state: bool = False,
    softmax_scale: float | None = None,
    **where: Unpack[Where],
) -> Prepared:
    """Returns the output [B, T, N, Hv] of the recurrence of RWKV-7, in the dtype of v; with `return_state` also the state
    [B, N, H, Hv] after the last token, float32. With S_t [H, Hv], keys by values:

        S_t = diag(exp w_t) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T,  out_t = softmax_scale * S_t^T r_t.

    `a` reads the state before the token and its decay, and `b` writes back what was read, as in flash-linear-attention.
    The model has a = -kk and b = kk * (its rates), where kk are normalised keys. The state of the paper is the
    transpose of this.

    Args:
      r, w, k, a, b: [B, T, N, H]; v: [B, T, N, Hv].
      w: log decays, at most 0; the model's are -exp(-0.5) * sigmoid(...).
      softmax_scale: default 1 / sqrt(H), as in every operation here; the model itself uses 1.0.
      state, return_state: as in `delta_rule`.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    >>> import jax.numpy as jnp
    >>> x = jnp.full((1, 3, 2, 4), 0.5)
    >>> rwkv7(x, -x, x, x, -x, x, softmax_scale=1.0).shape
    (1, 3, 2, 4)
    """
    arrays = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}
    dim_sizes = sizes("rwkv7", {n: (x, "B T N Hv" if n == "v" else "B T N H") for n, x in arrays.items()})
    shape = tuple(dim_sizes[d] for d in _SHAPE)
    arguments = {**arrays, "softmax_scale": softmax_scale}
    return prepared(rwkv7_op, "rwkv7", arguments, shape, where, state=state, return_state=return_state)
