"""The contract of a product with quantised weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from kernels.engines.matmul.formats import FORMATS, dequantized
from kernels.framework.backend import Case
from kernels.framework.binding import Call
from kernels.framework.config import Tunables
from kernels.framework.contract import Op
from kernels.framework.work import Work, nbytes


@dataclass(frozen=True)
class QuantizedMatmulConfig(Tunables):
    """Tunables of the kernels; None leaves the choice to the configuration chain.

    Attributes:
      block_m, block_f: rows of x and columns of the weights of a tile.
      block_d: entries of D of a step (Pallas, and Triton's turned kernel).
      splits: programs that share the D of a tile, each with a partial sum (Triton).
      chunks: parts of D with one scale each that a step multiplies (Triton's kernel for any GPU).
      num_warps, num_stages: warps of a program, and depth of its software pipeline (Triton).
      turned: whether Hopper's tensor cores multiply the weights, transposed, from the registers in which they are unpacked
        (Triton); each of `num_warps` warps then has a multiple of 32 columns, and four more feed them.
      programs: turned programs that a multiprocessor has registers for.
      teams: groups of the warps of a turned program, each with its part of the columns, that wait for nothing of each other;
        None: two where they are faster.
      dense: whether the weights are dequantised once, to be multiplied by XLA.
      dequantize_block_d, dequantize_block_f, dequantize_num_warps: the tile of that kernel, and its warps.
    """

    block_m: int | None = None
    block_f: int | None = None
    block_d: int | None = None
    splits: int | None = None
    chunks: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    turned: bool | None = None
    programs: int | None = None
    teams: int | None = None
    dense: bool | None = None
    dequantize_block_d: int | None = None
    dequantize_block_f: int | None = None
    dequantize_num_warps: int | None = None


def quantized_matmul(
    x: Float[Array, "*lead D"],
    w: Int[Array, "_ F"],
    scales: Shaped[Array, "_ F"],
    biases: Float[Array, "_ F"] | None = None,
    *,
    mode: str = "affine",
    bits: int = 4,
    group_size: int = 64,
) -> Float[Array, "*lead F"]:
    """Returns x times the weights that w [D * bits / 32, F] represents, rounded to x's dtype; accumulated in float32.

    Args:
      w, scales, biases: as returned by `quantize`: scales and biases [D / group_size, F].
    """
    if mode not in FORMATS:
        raise ValueError(f"quantized_matmul: argument 'mode' = {mode!r} is unknown; use one of {', '.join(FORMATS)}")
    weights = dequantized(w, scales, biases, mode=mode, bits=bits, group_size=group_size).astype(x.dtype)
    compute_dtype = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.dot(x, weights, preferred_element_type=compute_dtype).astype(x.dtype)


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of the matmul, the same in both directions; the weights are read in packed form."""
    matmul = 2 * call.x.size * call.dims["F"]
    out = nbytes(call.x) // call.dims["D"] * call.dims["F"]
    moved = nbytes(call.x, call.w, call.scales, call.biases) + out
    return Work(matmul, moved), Work(matmul, moved)


def _words(bits: int) -> Callable:
    def make(rng: np.random.Generator, dims: Any) -> jax.Array:
        return jnp.asarray(rng.integers(0, 2**32, (dims["D"] * bits // 32, dims["F"]), np.uint32))

    return make


def _floats(group_size: int, dtype: Any) -> Callable:
    return lambda rng, dims: jnp.asarray(rng.uniform(0.1, 1, (dims["D"] // group_size, dims["F"])), dtype)


def _exponents(rng: np.random.Generator, dims: Any) -> jax.Array:
    return jnp.asarray(rng.integers(120, 130, (dims["D"] // 32, dims["F"])), jnp.uint8)


def _fp8(rng: np.random.Generator, dims: Any) -> jax.Array:
    """Words of e4m3 codes, none of which is NaN."""
    codes = (
        rng.integers(0, 0x7F, (dims["D"] // 4, 4, dims["F"])) | rng.integers(0, 2, (dims["D"] // 4, 4, dims["F"])) << 7
    )
    return jnp.asarray((codes << np.array([0, 8, 16, 24])[:, None]).sum(1), jnp.uint32)


def _case(
    name: str, mode: str, bits: int, group_size: int, lead: tuple, D: int, F: int, *tags: str, scales: Any = jnp.float32
) -> Case:
    options = {"mode": mode, "bits": bits, "group_size": group_size}
    make = {"w": _fp8 if mode == "mxfp8" else _words(bits)}
    make["scales"] = _exponents if mode.startswith("mx") else _floats(group_size, scales)
    if mode == "affine":
        make["biases"] = lambda rng, dims: jnp.asarray(
            rng.standard_normal((dims["D"] // group_size, dims["F"])), scales
        )
    return Case(name, {"lead": lead, "D": D, "F": F}, options, make=make, tags=frozenset(tags))


op = Op(
    quantized_matmul,
    no_gradient=("scales", "biases"),
    config=QuantizedMatmulConfig,
    local_dims={"lead", "F"},
    weights=("w", "scales", "biases"),
    cases=(
        _case("int4", "affine", 4, 32, (2, 5), 64, 24, "smoke"),
        _case("three_bits", "affine", 3, 24, (7,), 96, 5, "code"),
        _case("nf4", "nf4", 4, 64, (40,), 128, 9),
        _case("mxfp4", "mxfp4", 4, 32, (1, 2, 3), 96, 8),
        # More rows than are multiplied while words are unpacked.
        _case("many_rows", "affine", 4, 64, (260,), 64, 16),
        _case("wide_groups", "affine", 4, 256, (3,), 512, 40),
        _case("mxfp8", "mxfp8", 8, 32, (4,), 64, 7),
        _case("eight_bits", "affine", 8, 64, (4,), 64, 7, "slow"),
        _case("llama_8b_up", "affine", 4, 64, (4096,), 4096, 14336, "bench", "code"),
        _case("llama_8b_decode", "mxfp4", 4, 32, (16,), 4096, 14336, "bench", "code"),
        _case("int4_8192_1", "affine", 4, 64, (1,), 8192, 8192, "bench", scales=jnp.bfloat16),
        _case("int4_8192_16", "affine", 4, 64, (16,), 8192, 8192, "bench", "code", scales=jnp.bfloat16),
        _case("int4_8192_64", "affine", 4, 64, (64,), 8192, 8192, "bench", scales=jnp.bfloat16),
        _case("int4_8192_4096", "affine", 4, 64, (4096,), 8192, 8192, "bench", scales=jnp.bfloat16),
    ),
    work=work,
)
