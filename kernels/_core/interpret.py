"""Whether kernels run through their toolchain's interpreter on the CPU instead of being compiled for their device."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_interpreting: contextvars.ContextVar[bool] = contextvars.ContextVar("interpreting", default=False)


def interpreting() -> bool:
    """Returns whether the kernels traced now are to be interpreted."""
    return _interpreting.get()


@contextlib.contextmanager
def interpret(on: bool = True) -> Iterator[None]:
    """Kernels traced inside run through their interpreter, on the CPU. Slow; for checking numbers."""
    token = _interpreting.set(on)
    try:
        yield
    finally:
        _interpreting.reset(token)
