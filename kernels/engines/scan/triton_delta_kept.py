"""What the forward of a differentiated delta rule keeps for its backward, in Triton."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.layout import chunks_of
from kernels.engines.scan.triton_calls import check_chunk, columns, fade_shapes

# What `keeping` keeps: weights of pairs, inverses, and what decays leave; of rows that are split also their parts' maps and the
# states before them. By `keeps_states` also what a walk over the rows finds, which the backward then does not walk again.
KEPT, KEPT_OF_PARTS = ("pairs", "solve", "enters", "leaves", "whole"), ("maps", "starts")
KEPT_OF_WALK = ("written", "states")


def kept_of(
    dims: Mapping[str, int], num_states: int, dtype: Any, cfg: ChunkConfig, names: tuple[str, ...] = KEPT
) -> dict[str, Any]:
    """Returns the shapes of what `keeping` keeps: those of KEPT that are named, and what parts of rows do."""
    (B, T, N, H, Hv), C = (dims[name] for name in ("B", "T", "N", "H", "Hv")), check_chunk(cfg.chunk)
    chunks = chunks_of(T, C, num_states)
    square = jax.ShapeDtypeStruct((B, N, chunks, C, C), dtype)
    kept = dict(zip(names, (square, square, *fade_shapes(B, N, chunks, T)), strict=False))
    if cfg.keeps_states:
        of_walk = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((B, T, N, Hv), (B, N, chunks, H, Hv)))
        kept |= dict(zip(KEPT_OF_WALK, of_walk, strict=True))
    if keeps_parts(chunks, Hv, cfg):
        states = (jax.ShapeDtypeStruct((B, N, parts_of(chunks, cfg), H, width), jnp.float32) for width in (Hv + H, Hv))
        kept |= dict(zip(KEPT_OF_PARTS, states, strict=True))
    return kept


def keeps_parts(chunks: int, Hv: int, cfg: ChunkConfig) -> bool:
    """Returns whether `keeping` keeps what parts of rows do: if there are some, and tiles of columns have no others."""
    return parts_of(chunks, cfg) > 1 and Hv % columns(cfg.block_v, Hv) == 0


def parts_of(chunks: int, cfg: ChunkConfig) -> int:
    """Returns into how many parts a row is split: none is empty."""
    return -(-chunks // -(-chunks // min(cfg.splits or 1, chunks)))
