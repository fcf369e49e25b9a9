"""Public functions: state spaces and the convolution before them, with states in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from kernels.engines.scan.recurrence import Where, described, prepared, sizes
from kernels.framework.binding import is_array, is_float_array
from kernels.framework.public import Prepared, public
from kernels.ops.state_space.contract import check_activation, conv_op, v1_op, v2_op


def _unchanged(out: jax.Array) -> jax.Array:
    return out


def _gated(name: str, x: jax.Array, z: Any) -> Callable[[jax.Array], jax.Array]:
    """Checks the gate `z` of an `x`, and returns the function that applies it to the output."""
    if z is None:
        return _unchanged
    if not is_array(z) or not is_float_array(z) or z.shape != x.shape:
        raise ValueError(f"{name}: argument 'z' must be a float array of x's shape {x.shape}, got {described(z)}")
    return lambda out: (out * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)


def _gated_and_normed(
    name: str, x: jax.Array, z: Any, norm_weight: Any, norm_eps: float, norm_groups: int
) -> Callable[[jax.Array], jax.Array]:
    """Checks Mamba-2's gate and norm, and returns the function that applies them to the output."""
    gated = _gated(name, x, z)
    if norm_weight is None:
        if norm_groups != 1:
            raise ValueError(f"{name}: argument 'norm_groups' requires 'norm_weight'")
        return gated
    heads, width = x.shape[2:]
    if not isinstance(norm_eps, (int, float)) and not is_float_array(norm_eps):
        raise ValueError(f"{name}: argument 'norm_eps' must be a number, got {described(norm_eps)}")
    if not is_array(norm_weight) or not is_float_array(norm_weight) or norm_weight.size != heads * width:
        raise ValueError(
            f"{name}: argument 'norm_weight' must have one factor per channel, [N * P] = [{heads * width}], got "
            f"{described(norm_weight)}"
        )
    if norm_groups < 1 or heads % norm_groups:
        raise ValueError(f"{name}: argument 'norm_groups' = {norm_groups} must divide the {heads} heads of 'x'")

    def gate(out: jax.Array) -> jax.Array:
        x32 = out.astype(jnp.float32)
        x32 = x32 if z is None else x32 * jax.nn.silu(z.astype(jnp.float32))
        square = jnp.mean(x32 * x32, axis=-1)
        if norm_groups == 1:
            mean = jnp.mean(square, axis=-1, keepdims=True)
        else:
            each = jnp.mean(square.reshape(*square.shape[:2], norm_groups, -1), axis=-1)
            mean = jnp.repeat(each, heads // norm_groups, axis=-1)
        x32 = x32 * jax.lax.rsqrt(mean + norm_eps)[..., None]
        return (x32 * norm_weight.reshape(heads, width).astype(jnp.float32)).astype(x.dtype)

    return gate


@public(v2_op)
def state_space_v2(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    *,
    z: jax.Array | None = None,
    norm_weight: jax.Array | None = None,
    norm_eps: float = 1e-5,
    norm_groups: int = 1,
    state: jax.Array | None = None,
    return_state: bool = False,
    **where: Unpack[Where],
) -> Prepared:
    """Returns Mamba-2's state space, [B, T, N, P] in the dtype of x: in each head
    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T, out_t = C_t^T h_t + D x_t.

    Args:
      x: [B, T, N, P].
      dt: [B, T, N], the step size, after its bias and softplus.
      A: [N], negative.
      B, C: [B, T, G, S]; G divides N, and head n reads group n // (N / G).
      D: [N], the weight of the skip connection from x; None for no skip connection.
      z: [B, T, N, P], a gate: the output is multiplied by silu(z).
      norm_weight: [N * P], weight of an RMSNorm over all channels after the gate; None for no norm. norm_eps is added
        to the mean square. With `norm_groups` the heads are split into that many groups, each with its own mean (in
        mamba_ssm, G).
      state: [B, N, S, P], float32: the state before the first token; default: zeros.
      return_state: whether to return (out, state after the last token).

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    Source: Dao and Gu, Transformers are SSMs, 2024, arXiv:2405.21060.

    >>> import jax.numpy as jnp
    >>> one = jnp.ones((1, 3, 1, 1))
    >>> out, state = state_space_v2(one, one[..., 0], -jnp.log(2.0)[None], one, one, return_state=True)
    >>> print(out[0, :, 0, 0], state.shape)
    [1.   1.5  1.75] (1, 1, 1, 1)
    """
    sizes(v2_op.name, {"x": (x, "B T N P"), "B": (B, "B T G S")})
    if x.shape[2] % B.shape[2]:
        raise ValueError(
            f"state_space_v2: argument 'B' has {B.shape[2]} groups, which do not divide the {x.shape[2]} heads of 'x'"
        )
    arguments = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D}
    shape = (*x.shape[:3], B.shape[3], x.shape[3])
    finish = _gated_and_normed(v2_op.name, x, z, norm_weight, norm_eps, norm_groups)
    return prepared(v2_op, v2_op.name, arguments, shape, where, state=state, return_state=return_state, finish=finish)


