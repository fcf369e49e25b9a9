"""Public functions: native sparse attention with the field's usual arguments, converted to the contract's form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.framework import segments
from kernels.framework.binding import is_array, is_float_array
from kernels.framework.public import Prepared, public
from kernels.ops.native_sparse_attention.contract import check_sizes, op

_WHAT = "native_sparse_attention: argument"


def _one_of(**aliases: Any) -> tuple[str, Any]:
    """Returns the name and value of an argument that has two names, under the one that was used."""
    named = [(n, x) for n, x in aliases.items() if x is not None]
    if len(named) > 1:
        names = " and ".join(repr(n) for n, _ in named)
        raise ValueError(
            f"native_sparse_attention: arguments {names} are two names for the same argument; pass only one"
        )
    return named[0] if named else (next(iter(aliases)), None)


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _integer(name: str, value: Any, least: int) -> int:
    if not _is_int(value) or value < least:
        raise ValueError(f"{_WHAT} {name!r} must be an integer of at least {least}, got {value!r}")
    return int(value)


def _integers(name: str, value: Any, shapes: tuple[tuple[int, ...], ...], meaning: str) -> jax.Array:
    """Returns int32 [B, T, K, ...]; values per block of queries are repeated for its tokens."""
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.shape[:3] not in shapes:
        expected = " or ".join(str(list(s)) for s in dict.fromkeys(shapes))
        raise ValueError(
            f"{_WHAT} {name!r} must be integers of dims {expected}{meaning}, got {array.dtype} of shape {array.shape}"
        )
    return array.astype(jnp.int32)


def _starts(ids: jax.Array) -> jax.Array:
    """Returns the index of the first token of each token's document, -1 for padding. A document is a run of equal
    ids."""
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)
    new = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jnp.where(ids >= 0, jax.lax.cummax(jnp.where(new, index, 0), axis=1), -1)


@public(op)
def native_sparse_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g_cmp: jax.Array | None = None,
    g_slc: jax.Array | None = None,
    g_swa: jax.Array | None = None,
    block_indices: Any = None,
    block_counts: Any = None,
    block_size: int = 64,
    sliding_window: int | None = None,
    softmax_scale: float | None = None,
    cu_seqlens: Any = None,
    *,
    window_size: int | None = None,
    scale: float | None = None,
    cum_seqlens: Any = None,
    segment_ids: Any = None,
) -> Prepared:
    """Returns native sparse attention [B, T, N, Hv]: g_cmp * compressed + g_slc * selected + g_swa * sliding, causal.

    Three attentions of the same queries, each with its own softmax: over the mean keys and values of past blocks, over
    the tokens of a few selected blocks, and over the last tokens. Gradients flow to query, key, value and the gates,
    but not through the choice of blocks.

    Args:
      query: [B, T, N, H]. key: [B, S, K, H]. value: [B, S, K, Hv]. N must be a multiple of K (GQA). With T < S the
        queries are the last of the S tokens.
      g_cmp, g_slc, g_swa: [B, T, N], gates of the branches. Without g_cmp there is no compressed branch; without g_slc
        or g_swa that gate is 1.
      block_indices: int [B, T, K, n], the blocks that each query selects, per key head; or [B, T / block_size, K, n],
        rounded up, for all queries of a block. -1 is no block, and a repeated block counts once. Blocks are counted
        from the start of the document. By default blocks are chosen by the weights of the compressed attention,
        averaged over the query heads of a key head; the query's own block, the first, and the one before its own are
        always included.
      block_counts: maximum number of selected blocks: an integer (default 16 if blocks are chosen), or int [B, T, K].
        With block_indices, that many of the first are used, by default all.
      block_size: tokens per block. It affects the result.
      sliding_window: tokens of the sliding branch, including the query's own; None: no sliding branch.
      softmax_scale: default 1/sqrt(H).
      cu_seqlens: [0, n1, n1 + n2, ...], cumulative lengths along a packed axis; the batch must be 1.
      window_size, scale, cum_seqlens: other names for sliding_window, softmax_scale and cu_seqlens.
      segment_ids: int [B, S]; a document is a run of equal ids; -1 is padding, which sees nothing and gives 0.
      cfg: `NativeSparseConfig`.

    Raises:
      ValueError: names the invalid argument. Unsupported: no backend can run the call.

    >>> import jax.numpy as jnp
    >>> x, gate = jnp.ones((1, 12, 2, 4)), jnp.full((1, 12, 2), 0.5)
    >>> native_sparse_attention(x, x, x, gate, gate, gate, block_size=4, block_counts=2, sliding_window=3).shape
    (1, 12, 2, 4)
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not is_array(x) or not is_float_array(x) or x.ndim != 4 or 0 in x.shape:
            got = f"{x.dtype} of shape {x.shape}" if is_array(x) else type(x).__name__
            raise ValueError(
                f"{_WHAT} {name!r} must be floats [batch, length, heads, width] without empty dims, got {got}"
            )
    (B, T, N, _), (S, K) = query.shape, key.shape[1:3]
    size = _integer("block_size", block_size, 1)
    name, width = _one_of(sliding_window=sliding_window, window_size=window_size)
    # By convention 0 means no window. A window longer than the keys is clipped to them, since it determines what is read.
    window = 0 if width is None else min(_integer(name, width, 0), S)
    if g_swa is not None and window == 0:
        raise ValueError(f"{_WHAT} 'g_swa' is the gate of the sliding branch, which requires 'sliding_window'")
    check_sizes(N, K, T, S, size, 1, window)
    arguments: dict[str, Any] = {"block_size": size, "window": window}
    for name, gate in (("g_cmp", g_cmp), ("g_slc", g_slc), ("g_swa", g_swa)):
        if gate is None:
            continue
        if not is_array(gate) or not is_float_array(gate) or gate.shape != (B, T, N):
            got = f"{gate.dtype} of shape {gate.shape}" if is_array(gate) else type(gate).__name__
            raise ValueError(f"{_WHAT} {name!r} must be floats [B, T, N] = {(B, T, N)}, got {got}")
        arguments[name] = gate
    arguments |= _selection(block_indices, block_counts, B, T, K, size)
    name, softmax_scale = _one_of(softmax_scale=softmax_scale, scale=scale)
    if softmax_scale is not None:
        arguments["softmax_scale"] = softmax_scale
    name, cuts = _one_of(cu_seqlens=cu_seqlens, cum_seqlens=cum_seqlens)
    documents = _documents(name, cuts, segment_ids, B, T, S)
    if documents is not None:
        arguments["starts"] = documents
    return Prepared(op.bind(query, key, value, **arguments), cuts="" if cuts is None else name)


