"""The contract of mean pooling: sums over the segments of a sequence, and the cases that every backend is tested
with."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels.framework.backend import Case
from kernels.framework.binding import Call
from kernels.framework.config import Tunables
from kernels.framework.contract import Op
from kernels.framework.measured import bucket
from kernels.framework.work import Work, nbytes


@dataclass(frozen=True)
class MeanPoolingConfig(Tunables):
    """Tunables of the kernels; None leaves the choice to the configuration chain.

    Attributes:
      block_t, block_d: tokens and features of a tile of the forward.
      num_warps: warps of a program of the forward (Triton).
      splits: programs that share the tokens of one segment in the forward, each with a partial sum (Triton).
      backward_block_t, backward_block_d, backward_num_warps: the same for the backward.
    """

    block_t: int | None = None
    block_d: int | None = None
    num_warps: int | None = None
    splits: int | None = None
    backward_block_t: int | None = None
    backward_block_d: int | None = None
    backward_num_warps: int | None = None


def mean_pooling(
    x: Float[Array, "B T D"],
    segment_ids: Int[Array, "B T"],
    *,
    num_segments: int = 1,
) -> Float[Array, "B G D"]:
    """Returns total, float32: in each row, the sum of the tokens of each segment 0, 1, ..., num_segments - 1.

    Tokens with any other id, such as -1, are ignored, even if they contain NaN. The sum of a segment without tokens is
    0. The number of tokens does not depend on x, so the caller divides by it: partial sums of a split sequence can be
    added.

    Raises:
      ValueError: num_segments is less than 1.
    """
    if num_segments < 1:
        raise ValueError(f"mean_pooling: argument 'num_segments' must be at least 1, got {num_segments}")
    upcast = x.astype(jnp.promote_types(x.dtype, jnp.float32))

    def of_row(tokens: jax.Array, ids: jax.Array) -> jax.Array:
        inside = (ids >= 0) & (ids < num_segments)
        # Tokens without a segment go to an extra one that is dropped: multiplying NaN by 0 would not remove it.
        sums = jnp.zeros((num_segments + 1, tokens.shape[1]), upcast.dtype)
        return sums.at[jnp.where(inside, ids, num_segments)].add(tokens)[:num_segments]

    return jax.vmap(of_row)(upcast, segment_ids)


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of both directions: x is read and summed once, and its gradient is written once."""
    B, D = call.dims["B"], call.dims["D"]
    rest = nbytes(call.segment_ids) + 4 * B * call.num_segments * D  # the sums and their cotangents are float32
    return Work(call.x.size, nbytes(call.x) + rest), Work(0, nbytes(call.x) + rest)


def _padded(rng, dims):
    """Ids as from an attention mask: one segment per row, padded right and, in the last row, left; the first row is
    full."""
    B, T = dims["B"], dims["T"]
    lengths = rng.integers(1, T, B)
    lengths[0] = T
    index = np.arange(T)[None]
    mask = index < lengths[:, None]
    mask[-1] = mask[-1][::-1]
    return jnp.asarray(np.where(mask, 0, -1), jnp.int32)


def _packed(num_segments: int):
    """Returns a maker of ids of consecutive sequences; every fifth is empty, and the end is padding."""

    def make(rng, dims):
        B, T = dims["B"], dims["T"]
        ids = np.full((B, T), -1)
        nonempty = [g for g in range(num_segments) if g % 5 != 3]
        for row in ids:
            cuts = np.sort(rng.integers(0, T + 1, len(nonempty)))
            for g, begin, end in zip(nonempty, [0, *cuts[:-1]], cuts, strict=True):
                row[begin:end] = g
        return jnp.asarray(ids, jnp.int32)

    return make


def _scattered(num_segments: int):
    """Returns a maker of ids in arbitrary order, some of them without a segment."""

    def make(rng, dims):
        return jnp.asarray(rng.integers(-1, num_segments + 1, (dims["B"], dims["T"])), jnp.int32)

    return make


def _nothing(rng, dims):
    return jnp.full((dims["B"], dims["T"]), -1, jnp.int32)


def _case(name: str, make, *tags: str, segments: int = 1, **dims: int) -> Case:
    options = {} if segments == 1 else {"num_segments": segments}
    return Case(name, dims, options, make={"segment_ids": make}, tags=frozenset(tags))


def autotune_key(call: Call) -> str:
    """Returns the measurement key of a call: one segment per row or several, and the length of the rows."""
    segments = "one segment" if call.num_segments == 1 else "segments"
    return f"{call.dtype} {segments} tokens{bucket(call.dims['T'], 4096, 32768)}"


op = Op(
    mean_pooling,
    outputs=("total",),
    local_dims={"B", "D"},
    sum_dims={"T"},
    autotune_key=autotune_key,
    config=MeanPoolingConfig,
    cases=(
        _case("small", _padded, "smoke", B=2, T=12, D=32),
        _case("odd", _packed(3), "code", segments=3, B=3, T=37, D=100),
        _case("scattered", _scattered(5), segments=5, B=2, T=150, D=48),
        _case("many_segments", _packed(300), segments=300, B=1, T=700, D=40),
        _case("nothing", _nothing, segments=2, B=2, T=9, D=24),
        _case("long_row", _padded, B=1, T=1100, D=264),
        _case("pool_8k", _padded, "bench", "code", B=32, T=8192, D=4096),
        _case("packed_128k", _packed(64), "bench", "code", segments=64, B=1, T=131072, D=1024),
    ),
    work=work,
)
