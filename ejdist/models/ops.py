"""The operations a model calls, injected: a model knows neither mesh nor backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax


class Ops:
    """The public operations as attributes, `ops.rms_norm(x, weight, eps=...)`, bound to a mesh and a backend.

    Each takes what the function of that name takes. The weights that an operation declares (`gated_mlp`'s matrices,
    `lm_head`, the weight of a norm) are given as the model stores them. `attention` is `ring_attention`. `project` multiplies
    with any other matrix, also as it is stored.

    Args:
      functions: name -> function.
      constrain: (x, "B T D") -> x, with the layout of its dims as a sharding constraint.
      gather: (parameter, "D F") -> it, from where it is stored to where it is used; its gradient goes the other way.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable],
        constrain: Callable[[jax.Array, str], jax.Array],
        gather: Callable[[jax.Array, str], jax.Array],
    ) -> None:
        self._functions, self.constrain, self.gather = dict(functions), constrain, gather

    def replace(self, **functions: Callable) -> Ops:
        """Returns the same with other functions under those names."""
        return Ops({**self._functions, **functions}, self.constrain, self.gather)

    def __getattr__(self, name: str) -> Callable:
        functions = self.__dict__.get("_functions", {})
        if name not in functions:
            raise AttributeError(f"operation {name!r} is not available; available are {', '.join(functions)}")
        return functions[name]
