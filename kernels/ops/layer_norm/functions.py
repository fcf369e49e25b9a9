"""Public functions: layer_norm, and layer_norm fused with a projection."""

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
    with `residual`, (layer_norm of x + residual, x + residual).

    Args:
      x: [*lead, D].
      weight, bias: [D], a scale and an offset per feature, in any float dtype, or None.
      residual: [*lead, D], the residual stream that x is added to. The new stream is the second output, in the dtype of
        `residual`, and is rounded before the norm. Fused, this takes one pass instead of two.
      eps: added to the variance, which divides by D, not D - 1.

    Raises:
      ValueError: shapes disagree, naming the argument. Unsupported: the requested platform does not support the call.

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
    """Returns layer_norm(x) times projection, in the dtype of x, [*lead, F]: a norm and the projection after it, such as a
    fused QKV projection.

    Only x is saved for the backward, which recomputes the normalised x for the gradient of the projection.

    Args:
      x: [*lead, D].
      weight, bias: [D], of the norm, in any float dtype, or None.
      projection: [D, F], in the dtype of x.
      eps: as in `layer_norm`.

    Raises:
      ValueError: shapes or dtypes disagree, naming the argument.

    >>> import jax.numpy as jnp
    >>> print(layer_norm_linear(jnp.array([1.0, 2.0, 3.0]), None, None, jnp.eye(3)[:, :2]).round(3))
    [-1.225  0.   ]
    """,
)
