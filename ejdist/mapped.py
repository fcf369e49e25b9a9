"""Functions applied to the shards of arrays. The only file that calls `shard_map`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from ejdist.layout import axes_in, explicit
from ejdist.mesh import is_explicit
from kernels.framework.binding import is_float_array
from kernels.framework.dispatch import varying_axes


def map_shards(function: Callable, mesh: Any, in_specs: Any, out_specs: Any) -> Callable:
    """Returns the function applied to the shards of its arguments, on every device of the mesh; inside a `shard_map` over other
    axes, where `mesh` has those that this one leaves to the compiler, on every shard of those.

    What varies over which axis is tracked (`check_vma`): an out_spec that takes one device's part for all is refused, and the
    gradient of what is the same on several devices is summed over them, once.
    """

    @functools.wraps(function)
    def mapped(*arguments: Any) -> Any:
        around = jax.sharding.get_abstract_mesh()
        inside = bool(around.manual_axes)
        if is_explicit(mesh):
            # On a mesh of explicit axes (`jax.make_mesh`) the sharding of an array is part of its type, and `shard_map` moves
            # nothing.
            whole = around if inside else mesh
            where = jax.tree.map(lambda s: NamedSharding(whole, explicit(s, mesh)), in_specs)
            arguments = jax.sharding.reshard(arguments, where)
        if inside and not varying_axes(
            jax.lax.axis_index(around.manual_axes[0])
        ):  # that map does not track it, nor can this
            over = functools.partial(jax.shard_map, axis_names={*mesh.axis_names}, check_vma=False)
            return over(function, in_specs=in_specs, out_specs=out_specs)(*arguments)
        if inside:
            return _nested(function, mesh.axis_names, in_specs, out_specs)(*arguments)
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(*arguments)

    return mapped


def _nested(function: Callable, names: tuple[str, ...], in_specs: Any, out_specs: Any) -> Callable:
    """Returns the function mapped over axes that the `shard_map` around it leaves to the compiler, with its derivative.

    JAX's own derivative of a nested map declares residuals as sharded over the axes of both maps, which is illegal for results
    of the inner one (jax 0.11). Here residuals are sharded over the inner axes alone.
    """
    over = functools.partial(jax.shard_map, axis_names={*names})

    def mapped(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        leaf_specs = _specs_of(in_specs, arguments)
        floats = [i for i, x in enumerate(leaves) if is_float_array(x)]
        others = [i for i in range(len(leaves)) if i not in floats]
        specs = [leaf_specs[i] for i in floats], [leaf_specs[i] for i in others]
        # What is kept comes back typed as varying over every axis of its spec, so inputs are differentiated in that type.
        split = tuple(n for n in names if any(n in axes_in(s) for s in leaf_specs))

        def alike(some: list) -> list:
            missing = [tuple(a for a in split if a not in varying_axes(x)) for x in some]
            return [jax.lax.pcast(x, m, to="varying") if m else x for x, m in zip(some, missing, strict=True)]

        def summed(gradients: list) -> list:
            """Returns the gradients of the arrays as they were before `alike`."""
            whole = [tuple(a for a in split if a not in axes_in(s)) for s in specs[0]]
            return [jax.lax.psum(g, m) if m else g for g, m in zip(gradients, whole, strict=True)]

        def of_leaves(some: list, rest: list) -> Any:
            by_index = dict(zip(floats, some, strict=True)) | dict(zip(others, rest, strict=True))
            return function(*jax.tree.unflatten(structure, [by_index[i] for i in range(len(by_index))]))

        @jax.custom_vjp
        def call(some: list, rest: list) -> Any:
            return over(of_leaves, in_specs=specs, out_specs=out_specs)(some, rest)

        def forward(some: list, rest: list) -> Any:
            parts: Any = None

            def body(some: list, rest: list) -> Any:
                nonlocal parts

                def apart(some: list) -> Any:  # integers among the results have no cotangent
                    out = of_leaves(some, rest)
                    return [x for x in jax.tree.leaves(out) if is_float_array(x)], out

                _, pull, out = jax.vjp(apart, alike(some), has_aux=True)
                residuals, parts = jax.tree.flatten(pull)
                return out, [x[None] for x in residuals]

            out, residuals = over(body, in_specs=specs, out_specs=(out_specs, jax.P(split)))(some, rest)
            return out, jax.tree.unflatten(parts, residuals)

        def backward(pull: Any, cotangents: Any) -> Any:
            residuals, parts = jax.tree.flatten(pull)
            sent = list(zip(jax.tree.leaves(cotangents), _specs_of(out_specs, cotangents), strict=True))
            sent = [(x, s) for x, s in sent if x.dtype != jax.dtypes.float0]

            def body(residuals: list, sent: list) -> Any:
                return summed(jax.tree.unflatten(parts, [x[0] for x in residuals])(sent)[0])

            of_sent = jax.P(split), [s for _, s in sent]
            return over(body, in_specs=of_sent, out_specs=specs[0])(residuals, [x for x, _ in sent]), None

        call.defvjp(forward, backward)
        return call([leaves[i] for i in floats], [leaves[i] for i in others])

    return mapped


def _specs_of(specs: Any, tree: Any) -> list:
    """Returns the spec of each leaf of a tree, of specs that are a prefix of it."""

    def is_spec(x: Any) -> bool:
        return isinstance(x, jax.P)

    of_leaves = jax.tree.map(lambda s, part: jax.tree.map(lambda _: s, part), specs, tree, is_leaf=is_spec)
    return jax.tree.leaves(of_leaves, is_leaf=is_spec)
