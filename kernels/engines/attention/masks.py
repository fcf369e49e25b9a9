"""`MaskInfo`: which keys a query may attend to, described in O(S) memory.

All fields that are set apply together. A dense S x S mask exists only if the caller passes one. `ranges.py` defines the fields;
other code reads a mask's `key_range`, or the tiles derived from it (`tiles.py`), and never its rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.engines.attention.ranges import RULES, KeyRange, interval_of, visible
from kernels.framework import segments
from kernels.framework.options import ARRAYS

Window = tuple[int | None, int | None]
# Positions and distances are below this, so their sums fit in int32.
_FARTHEST = 2**30


def window_of(sliding_window: Any) -> Window | None:
    """Returns (left, right): a query at position i sees keys at positions j with i - left <= j <= i + right.

    An integer W means exactly the W keys i - W < j <= i. None leaves a side unbounded.
    """
    if sliding_window is None:
        return None
    if is_integer(sliding_window):
        if not 1 <= sliding_window <= _FARTHEST:
            raise ValueError(
                f"argument 'sliding_window' must be at least 1 key and at most {_FARTHEST}, got {sliding_window}"
            )
        return (int(sliding_window) - 1, 0)
    sides = tuple(sliding_window) if isinstance(sliding_window, (tuple, list)) else ()
    if not _is_window(sides):
        raise ValueError(
            "argument 'sliding_window' must be W or (left, right), each >= 0 and less than "
            f"{_FARTHEST}, or None, got {sliding_window!r}"
        )
    left, right = (None if s is None else int(s) for s in sides)
    return (left, right)


def is_integer(value: Any) -> bool:
    """Returns whether the value is a Python or NumPy integer, and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_window(sides: tuple) -> bool:
    return len(sides) == 2 and all(s is None or (is_integer(s) and 0 <= s < _FARTHEST) for s in sides)


def _both(a: Window | None, b: Window | None) -> Window | None:
    if a is None or b is None:
        return a if b is None else b
    left, right = (min((s for s in sides if s is not None), default=None) for sides in zip(a, b, strict=True))
    return left, right


