"""Public functions: rms_norm, its cotangents, and rms_norm fused with a projection."""

from __future__ import annotations

import jax

from kernels.framework.public import Prepared, public, public_as_declared
from kernels.ops.rms_norm.contract import add_op, cotangents_op, linear_op, op


@public(op, add_op)
def rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> Prepared:
    """Returns x / sqrt(mean(x², over D) + eps) * weight, computed in float32, in the dtype of x, [*lead, D]; with `residual`,
    (rms_norm of x + residual, x + residual).

    Args:
      x: [*lead, D].
      weight: [D], a scale per feature, in any float dtype, or None.
      residual: [*lead, D], the residual stream that x is added to. The new stream is the second output, in the dtype of
        `residual`, and is rounded before the norm. Fused, this takes one pass instead of two.
      eps: added to the mean square.
      zero_centered: the scale is 1 + weight, as in Gemma.

    Raises:
      ValueError: shapes disagree, or `zero_centered` without `weight`. Unsupported: the requested platform does not support
        the call.

    >>> import jax.numpy as jnp
    >>> print(rms_norm(jnp.array([3.0, 4.0])).round(3))
    [0.849 1.131]
    >>> out, stream = rms_norm(jnp.array([1.0, 3.0]), residual=jnp.array([2.0, 1.0]))
    >>> print(out.round(3), stream)
    [0.849 1.131] [3. 4.]
    """
    options = {"eps": eps, "zero_centered": zero_centered}
    if residual is None:
        return Prepared(op.bind(x, weight, **options))
    return Prepared(add_op.bind(x, residual, weight, **options), returns=("out", "stream"), op=add_op)


rms_norm_linear = public_as_declared(
    linear_op,
    """Returns rms_norm(x) times projection, in the dtype of x, [*lead, F]: a norm and the projection after it, such as a
    fused QKV projection.

    Only x is saved for the backward, which recomputes the normalised x for the gradient of the projection.

    Args:
      x: [*lead, D].
      weight: [D], of the norm, in any float dtype, or None.
      projection: [D, F], in the dtype of x.
      eps, zero_centered: as in `rms_norm`.

    Raises:
      ValueError: shapes or dtypes disagree, or `zero_centered` without `weight`; naming the argument.

    >>> import jax.numpy as jnp
    >>> print(rms_norm_linear(jnp.array([3.0, 4.0]), None, jnp.eye(2)).round(3))
    [0.849 1.131]
    """,
)

rms_norm_cotangents = public_as_declared(
    cotangents_op,
    """Returns (cotangent of x, cotangent of weight), given d, that of `rms_norm(x, weight)`: for a backward of its own, which
    kept rstd and need not run the norm again.

    Args:
      x: [*lead, D].
      weight: [D], in any float dtype.
      rstd: float32 [*lead], 1 / sqrt(mean(x², over D) + eps), as `normalize_both_ways` returns it.
      d: [*lead, D], in the dtype of x.

    Raises:
      ValueError: shapes or dtypes disagree; naming the argument.

    >>> import jax.numpy as jnp
    >>> dx, dweight = rms_norm_cotangents(jnp.array([1.0, 1.0]), jnp.ones(2), jnp.array(1.0), jnp.array([1.0, 0.0]))
    >>> print(dx, dweight)
    [ 0.5 -0.5] [1. 0.]
    """,
    returns=cotangents_op.outputs,
)
