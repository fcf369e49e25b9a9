"""How layers run in a step of a generation: their operations over what was kept of the tokens before.

A step has rows of new tokens, each of a request, at the end of the row. What mixes the tokens of a row is replaced here, and
all else of a layer runs as in training: attention writes its keys and values into pages and reads all of the request's there,
and a recurrence goes on from the state of the request's slot. The arrays of all layers are stacked, and a layer reads and
replaces its own row of them: nothing is copied in a step, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from ejdist.generation.rows import Rows
from ejdist.generation.sparse_step import attended, summed
from ejdist.models.kept import Kept
from ejdist.models.ops import Ops
from ejdist.operations import SHARDED
from kernels.ops.paged_attention import written

Pages = tuple[jax.Array, ...]


def _attention(
    pages: Pages,
    row: jax.Array,
    rows: Rows,
    ops: Ops,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    **options: Any,
) -> tuple[jax.Array, Pages]:
    """Returns (causal attention of the new tokens over all of their requests, the pages with their keys and values)."""
    keys, values = _appended(pages, row, rows, ops, key, value)
    tables = _of_layer(rows.tables, row, *pages[0].shape[1:3])
    out = _over_pages(query, (keys, values), tables, rows, ops, options)
    return out, tuple(x.reshape(old.shape) for x, old in zip((keys, values), pages, strict=True))


def _sparse_attention(
    pages: Pages,
    row: jax.Array,
    rows: Rows,
    ops: Ops,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *gates: jax.Array,
    **options: Any,
) -> tuple[jax.Array, Pages]:
    """Returns (native sparse attention of the new tokens over all of their requests, the pages with their keys and values).

    One token reads means, the blocks that it chooses and a window. For more, and where pages are spread and have no sums, the
    keys of a request are taken out of its pages, as many as the longest request has, so that its last one is at the end: where
    the last query is. What is before its first is padding.
    """
    (*both, page), sums = pages[0].shape[1:4], pages[2:]
    stacks = _appended(pages[:2], row, rows, ops, key, value)
    tables = _of_layer(rows.tables, row, *both)
    sums = tuple(summed(x, stack, tables, rows) for x, stack in zip(sums, stacks))
    after = tuple(x.reshape(old.shape) for x, old in zip((*stacks, *sums), pages, strict=True))
    if sums and query.shape[1] == 1:
        sums = [x.reshape(-1, *x.shape[3:]) for x in sums]
        return attended(query, gates, stacks, sums, tables, rows, ops, **_without_ids(options)), after
    length = max(tables.shape[1] * page, query.shape[1])
    place = jnp.arange(length) - (length - rows.lengths[:, None])
    at = jnp.maximum(place, 0)
    entries = jnp.take_along_axis(tables, at // page, axis=1) * page + at % page
    whole = (ops.constrain(x.reshape(-1, *x.shape[2:])[entries], "B T K _") for x in stacks)
    ids = jnp.where(place >= 0, 0, -1).astype(jnp.int32)
    out = ops.native_sparse_attention(query, *whole, *gates, **_without_ids(options), segment_ids=ids)
    return _of_real(out, rows), after


def _appended(pages: Pages, row: jax.Array, rows: Rows, ops: Ops, key: jax.Array, value: jax.Array) -> Pages:
    """Returns the pages of all layers, [all pages, page, K, H], with the keys and values of a layer's new tokens."""
    layers, each, slots = pages[0].shape[1:4]
    new = (ops.constrain(x.reshape(-1, *x.shape[2:]), "_ K _") for x in (key, value))
    stacks = (x.reshape(-1, *x.shape[3:]) for x in pages)
    return ops.append_to_cache(*new, *stacks, _of_layer(rows.entries.reshape(-1), row, layers, each * slots))


def _latent_attention(
    pages: Pages,
    row: jax.Array,
    rows: Rows,
    ops: Ops,
    query: jax.Array,
    latent: jax.Array,
    key_up: Any,
    value_up: Any,
    query_rope: jax.Array,
    key_rope: jax.Array,
    **options: Any,
) -> tuple[jax.Array, Pages]:
    """Returns (latent attention, the pages of latents). Queries are projected to the latent, which then serves as key and value
    of all heads, so no keys or values of earlier tokens are computed again (DeepSeek-V2, 2024, section 2.1.2)."""
    (stack,) = pages
    B, T, N, _ = query.shape
    new = ops.constrain(jnp.concatenate([latent, key_rope], axis=-1).reshape(B * T, 1, -1), "_ _ _")
    ranks, layers, each, slots, kept = stack.shape
    entries = _of_layer(rows.entries.reshape(-1), row, layers, each * slots)
    cache = written(stack.reshape(-1, slots, 1, kept), new, entries, None)[:, :, 0]
    width = query.shape[-1] + query_rope.shape[-1]
    options = {"softmax_scale": width**-0.5, **_without_ids(options)}
    absorbed, turned = ops.project(query, key_up, "btnh,rnh->btnr"), query_rope
    absorbed, turned = (ops.constrain(x.reshape(B * T, N, -1), "_ N _") for x in (absorbed, turned))
    tables = _of_layer(rows.tables, row, layers, each)
    if ranks > 1:
        # As attention over one head, whose values are its whole keys: the part of the latent is kept.
        joined = jnp.concatenate([absorbed, turned], axis=-1).reshape(B, T, N, -1)
        heads = cache[:, :, None]
        out = _over_pages(joined, (heads, heads), tables, rows, ops, options)[..., : absorbed.shape[-1]]
    else:
        begins = T * jnp.arange(B + 1, dtype=jnp.int32)
        out = ops.multi_latent_ragged_page_attention(absorbed, turned, cache, rows.lengths, tables, begins, **options)
        out = _of_real(ops.constrain(out.reshape(B, T, N, -1), "B T N _"), rows)
    values = ops.project(out, value_up, "btnr,rnh->btnh")
    # Heads side by side, as the output projection has them: else XLA transposes that matrix to another order in every step.
    joined = jax.lax.optimization_barrier(values.reshape(B, T, -1))
    return joined.reshape(values.shape), (cache.reshape(stack.shape),)


