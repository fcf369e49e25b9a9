"""A contestant as four programs: forward, forward that saves for a backward, backward, and both directions in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import as_tuple, is_float


class JaxPrograms:
    """The programs of a function of arrays by name, compiled by XLA.

    The backward is a program of its own, as it is in training, where other layers lie between the two directions: a program
    that holds both may compute the output again instead of reading it.
    """

    kernel_seconds = None  # the profiler sees its kernels

    def __init__(self, function: Callable[..., Any]):
        def apply(floats: Any, data: Any) -> Any:
            outputs = as_tuple(function(**floats, **data))
            return tuple(y for y in outputs if is_float(y)), tuple(y for y in outputs if not is_float(y))

        def save(floats: Any, data: Any) -> Any:
            outputs, pull, _ = jax.vjp(lambda f: apply(f, data), floats, has_aux=True)
            return outputs, pull

        def both(floats: Any, data: Any, cotangents: Any) -> Any:
            outputs, pull = save(floats, data)
            return outputs, pull(cotangents)[0]

        self._forward, self._save, self._both = jax.jit(apply), jax.jit(save), jax.jit(both)
        self._backward = jax.jit(lambda pull, cotangents: pull(cotangents)[0])

    def load(self, floats: dict[str, Any], data: dict[str, Any]) -> Any:
        """Returns a copy of the inputs, in memory of its own: of integers too, as words of quantised weights are."""
        return jax.tree.map(lambda x: jnp.array(x, copy=True) if isinstance(x, jax.Array) else x, (floats, data))

    def load_cotangents(self, cotangents: tuple) -> Any:
        return tuple(jnp.array(c, copy=True) for c in cotangents)

    def forward(self, inputs: Any) -> Any:
        return self._forward(*inputs)

    def save(self, inputs: Any) -> Any:
        """Returns (outputs, what the backward needs)."""
        return self._save(*inputs)

    def backward(self, saved: Any, cotangents: Any) -> Any:
        return self._backward(saved[1], cotangents)

    def both(self, inputs: Any, cotangents: Any) -> Any:
        return self._both(*inputs, cotangents)

    def outputs_and_gradients(self, inputs: Any, cotangents: Any) -> tuple[tuple, dict[str, Any]]:
        """Returns the float outputs of the timed forward and the gradients of the timed backward, as JAX arrays."""
        return self.forward(inputs)[0], self.backward(self.save(inputs), cotangents)

    def outputs(self, inputs: Any) -> tuple:
        return self.forward(inputs)[0]

    def block(self, value: Any) -> None:
        jax.block_until_ready(value)


def programs_of(framework: str, function: Callable[..., Any]) -> Any:
    """Returns the programs of a function written for "jax" or "torch"."""
    if framework == "jax":
        return JaxPrograms(function)
    from benchmarks.torch_programs import TorchPrograms

    return TorchPrograms(function)
