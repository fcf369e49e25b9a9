"""The contract of a grouped matmul with matrices that are packed in a few bits a number, as `quantize` packs them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from kernels.engines.matmul.formats import dequantized
from kernels.framework.backend import Case
from kernels.framework.binding import Call
from kernels.framework.config import Tunables
from kernels.framework.contract import Op
from kernels.framework.work import Work, nbytes
from kernels.ops.grouped_matmul.contract import even, fixed, grouped_matmul


@dataclass(frozen=True)
class QuantizedGroupedMatmulConfig(Tunables):
    """Tunables of the kernels; None leaves the choice to the configuration chain.

    Attributes:
      block_m, block_f: rows of x and columns of a matrix of a tile.
      block_d: entries of D of a step, where they are unpacked one by one; else a step has those of a scale.
      num_warps, num_stages: warps of a program, and depth of its software pipeline.
      dense: whether all matrices are unpacked once, for `grouped_matmul`.
    """

    block_m: int | None = None
    block_f: int | None = None
    block_d: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    dense: bool | None = None


def quantized_grouped_matmul(
    x: Float[Array, "M D"],
    w: Int[Array, "E _ F"],
    scales: Shaped[Array, "E _ F"],
    biases: Float[Array, "E _ F"] | None,
    group_sizes: Int[Array, " E"],
    *,
    mode: str = "affine",
    bits: int = 4,
    group_size: int = 64,
) -> Float[Array, "M F"]:
    """Returns `grouped_matmul` of the matrices that w [E, D * bits / 32, F] represents, rounded to x's dtype.

    Rows of a group are contiguous, group 0 first; rows past the last group give zero, even if they contain NaN.

    Args:
      w, scales, biases: as returned by `quantize` of [E, D, F]: scales and biases [E, D / group_size, F].
    """
    weights = dequantized(w, scales, biases, mode=mode, bits=bits, group_size=group_size).astype(x.dtype)
    return grouped_matmul(x, weights, None, group_sizes)


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of M rows, all of them in groups, the same in both directions; matrices are read packed."""
    M, D, F = (call.dims[n] for n in "MDF")
    moved = nbytes(call.x, call.w, call.scales, call.biases) + M * F * call.x.dtype.itemsize
    return Work(2 * M * D * F, moved), Work(2 * M * D * F, moved)


def _maker(shape_of: Callable, dtype: Any, draw: Callable) -> Callable:
    """Returns a maker of an array of that shape, a function of dims; a layer's words are 2e8 bytes."""

    def shaped(dims: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape_of(dims), dtype)

    def make(rng: np.random.Generator, dims: Any) -> jax.Array:
        return jnp.asarray(draw(rng, shape_of(dims)), dtype)

    make.shaped = shaped  # pyrefly: ignore[missing-attribute]
    return make


def _case(
    name: str,
    mode: str,
    bits: int,
    group_size: int,
    sizes: Callable,
    *tags: str,
    scales: Any = jnp.float32,
    **dims: int,
) -> Case:
    def rows_of(entries: Callable) -> Callable:
        return lambda d: (d["E"], entries(d["D"]), d["F"])

    words, groups = rows_of(lambda D: D * bits // 32), rows_of(lambda D: D // group_size)
    # Of e4m3 the codes without a second highest bit: none is NaN, and none is large.
    mask = 0xBFBFBFBF if mode == "mxfp8" else 0xFFFFFFFF
    make = {
        "w": _maker(words, jnp.uint32, lambda rng, shape: rng.integers(0, 2**32, shape, np.uint32) & np.uint32(mask))
    }
    if mode.startswith("mx"):
        make["scales"] = _maker(groups, jnp.uint8, lambda rng, shape: rng.integers(120, 130, shape, np.uint8))
    else:
        make["scales"] = _maker(groups, scales, lambda rng, shape: rng.uniform(0.1, 1, shape).astype(np.float32))
    make["biases"] = lambda rng, d: None
    if mode == "affine":
        make["biases"] = _maker(groups, scales, lambda rng, shape: rng.standard_normal(shape, np.float32))
    options = {"mode": mode, "bits": bits, "group_size": group_size}
    return Case(name, dims, options, make={**make, "group_sizes": sizes}, tags=frozenset(tags))


_GATE_UP = {"D": 2048, "E": 128, "F": 1536}  # Qwen3-30B-A3B: a gate and an up projection of 768 columns side by side
_DOWN = {"D": 768, "E": 128, "F": 2048}

packed_op = Op(
    quantized_grouped_matmul,
    no_gradient=("scales", "biases"),
    config=QuantizedGroupedMatmulConfig,
    priority=("triton_packed", "composed", "pallas_packed", "xla"),
    local_dims={"F"},
    see_also={"M": "moe", "D": "moe", "E": "moe"},
    weights=("w", "scales", "biases"),
    cases=(
        _case("int4", "affine", 4, 32, fixed(5, 0, 2, 4), "smoke", "code", M=13, D=64, E=4, F=24),
        _case("three_bits", "affine", 3, 24, fixed(0, 7, 1), "code", M=8, D=96, E=3, F=5),
        _case("nf4", "nf4", 4, 64, fixed(0, 40, 0, 1), M=50, D=128, E=4, F=9),
        _case("mxfp4", "mxfp4", 4, 32, fixed(2, 3), M=5, D=96, E=2, F=8),
        _case("mxfp8", "mxfp8", 8, 32, fixed(4, 0, 1), M=6, D=64, E=3, F=7),
        # More rows than are multiplied while words are unpacked.
        _case("many_rows", "affine", 4, 64, fixed(30, 50), M=90, D=64, E=2, F=16),
        _case("qwen3_decode_gate_up", "affine", 4, 64, even, "bench", "code", scales=jnp.bfloat16, M=512, **_GATE_UP),
        _case("qwen3_decode_down", "affine", 4, 64, even, "bench", scales=jnp.bfloat16, M=512, **_DOWN),
        _case("qwen3_decode_mxfp4", "mxfp4", 4, 32, even, "bench", M=512, **_GATE_UP),
        _case("qwen3_prefill_gate_up", "affine", 4, 64, even, "bench", scales=jnp.bfloat16, M=32768, **_GATE_UP),
    ),
    work=work,
)  # fmt: skip


def unpacked_bytes(call: Call) -> int:
    """Returns the bytes of all matrices in x's dtype."""
    return math.prod(call.dims[n] for n in "EDF") * call.x.dtype.itemsize
