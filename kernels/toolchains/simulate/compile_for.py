"""Compiles Triton kernels for a GPU that this machine does not have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax.export

from kernels.framework.target import compiling_for

# The custom calls of cuDNN's attention, by XLA's names.
CUDNN = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")


@contextlib.contextmanager
def compile_for(compute_capability: int) -> Iterator[list[jax.export.DisabledSafetyCheck]]:
    """A context for exporting CUDA programs with Triton kernels: they are compiled for the given GPU, whatever this
    machine has.

    Yields the `disabled_checks` for `jax.export.export`, which rejects custom calls that JAX does not know to be
    stable. The exported program runs where the same jax-triton is installed, on GPUs of that compute capability.

    Args:
      compute_capability: 80 for an A100, 90 for an H100 or H200.

    Raises:
      RuntimeError: the toolchain is not installed; the message says what to install.
      ValueError: the compute capability is invalid.

    >>> import jax, jax.numpy as jnp, kernels
    >>> x, weight = jnp.ones((8, 256)), jnp.ones(256)
    >>> with kernels.compile_for(90) as checks:
    ...     norm = jax.export.export(jax.jit(kernels.rms_norm), platforms=("cpu", "cuda", "tpu"), disabled_checks=checks)
    ...     exported = norm(x, weight)
    >>> restored = jax.export.deserialize(exported.serialize())
    >>> print(restored.platforms, restored.call(x, weight).shape)
    ('cpu', 'cuda', 'tpu') (8, 256)
    """
    if isinstance(compute_capability, bool) or not isinstance(compute_capability, int) or compute_capability < 50:
        raise ValueError(
            f"compile_for: argument 'compute_capability' = {compute_capability!r} must be an integer, ten times the major "
            "number plus the minor one: 80 for an A100, 90 for an H100 or H200"
        )
    target = custom_call_target()
    from kernels.toolchains.simulate.triton_interpreter import language_lock

    with (
        language_lock,
        compiling_for(compute_capability),
    ):  # an interpreter in another thread changes what Triton compiles
        yield [jax.export.DisabledSafetyCheck.custom_call(name) for name in (target, *CUDNN)]


def custom_call_target() -> str:
    """Returns the name of the custom call that runs a Triton kernel.

    Raises:
      RuntimeError: the toolchain is not installed.
    """
    try:
        from jax_triton import triton_lib
    except ModuleNotFoundError as error:
        raise RuntimeError(f"compiling for CUDA needs {error.name}: pip install 'ejdist[test]'") from None
    if triton_lib.triton_kernel_call_lib is None:
        raise RuntimeError("compiling for CUDA needs the CUDA plugin of JAX: pip install 'ejdist[test]'")
    return triton_lib.CUSTOM_CALL_TARGET_NAME
