"""Products of a layer with 8-bit operands: how both are quantised, forward and backward, and where they can run.

Parameters, their gradients and the optimizer stay as they are: an operand is made of what a product takes, where it takes it. A
product sums over one dim, and the scales of its operands are of parts of that dim. So the three products of a layer, `y = x w`,
`dx = dy w^T` and `dw = x^T dy`, quantise x, w and dy along three dims. In blocks of 128, x and dy are rounded twice, along the
features for one product and along the tokens for the other; a block of 128 by 128 of w is the same either way. Along the
tokens dy has blocks of 128 by 128 too: with fine scales of both operands an H200 does 529 TFLOP/s, and 779 in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import kernels
from kernels.framework.dispatch import vary_alike
from kernels.ops.scaled_matmul import SCALINGS

BF16 = "bf16"  # products in model.compute_dtype
PRODUCT = "project.product"  # checkpoint name of a result: what keeps products by their primitive does not see it
LEAST = 128  # a matrix of fewer inputs or outputs is not worth the operands that would be made for it
_FINE, _WIDE = "float8_e4m3fn", "float8_e5m2"


@dataclass(frozen=True)
class Precision:
    """How products are computed. `scaling`: a name of `SCALINGS`. `gradients`: dtype of dy; x and w are e4m3.

    speed: of the products, over those in bfloat16; passes: bytes that are moved for a number of an operand that is made. Both
    are of the steps of a 1B on an H200 (benchmarks/results/steps/1b_8k_fp8_*).
    """

    scaling: str
    gradients: str = _FINE
    on_gpus: bool = True
    speed: float = 1.6
    passes: float = 7.0


PRECISIONS = {
    # One scale for an array leaves small gradients no bits of e4m3 (Micikevicius et al., FP8 Formats for Deep Learning, 2022).
    "fp8_tensor": Precision("tensor", _WIDE),
    "fp8_row": Precision("row"),
    "fp8_block": Precision(
        "block", speed=1.38, passes=14.0
    ),  # DeepSeek-AI, DeepSeek-V3, 2024, section 3.3: e4m3 both ways
    "mxfp8": Precision(
        "mx", on_gpus=False
    ),  # OCP Microscaling Formats (MX) 1.0, 2023: no tensor core of Hopper takes its scales
}


@partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["precision"])
@dataclass(frozen=True)
class Narrow:
    """A matrix, as it is stored, whose products are in 8 bits."""

    values: Any
    precision: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def whole(self, dtype: Any) -> jax.Array:
        """Returns the matrix for other products than these."""
        return self.values.astype(dtype)


def check_precision(precision: str, keep: tuple[str, ...]) -> None:
    """Raises ValueError for keys of a model section that are wrong, naming the key and the remedy."""
    if precision not in (BF16, *PRECISIONS):
        raise ValueError(f"model.precision = {precision!r} is unknown; use {', '.join((BF16, *PRECISIONS))}")
    if keep and precision == BF16:
        raise ValueError(
            f"model.precision_keep = {list(keep)} names matrices that stay as they are beside products in 8 bits: give "
            f"model.precision, one of {', '.join(PRECISIONS)}, or leave it out"
        )


def check_device(precision: str, device: Any) -> None:
    """Raises ValueError for a precision that a device computes no faster than bfloat16; CPUs compute all, for tests."""
    if precision == BF16 or device.platform == "cpu":
        return
    capability = str(getattr(device, "compute_capability", ""))
    if capability == "9.0" and PRECISIONS[precision].on_gpus:
        return
    others = [name for name, p in PRECISIONS.items() if p.on_gpus]
    what = f"use {BF16} or {', '.join(others)}" if capability == "9.0" else f"use model.precision={BF16}"
    raise ValueError(
        f"model.precision = {precision}: {device.device_kind} has no kernel for its products, which would be slower than in "
        f"bfloat16; {what}"
    )


def _padded(x: jax.Array, multiples: tuple[int | None, int | None]) -> jax.Array:
    """Returns x with zeros up to multiples of these sizes: they change no scale and no sum."""
    more = [(0, 0 if m is None else -size % m) for size, m in zip(x.shape, multiples)]
    return jnp.pad(x, more) if any(after for _, after in more) else x


def _times(left: jax.Array, right: jax.Array, blocks: Any, dtypes: tuple[str, str], exponents: bool) -> jax.Array:
    """Returns left [M, D] times right [F, D] transposed, both quantised, in the dtype of left."""
    (rows, width), (right_rows, _) = blocks
    deep = width or 16  # kernels read 16 bytes at a time
    operands = []
    for x, block, least, dtype in ((left, blocks[0], rows, dtypes[0]), (right, blocks[1], right_rows or 8, dtypes[1])):
        padded = _padded(x, (least, deep))
        operands.append(kernels.quantize_scaled(padded, block, dtype=dtype, exponents=exponents))
    (a, a_scale), (b, b_scale) = operands
    out = kernels.scaled_matmul(a, b, a_scale, b_scale, dtype=str(left.dtype))
    return out[: left.shape[0], : right.shape[0]]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, w: jax.Array, precision: str) -> jax.Array:
    how = SCALINGS[PRECISIONS[precision].scaling]
    return _times(x, w.T, (how.a, how.b), (_FINE, _FINE), how.exponents)


def _backward(precision: str, saved: tuple[jax.Array, jax.Array], d: jax.Array) -> tuple[jax.Array, jax.Array]:
    (x, w), gradients = saved, PRECISIONS[precision].gradients
    how = SCALINGS[PRECISIONS[precision].scaling]
    dx = _times(d, w, (how.a, how.b), (gradients, _FINE), how.exponents)
    dw = _times(x.T, d.T, (how.a, how.b), (_FINE, gradients), how.exponents)
    return dx, dw.astype(w.dtype)


_product.defvjp(lambda x, w, precision: (_product(x, w, precision), (x, w)), _backward)


def narrow_product(
    dims: tuple[list[str], list[str], list[str]], x: jax.Array, w: jax.Array, precision: str
) -> jax.Array:
    """Returns the product of arrays of these dims, in 8 bits, in the dtype of x; its gradients are such products too."""
    dims_x, dims_weight, dims_out = dims
    x, w = vary_alike((x, w))  # one type inside of a `shard_map`, so that what a device adds to a gradient is summed
    summed = [d for d in dims_weight if d in dims_x]
    kept, others = ([d for d in of if d not in summed] for of in (dims_x, dims_weight))
    sizes = dict(zip(dims_x, x.shape)) | dict(zip(dims_weight, w.shape))
    rows = jnp.transpose(x, [dims_x.index(d) for d in (*kept, *summed)])
    columns = jnp.transpose(w, [dims_weight.index(d) for d in (*summed, *others)])
    inputs = 1
    for d in summed:
        inputs *= sizes[d]
    out = checkpoint_name(_product(rows.reshape(-1, inputs), columns.reshape(inputs, -1), precision), PRODUCT)
    out = out.reshape([sizes[d] for d in (*kept, *others)])
    return jnp.transpose(out, [(kept + others).index(d) for d in dims_out])
