"""Optimizer state in the memory of the host, which the update streams through the device a layer at a time.

The moments of a stack of layers stay in the host's memory as one array. A loop over its rows copies a layer's moments to the
device, updates that layer's parameters in place, and copies the moments back into the same array, so that about two layers of
moments are on a device at once: the copies run beside the update before and after. Norms and biases are small, and their
moments stay on the device.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from ejdist.models.parameters import Param, map_declared

HOST_KIND = "pinned_host"
Update = Callable[..., tuple[Any, Any]]  # (gradients, optimizer state, parameters, row=None) -> (parameters, state)


def is_stack(param: Param) -> bool:
    """Returns whether a parameter has a row for each layer."""
    return param.dims.split()[:1] == ["L"]


def is_offloaded(param: Param) -> bool:
    """Returns whether the moments of a parameter are on the host: those of matrices, of each layer or of the whole model."""
    return len(param.shape) - is_stack(param) >= 2


def at_once(update: Update, gradients: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """Applies an update to all parameters at once."""
    return update(gradients, opt_state, params)


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Returns the same sharding in the host's memory."""
    in_host_memory = sharding.with_memory_kind(HOST_KIND)
    if in_host_memory.memory_kind is None:
        # JAX knows no memories of GPUs that are only described, and drops the kind unless the mesh is abstract.
        in_host_memory = NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=HOST_KIND)
    return in_host_memory


