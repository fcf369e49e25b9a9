"""Native sparse attention whose sequence is split over a mesh axis: each rank gathers the keys and values of all, or it gathers
their means and receives the blocks that its queries select.

Which blocks a query selects is known only when it has looked at the means of all of them, so any rank may need any token. The
gradients of what came are summed where they belong. What each costs: README of the operation.

A block is tokens that follow one another, so tokens in another order than contiguous are exchanged first, and the result goes
back: a rank then has one run of the text. Segment ids are put into the order of the text before the operation reads where
documents start.
"""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels
from ejdist.layout import current_layout
from ejdist.mesh import current_mesh
from ejdist.order import Order
from ejdist.sequence import exchange, sparse_blocks
from ejdist.sequence.group_cast import BUFFER
from ejdist.sequence.runs import Runs
from ejdist.sharded import ShardedFunction
from ejdist.tokens import axes_of_layout, resolve_order
from kernels.ops.native_sparse_attention import op

_NAME = "native_sparse_attention"
_KEYS = ("key", "value", "starts")  # what is gathered; starts are in the order of the text already


GATHER, BLOCKS = "gather", "blocks"
_DOC = """
      exchange: what travels where the sequence is split. "gather": the keys and values of all ranks; "blocks": the means of all
        blocks, and the blocks that a rank's queries select, in passes of half of a rank's own tokens; of `buffer` times these
        by `ejdist.sequence.Exchange("blocks", buffer)`. Default: "gather".
"""


@dataclass(frozen=True)
class Exchange:
    """What travels, hashable.

    Attributes:
      name: GATHER or BLOCKS. buffer: of the blocks that come, the tokens that a rank has room for at a time, over its own.
    """

    name: str = GATHER
    buffer: float = BUFFER

    def __post_init__(self) -> None:
        if self.name not in (GATHER, BLOCKS):
            raise ValueError(
                f"{_NAME}: argument 'exchange' = {self.name!r} is unknown; use {GATHER!r}, {BLOCKS!r} or an "
                "ejdist.sequence.Exchange"
            )
        if not 0 < self.buffer < math.inf:
            raise ValueError(
                f"{_NAME}: argument 'buffer' = {self.buffer!r} of an Exchange must be a number above 0: the tokens of others "
                "that a device has room for, over its own"
            )

    def __call__(self, axes: dict[str, tuple[str, ...]], **arguments: Any) -> jax.Array:
        """Returns the output of this rank's queries."""
        return _attended(axes, by=self, **arguments)


def _attended(
    axes: dict[str, tuple[str, ...]],
    *,
    by: Exchange,
    query: jax.Array,
    order: Order | None = None,
    q_start: jax.Array | None = None,
    platform: str | None = None,
    cfg: Any = None,
    **arguments: Any,
) -> jax.Array:
    """Returns the output of this rank's queries."""
    ranks_of = axes["T"]
    runs = None if order is None or not ranks_of else Runs(order, query.shape[1], ranks_of)
    if runs is not None and runs.count > 1:
        _check(order, query, arguments["key"], axes)
        query = runs.exchanged(query)
        moved = {n: x for n, x in arguments.items() if isinstance(x, jax.Array) and n != "starts"}
        arguments |= {n: runs.exchanged(x) for n, x in moved.items()}
    how = {"q_start": q_start, "platform": platform, "cfg": cfg}
    over = _over_blocks if by.name == BLOCKS and ranks_of else _over_all
    out = over(axes, by, query=query, **how, **arguments)
    return runs.home(out) if runs is not None and runs.count > 1 else out


def _over_blocks(axes: dict[str, tuple[str, ...]], by: Exchange, *, q_start: Any, **arguments: Any) -> jax.Array:
    """Returns the output of this rank's queries over means, and blocks that are received."""
    _check_blocks(arguments, axes, q_start)
    if arguments.get("starts") is not None:
        arguments["starts"] = exchange.gather(arguments["starts"], axes["S"])
    return sparse_blocks.attended(axes["T"], by.buffer, **arguments)


def _over_all(
    axes: dict[str, tuple[str, ...]], by: Exchange, *, query: jax.Array, q_start: Any, **arguments: Any
) -> jax.Array:
    """Returns the output of this rank's queries over the keys and values of all ranks."""
    ranks_of = axes["T"]
    if axes["S"]:
        names = [n for n in _KEYS if arguments.get(n) is not None]
        arguments |= exchange.gather({n: arguments[n] for n in names}, axes["S"])
    if ranks_of:
        local_length, length = query.shape[1], query.shape[1] * jax.lax.axis_size(ranks_of)
        first = jnp.int32(arguments["key"].shape[1] - length) if q_start is None else q_start
        q_start = first + jax.lax.axis_index(ranks_of) * local_length
    return op(query=query, q_start=q_start, **arguments)


