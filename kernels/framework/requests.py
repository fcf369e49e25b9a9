"""Checks of integers whose values are known, in eager calls: lengths, page tables, cumulative lengths, sizes of groups, and
where rows lie.

Under a trace, and on an accelerator, the values are unknown and nothing is checked; each contract documents what an
invalid value does there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def known(x: Any) -> np.ndarray | None:
    """Returns the values of an integer array, or of a list that may contain arrays. Returns None if they cannot be
    read, as under a trace, or only by waiting for an accelerator: eager calls must stay asynchronous."""
    for part in jax.tree.leaves(x):
        if isinstance(part, (jax.core.Tracer, jax.ShapeDtypeStruct)):
            return None
        if isinstance(part, jax.Array) and (
            not part.is_fully_addressable or any(d.platform != "cpu" for d in part.devices())
        ):
            return None
    return np.asarray(x)


def check_lengths(
    function: str, name: str, lens: Any, room: Any, of: str, starts: tuple[str, Any] | None = None
) -> None:
    """Raises ValueError unless 0 <= lens <= room, and 0 <= starts <= lens if `starts` is given.

    Args:
      room: the maximum number of keys, an int. of: what has that capacity.
    """
    lens = known(lens)
    if lens is None:
        return
    if (lens < 0).any():
        raise ValueError(
            f"{function}: argument {name!r} must be at least 0, got {lens.min()}; use 0 for a row without keys"
        )
    if isinstance(room, int) and (lens > room).any():
        raise ValueError(f"{function}: argument {name!r} has {lens.max()} keys, but {of} has room for {room}")
    start_values = None if starts is None else known(starts[1])
    if start_values is not None and starts is not None and ((start_values < 0) | (start_values > lens)).any():
        raise ValueError(
            f"{function}: argument {starts[0]!r} must be between 0 and {name!r}, the number of keys in the row"
        )


def check_tables(
    function: str, lens: tuple[str, Any], tables: tuple[str, Any], pages: Any, block_size: Any, num_seqs: Any = None
) -> None:
    """Raises ValueError unless the keys of each request fit in its row of the table, on pages that exist.

    Args:
      lens, tables: names and values, int [requests] and [requests, max pages].
      pages, block_size: dims of the cache. num_seqs: the number of valid requests.
    """
    length, table = known(lens[1]), known(tables[1])
    count = None if num_seqs is None else known(num_seqs)
    if length is None or (num_seqs is not None and count is None):
        return
    length = length[: None if count is None else max(0, int(count.reshape(())))]
    width = (jnp.asarray(tables[1]) if table is None else table).shape[1]  # `tables` may be a list
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
            f"{function}: argument {tables[0]!r} has page {table[request, entry]} for request {request}, which has keys on it; "
            f"the cache has pages 0 to {pages - 1}"
        )


def check_cuts(function: str, name: str, cuts: Any, rows: Any, num_seqs: Any = None) -> None:
    """Raises ValueError unless [0, n1, n1 + n2, ...] is nondecreasing and ends at most at the number of rows."""
    cuts, count = known(cuts), None if num_seqs is None else known(num_seqs)
    if cuts is None or (num_seqs is not None and count is None):
        return
    cuts = cuts[: None if count is None else max(1, int(count.reshape(())) + 1)]
    if cuts[0] < 0 or (cuts[1:] < cuts[:-1]).any():
        raise ValueError(f"{function}: argument {name!r} must rise from 0, [0, n1, n1 + n2, ...], got {cuts.tolist()}")
    if isinstance(rows, int) and cuts[-1] > rows:
        raise ValueError(f"{function}: argument {name!r} ends at row {cuts[-1]}, but there are {rows} rows")


def check_groups(function: str, sizes: Any, rows: Any, of: str) -> None:
    """Raises ValueError if the sizes of groups are negative, or exceed the rows: clipping would multiply the wrong rows.

    Args:
      rows: how many there are. of: the argument that has them.
    """
    values, name = known(sizes), "group_sizes"
    if values is None:
        return
    if (values < 0).any():
        raise ValueError(
            f"{function}: argument {name!r} must be at least 0, got {values.min()}; use 0 for a group without rows"
        )
    if isinstance(rows, int) and (total := values.sum(dtype=np.int64)) > rows:
        raise ValueError(
            f"{function}: argument {name!r} has {total} rows in total, but {of!r} has {rows}; pass the number of rows of each "
            "group, not where groups begin or end"
        )


def check_slots(function: str, slots: Any, rows: Any) -> np.ndarray | None:
    """Returns the values of `slots`, or None if they are unknown.

    Raises ValueError if one is past the last row, which would be read in its place, or if two are the same row, whose gradient
    would be that of one of them.
    """
    values = known(slots)
    if values is None or not isinstance(rows, int) or not values.size:
        return values
    if values.max() >= rows:
        raise ValueError(
            f"{function}: argument 'slots' has row {values.max()}, but the last of the {rows} rows is {rows - 1}; use -1 for "
            "a slot without a row"
        )
    row, count = np.unique(values[values >= 0], return_counts=True)
    if (count > 1).any():
        raise ValueError(
            f"{function}: argument 'slots' has row {row[count > 1][0]} in {count[count > 1][0]} places, and a row may be in "
            "one; give each a copy of the row"
        )
    return values
