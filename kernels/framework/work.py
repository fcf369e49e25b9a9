"""The minimum work of an operation, whatever implements it: the lower bound that times are compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Work:
    """The minimum work of one direction of a call.

    Attributes:
      flops: floating-point operations, a multiply-add counted as 2. A backward includes what it must recompute because
        neither the inputs nor the residuals of the contract contain it.
      bytes: bytes that must be read and written once, including inputs, residuals and cotangents.
    """

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


def nbytes(*arrays: Any) -> int:
    """Returns the total bytes of arrays, tracers or shapes; None counts as 0."""
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in arrays if x is not None)
