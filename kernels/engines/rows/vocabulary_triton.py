"""Passes over logits [M, V] on GPUs. A program processes a row, tile by tile, or a single tile.

For the softmax of a row, each lane keeps its own maximum and sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels.engines.rows import vocabulary
from kernels.framework.binding import Call, is_array
from kernels.toolchains.triton import triton_launch

# A thread takes the maximum of this many neighbours before it rescales its sums: 16 bytes of float32.
LANE = 4
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """Returns the hyperbolic tangent. Its exponential may overflow, but the result is still correct."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def bent(x, CAP: tl.constexpr, TEMPERATURE=1.0):
    """Returns (the inputs of the softmax for these logits, their derivative); CAP is 0 for no cap."""
    slope = 1.0 / TEMPERATURE
    if CAP > 0:
        bounded = tanh(x / CAP)
        z, slope = bounded * (CAP / TEMPERATURE), (1.0 - bounded * bounded) / TEMPERATURE
    else:
        z = x / TEMPERATURE
    return z, slope


@triton.jit
def finite(x):
    """Returns x with 0 in place of -inf, the log-sum-exp of no entries."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def exp(x):
    """Returns e^x, with 0 in place of denormal numbers. Triton's own keeps them, with three more instructions."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def exp_of(x, base):
    """Returns e^x / 2^base, by a multiply-add and an exponential."""
    return tl.exp2(x * LOG2_E - base)


@triton.jit
def joined(x, largest):
    """Returns the running maxima of the lanes after one more tile [lanes, LANE], in units of log 2, and the factors that
    rescale earlier sums."""
    new = tl.maximum(largest, tl.max(x, axis=1) * LOG2_E)
    return new, tl.exp2(largest - finite(new))


@triton.jit
def log2_of_lanes(largest, total):
    """Returns the base-2 log-sum-exp over all lanes; times `LN_2` it is natural."""
    top = tl.max(largest, axis=0)
    return top + tl.log2(tl.sum(total * tl.exp2(largest - finite(top)), axis=0))


def passed(
    kernel: Any,
    logits: Sequence[jax.Array],
    rows: Sequence[jax.Array],
    cfg: Any,
    *,
    outputs: Any,
    V: int | None = None,
    **options: Any,
) -> Any:
    """Returns the outputs of `kernel`, a tuple.

    Args:
      logits: [M, W] each.
      rows: [M] each.
      outputs: the number of float32 [M] outputs, with a program per row; or the dtype of a single [M, W] output, with a
        program per tile.
      V: the vocabulary, where W is larger: columns past it are no entries, and those of the output are 0.
    """
    M, W = logits[0].shape
    by_row = isinstance(outputs, int)
    out = (jax.ShapeDtypeStruct((M,), jnp.float32),) * outputs if by_row else (jax.ShapeDtypeStruct((M, W), outputs),)
    return triton_launch(
        kernel,
        *logits,
        *rows,
        out_shape=out,
        grid=(M,) if by_row else (M, triton.cdiv(W, cfg.block_vocab)),
        num_warps=cfg.num_warps,
        work=vocabulary.work_of_pass(logits, rows, out),
        V=W if V is None else V,
        W=W,
        BLOCK_V=cfg.block_vocab,
        **(options | {"LANE": LANE} if by_row else options),
    )


def facts(config: type, elements: int, most_rows: int, per_warp: int) -> Any:
    """Returns the registration of the kernels.

    Args:
      elements, most_rows: as in `vocabulary.facts`.
      per_warp: entries of a tile per warp.
    """

    def config_of(call: Call, rows: int | None, most: int) -> Any:
        block_vocab = max(16, min(most, triton.next_power_of_2(call.dims["V"])))
        return config(rows, block_vocab, max(1, min(16, block_vocab // per_warp)))

    def heuristic(call: Call, platform: str) -> Any:
        rows = vocabulary.block_rows(call, elements) if "hidden" in call.arguments else None
        return config_of(call, rows, 2048)

    def candidates(call: Call) -> list[Any]:
        rows = vocabulary.candidates(call, most_rows) if "hidden" in call.arguments else [None]
        return list(dict.fromkeys(config_of(call, r, most) for r in rows for most in (2048, 1024, 4096)))

    return {
        "platforms": {"cuda"},
        "dtypes": {"float32", "bfloat16", "float16"},
        "rejects": rejects,
        "heuristic": heuristic,
        "candidates": candidates,
    }


def rejects(call: Call) -> str | None:
    """Returns why the kernels cannot run a call."""
    if any(x.size == 0 for x in call.arguments.values() if is_array(x)):
        return "an array has no elements"
    caps = {name: call.arguments.get(name) for name in ("logits_soft_cap", "teacher_logits_soft_cap")}
    return next((f"{name} is not positive" for name, cap in caps.items() if cap is not None and cap <= 0), None)
