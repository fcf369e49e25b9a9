"""Rows of a stored table, such as the embeddings of tokens, with the table and the tokens split over devices.

A table is sharded like the parameters, its width over devices that also split the batch. Left to itself the compiler keeps
its gradient there from the start; where more axes split the batch it then gathers the cotangents of all tokens on every device
(60 GiB of temporaries for DeepSeek-V3 on 512 chips). There each device adds up those of its own tokens instead, and the sum is
scattered to the table's shards.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.layout import Layout, current_layout, gather, on_mesh, spec
from ejdist.mapped import map_shards
from ejdist.mesh import mesh_here
from kernels.framework.segments import indices


def embedding(table: jax.Array, tokens: jax.Array, *, mesh: Any = None) -> jax.Array:
    """Returns table[tokens], [B, T, D], split as activations are.

    Args:
      table: [V, D], as the layout stores parameters: V is gathered where it is not split in activations, D always.
      tokens: int [B, T], in [0, V); any other has a row of NaN, on any mesh.
      mesh: None for one device.

    Raises:
      ValueError: a dim does not divide over the mesh.
    """
    table, tokens, mesh = jnp.asarray(table), indices(tokens), mesh_here(mesh)
    layout = current_layout()
    batch, width = (
        set(on_mesh(t, mesh).get(d, ())) if mesh else set()
        for t, d in ((layout.activations, "B"), (layout.parameters, "D"))
    )
    if not width or batch <= width:  # the compiler moves the cotangents by an all-to-all, or not at all
        return _rows(gather(table, "V D", mesh), tokens)
    return _mapped(mesh, _key(layout), table.shape, tokens.shape)(table, tokens)


def _rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def _key(layout: Layout) -> tuple:
    return tuple(tuple(sorted(table.items())) for table in (layout.activations, layout.parameters))


@functools.lru_cache(maxsize=64)
def _mapped(mesh: Any, layout: tuple, table_shape: tuple, tokens_shape: tuple) -> Any:
    activations, parameters = (on_mesh(dict(table), mesh) for table in layout)
    vocabulary = activations.get("V", ())
    # Over axes that split no token the compiler gathers, outside: there each device would have the whole gradient.
    tokens = {a for d, size in zip("BT", tokens_shape, strict=True) if size > 1 for a in activations.get(d, ())}
    width = tuple(a for a in parameters.get("D", ()) if a in tokens)
    parts = math.prod(mesh.shape[a] for a in width)
    width = width if table_shape[1] % parts == 0 else ()
    of_table = spec(("V", "D"), {"V": vocabulary, "D": width}, shape=table_shape, mesh=mesh, what="the table")
    of_tokens = spec(("B", "T"), activations, shape=tokens_shape, mesh=mesh, what="tokens")
    out = spec(("B", "T", "_"), activations, shape=(*tokens_shape, table_shape[1]), mesh=mesh, what="tokens")

    def body(table: jax.Array, tokens: jax.Array) -> jax.Array:
        if width:
            table = jax.lax.all_gather(table, width, axis=1, tiled=True)
        if not vocabulary:
            return _rows(table, tokens)
        # A token of another device's part of the vocabulary is 0 here, and one outside the vocabulary NaN.
        local_tokens = tokens - jax.lax.axis_index(vocabulary) * table.shape[0]
        here = (local_tokens >= 0) & (local_tokens < table.shape[0])
        valid = (tokens >= 0) & (tokens < table_shape[0])
        rows = jnp.where(
            here[..., None], _rows(table, jnp.where(here, local_tokens, 0)), jnp.where(valid, 0, jnp.nan)[..., None]
        )
        return jax.lax.psum(rows.astype(table.dtype), vocabulary)

    return map_shards(body, mesh, (of_table, of_tokens), out)
