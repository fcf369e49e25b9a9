"""Launches Triton kernels from JAX: compiled for a GPU, or interpreted on the CPU, by the same call."""

from __future__ import annotations

import functools
import math
import re
import threading
import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import jax_triton
import numpy as np
from jax.interpreters import mlir
from jax_triton import triton_lib
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon._runtime import GluonJITFunction

from kernels.framework.interpret import interpreting
from kernels.framework.target import asked_compute_capability, asks_cuda_graphs
from kernels.framework.work import Work
from kernels.toolchains.simulate import gluon_interpreter, triton_interpreter
from kernels.toolchains.simulate.interpreted import run_interpreted

__all__ = ["compute_capability", "tensor_descriptor", "triton_launch"]

# Shared memory per block in bytes, by compute capability; others are treated as 90.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}


def triton_launch(
    kernel: Any,
    *args: Any,
    out_shape: Any,
    grid: tuple[int] | tuple[int, int] | tuple[int, int, int],
    num_warps: int = 4,
    num_stages: int = 2,
    max_registers: int | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
    work: Work | None = None,
    **named: Any,
) -> Any:
    """Returns the outputs of a `@triton.jit` or `@gluon.jit` kernel, as the pytree `out_shape` of shapes and dtypes.

    The kernel's parameters are the inputs, then a pointer for each output, then `tl.constexpr`s. Pass sizes and strides
    as constexprs: from run-time scalars the compiler cannot infer divisibility, which causes spills.

    Args:
      args: the kernel's inputs in order: arrays, Python scalars, or None for a pointer that the kernel does not use.
      grid: number of programs in up to three dims.
      num_warps: warps; of a warp-specialized kernel, those of its default partition.
      max_registers: maximum registers per thread at program start, so that several programs fit on a multiprocessor. A
        warp-specialized kernel redistributes that many among all its threads.
      input_output_aliases: input -> output that shares its buffer, numbered among the non-constexpr inputs and the flat
        outputs. The kernel has one pointer for both, at the input's position; what it does not write keeps its value.
        Aliased outputs come after all others, see `_check_buffers`.
      work: cost of the launch, for XLA's scheduler and profilers.
      named: constexprs, and inputs (None among them) by name.

    Raises:
      ValueError: no programs, a size that is no power of 2, or outputs whose buffers would be mistaken for each other.
    """
    if any(size < 1 for size in grid):
        raise ValueError(f"{kernel.fn.__name__}: argument 'grid' = {grid} must have at least one program in every dim")
    if not isinstance(kernel, GluonJITFunction):
        _check_powers(kernel.fn.__name__, num_warps, named)
    _check_buffers(kernel, args, named, len(jax.tree.leaves(out_shape)), dict(input_output_aliases or {}))
    if interpreting():
        of_hopper = isinstance(kernel, GluonJITFunction)
        if of_hopper and compute_capability() != 90:
            raise ValueError(f"{kernel.fn.__name__} is for Hopper: launch it inside interpret(90), or another kernel")
        by = gluon_interpreter if of_hopper else triton_interpreter
        return run_interpreted(kernel, args, named, out_shape, grid, dict(input_output_aliases or {}), by.run_grid)
    _complete_jax_triton()
    cost: triton_lib.CostEstimate = {}
    if work is not None:
        cost = {"flops": int(work.flops), "bytes_accessed": int(work.bytes)}
    with warnings.catch_warnings():
        # The replacement (a Ref argument) is an effect, which custom VJPs and remat do not support.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        results = jax_triton.triton_call(
            *args,
            kernel=kernel,
            out_type=out_shape,
            grid=grid,
            name=kernel.fn.__name__,
            num_warps=num_warps,
            num_stages=num_stages,
            compute_capability=compute_capability(),
            # Explicit because Triton is about to change its default.
            backend_options={"enable_fp_fusion": True} | ({} if max_registers is None else {"maxnreg": max_registers}),
            input_output_aliases=dict(input_output_aliases or {}),
            cost_estimate=cost or None,
            **named,
        )
    # If a result is written into a stacked array, as with residuals in a scan, XLA launches the kernel twice: once to
    # write there, and once for all other uses. It does not fuse across a barrier.
    return jax.lax.optimization_barrier(results)


