"""The contract of a grouped matmul: each group of rows times its own matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from kernels.framework.backend import Case
from kernels.framework.binding import Call
from kernels.framework.config import Tunables
from kernels.framework.contract import Op
from kernels.framework.measured import bucket
from kernels.framework.segments import searchsorted
from kernels.framework.work import Work, nbytes


@dataclass(frozen=True)
class Tile(Tunables):
    """The tile of a product that a program computes at a time; None leaves the choice to the configuration chain.

    Attributes:
      block_m, block_n, block_k: rows and columns of the result, and entries of the contracted dim per step.
      num_warps, num_stages, programs: Triton: warps of a program, depth of its pipeline, and number of persistent
        programs.
      band: Triton: number of rows of tiles that sweep the columns together, so that what they read of a matrix stays in
        L2.
      flatten: Triton: whether the loops over tiles and over steps are fused, so that a tile's loads overlap the
        previous tile.
      specialised: Triton: "tall" or "wide", the tile of a warp-specialized kernel with separate warps for loads,
        products and stores, which replaces this tile in products of 16-bit arrays on Hopper; "none": no such kernel.
    """

    block_m: int | None = None
    block_n: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    programs: int | None = None
    band: int | None = None
    flatten: bool | None = None
    specialised: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.specialised not in ("tall", "wide", "none", None):
            raise ValueError(f"Tile: specialised must be 'tall', 'wide', 'none' or None, got {self.specialised!r}")


@dataclass(frozen=True)
class GroupedMatmulConfig(Tunables):
    """Tiles of the three products: the result, the gradient of the rows, and that of the matrices."""

    forward: Tile | None = None
    d_lhs: Tile | None = None
    d_rhs: Tile | None = None


_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}
ACTIVATIONS = tuple(_ACTIVATIONS)


def activated(activation: str | None, gated: bool) -> Callable[[jax.Array], jax.Array]:
    """Returns the function that maps products [rows, F], or [rows, 2, F] if gated, to the rows of the result [rows, F].

    Raises:
      ValueError: the activation is unknown, or missing for a gate.
    """
    if activation is None and gated:
        raise ValueError(
            "grouped_matmul: argument 'rhs' has a gate and an up projection, which requires argument 'activation': "
            f"use one of {', '.join(ACTIVATIONS)}"
        )
    if activation is not None and activation not in _ACTIVATIONS:
        raise ValueError(
            f"grouped_matmul: argument 'activation' = {activation!r} is unknown; use None or one of {', '.join(ACTIVATIONS)}"
            + ("; SwiGLU is 'silu' with rhs [E, D, 2, F]" if "swiglu" in str(activation).lower() else "")
        )
    act = (lambda x: x) if activation is None else _ACTIVATIONS[activation]
    return (lambda x: act(x[:, 0]) * x[:, 1]) if gated else act


def grouped_matmul(
    lhs: Float[Array, "M D"],
    rhs: Float[Array, "E D ... F"] | None,
    rhs_transposed: Float[Array, "E ... F D"] | None,
    group_sizes: Int[Array, " G"],
    group_offset: Int[Array, ""] | None = None,
    rhs_bias: Float[Array, "E ... F"] | None = None,
    *,
    activation: str | None = None,
) -> Float[Array, "M F"]:
    """Returns out, in lhs's dtype: row m of lhs, in group g, times rhs[g - group_offset], accumulated in float32.

    Rows of a group are contiguous, group 0 first, group_sizes[g] rows each. A row of a group without a matrix in rhs,
    or past the last group, gives zero, even if it contains NaN.

    Args:
      rhs, rhs_transposed: exactly one of them. With three dims, a matrix per group; with four, [E, D, 2, F] or [E, 2,
        F, D], a gate and an up projection: the result is activation(lhs gate) * (lhs up).
      rhs_bias: added to the products, before the activation.
    """
    if (rhs is None) == (rhs_transposed is None):
        raise ValueError("grouped_matmul: pass exactly one of the arguments 'rhs' and 'rhs_transposed'")
    if rhs is None:
        assert rhs_transposed is not None
        rhs = jnp.moveaxis(rhs_transposed, -1, 1)
    ends, rows = jnp.cumsum(group_sizes), jnp.arange(lhs.shape[0])
    group = searchsorted(ends, rows, side="right")
    local_group = group - (0 if group_offset is None else group_offset)
    inside = (local_group >= 0) & (local_group < rhs.shape[0]) & (group < group_sizes.shape[0])
    local_group = jnp.where(inside, local_group, 0)
    compute_dtype = jnp.promote_types(lhs.dtype, jnp.float32)
    product = jnp.einsum("md,md...f->m...f", lhs, rhs[local_group], preferred_element_type=compute_dtype)
    if rhs_bias is not None:
        product = product + rhs_bias[local_group].astype(compute_dtype)
    out = activated(activation, rhs.ndim == 4)(product)
    return jnp.where(inside[:, None], out, 0).astype(lhs.dtype)


def grouped_matmul_quantized(
    lhs: Float[Array, "M D"],
    rhs: Shaped[Array, "E D ... F"] | None,
    rhs_transposed: Shaped[Array, "E ... F D"] | None,
    group_sizes: Int[Array, " G"],
    rhs_scale: Float[Array, "E _ ... F"],
    group_offset: Int[Array, ""] | None = None,
    rhs_bias: Float[Array, "E ... F"] | None = None,
    *,
    activation: str | None = None,
) -> Float[Array, "M F"]:
    """Returns `grouped_matmul` of the matrices rhs * rhs_scale, rounded to lhs's dtype; rhs has integers or narrow
    floats.

    Neither rhs nor rhs_scale has a gradient. A backend may apply the scales of columns after the sums, and round once
    less.

    Args:
      rhs_scale: [E, blocks, F], or [E, blocks, 2, F]: each scale is for D / blocks consecutive entries of D. The layout
        is the same with `rhs_transposed`.
    """
    if (rhs is None) == (rhs_transposed is None):
        raise ValueError("grouped_matmul_quantized: pass exactly one of the arguments 'rhs' and 'rhs_transposed'")
    if rhs is None:
        assert rhs_transposed is not None
        rhs = jnp.moveaxis(rhs_transposed, -1, 1)
    compute_dtype = jnp.promote_types(lhs.dtype, jnp.float32)
    scale = jnp.repeat(rhs_scale.astype(compute_dtype), rhs.shape[1] // rhs_scale.shape[1], axis=1)
    return grouped_matmul(
        lhs,
        (rhs.astype(compute_dtype) * scale).astype(lhs.dtype),
        None,
        group_sizes,
        group_offset,
        rhs_bias,
        activation=activation,
    )


def grouped_matmul_gathered(
    lhs: Float[Array, "tokens D"],
    rhs: Float[Array, "E D ... F"] | None,
    rhs_transposed: Float[Array, "E ... F D"] | None,
    group_sizes: Int[Array, " G"],
    rows: Int[Array, " M"],
    slots: Int[Array, "tokens C"],
    group_offset: Int[Array, ""] | None = None,
    rhs_bias: Float[Array, "E ... F"] | None = None,
    *,
    activation: str | None = None,
) -> Float[Array, "M F"]:
    """Returns `grouped_matmul` of the rows lhs[rows], with zeros for a negative index, which need not be in memory.

    Args:
      rows: the row of lhs of each row of the result.
      slots: where each row of lhs is used: every m with rows[m] = t is once in slots[t], beside -1 for none. The gradient of
        lhs is summed over C in that order, without a scatter.
    """
    gathered = jnp.where((rows >= 0)[:, None], lhs[jnp.maximum(rows, 0)], 0)
    return grouped_matmul(gathered, rhs, rhs_transposed, group_sizes, group_offset, rhs_bias, activation=activation)


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of M rows, all of them in groups; the backward recomputes what the activation needs."""
    weights = call.rhs if call.rhs_transposed is None else call.rhs_transposed
    E, D, F = (call.dims[n] for n in "EDF")
    matmul = 2 * call.dims["M"] * math.prod(weights.shape) // E
    out = nbytes(call.lhs) // call.lhs.shape[0] // D * F * call.dims["M"]
    quantised = "rhs_scale" in call.arguments
    indices = nbytes(call.rows, call.slots) if "rows" in call.arguments else 0
    read_bytes = indices + nbytes(call.lhs, weights, call.rhs_bias, call.rhs_scale if quantised else None)
    again = 1 if call.activation else 0
    written = nbytes(call.lhs, call.rhs_bias) + (0 if quantised else nbytes(weights))
    return Work(matmul, read_bytes + out), Work((1 + again + (not quantised)) * matmul, read_bytes + out + written)


