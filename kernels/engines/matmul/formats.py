"""Formats of quantised weights: how they are packed, the values they represent, and checks of the arguments of operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.framework.binding import is_array, is_float_array

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


# -- checks of arguments ------------------------------------------------------------------------------------------------


def of_mode(function: str, mode: Any, bits: Any = None) -> Format:
    """Returns the format of a mode, after checking `bits` if given."""
    if mode not in FORMATS:
        raise ValueError(f"{function}: argument 'mode' = {mode!r} is unknown; use one of {', '.join(FORMATS)}")
    form = FORMATS[mode]
    if bits is not None and (bits not in form.bits or isinstance(bits, bool)):
        some = " or ".join(map(str, form.bits))
        raise ValueError(f"{function}: argument 'bits' = {bits!r} is not valid for mode {mode!r}; use {some}")
    return form


def checked_format(function: str, mode: Any, bits: Any, group_size: Any, D: int) -> Format:
    """Returns the format of a mode, after checking its bits and group size."""

    def refuse(argument: str, what: str) -> ValueError:
        return ValueError(f"{function}: argument {argument!r} {what}")

    form = of_mode(function, mode, bits)
    if not isinstance(group_size, int) or group_size < 1 or (form.group_sizes and group_size not in form.group_sizes):
        some = " or ".join(map(str, form.group_sizes)) or "a positive integer"
        raise refuse("group_size", f"= {group_size!r} is not valid for mode {mode!r}; use {some}")
    if D % group_size or D % RUN:  # runs of codes are packed as a whole
        raise refuse("group_size", f"= {group_size} must divide D = {D}, and so must {RUN}")
    return form


def integer(value: Any) -> Any:
    return value.item() if isinstance(value, np.integer) else value


def check_packed(function: str, w: Any, scales: Any) -> None:
    """Raises ValueError for arrays that are not packed as by `quantize`."""
    for name, x in (("w", w), ("scales", scales)):
        if not is_array(x) or x.ndim < 2 or 0 in x.shape[-2:]:
            got = f"{x.dtype} of shape {x.shape}" if is_array(x) else type(x).__name__
            raise ValueError(f"{function}: argument {name!r} must be an array returned by `quantize`, got {got}")
    if w.dtype != jnp.uint32:
        raise ValueError(f"{function}: argument 'w' must be packed uint32 from `quantize`, got {w.dtype}")
    if scales.shape[:-2] != w.shape[:-2] or scales.shape[-1] != w.shape[-1]:
        raise ValueError(f"{function}: argument 'scales' of shape {scales.shape} does not fit 'w' of shape {w.shape}")


def widths(function: str, D: int, w: Any, scales: Any, bits: Any, group_size: Any) -> tuple[int, int]:
    """Returns (bits, group_size), inferred from the shapes; explicit values must agree."""
    checks = {"bits": (32 * w.shape[-2], D, bits, "w"), "group_size": (D, scales.shape[-2], group_size, "scales")}
    result = []
    for name, (a, b, passed, argument) in checks.items():
        if a % b or (passed is not None and passed != a // b):
            of = "" if passed is None else f" with {name} = {passed}"
            x = w if argument == "w" else scales
            raise ValueError(f"{function}: argument {argument!r} of shape {x.shape} does not fit D = {D}{of}")
        result.append(a // b)
    return result[0], result[1]


def offsets(function: str, scales: Any, biases: Any, zeros: Any, mode: str) -> Any:
    """Returns the biases, computed from zeros if these are given, after checking them against the mode."""
    if biases is not None and zeros is not None:
        raise ValueError(f"{function}: arguments 'biases' and 'zeros' are equivalent (bias = -scale * zero); pass one")
    if (mode == "affine") != (biases is not None or zeros is not None):
        what = "needs 'biases', or 'zeros'" if mode == "affine" else "has neither 'biases' nor 'zeros'"
        raise ValueError(f"{function}: argument 'biases': mode {mode!r} {what}")
    name, offsets = ("zeros", zeros) if biases is None else ("biases", biases)
    if offsets is not None and (not is_array(offsets) or offsets.shape != scales.shape):
        raise ValueError(f"{function}: argument {name!r} must have the shape of 'scales', {scales.shape}")
    expected = "uint8" if FORMATS[mode].exponents else "float"
    if (scales.dtype == jnp.uint8) != FORMATS[mode].exponents or (expected == "float" and not is_float_array(scales)):
        raise ValueError(f"{function}: argument 'scales' of mode {mode!r} must be {expected}, got {scales.dtype}")
    if zeros is None:
        return biases
    # In float32, like the products with codes: rounded to the dtype of scales, the code for zero would not give 0.
    return -scales.astype(jnp.float32) * zeros.astype(jnp.float32)


def packing(
    function: str, D: int, w: Any, scales: Any, biases: Any, *, zeros: Any, mode: str, bits: Any, group_size: Any
) -> tuple[dict[str, Any], Any]:
    """Returns (mode, bits and group_size by name; the biases) of weights [..., D, F] that are packed as by `quantize`.

    Raises:
      ValueError: names the argument of `function`.
    """
    if mode not in FORMATS:
        checked_format(function, mode, bits, group_size, D)
    check_packed(function, w, scales)
    bits, group_size = widths(function, D, w, scales, bits, group_size)
    checked_format(function, mode, bits, group_size, D)
    return {"mode": mode, "bits": bits, "group_size": group_size}, offsets(function, scales, biases, zeros, mode)
