"""What an operation must do whatever computes it: the floor that a time is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Work:
    """The least work of one direction of a call.

    Attributes:
      flops: floating-point operations, a multiply-add counted as 2. A backward counts what it must compute again because
        neither the inputs nor the residuals of the contract hold it.
      bytes: what must be read and written once, inputs, residuals and cotangents included.
    """

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


def nbytes(*arrays: Any) -> int:
    """Returns the bytes of arrays, tracers or shapes together; None counts nothing."""
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in arrays if x is not None)
