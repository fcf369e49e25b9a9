"""Runs kernels in their toolchain's interpreter on the CPU instead of compiling them for their device."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_interpreting: contextvars.ContextVar[int | None] = contextvars.ContextVar("interpreting", default=None)


def interpreting() -> int | None:
    """Returns the compute capability whose kernels are being traced for the interpreter, or None if not
    interpreting."""
    return _interpreting.get()


@contextlib.contextmanager
def interpret(compute_capability: int | None = 80) -> Iterator[None]:
    """Runs kernels traced inside in their interpreter, on the CPU. Slow; for checking numbers.

    Args:
      compute_capability: selects Triton kernels: 80 for the portable ones, 90 for those of Hopper where they exist.
        None: kernels are compiled, not interpreted.

    Raises:
      ValueError: any other compute capability.
    """
    if compute_capability not in (80, 90, None):
        raise ValueError(
            f"interpret: argument 'compute_capability' = {compute_capability!r} must be 80 (portable kernels), 90 "
            "(Hopper kernels) or None"
        )
    token = _interpreting.set(compute_capability)
    try:
        yield
    finally:
        _interpreting.reset(token)
