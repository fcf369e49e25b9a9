"""What kernels are compiled for: the devices of this machine, or a GPU that the program is told of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.export

from kernels._core.platforms import DEVICE_OF_PLATFORM

# The custom calls of cuDNN's attention, as XLA names them.
CUDNN = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
# Of an H100 or H200: programs that stay on one each.
MULTIPROCESSORS = 132
# JAX keeps what it traced and lowered by the value of this too, so no program for one GPU is taken for another's.
_asked = jax.make_user_context(default_value=None)


def asked_compute_capability() -> int | None:
    """Returns the compute capability of the surrounding `compile_for`, or None where there is none."""
    return _asked.value


def device_kind(platform: str) -> str | None:
    """Returns the kind of device that programs for a platform are compiled for, as `jax.Device.device_kind` says it: that of
    this process. None where it is not known: this process has no such device, or `compile_for` names another GPU."""
    here = jax.default_backend()
    if here not in (platform, DEVICE_OF_PLATFORM[platform]):
        return None
    if DEVICE_OF_PLATFORM[platform] == "gpu" and asked_compute_capability() is not None:
        return None
    return jax.local_devices()[0].device_kind


@contextlib.contextmanager
def compile_for(compute_capability: int) -> Iterator[list[jax.export.DisabledSafetyCheck]]:
    """A context for exporting CUDA programs with Triton kernels: they are compiled for this GPU, whatever the machine has.

    It gives the `disabled_checks` of `jax.export.export`, which lets no custom call pass that JAX does not know to be stable:
    what is exported runs where the same jax-triton is installed, on GPUs of that compute capability.

    Args:
      compute_capability: 80 of an A100, 90 of an H100 or H200.

    Raises:
      RuntimeError: the toolchain is not installed; the message says what to install.
      ValueError: this is no compute capability.

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
            "number plus the minor one: 80 of an A100, 90 of an H100 or H200"
        )
    target = custom_call_target()
    from kernels._core.triton_interpreter import language_lock

    with language_lock, _asked(compute_capability):  # an interpreter in another thread changes what Triton compiles
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
