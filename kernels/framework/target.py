"""What programs are compiled for: the devices of this machine, or the GPU that a surrounding `compile_for` names."""

from __future__ import annotations

import contextlib

import jax

from kernels.framework.platforms import DEVICE_OF_PLATFORM

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


def compiling_for(compute_capability: int) -> contextlib.AbstractContextManager:
    """Returns a context in which programs are traced and lowered for a GPU of this compute capability."""
    return _asked(compute_capability)
