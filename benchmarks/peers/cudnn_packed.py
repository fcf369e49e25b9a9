"""cuDNN's fused attention over packed documents. JAX has it in a private function: the public one knows rows of one length."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.peers import needs_gpu, plain_attention

FRAMEWORK = "jax"
OPERATIONS = ("flash_attention",)


def available() -> str | None:
    return needs_gpu()


def express(op_name: str, arguments: dict[str, Any]) -> Any:
    plain = plain_attention(arguments, besides=("q_segment_ids", "kv_segment_ids"))
    if isinstance(plain, str):
        return plain
    mask, (B, _, _, H) = arguments.get("mask"), arguments["query"].shape
    if mask is None or mask.q_segment_ids is None:
        return "it is for packed documents: `cudnn` has the rest"
    if arguments["query"].dtype not in ("bfloat16", "float16") or arguments["value"].shape[-1] != H:
        return "it has 16-bit floats and values as wide as queries only"
    if plain.window is not None and not (plain.causal and plain.window[1] in (0, None)):
        return "it supports windows only backward, with a causal mask"
    ids = np.broadcast_to(np.asarray(mask.q_segment_ids), (B, arguments["query"].shape[1]))
    if not np.array_equal(mask.q_segment_ids, mask.kv_segment_ids) or (ids < 0).any() or (np.diff(ids) < 0).any():
        return "its documents lie one after another, the same of queries and keys, with no padding"
    lengths, offsets = lie(ids)
    window = None if plain.window is None or plain.window[0] is None else plain.window[0] + 1

    def attention(query: Any, key: Any, value: Any) -> Any:
        from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

        return dot_product_attention(
            query,
            key,
            value,
            q_seqlen=lengths,
            kv_seqlen=lengths,
            q_offsets=offsets,
            kv_offsets=offsets,
            scale=1 / math.sqrt(H) if plain.scale is None else plain.scale,
            mask_type=MaskType.PADDING_CAUSAL if plain.causal else MaskType.PADDING,
            sliding_window_length=window,
        )

    return attention


def lie(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (lengths [B, M], starts [B, M + 1]) of the runs of ids [B, T]; M is the most of a row, -1 what it lacks."""
    starts = [np.flatnonzero(np.diff(row, prepend=-1)) for row in ids]
    most = max(map(len, starts))
    lengths, offsets = (np.full((len(ids), n), -1, np.int32) for n in (most, most + 1))
    for row, at in enumerate(starts):
        lengths[row, : len(at)] = np.diff(at, append=ids.shape[1])
        offsets[row, : len(at)] = at
    return lengths, offsets
