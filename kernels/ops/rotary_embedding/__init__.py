"""Rotary position embedding (RoPE), with linear, NTK, YaRN and Llama-3 scaling."""

from kernels._core.public import public_as_declared
from kernels.ops.rotary_embedding.contract import RopeScaling, frequencies, op

__all__ = ["RopeScaling", "frequencies", "op", "rotary_embedding"]

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

    Raises:
      ValueError: `rotary_dim` (or H) is odd, or a shape does not fit; naming the argument.

    Source: Su et al., RoFormer, 2021; Peng et al., YaRN, 2023.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 1, 1, 4))
    >>> bool((rotary_embedding(x, jnp.zeros((1, 1), jnp.int32)) == x).all())
    True
    """,
)
