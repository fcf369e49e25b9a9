"""A matrix that generation reads in a few bits a number: how it is packed, and the product of activations with it.

A packed matrix is [sums, others]: the dims that a product sums over are flattened, and so are the others. Each device packs the
part that it stores and multiplies with the part that it reads, so no group of numbers with one scale may cross to another
device. The first dim of each side alone may be split; what does not fit so is not packed (`obstacle`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import kernels
from ejdist.layout import axes_in, current_layout, on_mesh, row_of, spec
from ejdist.mapped import map_shards
from ejdist.mesh import mesh_here
from ejdist.precision import LEAST
from kernels.framework.dispatch import vary_alike

# Name -> how `kernels.quantize` packs.
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"mode": "affine", "bits": 8, "group_size": 64},
    "int4": {"mode": "affine", "bits": 4, "group_size": 64},
    "nf4": {"mode": "nf4", "bits": 4, "group_size": 64},
    "mxfp4": {"mode": "mxfp4", "bits": 4, "group_size": 32},
    "mxfp8": {"mode": "mxfp8", "bits": 8, "group_size": 32},
}


def check_format(what: str, name: Any) -> None:
    """Raises ValueError for a format that there is not; `what`: the key or argument. None is the dtype of the weights."""
    if name is not None and name not in FORMATS:
        raise ValueError(
            f"{what} = {name!r} is unknown; use {', '.join(FORMATS)}, or null for the dtype that the model computes in"
        )


@partial(
    jax.tree_util.register_dataclass, data_fields=["words", "scales", "biases"], meta_fields=["shape", "sums", "form"]
)
@dataclass(frozen=True)
class Packed:
    """A packed matrix.

    Attributes:
      words, scales, biases: as `kernels.quantize` returns them of a matrix [sums, others].
      shape: of the matrix before. sums: how many of its first dims a product sums over. form: a name of `FORMATS`.
    """

    words: Any
    scales: Any
    biases: Any
    shape: tuple[int, ...]
    sums: int
    form: str

    @property
    def ndim(self) -> int:
        return len(self.shape)


def obstacle(stack: Any, dims: Sequence[str], inputs: Sequence[str], form: str) -> str | None:
    """Returns why the matrices of a stack cannot be packed where they lie, None if they can.

    Args:
      dims: of one matrix. inputs: those that a product sums over.
    """
    shape, sums, group = stack.shape[1:], len(inputs), FORMATS[form]["group_size"]
    if list(dims[:sums]) != list(inputs) or sums == len(dims):
        return "their inputs are not their first dims"
    sizes = math.prod(shape[:sums]), math.prod(shape[sums:])
    if min(sizes) < LEAST:
        return f"fewer than {LEAST} inputs or outputs"
    place = _place(stack)
    specs = [()] if place is None else [place.spec, _used(dims, shape, place.mesh)]
    for entries in specs:
        entries = _entries(entries, len(dims))
        inner = [a for i, entry in enumerate(entries) if i not in (0, sums) for a in axes_in([entry])]
        if inner:
            return f"mesh axis {inner[0]} splits a dim other than the first of their inputs or outputs"
        parts = 1 if place is None else math.prod(place.mesh.shape[a] for a in axes_in([entries[0]]))
        if sizes[0] % (parts * group):
            over = f" over {parts} devices" if parts > 1 else ""
            return f"{sizes[0]} inputs{over} do not divide into groups of {group}, which share a scale"
    return None


def _place(stack: Any) -> NamedSharding | None:
    """Returns where a row of a stack lies; None on one device, and of a stack that is traced."""
    place = None if isinstance(stack, jax.core.Tracer) else row_of(stack.sharding)
    return None if place is None or place.mesh.size == 1 else place


def _used(dims: Sequence[str], shape: Sequence[int], mesh: Any) -> Any:
    """Returns how products read a matrix."""
    return spec(dims, on_mesh(current_layout().activations, mesh), shape=shape, mesh=mesh, what="parameter")


def _entries(of: Any, ndim: int) -> tuple[Any, ...]:
    return (*of, *[None] * (ndim - len(of)))


def _of_words(rows: Any, columns: Any) -> Any:
    """Returns the spec of [sums, others], of the entries of the first dims of both."""
    return spec(["D", "F"], {"D": tuple(axes_in([rows])), "F": tuple(axes_in([columns]))})


def packed_rows(stack: jax.Array, sums: int, form: str, dtype: Any, donate: bool) -> list[Packed]:
    """Returns the rows of a stack of matrices, each packed where it lies: one after the other, so that beside the stack and the
    results there are one row's numbers at a time.

    Args:
      sums: how many of a matrix's first dims a product sums over.
      dtype: the rows are rounded to it before, and scales are of it. donate: delete the stack.
    """
    function = _packing(stack.shape[1:], sums, form, dtype, _place(stack))
    rows = [function(stack, i) for i in range(stack.shape[0])]
    if donate:
        stack.delete()
    return rows


@lru_cache(maxsize=256)
def _packing(shape: tuple[int, ...], sums: int, form: str, dtype: Any, place: NamedSharding | None) -> Any:
    """Returns the function of `packed_rows` that packs one row, compiled once for all stacks of a shape and place."""

    def parts(row: jax.Array) -> tuple[jax.Array, ...]:
        words, scales, biases = kernels.quantize(row.reshape(math.prod(row.shape[:sums]), -1), **FORMATS[form])
        return (words, scales) if biases is None else (words, scales, biases)

    def of_row(stack: jax.Array, i: Any) -> Packed:
        row = jax.lax.dynamic_index_in_dim(stack, i, keepdims=False).astype(dtype)
        if place is None:
            made = parts(row)
        else:
            entries = _entries(place.spec, len(shape))
            made = map_shards(parts, place.mesh, (place.spec,), _of_words(entries[0], entries[sums]))(row)
        words, scales, *biases = made
        return Packed(words, scales, biases[0] if biases else None, shape, sums, form)

    return jax.jit(of_row)


def packed_product(
    x: jax.Array,
    weight: Packed,
    dims: tuple[list[str], list[str], list[str]],
    *,
    mesh: Any = None,
    platform: str | None = None,
) -> jax.Array:
    """Returns the product of x with a packed matrix, in x's dtype; it has a gradient for x.

    Args:
      dims: of x, of the matrix and of the product. platform: backend of `kernels.quantized_matmul`.

    Raises:
      ValueError: it is no product that sums over the matrix's first dims, as it was packed.
    """
    dims_x, dims_weight, dims_out = dims
    summed, others = dims_weight[: weight.sums], dims_weight[weight.sums :]
    kept = [d for d in dims_x if d not in summed]
    if {*summed} - {*dims_x} or {*others} & {*dims_x} or {*kept, *others} != {*dims_out}:
        raise ValueError(
            f"project: argument 'weight' is packed for products that sum over its dims {' '.join(summed)}, and this one is of "
            f"x {' '.join(dims_x)} and gives {' '.join(dims_out)}"
        )
    how = FORMATS[weight.form] | {"platform": platform}
    x = jnp.transpose(x, [dims_x.index(d) for d in (*kept, *summed)])
    arrays = [a for a in (weight.words, weight.scales, weight.biases) if a is not None]

    def product(x: jax.Array, *arrays: jax.Array) -> jax.Array:
        """Returns it of a device's part."""
        out = kernels.quantized_matmul(x.reshape(*x.shape[: len(kept)], -1), *arrays, **how)
        return out.reshape(*out.shape[:-1], -1, *weight.shape[weight.sums + 1 :])

    here = mesh_here(mesh)
    if here is None or here.size == 1:
        out = product(x, *arrays)
    else:
        axes, sizes = on_mesh(current_layout().activations, here), (*x.shape[: len(kept)], *weight.shape[weight.sums :])
        where = spec([*kept, *summed], axes, shape=x.shape, mesh=here, what="activation")
        result = spec([*kept, *others], axes, shape=sizes, mesh=here, what="activation")
        rows, columns = where[len(kept)], result[len(kept)]
        split = tuple(axes_in([rows]))

        def on_shard(x: jax.Array, *arrays: jax.Array) -> jax.Array:
            out = product(*vary_alike((x, *arrays)))
            return jax.lax.psum(out, split) if split else out

        specs = where, *[_of_words(rows, columns)] * len(arrays)
        out = map_shards(on_shard, here, specs, result)(x, *arrays)
    return jnp.transpose(out, [[*kept, *others].index(d) for d in dims_out])
