"""The meaning of rotary position embedding, of one array or of queries and keys at once, and of its scalings."""

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

_BANDS = {"yarn": (1.0, 32.0), "llama3": (1.0, 4.0)}  # rotations between which a frequency is a mixture


@dataclass(frozen=True)
class RotaryConfig(Tunables):
    """Tunables of the kernels; None leaves the choice to the configuration chain.

    Attributes:
      block_tokens: tokens that a program turns; they share the sines of a token among its heads.
      block_heads: heads of x, or of the queries, that a program turns (Triton).
      num_warps: of a program (Triton).
    """

    block_tokens: int | None = None
    block_heads: int | None = None
    num_warps: int | None = None


def _check_types(what: str, given: Any) -> None:
    """Raises ValueError for a field that is not of its declared type, or is NaN."""
    for name, kind in typing.get_type_hints(type(given)).items():
        if not fits(value := getattr(given, name), kind):
            raise ValueError(f"{what} {name} must be {declared(kind)}, got {value!r}")


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of RoPE are changed for longer contexts than those of pre-training.

    Attributes:
      kind: "linear" (positions divided by factor), "ntk" (base raised, so that the lowest frequency is divided by it),
        "yarn" (Peng et al. 2023) or "llama3" (Llama 3.1).
      factor: how many times longer the context is.
      original_length: tokens of the pre-training context (yarn, llama3).
      low, high: yarn: beta_slow and beta_fast, in rotations over the original context; llama3: low and high frequency
        factors. None: 1 and 32 for yarn, 1 and 4 for llama3.
      attention_factor: yarn: what cos and sin are multiplied by; None for 0.1 ln(factor) + 1.
      truncate: yarn: the ends of the ramp are whole pairs, as in its authors' code; False in GPT-OSS.

    Raises:
      ValueError: naming the field and what it may be.
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
            raise ValueError(f"scaling low, high and attention_factor belong to yarn and llama3, not to {self.kind}")
        if self.kind == "llama3" and self.attention_factor is not None:
            raise ValueError("scaling attention_factor belongs to yarn, not to llama3")
        if self.kind != "yarn" and not self.truncate:
            raise ValueError(f"scaling truncate=False belongs to yarn, not to {self.kind}")
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
    """The factors by which XPos lets the product of a query and a key fall with their distance (Sun et al. 2022, eq. 10).

    Pair i of a query at position p is multiplied by zeta_i^((p - center) / scale_base), with
    zeta_i = (2i / rotary_dim + gamma) / (1 + gamma), and that of a key is divided by it, so that their product has
    zeta_i^(distance / scale_base). Both take the same values, except `inverse`.

    Attributes:
      inverse: False for queries, which are multiplied; True for keys, which are divided.
      scale_base: positions over which pair i falls by zeta_i once.
      gamma: of zeta; 0.4 in the paper.
      center: the position whose factor is 1. The product does not depend on it. A factor leaves the range of float32 about
        70 scale_base from it (for float16 results 8), so it wants to be in the middle, or scale_base larger.

    Raises:
      ValueError: naming the field and what it may be.
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
        """Returns the factors that give at -p what these give at p."""
        return replace(self, inverse=not self.inverse, center=-self.center)

    def other(self) -> XPos:
        """Returns the factors of keys beside these of queries, or of queries beside these of keys."""
        return replace(self, inverse=not self.inverse)

    def exponent(self, width: int) -> np.ndarray:
        """Returns, for each of width/2 pairs, the logarithm of the factor for each position, float64."""
        zeta = (np.arange(0, width, 2, dtype=np.float64) / width + self.gamma) / (1 + self.gamma)
        return np.log(zeta) / self.scale_base * (-1 if self.inverse else 1)


def frequencies(width: int, base: float, scaling: RopeScaling | None) -> tuple[np.ndarray, float]:
    """Returns (angle per position of each of width/2 pairs, float64; the factor of cos and sin)."""
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
                "rotary_embedding: argument 'scaling' of kind 'ntk' changes the base, on which the frequency of the only pair "
                "of 'rotary_dim' = 2 does not depend; use linear"
            )
        return (base * s ** (width / (width - 2))) ** -exponent, 1.0
    if scaling.kind == "llama3":
        rotations = L * plain / (2 * math.pi)
        low, high = scaling.band
        smooth = np.clip((rotations - low) / (high - low), 0, 1)
        return plain / s * (1 - smooth) + plain * smooth, 1.0

    if base <= 1:
        raise ValueError(
            f"rotary_embedding: argument 'base' must be above 1 for 'scaling' of kind 'yarn', got {base}: pairs are ranked by "
            "how often they turn"
        )

    # YaRN: pairs that turn often over the original context stay, those that do not turn once are interpolated.
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
) -> Float[Array, "B T N H"]:
    """Returns x with each pair of its first `rotary_dim` entries turned by position * frequency, and scaled as `xpos` says.

    A pair is (i, i + rotary_dim/2), or (2i, 2i + 1) if `interleaved`. Angles are float32: bfloat16 rounds 257 to 256.

    Raises:
      ValueError: `rotary_dim` is odd, or more than there is.
    """
    width = turned_width(x.shape[-1], rotary_dim)
    angle_per_position, factor = frequencies(width, base, scaling)
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    angle = positions.astype(accumulate)[:, :, None, None] * jnp.asarray(angle_per_position, accumulate)
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    if xpos is not None:
        distance = (positions.astype(accumulate) - xpos.center)[:, :, None, None]
        scale = jnp.exp(distance * jnp.asarray(xpos.exponent(width), accumulate))
        cos, sin = cos * scale, sin * scale
    turned, rest = x[..., :width].astype(accumulate), x[..., width:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turned.shape)
    else:
        a, b = jnp.split(turned, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


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
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """Returns (x, key), queries and keys, each turned as `rotary_embedding` turns it. `xpos` is that of the
    queries; keys take its `other`.

    Raises:
      ValueError: `rotary_dim` is odd, or more than there is.
    """
    same = {"base": base, "scaling": scaling, "interleaved": interleaved, "rotary_dim": rotary_dim}
    of_key = None if xpos is None else xpos.other()
    return rotary_embedding(x, positions, **same, xpos=xpos), rotary_embedding(key, positions, **same, xpos=of_key)


def turned_width(H: int, rotary_dim: int | None) -> int:
    """Returns how many entries of a head turn. Raises ValueError where that is odd, or more than there are."""
    width = H if rotary_dim is None else rotary_dim
    if width % 2 or not 2 <= width <= H:
        raise ValueError(
            f"rotary_embedding: argument 'rotary_dim' = {width} must be even and at most H = {H}; "
            "entries turn in pairs, so give the even number of them that should turn"
        )
    return width


def _positions(rng, dims):
    return jnp.asarray(rng.integers(0, 5000, (dims["B"], dims["T"])), jnp.int32)


def _one_row(rng, dims):
    return jnp.arange(dims["T"], dtype=jnp.int32)[None] * 1001


def _case(name: str, options: dict | None = None, *tags: str, **dims: int) -> Case:
    dims, make = {"B": 2, "T": 7, "N": 3, "H": 16, **dims}, {"positions": _positions}
    return Case(name, dims, options or {}, make=make, tags=frozenset(tags))


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of both directions, which are the same turn: 6 operations a pair, each array read once and written
    once. Sines are not counted, they are shared by all heads."""
    arrays = [call.arguments[name] for name in ("x", "key") if name in call.arguments]
    width = call.dims["H"] if call.rotary_dim is None else call.rotary_dim
    flops = sum(3 * x.size // call.dims["H"] * width for x in arrays)
    each = Work(flops, 2 * nbytes(*arrays) + nbytes(call.positions))
    return each, each


_XPOS_KEY = {"xpos": XPos(True, 1024.0, 0.5, 2000.0), "interleaved": True}

op = Op(
    rotary_embedding,
    local_dims={"B", "T", "N"},
    config=RotaryConfig,
    cases=(
        _case("plain", {}, "smoke"),
        _case("base", {"base": 5e5}),
        _case("interleaved", {"interleaved": True}),
        _case("partial", {"rotary_dim": 8}, "code"),
        _case("linear", {"scaling": RopeScaling("linear", 4.0)}),
        _case("ntk", {"scaling": RopeScaling("ntk", 4.0)}),
        _case("yarn", {"scaling": RopeScaling("yarn", 4.0, 1024), "base": 1e6}),
        _case(
            "yarn_all",
            {"scaling": RopeScaling("yarn", 8.0, 256, 2.0, 16.0, 1.5), "rotary_dim": 12, "interleaved": True},
        ),
        _case("llama3", {"scaling": RopeScaling("llama3", 8.0, 8192), "base": 5e5}),
        _case("xpos", {"xpos": XPos(center=2500.0), "rotary_dim": 8}),
        _case("xpos_key", _XPOS_KEY, "slow"),
        Case("shared_positions", {"B": 3, "T": 5, "N": 2, "H": 8}, make={"positions": _one_row}),
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
        _case("all", {"rotary_dim": 12, "xpos": XPos(center=2500.0), "base": 5e5}, N=6, K=3),
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