def _check(order: Any, query: jax.Array, key: jax.Array, axes: dict[str, tuple[str, ...]]) -> None:
    """Raises ValueError for queries and keys that are not the same tokens, in an order of which ranks exchange tokens."""
    if axes["T"] != axes["S"] or query.shape[1] != key.shape[1]:
        raise ValueError(
            f"{_NAME}: argument 'query' has {query.shape[1]} tokens of a rank and 'key' {key.shape[1]}, split over {axes['T']} "
            f"and {axes['S']}: in order {order.name!r} both must be the same tokens; give all queries, or use "
            "order='contiguous' (sequence.order=contiguous)"
        )


def _check_blocks(arguments: dict[str, Any], axes: dict[str, tuple[str, ...]], q_start: Any) -> None:
    """Raises ValueError for a call whose blocks are not exchanged."""
    query = arguments["query"]
    size, instead = (
        arguments.get("block_size", op.parameters["block_size"].default),
        f"or use exchange={GATHER!r} (another sequence.scheme)",
    )
    if axes["T"] != axes["S"] or query.shape[1] != arguments["key"].shape[1] or q_start is not None:
        raise ValueError(
            f"{_NAME}: argument 'exchange' = {BLOCKS!r} is for queries of all tokens, split like the keys, and this call has "
            f"{query.shape[1]} on a rank for {arguments['key'].shape[1]} keys; give all of them, {instead}"
        )
    if query.shape[1] % size:
        raise ValueError(
            f"{_NAME}: argument 'block_size' = {size} does not divide the {query.shape[1]} tokens of a rank, as exchange="
            f"{BLOCKS!r} requires; change the length or the number of ranks, {instead}"
        )


class _NativeSparse(ShardedFunction):
    """The sharded function: documents are those of the text, in whatever order its tokens lie; and what travels is chosen."""

    def __init__(self, by: Exchange) -> None:
        super().__init__(kernels.native_sparse_attention, by, ("T", "S"), follows="fixed", on_rank=False)
        parameters = dict(self.__signature__.parameters)
        parameters["exchange"] = inspect.Parameter("exchange", inspect.Parameter.KEYWORD_ONLY, default=None)
        self.__signature__ = self.__signature__.replace(parameters=[*parameters.values()])
        self.__doc__ = (self.__doc__ or "").rstrip() + _DOC

    def __call__(self, *args: Any, exchange: str | Exchange | None = None, **kwargs: Any) -> Any:
        function = self if exchange is None else over_ranks(_named(exchange))
        return ShardedFunction.__call__(function, *args, **_of_text(kwargs))

    def with_stored_weights(self, *args: Any, exchange: str | Exchange | None = None, **kwargs: Any) -> Any:
        function = self if exchange is None else over_ranks(_named(exchange))
        return ShardedFunction.with_stored_weights(function, *args, **_of_text(kwargs))


@functools.lru_cache(maxsize=64)
def over_ranks(by: Exchange) -> _NativeSparse:
    """Returns `native_sparse_attention` on sharded arrays, by what travels."""
    return _NativeSparse(by)


def _named(exchange: Any) -> Exchange:
    """Returns what travels, from the argument of a call. Raises ValueError where it is neither a name nor an `Exchange`."""
    return exchange if isinstance(exchange, Exchange) else Exchange(exchange)


def _of_text(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call with segment ids in the order of the text."""
    ids, given, mesh = (kwargs.get(name) for name in ("segment_ids", "order", "mesh"))
    mesh = current_mesh() if mesh is None else mesh
    if ids is None or mesh is None or (given is None and current_layout().order is None):
        return kwargs
    axes = axes_of_layout(mesh)
    ranks = math.prod(mesh.shape.get(axis, 1) for axis in axes)
    order = resolve_order(_NAME, ranks, f"the sequence is split over {', '.join(axes)}", given)
    ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    if order.carried or ids.ndim != 2:  # refused by name when the call is prepared, or runs
        return kwargs
    return kwargs | {"segment_ids": order.inverse(ids)}


native_sparse_attention = over_ranks(Exchange())
