"""Root mean square normalisation."""

from kernels._core.public import public_as_declared
from kernels.ops.rms_norm.contract import RMSNormConfig, op

__all__ = ["RMSNormConfig", "op", "rms_norm"]

rms_norm = public_as_declared(
    op,
    """Returns x / sqrt(mean(x², over D) + eps) * weight, computed in float32, in the dtype of x, [*lead, D].

    Args:
      x: [*lead, D].
      weight: [D], one factor for each feature, of any float dtype; None for none.
      eps: added to the mean square.
      zero_centered: the factor is 1 + weight, as in Gemma.

    Raises:
      ValueError: shapes disagree, or `zero_centered` without `weight`. Unsupported: the platform asked for cannot do it.

    >>> import jax.numpy as jnp
    >>> print(rms_norm(jnp.array([3.0, 4.0])).round(3))
    [0.849 1.131]
    """,
)
