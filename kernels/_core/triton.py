"""Launches Triton kernels from JAX: compiled for a GPU, or interpreted on the CPU, by the same call."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import jax_triton
from jax_triton import triton_lib

from kernels._core.interpret import interpreting
from kernels._core.triton_interpreter import language_lock, run_interpreted
from kernels._core.work import Work

__all__ = ["compile_for", "tensor_descriptor", "triton_launch"]

CUSTOM_CALL_TARGET = triton_lib.CUSTOM_CALL_TARGET_NAME


def triton_launch(
    kernel: Any,
    *args: Any,
    out_shape: Any,
    grid: tuple[int] | tuple[int, int] | tuple[int, int, int],
    num_warps: int = 4,
    num_stages: int = 2,
    input_output_aliases: Mapping[int, int] | None = None,
    work: Work | None = None,
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
      work: what the launch costs, for XLA's scheduler and profilers.
      named: constexprs, and inputs (None among them) by name.
    """
    if any(size < 1 for size in grid):
        raise ValueError(f"{kernel.fn.__name__}: argument 'grid' = {grid} must have at least one program in every dim")
    if interpreting():
        return run_interpreted(kernel, args, named, out_shape, grid, dict(input_output_aliases or {}))
    cost: triton_lib.CostEstimate = {}
    if work is not None:
        cost = {"flops": int(work.flops), "bytes_accessed": int(work.bytes)}
    with warnings.catch_warnings():
        # The replacement (a Ref argument) is an effect, which custom VJPs and remat do not allow.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        return jax_triton.triton_call(
            *args,
            kernel=kernel,
            out_type=out_shape,
            grid=grid,
            name=kernel.fn.__name__,
            num_warps=num_warps,
            num_stages=num_stages,
            # Said outright because Triton is about to change its default.
            backend_options={"enable_fp_fusion": True},
            input_output_aliases=dict(input_output_aliases or {}),
            cost_estimate=cost or None,
            **named,
        )


def tensor_descriptor(x: jax.Array, shape: tuple[int, ...], block_shape: tuple[int, ...]) -> Any:
    """Returns what a kernel's tensor descriptor is made from: an array, seen in a shape of as many entries, that TMA copies in
    blocks. None where there is no TMA, and where kernels are interpreted: the kernel makes its own then.

    On Hopper it must not: such a descriptor lies in memory that jax-triton allocates at each launch, and a launch that
    allocates can be no part of a CUDA graph (CUDA_ERROR_NOT_SUPPORTED, once XLA makes one of a program).
    """
    if interpreting() or int(triton_lib.make_cuda_target(compute_capability=None, num_ctas=1).arch) < 90:
        return None
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return triton_lib.TensorDescriptor(x, shape, strides, block_shape)


@contextlib.contextmanager
def compile_for(compute_capability: int) -> Iterator[None]:
    """Kernels lowered inside are compiled for this compute capability (80, 90), whatever device there is, if any."""
    library = triton_lib.triton_kernel_call_lib
    if library is None:
        raise RuntimeError("compiling for CUDA needs the CUDA plugin of JAX: pip install 'ejdist[test]'")
    with language_lock, mock.patch.object(library, "get_compute_capability", lambda device: compute_capability):
        yield