# Dims of the array fields. Under sharding, a field without a query dim or a key dim goes where the keys go.
MASK_DIMS = {
    "q_segment_ids": ("B", "T"),
    "kv_segment_ids": ("B", "S"),
    "q_positions": ("B", "T"),
    "kv_positions": ("B", "S"),
    "attention_mask": ("B", "N", "T", "S"),
    "prefix_lengths": ("B",),
    "q_sink_ends": ("B", "T"),
}
# Features that a mask requires of a backend: feature -> the field that needs it. Each rule is a separate feature.
MASK_FEATURES = {name: name for rule in RULES for name in rule.fields if name not in MASK_DIMS} | {
    "prefix": "prefix_lengths",
    "segments": "q_segment_ids",
    "positions": "q_positions",
    "dense_mask": "attention_mask",
}
_INDICES = tuple(name for name in MASK_DIMS if name != "attention_mask")
_READ_BY_RULES = frozenset(name for rule in RULES for name in rule.fields)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MaskInfo:
    """Which (query, key) pairs attend: the conjunction of all fields that are set. A pytree of the arrays. Integer arrays are
    converted to int32 (signed, because a window can reach below 0).

    Attributes:
      q_segment_ids, kv_segment_ids: int [B|1, T] and [B|1, S]. A pair attends iff its segments are equal and both >= 0;
        -1 is padding.
      q_positions, kv_positions: int [B|1, T] and [B|1, S]; the positions that causal, window, chunk and prefix compare.
        By default key j is at j and query i at i + S - T, so the last query is aligned with the last key.
      attention_mask: bool [B|1, N|1, T, S], dense, only if the caller has one.
      prefix_lengths: int [B|1]; keys at positions below it are exempt from `causal` (prefix-LM), and from nothing else.
      causal: key position <= query position.
      window: (left, right), see `window_of`.
      sink_tokens: the first n tokens of a sequence are exempt from the left side of `window`, and from nothing else.
        These are the positions below n; with segments and without positions, the first n of each segment, see
        `resolved`.
      q_sink_ends: int [B|1, T]; the position just past the sink tokens of a query's sequence, if it is not `sink_tokens`.
      chunk_size: only keys in the same chunk of that many positions attend. With segments and without positions, chunks
        are counted from the start of each segment, see `resolved`.
      packed: positions are along a packed axis, but chunks still count from the start of each segment.
      padded_by_zeros: nothing about pairs: arguments are zero in padding already, and no call zeroes them again.
    """

    q_segment_ids: jax.Array | None = None
    kv_segment_ids: jax.Array | None = None
    q_positions: jax.Array | None = None
    kv_positions: jax.Array | None = None
    attention_mask: jax.Array | None = None
    prefix_lengths: jax.Array | None = None
    q_sink_ends: jax.Array | None = None
    causal: bool = field(default=False, metadata={"static": True})
    window: Window | None = field(default=None, metadata={"static": True})
    sink_tokens: int | None = field(default=None, metadata={"static": True})
    chunk_size: int | None = field(default=None, metadata={"static": True})
    packed: bool = field(default=False, metadata={"static": True})
    padded_by_zeros: bool = field(default=False, metadata={"static": True})

    def __post_init__(self) -> None:
        for name in _INDICES:
            if (array := getattr(self, name)) is not None:
                object.__setattr__(self, name, segments.narrowed(array, name))

    @classmethod
    def from_segments(cls, q_segment_ids: Any, kv_segment_ids: Any = None, **options: Any) -> MaskInfo:
        """Returns the mask of packed sequences: int [B, T] ids, -1 for padding; the same for keys by default."""
        q = segments.integers(q_segment_ids, "q_segment_ids")
        kv = q if kv_segment_ids is None else segments.integers(kv_segment_ids, "kv_segment_ids")
        return cls(q_segment_ids=q, kv_segment_ids=kv, **options)

    @classmethod
    def from_attention_mask(cls, attention_mask: Any, **options: Any) -> MaskInfo:
        """Returns the mask for booleans or 0/1: [B, S], tokens that are not padding; [B, T, S] and [B, N, T, S], pairs."""
        mask = jnp.asarray(attention_mask)
        if jnp.issubdtype(mask.dtype, jnp.floating):
            # 0 / -inf and 1 / 0 are both common conventions, with opposite meanings.
            why = f"must be boolean or 0/1 integers, got {mask.dtype}; pass values to add to the logits as 'bias'"
            raise ValueError(f"argument 'attention_mask' {why}")
        mask = mask if mask.dtype == jnp.bool_ else mask != 0
        if mask.ndim == 2:
            return cls.from_segments(jnp.where(mask, 0, -1).astype(jnp.int32), **options)
        if mask.ndim == 3:
            mask = mask[:, None]
        if mask.ndim != 4:
            raise ValueError(f"argument 'attention_mask' must be [B, S], [B, T, S] or [B, N, T, S], got {mask.shape}")
        return cls(attention_mask=mask, **options)

    @classmethod
    def from_cu_seqlens(
        cls, cu_q: Any, total_q: int, cu_k: Any = None, total_k: int | None = None, **options: Any
    ) -> MaskInfo:
        """Returns the mask for cumulative lengths [0, n1, n1 + n2, ...] of a packed axis; later tokens are padding.

        If the keys have their own lengths, the last query of a sequence is aligned with its last key. Chunks, whether set
        here or by a mask that this is combined with, are counted from the start of each sequence.
        """
        q = segments.of_cuts(cu_q, total_q)
        segments.check_cuts("cum_seqlens_q", cu_q, total_q)
        if cu_k is None:
            return cls.from_segments(q, **options)
        cu_q, cu_k = jnp.asarray(cu_q, jnp.int32), jnp.asarray(cu_k, jnp.int32)
        if cu_q.shape != cu_k.shape:
            raise ValueError(
                f"arguments 'cum_seqlens_q' {cu_q.shape} and 'cum_seqlens_k' {cu_k.shape} must have the same length: "
                "the number of sequences plus one"
            )
        total_k = total_q if total_k is None else total_k
        k = segments.of_cuts(cu_k, total_k)
        segments.check_cuts("cum_seqlens_k", cu_k, total_k)
        # Positions count keys along the whole axis, so that dropout differs between sequences.
        q_at = jnp.arange(total_q, dtype=jnp.int32)[None] + (cu_k - cu_q)[jnp.maximum(q, 0) + 1]
        k_at = jnp.arange(total_k, dtype=jnp.int32)[None]
        return cls(q_segment_ids=q, kv_segment_ids=k, q_positions=q_at, kv_positions=k_at, packed=True, **options)

    def combine(self, other: MaskInfo) -> MaskInfo:
        """Returns the mask under which a pair attends iff it does under both masks.

        All rules of the result compare the positions, whichever mask has them. Likewise prefix_lengths of either mask
        relax `causal` of the result (MaskInfo(prefix_lengths=p) combined with causal=True is a prefix-LM), and sink_tokens
        its `window`. Chunks count from the starts of the result's segments, or along explicit positions.

        Raises:
          ValueError: both have positions, or chunk sizes neither of which divides the other.
        """
        self._check_pairs()
        other._check_pairs()
        merged: dict[str, Any] = {}
        for name in ("q_positions", "kv_positions", "q_sink_ends"):
            a, b = getattr(self, name), getattr(other, name)
            if a is not None and b is not None and a is not b:
                raise ValueError(f"argument {name!r} was given twice; a token has one position")
            merged[name] = b if a is None else a
        a, b = self.chunk_size, other.chunk_size
        if a is not None and b is not None:
            if a % b and b % a:
                raise ValueError(f"argument 'chunk_size' was given twice, as {a} and {b}; use one of them")
            a = min(a, b)
        merged["chunk_size"] = b if a is None else a
        a, b = self.sink_tokens, other.sink_tokens
        merged["sink_tokens"] = b if a is None else a if b is None else min(a, b)
        a, b = self.prefix_lengths, other.prefix_lengths
        merged["prefix_lengths"] = b if a is None else a if b is None else jnp.minimum(a, b)
        a, b = self.attention_mask, other.attention_mask
        merged["attention_mask"] = b if a is None else a if b is None else a & b
        a, b = (self.q_segment_ids, self.kv_segment_ids), (other.q_segment_ids, other.kv_segment_ids)
        both = a[0] is not None and b[0] is not None
        merged["q_segment_ids"], merged["kv_segment_ids"] = segments.joint(*a, *b) if both else b if a[0] is None else a
        merged |= {"causal": self.causal or other.causal, "packed": self.packed or other.packed}
        return MaskInfo(**merged, window=_both(self.window, other.window))

    def permute(self, q_order: Any, kv_order: Any = None) -> MaskInfo:
        """Returns the mask of the same tokens in another order: new token n is old token order[n].

        Positions become explicit, so that the rules compare the same positions. `kv_order` defaults to `q_order`.
        """
        orders = {"q": jnp.asarray(q_order), "kv": jnp.asarray(q_order if kv_order is None else kv_order)}
        mask = self.resolved()
        q, k = mask.positions(orders["q"].shape[0], orders["kv"].shape[0])
        mask = mask.replace(q_positions=jnp.asarray(q), kv_positions=jnp.asarray(k), packed=False)

        def move(name: str, x: jax.Array) -> jax.Array:
            if name == "prefix_lengths":
                return x
            if name == "attention_mask":
                for dim, order in ((2, orders["q"]), (3, orders["kv"])):
                    x = x if x.shape[dim] == 1 else jnp.take(x, order, axis=dim)
                return x
            return jnp.take(x, orders[name.split("_")[0]], axis=1)

        permuted = map_data(mask, move)
        assert permuted is not None
        return permuted

    def replace(self, **changes: Any) -> MaskInfo:
        return dataclasses.replace(self, **changes)

    @property
    def data_fields(self) -> tuple[str, ...]:
        """Names of the array fields that are set."""
        return tuple([name for name in MASK_DIMS if getattr(self, name) is not None])

    @property
    def used(self) -> tuple[str, ...]:
        """Names of all fields that are set, rules and arrays."""
        return (*[name for name in _OPTIONS if getattr(self, name) not in (None, False)], *self.data_fields)

    def check(self, batch: int, q_length: int, kv_length: int, num_heads: int) -> None:
        """Raises ValueError, naming the field, if one is not an array or does not fit the queries and keys."""
        fields = self.data_fields
        for name in fields:
            value, kind = getattr(self, name), np.bool_ if name == "attention_mask" else np.integer
            if not isinstance(value, ARRAYS) or not jnp.issubdtype(value.dtype, kind):
                raise ValueError(
                    f"mask field {name!r} must be an array of {'bools' if kind is np.bool_ else 'integers'}, got "
                    + (str(value.dtype) if isinstance(value, ARRAYS) else type(value).__name__)
                )
        for name in fields:
            value, length = getattr(self, name), {"T": q_length, "S": kv_length}.get(MASK_DIMS[name][-1])
            if MASK_DIMS[name] in (("B", "T"), ("B", "S")) and not (
                value.ndim == 2 and value.shape[0] in (1, batch) and value.shape[1] == length
            ):
                raise ValueError(f"mask field {name!r} must be [{batch} or 1, {length}], got {value.shape}")
        self._check_pairs()
        mask = self.attention_mask
        if mask is not None:
            full_shape = (batch, num_heads, q_length, kv_length)
            if mask.ndim != 4 or any(m not in (1, w) for m, w in zip(mask.shape, full_shape, strict=True)):
                raise ValueError(f"mask field 'attention_mask' must broadcast to {full_shape}, got {mask.shape}")
        if self.prefix_lengths is not None and self.prefix_lengths.shape not in ((1,), (batch,)):
            raise ValueError(f"mask field 'prefix_lengths' must be [{batch} or 1], got {self.prefix_lengths.shape}")

    def _check_pairs(self) -> None:
        for a, b in (("q_segment_ids", "kv_segment_ids"), ("q_positions", "kv_positions")):
            if (getattr(self, a) is None) != (getattr(self, b) is None):
                raise ValueError(f"mask fields {a!r} and {b!r} must be given together")
        for name, what in (("chunk_size", "chunks"), ("sink_tokens", "sink tokens")):
            count = getattr(self, name)
            if count is not None and (not is_integer(count) or not 1 <= count < _FARTHEST):
                raise ValueError(
                    f"argument {name!r} must be a positive integer less than {_FARTHEST}, got {count!r}; use None for no {what}"
                )
        if not isinstance(self.causal, (bool, np.bool_)):
            raise ValueError(f"mask field 'causal' must be True or False, got {self.causal!r}")
        if self.window is not None and not (isinstance(self.window, tuple) and _is_window(self.window)):
            raise ValueError(
                f"mask field 'window' must be (left, right), each >= 0 and less than {_FARTHEST}, or None, got "
                f"{self.window!r}; for the last W keys pass (W - 1, 0)"
            )

    @property
    def chunks_in_segments(self) -> bool:
        """Whether chunks are counted from the start of each segment, if the mask has both."""
        return self.packed or self.q_positions is None

    def positions(self, q_length: int, kv_length: int) -> tuple[Any, Any]:
        """Returns (query positions, key positions), [B|1, T] and [B|1, S]; NumPy arrays if implicit."""
        if self.q_positions is not None:
            return self.q_positions, self.kv_positions
        q = np.arange(q_length, dtype=np.int32) + np.int32(kv_length - q_length)
        return q[None], np.arange(kv_length, dtype=np.int32)[None]

    @property
    def rules_are_static(self) -> bool:
        """Whether the visible positions of each query are known without reading any array."""
        return self.q_positions is None and _READ_BY_RULES.isdisjoint(self.data_fields)

    @property
    def counts_in_segments(self) -> bool:
        """Whether a rule counts tokens from the start of each segment, and so needs unsharded rows: see `resolved`."""
        return self.q_segment_ids is not None and self.chunks_in_segments and any(rule.counts(self) for rule in RULES)

    def loosened(self, unknown: Collection[str]) -> MaskInfo:
        """Returns the mask without these data fields and the rules that read them: an upper bound on the keys that a query
        sees, whatever the values are. Fields of segments and of positions are dropped in pairs."""
        unknown = set(unknown)
        for pair in (("q_segment_ids", "kv_segment_ids"), ("q_positions", "kv_positions")):
            unknown |= set(pair) if unknown & set(pair) else set()
        counted = "q_segment_ids" in unknown and self.chunks_in_segments
        dropped = set(unknown)
        for rule in RULES:
            # Unknown positions may be in any order, so rules that compare them exclude nothing.
            if "q_positions" in unknown or unknown & set(rule.fields):
                dropped |= set(rule.fields)
            elif counted and rule.counts(self):
                dropped |= set(rule.fields)
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return self.replace(**{name: defaults[name] for name in dropped})

    def resolved(self, order: Any = None) -> MaskInfo:
        """Returns an equivalent mask that no longer depends on where tokens are placed in the arrays.

        Without explicit positions, some rules count from the start of each segment: chunks become segments, and
        `q_sink_ends` is computed. Backends call this. Call it before sharding a mask or adding positions to it.

        Args:
          order: int [L], each token's position in the sequence, if queries and keys are permuted.
        """
        mask = self
        for rule in RULES if self.counts_in_segments else ():
            if rule.counts(mask):
                mask = rule.resolved(mask, order)
        return mask

    def key_range(self, q_length: int, kv_length: int) -> KeyRange:
        """Returns the range of keys for the given lengths. Its arrays are NumPy arrays if the mask has no data."""
        mask = self.resolved()
        q, k = mask.positions(q_length, kv_length)
        return KeyRange(q, k, *interval_of(mask, q), mask.q_segment_ids, mask.kv_segment_ids, mask.attention_mask)

    def visible(self, q_length: int, kv_length: int) -> jax.Array:
        """Returns the dense mask, bool [B|1, N|1, T, S]: the definition of all fields, for oracles and small sizes."""
        keys = self.key_range(q_length, kv_length)
        seen = visible(keys)[:, None]
        return seen if keys.dense is None else seen & keys.dense


