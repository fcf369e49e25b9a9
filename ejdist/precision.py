"""Products of a layer with 8-bit operands: how both are quantised, forward and backward, and where they can run.

Parameters, their gradients and the optimizer stay as they are: an operand is made of what a product takes, where it takes it. A
product sums over one dim, and the scales of its operands are of parts of that dim. So the three products of a layer, `y = x w`,
`dx = dy w^T` and `dw = x^T dy`, quantise x, w and dy along three dims. In blocks of 128, x and dy are rounded twice, along the
features for one product and along the tokens for the other; a block of 128 by 128 of w is the same either way. Along the
tokens dy has blocks of 128 by 128 too: with fine scales of both operands an H200 does 806 TFLOP/s, and 1,147 with these.

An array is read once for both of its operands (`kernels.quantize_both_ways`). That of x for `dw` is made in the forward and
kept for the backward, in place of x: one byte a number. Products of one x, as queries, keys and values, share its operands.
That of w for `dx` is made in the forward too, and kept in place of w. Where w was gathered, its stored part is kept in blocks
of 8 bits and gathered again; with other scales w is gathered and quantised again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import kernels
from kernels.framework.dispatch import vary_alike
from kernels.ops.scaled_matmul import SCALINGS, Scaling

BF16 = "bf16"  # products in model.compute_dtype
PRODUCT = "project.product"  # checkpoint name of a result: what keeps products by their primitive does not see it
OPERAND = "project.operand"  # of what a backward's products are of, in 8 bits
LEAST = 128  # a matrix of fewer inputs or outputs is not worth the operands that would be made for it
_FINE, _WIDE = "float8_e4m3fn", "float8_e5m2"


@dataclass(frozen=True)
class Precision:
    """How products are computed. `scaling`: a name of `SCALINGS`. `gradients`: dtype of dy; x and w are e4m3.

    speed: of the products, over those in bfloat16; passes: bytes that are moved for a number of an operand that is made. Both
    are of steps of a 1B and of ten layers of an 8B on an H200 (benchmarks/results/steps/*_fp8_*), beside the same in bfloat16;
    passes of blocks and rows are also what the kernels move of an operand both ways, 4 and 6 bytes for two.
    on_tpus: kinds of TPUs whose compiler estimates a layer to take fewer cycles than in bfloat16, with what its operands take
    (kernels/ops/scaled_matmul/README.md); no TPU has run one.
    """

    scaling: str
    gradients: str = _FINE
    on_gpus: bool = True
    on_tpus: tuple[str, ...] = ()
    speed: float = 1.6
    passes: float = 7.0


PRECISIONS = {
    # One scale for an array leaves small gradients no bits of e4m3 (Micikevicius et al., FP8 Formats for Deep Learning, 2022).
    "fp8_tensor": Precision("tensor", _WIDE),
    # One kernel makes both operands of an array, after another has read its largest magnitudes or written them with it.
    "fp8_row": Precision("row", on_tpus=("TPU7x",), speed=1.7, passes=3.0),
    # e4m3 both ways (DeepSeek-AI, DeepSeek-V3, 2024, section 3.3); one kernel makes both operands of an array.
    "fp8_block": Precision("block", speed=1.7, passes=2.0),
    # OCP Microscaling Formats (MX) 1.0, 2023: no tensor core of Hopper takes its scales.
    "mxfp8": Precision("mx", on_gpus=False),
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


def check_head(precision: str, head: bool, width: int, vocabulary: int) -> None:
    """Raises ValueError where the output projection [width, vocabulary] is to be in 8 bits and cannot be."""
    if not head:
        return
    if precision == BF16:
        raise ValueError(
            "model.precision_head = true has losses multiply by the output projection as model.precision says, and that is "
            f"{BF16}: give model.precision, one of {', '.join(PRECISIONS)}, or leave it out"
        )
    if min(width, vocabulary) < LEAST:
        raise ValueError(
            f"model.precision_head = true: the output projection is {width} by {vocabulary}, and of fewer than {LEAST} inputs "
            "or outputs it stays as it is: leave it out"
        )


def check_device(precision: str, device: Any) -> None:
    """Raises ValueError for a precision that a device computes no faster than bfloat16; CPUs compute all, for tests."""
    if precision == BF16 or device.platform == "cpu":
        return
    gpu = str(getattr(device, "compute_capability", "")) == "9.0"
    tpu = device.device_kind if device.platform == "tpu" else None
    faster = [name for name, p in PRECISIONS.items() if (gpu and p.on_gpus) or tpu in p.on_tpus]
    if precision in faster:
        return
    what = f"use {BF16} or {', '.join(faster)}" if faster else f"use model.precision={BF16}"
    lacks = "has no kernel for its products, which would be slower than in bfloat16"
    if tpu:
        lacks = "takes longer for its products and their operands than for products in bfloat16"
    raise ValueError(f"model.precision = {precision}: {device.device_kind} {lacks}; {what}")


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["eps"])
@dataclass(frozen=True)
class Norm:
    """The RMS norm that products read. `weight` is an array, or its partition spec."""

    weight: Any
    eps: float


class Normed(NamedTuple):
    """An array that only products read, and what it is the RMS norm of. Where it is quantised as it is computed, `values` are
    not read either, so that no program computes them."""

    values: jax.Array
    x: jax.Array
    norm: Norm


class Operands(NamedTuple):
    """An array [M, D] as an operand that is summed over D, and turned, as one that is summed over M; each with its scales."""

    values: jax.Array
    scale: jax.Array
    turned: jax.Array
    turned_scale: jax.Array


def _together(scaling: Scaling) -> bool:
    """Returns whether one operation makes both operands of an array: of tiles of 128 by 128."""
    return scaling.a[0] is not None and not scaling.exponents


def _operands(x: jax.Array, straight: Any, turned: Any, dtype: str, how: Scaling) -> Operands:
    """Returns x in blocks of these rows and entries, padded with zeros, which change no scale and no sum."""
    width = 128 if _together(how) else straight[1] or 16  # kernels read 16 bytes at a time
    more = [(0, -size % width) for size in x.shape]
    x = jnp.pad(x, more) if any(after for _, after in more) else x
    if _together(how):
        heights = {"rows": straight[0], "turned_rows": turned[0]}
        return Operands(*kernels.quantize_both_ways(x, **heights, entries=straight[1], dtype=dtype))
    sides = ((x, straight), (x.T, turned))
    return Operands(
        *(y for a, block in sides for y in kernels.quantize_scaled(a, block, dtype=dtype, exponents=how.exponents))
    )


def operands_of(x: jax.Array, precision: str, role: str) -> Operands:
    """Returns the operands of x [M, D], of the cotangent d [M, F], or of a matrix w [D, F]."""
    how = SCALINGS[PRECISIONS[precision].scaling]
    straight, turned = {"x": (how.a, how.a), "d": (how.a, how.b), "w": (how.b, how.b)}[role]
    return _operands(x, straight, turned, PRECISIONS[precision].gradients if role == "d" else _FINE, how)


def _turned(of: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns what a matrix's gradient is a product of, under the name that remat policies keep."""
    return checkpoint_name(of.turned, OPERAND), checkpoint_name(of.turned_scale, OPERAND)


def times(
    values: jax.Array, scale: jax.Array, others: jax.Array, their_scale: jax.Array, like: jax.Array, shape: Any
) -> jax.Array:
    """Returns values [M, D] times others [F, D] transposed, in the dtype of an array, without padding."""
    out = kernels.scaled_matmul(values, others, scale, their_scale, dtype=str(like.dtype))
    return out[: shape[0], : shape[1]]


# -- products ----------------------------------------------------------------------------------------------------------


class Blocks(NamedTuple):
    """A matrix [D, F] in 8 bits: the bits of its numbers, and the scales of its blocks of 128 by 128, which are the same for
    sums over either dim. (Arrays, or how they lie on a mesh.)"""

    bits: Any
    scale: Any


def gathers_blocks(precision: str) -> bool:
    """Returns whether the parts of a matrix can be quantised before they are gathered: no scale is of more than a block."""
    return PRECISIONS[precision] == PRECISIONS["fp8_block"]


def blocks_of(w: jax.Array) -> Blocks:
    """Returns a matrix [D, F], of sizes that 128 divides, in 8 bits."""
    values, scale, _, _ = kernels.quantize_both_ways(w, rows=128, turned_rows=128, dtype=_FINE)
    return Blocks(jax.lax.bitcast_convert_type(values, jnp.uint8), scale)


def of_matrix(w: jax.Array, blocks: Blocks | None, precision: str) -> Operands:
    if blocks is None:
        return operands_of(w, precision, "w")
    values = jax.lax.bitcast_convert_type(blocks.bits, jnp.dtype(_FINE))
    return Operands(values, blocks.scale, values.T, blocks.scale.T)


@partial(jax.tree_util.register_dataclass, data_fields=["values", "blocks"], meta_fields=["whole"])
@dataclass(frozen=True)
class Matrix:
    """A matrix that products read. With blocks, those that it was quantised in before, the dims of sums first, it is there for
    its gradient alone. `whole`: it is stored as it is, and was not gathered."""

    values: Any
    blocks: Blocks | None = None
    whole: bool = True


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["shape", "dtype", "whole"])
@dataclass(frozen=True)
class Kept:
    """What the backward has of a matrix [D, F]: its rows in 8 bits, which a cotangent is multiplied by."""

    values: Any
    scale: Any
    shape: tuple[int, ...]
    dtype: Any
    whole: bool

    def gradient(self, d: jax.Array) -> Matrix:
        """Returns a matrix's gradient, beside which its blocks have none."""
        return Matrix(d.astype(self.dtype), None, self.whole)


def _kept(w: Matrix, of_w: Operands) -> Kept:
    """Returns the side of a matrix for the backward; under the name that remat policies keep if it is stored whole. Of one that
    was gathered a device would keep the parts of all."""
    values, scale = (checkpoint_name(y, OPERAND) if w.whole else y for y in (of_w.values, of_w.scale))
    return Kept(values, scale, w.values.shape, w.values.dtype, w.whole)


def fuses(shape: tuple[int, ...], precision: str) -> bool:
    """Returns whether a kernel can compute and quantise in one pass, given the shape of a device's array [..., D]."""
    return _together(SCALINGS[PRECISIONS[precision].scaling]) and not (math.prod(shape[:-1]) % 128 or shape[-1] % 128)


def _entries(precision: str) -> int | None:
    return SCALINGS[PRECISIONS[precision].scaling].a[1]


def _read(x: jax.Array, norm: Norm | None, precision: str) -> tuple[Operands, Any]:
    """Returns the operands of x, or of its norm, and what the backward of the norm reads."""
    if norm is None:
        return operands_of(x, precision, "x"), None
    *of_x, rstd = kernels.normalize_both_ways(x, norm.weight, eps=norm.eps, entries=_entries(precision))
    return Operands(*of_x), (x, norm, checkpoint_name(rstd, OPERAND))


def _through(normed: Any, d: jax.Array) -> tuple[jax.Array, Norm | None]:
    """Returns the cotangents of what `_read` has read, given that of what was quantised."""
    if normed is None:
        return d, None
    x, norm, rstd = normed
    dx, dweight = kernels.rms_norm_cotangents(x, norm.weight, rstd, d)
    return dx, Norm(dweight, norm.eps)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _products(x: jax.Array, norm: Norm | None, matrices: tuple[Matrix, ...], precision: str) -> tuple[jax.Array, ...]:
    """Returns x [M, D], or its norm, times each matrix [D, F]."""
    return _forward(x, norm, matrices, precision)[0]


def _forward(
    x: jax.Array, norm: Norm | None, matrices: tuple[Matrix, ...], precision: str
) -> tuple[tuple[jax.Array, ...], Any]:
    (of_x, normed), outs, kept = _read(x, norm, precision), [], []
    for w in matrices:
        of_w = of_matrix(w.values, w.blocks, precision)
        shape = x.shape[0], w.values.shape[1]
        outs.append(times(of_x.values, of_x.scale, of_w.turned, of_w.turned_scale, x, shape))
        kept.append(_kept(w, of_w))
    return tuple(outs), (normed, *_turned(of_x), tuple(kept))


def _backward(
    precision: str, saved: Any, cotangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, Norm | None, tuple[Matrix, ...]]:
    (normed, x, x_scale, kept), parts, gradients = saved, [], []
    for w, d in zip(kept, cotangents, strict=True):
        of_d = operands_of(d, precision, "d")
        parts.append(times(of_d.values, of_d.scale, w.values, w.scale, d, (d.shape[0], w.shape[0])))
        gradients.append(w.gradient(times(x, x_scale, of_d.turned, of_d.turned_scale, d, w.shape)))
    return *_through(normed, sum(parts[1:], parts[0])), tuple(gradients)


_products.defvjp(_forward, _backward)


def narrow_products(
    dims: list[tuple[list[str], list[str], list[str]]],
    x: jax.Array,
    norm: Norm | None,
    matrices: list[Matrix],
    precision: str,
) -> tuple[jax.Array, ...]:
    """Returns the products of x with matrices, each of these dims (of x, of the matrix, of the product), in 8 bits, in the
    dtype of x; their gradients are such products too. All sum over the same dims of x. With a norm, over its last dim, they are
    the products of the norm of x, where `fuses`."""
    # One type inside of a `shard_map`, so that what a device adds to a gradient is summed.
    x, norm, matrices = vary_alike((x, norm, matrices))
    dims_x = dims[0][0]
    summed = [d for d in dims_x if d in dims[0][1]]
    kept = [d for d in dims_x if d not in summed]
    rows = jnp.transpose(x, [dims_x.index(d) for d in (*kept, *summed)])
    inputs = math.prod(x.shape[dims_x.index(d)] for d in summed)
    columns, shapes = [], []
    for (_, dims_weight, _), matrix in zip(dims, matrices, strict=True):
        others, w = [d for d in dims_weight if d not in summed], matrix.values
        columns.append(jnp.transpose(w, [dims_weight.index(d) for d in (*summed, *others)]).reshape(inputs, -1))
        shapes.append([x.shape[dims_x.index(d)] for d in kept] + [w.shape[dims_weight.index(d)] for d in others])
    flat = tuple(replace(matrix, values=w) for matrix, w in zip(matrices, columns, strict=True))
    products, made = _products(rows.reshape(-1, inputs), norm, flat, precision), []
    for (_, dims_weight, dims_out), out, shape in zip(dims, products, shapes, strict=True):
        order = kept + [d for d in dims_weight if d not in summed]
        made.append(jnp.transpose(checkpoint_name(out, PRODUCT).reshape(shape), [order.index(d) for d in dims_out]))
    return tuple(made)


# -- a gated MLP -------------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def narrow_mlp(
    x: jax.Array, norm: Norm | None, matrices: tuple[Matrix, ...], precision: str, activation: str
) -> jax.Array:
    """Returns (activation(x gate) * (x up)) down of x [M, D], or of its norm, its products in 8 bits, as products one by one
    have it. `matrices` are gate, up and down.

    What is as wide as `gate` is quantised where it is computed. With scales of blocks neither the activation's product nor its
    cotangents are written in a wider dtype; with those of rows they are, with their largest magnitudes.
    """
    return _mlp_forward(x, norm, matrices, precision, activation)[0]


def _mlp_forward(
    x: jax.Array, norm: Norm | None, matrices: tuple[Matrix, ...], precision: str, activation: str
) -> tuple[jax.Array, Any]:
    (g, u), (normed, h, h_scale, kept) = _forward(x, norm, matrices[:2], precision)
    g, u = (checkpoint_name(y, PRODUCT) for y in (g, u))
    if fuses(g.shape, precision):
        of_p = Operands(*kernels.activate_both_ways(g, u, activation=activation, entries=_entries(precision)))
    else:
        of_p = operands_of(kernels.gated_activation(g, u, activation=activation), precision, "x")
    down, of_down = matrices[2], of_matrix(matrices[2].values, matrices[2].blocks, precision)
    out = times(of_p.values, of_p.scale, of_down.turned, of_down.turned_scale, x, (x.shape[0], down.values.shape[1]))
    return out, (normed, h, h_scale, g, u, *_turned(of_p), (*kept, _kept(down, of_down)))


def _mlp_backward(
    precision: str, activation: str, saved: Any, d: jax.Array
) -> tuple[jax.Array, Norm | None, tuple[Matrix, ...]]:
    normed, h, h_scale, g, u, p, p_scale, kept = saved
    of_d, down = operands_of(d, precision, "d"), kept[2]
    d_down = times(p, p_scale, of_d.turned, of_d.turned_scale, d, down.shape)
    d_p = times(of_d.values, of_d.scale, down.values, down.scale, d, (d.shape[0], down.shape[0]))
    if fuses(g.shape, precision):
        eight = kernels.activation_cotangents(g, u, d_p, activation=activation, entries=_entries(precision))
        sides = Operands(*eight[:4]), Operands(*eight[4:])
    else:
        _, pull = jax.vjp(lambda g, u: kernels.gated_activation(g, u, activation=activation), g, u)
        sides = tuple(operands_of(y, precision, "d") for y in pull(d_p))
    parts, gradients = [], []
    for w, side in zip(kept, sides):
        parts.append(times(side.values, side.scale, w.values, w.scale, d, (d.shape[0], w.shape[0])))
        gradients.append(times(h, h_scale, side.turned, side.turned_scale, d, w.shape))
    gradients = tuple(w.gradient(y) for y, w in zip((*gradients, d_down), kept, strict=True))
    return *_through(normed, sum(parts[1:], parts[0])), gradients


narrow_mlp.defvjp(_mlp_forward, _mlp_backward)
