"""Cross entropy of hidden states whose output projection is multiplied in 8 bits, a block of tokens at a time.

The three products, logits, the gradient of hidden states and that of the matrix, are those of `ejdist/precision.py`. Logits and
their cotangents are written in the dtype of hidden states, and softmax and losses are in float32: beside the error of 8-bit
operands that of 16-bit logits is small. The matrix is quantised once. A sum's gradients are computed in the forward, while a
block has its logits, as in `kernels/ops/cross_entropy`; over a split vocabulary, and of losses per token, the backward computes
logits again.

Where no scale is of more than a block of tokens, the cotangents of many blocks wait in 8 bits for one product with the tokens:
it adds them up in registers. Else each block's product is added to a sum in float32, which is as large as the matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

import kernels
from ejdist.gathered_blocks import flat, gathered_blocks, spec_of
from ejdist.layout import axes_in, current_layout, gather, on_mesh, spec
from ejdist.mapped import map_shards
from ejdist.mesh import mesh_here
from ejdist.precision import PRECISIONS, Blocks, Narrow, check_device, of_matrix, operands_of, times
from ejdist.vocabulary_parts import of_every_part, of_this_part
from kernels.engines.rows.vocabulary import most_rows
from kernels.framework.dispatch import vary_alike
from kernels.ops.cross_entropy import LossSums, TokenLosses, logits_op, terms_of_tokens, token_losses
from kernels.ops.scaled_matmul import SCALINGS

BLOCK = 2**28  # logits of a block, 512 MiB in bfloat16; twice as many where each block's product is added to a sum
WAITING = 2**31  # bytes of cotangents that wait for one product


class _How(NamedTuple):
    precision: str
    logits_soft_cap: float | None
    z_loss: float
    platform: str | None  # of what is made of logits; products take the fastest backend


def sizes(tokens: int, vocabulary: int, precision: str) -> tuple[int, int]:
    """Returns (tokens of a block, blocks whose cotangents wait for one product). Blocks are of one size, the last one
    padded: the smallest size that needs no more blocks, so that little padding is multiplied."""
    alone = SCALINGS[PRECISIONS[precision].scaling].a[1] is None
    # Each product that is added to the sum reads and writes it: with 4,096 tokens of 8B in a block, in place of 2,048, its head
    # takes 52.5 ms with scales of rows on an H200, in place of 57.3. With scales of blocks both take 52.
    most = min(-(-tokens // 128) * 128, most_rows(vocabulary, 2 * BLOCK if alone else BLOCK))
    blocks = -(-tokens // most)
    parts = blocks if alone else -(-blocks // max(1, WAITING // (vocabulary * most)))
    together = -(-blocks // parts)
    return -(-tokens // (128 * parts * together)) * 128, together


def bytes_at_work(tokens: int, width: int, vocabulary: int, precision: str, itemsize: int) -> int:
    """Returns the bytes at the height of a loss of which gradients are taken, without the matrix and a float32 gradient of it:
    logits and cotangents of a block, cotangents that wait, the matrix in 8 bits, and a product with the tokens."""
    rows, together = sizes(tokens, vocabulary, precision)
    of_matrix = (2 + itemsize) * width * vocabulary
    if rows * together >= tokens:  # the one product is the gradient
        of_matrix = max(0, of_matrix - 4 * width * vocabulary)
    return rows * vocabulary * (2 * itemsize + 2 + together) + of_matrix


def _in_parts(x: jax.Array, size: int) -> jax.Array:
    """Returns x [M, ...] as [parts, size, ...]; what is added is no token."""
    fill = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
    x = jnp.pad(x, [(0, -x.shape[0] % size)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
    return x.reshape(-1, size, *x.shape[1:])


def _walked(
    x: jax.Array, matrix: jax.Array, blocks: Blocks | None, row: Any, step: Callable, precision: str
) -> tuple[Any, Any, Any]:
    """Returns (what `step` returns beside, of all tokens; the gradients of x and of the matrix).

    Args:
      x: [M, D]. matrix: [D, V], there for its gradient alone if its blocks are passed. row: arrays [M], by name.
      step: (logits [rows, V], row) -> (a pytree of [rows], the cotangent of the logits, or None for no gradients).
    """
    (M, D), V = x.shape, matrix.shape[1]
    rows, together = sizes(M, V, precision)
    of_w = of_matrix(matrix, blocks, precision)
    row_like = jax.tree.map(lambda y: jax.ShapeDtypeStruct((rows, *y.shape[1:]), y.dtype), row)
    like = jax.eval_shape(step, jax.ShapeDtypeStruct((rows, V), x.dtype), row_like)[1]

    def block(waiting: Any, part: Any) -> Any:
        i, values, scale, row = part
        logits = kernels.scaled_matmul(values, of_w.turned, scale, of_w.turned_scale, dtype=str(x.dtype))
        beside, d = step(logits[:, :V], row)
        if d is None:
            return waiting, (None, beside)
        of_d = operands_of(d, precision, "d")
        new = of_d.turned, of_d.turned_scale
        waiting = [jax.lax.dynamic_update_slice_in_dim(w, n, i * n.shape[1], 1) for w, n in zip(waiting, new)]
        return waiting, (times(of_d.values, of_d.scale, of_w.values, of_w.scale, x, (rows, D)), beside)

    def some(total: Any, part: Any) -> Any:
        of_x, row = operands_of(part[0], precision, "x"), part[1]
        each = jax.tree.map(lambda y: y.reshape(together, -1, *y.shape[1:]), (of_x.values, of_x.scale, row))
        arrays = (jnp.arange(together), *each)
        if like is None:
            return total, jax.lax.scan(block, None, arrays)[1]
        turned = jax.eval_shape(lambda d: operands_of(d, precision, "d")[2:], like)
        empty = [jnp.zeros((y.shape[0], together * y.shape[1]), y.dtype) for y in turned]
        (values, scale), made = jax.lax.scan(block, vary_alike(empty, x), arrays)
        return total + times(of_x.turned, of_x.turned_scale, values, scale, x, (D, V)), made

    parts = jax.tree.map(lambda y: _in_parts(y, rows * together), (x, row))
    count = parts[0].shape[0]
    total = jnp.zeros((D, V) if like is not None and count > 1 else (), jnp.float32)
    if count == 1:
        total, made = some(total.astype(x.dtype), jax.tree.map(lambda y: y[0], parts))
    else:
        total, made = jax.lax.scan(some, vary_alike(total, x), parts)
    # [parts, blocks, rows, ...] of tokens, without those that were added
    leading = 2 if count == 1 else 3
    d_x, beside = jax.tree.map(lambda y: y.reshape(-1, *y.shape[leading:])[:M], made)
    return beside, d_x, total.astype(matrix.dtype)


def _of_logits(logits: jax.Array, targets: jax.Array, how: _How) -> tuple[jax.Array, ...]:
    """Returns (lse, the target's logit, the mean logit) of each row."""
    cap = {} if how.logits_soft_cap is None else {"logits_soft_cap": float(how.logits_soft_cap)}
    return logits_op(logits, targets, platform=how.platform, **cap)


# -- losses of tokens --------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _outputs(
    x: jax.Array, matrix: jax.Array, blocks: Blocks | None, targets: jax.Array, how: _How
) -> tuple[jax.Array, ...]:
    """Returns (lse, target's logit, mean logit) of each token of x [M, D]."""

    def step(logits: jax.Array, row: Any) -> Any:
        return _of_logits(logits, row["targets"], how), None

    return _walked(x, matrix, blocks, {"targets": targets}, step, how.precision)[0]


