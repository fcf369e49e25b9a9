"""Requests of serving, as direct calls give them: lengths, tables of pages and cuts of packed queries whose values are known.

Under a trace, and on an accelerator, values are unknown and nothing is checked; what a wrong value means there is said by each
contract.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def known(x: Any) -> np.ndarray | None:
    """Returns the values of an array of integers, or of a list that may hold arrays; None where this process cannot read them,
    as under a trace, or would wait for an accelerator: a direct call is to be queued behind the one before."""
    for part in jax.tree.leaves(x):
        if isinstance(part, jax.core.Tracer):
            return None
        if isinstance(part, jax.Array) and (
            not part.is_fully_addressable or any(d.platform != "cpu" for d in part.devices())
        ):
            return None
    return np.asarray(x)


def check_lengths(
    function: str, name: str, lens: Any, room: Any, of: str, starts: tuple[str, Any] | None = None
) -> None:
    """Raises ValueError unless 0 <= lens <= room, and 0 <= starts <= lens where there are any.

    Args:
      room: how many keys there can be, an int. of: what has that room.
    """
    lens = known(lens)
    if lens is None:
        return
    if (lens < 0).any():
        raise ValueError(
            f"{function}: argument {name!r} must be at least 0, got {lens.min()}; a row without keys has 0"
        )
    if isinstance(room, int) and (lens > room).any():
        raise ValueError(f"{function}: argument {name!r} has {lens.max()} keys, and {of} has room for {room}")
    at = None if starts is None else known(starts[1])
    if at is not None and starts is not None and ((at < 0) | (at > lens)).any():
        raise ValueError(
            f"{function}: argument {starts[0]!r} must be between 0 and {name!r}, where the keys of a row end"
        )


def check_tables(
    function: str, lens: tuple[str, Any], tables: tuple[str, Any], pages: Any, block_size: Any, num_seqs: Any = None
) -> None:
    """Raises ValueError unless the keys of each request fit its table, and the pages that they lie in exist.

    Args:
      lens, tables: names and values, int [requests] and [requests, max pages].
      pages, block_size: of the cache. num_seqs: how many of the requests count.
    """
    length, table = known(lens[1]), known(tables[1])
    count = None if num_seqs is None else known(num_seqs)
    if length is None or (num_seqs is not None and count is None):
        return
    length = length[: None if count is None else max(0, int(count.reshape(())))]
    width = (jnp.asarray(tables[1]) if table is None else table).shape[1]  # of a list, too
    check_lengths(
        function, lens[0], length, width * block_size, f"a row of {tables[0]!r} ({width} pages of {block_size})"
    )
    if table is None or not (isinstance(pages, int) and isinstance(block_size, int)):
        return
    table = table[: len(length)]
    bad = (np.arange(width) * block_size < length[:, None]) & ((table < 0) | (table >= pages))
    if bad.any():
        request, entry = np.argwhere(bad)[0]
        raise ValueError(
            f"{function}: argument {tables[0]!r} has page {table[request, entry]} for request {request}, which has keys in it; "
            f"the cache has pages 0 to {pages - 1}"
        )


def check_cuts(function: str, name: str, cuts: Any, rows: Any, num_seqs: Any = None) -> None:
    """Raises ValueError unless [0, n1, n1 + n2, ...] rises, to at most the number of rows."""
    cuts, count = known(cuts), None if num_seqs is None else known(num_seqs)
    if cuts is None or (num_seqs is not None and count is None):
        return
    cuts = cuts[: None if count is None else max(1, int(count.reshape(())) + 1)]
    if cuts[0] < 0 or (cuts[1:] < cuts[:-1]).any():
        raise ValueError(f"{function}: argument {name!r} must rise from 0, [0, n1, n1 + n2, ...], got {cuts.tolist()}")
    if isinstance(rows, int) and cuts[-1] > rows:
        raise ValueError(f"{function}: argument {name!r} ends at row {cuts[-1]}, and there are {rows}")
