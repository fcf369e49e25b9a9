"""The platforms a program may be lowered for, and the error of a backend that cannot run a call."""

from __future__ import annotations

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
DEVICE_OF_PLATFORM = {"cpu": "cpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


class Unsupported(NotImplementedError):
    """No backend, or not the requested one, can run the call; the message gives the reason and alternatives."""
