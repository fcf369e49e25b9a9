"""The sections of a model's mixers that attend in ways of their own: their sizes, which recipes give."""

from __future__ import annotations

from dataclasses import dataclass

# Limit of numbers used in float32, in which up to three times init_std is drawn.
LEAST, MOST = 2.0**-126, 2.0**126
# Blocks that native sparse attention selects for every query.
ALWAYS = 3


@dataclass(unsafe_hash=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads from one narrow vector per token."""

    kv_rank: int = 0  # width of the vector that keys and values come from; 0: no such layers
    query_rank: int = 0  # width of the vector that queries come from; 0: they are projected from the residual stream
    nope_dim: int = 128  # width of a query's and key's head without RoPE
    rope_dim: int = 64  # width of a query's head with RoPE, and of the one such key that all heads share
    value_dim: int = 128  # width of a value's head
    rope: bool = True  # RoPE turns those of rope_dim; in Kimi Linear nothing does, and they are there all the same
    norm_eps: float | None = (
        None  # added to the mean square in the norms of the narrow vectors; null for model.norm_eps
    )

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy; without such layers all keys must keep their defaults."""
        if self == LatentShape():
            return
        for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.latent.{name} must be positive, got {getattr(self, name)}")
        if self.norm_eps is not None and not LEAST <= self.norm_eps <= MOST:
            raise ValueError(f"model.latent.norm_eps must be positive, or null for model.norm_eps, got {self.norm_eps}")
        if self.query_rank < 0:
            raise ValueError(f"model.latent.query_rank must be 0, for none, or positive, got {self.query_rank}")
        if self.rope and self.rope_dim % 2:
            raise ValueError(f"model.latent.rope_dim = {self.rope_dim} must be even: rotary embedding rotates pairs")


@dataclass(unsafe_hash=True)
class SparseShape:
    """Native sparse attention: a query attends to means of blocks, to the tokens of a few blocks, and to the last tokens."""

    block_size: int = 0  # tokens of a block, counted from the start of a document; 0: no such layers
    num_blocks: int = 16  # blocks whose tokens a query sees, its own, the first and the one before its own among them
    window: int = 512  # last tokens that a query sees besides, its own too

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy; without such layers all keys must keep their defaults."""
        if self == SparseShape():
            return
        for name in ("block_size", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.sparse.{name} must be positive, got {getattr(self, name)}")
        if self.num_blocks < ALWAYS:
            raise ValueError(
                f"model.sparse.num_blocks = {self.num_blocks} must be at least {ALWAYS}: a query's own block, the first and "
                "the one before its own are always among them"
            )