def _outputs_forward(
    x: jax.Array, matrix: jax.Array, blocks: Blocks | None, targets: jax.Array, how: _How
) -> tuple[tuple[jax.Array, ...], Any]:
    return _outputs(x, matrix, blocks, targets, how), (x, matrix, blocks, targets)


def _outputs_backward(how: _How, saved: Any, cotangents: tuple[jax.Array, ...]) -> Any:
    x, matrix, blocks, targets = saved

    def step(logits: jax.Array, row: Any) -> Any:
        _, pull = jax.vjp(lambda y: _of_logits(y, row["targets"], how), logits)
        return (), pull(row["cotangents"])[0]

    row = {"targets": targets, "cotangents": tuple(cotangents)}
    _, d_x, d_matrix = _walked(x, matrix, blocks, row, step, how.precision)
    return d_x, d_matrix, None, None


_outputs.defvjp(_outputs_forward, _outputs_backward)


# -- their sums --------------------------------------------------------------------------------------------------------


def _summing(
    x: jax.Array, matrix: jax.Array, blocks: Blocks | None, targets: jax.Array, how: _How, of_token: Callable | None
) -> tuple[tuple[jax.Array, ...], Any, Any]:
    """Returns (the outputs of `_sums`, the gradients of x and the matrix of the sum of `of_token(terms)`, if it is given)."""
    V = matrix.shape[1]

    def step(logits: jax.Array, row: Any) -> Any:
        def total(logits: jax.Array) -> Any:
            outputs = _of_logits(logits, row["targets"], how)
            terms = terms_of_tokens(*outputs, targets=row["targets"], vocabulary=V, z_loss=how.z_loss)
            return (jnp.float32(0) if of_token is None else jnp.sum(of_token(terms))), terms

        if of_token is None:
            return total(logits)[1], None
        d, terms = jax.grad(total, has_aux=True)(logits)
        return terms, d

    terms, d_x, d_matrix = _walked(x, matrix, blocks, {"targets": targets}, step, how.precision)
    loss, z_loss, counted = map(jnp.sum, terms)
    return (loss + z_loss, loss, z_loss, counted), d_x, d_matrix


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sums(
    x: jax.Array, matrix: jax.Array, blocks: Blocks | None, targets: jax.Array, how: _How
) -> tuple[jax.Array, ...]:
    """Returns (cross entropy and z-loss, each by itself, the number of counted tokens) of x [M, D], summed."""
    return _summing(x, matrix, blocks, targets, how, None)[0]


