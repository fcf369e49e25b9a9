"""Grouped matmul with packed matrices as two steps: XLA unpacks all of them, and `grouped_matmul` multiplies.

On GPUs a loop over groups would start kernels of its own for each, and most groups have rows wherever there are a few tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels.engines.matmul.formats import dequantized
from kernels.ops.grouped_matmul import grouped_matmul
from kernels.ops.grouped_matmul.packed import packed_op, unpacked_bytes

# Of more bytes XLA unpacks the matrices one at a time.
MOST_BYTES = 4 << 30


def dense(platform: str | None) -> tuple[Callable, Callable]:
    """Returns (forward, backward) with `grouped_matmul` on a toolchain; None lets dispatch choose."""

    def product(x: Any, w: Any, scales: Any, biases: Any, sizes: Any, transposed: bool, **how: Any) -> Any:
        weights = dequantized(w, scales, biases, **how).astype(x.dtype)
        call = grouped_matmul.prepare(x, weights, sizes, transpose_rhs=transposed).call
        return grouped_matmul.op.run(call, platform=platform)

    def forward(x, w, scales, biases, group_sizes, mode, bits, group_size):
        how = {"mode": mode, "bits": bits, "group_size": group_size}
        return product(x, w, scales, biases, group_sizes, False, **how)

    def backward(saved, x, w, scales, biases, group_sizes, mode, bits, group_size):
        how = {"mode": mode, "bits": bits, "group_size": group_size}
        return {"x": product(saved.d_out.astype(x.dtype), w, scales, biases, group_sizes, True, **how)}

    return forward, backward


def too_many(call: Any) -> str | None:
    """Returns why the matrices of a call are not all unpacked at once, or None."""
    size = unpacked_bytes(call)
    return f"its matrices take {size / 2**30:.1f} GiB unpacked" if size > MOST_BYTES else None


packed_op.register(
    *dense(None), platforms={"cuda"}, dtypes={"float32", "bfloat16", "float16"}, rejects=too_many, name="composed"
)