def autotune_key(call: Call) -> str:
    """Returns the measurement key of a call: what is fused with the product, the layout of the matrices, and rows per
    group."""
    weights = call.rhs if call.rhs_transposed is None else call.rhs_transposed
    used = ["plain" if weights.ndim == 3 else "gated", "" if call.rhs_transposed is None else "transposed"]
    used += [call.activation or "", "" if call.rhs_bias is None else "bias"]
    rows = bucket(call.dims["M"] // max(call.dims["G"], 1), 32, 256, 2048)
    return " ".join([call.dtype, *filter(None, used), f"rows{rows}"])


def fixed(*sizes: int) -> Callable:
    return lambda rng, dims: jnp.asarray(sizes, jnp.int32)


def _offset(value: int) -> Callable:
    return lambda rng, dims: jnp.asarray(value, jnp.int32)


def even(rng: np.random.Generator, dims: Any) -> jax.Array:
    """Sizes as from a slightly uneven router."""
    shares = rng.dirichlet(np.full(dims.get("G", dims["E"]), 8.0))
    return jnp.asarray(rng.multinomial(dims["M"], shares), jnp.int32)


def _zipf(rng: np.random.Generator, dims: Any) -> jax.Array:
    """Sizes by Zipf's law, as from an unbalanced router, with large ones anywhere."""
    shares = rng.permutation(1 / np.arange(1, dims["G"] + 1))
    return jnp.asarray(rng.multinomial(dims["M"], shares / shares.sum()), jnp.int32)


def _codes(*names: str | int) -> Callable:
    """Returns a maker of int8 weights with those dims; a number is a size. A layer has 2e8 of them."""

    def shaped(dims: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct([dims[n] if isinstance(n, str) else n for n in names], jnp.int8)

    def make(rng: np.random.Generator, dims: Any) -> jax.Array:
        return jnp.asarray(rng.integers(-127, 128, shaped(dims).shape, np.int8))

    make.shaped = shaped  # pyrefly: ignore[missing-attribute]
    return make


def _picked(which: int) -> Callable:
    """Returns a maker of the rows of tokens, C each in any order, some of none; or of where each token's rows are."""

    def make(rng: np.random.Generator, dims: Any) -> jax.Array:
        M, tokens, C = (dims[n] for n in ("M", "tokens", "C"))
        pairs = np.full(M, -1)
        pairs[: min(M, tokens * C)] = np.random.default_rng([M, tokens, C]).permutation(tokens * C)[:M]
        pairs[2::9] = -1
        slots = np.full(tokens * C, -1)
        slots[pairs[pairs >= 0]] = np.flatnonzero(pairs >= 0)
        return jnp.asarray(np.where(pairs < 0, -1, pairs // C) if which == 0 else slots.reshape(tokens, C), jnp.int32)

    make.shaped = lambda dims: jax.ShapeDtypeStruct(  # pyrefly: ignore[missing-attribute]
        (dims["M"],) if which == 0 else (dims["tokens"], dims["C"]), jnp.int32
    )
    return make


def _none(rng: Any, dims: Any) -> None:
    return None


def _case(name, sizes, *tags, arrays=(), make=None, shapes=None, activation=None, **dims) -> Case:
    options = {} if activation is None else {"activation": activation}
    sizes_of = fixed(*sizes) if isinstance(sizes, tuple) else sizes
    make = {"rhs_transposed": _none, "group_sizes": sizes_of, **(make or {})}
    return Case(name, dims, options, arrays, make, shapes or {}, frozenset(tags))


_LAYER = {"D": 2048, "E": 128, "G": 128, "F": 768}  # Qwen3-30B-A3B
_LITE = {"D": 2048, "E": 64, "G": 64, "F": 1408}  # DeepSeek-V2-Lite
_MIXTRAL = {"D": 4096, "E": 8, "G": 8, "F": 14336}  # Mixtral 8x7B

op = Op(
    grouped_matmul,
    local_dims={"F"},
    sum_dims={"E"},
    see_also={"M": "grouped_matmul", "D": "grouped_matmul"},
    offset_of={"group_offset": "E"},
    weights=("rhs", "rhs_transposed", "rhs_bias"),
    same_dtype=("lhs", "rhs", "rhs_transposed", "rhs_bias"),
    autotune_key=autotune_key,
    config=GroupedMatmulConfig,
    cases=(
        _case("small", (5, 0, 2, 4), "smoke", "code", M=11, D=8, E=4, G=4, F=6),
        _case(
            "offset_gated", (3, 9, 0, 7, 4), arrays=("rhs_bias",), activation="silu", make={"group_offset": _offset(1)},
            shapes={"rhs": (3, 5, 2, 7), "rhs_bias": (3, 2, 7)}, M=29, D=5, E=3, G=5, F=7,
        ),
        _case(
            "transposed", (0, 41, 5), arrays=("rhs_transposed", "rhs_bias"), activation="gelu",
            make={"rhs": _none, "rhs_transposed": lambda rng, dims: jnp.asarray(rng.standard_normal((3, 9, 12)), jnp.float32)},
            M=50, D=12, E=3, G=3, F=9,
        ),
        _case("long_groups", (150, 1, 0, 49), "slow", M=200, D=16, E=4, G=4, F=8),
        _case(
            "qwen3_gate_up", even, "bench", "code", activation="silu", shapes={"rhs": (128, 2048, 2, 768)}, M=65536, **_LAYER,
        ),
        _case("qwen3_down", even, "bench", "code", M=65536, D=768, E=128, G=128, F=2048),
        _case("qwen3_up", even, "bench", M=131072, **_LAYER),
        _case("qwen3_up_zipf", _zipf, "bench", M=131072, **_LAYER),
        _case("deepseek_lite_up", even, "bench", M=65536, **_LITE),
        _case("deepseek_lite_up_zipf", _zipf, "bench", M=65536, **_LITE),
        _case("mixtral_up", even, "bench", M=32768, **_MIXTRAL),
        _case("mixtral_up_zipf", _zipf, "bench", M=32768, **_MIXTRAL),
    ),
    work=work,
)  # fmt: skip

quantized_op = Op(
    grouped_matmul_quantized,
    no_gradient=("rhs", "rhs_transposed", "rhs_scale"),
    local_dims={"F"},
    sum_dims={"E"},
    see_also={"M": "grouped_matmul", "D": "grouped_matmul"},
    offset_of={"group_offset": "E"},
    weights=("rhs", "rhs_transposed", "rhs_scale", "rhs_bias"),
    same_dtype=("lhs", "rhs_bias"),
    config=GroupedMatmulConfig,
    cases=(
        _case(
            "int8", (5, 0, 2, 4), "smoke", make={"rhs": _codes("E", "D", "F")}, shapes={"rhs_scale": (4, 2, 6)},
            M=11, D=8, E=4, G=4, F=6,
        ),
        _case(
            "gated_transposed", (3, 9, 0, 7), arrays=("rhs_bias",), activation="relu",
            make={
                "rhs": _none, "rhs_transposed": _codes("E", 2, "F", "D"), "group_offset": _offset(1),
                # of realistic size, so that products of a gate and an up projection fit in float16
                "rhs_scale": lambda rng, dims: jnp.asarray(rng.uniform(0.5, 2, (3, 1, 2, 7)) / 127, jnp.float32),
            },
            shapes={"rhs_bias": (3, 2, 7)}, M=23, D=5, E=3, G=4, F=7,
        ),
        _case(
            "qwen3_int8", even, "bench", "code", make={"rhs": _codes("E", "D", "F")}, shapes={"rhs_scale": (128, 1, 768)},
            M=65536, **_LAYER,
        ),
    ),
    work=work,
)  # fmt: skip

_PICKED = {"rows": _picked(0), "slots": _picked(1)}

gathered_op = Op(
    grouped_matmul_gathered,
    local_dims={"F"},
    sum_dims={"E"},
    see_also={"M": "moe", "tokens": "moe", "D": "moe"},
    offset_of={"group_offset": "E"},
    weights=("rhs", "rhs_transposed", "rhs_bias"),
    same_dtype=("lhs", "rhs", "rhs_transposed", "rhs_bias"),
    config=GroupedMatmulConfig,
    cases=(
        _case("gathered", (5, 0, 2, 4), "smoke", "code", make=_PICKED, M=13, D=8, E=4, G=4, F=6, tokens=7, C=2),
        _case(
            "gathered_gated", (3, 9, 0, 7), arrays=("rhs_bias",), activation="silu",
            make={**_PICKED, "group_offset": _offset(1)}, shapes={"rhs": (3, 5, 2, 7), "rhs_bias": (3, 2, 7)},
            M=23, D=5, E=3, G=4, F=7, tokens=9, C=3,
        ),
        _case(
            "gathered_transposed", (0, 21, 5), arrays=("rhs_transposed",), activation="relu",
            make={
                **_PICKED, "rhs": _none,
                "rhs_transposed": lambda rng, dims: jnp.asarray(rng.standard_normal((3, 9, 12)), jnp.float32),
            },
            M=30, D=12, E=3, G=3, F=9, tokens=20, C=2,
        ),
        _case(
            "qwen3_gate_up", even, "bench", "code", activation="silu", shapes={"rhs": (128, 2048, 2, 768)}, make=_PICKED,
            M=131072, tokens=16384, C=8, **_LAYER,
        ),
    ),
    work=work,
)  # fmt: skip
