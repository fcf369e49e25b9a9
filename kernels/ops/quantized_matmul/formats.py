"""Formats of quantised weights: how they are packed, and the values they represent."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

# The quantiles of a normal distribution, scaled to [-1, 1], with an exact zero (Dettmers et al., QLoRA, 2023, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# e2m1, by code: the sign is the highest bit (OCP Microscaling Formats, 2023, section 5.3.3).
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
RUN = 32  # values packed together, into as many words as a value has bits


@dataclass(frozen=True)
class Format:
    """The parameters that a mode allows; `exponents`: scales are e8m0 codes, uint8, 2 ** (code - 127)."""

    bits: tuple[int, ...]
    group_sizes: tuple[int, ...]  # empty: any
    default_bits: int
    default_group: int
    exponents: bool = False


FORMATS = {
    "affine": Format(tuple(range(1, 9)), (), 4, 64),
    "nf4": Format((4,), (), 4, 64),
    "mxfp4": Format((4,), (32,), 4, 32, exponents=True),
    "mxfp8": Format((8,), (32,), 8, 32, exponents=True),
}


def _places(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns, for each value of a run, the word that holds its lowest bit, and the position of that bit."""
    return np.divmod(np.arange(RUN) * bits, 32)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs codes [..., D, F] as uint32 [..., D * bits / 32, F].

    32 consecutive codes along D form `bits` words: code i is bits i * bits and following, counted from the lowest bit
    of the first word, so a code can span two words.
    """
    *lead, D, F = codes.shape
    runs = codes.astype(jnp.uint32).reshape(*lead, D // RUN, RUN, F)
    words = [jnp.zeros((*lead, D // RUN, F), jnp.uint32)] * bits
    for i, (word, place) in enumerate(zip(*_places(bits), strict=True)):
        code = runs[..., i, :]
        words[word] = words[word] | (code << np.uint32(place))
        if place + bits > 32:
            words[word + 1] = words[word + 1] | (code >> np.uint32(32 - place))
    return jnp.stack(words, axis=-2).reshape(*lead, D * bits // 32, F)


def unpack(words: jax.Array, bits: int) -> jax.Array:
    """Returns the codes [..., D, F], uint32: the inverse of `pack`."""
    *lead, count, F = words.shape
    runs = words.astype(jnp.uint32).reshape(*lead, count // bits, bits, F)
    word, place = _places(bits)
    codes = runs[..., word, :] >> place.astype(np.uint32)[:, None]
    crosses = (place + bits > 32)[:, None]
    if crosses.any():
        rest = runs[..., np.minimum(word + 1, bits - 1), :] << ((32 - place) % 32).astype(np.uint32)[:, None]
        codes = jnp.where(crosses, codes | rest, codes)
    return (codes & np.uint32(2**bits - 1)).reshape(*lead, count // bits * RUN, F)


def exponents(codes: jax.Array) -> jax.Array:
    """Returns the float32 values of e8m0 codes: 2 ** (code - 127), NaN for 255."""
    powers = jnp.ldexp(jnp.float32(1), codes.astype(jnp.int32) - 127)
    return jnp.where(codes == 255, jnp.nan, powers)


def dequantized(
    words: jax.Array, scales: jax.Array, biases: jax.Array | None, *, mode: str, bits: int, group_size: int
) -> jax.Array:
    """Returns the float32 weights [..., D, F] from packed ones."""
    codes = unpack(words, bits)
    if mode == "affine":
        values = codes.astype(jnp.float32)
    elif mode == "mxfp8":
        values = jax.lax.bitcast_convert_type(codes.astype(jnp.uint8), jnp.float8_e4m3fn).astype(jnp.float32)
    else:
        values = jnp.asarray(NF4 if mode == "nf4" else FP4, jnp.float32)[codes]
    scale = exponents(scales) if FORMATS[mode].exponents else scales.astype(jnp.float32)
    weights = values * jnp.repeat(scale, group_size, axis=-2)
    return weights if biases is None else weights + jnp.repeat(biases.astype(jnp.float32), group_size, axis=-2)


def _above(values: jax.Array, table: tuple[float, ...], ties_up: tuple[bool, ...]) -> jax.Array:
    """Returns the index of the nearest entry of an ascending table for each value; ties go up where `ties_up` is
    set."""
    places = jnp.zeros(values.shape, jnp.uint32)
    for low, high, up in zip(table, table[1:], ties_up, strict=False):
        middle = jnp.float32((low + high) / 2)
        places += (values >= middle if up else values > middle).astype(jnp.uint32)
    return places


def quantized(w: jax.Array, *, mode: str, bits: int, group_size: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns (words, scales, biases) for weights [..., D, F]; biases only if the mode has them."""
    *lead, D, F = w.shape
    groups = w.astype(jnp.float32).reshape(*lead, D // group_size, group_size, F)
    biases = None
    if mode == "affine":
        low, high = groups.min(-2, keepdims=True), groups.max(-2, keepdims=True)
        # Rounded to the stored dtype before the codes are chosen.
        scales = ((high - low) / (2**bits - 1)).astype(w.dtype)
        biases = low.astype(w.dtype)
        scale, bias = scales.astype(jnp.float32), biases.astype(jnp.float32)
        steps = jnp.where(scale > 0, (groups - bias) / jnp.where(scale > 0, scale, 1), 0)
        codes = jnp.clip(jnp.round(steps), 0, 2**bits - 1)
    elif mode == "nf4":
        scales = jnp.max(jnp.abs(groups), -2, keepdims=True).astype(w.dtype)
        scale = scales.astype(jnp.float32)
        codes = _above(groups / jnp.where(scale > 0, scale, 1), NF4, (False,) * 15)
    else:
        # The power of two below the largest magnitude, divided by that of the format's largest element.
        largest = jnp.max(jnp.abs(groups), -2, keepdims=True)
        power = jnp.frexp(largest)[1] - 1 - (2 if mode == "mxfp4" else 8)
        scales = jnp.where(largest > 0, jnp.clip(power + 127, 1, 254), 127)
        # Keeps NaN and infinity as NaN: e2m1 has none, and clipping to the largest element would hide them.
        scales = jnp.where(jnp.isfinite(largest), scales, 255).astype(jnp.uint8)
        values = groups / exponents(scales)
        if mode == "mxfp4":
            ties = tuple(code % 2 == 1 for code in range(7))  # to the even code
            codes = _above(jnp.abs(values), FP4[:8], ties) + jnp.where(jnp.signbit(values), jnp.uint32(8), 0)
        else:
            narrow = jnp.clip(values, -448, 448).astype(jnp.float8_e4m3fn)
            codes = jax.lax.bitcast_convert_type(narrow, jnp.uint8)
    words = pack(codes.reshape(*lead, D, F), bits)
    return words, scales[..., 0, :], None if biases is None else biases[..., 0, :]
