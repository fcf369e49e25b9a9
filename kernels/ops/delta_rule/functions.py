"""What users call: the delta rules under the arguments of the field, brought to the contract's form."""

from __future__ import annotations

from typing import Any

import jax

from kernels._core.binding import is_array, is_float_array
from kernels._core.public import Prepared, public
from kernels._core.recurrence import Sequences, either, sequences
from kernels.ops.delta_rule.contract import op, rwkv7_op

_OUT = ("B", "T", "N", "Hv")


def checked(op_name: str, name: str, x: Any, dims: str, remedy: str = "") -> jax.Array:
    """Returns the array. Raises ValueError where it is not one of floats with as many dims."""
    if not is_array(x) or not is_float_array(x) or x.ndim != len(dims.split()) or 0 in x.shape:
        got = f"{x.dtype} of shape {x.shape}" if is_array(x) else type(x).__name__
        raise ValueError(
            f"{op_name}: argument {name!r} must be a float array [{dims.replace(' ', ', ')}] with elements, got {got}{remedy}"
        )
    return x


def _dims(given: Sequences, return_state: bool) -> tuple:
    """Returns the dims of the output, or of it and the state."""
    return (_OUT, given.state_dims(("N", "H", "Hv"))) if return_state else _OUT


def check_heads(op_name: str, query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    if query.shape[2] != key.shape[2] or value.shape[2] % key.shape[2]:
        raise ValueError(
            f"{op_name}: argument 'key' must have as many heads as 'query', and those of 'value' must be a multiple of them, "
            f"got {query.shape[2]}, {key.shape[2]} and {value.shape[2]} heads of query, key and value; repeat the heads of the "
            "others (jnp.repeat(x, n, axis=2))"
        )


def _prepared(
    op_name: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    g: jax.Array | None,
    options: dict[str, Any],
    *,
    return_state: bool,
    **where: Any,
) -> Prepared:
    """Returns the call of delta_rule, g as the contract has it, and what becomes of its outputs."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        checked(op_name, name, x, f"B T {'N Hv' if name == 'value' else 'K H'}")
    checked(op_name, "beta", beta, "B T N")
    check_heads(op_name, query, key, value)
    H, (B, T, N, Hv) = query.shape[-1], value.shape
    given = sequences(op_name, (B, T), (N, H, Hv), return_state=return_state, **where)
    if g is not None:
        options = {**options, "g": g}
    call = op.bind(query, key, value, beta, **options, **given.arguments)

    def finish(out: jax.Array, final: jax.Array) -> Any:
        return (out, given.state(final)) if return_state else out

    return Prepared(call, finish=finish, dims=_dims(given, return_state))


@public(op)
def delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    *,
    segment_ids: Any = None,
    cum_seqlens: Any = None,
    cu_seqlens: Any = None,
    initial_state: Any = None,
    state: Any = None,
    return_state: bool = False,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = False,
) -> Prepared:
    """Returns the output [B, T, N, Hv] of the delta rule, in the dtype of the values; with `return_state` also the state
    [B, N, H, Hv] after the last token, float32: S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T, out_t = softmax_scale *
    S_t^T q_t.

    Args:
      query, key: [B, T, K, H]. value: [B, T, N, Hv], N a multiple of K: head n of the values has head n // (N / K) of the keys.
      beta: [B, T, N]: how much of the value that the state has for a key is replaced; in [0, 1], or up to 2 for transitions
        with negative eigenvalues. With keys of norm above 1 the state may grow without bound, see `use_qk_l2norm`.
      segment_ids: int [B, T]: the state begins anew where they change; a negative one is padding, whose output is 0.
      cum_seqlens, cu_seqlens: int [sequences + 1], two names of [0, n1, n1 + n2, ...]: the arrays are one row (B = 1) of packed
        sequences, cut there. States are then [sequences, N, H, Hv].
      initial_state, state: two names of the state before the first token, [B, N, H, Hv]; default: zeros.
      softmax_scale: default 1 / sqrt(H).
      use_qk_l2norm: whether to divide queries and keys by their norms, x / sqrt(|x|^2 + 1e-6), as Qwen3-Next does.

    Raises:
      ValueError: naming the argument. Unsupported: the platform asked for cannot do it.

    >>> import jax.numpy as jnp
    >>> key = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2).repeat(2, axis=1)
    >>> value = jnp.array([4.0, 6.0]).reshape(1, 2, 1, 1)
    >>> out = delta_rule(key, key, value, jnp.full((1, 2, 1), 0.5), softmax_scale=1.0)
    >>> print(out.ravel())  # half of 4, then half of the way from 2 to 6
    [2. 4.]
    """
    where = {"segment_ids": segment_ids, "cum_seqlens": cum_seqlens, "cu_seqlens": cu_seqlens}
    where["initial_state"] = either("delta_rule", initial_state=initial_state, state=state)
    options = {"softmax_scale": softmax_scale, "use_qk_l2norm": use_qk_l2norm}
    return _prepared("delta_rule", query, key, value, beta, None, options, return_state=return_state, **where)


@public(op)
def gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    g: jax.Array | None = None,
    *,
    decay: jax.Array | None = None,
    segment_ids: Any = None,
    cum_seqlens: Any = None,
    cu_seqlens: Any = None,
    initial_state: Any = None,
    state: Any = None,
    return_state: bool = False,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = False,
) -> Prepared:
    """Returns the output [B, T, N, Hv] of the gated delta rule (Gated DeltaNet, Qwen3-Next), in the dtype of the values; with
    `return_state` also the state [B, N, H, Hv] after the last token, float32: S' = exp(g_t) S_{t-1}, S_t = S' + beta_t k_t
    (v_t - S'^T k_t)^T, out_t = softmax_scale * S_t^T q_t.

    Args:
      g, decay: two names of the logarithms of the decays, [B, T, N], at most 0; -inf forgets all.
      query, key, value, beta, segment_ids, cum_seqlens, cu_seqlens, initial_state, state, softmax_scale, use_qk_l2norm: as of
        `delta_rule`.

    Raises:
      ValueError: naming the argument. Unsupported: the platform asked for cannot do it.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((2, 5, 4, 8))
    >>> gate = jnp.ones((2, 5, 4))
    >>> out, state = gated_delta_rule(x, x, x, gate, -gate, use_qk_l2norm=True, return_state=True)
    >>> out.shape, state.shape
    ((2, 5, 4, 8), (2, 4, 8, 8))
    """
    name = "gated_delta_rule"
    g = either(name, g=g, decay=decay)
    remedy = "; decays of each channel are those of kernel_delta_attention" if getattr(g, "ndim", 0) == 4 else ""
    remedy = "; without decays it is delta_rule" if g is None else remedy
    g = checked(name, "g", g, "B T N", remedy)
    where = {"segment_ids": segment_ids, "cum_seqlens": cum_seqlens, "cu_seqlens": cu_seqlens}
    where["initial_state"] = either(name, initial_state=initial_state, state=state)
    options = {"softmax_scale": softmax_scale, "use_qk_l2norm": use_qk_l2norm}
    return _prepared(name, query, key, value, beta, g[..., None], options, return_state=return_state, **where)


@public(op)
def kernel_delta_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    g: jax.Array | None = None,
    *,
    decay: jax.Array | None = None,
    segment_ids: Any = None,
    cum_seqlens: Any = None,
    cu_seqlens: Any = None,
    initial_state: Any = None,
    state: Any = None,
    return_state: bool = False,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = False,
) -> Prepared:
    """Returns the output [B, T, N, Hv] of Kimi Delta Attention, the delta rule with a decay of each channel, in the dtype of
    the values; with `return_state` also the state [B, N, H, Hv] after the last token, float32: S' = diag(exp g_t) S_{t-1},
    S_t = S' + beta_t k_t (v_t - S'^T k_t)^T, out_t = softmax_scale * S_t^T q_t.

    Args:
      g, decay: two names of the logarithms of the decays, [B, T, N, H], at most 0; -inf forgets a channel.
      query, key, value, beta, segment_ids, cum_seqlens, cu_seqlens, initial_state, state, softmax_scale, use_qk_l2norm: as of
        `delta_rule`.

    Raises:
      ValueError: naming the argument. Unsupported: the platform asked for cannot do it.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((2, 5, 4, 8))
    >>> kernel_delta_attention(x, x, x, jnp.ones((2, 5, 4)), -x, use_qk_l2norm=True).shape
    (2, 5, 4, 8)
    """
    name = "kernel_delta_attention"
    g = either(name, g=g, decay=decay)
    remedy = "; one decay for all channels of a head is gated_delta_rule" if getattr(g, "ndim", 0) == 3 else ""
    remedy = "; without decays it is delta_rule" if g is None else remedy
    g = checked(name, "g", g, "B T N H", remedy)
    if is_array(query) and query.ndim == 4 and g.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"{name}: argument 'g' must have a decay for each of the H = {query.shape[-1]} channels of 'query', got "
            f"{g.shape[-1]} in its last dim; one decay for all channels of a head is gated_delta_rule"
        )
    where = {"segment_ids": segment_ids, "cum_seqlens": cum_seqlens, "cu_seqlens": cu_seqlens}
    where["initial_state"] = either(name, initial_state=initial_state, state=state)
    options = {"softmax_scale": softmax_scale, "use_qk_l2norm": use_qk_l2norm}
    return _prepared(name, query, key, value, beta, g, options, return_state=return_state, **where)


@public(rwkv7_op, module="RWKV7")
def rwkv7(
    r: jax.Array,
    w: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array,
    *,
    segment_ids: Any = None,
    cum_seqlens: Any = None,
    cu_seqlens: Any = None,
    initial_state: Any = None,
    state: Any = None,
    return_state: bool = False,
    softmax_scale: float | None = None,
) -> Prepared:
    """Returns the output [B, T, N, Hv] of the recurrence of RWKV-7, in the dtype of v; with `return_state` also the state
    [B, N, H, Hv] after the last token, float32. With S_t [H, Hv], keys by values:

        S_t = diag(exp w_t) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T,  out_t = softmax_scale * S_t^T r_t.

    `a` reads the state as it was before the token and its decay, and `b` writes what was read, as in flash-linear-attention;
    the model's are a = -kk and b = kk * (its rates), kk the normalised keys. The state of the paper is this one transposed.

    Args:
      r, w, k, a, b: [B, T, N, H]; v: [B, T, N, Hv].
      w: logarithms of the decays, at most 0; the model's are -exp(-0.5) * sigmoid(...).
      softmax_scale: default 1 / sqrt(H), as of every operation here; the model itself has 1.0.
      segment_ids, cum_seqlens, cu_seqlens, initial_state, state: as of `delta_rule`.

    Raises:
      ValueError: naming the argument. Unsupported: the platform asked for cannot do it.

    >>> import jax.numpy as jnp
    >>> x = jnp.full((1, 3, 2, 4), 0.5)
    >>> rwkv7(x, -x, x, x, -x, x, softmax_scale=1.0).shape
    (1, 3, 2, 4)
    """
    name = "rwkv7"
    for argument, x in (("r", r), ("w", w), ("k", k), ("v", v), ("a", a), ("b", b)):
        checked(name, argument, x, "B T N Hv" if argument == "v" else "B T N H")
    (B, T, N, H), Hv = r.shape, v.shape[-1]
    first = either(name, initial_state=initial_state, state=state)
    where = {"segment_ids": segment_ids, "cum_seqlens": cum_seqlens, "cu_seqlens": cu_seqlens, "initial_state": first}
    given = sequences(name, (B, T), (N, H, Hv), return_state=return_state, **where)
    call = rwkv7_op.bind(r, w, k, v, a, b, softmax_scale=softmax_scale, **given.arguments)

    def finish(out: jax.Array, final: jax.Array) -> Any:
        return (out, given.state(final)) if return_state else out

    return Prepared(call, finish=finish, dims=_dims(given, return_state))