@public(v1_op)
def state_space_v1(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    *,
    z: jax.Array | None = None,
    state: jax.Array | None = None,
    return_state: bool = False,
    **where: Unpack[Where],
) -> Prepared:
    """Returns Mamba's selective scan, [B, T, D] in the dtype of x: in each channel, with a state of size S,
    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t, out_t = C_t^T h_t + D x_t.

    Args:
      x: [B, T, D].
      dt: [B, T, D], the step size, after its bias and softplus.
      A: [D, S], negative.
      B, C: [B, T, S].
      D: [D], the weight of the skip connection from x; None for no skip connection.
      z: [B, T, D], a gate: the output is multiplied by silu(z).
      state: [B, D, S], float32: the state before the first token; default: zeros.
      return_state: whether to return (out, state after the last token).

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    Source: Gu and Dao, Mamba, 2023, arXiv:2312.00752.

    >>> import jax.numpy as jnp
    >>> one = jnp.ones((1, 3, 1))
    >>> print(state_space_v1(one, one, -jnp.log(2.0)[None, None], one, one, jnp.ones(1))[0, :, 0])
    [2.   2.5  2.75]
    """
    sizes(v1_op.name, {"x": (x, "B T D"), "A": (A, "D S")})
    arguments = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D}
    shape = (*x.shape[:2], *A.shape)
    finish = _gated(v1_op.name, x, z)
    return prepared(v1_op, v1_op.name, arguments, shape, where, state=state, return_state=return_state, finish=finish)


@public(conv_op)
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    state: jax.Array | None = None,
    return_state: bool = False,
    **where: Unpack[Where],
) -> Prepared:
    """Returns the convolution of each channel over the tokens up to its own, [B, T, D] in the dtype of x:
    out_t = activation(bias + sum_j weight[:, j] x_{t - W + 1 + j}).

    Args:
      x: [B, T, D].
      weight: [D, W]; the last tap is for the token itself.
      bias: [D], or None.
      activation: "silu" or None.
      state: [B, D, W - 1], float32: the inputs before the first token, oldest first; default: zeros. A window holds
        tokens of one segment, and no padding.
      return_state: whether to return (out, the last W - 1 inputs), the state for the following tokens.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[[1.0], [2.0], [3.0]]])
    >>> out, state = causal_conv1d(x, jnp.array([[10.0, 1.0]]), return_state=True)
    >>> print(out[0, :, 0], state[0, 0])
    [ 1. 12. 23.] [3.]
    """
    sizes(conv_op.name, {"x": (x, "B T D"), "weight": (weight, "D W")})
    check_activation(activation)
    arguments = {"x": x, "weight": weight, "bias": bias, "activation": activation}
    shape = (*x.shape, weight.shape[1] - 1)
    return prepared(conv_op, conv_op.name, arguments, shape, where, state=state, return_state=return_state)
