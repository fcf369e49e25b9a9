"""What layers keep of a request from one step of a generation to the next: declared here, held and read by
`ejdist.generation`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

from ejdist.models.ops import Ops

# Part -> operation -> the arrays of all layers that have the part, stacked along the first dim.
Arrays = dict[str, dict[str, tuple[jax.Array, ...]]]


@dataclass(frozen=True)
class Kept:
    """What an operation of a layer keeps.

    arrays: the shape and dims of each, of one token or of one request.
    per_token: a row for each token, in pages, in the compute dtype; else one state for each request, float32, which each step
      replaces: the operation takes it as `state` and returns it with `return_state`.
    block: tokens of a block whose means the operation reads: beside the rows of a page are then their sums, float32, one for
      each part that a page and a block have in common.
    """

    arrays: tuple[tuple[tuple[int, ...], str], ...]
    per_token: bool
    block: int | None = None

    @classmethod
    def state(cls, shape: tuple[int, ...], dims: str) -> Kept:
        """Returns what a recurrence keeps: one state of that shape."""
        return cls(((shape, dims),), per_token=False)


class LayerKept(Protocol):
    """What one part of one layer keeps, while it runs: operations that read and replace it, and what is then kept."""

    ops: Ops
    arrays: dict[str, tuple[jax.Array, ...]]


class Serving(Protocol):
    """Serves the operations of layers over what they keep."""

    def layer(self, part: str, ops: Ops, arrays: Mapping[str, Any], row: Any) -> LayerKept:
        """Returns the operations of a layer whose part of that name has row `row` of the stacked arrays."""
        ...


class Cached(NamedTuple):
    """How a model generates.

    declared: part -> (how many layers have it, operation -> what it keeps).
    apart: (params, buffers, *, donate, packing) -> weights: what a step takes of them, each layer's matrices as arrays of their
      own, in the compute dtype; `donate` frees what is copied.
    packing: (params, buffers, form) -> `Packing`: which of them are packed in that format of `ejdist.packed`.
    packed: (params, packing, *, donate) -> params with those packed, which the forward pass and `apart` take too; `donate`
      frees what is packed.
    step: (weights, batch, kept, ops, serving) -> (logits of the last token of each row, float32 [B, V]; what is kept after
      it). The batch's tokens are at the end of their rows.
    """

    declared: dict[str, tuple[int, dict[str, Kept]]]
    apart: Callable[..., Any]
    packing: Callable[..., Any]
    packed: Callable[..., Any]
    step: Callable[..., tuple[jax.Array, Arrays]]
    dtype: str
    vocab_size: int
    refused: str = ""  # why there is no such form; a sentence
