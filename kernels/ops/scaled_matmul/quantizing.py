"""Contracts of quantisation along both dims of an array: alone, after a norm, after the activation of a gated MLP, and of its
cotangents."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from kernels.engines.matmul.activations import ACTIVATIONS
from kernels.framework.backend import Case
from kernels.framework.binding import Call
from kernels.framework.contract import Op
from kernels.framework.work import Work, nbytes
from kernels.ops.gated_mlp import gated_activation
from kernels.ops.rms_norm import rms_norm
from kernels.ops.scaled_matmul.contract import ScaledMatmulConfig
from kernels.ops.scaled_matmul.formats import DTYPES, quantized

OPERANDS = ("values", "scale", "turned", "turned_scale")


def _check_whole(function: str, name: str, x: jax.Array, matrices: int = 1) -> None:
    if x.shape[0] // matrices % 128 or x.shape[1] % 128:
        each = f", each of {matrices} matrices," if matrices > 1 else ""
        raise ValueError(
            f"{function}: argument {name!r} of shape {x.shape}{each} must have sizes that 128 divides; pad it with zeros, "
            "which change no scale"
        )


def _check_entries(function: str, entries: int | None) -> None:
    if entries not in (128, None):
        raise ValueError(
            f"{function}: argument 'entries' = {entries!r} must be 128, or None for one scale of a whole row"
        )


def quantize_both_ways(
    x: Float[Array, "M D"],
    *,
    rows: int = 1,
    turned_rows: int = 1,
    entries: int | None = 128,
    matrices: int = 1,
    dtype: str = "float8_e4m3fn",
) -> tuple[Shaped[Array, "M D"], Shaped[Array, "_ _"], Shaped[Array, "_ _"], Shaped[Array, "_ _"]]:
    """Returns (values [M, D], scale, turned [D, M], turned_scale): x in blocks of `rows` by `entries`, and x^T in blocks of
    `turned_rows` by `entries`, as `quantize_scaled` returns them. Of `matrices` one below the other each is turned alone.

    Raises:
      ValueError: names the argument.
    """
    name = "quantize_both_ways"
    if dtype not in DTYPES:
        raise ValueError(f"{name}: argument 'dtype' = {dtype!r} is unknown; use {' or '.join(DTYPES)}")
    _check_entries(name, entries)
    M, D = x.shape
    if matrices < 1 or M % matrices:
        raise ValueError(
            f"{name}: argument 'matrices' = {matrices!r} must be at least 1 and divide the rows of 'x', {M}"
        )
    for argument, height, size in (("rows", rows, M // matrices), ("turned_rows", turned_rows, D)):
        if height not in (1, 128) or size % height:
            raise ValueError(f"{name}: argument {argument!r} = {height!r} must be 1, or 128 and divide {size}")
        if entries is None and height != 1:
            raise ValueError(
                f"{name}: argument {argument!r} = {height!r} must be 1 where 'entries' is None: a row's scale is its own"
            )
    _check_whole(name, "x", x, matrices)
    turned = x.reshape(matrices, -1, D).swapaxes(1, 2).reshape(matrices * D, -1)
    straight = quantized(x, (rows, entries or D), dtype, False)
    return *straight, *quantized(turned, (turned_rows, entries or turned.shape[1]), dtype, False)


def work_of_quantisation(call: Call) -> tuple[Work, Work]:
    """Returns the work of both operands: with a scale of whole rows x is read twice."""
    M, D, entries, matrices = call.dims["M"], call.dims["D"], call.entries, call.matrices
    scales = 4 * M * D // (entries or D) // call.rows + 4 * M * D // (entries or M // matrices) // call.turned_rows
    reads = 1 if entries else 2
    return Work(2 * M * D, reads * nbytes(call.x) + 2 * M * D + scales), Work(0, 0)


# -- of a norm ---------------------------------------------------------------------------------------------------------


def rstd_of(x: jax.Array, eps: float) -> jax.Array:
    """Returns 1 / sqrt(mean(x², over D) + eps) of each row, in float32. XLA adds up the squares of a residual stream where it
    adds up the stream."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1) + eps)


