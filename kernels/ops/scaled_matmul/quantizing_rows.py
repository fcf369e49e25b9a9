"""Contracts of quantisation of rows alone, in blocks of 128 entries: what grouped products of experts take."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Shaped

from kernels.engines.matmul.activations import ACTIVATIONS
from kernels.framework.backend import Case
from kernels.framework.binding import Call
from kernels.framework.contract import Op
from kernels.framework.work import Work, nbytes
from kernels.ops.gated_mlp import gated_activation
from kernels.ops.scaled_matmul.contract import ScaledMatmulConfig
from kernels.ops.scaled_matmul.formats import quantized

E4M3 = "float8_e4m3fn"


def _check(function: str, name: str, x: jax.Array, activation: str | None = None) -> None:
    """Raises ValueError for rows that do not end with a block, and an unknown activation."""
    if x.shape[-1] % 128 or 0 in x.shape:
        raise ValueError(
            f"{function}: argument {name!r} of shape {x.shape} must have rows of a size that 128 divides; pad them with zeros, "
            "which change no scale"
        )
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"{function}: argument 'activation' = {activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}"
        )


def quantize_rows(x: Float[Array, "M D"]) -> tuple[Shaped[Array, "M D"], Float[Array, "M _"]]:
    """Returns (values, scale) of x in e4m3, as `quantize_scaled` with blocks of (1, 128).

    Raises:
      ValueError: names the argument.
    """
    _check("quantize_rows", "x", x)
    return quantized(x, (1, 128), E4M3, False)


def activate_rows(
    pair: Float[Array, "M 2 F"], *, activation: str = "silu"
) -> tuple[Shaped[Array, "M F"], Float[Array, "M _"]]:
    """Returns `quantize_rows` of activation(gate) * up, rounded to the dtype of `pair` before, which is the two side by side.

    Raises:
      ValueError: names the argument.
    """
    _check("activate_rows", "pair", pair, activation)
    return quantize_rows(gated_activation(pair[:, 0], pair[:, 1], activation=activation))


def activated_row_cotangents(
    pair: Float[Array, "M 2 F"], d: Float[Array, "M F"], *, activation: str = "silu"
) -> tuple[Float[Array, "M 2 F"], Shaped[Array, "M _"], Float[Array, "M _"], Float[Array, "M F"]]:
    """Returns (d_pair, its values [M, 2 F] and scale as of `quantize_rows`, and activation(gate) * up), given d, the cotangent
    of the last.

    Raises:
      ValueError: names the argument.
    """
    _check("activated_row_cotangents", "pair", pair, activation)
    product, pull = jax.vjp(lambda pair: gated_activation(pair[:, 0], pair[:, 1], activation=activation), pair)
    (d_pair,) = pull(d.astype(pair.dtype))
    return d_pair, *quantize_rows(d_pair.reshape(len(d), -1)), product


def work_of_rows(call: Call) -> tuple[Work, Work]:
    size = call.x.size
    return Work(2 * size, nbytes(call.x) + size + size // 32), Work(0, 0)


def work_of_activated(call: Call) -> tuple[Work, Work]:
    size = call.pair.size // 2
    return Work(6 * size, nbytes(call.pair) + size + size // 32), Work(0, 0)


def work_of_row_cotangents(call: Call) -> tuple[Work, Work]:
    size = call.pair.size
    return Work(8 * size, 3 * nbytes(call.pair) + size + size // 32), Work(0, 0)


rows_op = Op(
    quantize_rows,
    outputs=("values", "scale"),
    no_gradient=("x",),
    config=ScaledMatmulConfig,
    cases=(
        Case("few", {"M": 9, "D": 256}, tags=frozenset({"smoke", "code"})),
        Case("tokens", {"M": 32768, "D": 2048}, tags=frozenset({"bench", "code"})),
    ),
    work=work_of_rows,
)

activate_rows_op = Op(
    activate_rows,
    outputs=("values", "scale"),
    no_gradient=("pair",),
    config=ScaledMatmulConfig,
    cases=(
        Case("silu", {"M": 70, "F": 128}, tags=frozenset({"smoke", "code"})),
        Case("gelu_tanh", {"M": 5, "F": 256}, {"activation": "gelu_tanh"}, tags=frozenset({"slow"})),
        Case("qwen3", {"M": 131072, "F": 768}, tags=frozenset({"bench", "code"})),
    ),
    work=work_of_activated,
)

row_cotangents_op = Op(
    activated_row_cotangents,
    outputs=("d_pair", "values", "scale", "product"),
    no_gradient=("pair", "d"),
    same_dtype=("pair", "d"),
    config=ScaledMatmulConfig,
    cases=(
        Case("silu", {"M": 70, "F": 128}, tags=frozenset({"smoke", "code"})),
        Case("gelu", {"M": 5, "F": 256}, {"activation": "gelu"}, tags=frozenset({"slow"})),
        Case("qwen3", {"M": 131072, "F": 768}, tags=frozenset({"bench", "code"})),
    ),
    work=work_of_row_cotangents,
)
