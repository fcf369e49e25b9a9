"""The meaning of rotary position embedding, and of its scalings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels._core.contract import Case, Op


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of RoPE are changed for longer contexts than those of pre-training.

    Attributes:
      kind: "linear" (positions divided by factor), "ntk" (base raised so that the lowest frequency is divided by factor),
        "yarn" (Peng et al. 2023) or "llama3" (Llama 3.1).
      factor: how many times longer the context is.
      original_length: tokens of the pre-training context (yarn, llama3).
      low, high: yarn: beta_slow and beta_fast, in rotations over the original context (1, 32); llama3: low and high
        frequency factors (1, 4).
      attention_factor: yarn: what cos and sin are multiplied by; None for 0.1 ln(factor) + 1.
    """

    kind: str
    factor: float
    original_length: int = 8192
    low: float = 1.0
    high: float = 0.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "ntk", "yarn", "llama3"):
            raise ValueError(f"scaling kind {self.kind!r} is unknown; use linear, ntk, yarn or llama3")
        if self.factor < 1:
            raise ValueError(f"scaling factor must be at least 1, got {self.factor}")


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
        return (base * s ** (width / (width - 2))) ** -exponent, 1.0
    if scaling.kind == "llama3":
        rotations = L * plain / (2 * math.pi)
        low, high = scaling.low, scaling.high or 4.0
        smooth = np.clip((rotations - low) / (high - low), 0, 1)
        return plain / s * (1 - smooth) + plain * smooth, 1.0

    # YaRN: pairs that turn often over the original context stay, those that do not turn once are interpolated.
    def pair_of(rotations: float) -> float:
        return width * math.log(L / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair_of(scaling.high or 32.0)), 0)
    last = min(math.ceil(pair_of(scaling.low)), width - 1)
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
) -> Float[Array, "B T N H"]:
    """Returns x with each pair of its first `rotary_dim` entries turned by position * frequency.

    A pair is (i, i + rotary_dim/2), or (2i, 2i + 1) if `interleaved`. Angles are in float32: bfloat16 rounds 257 to 256.
    """
    width = x.shape[-1] if rotary_dim is None else rotary_dim
    angle_per_position, factor = frequencies(width, base, scaling)
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    angle = positions.astype(accumulate)[:, :, None, None] * jnp.asarray(angle_per_position, accumulate)
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    turned, rest = x[..., :width].astype(accumulate), x[..., width:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turned.shape)
    else:
        a, b = jnp.split(turned, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def _positions(rng, dims):
    return jnp.asarray(rng.integers(0, 5000, (dims["B"], dims["T"])), jnp.int32)


def _case(name: str, options: dict | None = None, tags: frozenset = frozenset(), **dims: int) -> Case:
    return Case(
        name, {"B": 2, "T": 7, "N": 3, "H": 16, **dims}, options or {}, make={"positions": _positions}, tags=tags
    )


op = Op(
    rotary_embedding,
    local_dims={"B", "T", "N"},
    order=("triton_gpu", "pallas_tpu", "xla"),
    cases=(
        _case("plain", tags=frozenset({"smoke"})),
        _case("base", {"base": 5e5}),
        _case("interleaved", {"interleaved": True}),
        _case("partial", {"rotary_dim": 8}),
        _case("linear", {"scaling": RopeScaling("linear", 4.0)}),
        _case("ntk", {"scaling": RopeScaling("ntk", 4.0)}),
        _case("yarn", {"scaling": RopeScaling("yarn", 4.0, 1024), "base": 1e6}),
        _case("llama3", {"scaling": RopeScaling("llama3", 8.0, 8192), "base": 5e5}),
        _case("llama_8b", B=1, T=131072, N=32, H=128, tags=frozenset({"bench"})),
    ),
)
