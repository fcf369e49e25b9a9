"""The operations a model calls, injected: a model knows neither mesh nor backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from kernels.engines.attention.masks import MaskInfo


class Ops:
    """The public operations as attributes, `ops.rms_norm(x, weight, eps=...)`, bound to a mesh and a backend.

    Each takes what the function of that name takes. The weights that an operation declares (`gated_mlp`'s matrices,
    `lm_head`, the weight of a norm) are given as the model stores them. `attention` is `ring_attention`. `project` multiplies
    with any other matrix, also as it is stored. `sends_latents` says whether the ranks of a sequence send the latents of
    `flash_mla`, or a model makes keys and values of them for `attention`.

    Args:
      functions: name -> function.
      constrain: (x, "B T D") -> x, with the layout of its dims as a sharding constraint.
      gather: (parameter, "D F") -> it, from where it is stored to where it is used; its gradient goes the other way.
      order: that of the batches' tokens, as `bind_ops` takes it.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable],
        constrain: Callable[[jax.Array, str], jax.Array],
        gather: Callable[[jax.Array, str], jax.Array],
        order: Any = None,
    ) -> None:
        self._functions, self.constrain, self.gather, self.order = dict(functions), constrain, gather, order

    def replace(self, **functions: Callable) -> Ops:
        """Returns the same with other functions under those names."""
        return Ops({**self._functions, **functions}, self.constrain, self.gather, self.order)

    def of_batch(self, batch: Mapping[str, jax.Array]) -> Ops:
        """Returns the operations for a batch: attention reads where its tokens are in the text, if each row has an order of its
        own, which the batch has as "order".

        Raises:
          ValueError: the batch is in another order than these operations take; names the remedy.
        """
        index, carried = batch.get("order"), bool(getattr(self.order, "carried", False))
        if carried and index is None:
            raise ValueError(
                f"a batch for order {self.order.name!r} has 'order', int32 [B, T], which token of the text lies at each place, "
                "and this one has none: place it with the program that it is for, or use sequence.order=striped"
            )
        if index is None:
            return self
        if not carried and self.order is not None:
            raise ValueError(
                "a batch with 'order' is permuted row by row, and these operations take another order: place it with the "
                "program that it is for, or bind the operations to its Order"
            )
        attention = functools.partial(self.attention, q_positions=index, kv_positions=index)
        places = MaskInfo(q_positions=index, kv_positions=index)
        return self.replace(attention=attention, flash_mla=functools.partial(self.flash_mla, mask_info=places))

    def __getattr__(self, name: str) -> Callable:
        functions = self.__dict__.get("_functions", {})
        if name not in functions:
            raise AttributeError(f"operation {name!r} is not available; available are {', '.join(functions)}")
        return functions[name]
