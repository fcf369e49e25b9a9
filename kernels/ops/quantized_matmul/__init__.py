"""Quantising weights, and products with quantised weights."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels.engines.matmul.formats import (
    FORMATS,
    check_packed,
    checked_format,
    dequantized,
    integer,
    of_mode,
    offsets,
    packing,
    quantized,
    widths,
)
from kernels.framework.binding import is_array, is_float_array
from kernels.framework.options import checked
from kernels.framework.public import Prepared, public
from kernels.framework.requests import known
from kernels.ops.quantized_matmul.contract import op

__all__ = ["dequantize", "op", "quantize", "quantized_matmul"]


_HOW = ("mode", "bits", "group_size")
# Jitted, because in an eager call each step would be a separate program.
_quantized = functools.partial(jax.jit, static_argnames=_HOW)(quantized)
_dequantized = functools.partial(jax.jit, static_argnames=_HOW)(dequantized)


@checked
def quantize(
    w: jax.Array, mode: str = "affine", *, bits: int | None = None, group_size: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns (words, scales, biases), the arguments of `quantized_matmul`; biases are None unless the mode is affine.

    Groups of `group_size` consecutive entries of D share a scale. Codes are packed along D: 32 consecutive codes form
    `bits` uint32 words, with code i in bits i * bits and following, counted from the lowest bit of the first word.

    Args:
      w: float [..., D, F]; D is the contracted dim, a multiple of 32 and of group_size. For "affine", the range of each
        group must be finite in float32; otherwise the result is NaN where values are unknown (under a trace or on a
        GPU).
      mode: "affine": scale * code + bias, with codes of 1 to 8 bits, from the minimum and maximum of a group. "nf4":
        scale times a quantile of the normal distribution, with the largest magnitude as scale. "mxfp4", "mxfp8": 2 **
        (scale - 127) times an e2m1 or e4m3 number, rounded to nearest even; groups of 32, scales uint8 (e8m0).
      bits: default 4; 8 for mxfp8.
      group_size: default 64; 32 for mxfp4 and mxfp8.

    Returns:
      words: uint32 [..., D * bits / 32, F]. scales: [..., D / group_size, F], in w's dtype or uint8. biases: like
        scales.

    Raises:
      ValueError: names the argument.

    Sources: Dettmers et al., QLoRA, 2023 (nf4); OCP Microscaling Formats (MX) Specification 1.0, 2023; Frantar et al., GPTQ,
    2022 (packing of rows of D).

    >>> import jax.numpy as jnp
    >>> words, scales, biases = quantize(jnp.linspace(0, 15, 32)[:, None], bits=4, group_size=32)
    >>> words.shape, float(scales[0, 0]), float(biases[0, 0])
    ((4, 1), 1.0, 0.0)
    """
    if not is_float_array(w) or w.ndim < 2:
        got = f"{w.dtype} of shape {w.shape}" if is_array(w) else type(w).__name__
        raise ValueError(f"quantize: argument 'w' must be a float array [..., D, F], got {got}")
    default = FORMATS.get(mode, FORMATS["affine"])
    bits = default.default_bits if bits is None else integer(bits)
    group_size = default.default_group if group_size is None else integer(group_size)
    checked_format("quantize", mode, bits, group_size, w.shape[-2])
    words, scales, biases = _quantized(jnp.asarray(w), mode=mode, bits=bits, group_size=group_size)
    steps = known(scales) if mode == "affine" else None
    if steps is not None and not np.isfinite(steps.astype(np.float32) * (2**bits - 1)).all() and jnp.isfinite(w).all():
        raise ValueError(
            f"quantize: argument 'w' has a group whose range exceeds what {bits} bits with {w.dtype} scales can "
            "represent; divide w by a constant, and multiply the product by it"
        )
    return words, scales, biases


@checked
def dequantize(
    w: jax.Array,
    scales: jax.Array,
    biases: jax.Array | None = None,
    *,
    mode: str = "affine",
    bits: int | None = None,
    group_size: int | None = None,
    zeros: jax.Array | None = None,
) -> jax.Array:
    """Returns the float32 weights [..., D, F] that the quantised ones represent; arguments as in `quantized_matmul`.

    Without x, D is not known. Mode "affine" therefore needs `bits` or `group_size`, as passed to `quantize`; the other
    follows from the shapes. The other modes have codes of one width, so neither is needed.

    Raises:
      ValueError: names the argument; also if neither is given and the mode has several widths.

    >>> import jax.numpy as jnp
    >>> w = jnp.arange(32.0)[:, None]
    >>> bool(jnp.allclose(dequantize(*quantize(w, bits=8, group_size=32), bits=8), w, atol=0.1))
    True
    """
    check_packed("dequantize", w, scales)
    bits, group_size = integer(bits), integer(group_size)
    form = of_mode("dequantize", mode)
    if bits is None and len(form.bits) == 1:
        bits = form.default_bits
    if bits is None and group_size is None:
        raise ValueError(
            f"dequantize: argument 'bits' is missing: the packed words of mode {mode!r} do not tell the width of a "
            "code; pass 'bits' or 'group_size', as passed to `quantize`"
        )
    if bits is None:
        bits = 32 * w.shape[-2] // (group_size * scales.shape[-2])
        if not bits:
            raise ValueError(
                f"dequantize: argument 'group_size' = {group_size} exceeds the number of codes in 'w' of shape {w.shape}"
            )
    D = w.shape[-2] * 32 // bits
    bits, group_size = widths("dequantize", D, w, scales, bits, group_size)
    checked_format("dequantize", mode, bits, group_size, D)
    biases = offsets("dequantize", scales, biases, zeros, mode)
    return _dequantized(w, scales, biases, mode=mode, bits=bits, group_size=group_size)


@public(op)
def quantized_matmul(
    x: jax.Array,
    w: jax.Array,
    scales: jax.Array,
    biases: jax.Array | None = None,
    *,
    zeros: jax.Array | None = None,
    mode: str = "affine",
    bits: int | None = None,
    group_size: int | None = None,
) -> Prepared:
    """Returns x times the weights that w represents, [*lead, F] in x's dtype, accumulated in float32.

    Args:
      x: [*lead, D].
      w, scales, biases: as returned by `quantize`: uint32 [D * bits / 32, F], and [D / group_size, F].
      zeros: instead of biases, the code that represents zero: bias = -scale * zero.
      mode: "affine", "nf4", "mxfp4" or "mxfp8", see `quantize`.
      bits, group_size: inferred from x's D and the shapes; if given, they must agree. In mode "affine", pass one if x
        could have another D than the weights: half of it fits codes of twice the bits.

    x has a gradient; the weights have none.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    >>> import jax.numpy as jnp
    >>> from kernels import quantize
    >>> w = jnp.arange(32.0)[:, None] % 16
    >>> print(quantized_matmul(jnp.ones(32), *quantize(w, bits=4, group_size=32)))
    [240.]
    """
    name = "quantized_matmul"
    if not is_float_array(x) or x.ndim < 1 or not x.shape[-1]:
        got = f"{x.dtype} of shape {x.shape}" if is_array(x) else type(x).__name__
        raise ValueError(f"{name}: argument 'x' must be a float array [*lead, D], got {got}")
    how, biases = packing(
        name, x.shape[-1], w, scales, biases, zeros=zeros, mode=mode, bits=bits, group_size=group_size
    )
    return Prepared(op.bind(x, w, scales, biases, **how))
