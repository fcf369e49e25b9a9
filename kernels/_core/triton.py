"""Launches Triton kernels from JAX: compiled for a GPU, or interpreted on the CPU, by the same call."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax_triton
from jax_triton import triton_lib

from kernels._core.interpret import interpreting
from kernels._core.target import asked_compute_capability
from kernels._core.triton_interpreter import run_interpreted
from kernels._core.work import Work

__all__ = ["tensor_descriptor", "triton_launch"]


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
            compute_capability=_compute_capability(),
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
    if interpreting() or _compute_capability() < 90:
        return None
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return triton_lib.TensorDescriptor(x, shape, strides, block_shape)


def _compute_capability() -> int:
    """Returns what is compiled for: the GPU of the surrounding `compile_for`, or else that of this machine.

    Raises:
      RuntimeError: there is neither.
    """
    asked = asked_compute_capability()
    if asked is not None:
        return asked
    try:
        return int(triton_lib.make_cuda_target(compute_capability=None, num_ctas=1).arch)
    except (RuntimeError, ValueError, AttributeError) as error:
        raise RuntimeError(
            "a Triton kernel is lowered for CUDA, and JAX finds no GPU here to compile it for: lower the program inside "
            "`with kernels.compile_for(90):` (90 is an H100 or H200, 80 an A100), or on a machine with the GPU"
        ) from error
