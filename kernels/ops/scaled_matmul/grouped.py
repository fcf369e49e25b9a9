"""The contract of a grouped product of 8-bit floats: each group of rows times its own matrix, as in mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from kernels.framework.backend import Case
from kernels.framework.binding import Call
from kernels.framework.contract import Op
from kernels.framework.segments import searchsorted
from kernels.framework.work import Work, nbytes
from kernels.ops.scaled_matmul.contract import ScaledMatmulConfig, check_result
from kernels.ops.scaled_matmul.formats import spread


def check_scales(a: Any, b: Any, a_scale: Any, b_scale: Any) -> None:
    """Raises ValueError for scales of 8 bits, and those that do not divide what they are of."""
    (M, D), (E, F, _) = a.shape, b.shape
    for name, scale, sizes in (("a_scale", a_scale, (M, D)), ("b_scale", b_scale, (E, F, D))):
        if scale.dtype.itemsize == 1:
            raise ValueError(
                f"scaled_grouped_matmul: argument {name!r} must be floats of 16 bits or more, got {scale.dtype}; "
                "`quantize_scaled` returns float32"
            )
        whole = scale.shape[:-2] == sizes[:-2] and 0 not in scale.shape
        if not whole or any(size % count for size, count in zip(sizes[-2:], scale.shape[-2:], strict=True)):
            raise ValueError(
                f"scaled_grouped_matmul: argument {name!r} of shape {scale.shape} must have a number of rows and of blocks "
                f"that divide those of {name[0]!r}, {sizes}; `quantize_scaled` returns them"
            )


def scaled_grouped_matmul(
    a: Shaped[Array, "M D"],
    b: Shaped[Array, "E F D"],
    a_scale: Float[Array, "M _"],
    b_scale: Float[Array, "E _ _"],
    group_sizes: Int[Array, " E"],
    *,
    dtype: str = "bfloat16",
) -> Float[Array, "M F"]:
    """Returns out in `dtype`: row m of a * a_scale, in group e, times (b[e] * b_scale[e])^T, accumulated in float32.

    Rows of a group are contiguous, group 0 first; rows past the last group give zero, even if they contain NaN.

    Raises:
      ValueError: names the argument.
    """
    check_result("scaled_grouped_matmul", dtype)
    check_scales(a, b, a_scale, b_scale)
    wide = jnp.promote_types(jnp.float32, a_scale.dtype)
    group = searchsorted(jnp.cumsum(group_sizes), jnp.arange(a.shape[0]), side="right")
    inside = group < b.shape[0]
    left = a.astype(wide) * spread(a_scale, a.shape)
    right = b.astype(wide) * jax.vmap(lambda s: spread(s, b.shape[1:]))(b_scale)
    out = jnp.einsum("md,mfd->mf", left, right[jnp.where(inside, group, 0)], precision=jax.lax.Precision.HIGHEST)
    return jnp.where(inside[:, None], out, 0).astype(jnp.dtype(dtype))


def tiles_of(group_sizes: jax.Array, rows: int, block_m: int) -> tuple[jax.Array, int]:
    """Returns (int32 [3 bound + 2]: the matrix, the first row and the end of the rows of each tile of `block_m` rows, how many
    tiles there are, and the end of all groups; bound). A tile has rows of one group."""
    count = group_sizes.shape[0]
    bound = rows // block_m + count
    # Sums and searches by comparing all with all: a pass or two for a GPU, where a scan is a launch for each of its steps.
    upto = jnp.arange(count)[:, None] >= jnp.arange(count)
    ends = jnp.minimum(jnp.sum(jnp.where(upto, group_sizes.astype(jnp.int32), 0), axis=1), rows)
    begins = jnp.pad(ends[:-1], (1, 0))
    tiles = -(-(ends - begins) // block_m)
    after = jnp.sum(jnp.where(upto, tiles, 0), axis=1)
    index = jnp.arange(bound, dtype=jnp.int32)
    matrix = jnp.minimum(jnp.sum(index[:, None] >= after, axis=1), count - 1)
    first = begins[matrix] + (index - (after - tiles)[matrix]) * block_m
    parts = (matrix, first, ends[matrix], after[-1:], ends[-1:])
    return jnp.concatenate([x.astype(jnp.int32) for x in parts]), bound


def work(call: Call) -> tuple[Work, Work]:
    M, D, F = (call.dims[n] for n in "MDF")
    moved = nbytes(call.a, call.b, call.a_scale, call.b_scale) + M * F * jnp.dtype(call.arguments["dtype"]).itemsize
    return Work(2 * M * D * F, moved), Work(0, 0)


def _case(
    name: str, blocks: bool, sizes: tuple[int, ...] | None, *tags: str, dtype: str = "bfloat16", **dims: int
) -> Case:
    """A case with scales of blocks, or of rows. `sizes`: rows of the groups; None: about equal."""

    def scale(*shape: Callable) -> Callable:
        def shaped(d: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct([size(d) for size in shape], jnp.float32)

        def make(rng: np.random.Generator, d: Any) -> jax.Array:
            return jnp.asarray(rng.uniform(0.25, 2, shaped(d).shape), jnp.float32)

        make.shaped = shaped  # pyrefly: ignore[missing-attribute]
        return make

    def sizes_of(rng: np.random.Generator, d: Any) -> jax.Array:
        shares = rng.dirichlet(np.full(d["E"], 8.0))
        return jnp.asarray(rng.multinomial(d["M"], shares) if sizes is None else sizes, jnp.int32)

    def parts(dim: str) -> Callable:
        return lambda d: 1 if d[dim] % 128 else d[dim] // 128

    def one(d: Any) -> int:
        return 1

    make = {
        "a_scale": scale(lambda d: d["M"], parts("D") if blocks else one),
        "b_scale": scale(lambda d: d["E"], parts("F") if blocks else lambda d: d["F"], parts("D") if blocks else one),
        "group_sizes": sizes_of,
    }
    options = {} if dtype == "bfloat16" else {"dtype": dtype}
    return Case(name, dims, options, make=make, tags=frozenset(tags), wide=("a_scale", "b_scale"))


grouped_op = Op(
    scaled_grouped_matmul,
    weights=("b",),
    config=ScaledMatmulConfig,
    cases=(
        _case("blocks", True, (9, 0, 20), "smoke", M=32, D=256, F=128, E=3),
        _case("rows", False, (5, 11, 0), dtype="float32", M=16, D=128, F=256, E=3),
        _case("qwen3_down", True, None, "bench", "code", M=65536, D=768, F=2048, E=128),
        _case("qwen3_up", True, None, "bench", M=131072, D=2048, F=768, E=128),
        _case("mixtral_up", True, None, "bench", M=32768, D=4096, F=14336, E=8),
        _case("mixtral_up_rows", False, None, "bench", "code", M=32768, D=4096, F=14336, E=8),
    ),
    work=work,
)