def _sums_forward(x: Any, matrix: Any, blocks: Any, targets: Any, how: _How) -> tuple[tuple[jax.Array, ...], Any]:
    x, matrix, blocks, targets = jax.tree.map(lambda leaf: leaf.value, (x, matrix, blocks, targets))
    outputs, d_x, d_matrix = _summing(x, matrix, blocks, targets, how, lambda t: t.cross_entropy + t.z_loss)
    return outputs, (x, matrix, blocks, targets, d_x, d_matrix)


def _sums_backward(how: _How, saved: Any, cotangents: tuple[Any, ...]) -> Any:
    x, matrix, blocks, targets, d_x, d_matrix = saved
    d_total, d_loss, d_z = (None if isinstance(d, SymbolicZero) else d for d in cotangents[:3])
    if how.z_loss == 0:  # the loss is the total, and the other a constant
        d_total, d_loss, d_z = _added(d_total, d_loss), None, None
    if d_loss is None and d_z is None:
        d_x, d_matrix = ((_added(d_total) * d.astype(jnp.float32)).astype(d.dtype) for d in (d_x, d_matrix))
    else:  # what was kept are gradients of both terms together
        of_loss, of_z = _added(d_total, d_loss), _added(d_total, d_z)
        _, d_x, d_matrix = _summing(
            x, matrix, blocks, targets, how, lambda t: of_loss * t.cross_entropy + of_z * t.z_loss
        )
    return d_x, d_matrix, None, None


def _added(*cotangents: jax.Array | None) -> Any:
    return sum((d for d in cotangents if d is not None), start=jnp.float32(0))


_sums.defvjp(_sums_forward, _sums_backward, symbolic_zeros=True)


# -- on a mesh ---------------------------------------------------------------------------------------------------------


def _check(name: str, hidden: Any, lm_head: Narrow, targets: Any) -> None:
    """Raises ValueError where shapes do not fit, as the loss of a wide projection does."""
    wanted = {
        "targets": (targets.shape, hidden.shape[:-1], ""),
        "lm_head": (lm_head.values.shape[:1], hidden.shape[-1:], " and the vocabulary"),
    }
    for argument, (shape, needed, more) in wanted.items():
        if shape != needed:
            raise ValueError(f"{name}: argument {argument!r} must have shape {needed}{more}, got {shape}{more}")


