"""What balances experts: balance losses, the z-loss, and the update of a bias that needs no loss.

Every loss is a sum over the tokens that count, so devices and microbatches add theirs up, and the mean is one division by the
tokens of all of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.framework.binding import is_float_array
from kernels.framework.options import checked


def _refuse(function: str, argument: str, what: str) -> ValueError:
    return ValueError(f"{function}: argument {argument!r} {what}")


def balance_loss(counts: jax.Array, probabilities: jax.Array) -> jax.Array:
    """Returns the balance loss, a sum over tokens: E sum_e f_e sum_t P[t, e], with f_e the share of expert e in all choices.

    Divided by the tokens it is 1 where experts are chosen alike or are equally probable, and at most E. Of the sums over a
    global batch it is the loss of the global batch. Only the probabilities have a gradient.

    Args:
      counts: [E], how often each expert was chosen. With those of a whole global batch, this is a microbatch's exact part of
        the global batch's loss, and so is its gradient.
      probabilities: float [E], the probability of each expert, summed over tokens.

    Raises:
      ValueError: naming the argument.

    Sources: Fedus et al., Switch Transformers, 2021, eq. 4, with f a share of all choices as in DeepSeek-V3, 2024, eq. 18;
    Qiu et al., Demons in the Detail, 2025, of the global batch.
    """
    if counts.ndim != 1 or counts.shape != probabilities.shape:
        raise _refuse("balance_loss", "counts", f"of shape {counts.shape} must be [E] = {probabilities.shape}")
    counts = jax.lax.stop_gradient(counts).astype(probabilities.dtype)
    return counts.size * jnp.sum(counts / jnp.maximum(counts.sum(), 1) * probabilities)


def _documents(segment_ids: jax.Array) -> jax.Array:
    """Returns numbers in [0, T) of tokens [B, T]: one for those of a row that have one id, in any order."""
    order = jnp.argsort(segment_ids, axis=1)
    ids = jnp.take_along_axis(segment_ids, order, axis=1)
    rank = jnp.cumsum(jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0))), axis=1)
    return jnp.take_along_axis(rank, jnp.argsort(order, axis=1), axis=1)


def sequence_balance_loss(
    experts: jax.Array,
    probabilities: jax.Array,
    segment_ids: jax.Array | None = None,
    axis_name: str | tuple[str, ...] = (),
) -> jax.Array:
    """Returns the sum over sequences of their balance losses, each a sum over its tokens.

    Divided by the tokens, it is the mean over sequences of one length, otherwise a mean weighted by their tokens.

    Args:
      experts: int [B, T, k], those chosen, -1 for none. probabilities: float [B, T, E].
      segment_ids: int [B, T]: a sequence is what has one id in a row. Default: a row is a sequence.
      axis_name: inside a `shard_map`, the axes that the sequences are split over. How often a sequence chose an expert is then
        counted over all of them; the result is the part of this rank's tokens, and the parts add up.

    Raises:
      ValueError: naming the argument.

    Source: DeepSeek-V3, 2024, eq. 17 to 20.
    """
    if probabilities.ndim != 3:
        raise _refuse("sequence_balance_loss", "probabilities", f"must be [B, T, E], got {probabilities.shape}")
    rows, length, num_experts = probabilities.shape
    for name, array, dims in (("experts", experts, 3), ("segment_ids", segment_ids, 2)):
        if array is not None and (array.ndim != dims or array.shape[:2] != (rows, length)):
            must = f"must be [B, T{', k' if dims == 3 else ''}] with [B, T] = {(rows, length)}, got {array.shape}"
            raise _refuse("sequence_balance_loss", name, must)
    counted = jnp.any(experts >= 0, axis=-1, keepdims=True)
    if segment_ids is None:
        counts = jnp.sum(experts[..., None] == jnp.arange(num_experts), axis=(1, 2), dtype=probabilities.dtype)[:, None]
        counts = jax.lax.psum(counts, axis_name) if axis_name else counts
        share = counts / jnp.maximum(counts.sum(-1, keepdims=True), 1)
    else:
        share = _shares(experts, segment_ids, axis_name, num_experts, probabilities.dtype)
    # Counted from the tokens' side: arrays with a gradient are summed in place, without a scatter.
    return num_experts * jnp.sum(jnp.where(counted, share * probabilities, 0))


def _shares(experts: jax.Array, segment_ids: jax.Array, axis: Any, num_experts: int, dtype: Any) -> jax.Array:
    """Returns [B, T, E]: of all choices in the document of each token, how many are of each expert."""
    length = experts.shape[1]
    if axis:  # a document may begin on one rank and end on another
        experts, segment_ids = (jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (experts, segment_ids))
    documents = _documents(segment_ids)

    def of_row(experts: jax.Array, documents: jax.Array) -> jax.Array:
        chosen = jnp.where(experts < 0, num_experts, experts.astype(jnp.int32))
        counts = jnp.zeros((experts.shape[0], num_experts), dtype)
        counts = counts.at[documents[:, None], chosen].add(1, mode="drop")
        here = jax.lax.dynamic_slice_in_dim(documents, jax.lax.axis_index(axis) * length, length) if axis else documents
        return (counts / jnp.maximum(counts.sum(-1, keepdims=True), 1))[here]

    return jax.vmap(of_row)(experts, documents)


def z_loss(logits: jax.Array, counted: jax.Array | None = None) -> jax.Array:
    """Returns the sum over tokens of the squared log-sum-exp of the router's logits [..., E]; `counted` [...]: which tokens.

    Raises:
      ValueError: naming the argument.

    Source: Zoph et al., ST-MoE, 2022, eq. 5.
    """
    if counted is not None and counted.shape != logits.shape[:-1]:
        raise _refuse("z_loss", "counted", f"must be {logits.shape[:-1]}, as 'logits' without E, got {counted.shape}")
    square = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return jnp.sum(square if counted is None else jnp.where(counted, square, 0))


@checked
def update_bias(bias: jax.Array, counts: jax.Array, rate: float | jax.Array) -> jax.Array:
    """Returns the bias of the next step [E]: an expert chosen less often than the mean gains `rate`, one more often loses it.

    Once a step, with the counts of all its microbatches and devices. It has no gradient. Without a token nothing changes.

    Args:
      bias: float [E], see `route`. counts: int [E], how often each expert was chosen.
      rate: what a step changes, 0.001 in DeepSeek-V3, and 0 at its end; an array [] where it follows a schedule.

    Raises:
      ValueError: naming the argument.

    Source: Wang et al., Auxiliary-Loss-Free Load Balancing, 2024, algorithm 1.

    >>> import jax.numpy as jnp
    >>> print(update_bias(jnp.zeros(3), jnp.array([5, 0, 1]), 0.5))
    [-0.5  0.5  0.5]
    """
    if not is_float_array(bias) or bias.ndim != 1:
        raise _refuse("update_bias", "bias", "must be a float array [E]")
    counts = jnp.asarray(counts)
    if counts.shape != bias.shape:
        raise _refuse("update_bias", "counts", f"of shape {counts.shape} must be [E] = {bias.shape}, as 'bias'")
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        raise _refuse("update_bias", "counts", f"must be integers, got {counts.dtype}")
    if isinstance(rate, jax.Array):
        if rate.shape != () or not is_float_array(rate):
            raise _refuse("update_bias", "rate", f"must be one float, got {rate.dtype} of shape {rate.shape}")
    elif not 0 <= rate < float("inf"):
        raise _refuse("update_bias", "rate", f"must be at least 0 and finite, got {rate!r}")
    # In integers: a mean of floats may be off by a rounding, which moves the experts that are right at it.
    whole, rest = jnp.divmod(jnp.sum(counts), bias.size)
    # Compared, not subtracted: of unsigned counts no difference is negative.
    gained = (whole > counts).astype(jnp.int32) - (whole < counts)
    direction = jnp.where(counts == whole, jnp.sign(rest), gained)
    return jax.lax.stop_gradient(bias + rate * direction).astype(bias.dtype)
