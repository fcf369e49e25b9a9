"""What users call: layer_norm, and the norm with its projection."""

from __future__ import annotations

import jax

from kernels.framework.public import Prepared, public, public_as_declared
from kernels.ops.layer_norm.contract import add_op, linear_op, op


@public(op, add_op)
def layer_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    eps: float = 1e-5,
) -> Prepared:
    """Returns (x - mean) / sqrt(variance + eps) * weight + bias, over D, computed in float32, in the dtype of x, [*lead, D];
    with `residual` (that of x + residual, x + residual).

    Args:
      x: [*lead, D].
      weight, bias: [D], one factor and one summand for each feature, of any float dtype; None for none.
      residual: [*lead, D], the residual stream that x is added to. The new stream is returned second, in the dtype of
        `residual`; it is rounded before it is normalised. One pass reads and writes what two would.
      eps: added to the variance, which is the mean of the squares, not that over D - 1.

    Raises:
      ValueError: shapes disagree, naming the argument. Unsupported: the platform asked for cannot do it.

    >>> import jax.numpy as jnp
    >>> print(layer_norm(jnp.array([1.0, 2.0, 3.0])).round(3))
    [-1.225  0.     1.225]
    >>> out, stream = layer_norm(jnp.array([0.0, 2.0, 4.0]), residual=jnp.array([1.0, 0.0, -1.0]))
    >>> print(out.round(3), stream)
    [-1.225  0.     1.225] [1. 2. 3.]
    """
    if residual is None:
        return Prepared(op.bind(x, weight, bias, eps=eps))
    return Prepared(add_op.bind(x, residual, weight, bias, eps=eps), returns=("out", "stream"), op=add_op)


layer_norm_linear = public_as_declared(
    linear_op,
    """Returns layer_norm(x) times projection, in the dtype of x, [*lead, F]: a norm and the projection after it, as of
    queries, keys and values in one.

    For the backward x alone is kept; the normalised x, which the gradient of the projection needs, is computed again.

    Args:
      x: [*lead, D].
      weight, bias: [D], of the norm, of any float dtype; None for none.
      projection: [D, F], of the dtype of x.
      eps: as of `layer_norm`.

    Raises:
      ValueError: shapes or dtypes disagree, naming the argument.

    >>> import jax.numpy as jnp
    >>> print(layer_norm_linear(jnp.array([1.0, 2.0, 3.0]), None, None, jnp.eye(3)[:, :2]).round(3))
    [-1.225  0.   ]
    """,
)
