"""The numbers in which rows travel between ranks: those of their own dtype, or 8-bit floats with scales per 128 of a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import kernels
from ejdist.precision import BF16

BLOCK = 128
_E4M3 = "float8_e4m3fn"


@dataclass(frozen=True)
class Rows:
    """The dtypes in which rows travel; None: their own.

    tokens: to the experts. sums: back, in the forward. gradients: of both, in the backward.
    """

    tokens: str | None = None
    sums: str | None = None
    gradients: str | None = None


# Sums of a token's experts are rounded once more where they travel in 8 bits; DeepSeek-V3 (2024, section 3.3) leaves them in
# bfloat16, and gradients in 8 bits are for those who have tried it.
PRECISIONS = {
    BF16: Rows(),
    "fp8": Rows(_E4M3, _E4M3),
    "fp8_tokens": Rows(_E4M3),
    "fp8_both": Rows(_E4M3, _E4M3, _E4M3),
}


def check_precision(what: str, precision: object) -> None:
    """Raises ValueError, where `what` begins the message, for a name that `PRECISIONS` has not."""
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise ValueError(f"{what} = {precision!r} is unknown; use one of {', '.join(PRECISIONS)}")


def bytes_of(width: int, itemsize: int, dtype: str | None) -> int:
    """Returns the bytes of a row that travels in that dtype: its numbers, and a float32 for each 128 of them."""
    return width * itemsize if dtype is None else width + 4 * -(-width // BLOCK)


def arrays_of(dtype: str | None) -> int:
    """Returns how many arrays travel for rows of that dtype."""
    return 1 if dtype is None else 2


def narrowed(x: jax.Array, dtype: str | None) -> list[jax.Array]:
    """Returns the arrays that travel for the rows x [R, D]: the values, and with a dtype of 8 bits the scales [R, blocks]."""
    if dtype is None:
        return [x]
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)))
    values, scales = kernels.quantize_scaled(padded, (1, BLOCK), dtype=dtype)
    # As integers: not every collective knows floats of 8 bits.
    return [jax.lax.bitcast_convert_type(values[:, : x.shape[1]], jnp.int8), scales]


def sent(
    send: Callable[[jax.Array], jax.Array], arrays: list[jax.Array], dtype: str | None, like: jax.Array
) -> jax.Array:
    """Returns the rows of `narrowed`, sent, in the dtype of `like`."""
    values, *scales = map(send, arrays)
    if dtype is None:
        return values
    wide = jax.lax.bitcast_convert_type(values, jnp.dtype(dtype)).astype(jnp.float32)
    spread = jnp.repeat(scales[0], BLOCK, axis=1)[:, : wide.shape[1]]
    return (wide * spread).astype(like.dtype)
