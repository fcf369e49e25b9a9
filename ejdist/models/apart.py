"""The layers of a decoder one by one, each with arrays of its own: how they run in a step of a generation.

Training runs layers as a scan over stacks, and a scan takes a layer's matrices out of their stacks before their products: in a
step of a few tokens, whose time is that of reading the matrices once, it would move each of them three times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.layout import row_of
from ejdist.models.config import DecoderShape
from ejdist.models.kept import Arrays, Serving
from ejdist.models.packing import Packing
from ejdist.models.parameters import Param, cast
from ejdist.models.part import LayerContext, Part
from ejdist.models.stack import check_rows, layers_of, parts_of, used
from ejdist.packed import Packed, of_experts, packed_rows, stacked

Layers = list[dict[str, tuple[Any, ...]]]  # of each layer, by part: (parameters, buffers)


def layers_apart(
    params: Mapping[str, Any],
    buffers: Mapping[str, Any],
    c: DecoderShape,
    *,
    donate: bool = False,
    packing: Packing | None = None,
) -> Layers:
    """Returns the layers' own arrays, where the stacks lie: a copy, with matrices in the compute dtype.

    Args:
      params, buffers: as declared by `declare_layers` and `declare_buffers`.
      donate: free each stack of the parameters when its rows are copied: beside the rows there is then one stack at a time.
      packing: which matrices are packed, if any are; those that are packed already (`packed_layers`) stay so.

    Raises:
      ValueError: a stack has the wrong number of rows.
    """
    check_rows(c, range(c.num_layers), dict(params), buffers)

    def matrices(name: str, p: Param) -> list[Any]:
        if packing is None or name not in packing.packed:
            return rows_of(params[name], c.compute_dtype if p.cast else None, donate)
        return _packed(params[name], p, c, packing.form, donate)

    rows = {}
    for name, part in parts_of(c).items():
        weights = {k: matrices(k, p) for k, p in part.declare(c).items()}
        state = {k: rows_of(x, None, False) for k, x in buffers.get(name, {}).items()}
        rows[name] = weights, state
    before: Counter[str] = Counter()
    layers = []
    for parts in layers_of(c):
        layers.append(
            {p.name: tuple({k: x[before[p.name]] for k, x in of.items()} for of in rows[p.name]) for p in parts}
        )
        before.update(p.name for p in parts)
    return layers


def packed_layers(
    params: Mapping[str, Any], c: DecoderShape, packing: Packing, *, donate: bool = False
) -> dict[str, Any]:
    """Returns the stacks of all layers, in which those of a packing are packed: what `run_layers` and `layers_apart` take.

    Args:
      params: as declared by `declare_layers`.
      donate: free each stack that is packed once it is.
    """
    declared = {name: p for part in parts_of(c).values() for name, p in part.declare(c).items()}
    packed = {name: stacked(_packed(params[name], declared[name], c, packing.form, donate)) for name in packing.packed}
    return {**params, **packed}


def _packed(stack: Any, p: Param, c: DecoderShape, form: str, donate: bool) -> list[Packed]:
    """Returns the rows of a stack of matrices, packed as they are in the dtype that the model computes in."""
    dtype, sums = c.compute_dtype if p.cast else stack.dtype, len(p.inputs.split())
    return packed_rows(stack, sums, form, dtype, donate, of_experts(p.dims.split()))


def rows_of(stack: Any, dtype: Any, donate: bool) -> list[Any]:
    """Returns the rows of a stack, an array, `Frozen` or `Packed`, as arrays of their own, sharded like the stack.

    Args:
      dtype: of the rows of an array, and of the adapter of a frozen one; None for that of the stack.
      donate: delete the stack.
    """
    leaves, tree = jax.tree.flatten(stack)
    traced = isinstance(leaves[0], jax.core.Tracer)
    places = tuple(None if traced else row_of(x.sharding) for x in leaves)
    rows = _split(tree, leaves[0].shape[0], dtype, places)(stack)
    for leaf in leaves if donate else ():
        leaf.delete()
    return rows


@lru_cache(maxsize=256)
def _split(tree: Any, count: int, dtype: Any, places: tuple[Any, ...]) -> Callable[[Any], list[Any]]:
    """Returns the function of `rows_of`, which is compiled once for all stacks of a shape and place."""

    def split(stack: Any) -> list[Any]:
        stack = stack if dtype is None else cast(stack, dtype)
        return [jax.tree.map(itemgetter(i), stack) for i in range(count)]

    where = [jax.tree.unflatten(tree, places)] * count if all(places) else None
    return jax.jit(split, out_shardings=where)


def run_apart(
    x: jax.Array, layers: Layers, kept: Arrays, c: DecoderShape, context: Callable[..., LayerContext], serving: Serving
) -> tuple[jax.Array, Arrays]:
    """Returns (x, what layers keep) after all layers.

    Args:
      layers: see `layers_apart`.
      kept: what all layers keep, as declared by `declare_kept`. It goes through the layers whole, so that each replaces its own
        row where it is; none is copied.
      context: `LayerContext` without the fields that differ between layers.
      serving: serves their operations over what is kept.
    """
    before: Counter[str] = Counter()
    # Layers of a kind are traced once, and lowered to one function.
    kinds: dict[tuple[Part, ...], Callable[..., Any]] = {}
    for i, (parts, arrays) in enumerate(zip(layers_of(c), layers, strict=True)):
        layer = kinds.setdefault(tuple(parts), jax.jit(partial(_layer, parts=parts, context=context, serving=serving)))
        rows = {p.name: jnp.int32(before[p.name]) for p in parts}
        with jax.named_scope("layer"):
            x, kept = layer(x, kept, arrays, rows, jnp.int32(i))
        before.update(p.name for p in parts)
    return x, kept


def _layer(
    x: jax.Array,
    kept: Arrays,
    arrays: Any,
    rows: Any,
    layer: Any,
    parts: list[Part],
    context: Callable[..., LayerContext],
    serving: Serving,
) -> tuple[jax.Array, Arrays]:
    for part in parts:
        with jax.named_scope(part.name):
            weights, buffers = arrays[part.name]
            ctx = context(layer=layer, buffers=buffers)
            serves = serving.layer(part.name, ctx.ops, kept.get(part.name, {}), rows[part.name])
            x, _ = part.apply(x, used(part, weights, ctx.config, x.dtype), replace(ctx, ops=serves.ops))
            if part.name in kept:
                kept = kept | {part.name: serves.arrays}
    return x, kept
