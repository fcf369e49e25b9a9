"""Launches Triton kernels from JAX: compiled for a GPU, or interpreted on the CPU, by the same call.

Interpreted, a kernel is Python over NumPy: every program of the grid runs in turn, inside a `jax.pure_callback`, so a
jitted CPU program may hold it. Buffers lie between guards, and outputs start as NaN: what a kernel forgets to write, or
writes or reads where it must not, shows. The language is patched only while a kernel runs, so that compiling goes on in
the same process. Gluon kernels cannot be interpreted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import jax_triton
import numpy as np
from jax_triton import triton_lib
from triton import language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime import jit as triton_jit

from kernels._core.interpret import interpreting

__all__ = ["compile_for", "triton_launch"]

CUSTOM_CALL_TARGET = triton_lib.CUSTOM_CALL_TARGET_NAME

_POINTER_TYPES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint64": "u64",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
    "bool": "i1",
}

# The interpreter and the target of a compilation are settings of whole modules, so one thread uses them at a time.
_language_lock = threading.RLock()


def triton_launch(
    kernel: Any,
    *args: Any,
    out_shape: Any,
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 2,
    input_output_aliases: Mapping[int, int] | None = None,
    flops: int | None = None,
    bytes_accessed: int | None = None,
    **named: Any,
) -> Any:
    """Returns the outputs of a `@triton.jit` kernel, as the pytree `out_shape` of shapes and dtypes.

    The kernel's parameters are the inputs, then a pointer for each output, then `tl.constexpr`s. Sizes and strides
    belong among the constexprs: a run-time scalar tells the compiler nothing about divisibility, and spills follow.

    Args:
      args: the kernel's inputs in order: arrays, Python scalars, or None for a pointer that the kernel does not use.
      grid: number of programs in up to three dims.
      input_output_aliases: input -> output that is the same buffer, both counted among the non-constexpr inputs and the
        flat outputs. The kernel has one pointer for the two, at the input; what it leaves unwritten keeps its value.
      flops, bytes_accessed: what the launch costs, for XLA's scheduler and profilers.
      named: constexprs, and inputs (None among them) by name.
    """
    if any(size < 1 for size in grid):
        raise ValueError(f"{kernel.fn.__name__}: argument 'grid' = {grid} must have at least one program in every dim")
    if interpreting():
        return _interpreted(kernel, args, named, out_shape, grid, dict(input_output_aliases or {}))
    cost = {k: v for k, v in (("flops", flops), ("bytes_accessed", bytes_accessed)) if v is not None}
    with warnings.catch_warnings():
        # The replacement (a Ref argument) is an effect, which custom VJPs and remat do not allow.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        return jax_triton.triton_call(
            *args,
            kernel=kernel,
            out_type=out_shape,
            grid=tuple(grid),
            name=kernel.fn.__name__,
            num_warps=num_warps,
            num_stages=num_stages,
            # Said outright because Triton is about to change its default.
            backend_options={"enable_fp_fusion": True},
            input_output_aliases=dict(input_output_aliases or {}),
            cost_estimate=cost or None,
            **named,
        )


@contextlib.contextmanager
def compile_for(compute_capability: int) -> Iterator[None]:
    """Kernels lowered inside are compiled for this compute capability (80, 90), whatever device there is, if any."""
    library = triton_lib.triton_kernel_call_lib
    if library is None:
        raise RuntimeError("compiling for CUDA needs the CUDA plugin of JAX: pip install 'ejdist[test]'")
    with _language_lock, mock.patch.object(library, "get_compute_capability", lambda device: compute_capability):
        yield


# -- the interpreter --------------------------------------------------------------------------------------------------


class _Pointer:
    """What the interpreter takes for a tensor: an address and an element type."""

    def __init__(self, array: np.ndarray):
        self._array, self.dtype = array, _POINTER_TYPES[str(array.dtype)]

    def data_ptr(self) -> int:
        return self._array.ctypes.data


class _Buffer:
    """An array with a guard on both sides, filled with NaN (or a conspicuous integer)."""

    GUARD = 512  # elements

    def __init__(self, shape: tuple[int, ...], dtype: Any, value: Any = None):
        self.dtype, size = np.dtype(dtype), int(np.prod(shape))
        if self.dtype.kind in "iub":
            poison = np.array(np.iinfo(self.dtype).max - 1 if self.dtype.kind != "b" else 1, self.dtype)
        else:
            poison = np.array(np.nan).astype(self.dtype)
        self._storage = np.full(size + 2 * self.GUARD, poison, self.dtype)
        self.array = self._storage[self.GUARD : self.GUARD + size].reshape(shape)
        if value is not None:
            self.array[...] = value
        self._poison = poison.tobytes() * self.GUARD

    def intact(self) -> bool:
        storage, n = self._storage, self.GUARD
        return storage[:n].tobytes() == self._poison and storage[-n:].tobytes() == self._poison


@functools.cache
def _interpretable(function: types.FunctionType) -> Any:
    """Returns the function in the form that the interpreter runs, with globals of its own.

    The interpreter's rewriter adds names to the globals of what it rewrites; the kernel's module keeps its own.
    """
    scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    functools.update_wrapper(copy, function)
    del copy.__wrapped__
    return triton_interpreter.FunctionRewriter(copy).rewrite_ast()


@contextlib.contextmanager
def _interpreted_language() -> Iterator[None]:
    """Inside, `triton.language` works on NumPy, and `@triton.jit` functions may be called. All of it is undone after."""

    def call_jit(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _interpretable(self.fn)(*args, **kwargs)

    def call_constexpr(self: Any, *args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        bare = tl.core._unwrap_if_constexpr
        return self.fn(*map(bare, args), **{k: bare(v) for k, v in kwargs.items()})

    modules = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    with _language_lock:
        patches = triton_interpreter._patch_lang(modules)
        try:
            patches.set_attr(triton_jit.JITFunction, "__call__", call_jit)
            patches.set_attr(triton_jit.ConstexprFunction, "__call__", call_constexpr)
            yield
        finally:
            patches.restore()


def _run_grid(kernel: Any, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
    function, builder = _interpretable(kernel.fn), triton_interpreter.interpreter_builder
    constexprs = {p.name for p in kernel.params if p.is_constexpr}
    sizes = (*grid, *(1,) * (3 - len(grid)))
    with _interpreted_language():
        values = {k: v if k in constexprs else triton_interpreter._implicit_cvt(v) for k, v in arguments.items()}
        builder.set_grid_dim(*sizes)
        for index in itertools.product(*map(range, sizes)):
            builder.set_grid_idx(*index)
            function(**values)


def _interpreted(
    kernel: Any, args: tuple, named: dict[str, Any], out_shape: Any, grid: tuple[int, ...], aliases: dict[int, int]
) -> Any:
    outputs, tree = jax.tree.flatten(out_shape)
    bound = kernel.signature.bind_partial(*args, **named).arguments
    operands = [p.name for p in kernel.params if not p.is_constexpr]
    inputs = [name for name in operands if name in bound]
    arrays = {name: bound[name] for name in inputs if hasattr(bound[name], "shape")}
    aliased = {output: inputs[i] for i, output in aliases.items()}
    fresh = [i for i in range(len(outputs)) if i not in aliased]
    missing = [name for name in operands if name not in bound]
    if len(missing) != len(fresh):
        raise ValueError(
            f"{kernel.fn.__name__}: argument 'out_shape' has {len(fresh)} outputs that are not aliased, but the kernel "
            f"has {len(missing)} parameters left for them: {', '.join(missing)}"
        )

    def run(*values: Any) -> list[np.ndarray]:
        buffers = {name: _Buffer(v.shape, v.dtype, v) for name, v in zip(arrays, map(np.asarray, values), strict=True)}
        inputs_before = {name: b.array.copy() for name, b in buffers.items() if name not in aliased.values()}
        for name, i in zip(missing, fresh, strict=True):
            buffers[name] = _Buffer(outputs[i].shape, outputs[i].dtype)
        _run_grid(kernel, {**bound, **{name: _Pointer(b.array) for name, b in buffers.items()}}, grid)
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
