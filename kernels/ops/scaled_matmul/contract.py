"""The contract of a product of 8-bit floats with scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from kernels.framework.backend import Case
from kernels.framework.binding import Call
from kernels.framework.config import Tunables
from kernels.framework.contract import Op
from kernels.framework.work import Work, nbytes
from kernels.ops.scaled_matmul.formats import SCALINGS, spread

RESULTS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ScaledMatmulConfig(Tunables):
    """The tile of the result that a program computes at a time; None leaves the choice to the configuration chain.

    Attributes:
      block_m, block_n: its rows and columns; at most 128 where it is not specialized for Hopper.
      num_stages: Triton: blocks of D that are loaded ahead; at most 3 where it is not.
      num_buffers: Triton: parts of 64 columns of its result that a warpgroup of Hopper can leave to the warp that stores them.
      num_warps: Triton: warps of a program, where it is not specialized for Hopper; at least 8 for a tile of 128 by 128.
      band: Triton: number of rows of tiles that sweep the columns together, so that what they read stays in the L2 cache.
    """

    block_m: int | None = None
    block_n: int | None = None
    num_stages: int | None = None
    num_buffers: int | None = None
    num_warps: int | None = None
    band: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("block_m", "block_n", "num_warps"):
            size = getattr(self, name)
            if size is not None and size & (size - 1):
                raise ValueError(
                    f"argument 'cfg': ScaledMatmulConfig.{name} = {size} is not a power of 2; use one, or None"
                )


def check_result(function: str, dtype: Any) -> None:
    """Raises ValueError for a dtype of the result that there is not."""
    if not isinstance(dtype, str) or dtype not in RESULTS:
        raise ValueError(
            f"{function}: argument 'dtype' = {dtype!r} is unknown; use one of the strings {', '.join(map(repr, RESULTS))}"
        )


def scaled_matmul(
    a: Shaped[Array, "M D"],
    b: Shaped[Array, "F D"],
    a_scale: Shaped[Array, "#M _"],
    b_scale: Shaped[Array, "_ _"],
    *,
    dtype: str = "bfloat16",
    fast_accumulation: bool = False,
) -> Float[Array, "M F"]:
    """Returns (a * a_scale) (b * b_scale)^T in `dtype`, accumulated in float32.

    Args:
      a, b: both with the contracted dim last, as tensor cores read 8-bit operands.
      a_scale: [M, blocks] or [1, blocks], each for D / blocks consecutive entries of D of a row, or of all rows. Floats, or
        powers of two, uint8 codes 2 ** (code - 127).
      b_scale: [rows, blocks], each for F / rows consecutive rows.
      fast_accumulation: a backend may leave the sums of entries with the same scales to its tensor cores, whose own sums of
        8-bit products can be narrower than float32.

    Raises:
      ValueError: names the argument.
    """
    check_result("scaled_matmul", dtype)
    for name, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        if scale.dtype != jnp.uint8 and scale.dtype.itemsize == 1:
            raise ValueError(
                f"scaled_matmul: argument {name!r} must be floats of 16 bits or more, or uint8 codes of powers of two, got "
                f"{scale.dtype}"
            )
    out_dtype = jnp.dtype(dtype)
    wide = jnp.promote_types(jnp.float32, a_scale.dtype if a_scale.dtype != jnp.uint8 else jnp.float32)
    left = a.astype(wide) * spread(a_scale, a.shape)
    right = b.astype(wide) * spread(b_scale, b.shape)
    return jnp.einsum("md,fd->mf", left, right, precision=jax.lax.Precision.HIGHEST).astype(out_dtype)


def work(call: Call) -> tuple[Work, Work]:
    M, D, F = (call.dims[n] for n in "MDF")
    moved = nbytes(call.a, call.b, call.a_scale, call.b_scale) + M * F * jnp.dtype(call.arguments["dtype"]).itemsize
    return Work(2 * M * D * F, moved), Work(0, 0)


def _scales(rows: Callable, blocks: Callable, exponents: bool = False) -> Callable:
    def shaped(dims: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows(dims), blocks(dims)), jnp.uint8 if exponents else jnp.float32)

    def make(rng: np.random.Generator, dims: Any) -> jax.Array:
        shape = shaped(dims).shape
        if exponents:
            return jnp.asarray(rng.integers(122, 132, shape), jnp.uint8)
        return jnp.asarray(rng.uniform(0.25, 2, shape), jnp.float32)

    make.shaped = shaped  # pyrefly: ignore[missing-attribute]
    return make


def _case(name: str, scaling: str, M: int, D: int, F: int, *tags: str, b: tuple | None = None, **options: Any) -> Case:
    """A case of a scaling; `b`: rows and entries that share a scale of b, if they are not the scaling's."""
    how = SCALINGS[scaling]

    def of(dim: str, block: tuple[int | None, int | None]) -> Callable:
        return _scales(
            lambda dims: dims[dim] // (block[0] or dims[dim]),
            lambda dims: dims["D"] // (block[1] or dims["D"]),
            how.exponents,
        )

    make = {"a_scale": of("M", how.a), "b_scale": of("F", b or how.b)}
    dims, wide = {"M": M, "D": D, "F": F}, ("a_scale", "b_scale")
    return Case(name, dims, options, make=make, tags=frozenset(tags), wide=wide)


op = Op(
    scaled_matmul,
    local_dims={"M"},
    config=ScaledMatmulConfig,
    cases=(
        _case("row", "row", 24, 64, 40, "smoke", "code"),
        _case("tensor", "tensor", 7, 48, 5, dtype="float32", fast_accumulation=True),
        _case("block", "block", 40, 256, 128),
        _case("block_of_rows", "block", 24, 256, 72, b=(1, 128), dtype="float16"),
        _case("mx", "mx", 9, 96, 16),
        _case("row_8192", "row", 8192, 8192, 8192, "bench", "code"),
        _case("row_8192_fast", "row", 8192, 8192, 8192, "bench", "code", fast_accumulation=True),
        _case("block_8192", "block", 8192, 8192, 8192, "bench", "code"),
        _case("block_of_rows_8192", "block", 8192, 8192, 8192, "bench", b=(1, 128)),
        _case("qwen3_8b_up", "block", 8192, 4096, 12288, "bench"),
    ),
    work=work,
)