def _on_mesh(name: str, of_shard: Callable, hidden: Any, lm_head: Narrow, targets: Any, mesh: Any, summed: bool) -> Any:
    """Returns `of_shard(x [M, D], matrix, blocks, targets [M], axes of the vocabulary)` of every device's tokens: arrays of
    tokens, or what is summed over them."""
    _check(name, hidden, lm_head, targets)
    if isinstance(mesh, jax.sharding.Mesh):
        check_device(lm_head.precision, mesh.devices.flat[0])
    dims_x, dims_w, dims = ["B", "T", "D"], ["D", "V"], ["B", "T"]
    matrix, here = gather(lm_head.values, " ".join(dims_w), mesh), mesh_here(mesh)

    def run(x: jax.Array, matrix: jax.Array, blocks: Any, targets: jax.Array, vocabulary: tuple[str, ...] = ()) -> Any:
        shape = targets.shape
        # One type inside of a `shard_map`, so that what a device adds to a gradient is summed.
        x, matrix, blocks = vary_alike((x, matrix, blocks), targets)
        made = of_shard(x.reshape(-1, x.shape[-1]), matrix, blocks, targets.reshape(-1), vocabulary)
        return made if summed else jax.tree.map(lambda y: y.reshape(shape), made)

    if here is None or here.size == 1:
        return run(hidden, matrix, None, targets)
    axes = on_mesh(current_layout().activations, here)

    def placed(names: list[str], shape: tuple[int, ...]) -> Any:
        return spec(names, axes, shape=shape, mesh=here, what="activation")

    if over := tuple(axes_in(placed(["D"], hidden.shape[-1:]))):
        raise ValueError(
            f"{name}: argument 'hidden' has dim D split over {', '.join(over)}, but this operation needs it whole; gather it "
            "first"
        )
    tokens, split = (
        tuple(axes_in(s)) for s in (placed(dims, targets.shape), placed(["V"], (lm_head.values.shape[1],)))
    )
    made = gathered_blocks(lm_head, dims_w, dims_x, mesh)

    def on_shard(x: jax.Array, matrix: jax.Array, blocks: Any, targets: jax.Array) -> Any:
        out = run(x, matrix, flat(blocks, dims_w, dims_x), targets, split)
        return jax.lax.psum(out, tokens) if summed and tokens else out

    where = placed(dims_x, hidden.shape), placed(dims_w, matrix.shape), spec_of(made, here), placed(dims, targets.shape)
    out = placed([], ()) if summed else where[3]
    return map_shards(on_shard, here, where, out)(hidden, matrix, made and made.blocks, targets)


def _of_all(x: Any, matrix: Any, blocks: Any, targets: Any, vocabulary: tuple[str, ...], how: _How) -> tuple[Any, int]:
    """Returns (the outputs of each token over the whole vocabulary, its size)."""
    here, size = of_this_part(targets, vocabulary, matrix.shape[1])
    return of_every_part(_outputs(x, matrix, blocks, here, how), vocabulary), size


def narrow_loss_sums(
    hidden: jax.Array,
    lm_head: Narrow,
    targets: jax.Array,
    *,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    mesh: Any = None,
    platform: str | None = None,
) -> LossSums:
    """Returns `fused_loss_sums` of an output projection whose products are in 8 bits, as a model stores it.

    Args:
      hidden: [B, T, D]. lm_head: [D, V]. targets: int [B, T], -1 for none.
      platform: backend of what is made of logits; None: the fastest, which products take in any case.

    Raises:
      ValueError: shapes do not fit, D is split, or the device has no kernel for such products.
    """
    how = _How(lm_head.precision, logits_soft_cap, float(z_loss), platform)

    def of_shard(x: Any, matrix: Any, blocks: Any, targets: Any, vocabulary: tuple[str, ...]) -> Any:
        if not vocabulary:
            return _sums(x, matrix, blocks, targets, how)
        outputs, size = _of_all(x, matrix, blocks, targets, vocabulary, how)
        terms = terms_of_tokens(*outputs, targets=targets, vocabulary=size, z_loss=how.z_loss)
        loss, z, counted = map(jnp.sum, terms)
        return loss + z, loss, z, counted

    return LossSums(*_on_mesh("fused_loss_sums", of_shard, hidden, lm_head, targets, mesh, summed=True))


def narrow_token_losses(
    hidden: jax.Array,
    lm_head: Narrow,
    targets: jax.Array,
    *,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    mesh: Any = None,
    platform: str | None = None,
) -> TokenLosses:
    """Returns `fused_token_losses` of an output projection whose products are in 8 bits; as `narrow_loss_sums`."""
    how = _How(lm_head.precision, logits_soft_cap, float(z_loss), platform)

    def of_shard(x: Any, matrix: Any, blocks: Any, targets: Any, vocabulary: tuple[str, ...]) -> Any:
        outputs, size = _of_all(x, matrix, blocks, targets, vocabulary, how)
        return token_losses(*outputs, targets=targets, vocabulary=size, z_loss=how.z_loss)

    return _on_mesh("fused_token_losses", of_shard, hidden, lm_head, targets, mesh, summed=False)
