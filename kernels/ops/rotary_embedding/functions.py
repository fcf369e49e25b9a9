"""Public functions: rotary_embedding, of one array or of queries and keys in one pass."""

from __future__ import annotations

import jax

from kernels.framework.public import Prepared, public
from kernels.ops.rotary_embedding.angles import EXACT_FROM
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
    exact_from: int | None = EXACT_FROM,
) -> Prepared:
    """Returns x with its pairs rotated by position * frequency. With `key`, returns both, rotated in one pass.

    Args:
      x: queries or keys, [B, T, N, H].
      positions: int [B, T] or [1, T].
      key: [B, T, K, H], in the dtype of x, which then holds the queries: both are rotated by the same angles, in one
        launch.
      base: theta; frequencies are base^(-2i/H), or with `rotary_dim` in place of H if given.
      scaling: `RopeScaling` for contexts longer than in pre-training.
      interleaved: pairs are (2i, 2i + 1), as in GPT-J, instead of (i, i + H/2), as in Llama.
      rotary_dim: number of leading entries to rotate; default: all.
      xpos: `XPos` makes the product of a query and a key decay with their distance: `XPos()` for queries, and
        `XPos(inverse=True)` for keys, with the same `scale_base`, `gamma` and `center`; with `key`, keys use the
        opposite of what x uses. Entries that are not rotated stay unchanged.
      exact_from: the position from which on angles are exact, to 6e-7 radians, in every order and over any devices,
        because it is a function of the position alone. Before it they are float32 products, as in the common
        implementations, whose error grows with the position, to 0.008 radians at 131,072. 0: all are exact; None: none.

    Raises:
      ValueError: `rotary_dim` (or H) is odd, or a shape does not fit; naming the argument.

    Source: Su et al., RoFormer, 2021; Peng et al., YaRN, 2023; Sun et al., A Length-Extrapolatable Transformer, 2022.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 1, 1, 4))
    >>> bool((rotary_embedding(x, jnp.zeros((1, 1), jnp.int32)) == x).all())
    True
    >>> from ejdist import XPos
    >>> query, key = rotary_embedding(x, jnp.array([[700]]), key=x, xpos=XPos())
    >>> round(float((query * key).sum()), 3)  # no decay at distance 0
    4.0
    >>> far = jnp.array([[2**24, 2**24 + 1]])  # one number in float32
    >>> apart, same = (rotary_embedding(jnp.ones((1, 2, 1, 4)), far, exact_from=p) for p in (0, None))
    >>> bool((apart[:, 0] == apart[:, 1]).any()), bool((same[:, 0] == same[:, 1]).all())
    (False, True)
    """
    options = {"base": base, "scaling": scaling, "interleaved": interleaved, "rotary_dim": rotary_dim, "xpos": xpos}
    options["exact_from"] = exact_from
    if key is None:
        return Prepared(op.bind(x, positions, **options))
    return Prepared(pair_op.bind(x, key, positions, **options), returns=("query", "key"), op=pair_op)
