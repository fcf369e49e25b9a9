"""The compilation target: the devices of this machine, or the GPU that an enclosing `compile_for` names."""

from __future__ import annotations

import contextlib

import jax

from kernels.framework.platforms import DEVICE_OF_PLATFORM

# Of an H100 or H200, for persistent kernels: one program per multiprocessor.
MULTIPROCESSORS = 132
# Part of JAX's cache keys for tracing and lowering, so a program for one GPU is never reused for another.
_asked = jax.make_user_context(default_value=None)
_graphs = jax.make_user_context(default_value=False)


def asked_compute_capability() -> int | None:
    """Returns the compute capability set by an enclosing `compile_for`, or None."""
    return _asked.value


def device_kind(platform: str) -> str | None:
    """Returns the `jax.Device.device_kind` that programs for a platform are compiled for. None if unknown: this process
    has no such device, or `compile_for` names another GPU."""
    backend = jax.default_backend()
    if backend not in (platform, DEVICE_OF_PLATFORM[platform]):
        return None
    if DEVICE_OF_PLATFORM[platform] == "gpu" and asked_compute_capability() is not None:
        return None
    return jax.local_devices()[0].device_kind


def may_compile_for(platform: str) -> bool:
    """Returns whether programs that this process traces may be for a platform: that of its accelerator, or of an enclosing
    `compile_for`; any if there is neither, as programs may then be compiled ahead of time."""
    if asked_compute_capability() is not None:
        return platform == "cuda"
    return jax.default_backend() in ("cpu", platform, DEVICE_OF_PLATFORM[platform])


def compiling_for(compute_capability: int) -> contextlib.AbstractContextManager:
    """Returns a context in which programs are traced and lowered for a GPU of this compute capability."""
    return _asked(compute_capability)


def in_cuda_graphs() -> contextlib.AbstractContextManager:
    """Returns a context in which launches of Triton kernels are lowered as kernels of XLA's own, which it puts into CUDA graphs
    together with what is around them. Else each is a call of a foreign function, between which its graphs end.

    For programs of many short kernels, which the host would start too late. A launch that has a scalar or a tensor descriptor
    stays a foreign call.
    """
    return _graphs(True)


def asks_cuda_graphs() -> bool:
    """Returns whether launches are lowered inside `in_cuda_graphs`."""
    return _graphs.value