def _of_layer(numbers: jax.Array, row: jax.Array, layers: int, each: int) -> jax.Array:
    """Returns page or entry numbers of a layer as numbers in the stack [ranks, layers, each] of all layers; negative ones are
    unchanged."""
    return jnp.where(numbers >= 0, numbers + (numbers // each * (layers - 1) + row) * each, numbers)


def _over_pages(
    query: jax.Array, pages: Pages, tables: jax.Array, rows: Rows, ops: Ops, options: Mapping[str, Any]
) -> jax.Array:
    out = ops.page_attention(query, *pages, kv_lens=rows.lengths, block_tables=tables, **_without_ids(options))
    return _of_real(out, rows)


def _without_ids(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options without segment ids: a request is one document, and its padding is in no page."""
    ids = ("causal", "segment_ids", "q_segment_ids", "kv_segment_ids")
    return {name: x for name, x in options.items() if name not in ids}


def _of_real(out: jax.Array, rows: Rows) -> jax.Array:
    """Returns the output of a step's tokens, 0 for padding. A row of one token has none: without a request it has no keys, and
    its output is 0 already."""
    if out.shape[1] == 1:
        return out
    return jnp.where((rows.entries >= 0)[..., None, None], out, 0)


def _recurrence(
    function: Callable[..., Any], states: Pages, row: jax.Array, rows: Rows, *arguments: Any, **options: Any
) -> tuple[jax.Array, Pages]:
    """Returns (the output of a recurrence that continues from each request's state, the pool with the new states)."""
    (pool,) = states
    before = pool.at[row, rows.slots].get(mode="clip")
    before = jnp.where(rows.fresh.reshape(-1, *[1] * (before.ndim - 1)), 0, before)
    out, after = function(*arguments, state=before, return_state=True, **options)
    return out, (pool.at[row, rows.slots].set(after.astype(pool.dtype), mode="drop"),)


# Operation -> its form over pages.
OVER_PAGES: dict[str, Callable[..., tuple[jax.Array, Pages]]] = {
    "attention": _attention,
    "flash_mla": _latent_attention,
    "native_sparse_attention": _sparse_attention,
}


class OfLayer:
    """The operations of one part of one layer in a step. They read and replace what the part keeps between steps.

    An operation that mixes tokens but keeps nothing is refused: it would see the tokens of this step alone.
    """

    def __init__(
        self, part: str, ops: Ops, declared: Mapping[str, Kept], arrays: Mapping[str, Any], row: Any, rows: Rows
    ) -> None:
        self.arrays = dict(arrays)
        pending = set(declared)

        def serve(name: str, *arguments: Any, **options: Any) -> jax.Array:
            if name not in pending:
                raise ValueError(
                    f"layers with {part} call {name} twice but keep one state of it, so they cannot generate; use python -m "
                    "launch.evaluate, which needs no cache"
                )
            pending.remove(name)
            pages = self.arrays[name]
            if declared[name].per_token:
                out, self.arrays[name] = OVER_PAGES[name](pages, row, rows, ops, *arguments, **options)
            else:
                out, self.arrays[name] = _recurrence(getattr(ops, name), pages, row, rows, *arguments, **options)
            return out

        def refuse(name: str, *arguments: Any, **options: Any) -> NoReturn:
            raise ValueError(
                f"layers with {part} call {name} but declare no cache for it (Part.keeps), so they cannot generate; if the "
                "model has adapters, export it first (python -m launch.export); else use launch.evaluate"
            )

        mixes = {name for name, function in SHARDED.items() if function.of_sequences} | {*OVER_PAGES}
        replaced = {name: partial(refuse, name) for name in mixes - {*declared}}
        replaced |= {name: partial(serve, name) for name in declared}
        self.ops = ops.replace(**replaced, sends_latents=lambda itemsize, adapted, **dims: not adapted)


@dataclass(frozen=True)
class Step:
    """Serves the layers of a step; see `ejdist.models.kept.Serving`."""

    declared: Mapping[str, tuple[int, Mapping[str, Kept]]]
    rows: Rows

    def layer(self, part: str, ops: Ops, arrays: Mapping[str, Any], row: Any) -> OfLayer:
        _, declared = self.declared.get(part, (0, {}))
        return OfLayer(part, ops, declared, arrays, row, self.rows)
