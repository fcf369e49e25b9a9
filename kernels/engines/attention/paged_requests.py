"""Where queries and keys of requests are, for every engine of attention over pages."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Requests(NamedTuple):
    """Where queries and keys of requests are.

    Attributes:
      lens: int32 [R]. tables: int32 [R, pages of the longest]; None: page r of the cache is that of request r.
      cuts: int32 [R + 1], or None where each request has `each` queries.
      starts: int32 [R], the first key of a request, or None for 0.
    """

    lens: jax.Array
    tables: jax.Array | None
    cuts: jax.Array | None = None
    starts: jax.Array | None = None
    each: int | None = None