@dataclass(frozen=True)
class Offload:
    """Keeps the moments of a model's matrices on the host. declared: tree of `Param`."""

    declared: Any

    def shardings(self, opt_state: Any) -> Any:
        """Returns the shardings of the optimizer's state, given those it has on the device."""
        return self._moved(on_host, opt_state)

    def gradient_dtypes(self, compute_dtype: str) -> Any:
        """Returns the narrowest dtype of each gradient that loses nothing. A matrix of a layer is cast to the compute dtype
        before use, and so its gradient is of that dtype; a loop over layers would otherwise hold all gradients in float32."""
        return map_declared(lambda _, p: compute_dtype if p.cast and is_stack(p) else "float32", self.declared)

    def transformation(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns the optimizer with an `init` that never has more than a layer of moments on the device."""

        def init(params: Any) -> Any:
            empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(optimizer.init, params))

            def start(_: Any, state: Any, params: Any, row: Any = None) -> tuple[Any, Any]:
                return params, optimizer.init(params)

            return self.stream(start, params, self._moved(_to_host, empty), params)[1]

        return optax.GradientTransformationExtraArgs(init, optax.with_extra_args_support(optimizer).update)

    def stream(self, update: Update, gradients: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        """Applies an update, layer by layer where the moments are on the host, and returns (parameters, optimizer state).

        Args:
          update: (gradients, optimizer state, parameters, row=None) -> (parameters, state), element by element: it is called
            for some of the parameters, with None in the place of the others; for the stacks of layers on one row of each,
            whose number is `row`.
        """
        structure = jax.tree.structure(params)
        nodes, outer = jax.tree.flatten(opt_state, is_leaf=self._is_params)
        like_params = [self._is_params(node) for node in nodes]
        moments = [jax.tree.leaves(node) for node in itertools.compress(nodes, like_params)]
        gradients, params = jax.tree.leaves(gradients), jax.tree.leaves(params)

        def apply(which: list[int], g: list, m: list[list], p: list, row: Any = None) -> tuple[list[list], list, list]:
            """Updates the leaves of these indices; returns their moments and parameters, and the rest of the state."""

            def tree(leaves: list) -> Any:
                placed = dict(zip(which, leaves, strict=True))
                return structure.unflatten([placed.get(i) for i in range(structure.num_leaves)])

            remaining = iter(m)
            state = outer.unflatten(
                [tree(next(remaining)) if mine else x for x, mine in zip(nodes, like_params, strict=True)]
            )
            new_p, new_state = update(tree(g), state, tree(p), row=row)
            new_nodes = outer.flatten_up_to(new_state)
            new_m = [jax.tree.leaves(x) for x in itertools.compress(new_nodes, like_params)]
            return (
                new_m,
                jax.tree.leaves(new_p),
                [x for x, mine in zip(new_nodes, like_params, strict=True) if not mine],
            )

        def updated(which: list[int], how: Callable[..., tuple[list[list], list, list]]) -> list:
            """Updates some leaves in place, and returns the rest of the state."""
            mine = [gradients[i] for i in which], [[m[i] for i in which] for m in moments], [params[i] for i in which]
            new_m, new_p, rest = how(which, *mine)
            for k, i in enumerate(which):
                params[i] = new_p[k]
                for of, new in zip(moments, new_m, strict=True):
                    of[i] = new[k]
            return rest

        small, whole, stacks = self._groups()
        rest = iter(updated(small, apply))  # such as the count of updates, which each update advances alike
        for i in whole:
            updated([i], functools.partial(_whole, apply))
        for layers, which in stacks.items():
            updated(which, functools.partial(_by_rows, apply, layers))
        new = iter(moments)
        state = outer.unflatten([structure.unflatten(next(new)) if mine else next(rest) for mine in like_params])
        return structure.unflatten(params), state

    @property
    def _declared(self) -> list[Param]:
        return jax.tree.leaves(self.declared, is_leaf=lambda x: isinstance(x, Param))

    def _is_params(self, node: Any) -> bool:
        return jax.tree.structure(node) == jax.tree.structure(self.declared, is_leaf=lambda x: isinstance(x, Param))

    def _groups(self) -> tuple[list[int], list[int], dict[int, list[int]]]:
        """Returns the indices of the leaves that stay on the device, of the matrices of the whole model, and of the stacks, by
        their number of layers."""
        small, whole, stacks = [], [], defaultdict(list)
        for i, param in enumerate(self._declared):
            if not is_offloaded(param):
                small.append(i)
            elif is_stack(param):
                stacks[param.shape[0]].append(i)
            else:
                whole.append(i)
        return small, whole, stacks

    def _moved(self, move: Callable[[Any], Any], opt_state: Any) -> Any:
        """Returns the optimizer's state after `move` of the leaves that are on the host."""
        which = map_declared(lambda _, p: is_offloaded(p), self.declared)

        def of(node: Any) -> Any:
            return jax.tree.map(lambda x, on: move(x) if on else x, node, which) if self._is_params(node) else node

        return jax.tree.map(of, opt_state, is_leaf=self._is_params)


def _to_host(tree: Any) -> Any:
    """Puts arrays into the host's memory, inside of a jitted function."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), tree)


def _to_device(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tree)


def _whole(apply: Callable, which: list[int], g: list, m: list[list], p: list) -> tuple[list[list], list, list]:
    """Updates leaves whose moments come to the device at once."""
    # The copies may begin with the update: a scheduler would start them as early as it can, at the height of the backward.
    g, m = jax.lax.optimization_barrier((g, m))
    new_m, new_p, rest = apply(which, g, _to_device(m), p)
    return _to_host(new_m), new_p, rest


def _by_rows(
    apply: Callable, layers: int, which: list[int], g: list, m: list[list], p: list
) -> tuple[list[list], list, list]:
    """Updates stacks, whose moments come to the device row by row."""

    def row_of(row: jax.Array, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, row, 0, keepdims=False), tree)

    def write(row: jax.Array, stacks: Any, rows: Any) -> Any:
        return jax.tree.map(lambda x, one: jax.lax.dynamic_update_index_in_dim(x, one, row, 0), stacks, rows)

    def one(row: jax.Array, carry: Any) -> Any:
        m, p = carry
        new_m, new_p, _ = apply(which, row_of(row, g), _to_device(row_of(row, m)), row_of(row, p), row)
        return write(row, m, _to_host(new_m)), write(row, p, new_p)

    return *jax.lax.fori_loop(0, layers, one, (m, p)), []