def _check_powers(kernel: str, num_warps: int, named: Mapping[str, Any]) -> None:
    """Raises ValueError unless the number of warps and the sides of tiles are powers of 2. Sides are the constexprs
    whose names begin with BLOCK, and such fields of constexprs that are dataclasses."""
    sides = {"num_warps": num_warps}
    for name, value in named.items():
        inner = {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else {name: value}
        sides |= {n: v for n, v in inner.items() if n.startswith("BLOCK") and isinstance(v, int)}
    for name, size in sides.items():
        if size & (size - 1):
            raise ValueError(
                f"{kernel}: {name} = {size} is not a power of 2, as Triton requires for warps and the sides of a tile; "
                "change it in argument 'cfg'"
            )


def _check_buffers(kernel: Any, args: tuple, named: Mapping[str, Any], outputs: int, aliases: dict[int, int]) -> None:
    """Raises ValueError unless every pointer of a kernel gets its own buffer on a GPU.

    jax-triton 0.4 passes a launch the kinds of its parameters and no number of a buffer: each array parameter takes the next
    one of what XLA hands over, which are all operands and then all results, those of aliased outputs among them
    (`KernelCall::Launch` in jaxlib/gpu/triton_kernels.cc). The pointer of an aliased output is that of its operand, so no
    parameter takes its entry among the results, and the k-th other output takes the k-th result, whichever it is. That is its
    own where no aliased output precedes it; after one, it would be written into the buffer of the alias, with no error. For
    the same reason a pointer of an output before that of an operand would take the operand's buffer. An interpreter passes
    buffers by name, so it cannot notice.
    """
    fresh = [i for i in range(outputs) if i not in aliases.values()]
    late = next((i for k, i in enumerate(fresh) if i != k), None)
    if late is not None:
        first = min(aliases.values())
        raise ValueError(
            f"{kernel.fn.__name__}: argument 'input_output_aliases' = {aliases} aliases output {first}, and output {late} "
            f"after it has no alias: on a GPU it would be written into the buffer of output {first}; move what is aliased to "
            "the end of 'out_shape'"
        )
    bound = kernel.signature.bind_partial(*args, **named).arguments
    operands = [p.name for p in kernel.params if not p.is_constexpr]
    written = next((i for i, name in enumerate(operands) if name not in bound), len(operands))
    for name in operands[written:]:
        if hasattr(bound.get(name), "shape"):
            raise ValueError(
                f"{kernel.fn.__name__}: the array {name!r} is after the output {operands[written]!r} among the parameters: "
                "on a GPU each would take the other's buffer; declare pointers of outputs after those of all arrays"
            )


def compute_capability() -> int:
    """Returns the compute capability to compile or interpret for: that of the enclosing `interpret` or `compile_for`,
    or else of this machine's GPU.

    Raises:
      RuntimeError: there is neither.
    """
    requested = interpreting() or asked_compute_capability()
    if requested is not None:
        return requested
    try:
        return int(triton_lib.make_cuda_target(compute_capability=None, num_ctas=1).arch)
    except (RuntimeError, ValueError, AttributeError) as error:
        raise RuntimeError(
            "a Triton kernel is being lowered for CUDA, but JAX finds no GPU here: lower the program inside "
            "`with kernels.compile_for(90):` (90 is an H100 or H200, 80 an A100), or on a machine with a GPU"
        ) from error


def tensor_descriptor(x: jax.Array, shape: tuple[int, ...], block_shape: tuple[int, ...], layout: Any = None) -> Any:
    """Returns the tensor descriptor of an array, viewed in a shape of equal size, which TMA copies in blocks. None if
    there is no TMA, or if Triton kernels are interpreted: the kernel then creates its own.

    On Hopper it must not: a descriptor created in the kernel needs memory that jax-triton allocates at each launch, and
    a launch that allocates cannot be captured in a CUDA graph (CUDA_ERROR_NOT_SUPPORTED, once XLA captures the
    program).

    Args:
      layout: for a Gluon kernel, the `NVMMASharedLayout` of a block in shared memory. Triton chooses it for its own
        kernels.
    """
    if compute_capability() < 90 or (interpreting() and layout is None):
        return None
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return triton_lib.TensorDescriptor(x, shape, strides, block_shape, layout)


# -- corrections to jax-triton 0.4 ------------------------------------------------------------------------------------


class _GluonBackend(CUDABackend):
    """Triton's passes for Gluon. jax-triton runs every kernel through those for Triton, which also pipeline loops and
    choose layouts; a Gluon kernel specifies these itself."""

    def make_ttir(self, mod: Any, metadata: Any, options: Any, capability: Any) -> Any:  # pyrefly: ignore[bad-override]
        return mod

    def make_ttgir(self, mod: Any, metadata: Any, options: Any, capability: Any) -> Any:  # pyrefly: ignore[bad-override]
        return self.gluon_to_ttgir(mod, metadata, options, capability)


_compile_by_jax_triton = triton_lib.TritonFunction._compile_kernel


def _compile_kernel(self: Any, spec: Any, gpu_target: Any, backend: Any, backend_options: Any) -> Any:
    """Compiles as jax-triton does, plus three things that it lacks:

    - Gluon's own passes for a Gluon kernel.
    - The number of warps of a warp-specialized kernel. Triton adds those of the workers to the number requested, and
      records the total in the PTX; jax-triton launches the number requested (CUDA_ERROR_INVALID_VALUE). A correct
      number is left alone, so this has no effect once jax-triton passes it itself.
    - A check of shared memory, which Triton performs only when it launches a kernel itself.
    """
    cuda = gpu_target.backend == "cuda"
    if cuda and isinstance(self.fn, GluonJITFunction):
        backend = _GluonBackend(gpu_target)
    kernel, ttir, options, launch_options = _compile_by_jax_triton(self, spec, gpu_target, backend, backend_options)
    if not cuda:
        return kernel, ttir, options, launch_options
    limit = SHARED_MEMORY.get(gpu_target.arch, SHARED_MEMORY[90])
    if launch_options.shared_mem_bytes > limit:
        raise ValueError(
            f"{self.name}: needs {launch_options.shared_mem_bytes:,} bytes of shared memory, but a block can have {limit:,} on "
            f"compute capability {gpu_target.arch}: use smaller tiles or fewer stages"
        )
    threads = re.search(r"^\.reqntid (\d+)", launch_options.binary, re.M)
    assert threads, launch_options.binary[:200]
    if (warps := int(threads[1]) // 32) != backend_options["num_warps"]:
        size, align = launch_options.global_scratch_size, launch_options.global_scratch_align
        scratch = () if size is None else (size, align)
        kernel = triton_lib.triton_kernel_call_lib.TritonKernel(
            launch_options.name,
            warps,
            backend_options["num_ctas"],
            launch_options.shared_mem_bytes,
            launch_options.binary,
            ttir,
            gpu_target.arch,
            *scratch,
        )
    _COMPILED[id(kernel)] = kernel, launch_options, warps
    return kernel, ttir, options, launch_options


# By the id of what jax-triton keeps for ever: a kernel, how it was compiled, and its warps.
_COMPILED: dict[int, tuple[Any, Any, int]] = {}
# Those of the launch that a thread is lowering: several may be at once.
_lowering = threading.local()
# Pointers that Triton adds to those of a kernel: to memory of its own, and to what its profiler writes.
_ADDED = 2
_make_by_jax_triton = triton_lib.TritonFunction.get_or_create_kernel
_lower_by_jax_triton = functools.partial(triton_lib.triton_kernel_call_lowering, triton_lib.make_cuda_target)


def _get_or_create_kernel(self: Any, *args: Any, **named: Any) -> Any:
    kernel, *rest = _make_by_jax_triton(self, *args, **named)
    if (kernels := getattr(_lowering, "kernels", None)) is not None:
        kernels.append(kernel)
    return kernel, *rest


def _lower(ctx: Any, *arrays: Any, **how: Any) -> Any:
    """Lowers a launch as jax-triton does, or inside `in_cuda_graphs` to a kernel of XLA's own."""
    _lowering.kernels = kernels = []
    results = _lower_by_jax_triton(ctx, *arrays, **how)
    if not asks_cuda_graphs() or len(kernels) != 1 or not arrays or id(kernels[0]) not in _COMPILED:
        return results
    _, compiled, warps = _COMPILED[id(kernels[0])]
    aliases, outputs = dict(how["input_output_aliases"]), range(len(ctx.avals_out))
    fresh = [i for i in outputs if i not in aliases.values()]
    start = compiled.binary.index(".entry")
    pointers = compiled.binary.count(".param ", start, compiled.binary.index("{", start))
    others = compiled.global_scratch_size or compiled.tensordesc_meta or pointers != len(arrays) + len(fresh) + _ADDED
    if others:  # scalars, descriptors, memory of its own
        return results
    results[0].owner.erase()  # pyrefly: ignore[missing-attribute]
    # Results have the numbers among all pointers that XLA is told, ascending, and operands the others. A result that is written
    # over an operand has no pointer of its own: it comes after all that the kernel reads. For what Triton adds, which no kernel
    # here uses, any operand does.
    places = {i: len(arrays) + k for k, i in enumerate(fresh)}
    places |= {i: pointers + k for k, i in enumerate(sorted(aliases.values()))}
    sizes = {"grid": triton_lib.normalize_grid(how["grid"], how["metaparams"]), "block": (32 * warps,)}
    sizes = {
        f"{n}_{axis}": np.int32(x) for n, size in sizes.items() for axis, x in zip("xyz", (*size, 1, 1), strict=False)
    }
    call = jax.ffi.ffi_lowering("__gpu$xla.gpu.ptx", operand_output_aliases=aliases, has_side_effect=False)
    return call(
        ctx.replace(avals_in=[*ctx.avals_in, *[ctx.avals_in[0]] * _ADDED]),
        *arrays,
        *[arrays[0]] * _ADDED,
        name=compiled.name,
        kernel_type="ptx",
        kernel_data=compiled.binary,
        shared_mem_bytes=np.int32(compiled.shared_mem_bytes),
        output_indices=[np.int32(places[i]) for i in outputs],
        **sizes,
    )


@functools.cache
def _complete_jax_triton() -> None:
    triton_lib.TritonFunction._compile_kernel = _compile_kernel
    triton_lib.TritonFunction.get_or_create_kernel = _get_or_create_kernel
    mlir.register_lowering(triton_lib.triton_kernel_call_p, _lower, platform="cuda")
