"""The sections of a model's recurrent mixers: their sizes, which recipes give."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


def _check(section: str, shape: Any, positive: tuple[str, ...]) -> bool:
    """Returns whether the section is given. Raises ValueError, naming the key, for a size that is not positive."""
    if shape == type(shape)():
        return False
    for name in positive:
        if getattr(shape, name) < 1:
            raise ValueError(f"model.{section}.{name} must be positive, got {getattr(shape, name)}")
    return True


def _check_multiple(section: str, shape: Any, several: str, each: str) -> None:
    many, few = getattr(shape, several), getattr(shape, each)
    if many % few:
        raise ValueError(
            f"model.{section}.{several} = {many} must be a multiple of model.{section}.{each} = {few}, which share them evenly"
        )


@dataclass(unsafe_hash=True)
class GatedDeltaShape:
    """Gated DeltaNet (Qwen3-Next): an associative memory a head, of which a token replaces what its key stands for."""

    num_key_heads: int = 0  # heads of queries and of keys; 0: no such layers
    num_value_heads: int = 0  # heads of values, a multiple of num_key_heads: the states of a layer
    key_dim: int = 128  # width of a head of queries and keys
    value_dim: int = 128  # width of a head of values
    conv_width: int = 4  # tokens that the convolution of queries, keys and values sees, its own too

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy; without such layers all keys must keep their defaults."""
        if _check("gated_delta", self, ("num_key_heads", "num_value_heads", "key_dim", "value_dim", "conv_width")):
            _check_multiple("gated_delta", self, "num_value_heads", "num_key_heads")


@dataclass(unsafe_hash=True)
class KdaShape:
    """Kimi Delta Attention (Kimi Linear): a delta rule as Gated DeltaNet has it, with a decay for each channel of a key."""

    num_heads: int = 0  # heads of queries, keys and values, each with a state; 0: no such layers
    key_dim: int = 128  # width of a head of queries and keys, and how many decays it has
    value_dim: int = 128  # width of a head of values
    conv_width: int = 4  # tokens that the convolution of queries, keys and values sees, its own too
    rank: int = 128  # width of the two vectors of a token that decays and gate come from
    gate_bias: bool = False  # a bias of the gate, as flash-linear-attention's layer has it; Kimi Linear has none

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy; without such layers all keys must keep their defaults."""
        _check("kda", self, ("num_heads", "key_dim", "value_dim", "conv_width", "rank"))


@dataclass(unsafe_hash=True)
class Mamba2Shape:
    """Mamba-2: a state space with one decay a head, whose inputs and outputs the token chooses."""

    num_heads: int = 0  # heads, each with a state; 0: no such layers
    head_dim: int = 64  # width of a head
    state_dim: int = 128  # width of what a head's channels are written with and read by, B and C
    num_groups: int = 1  # groups of heads: those of a group share B, C and the norm of the output
    conv_width: int = 4  # tokens that the convolution of the inputs, B and C sees, its own too

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy; without such layers all keys must keep their defaults."""
        if _check("mamba2", self, ("num_heads", "head_dim", "state_dim", "num_groups", "conv_width")):
            _check_multiple("mamba2", self, "num_heads", "num_groups")


@dataclass(unsafe_hash=True)
class LightningShape:
    """Lightning attention (MiniMax-01): linear attention with a fixed decay a head, slower in later layers."""

    num_heads: int = 0  # heads, each with a state; 0: no such layers
    head_dim: int = 128  # width of a head

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy; without such layers all keys must keep their defaults."""
        _check("lightning", self, ("num_heads", "head_dim"))


@dataclass(unsafe_hash=True)
class GlaShape:
    """Gated linear attention: an associative memory a head, whose decay is one for each channel of a key."""

    num_heads: int = 0  # heads of queries, keys and values, each with a state; 0: no such layers
    key_dim: int = 128  # width of a head of queries and keys, and how many decays it has
    value_dim: int = 256  # width of a head of values; as published, heads of keys are half as wide
    rank: int = 16  # width of the vector of a token that decays come from
    normalizer: float = 16.0  # log decays are divided by it: the larger, the longer a state remembers

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy; without such layers all keys must keep their defaults."""
        if _check("gla", self, ("num_heads", "key_dim", "value_dim", "rank")) and not 0 < self.normalizer < math.inf:
            raise ValueError(f"model.gla.normalizer must be positive, got {self.normalizer}")


@dataclass(unsafe_hash=True)
class Rwkv7Shape:
    """RWKV-7: an associative memory a head, of which a token decays, replaces and adds to each channel of a key at a rate of
    its own."""

    num_heads: int = 0  # heads, each with a state; 0: no such layers
    head_dim: int = 64  # width of a head
    decay_rank: int = 64  # width of the vector of a token that decays come from
    rate_rank: int = 64  # width of the one that the rates of replacement come from
    gate_rank: int = 128  # width of the one that the gate of the output comes from
    value_residual: bool = False  # values are mixed with those of the first layer, as published: refused, see validate

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy; without such layers all keys must keep their defaults."""
        if (
            _check("rwkv7", self, ("num_heads", "head_dim", "decay_rank", "rate_rank", "gate_rank"))
            and self.value_residual
        ):
            raise ValueError(
                "model.rwkv7.value_residual = true mixes values with those of the first layer, and a layer here gets nothing "
                "from others but the residual stream: leave it out"
            )
