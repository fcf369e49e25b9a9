"""What users call: rotary_embedding, of one array or of queries and keys in one pass."""

from __future__ import annotations

import jax

from kernels.framework.public import Prepared, public
from kernels.ops.rotary_embedding.contract import RopeScaling, XPos, op, pair_op


@public(op, pair_op)
def rotary_embedding(
    x: jax.Array,
    positions: jax.Array,
    *,
    key: jax.Array | None = None,
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    xpos: XPos | None = None,
) -> Prepared:
    """Returns x with its pairs turned by position * frequency; the angles are computed in float32. With `key` (x turned, key
    turned), in one pass.

    Args:
      x: queries or keys, [B, T, N, H].
      positions: int [B, T] or [1, T].
      key: [B, T, K, H], of the dtype of x, which are the queries then: both are turned by the same angles, in one launch.
      base: theta; frequencies are base^(-2i/H), or over `rotary_dim` if given.
      scaling: `RopeScaling` for contexts longer than those of pre-training.
      interleaved: pairs are (2i, 2i + 1), as in GPT-J, instead of (i, i + H/2), as in Llama.
      rotary_dim: only the first so many entries turn.
      xpos: `XPos` lets the product of a query and a key fall with their distance: `XPos()` for queries, and for keys
        `XPos(inverse=True)`, with the same `scale_base`, `gamma` and `center`; `key` takes the other of what x takes. The
        entries that do not turn stay as they are.

    Raises:
      ValueError: `rotary_dim` (or H) is odd, or a shape does not fit; naming the argument.

    Source: Su et al., RoFormer, 2021; Peng et al., YaRN, 2023; Sun et al., A Length-Extrapolatable Transformer, 2022.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 1, 1, 4))
    >>> bool((rotary_embedding(x, jnp.zeros((1, 1), jnp.int32)) == x).all())
    True
    >>> from ejdist import XPos
    >>> query, key = rotary_embedding(x, jnp.array([[700]]), key=x, xpos=XPos())
    >>> round(float((query * key).sum()), 3)  # at distance 0 nothing has fallen
    4.0
    """
    options = {"base": base, "scaling": scaling, "interleaved": interleaved, "rotary_dim": rotary_dim, "xpos": xpos}
    if key is None:
        return Prepared(op.bind(x, positions, **options))
    return Prepared(pair_op.bind(x, key, positions, **options), returns=("query", "key"), op=pair_op)
