"""A projection of activations by a stored parameter: where it is gathered, multiplied, and its result placed.

Every product of a layer with a matrix of its own goes through here, so that a way of doing it (a matmul that overlaps with its
gather, a frozen matrix in 8 bits, an adapter) is one place to write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import kernels
from ejdist.frozen import Frozen, adapter_dims
from ejdist.gathered_blocks import flat, gathered_blocks, spec_of, stays
from ejdist.layout import axes_in, constrain, current_layout, gather, on_mesh, spec
from ejdist.mapped import map_shards
from ejdist.mesh import mesh_here
from ejdist.packed import Packed, packed_product
from ejdist.precision import (
    PRODUCT,
    Matrix,
    Narrow,
    Norm,
    Normed,
    check_device,
    fuses,
    narrow_mlp,
    narrow_products,
)
from kernels.framework.dims import VOCABULARY
from kernels.framework.dispatch import vary_alike


def project(
    x: jax.Array,
    weight: jax.Array | Frozen | Narrow | Packed,
    subscripts: str,
    *,
    bias: jax.Array | None = None,
    mesh: Any = None,
    platform: str | None = None,
) -> jax.Array:
    """Returns the product of x with a parameter, plus the bias, as the layout places activations of its dims.

    Args:
      x: activations.
      weight: a parameter, as the layout stores parameters; it is gathered here, and its gradient is scattered back. A `Frozen`
        one has no gradient and is gathered as it is stored, int8 as int8; its adapter is gathered and trained like a parameter.
        The product with a `Narrow` one, and both gradients, are in 8 bits. A `Packed` one has no gradient, is gathered packed,
        and is unpacked where it is multiplied.
      subscripts: of `jnp.einsum`, "btd,dnh->btnh"; each letter is the dim of that name in capitals, and says where the three
        arrays lie.
      bias: a parameter of the dims of the result that the weight has, in their order; stored like the weight.
      mesh: None for one device.
      platform: backend of the product with a `Packed` parameter; None: the fastest. Other products are XLA's.

    Returns:
      the product, in the dtype that x and weight promote to; of float32 arrays in true float32 on every device.

    Raises:
      ValueError: the subscripts are not of this form, or the arrays do not fit them.
    """
    return project_all(x, [weight], [subscripts], biases=[bias], mesh=mesh, platform=platform)[0]


def project_all(
    x: jax.Array | Normed,
    weights: Sequence[Any],
    subscripts: Sequence[str],
    *,
    biases: Sequence[Any] = (),
    mesh: Any = None,
    platform: str | None = None,
) -> tuple[jax.Array, ...]:
    """Returns the products of x with several parameters, each as `project` returns it.

    The products with matrices that are `Narrow` share what x is in 8 bits: it is quantised once. If all are, and x is `Normed`,
    that is where the norm is computed.
    """
    x, of_norm = (x.values, x) if isinstance(x, Normed) else (x, None)
    for weight, of in zip(weights, subscripts, strict=True):
        _check(x, weight, of)
    narrow = [i for i, (w, of) in enumerate(zip(weights, subscripts)) if isinstance(w, Narrow) and not _batched(of)]
    together = {narrow[0]: narrow} if len({_summed(subscripts[i]) for i in narrow}) == 1 else {i: [i] for i in narrow}
    products: dict[int, jax.Array] = {}
    normed = of_norm if len(together) == 1 and len(narrow) == len(weights) else None
    for some in together.values():
        made = _narrow(x, [weights[i] for i in some], [subscripts[i] for i in some], mesh, normed)
        products |= dict(zip(some, made, strict=True))
    results = []
    for i, (weight, of, bias) in enumerate(zip(weights, subscripts, biases or [None] * len(weights), strict=True)):
        product = products[i] if i in products else _product(x, weight, of, mesh, platform)
        _, dims_weight, dims_out = parsed(of)
        product = constrain(product, " ".join(dims_out), mesh)
        results.append(product if bias is None else product + _of_bias(bias, weight, dims_weight, dims_out, mesh))
    return tuple(results)


def _check(x: jax.Array, weight: Any, subscripts: str) -> None:
    """Raises ValueError for arrays that do not fit the subscripts."""
    dims_x, dims_weight, _ = parsed(subscripts)
    for name, array, dims in (("x", x, dims_x), ("weight", weight, dims_weight)):
        if array.ndim != len(dims):
            raise ValueError(
                f"project: argument {name!r} of shape {array.shape} does not have the dims {' '.join(dims)}"
            )
    sizes = dict(zip(dims_x, x.shape))
    for dim, size in zip(dims_weight, weight.shape):
        if sizes.setdefault(dim, size) != size:
            raise ValueError(
                f"project: argument 'weight' of shape {weight.shape} has {dim} = {size}, but 'x' of shape {x.shape} has "
                f"{sizes[dim]} ({subscripts})"
            )


def _batched(subscripts: str) -> bool:
    """Returns whether it is a batch of products, not one."""
    dims_x, dims_weight, dims_out = parsed(subscripts)
    return bool({*dims_x} & {*dims_weight} & {*dims_out})


def _summed(subscripts: str) -> tuple[str, ...]:
    dims_x, dims_weight, _ = parsed(subscripts)
    return tuple(d for d in dims_x if d in dims_weight)


def _product(x: jax.Array, weight: Any, subscripts: str, mesh: Any, platform: str | None) -> jax.Array:
    if isinstance(weight, Packed):
        return packed_product(x, weight, parsed(subscripts), mesh=mesh, platform=platform)
    dims_weight = " ".join(parsed(subscripts)[1])
    if isinstance(weight, Frozen):
        product = _frozen(x, weight, subscripts, mesh)
        return product if weight.a is None else product + _adapter(x, weight, subscripts, mesh)
    values = weight.values if isinstance(weight, Narrow) else weight
    return _einsum(subscripts, x, gather(values, dims_weight, mesh))


def _of_bias(bias: Any, weight: Any, dims_weight: list[str], dims_out: list[str], mesh: Any) -> jax.Array:
    sizes = dict(zip(dims_weight, weight.shape))
    dims = [dim for dim in dims_out if dim in dims_weight]
    if bias.shape != tuple(sizes[dim] for dim in dims):
        raise ValueError(
            f"project: argument 'bias' of shape {bias.shape} must have the dims {' '.join(dims)}, "
            f"{tuple(sizes[dim] for dim in dims)}"
        )
    return gather(bias, " ".join(dims), mesh)


def _einsum(subscripts: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, x, weight, precision=precision)


def _before_norm(
    normed: Normed | None, precision: str, places: Any = None, mesh: Any = None
) -> tuple[jax.Array, Norm] | None:
    """Returns the array before its norm, [..., D], and the norm, where devices compute it while they quantise; `places`: how
    the array is split over the mesh."""
    if normed is None:
        return None
    shape = normed.x.shape if mesh is None else jax.sharding.NamedSharding(mesh, places).shard_shape(normed.x.shape)
    whole = shape[-1] == normed.x.shape[-1]
    return (normed.x, normed.norm) if whole and fuses(shape, precision) else None


def _narrow(
    x: jax.Array, weights: list[Narrow], subscripts: list[str], mesh: Any, normed: Normed | None
) -> tuple[jax.Array, ...]:
    """Returns the products in 8 bits. Each device quantises the parts that it multiplies, by scales of its own. `normed`: what
    x is the norm of; the products then sum over its last dim alone."""
    dims, precision = [parsed(of) for of in subscripts], weights[0].precision
    if isinstance(mesh, jax.sharding.Mesh):
        check_device(precision, mesh.devices.flat[0])
    values = [gather(w.values, " ".join(of[1]), mesh) for w, of in zip(weights, dims, strict=True)]
    here = mesh_here(mesh)
    if here is None or here.size == 1:
        x, norm = _before_norm(normed, precision) or (x, None)
        return narrow_products(dims, x, norm, [Matrix(w) for w in values], precision)
    axes = on_mesh(current_layout().activations, here)
    dims_x = dims[0][0]
    of_x = dict(zip(dims_x, x.shape, strict=True))
    # Of each product: matrices may have a dim of one name in several sizes.
    sizes = [of_x | dict(zip(of, w.shape, strict=True)) for (_, of, _), w in zip(dims, values, strict=True)]
    made = [gathered_blocks(w, of, dims_x, mesh) for w, (_, of, _) in zip(weights, dims, strict=True)]
    whole = tuple(stays(w.values.shape, of, mesh) for w, (_, of, _) in zip(weights, dims, strict=True))

    def placed(names: list[str], sizes: dict[str, int] = of_x) -> Any:
        return spec(names, axes, shape=[sizes[n] for n in names], mesh=here, what="activation")

    x, norm = _before_norm(normed, precision, placed(dims_x), here) or (x, None)
    split = tuple(a for d in dims_x if d in dims[0][1] for a in axes_in(spec([d], axes, shape=[of_x[d]], mesh=here)))

    def on_shard(x: jax.Array, norm: Norm | None, values: list[jax.Array], blocks: list[Any]) -> tuple[jax.Array, ...]:
        flattened = [flat(b, of, dims_x) for b, (_, of, _) in zip(blocks, dims, strict=True)]
        products = narrow_products(dims, x, norm, list(map(Matrix, values, flattened, whole)), precision)
        return jax.lax.psum(products, split) if split else products

    outs = tuple(placed(of, n) for (_, _, of), n in zip(dims, sizes, strict=True))
    of_matrices = [placed(of, n) for (_, of, _), n in zip(dims, sizes, strict=True)]
    specs = placed(dims_x), _everywhere(norm, here), of_matrices, [spec_of(b, here) for b in made]
    return map_shards(on_shard, here, specs, outs)(x, norm, values, [b and b.blocks for b in made])


def _everywhere(norm: Norm | None, mesh: Any) -> Norm | None:
    """Returns the partition specs of a norm, whose weight every device has whole."""
    return norm and Norm(spec(["_"], {}, shape=norm.weight.shape, mesh=mesh), norm.eps)


def project_mlp(
    x: jax.Array | Normed, gate: Narrow, up: Narrow, down: Narrow, *, activation: str, mesh: Any = None
) -> jax.Array:
    """Returns (activation(x gate) * (x up)) down of x [B, T, D], with matrices [D, F], [D, F] and [F, D], in 8 bits.

    As with `project`, one by one, but what is F wide is quantised where it is computed. Where an axis splits both the tokens'
    features and the sums over them, the products are made one by one.
    """
    x, normed = (x.values, x) if isinstance(x, Normed) else (x, None)
    weights, dims, precision = (gate, up, down), ["B", "T", "D"], gate.precision
    dims_of, summed = (["D", "F"], ["D", "F"], ["F", "D"]), (["D"], ["D"], ["F"])
    for weight in (gate, up):
        _check(x, weight, "btd,df->btf")
    if isinstance(mesh, jax.sharding.Mesh):
        check_device(precision, mesh.devices.flat[0])
    values = [gather(w.values, " ".join(of), mesh) for w, of in zip(weights, dims_of, strict=True)]
    here = mesh_here(mesh)

    def mlp(x: jax.Array, norm: Norm | None, matrices: Iterable[Matrix]) -> jax.Array:
        x, norm, matrices = vary_alike((x, norm, tuple(matrices)))
        out = narrow_mlp(x.reshape(-1, x.shape[-1]), norm, matrices, precision, activation)
        return checkpoint_name(out, PRODUCT).reshape(*x.shape[:-1], -1)

    if here is None or here.size == 1:
        x, norm = _before_norm(normed, precision) or (x, None)
        return constrain(mlp(x, norm, map(Matrix, values)), " ".join(dims), mesh)
    axes = on_mesh(current_layout().activations, here)
    sizes = dict(zip((*dims, "F"), (*x.shape, gate.shape[1]), strict=True))

    def placed(names: list[str]) -> Any:
        return spec(names, axes, shape=[sizes[n] for n in names], mesh=here, what="activation")

    if axes_in(placed(["D"])):
        sides = project_all(x, [gate, up], ["btd,df->btf"] * 2, mesh=mesh)
        wide = kernels.gated_activation(*sides, activation=activation)
        return project(wide, down, "btf,fd->btd", mesh=mesh)
    x, norm = _before_norm(normed, precision, placed(dims), here) or (x, None)
    split = tuple(axes_in(placed(["F"])))
    made = [gathered_blocks(w, of, over, mesh) for w, of, over in zip(weights, dims_of, summed, strict=True)]
    whole = tuple(stays(w.values.shape, of, mesh) for w, of in zip(weights, dims_of, strict=True))

    def on_shard(x: jax.Array, norm: Norm | None, values: list[jax.Array], blocks: list[Any]) -> jax.Array:
        out = mlp(x, norm, map(Matrix, values, blocks, whole))
        return jax.lax.psum(out, split) if split else out

    specs = placed(dims), _everywhere(norm, here), [placed(of) for of in dims_of], [spec_of(b, here) for b in made]
    out = map_shards(on_shard, here, specs, placed(dims))(x, norm, values, [b and b.blocks for b in made])
    return constrain(out, " ".join(dims), mesh)


def _frozen(x: jax.Array, weight: Frozen, subscripts: str, mesh: Any) -> jax.Array:
    """Returns the product with a frozen matrix, which is cast to x's dtype after it is gathered, or before if that is narrower.
    The scale of a channel multiplies its results: numbers of int8 are exact in any dtype of x, their multiples are not."""
    dims_x, dims_weight, dims_out = parsed(subscripts)
    values = jax.lax.stop_gradient(weight.values)
    if values.dtype.itemsize > x.dtype.itemsize:
        values = values.astype(x.dtype)
    product = _einsum(subscripts, x, constrain(values, " ".join(dims_weight), mesh).astype(x.dtype))
    if weight.scale is None:
        return product
    scale_dims = [dim if dim not in dims_x else "_" for dim in dims_weight]
    scale = constrain(jax.lax.stop_gradient(weight.scale), " ".join(scale_dims), mesh)
    scale = jnp.squeeze(scale, tuple(i for i, dim in enumerate(scale_dims) if dim == "_"))
    kept = [dim for dim in dims_weight if dim not in dims_x]
    order = [dim for dim in dims_out if dim in kept]
    scale = jnp.transpose(scale, [kept.index(dim) for dim in order])
    scale = scale.reshape([weight.shape[dims_weight.index(dim)] if dim in kept else 1 for dim in dims_out])
    return (product * scale).astype(x.dtype)


def _adapter(x: jax.Array, weight: Frozen, subscripts: str, mesh: Any) -> jax.Array:
    """Returns strength (x a) b. No axis splits the rank, so where a summed dim is split, the devices add up only the `rank`
    numbers of x a for each token."""
    dims_x, dims_weight, dims_out = parsed(subscripts)
    summed, others = ([d for d in dims_weight if (d in dims_x) == inside] for inside in (True, False))
    kept = [d for d in dims_x if d not in summed]
    used = {letter.upper() for letter in subscripts}
    rank, one, *_ = (letter for letter in "ZYXWVU" if letter not in used)

    def letters(*dims: str) -> str:
        return "".join(dims).lower()

    dims_a, dims_b = adapter_dims(dims_weight, summed)
    a = gather(weight.a.astype(x.dtype), " ".join(dims_a), mesh)
    b = gather(weight.b.astype(x.dtype), " ".join(dims_b), mesh)
    narrow = _einsum(f"{letters(*dims_x)},{letters(*summed, rank)}->{letters(*kept, rank)}", x, a)
    narrow = constrain(narrow, " ".join([*kept, "_"]), mesh) * weight.strength
    # With a batch dim, if only of size 1, it is no product that remat=dots keeps: a second array as wide as the layer's own.
    wide = _einsum(
        f"{letters(one, *kept, rank)},{letters(one, rank, *others)}->{letters(one, *dims_out)}", narrow[None], b[None]
    )
    return wide[0]


def parsed(subscripts: str) -> tuple[list[str], list[str], list[str]]:
    """Returns the dims of x, of the weight and of the product.

    Raises:
      ValueError: the subscripts are not of two arrays and their product, or have a letter that no dim is named by.
    """
    match = re.fullmatch(r"([a-z]+),([a-z]+)->([a-z]+)", subscripts)
    if match is None:
        raise ValueError(f"project: argument 'subscripts' = {subscripts!r} must look like 'btd,dnh->btnh'")
    unknown = sorted({letter for part in match.groups() for letter in part if letter.upper() not in VOCABULARY})
    if unknown:
        raise ValueError(
            f"project: argument 'subscripts' = {subscripts!r} has the letters {', '.join(unknown)}, which name no dim; "
            f"there are {', '.join(name.lower() for name in VOCABULARY if len(name) == 1)}"
        )
    x, weight, out = (list(part.upper()) for part in match.groups())
    return x, weight, out
