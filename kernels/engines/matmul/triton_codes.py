"""8-bit numbers in Triton, on GPUs whose compiler has no float8 too."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def upcast(tile, CODE: tl.constexpr, dtype: tl.constexpr):
    """Converts 8-bit numbers to another type, exactly: int8, or the bits of a float8, which are the leading bits of a
    float16."""
    if CODE == "int8":
        return tile.to(tl.float32).to(dtype)
    bits = tile.to(tl.uint16)
    if CODE == "float8_e5m2":
        return (bits << 8).to(tl.float16, bitcast=True).to(dtype)
    half = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True)  # the exponent bias differs by 8
    value = tl.where((bits & 127) == 127, float("nan"), half.to(tl.float32) * 256.0)
    return value.to(dtype)
