"""Bytes of activations of each part of a layer, on one device and of one microbatch.

What a part keeps from forward to backward follows from the remat policy (`ejdist.models.stack.rematerialised`); what it holds
at the height of its backward, from its code. b is the bytes of a number in the compute dtype, m the tokens of a device.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ejdist.models.config import DecoderShape
from ejdist.models.part import Part
from ejdist.models.stack import layers_of


@dataclass(frozen=True)
class Share:
    """What a device has of a microbatch.

    tokens: rows times the part of the sequence. itemsize: of the compute dtype. features, sequence: over how many devices heads
    and features, and the sequence, are split. gathers: all keys lie on a device at once (sequence.scheme = all_gather).
    experts: over how many devices experts are split. buffer: experts.buffer. gathers_tokens: tokens of all ranks lie on a
    device at once (experts.dispatch = all_gather).
    """

    tokens: int
    itemsize: int
    features: int = 1
    sequence: int = 1
    gathers: bool = False
    experts: int = 1
    buffer: float = 1.25
    gathers_tokens: bool = False


@dataclass(frozen=True)
class PartBytes:
    """kept: remat policy -> bytes from forward to backward, beside the layer's input. work: at the height of the backward."""

    kept: dict[str, int]
    work: int


def _attention(
    c: DecoderShape, s: Share, query: int, key: int, value: int, heads: int, narrow: int = 0, normed: int = 0
) -> PartBytes:
    """From bytes of all heads: queries, keys and values; `narrow` of products before these, `normed` of what norms make of
    them, which "dots" computes again."""
    x, lse = s.tokens * c.model_dim * s.itemsize, 4 * s.tokens * heads // s.features
    out = query * value // key if key else query
    lean = out + lse
    wide = 4 // s.itemsize  # sums over the hops of a ring are float32
    hops = s.sequence if s.gathers else 2  # sets of keys and values that are on a device at a time
    travelling = 0 if s.sequence == 1 else (hops + wide) * (key + value) + wide * query
    kept = {
        "full": 0,
        "offload": lse,
        "attention": lean,
        "dots": lean + query + key + value + narrow + x,
        "none": lean + query + key + value + narrow + normed + 2 * x,
    }
    # Inputs and gradients of queries, keys and values, of the output, and the residual stream with its gradient.
    work = 2 * (query + key + value) + 2 * out + narrow + normed + 3 * x + travelling
    return PartBytes(kept, work)


def attention(c: DecoderShape, s: Share) -> PartBytes:
    """Plain and windowed attention."""
    head = s.tokens * c.head_dim * s.itemsize
    query, key = head * c.num_heads // s.features, head * c.num_kv_heads // s.features
    return _attention(c, s, query, key, key, c.num_heads, normed=query + key if c.qk_norm else 0)


def latent_attention(c: DecoderShape, s: Share) -> PartBytes:
    """Keys and values of all heads, made from one vector a token."""
    m, per = c.latent, s.tokens * s.itemsize
    heads = c.num_heads // s.features
    query, value = per * heads * (m.nope_dim + m.rope_dim), per * heads * m.value_dim
    return _attention(c, s, query, query, value, c.num_heads, per * (m.query_rank + m.kv_rank + m.rope_dim))


def mlp(c: DecoderShape, s: Share) -> PartBytes:
    """The gated MLP: gate, up and their product are of width F, and so are the three gradients."""
    x, f = s.tokens * c.model_dim * s.itemsize, s.tokens * c.ffn_dim // s.features * s.itemsize
    kept = {"full": 0, "offload": 0, "attention": 0, "dots": 2 * f, "none": 3 * f + x}
    return PartBytes(kept, 5 * f + 3 * x + 4 * x // s.itemsize)


def experts(c: DecoderShape, s: Share) -> PartBytes:
    """A mixture of experts: rows of a pass are those of its buffer, on one device those of all choices."""
    e = c.experts
    x = s.tokens * c.model_dim * s.itemsize
    rows = s.tokens * e.top_k * (s.buffer if s.experts > 1 else 1)
    wide, narrow = int(rows * c.model_dim * s.itemsize), int(rows * e.ffn_dim // s.features * s.itemsize)
    shared = s.tokens * e.shared_dim // s.features * s.itemsize
    choices = 4 * s.tokens * e.top_k
    every = choices + 2 * wide + 3 * narrow + 3 * shared
    kept = {"full": 0, "offload": choices, "attention": choices, "dots": choices, "none": every}
    # Rows that were sent, that arrived, in the order of experts, what was made of them and their gradients; gate, up, product.
    work = 5 * wide + 5 * narrow
    if s.gathers_tokens and s.experts > 1:
        # Tokens and cotangents of all ranks, the latter sorted, and sums in float32; rows are made of them on the spot.
        work = 3 * wide + 3 * narrow + s.experts * (3 * x + 4 * x // s.itemsize)
    return PartBytes(kept, work + 5 * shared + 3 * x + 4 * x // s.itemsize)


OF_PART: dict[str, Callable[[DecoderShape, Share], PartBytes]] = {
    "attention": attention,
    "latent_attention": latent_attention,
    "mlp": mlp,
    "experts": experts,
}


@functools.lru_cache(maxsize=64)
def counted_parts(c: DecoderShape) -> Counter[Part]:
    """Returns part -> how many layers have it."""
    return Counter(part for parts in layers_of(c) for part in parts)


def bytes_of(c: DecoderShape, s: Share) -> dict[Part, PartBytes]:
    """Returns part -> its bytes in one layer."""
    return {part: OF_PART[part.name](c, s) for part in counted_parts(c)}
