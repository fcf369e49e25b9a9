"""What a program may be lowered for, and the refusal of a backend that cannot."""

from __future__ import annotations

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
DEVICE_OF_PLATFORM = {"cpu": "cpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


class Unsupported(NotImplementedError):
    """This backend cannot do what was asked; the message gives the reason and what could."""
