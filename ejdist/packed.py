"""A matrix that generation reads in a few bits a number: how it is packed, and the product of activations with it.

A packed matrix is [sums, others]: the dims that a product sums over are flattened, and so are the others. Each device packs the
part that it stores and multiplies with the part that it reads, so no group of numbers with one scale may cross to another
device. The first dim of each side alone may be split; what does not fit so is not packed (`obstacle`).

The matrices of experts are [experts, sums, others], and the grouped products of a mixture read them. Where another dim of the
others is split, as the features beside gate and up, columns are in the order of the device that has them.
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
from ejdist.layout import axes_in, current_layout, on_mesh, row_of, spec, stacked_over
from ejdist.mapped import map_shards
from ejdist.mesh import mesh_here
from ejdist.precision import LEAST
from kernels.engines.matmul.permutation import picked
from kernels.framework.dispatch import vary_alike
from kernels.framework.segments import searchsorted

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
    jax.tree_util.register_dataclass,
    data_fields=["words", "scales", "biases"],
    meta_fields=["shape", "sums", "form", "experts", "parts"],
)
@dataclass(frozen=True)
class Packed:
    """A packed matrix.

    Attributes:
      words, scales, biases: as `kernels.quantize` returns them of a matrix [sums, others].
      shape: of the matrix before, also where the arrays are stacks of several.
      sums: how many of its first dims a product sums over. form: a name of `FORMATS`.
      experts: whether the first dim is that of experts, before those.
      parts: of how many devices the columns of experts are in order, where another dim than the first of the others was split.
    """

    words: Any
    scales: Any
    biases: Any
    shape: tuple[int, ...]
    sums: int
    form: str
    experts: bool = False
    parts: int = 1

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def flat(self) -> tuple[int, ...]:
        """The shape before as [sums, others], or [experts, sums, others]."""
        return _flat(self.shape, self.sums, self.experts)

    @property
    def arrays(self) -> list[Any]:
        return [a for a in (self.words, self.scales, self.biases) if a is not None]


def _flat(shape: Sequence[int], sums: int, experts: bool) -> tuple[int, ...]:
    inputs = experts + sums
    return (*shape[:experts], math.prod(shape[experts:inputs]), math.prod(shape[inputs:]))


def obstacle(stack: Any, dims: Sequence[str], inputs: Sequence[str], form: str) -> str | None:
    """Returns why the matrices of a stack cannot be packed where they lie, None if they can.

    Args:
      dims: of one matrix. inputs: those that a product sums over.
    """
    shape, sums, group = stack.shape[1:], len(inputs), FORMATS[form]["group_size"]
    experts = of_experts(dims)
    first = experts + sums  # of the others
    if list(dims[experts:first]) != list(inputs) or first == len(dims):
        return "their inputs are not their first dims"
    *_, rows, columns = _flat(shape, sums, experts)
    if min(rows, columns) < LEAST:
        return f"fewer than {LEAST} inputs or outputs"
    place = _place(stack)
    stored, used = ((), ()) if place is None else (place.spec, _used(dims, shape, place.mesh))
    stored, used = (_entries(entries, len(dims)) for entries in (stored, used))
    for entries in (stored, used):
        inner = [a for i in range(experts, len(dims)) if i not in (experts, first) for a in axes_in([entries[i]])]
        # Of experts another dim of the outputs may be, if it is all that is split there, and wherever the matrices are.
        if inner and not (experts and _columns(stored, first) == _columns(used, first) == [*inner]):
            return f"mesh axis {inner[0]} splits a dim other than the first of their inputs or outputs"
        parts = 1 if place is None else math.prod(place.mesh.shape[a] for a in axes_in([entries[experts]]))
        if rows % (parts * group):
            over = f" over {parts} devices" if parts > 1 else ""
            return f"{rows} inputs{over} do not divide into groups of {group}, which share a scale"
    return None


def of_experts(dims: Sequence[str]) -> bool:
    """Returns whether the dims of a matrix begin with that of experts."""
    return dims[0] == "E"


def _columns(entries: Sequence[Any], first: int) -> list[str]:
    """Returns the mesh axes that split the outputs, whose first dim is that one."""
    return list(axes_in(entries[first:]))


def _place(stack: Any) -> NamedSharding | None:
    """Returns where a row of a stack lies; None on one device, and of a stack that is traced."""
    place = None if isinstance(stack, jax.core.Tracer) else row_of(stack.sharding)
    return None if place is None or place.mesh.size == 1 else place


def _used(dims: Sequence[str], shape: Sequence[int], mesh: Any) -> Any:
    """Returns how products read a matrix."""
    return spec(dims, on_mesh(current_layout().activations, mesh), shape=shape, mesh=mesh, what="parameter")


def _entries(of: Any, ndim: int) -> tuple[Any, ...]:
    return (*of, *[None] * (ndim - len(of)))


def _of_words(*entries: Any) -> Any:
    """Returns the spec of [sums, others], or [experts, sums, others], of entries of the dims before."""
    dims = ["E", "D", "F"][-len(entries) :]
    return spec(dims, {d: tuple(axes_in([entry])) for d, entry in zip(dims, entries, strict=True)})


def packed_rows(
    stack: jax.Array, sums: int, form: str, dtype: Any, donate: bool, experts: bool = False
) -> list[Packed]:
    """Returns the rows of a stack of matrices, each packed where it lies: one after the other, so that beside the stack and the
    results there are one row's numbers at a time.

    Args:
      sums: how many of a matrix's first dims a product sums over.
      dtype: the rows are rounded to it before, and scales are of it. donate: delete the stack.
      experts: a row is the matrices of as many experts as its first dim has; one is packed after the other.
    """
    function = _packing(stack.shape[1:], sums, form, dtype, _place(stack), experts)
    rows = [function(stack, i) for i in range(stack.shape[0])]
    if donate:
        stack.delete()
    return rows


def stacked(rows: Sequence[Packed]) -> Packed:
    """Returns packed matrices as one stack, which a scan over layers takes apart again: each array has a first dim more, and
    lies as those of the rows do."""
    places = jax.tree.map(lambda x: x.sharding, rows[0])
    on_devices = all(isinstance(place, NamedSharding) for place in jax.tree.leaves(places))
    where = jax.tree.map(lambda place: stacked_over(None, place), places) if on_devices else None
    return jax.jit(lambda rows: jax.tree.map(lambda *x: jnp.stack(x), *rows), out_shardings=where)(rows)


@lru_cache(maxsize=256)
def _packing(
    shape: tuple[int, ...], sums: int, form: str, dtype: Any, place: NamedSharding | None, experts: bool = False
) -> Any:
    """Returns the function of `packed_rows` that packs one row, compiled once for all stacks of a shape and place."""

    def matrix(w: jax.Array) -> tuple[jax.Array, ...]:
        words, scales, biases = kernels.quantize(w.reshape(_flat(w.shape, sums, False)), **FORMATS[form])
        return (words, scales) if biases is None else (words, scales, biases)

    def parts(row: jax.Array) -> tuple[jax.Array, ...]:
        return jax.lax.map(matrix, row) if experts else matrix(row)

    def of_row(stack: jax.Array, i: Any) -> Packed:
        row = jax.lax.dynamic_index_in_dim(stack, i, keepdims=False).astype(dtype)
        devices = 1
        if place is None:
            made = parts(row)
        else:
            entries, first = _entries(place.spec, len(shape)), experts + sums
            devices = math.prod(place.mesh.shape[a] for a in axes_in(entries[first + 1 :]))
            where = _of_words(*entries[: experts + 1], tuple(axes_in(entries[first:])))
            made = map_shards(parts, place.mesh, (place.spec,), where)(row)
        words, scales, *biases = made
        return Packed(words, scales, biases[0] if biases else None, shape, sums, form, experts, devices)

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
    arrays = weight.arrays

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


def packed_experts(
    x: jax.Array,
    weight: Packed,
    bias: jax.Array | None,
    sizes: jax.Array,
    *,
    platform: str | None,
    rows: jax.Array | None = None,
    slots: jax.Array | None = None,
) -> jax.Array:
    """Returns the products [M, others] of rows sorted by expert, each with the packed matrix of its own, in x's dtype; it has a
    gradient for x.

    Args:
      x: [M, sums], or tokens with `rows` and `slots` as in `kernels.grouped_matmul`.
      bias: of each expert, added to its rows; of any shape with as many numbers as `others`. sizes: rows of each expert.
      platform: backend of `kernels.quantized_grouped_matmul`.
    """
    if rows is not None and slots is not None:
        x = picked(x, rows, slots)
    x, *arrays = vary_alike((x, *weight.arrays))
    words, scales, *biases = arrays
    how = FORMATS[weight.form] | {"platform": platform}
    out = kernels.quantized_grouped_matmul(x, words, scales, biases[0] if biases else None, sizes, **how)
    if bias is None:
        return out
    expert = searchsorted(jnp.cumsum(sizes), jnp.arange(len(out)), side="right").clip(0, len(sizes) - 1)
    return (out + bias.reshape(len(sizes), -1)[expert]).astype(out.dtype)
