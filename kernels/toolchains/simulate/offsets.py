"""Where the entries of a tile in shared memory lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from triton.experimental.gluon import language as gl

__all__ = ["offsets"]


def offsets(shape: Sequence[int], layout: Any) -> np.ndarray:
    """Returns the offset of each entry of a tile in its memory. Swizzled TMA tiles are stored as consecutive panels of
    128 bytes of columns; dims before those of the layout are consecutive tiles. (The order within 128 bytes is not
    modelled: it is the same for all readers of a panel.)"""
    if not isinstance(layout, gl.NVMMASharedLayout) or not layout.swizzle_byte_width:
        return np.arange(math.prod(shape)).reshape(shape)
    outer, inner = math.prod(shape[: len(shape) - layout.rank]), shape[len(shape) - layout.rank :]
    rows, columns = math.prod(inner[:-1]), inner[-1]
    wide = min(columns, 8 * layout.swizzle_byte_width // layout.element_bitwidth)
    panels = np.arange(math.prod(shape)).reshape(outer, columns // wide, rows, wide)
    return panels.swapaxes(1, 2).reshape(shape)
