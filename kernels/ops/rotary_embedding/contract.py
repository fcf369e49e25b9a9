"""The contracts of rotary position embedding, of one array or of queries and keys at once, and its scalings."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels.framework.backend import Case
from kernels.framework.binding import Call
from kernels.framework.config import Tunables
from kernels.framework.contract import Op
from kernels.framework.options import declared, fits
from kernels.framework.work import Work, nbytes
from kernels.ops.rotary_embedding.angles import EXACT_FROM, angles

_BANDS = {"yarn": (1.0, 32.0), "llama3": (1.0, 4.0)}  # numbers of rotations between which frequencies are interpolated


@dataclass(frozen=True)
class RotaryConfig(Tunables):
    """Tunables of the kernels; None leaves the choice to the configuration chain.

    Attributes:
      block_tokens: tokens per program; the heads of a token share its sines.
      block_heads: heads of x, or of the queries, per program (Triton).
      num_warps: warps of a program (Triton).
    """

    block_tokens: int | None = None
    block_heads: int | None = None
    num_warps: int | None = None


def _check_types(what: str, source: Any) -> None:
    """Raises ValueError for a field that does not have its declared type, or is NaN."""
    for name, kind in typing.get_type_hints(type(source)).items():
        if not fits(value := getattr(source, name), kind):
            raise ValueError(f"{what} {name} must be {declared(kind)}, got {value!r}")


@dataclass(frozen=True)
class RopeScaling:
    """A change of RoPE's frequencies for contexts longer than in pre-training.

    Attributes:
      kind: "linear" (positions divided by factor), "ntk" (base raised, so that the lowest frequency is divided by
        factor), "yarn" (Peng et al. 2023) or "llama3" (Llama 3.1).
      factor: ratio of the new context length to the original one.
      original_length: tokens of the pre-training context (yarn, llama3).
      low, high: yarn: beta_slow and beta_fast, in rotations over the original context; llama3: low and high frequency
        factors. None: 1 and 32 for yarn, 1 and 4 for llama3.
      attention_factor: yarn: factor of cos and sin; None for 0.1 ln(factor) + 1.
      truncate: yarn: whether the ends of the ramp are rounded to whole pairs, as in its authors' code; False in
        GPT-OSS.

    Raises:
      ValueError: names the field and its valid values.
    """

    kind: str
    factor: float
    original_length: int = 8192
    low: float | None = None
    high: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_types("scaling", self)
        if self.kind not in ("linear", "ntk", "yarn", "llama3"):
            raise ValueError(f"scaling kind {self.kind!r} is unknown; use linear, ntk, yarn or llama3")
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"scaling factor must be at least 1, got {self.factor}")
        if self.original_length < 1:
            raise ValueError(
                f"scaling original_length must be the tokens of the pre-training context, got {self.original_length}"
            )
        if self.kind in ("linear", "ntk") and not self.low is self.high is self.attention_factor is None:
            raise ValueError(f"scaling low, high and attention_factor apply to yarn and llama3, not to {self.kind}")
        if self.kind == "llama3" and self.attention_factor is not None:
            raise ValueError("scaling attention_factor applies to yarn, not to llama3")
        if self.kind != "yarn" and not self.truncate:
            raise ValueError(f"scaling truncate=False applies to yarn, not to {self.kind}")
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            raise ValueError(f"scaling attention_factor must be positive, got {self.attention_factor}")
        if self.kind in _BANDS and not 0 < self.band[0] < self.band[1] < math.inf:
            raise ValueError(f"scaling low must be positive and below high, got {self.band}")

    @property
    def band(self) -> tuple[float, float]:
        """(low, high), with the defaults of the kind."""
        low, high = _BANDS[self.kind]
        return (low if self.low is None else self.low), (high if self.high is None else self.high)


@dataclass(frozen=True)
class XPos:
    """XPos factors, by which the product of a query and a key decays with their distance (Sun et al. 2022, eq. 10).

    Pair i of a query at position p is multiplied by zeta_i^((p - center) / scale_base), with
    zeta_i = (2i / rotary_dim + gamma) / (1 + gamma). That of a key is divided by it, so that their product has the
    factor zeta_i^(distance / scale_base). Queries and keys use the same values, except for `inverse`.

    Attributes:
      inverse: False for queries, which are multiplied; True for keys, which are divided.
      scale_base: number of positions over which pair i decays by zeta_i.
      gamma: parameter of zeta; 0.4 in the paper.
      center: the position with factor 1. The product does not depend on it. A factor leaves the range of float32 about
        70 scale_base away from it (8 for float16 results), so choose the middle of the sequence, or a larger
        scale_base.

    Raises:
      ValueError: names the field and its valid values.
    """

    inverse: bool = False
    scale_base: float = 512.0
    gamma: float = 0.4
    center: float = 0.0

    def __post_init__(self) -> None:
        _check_types("xpos", self)
        if not self.scale_base > 0:
            raise ValueError(f"xpos scale_base must be positive, in positions, got {self.scale_base}")
        if not self.gamma > 0:
            raise ValueError(f"xpos gamma must be positive, got {self.gamma}; at 0 the first pair would vanish")

    def reversed(self) -> XPos:
        """Returns the factors with positions negated."""
        return replace(self, inverse=not self.inverse, center=-self.center)

    def other(self) -> XPos:
        """Returns the factors of keys that match these of queries, or vice versa."""
        return replace(self, inverse=not self.inverse)

    def exponent(self, width: int) -> np.ndarray:
        """Returns, for each of width/2 pairs, the logarithm of the factor per position, float64."""
        zeta = (np.arange(0, width, 2, dtype=np.float64) / width + self.gamma) / (1 + self.gamma)
        return np.log(zeta) / self.scale_base * (-1 if self.inverse else 1)


def frequencies(width: int, base: float, scaling: RopeScaling | None) -> tuple[np.ndarray, float]:
    """Returns (angle per position for each of width/2 pairs, float64; the factor of cos and sin)."""
    exponent = np.arange(0, width, 2, dtype=np.float64) / width
    plain = base**-exponent
    if scaling is None:
        return plain, 1.0
    s, L = scaling.factor, scaling.original_length
    if scaling.kind == "linear":
        return plain / s, 1.0
    if scaling.kind == "ntk":
        if width == 2:
            raise ValueError(
                "rotary_embedding: argument 'scaling' of kind 'ntk' changes the base, but with 'rotary_dim' = 2 the "
                "only frequency does not depend on it; use linear"
            )
        return (base * s ** (width / (width - 2))) ** -exponent, 1.0
    if scaling.kind == "llama3":
        rotations = L * plain / (2 * math.pi)
        low, high = scaling.band
        smooth = np.clip((rotations - low) / (high - low), 0, 1)
        return plain / s * (1 - smooth) + plain * smooth, 1.0

    if base <= 1:
        raise ValueError(f"rotary_embedding: argument 'base' must be above 1 for 'scaling' of kind 'yarn', got {base}")

    # YaRN: keeps pairs with many rotations over the original context, and interpolates those with less than one.
    def pair_of(rotations: float) -> float:
        return width * math.log(L / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = scaling.band
    first, last = pair_of(high), pair_of(low)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp = np.clip((np.arange(width // 2) - first) / max(last - first, 1e-3), 0, 1)
    factor = scaling.attention_factor
    factor = (0.1 * math.log(s) + 1 if s > 1 else 1.0) if factor is None else factor
    return plain / s * ramp + plain * (1 - ramp), factor


def rotary_embedding(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "#B T"],
    *,
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    xpos: XPos | None = None,
    exact_from: int | None = EXACT_FROM,
) -> Float[Array, "B T N H"]:
    """Returns x with each pair of its first `rotary_dim` entries rotated by position * frequency, and scaled by `xpos`.

    A pair is (i, i + rotary_dim/2), or (2i, 2i + 1) if `interleaved`. Angles are float32, because bfloat16 rounds 257
    to 256; at positions of at least `exact_from` in size they are exact, see `exact_angle`.

    Raises:
      ValueError: `rotary_dim` is odd, or larger than a head.
    """
    width = rotated_width(x.shape[-1], rotary_dim)
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    cos, sin, scale = turning(positions, width, base, scaling, xpos, exact_from, accumulate)
    return turned(x, cos * scale, sin * scale, width, interleaved)


def rotary_embedding_pair(
    x: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    positions: Int[Array, "#B T"],
    *,
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    xpos: XPos | None = None,
    exact_from: int | None = EXACT_FROM,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """Returns (x, key), queries and keys, both rotated as by `rotary_embedding`. `xpos` applies to the queries; keys
    use its `other`.

    Raises:
      ValueError: `rotary_dim` is odd, or larger than a head.
    """
    same = {"base": base, "scaling": scaling, "interleaved": interleaved, "rotary_dim": rotary_dim}
    same["exact_from"] = exact_from
    of_key = None if xpos is None else xpos.other()
    return rotary_embedding(x, positions, **same, xpos=xpos), rotary_embedding(key, positions, **same, xpos=of_key)


def turning(
    positions: Array,
    width: int,
    base: float,
    scaling: RopeScaling | None,
    xpos: XPos | None,
    exact_from: int | None,
    dtype: Any,
) -> tuple[Array, Array, Array | float]:
    """Returns (cos, sin, the factor of XPos) of the pairs at each position, [B, T, 1, width/2]."""
    frequency, factor = frequencies(width, base, scaling)
    at = positions[:, :, None, None]
    angle = angles(at, frequency, exact_from, dtype)
    scale = (
        1.0 if xpos is None else jnp.exp((at.astype(dtype) - xpos.center) * jnp.asarray(xpos.exponent(width), dtype))
    )
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor, scale


def turned(x: Array, cos: Array, sin: Array, width: int, interleaved: bool) -> Array:
    """Returns x [B, T, N, H] with the pairs of its first `width` entries multiplied by cos + i sin, in their dtype."""
    pairs, rest = x[..., :width].astype(cos.dtype), x[..., width:]
    if interleaved:
        a, b = pairs[..., 0::2], pairs[..., 1::2]
        pairs = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(pairs.shape)
    else:
        a, b = jnp.split(pairs, 2, axis=-1)
        pairs = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([pairs.astype(x.dtype), rest], axis=-1)


def rotated_width(H: int, rotary_dim: int | None) -> int:
    """Returns the number of entries of a head that are rotated. Raises ValueError if it is odd or larger than a
    head."""
    width = H if rotary_dim is None else rotary_dim
    if width % 2 or not 2 <= width <= H:
        raise ValueError(
            f"rotary_embedding: argument 'rotary_dim' = {width} must be even and at most H = {H}, because entries are "
            "rotated in pairs"
        )
    return width


def _positions(rng, dims):
    return jnp.asarray(rng.integers(0, 5000, (dims["B"], dims["T"])), jnp.int32)


def _one_row(rng, dims):
    return jnp.arange(dims["T"], dtype=jnp.int32)[None] * 1001


def _far(rng, dims):
    """Positions of any size on both sides of where angles become exact."""
    return jnp.asarray(rng.integers(2**8, 2**31, (dims["B"], dims["T"])) >> rng.integers(0, 23, dims["T"]), jnp.int32)


def _case(name: str, options: dict | None = None, *tags: str, **dims: int) -> Case:
    dims, make = {"B": 2, "T": 7, "N": 3, "H": 16, **dims}, {"positions": _positions}
    return Case(name, dims, options or {}, make=make, tags=frozenset(tags))


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of both directions, which are the same rotation: 6 operations per pair, each array read and
    written once. Sines are not counted, because all heads share them."""
    arrays = [call.arguments[name] for name in ("x", "key") if name in call.arguments]
    width = call.dims["H"] if call.rotary_dim is None else call.rotary_dim
    flops = sum(3 * x.size // call.dims["H"] * width for x in arrays)
    each = Work(flops, 2 * nbytes(*arrays) + nbytes(call.positions))
    return each, each


KERNELS = frozenset({"kernels"})
_XPOS_KEY = {"xpos": XPos(True, 1024.0, 0.5, 2000.0), "interleaved": True}

op = Op(
    rotary_embedding,
    local_dims={"B", "T", "N"},
    config=RotaryConfig,
    cases=(
        # Frequencies that are scaled reach kernels as numbers: those have one kind of scaling.
        _case("plain", {}, "smoke", "kernels"),
        _case("base", {"base": 5e5, "exact_from": None}, "kernels"),
        Case("far", {"B": 2, "T": 24, "N": 2, "H": 16}, {"base": 5e5}, make={"positions": _far}, tags=KERNELS),
        _case("exact", {"exact_from": 0, "rotary_dim": 8, "scaling": RopeScaling("yarn", 4.0, 1024)}, "slow"),
        _case("interleaved", {"interleaved": True}, "kernels"),
        _case("partial", {"rotary_dim": 8}, "code", "kernels"),
        _case("linear", {"scaling": RopeScaling("linear", 4.0)}),
        _case("ntk", {"scaling": RopeScaling("ntk", 4.0)}),
        _case("yarn", {"scaling": RopeScaling("yarn", 4.0, 1024), "base": 1e6}),
        _case(
            "yarn_all",
            {"scaling": RopeScaling("yarn", 8.0, 256, 2.0, 16.0, 1.5), "rotary_dim": 12, "interleaved": True},
            "kernels",
        ),
        _case("llama3", {"scaling": RopeScaling("llama3", 8.0, 8192), "base": 5e5}),
        _case("xpos", {"xpos": XPos(center=2500.0), "rotary_dim": 8}, "kernels"),
        _case("xpos_key", _XPOS_KEY, "slow"),
        Case("shared_positions", {"B": 3, "T": 5, "N": 2, "H": 8}, make={"positions": _one_row}, tags=KERNELS),
        _case("llama_8b", {}, "bench", "code", B=1, T=131072, N=32, H=128),
    ),
    work=work,
)

pair_op = Op(
    rotary_embedding_pair,
    outputs=("query", "key"),
    local_dims={"B", "T", "N", "K"},
    tied_dims=(("N", "K"),),
    same_dtype=("x", "key"),
    config=RotaryConfig,
    cases=(
        _case("plain", {}, "smoke", K=1),
        _case("all", {"rotary_dim": 12, "xpos": XPos(center=2500.0), "base": 5e5, "exact_from": 0}, N=6, K=3),
        _case(
            "interleaved",
            {"interleaved": True, "scaling": RopeScaling("yarn", 4.0, 1024)},
            "code",
            T=3,
            N=10,
            K=2,
            H=64,
        ),
        Case(
            "shared_positions",
            {"B": 3, "T": 5, "N": 2, "K": 2, "H": 8},
            make={"positions": _one_row},
            tags=frozenset({"slow"}),
        ),
        _case("llama_8b", {}, "bench", "code", B=1, T=32768, N=32, K=8, H=128),
    ),
    work=work,
)
