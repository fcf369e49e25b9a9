"""Whether kernels run through their toolchain's interpreter on the CPU instead of being compiled for their device."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_interpreting: contextvars.ContextVar[int | None] = contextvars.ContextVar("interpreting", default=None)


def interpreting() -> int | None:
    """Returns the compute capability of the GPU whose kernels are traced now to be interpreted; None: they are not."""
    return _interpreting.get()


@contextlib.contextmanager
def interpret(compute_capability: int | None = 80) -> Iterator[None]:
    """Kernels traced inside run through their interpreter, on the CPU. Slow; for checking numbers.

    Args:
      compute_capability: the GPU whose Triton kernels these are: 80 for the plain ones, which every GPU runs, 90 for those of
        Hopper where a call has some. None: kernels are compiled, not interpreted.

    Raises:
      ValueError: this is another GPU.
    """
    if compute_capability not in (80, 90, None):
        raise ValueError(
            f"interpret: argument 'compute_capability' = {compute_capability!r} must be 80 for the plain kernels, 90 for "
            "those of Hopper, or None"
        )
    token = _interpreting.set(compute_capability)
    try:
        yield
    finally:
        _interpreting.reset(token)
