"""Rotary position embedding (RoPE), with linear, NTK, YaRN and Llama-3 scaling, and XPos."""

from kernels._core.public import public_as_declared
from kernels.ops.rotary_embedding.contract import RopeScaling, XPos, frequencies, op

__all__ = ["RopeScaling", "XPos", "frequencies", "op", "rotary_embedding"]

rotary_embedding = public_as_declared(
    op,
    """Returns x with its pairs turned by position * frequency; the angles are computed in float32.

    Args:
      x: queries or keys, [B, T, N, H].
      positions: int [B, T] or [1, T].
      base: theta; frequencies are base^(-2i/H), or over `rotary_dim` if given.
      scaling: `RopeScaling` for contexts longer than those of pre-training.
      interleaved: pairs are (2i, 2i + 1), as in GPT-J, instead of (i, i + H/2), as in Llama.
      rotary_dim: only the first so many entries turn.
      xpos: `XPos` lets the product of a query and a key fall with their distance: `XPos()` for queries, and for keys
        `XPos(inverse=True)`, with the same `scale_base`, `gamma` and `center`. The entries that do not turn stay as they are.

    Raises:
      ValueError: `rotary_dim` (or H) is odd, or a shape does not fit; naming the argument.

    Source: Su et al., RoFormer, 2021; Peng et al., YaRN, 2023; Sun et al., A Length-Extrapolatable Transformer, 2022.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 1, 1, 4))
    >>> bool((rotary_embedding(x, jnp.zeros((1, 1), jnp.int32)) == x).all())
    True
    >>> from ejdist import XPos
    >>> query = rotary_embedding(x, jnp.array([[700]]), xpos=XPos())
    >>> key = rotary_embedding(x, jnp.array([[700]]), xpos=XPos(inverse=True))
    >>> round(float((query * key).sum()), 3)  # at distance 0 nothing has fallen
    4.0
    """,
)