# Names of the fields that are options, not arrays. `packed` says where chunks count from, and is no rule.
_OPTIONS = tuple(
    f.name for f in dataclasses.fields(MaskInfo) if f.name not in {*MASK_DIMS, "packed", "padded_by_zeros"}
)


def features_of_masks() -> dict[str, Callable[[Any], bool]]:
    """Returns `MASK_FEATURES` as predicates for `Op(features=...)`, for calls whose mask is the argument 'mask'."""

    def uses(field: str) -> Callable[[Any], bool]:
        return lambda call: call.mask is not None and field in call.mask.used

    return {name: uses(field) for name, field in MASK_FEATURES.items()}


def by_positions(call: Any) -> bool:
    """Returns whether attention compares implicit positions, those of tokens in the arrays:
    `Op(ordered=by_positions)`."""
    mask = call.arguments.get("mask")
    compares = call.arguments.get("alibi_slopes") is not None or call.arguments.get("dropout_prob", 0) > 0
    if mask is None or mask.q_positions is None:
        return compares or (mask is not None and any(rule.is_active(mask) for rule in RULES))
    # Explicit positions moved with the tokens; counts from the start of a segment did not.
    return mask.counts_in_segments


def key_range(mask: MaskInfo | None, q_length: int, kv_length: int) -> KeyRange:
    """Returns the key range of a mask; None is a mask without rules."""
    return (MaskInfo() if mask is None else mask).key_range(q_length, kv_length)


def map_data(mask: MaskInfo | None, function: Callable[[str, Any], Any]) -> MaskInfo | None:
    """Returns the mask with `function(field name, array)` in place of each of its arrays."""
    if mask is None:
        return None
    return mask.replace(**{name: function(name, getattr(mask, name)) for name in mask.data_fields})