def normalize_both_ways(
    x: Float[Array, "M D"], weight: Float[Array, " D"], *, eps: float = 1e-6, entries: int | None = 128
) -> tuple[Shaped[Array, "M D"], Float[Array, "M _"], Shaped[Array, "D M"], Float[Array, "D _"], Float[Array, " M"]]:
    """Returns `quantize_both_ways` of rms_norm(x, weight), rounded to the dtype of x before: its rows and those of its
    transpose in blocks of `entries`; and rstd = 1 / sqrt(mean(x², over D) + eps), float32.

    Raises:
      ValueError: names the argument.
    """
    _check_whole("normalize_both_ways", "x", x)
    _check_entries("normalize_both_ways", entries)
    return *quantize_both_ways(rms_norm(x, weight, eps=eps), entries=entries), rstd_of(x, eps)


def work_of_norm(call: Call) -> tuple[Work, Work]:
    """Returns the work of rstd and of both operands, each of which reads x; with a scale of whole rows it is read once more."""
    (M, D), entries = call.x.shape, call.entries
    scales = 4 * (M * (D // entries) + D * (M // entries) if entries else M + D)
    reads = 2 if entries else 3
    return Work(7 * M * D, reads * nbytes(call.x) + nbytes(call.weight) + 2 * M * D + scales + 4 * M), Work(0, 0)


# -- of a gated MLP ----------------------------------------------------------------------------------------------------


def _check_activation(op: str, name: str) -> None:
    if name not in ACTIVATIONS:
        raise ValueError(f"{op}: argument 'activation' = {name!r} is unknown; use one of {', '.join(ACTIVATIONS)}")


def activate_both_ways(
    gate: Float[Array, "M F"], up: Float[Array, "M F"], *, activation: str = "silu", entries: int | None = 128
) -> tuple[Shaped[Array, "M F"], Float[Array, "M _"], Shaped[Array, "F M"], Float[Array, "F _"]]:
    """Returns `quantize_both_ways` of activation(gate) * up, rounded to the dtype of gate before: its rows and those of its
    transpose in blocks of `entries`.

    Raises:
      ValueError: names the argument.
    """
    _check_whole("activate_both_ways", "gate", gate)
    _check_activation("activate_both_ways", activation)
    _check_entries("activate_both_ways", entries)
    return quantize_both_ways(gated_activation(gate, up, activation=activation), entries=entries)


def activation_cotangents(
    gate: Float[Array, "M F"], up: Float[Array, "M F"], d: Float[Array, "M F"], *, activation: str = "silu",
    entries: int | None = 128,
) -> tuple[
    Shaped[Array, "M F"], Float[Array, "M _"], Shaped[Array, "F M"], Float[Array, "_ _"],
    Shaped[Array, "M F"], Float[Array, "M _"], Shaped[Array, "F M"], Float[Array, "_ _"],
]:  # fmt: skip
    """Returns `quantize_both_ways` of the cotangents of gate and of up, given that of activation(gate) * up: rows in blocks of
    `entries`, and the transpose in blocks of 128 by 128, or with one scale for each of its rows.

    Raises:
      ValueError: names the argument.
    """
    _check_activation("activation_cotangents", activation)
    _check_entries("activation_cotangents", entries)
    _check_whole("activation_cotangents", "gate", gate)
    _, pull = jax.vjp(lambda gate, up: gated_activation(gate, up, activation=activation), gate, up)
    d_gate, d_up = pull(d.astype(gate.dtype))
    how = {"entries": entries, "turned_rows": 128 if entries else 1}
    return *quantize_both_ways(d_gate, **how), *quantize_both_ways(d_up, **how)


def _of_scales(call: Call) -> int:
    """Returns the bytes of the scales of both operands of an array."""
    M, F, entries = call.dims["M"], call.dims["F"], call.entries
    return 4 * (M * (F // entries) + F * (M // entries) if entries else M + F)


def work_of_activation(call: Call) -> tuple[Work, Work]:
    """Returns the work of both operands: with a scale of whole rows the product is written, and read again."""
    size, passes = call.gate.size, 2 if call.entries else 4
    return Work(8 * size, passes * nbytes(call.gate) + 2 * size + _of_scales(call)), Work(0, 0)


def work_of_cotangents(call: Call) -> tuple[Work, Work]:
    size, passes = call.gate.size, 3 if call.entries else 7
    return Work(18 * size, passes * nbytes(call.gate) + 4 * size + 2 * _of_scales(call)), Work(0, 0)


both_ways_op = Op(
    quantize_both_ways,
    outputs=OPERANDS,
    no_gradient=("x",),
    config=ScaledMatmulConfig,
    cases=(
        Case("activation", {"M": 256, "D": 128}, tags=frozenset({"smoke", "code"})),
        Case("cotangent", {"M": 128, "D": 384}, {"turned_rows": 128}, tags=frozenset({"kernels"})),
        Case("matrix", {"M": 256, "D": 256}, {"rows": 128, "turned_rows": 128}),
        Case("wide", {"M": 128, "D": 128}, {"dtype": "float8_e5m2"}),
        Case("experts", {"M": 768, "D": 256}, {"rows": 128, "turned_rows": 128, "matrices": 3}),
        Case("experts_fine", {"M": 512, "D": 128}, {"matrices": 2}, tags=frozenset({"slow"})),
        Case("whole_rows", {"M": 256, "D": 384}, {"entries": None}),
        Case("whole_rows_of_experts", {"M": 512, "D": 256}, {"entries": None, "matrices": 2}, tags=frozenset({"slow"})),
        Case("model_2k", {"M": 32768, "D": 2048}, tags=frozenset({"bench"})),
        Case("mlp_8k", {"M": 32768, "D": 8192}, {"turned_rows": 128}, tags=frozenset({"bench", "code"})),
        Case("mlp_8k_rows", {"M": 32768, "D": 8192}, {"entries": None}, tags=frozenset({"bench", "code"})),
    ),
    work=work_of_quantisation,
)

norm_both_ways_op = Op(
    normalize_both_ways,
    outputs=(*OPERANDS, "rstd"),
    no_gradient=("x", "weight"),
    config=ScaledMatmulConfig,
    cases=(
        Case("small", {"M": 128, "D": 256}, tags=frozenset({"smoke", "code"})),
        Case("eps", {"M": 256, "D": 128}, {"eps": 0.1}, tags=frozenset({"slow"})),
        Case("whole_rows", {"M": 256, "D": 128}, {"entries": None}),
        Case("model_2k", {"M": 32768, "D": 2048}, tags=frozenset({"bench", "code"})),
        Case("model_2k_rows", {"M": 32768, "D": 2048}, {"entries": None}, tags=frozenset({"bench", "code"})),
    ),
    work=work_of_norm,
)

activate_op = Op(
    activate_both_ways,
    outputs=OPERANDS,
    no_gradient=("gate", "up"),
    same_dtype=("gate", "up"),
    config=ScaledMatmulConfig,
    cases=(
        Case("silu", {"M": 128, "F": 256}, tags=frozenset({"smoke", "code"})),
        Case("gelu_tanh", {"M": 256, "F": 128}, {"activation": "gelu_tanh"}, tags=frozenset({"slow"})),
        Case("whole_rows", {"M": 256, "F": 128}, {"entries": None}),
        Case("mlp_8k", {"M": 32768, "F": 8192}, tags=frozenset({"bench", "code"})),
        Case("mlp_8k_rows", {"M": 32768, "F": 8192}, {"entries": None}, tags=frozenset({"bench", "code"})),
    ),
    work=work_of_activation,
)

cotangents_op = Op(
    activation_cotangents,
    outputs=tuple(f"{side}_{name}" for side in ("gate", "up") for name in OPERANDS),
    no_gradient=("gate", "up", "d"),
    same_dtype=("gate", "up", "d"),
    config=ScaledMatmulConfig,
    cases=(
        Case("silu", {"M": 128, "F": 256}, tags=frozenset({"smoke", "code"})),
        Case("gelu", {"M": 256, "F": 128}, {"activation": "gelu"}, tags=frozenset({"slow"})),
        Case("whole_rows", {"M": 256, "F": 128}, {"entries": None}),
        Case("mlp_8k", {"M": 32768, "F": 8192}, tags=frozenset({"bench", "code"})),
        Case("mlp_8k_rows", {"M": 32768, "F": 8192}, {"entries": None}, tags=frozenset({"bench", "code"})),
    ),
    work=work_of_cotangents,
)
