"""Runs the programs of a kernel on the CPU in the interpreter of its language, inside a `jax.pure_callback`.

Buffers have guards on both sides and outputs start as NaN, so that missing writes and accesses out of bounds are
detected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax_triton import triton_lib

__all__ = ["run_interpreted"]


class _Buffer:
    """An array between two guards, filled with NaN (or the second largest integer) until something is written.

    The guards of writable buffers have other bits, -NaN, so that copying one guard to another is detected too. They are
    as wide as the array, and at least as a large tile, so that a wrong mask fails a test instead of crashing the
    process.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, value: Any = None, writable: bool = True):
        dtype, size = np.dtype(dtype), int(np.prod(shape))
        n = self._width = max(65536, size)
        if dtype.kind in "iub":
            poison = np.array(1 if dtype.kind == "b" else np.iinfo(dtype).max - 1, dtype)
        else:
            poison = np.array(np.nan).astype(dtype)
        self._storage = np.full(size + 2 * n, poison, dtype)
        if writable:
            self._storage[:n].view(np.uint8)[...] = self._storage[-n:].view(np.uint8)[...] = 0xFF
        self._guard = self._storage[:1].view(np.uint8).copy()
        self.array = self._storage[n : n + size].reshape(shape)
        if value is not None:
            self.array[...] = value

    def intact(self) -> bool:
        sides = self._storage[: self._width], self._storage[-self._width :]
        return all((side.view(np.uint8).reshape(-1, self._guard.size) == self._guard).all() for side in sides)


def run_interpreted(
    kernel: Any,
    args: tuple,
    named: dict[str, Any],
    out_shape: Any,
    grid: tuple[int, ...],
    aliases: dict[int, int],
    run_grid: Callable[[Any, dict[str, Any], tuple[int, ...]], None],
) -> Any:
    """Returns the outputs of a kernel run in the interpreter `run_grid`; other arguments are those of `triton_launch`.

    Raises (when it runs):
      RuntimeError: the kernel wrote outside its buffers, or to an input that is not aliased to an output.
    """
    outputs, tree = jax.tree.flatten(out_shape)
    bound = kernel.signature.bind_partial(*args, **named).arguments
    operands = [p.name for p in kernel.params if not p.is_constexpr]
    inputs = [name for name in operands if bound.get(name) is not None]
    descriptors = {name: bound[name] for name in inputs if isinstance(bound[name], triton_lib.TensorDescriptor)}
    input_values = {name: descriptors[name].base if name in descriptors else bound[name] for name in inputs}
    arrays = {name: x for name, x in input_values.items() if hasattr(x, "shape")}
    aliased = {output: inputs[i] for i, output in aliases.items()}
    fresh = [i for i in range(len(outputs)) if i not in aliased]
    missing = [name for name in operands if name not in bound]
    if len(missing) != len(fresh):
        raise ValueError(
            f"{kernel.fn.__name__}: argument 'out_shape' has {len(fresh)} unaliased outputs, but the kernel "
            f"has {len(missing)} parameters left for them: {', '.join(missing)}"
        )

    def run(*values: Any) -> list[np.ndarray]:
        buffers = {
            name: _Buffer(v.shape, v.dtype, v, writable=name in aliased.values())
            for name, v in zip(arrays, map(np.asarray, values), strict=True)
        }
        inputs_before = {name: b.array.copy() for name, b in buffers.items() if name not in aliased.values()}
        for name, i in zip(missing, fresh, strict=True):
            buffers[name] = _Buffer(outputs[i].shape, outputs[i].dtype)
        filled = {name: b.array for name, b in buffers.items()}
        filled |= {name: replace(x, base=filled[name]) for name, x in descriptors.items()}
        run_grid(kernel, {**bound, **filled}, grid)
        for name, buffer in buffers.items():
            if not buffer.intact():
                raise RuntimeError(f"{kernel.fn.__name__} wrote outside the buffer {name!r}")
        for name, before in inputs_before.items():
            if before.tobytes() != buffers[name].array.tobytes():
                raise RuntimeError(f"{kernel.fn.__name__} wrote to its input {name!r}")
        where = {**dict(zip(fresh, missing, strict=True)), **aliased}
        return [buffers[where[i]].array for i in range(len(outputs))]

    result = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in outputs]
    flat = jax.pure_callback(run, result, *arrays.values(), vmap_method="sequential")
    return jax.tree.unflatten(tree, flat)