def _selection(block_indices: Any, block_counts: Any, B: int, T: int, K: int, size: int) -> dict[str, Any]:
    """Returns the contract's arguments that select blocks."""
    arguments: dict[str, Any] = {}
    if block_indices is not None:
        blocks = -(-T // size)
        meaning = ", then the number of blocks selected, per query or per block of queries"
        indices = _integers("block_indices", block_indices, ((B, T, K), (B, blocks, K)), meaning)
        if indices.ndim != 4 or indices.shape[3] == 0:
            raise ValueError(
                f"{_WHAT} 'block_indices' must be [B, T, K, n] with at least one block, got shape {indices.shape}"
            )
        arguments["block_indices"] = indices if indices.shape[1] == T else jnp.repeat(indices, size, axis=1)[:, :T]
    if block_counts is None or _is_int(block_counts):
        count = 16 if block_counts is None else _integer("block_counts", block_counts, 1)
        if block_indices is None:
            return {"num_blocks": count}
        return arguments if block_counts is None else {"block_indices": arguments["block_indices"][..., :count]}
    counts = _integers("block_counts", block_counts, ((B, T, K),), ", or one integer")
    if counts.ndim != 3:
        raise ValueError(f"{_WHAT} 'block_counts' must be [B, T, K] or one integer, got shape {counts.shape}")
    if block_indices is None:
        if isinstance(block_counts, jax.core.Tracer):
            raise ValueError(
                f"{_WHAT} 'block_counts' is traced, but the maximum number of blocks is compiled into the program: "
                "pass one integer, or also 'block_indices'"
            )
        arguments["num_blocks"] = max(1, int(np.max(np.asarray(block_counts))))
    return arguments | {"block_counts": counts}


def _documents(name: str, cuts: Any, segment_ids: Any, B: int, T: int, S: int) -> jax.Array | None:
    if cuts is not None and segment_ids is not None:
        raise ValueError(
            f"native_sparse_attention: arguments {name!r} and 'segment_ids' both define the documents; pass only one"
        )
    if cuts is None and segment_ids is None:
        return None
    if cuts is not None:
        if T != S:
            raise ValueError(f"{_WHAT} {name!r} requires queries for all tokens, not {T} of {S}: give 'segment_ids'")
        array = jnp.asarray(cuts)
        if B != 1 or array.ndim != 1 or array.shape[0] < 2 or not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(
                f"{_WHAT} {name!r} must be integers [0, n1, n1 + n2, ...] for one packed row, got {array.dtype} of shape "
                f"{array.shape} for {B} rows"
            )
        segments.check_cuts(name, cuts, T, "native_sparse_attention: ")
        return _starts(segments.of_cuts(array, T))
    ids = segment_ids if isinstance(segment_ids, jax.Array) else np.asarray(segment_ids)
    if ids.shape != (B, S) or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"{_WHAT} 'segment_ids' must be integers [B, S] = {(B, S)}, got {ids.dtype} of shape {ids.shape}"
        )
    return _starts(jnp.asarray(segments.narrowed(ids, "segment_ids")))
