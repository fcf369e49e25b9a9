"""The gated delta rule for serving: concatenated tokens of many requests, with their states in a pool."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.engines.scan.recurrence import sizes
from kernels.framework import segments
from kernels.framework.public import Prepared, public
from kernels.framework.requests import check_cuts, known
from kernels.ops.delta_rule.contract import op
from kernels.ops.delta_rule.functions import check_heads
from kernels.ops.delta_rule.pool import pool_op


def _integers(name: str, x: Any, shape: str, size: int | None) -> jax.Array:
    x = jnp.asarray(x)
    if x.ndim != 1 or not jnp.issubdtype(x.dtype, jnp.integer) or x.shape[0] != (size or x.shape[0]):
        expected = shape if size is None else f"{shape} = [{size}]"
        raise ValueError(
            f"ragged_gated_delta_rule: argument {name!r} must be integers {expected}, got {x.dtype} of shape {x.shape}; "
            "query_start_loc is [0, n1, n1 + n2, ...], with one more entry than requests"
        )
    return x.astype(jnp.int32)


def _check_requests(cuts: Any, indices: Any, rows: Any, slots: Any, most: int | None) -> None:
    """Raises ValueError for invalid requests with known values: tokens beyond `max_query_len` would be dropped, and of
    two requests that share a slot one would be overwritten."""
    name = "ragged_gated_delta_rule"
    check_cuts(name, "query_start_loc", cuts, rows)
    cuts, indices = known(cuts), known(indices)
    if cuts is None or indices is None:
        return
    tokens = np.where((indices >= 0) & (indices < slots), np.diff(cuts), 0)  # padding writes nothing
    if most is not None and (tokens > most).any():
        raise ValueError(
            f"{name}: argument 'max_query_len' = {most}, but a request has {tokens.max()} tokens in 'query_start_loc'; "
            "pass the maximum number of tokens of a request, or None"
        )
    used, times = np.unique(indices[tokens > 0], return_counts=True)
    if (times > 1).any():
        raise ValueError(
            f"{name}: argument 'state_indices' has slot {used[times > 1][0]} for several requests with tokens; a slot "
            "stores one state"
        )


@public(op, pool_op)
def ragged_gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    g: jax.Array,
    state_pool: jax.Array,
    query_start_loc: Any,
    state_indices: Any,
    has_initial_state: Any = None,
    *,
    max_query_len: int | None = None,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = False,
) -> Prepared:
    """Returns (out [M, N, Hv], new pool) of the gated delta rule for many requests, each with its own state in a pool.

    Request r has the tokens query_start_loc[r] to query_start_loc[r + 1] - 1, continues from
    state_pool[state_indices[r]], and stores its final state there. All other slots are returned bit for bit. Tokens
    past the last request have output 0. With `max_query_len=1` kernels for GPUs write the states where they are, and touch no
    other slot: donate the pool to the program (`jax.jit(..., donate_argnames="state_pool")`), or XLA copies it first.

    Args:
      query, key: [M, K, H]. value: [M, N, Hv], N a multiple of K. beta, g: [M, N], g are log decays.
      state_pool: [slots, N, H, Hv], of any float dtype; computed in float32.
      query_start_loc: int [requests + 1], [0, n1, n1 + n2, ...]; equal entries are a request without tokens.
      state_indices: int [requests], slots. Two requests with tokens may not share one. A request with a negative slot,
        or one past the pool, is padding: its outputs are 0, and it writes nothing.
      has_initial_state: bool [requests]: if false the request starts from zeros, whatever is in its slot.
      max_query_len: upper bound on the tokens of a request. Requests are then computed in parallel, as a batch with
        that many tokens each: for drafts, and for decoding (1), which has kernels of its own. Tokens beyond it have
        output 0 and do not affect the state. None: chunk by chunk, one request after another, which suits long prompts.
      softmax_scale: default 1 / sqrt(H).
      use_qk_l2norm: as in `delta_rule`; Qwen3-Next's layers need it.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    >>> import jax.numpy as jnp
    >>> x, ones = jnp.ones((5, 2, 4)), jnp.ones((5, 2))
    >>> out, pool = ragged_gated_delta_rule(x, x, x, ones, -ones, jnp.zeros((8, 2, 4, 4)), [0, 1, 5], [6, 2])
    >>> print(jnp.nonzero(pool.any((1, 2, 3)))[0])
    [2 6]
    """
    name = "ragged_gated_delta_rule"
    named = {"query": (query, "M K H"), "key": (key, "M _ H"), "value": (value, "M N Hv"), "beta": (beta, "M N")}
    dim_sizes = sizes(name, {**named, "g": (g, "M N"), "state_pool": (state_pool, "slots N H Hv")})
    check_heads(name, query.shape[1], key.shape[1], value.shape[1])
    M, N, H, Hv, slots = (dim_sizes[d] for d in ("M", "N", "H", "Hv", "slots"))
    indices = _integers("state_indices", state_indices, "[requests]", None)
    requests = indices.shape[0]
    cuts = _integers("query_start_loc", query_start_loc, "[requests + 1]", requests + 1)
    used = (indices >= 0) & (indices < slots)
    begun = None if has_initial_state is None else jnp.asarray(has_initial_state)
    if begun is not None and (begun.shape != (requests,) or begun.dtype != jnp.bool_):
        got = f"{begun.dtype} of shape {begun.shape}"
        raise ValueError(f"{name}: argument 'has_initial_state' must be bool [requests] = [{requests}], got {got}")
    arrays = {"query": query, "key": key, "value": value, "beta": beta, "g": g[..., None]}
    arrays = {n: jnp.asarray(x) for n, x in arrays.items()}  # NumPy arrays cannot be indexed by tracers
    options = {"softmax_scale": softmax_scale, "use_qk_l2norm": use_qk_l2norm}
    if max_query_len == 1 and not isinstance(max_query_len, bool):
        _check_requests(query_start_loc, state_indices, M, slots, max_query_len)
        tokens = jnp.where(used & (jnp.diff(cuts) > 0), cuts[:-1], M)
        pooled = {"state_pool": jnp.asarray(state_pool), "state_indices": jnp.full(M, -1, jnp.int32)}
        pooled["state_indices"] = pooled["state_indices"].at[tokens].set(indices, mode="drop")
        if begun is not None:
            pooled["has_initial_state"] = jnp.zeros(M, bool).at[tokens].set(begun, mode="drop")
        call = pool_op.bind(**arrays, **pooled, **options)
        return Prepared(call, returns=pool_op.outputs, op=pool_op, cuts="query_start_loc")
    states = jnp.asarray(state_pool)[indices.clip(0, slots - 1)].astype(jnp.float32)
    if begun is not None:
        states = jnp.where(begun[:, None, None, None], states, 0)

    def written(final: jax.Array) -> jax.Array:
        destinations = jnp.where(used & (jnp.diff(cuts) > 0), indices, slots)
        return jnp.asarray(state_pool).at[destinations].set(final.astype(state_pool.dtype), mode="drop")

    if max_query_len is None:
        _check_requests(query_start_loc, state_indices, M, slots, None)
        ids = segments.of_cuts(cuts, M)[0]
        ids = jnp.where((ids >= 0) & used[ids.clip(0)], ids, -1)
        arrays = {n: x[None] for n, x in arrays.items()}
        if requests > 1:
            options["num_states"] = requests
        call = op.bind(**arrays, segment_ids=ids[None], initial_state=states[None], **options)
        return Prepared(
            call,
            finish=lambda out, final: (out[0], written(final[0])),
            dims=(("M", "N", "Hv"), ("slots", "N", "H", "Hv")),
            cuts="query_start_loc",
        )
    if not isinstance(max_query_len, int) or isinstance(max_query_len, bool) or max_query_len < 1:
        raise ValueError(
            f"{name}: argument 'max_query_len' must be an integer of at least 1, or None, got {max_query_len!r}"
        )
    _check_requests(query_start_loc, state_indices, M, slots, max_query_len)
    tokens = cuts[:-1, None] + jnp.arange(max_query_len)
    valid = (tokens < cuts[1:, None]) & used[:, None]
    arrays = {n: x[tokens.clip(0, M - 1)] for n, x in arrays.items()}
    ids = jnp.where(valid, 0, -1)
    call = op.bind(**arrays, segment_ids=ids, initial_state=states[:, None], **options)

    def finish(out: jax.Array, final: jax.Array) -> tuple[jax.Array, jax.Array]:
        flat = jnp.zeros((M, N, Hv), out.dtype)
        return flat.at[jnp.where(valid, tokens, M)].set(out, mode="drop"), written(final[:, 0])

    dims = (("M", "N", "Hv"), ("slots", "N", "H", "Hv"))
    return Prepared(call, finish=finish, dims=dims, cuts="query_start_loc")
