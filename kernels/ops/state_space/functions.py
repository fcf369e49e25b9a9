"""What users call: state spaces and the convolution before them, with states in and out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels._core.binding import is_array, is_float_array
from kernels._core.contract import Op
from kernels._core.public import Prepared, public
from kernels._core.recurrence import Sequences, either, sequences
from kernels.ops.state_space.contract import check_activation, conv_op, v1_op, v2_op


def _check(op: Op, name: str, value: Any, dims: str) -> None:
    if not is_array(value) or not is_float_array(value) or value.ndim != len(dims.split()):
        got = f"{value.dtype} of shape {value.shape}" if is_array(value) else type(value).__name__
        raise ValueError(f"{op.name}: argument {name!r} must be a float array [{', '.join(dims.split())}], got {got}")
    if any(isinstance(n, int) and n == 0 for n in value.shape):
        raise ValueError(
            f"{op.name}: argument {name!r} of shape {value.shape} has no elements; give it at least one token"
        )


def _prepared(
    op: Op, arguments: dict[str, Any], of: Sequences, dims: str, state_dims: str, return_state: bool, gate: Any = None
) -> Prepared:
    """Returns the call, with what is done to its output, and to its final state where that is asked for."""
    call = op.bind(**{n: v for n, v in arguments.items() if v is not None}, **of.arguments)
    if not return_state and gate is None:
        return Prepared(call)

    def finish(out: jax.Array, final_state: jax.Array) -> Any:
        out = out if gate is None else gate(out)
        return (out, of.state(final_state)) if return_state else out

    where = tuple(dims.split())
    return Prepared(
        call, finish=finish, dims=(where, of.state_dims(tuple(state_dims.split()))) if return_state else where
    )


def _gate(x: Any, z: Any, norm_weight: Any, norm_eps: float, norm_groups: int) -> Any:
    """Returns what is done to the output of Mamba-2, None for nothing; checks its arguments."""
    name = v2_op.name
    if z is not None and (not is_array(z) or z.shape != x.shape):
        got = z.shape if is_array(z) else type(z).__name__
        raise ValueError(f"{name}: argument 'z' must be a float array of x's shape {x.shape}, got {got}")
    if norm_weight is None:
        if norm_groups != 1:
            raise ValueError(f"{name}: argument 'norm_groups' is of the norm, and there is no 'norm_weight'; give it")
        return None if z is None else lambda out: (out * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
    heads, width = x.shape[2:]
    if not is_array(norm_weight) or norm_weight.size != heads * width:
        got = norm_weight.shape if is_array(norm_weight) else type(norm_weight).__name__
        raise ValueError(
            f"{name}: argument 'norm_weight' must have a factor for each channel, [N * P] = [{heads * width}], got {got}"
        )
    if norm_groups < 1 or heads % norm_groups:
        raise ValueError(f"{name}: argument 'norm_groups' = {norm_groups} must divide the {heads} heads of 'x'")

    def gate(out: jax.Array) -> jax.Array:
        wide = out.astype(jnp.float32)
        wide = wide if z is None else wide * jax.nn.silu(z.astype(jnp.float32))
        square = jnp.mean(wide * wide, axis=-1)
        if norm_groups == 1:
            mean = jnp.mean(square, axis=-1, keepdims=True)
        else:
            each = jnp.mean(square.reshape(*square.shape[:2], norm_groups, -1), axis=-1)
            mean = jnp.repeat(each, heads // norm_groups, axis=-1)
        wide = wide * jax.lax.rsqrt(mean + norm_eps)[..., None]
        return (wide * norm_weight.reshape(heads, width).astype(jnp.float32)).astype(x.dtype)

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
    initial_state: jax.Array | None = None,
    return_state: bool = False,
    segment_ids: Any = None,
    cum_seqlens: Any = None,
    cu_seqlens: Any = None,
    state: jax.Array | None = None,
) -> Prepared:
    """Returns Mamba-2's state space, [B, T, N, P] in the dtype of x: in each head
    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T, out_t = C_t^T h_t + D x_t.

    Args:
      x: [B, T, N, P].
      dt: [B, T, N], the step, after its bias and softplus.
      A: [N], negative.
      B, C: [B, T, G, S]; G divides N, and head n reads group n // (N / G).
      D: [N], how much of x is added; None for none.
      z: [B, T, N, P], a gate: the output is multiplied by silu(z).
      norm_weight: [N * P], of an RMSNorm over all channels after the gate; None for no norm. norm_eps is added to the mean
        square, and with `norm_groups` the mean is over each such part of the heads (mamba_ssm: as many as G).
      initial_state: float32 [B, N, S, P], or with cuts [sequences, N, S, P]; default: zeros. `state` is another name.
      return_state: whether to return (out, state after the last token).
      segment_ids: int [B, T]: where the id changes the state starts from zero. A token of a negative id is padding: its output
        is 0 (before the gate), and the state passes it untouched.
      cum_seqlens: int [sequences + 1], [0, n1, n1 + n2, ...], cuts one packed row (B = 1); `cu_seqlens` is another name.

    Raises:
      ValueError: naming the argument. Unsupported: the platform asked for cannot do it.

    Source: Dao and Gu, Transformers are SSMs, 2024, arXiv:2405.21060.

    >>> import jax.numpy as jnp
    >>> one = jnp.ones((1, 3, 1, 1))
    >>> out, state = state_space_v2(one, one[..., 0], -jnp.log(2.0)[None], one, one, return_state=True)
    >>> print(out[0, :, 0, 0], state.shape)
    [1.   1.5  1.75] (1, 1, 1, 1)
    """
    _check(v2_op, "x", x, "B T N P")
    _check(v2_op, "B", B, "B T G S")
    if x.shape[2] % B.shape[2]:
        raise ValueError(
            f"state_space_v2: argument 'B' has {B.shape[2]} groups, which do not divide the {x.shape[2]} heads of 'x'; every "
            "group serves as many heads as any other"
        )
    of = sequences(
        v2_op.name,
        (x.shape[0], x.shape[1]),
        (x.shape[2], B.shape[3], x.shape[3]),
        segment_ids=segment_ids,
        cum_seqlens=cum_seqlens,
        cu_seqlens=cu_seqlens,
        initial_state=either(v2_op.name, initial_state=initial_state, state=state),
        return_state=return_state,
    )
    gate = _gate(x, z, norm_weight, norm_eps, norm_groups)
    arguments = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D}
    return _prepared(v2_op, arguments, of, "B T N Hv", "N H Hv", return_state, gate)


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
    initial_state: jax.Array | None = None,
    return_state: bool = False,
    segment_ids: Any = None,
    cum_seqlens: Any = None,
    cu_seqlens: Any = None,
    state: jax.Array | None = None,
) -> Prepared:
    """Returns Mamba's selective scan, [B, T, D] in the dtype of x: in each channel, with a state of S numbers,
    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t, out_t = C_t^T h_t + D x_t.

    Args:
      x: [B, T, D].
      dt: [B, T, D], the step, after its bias and softplus.
      A: [D, S], negative.
      B, C: [B, T, S].
      D: [D], how much of x is added; None for none.
      z: [B, T, D], a gate: the output is multiplied by silu(z).
      initial_state: float32 [B, D, S], or with cuts [sequences, D, S]; default: zeros. `state` is another name.
      return_state: whether to return (out, state after the last token).
      segment_ids: int [B, T]: where the id changes the state starts from zero. A token of a negative id is padding: its output
        is 0, and the state passes it untouched.
      cum_seqlens: int [sequences + 1], [0, n1, n1 + n2, ...], cuts one packed row (B = 1); `cu_seqlens` is another name.

    Raises:
      ValueError: naming the argument. Unsupported: the platform asked for cannot do it.

    Source: Gu and Dao, Mamba, 2023, arXiv:2312.00752.

    >>> import jax.numpy as jnp
    >>> one = jnp.ones((1, 3, 1))
    >>> print(state_space_v1(one, one, -jnp.log(2.0)[None, None], one, one, jnp.ones(1))[0, :, 0])
    [2.   2.5  2.75]
    """
    _check(v1_op, "x", x, "B T D")
    _check(v1_op, "A", A, "D S")
    if z is not None and (not is_array(z) or z.shape != x.shape):
        got = z.shape if is_array(z) else type(z).__name__
        raise ValueError(f"{v1_op.name}: argument 'z' must be a float array of x's shape {x.shape}, got {got}")
    of = sequences(
        v1_op.name,
        (x.shape[0], x.shape[1]),
        A.shape,
        segment_ids=segment_ids,
        cum_seqlens=cum_seqlens,
        cu_seqlens=cu_seqlens,
        initial_state=either(v1_op.name, initial_state=initial_state, state=state),
        return_state=return_state,
    )
    gate = None if z is None else lambda out: (out * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
    arguments = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D}
    return _prepared(v1_op, arguments, of, "B T F", "F H", return_state, gate)


@public(conv_op)
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    initial_state: jax.Array | None = None,
    return_state: bool = False,
    segment_ids: Any = None,
    cum_seqlens: Any = None,
    cu_seqlens: Any = None,
    state: jax.Array | None = None,
) -> Prepared:
    """Returns the convolution of each channel over the tokens up to its own, [B, T, D] in the dtype of x:
    out_t = activation(bias + sum_j weight[:, j] x_{t - W + 1 + j}).

    Args:
      x: [B, T, D].
      weight: [D, W]; the last tap is that of the token itself.
      bias: [D]; None for none.
      activation: "silu", or None for none.
      initial_state: float32 [B, D, W - 1], or with cuts [sequences, D, W - 1]: the inputs before the first token, the oldest
        first; default: zeros. `state` is another name.
      return_state: whether to return (out, the last W - 1 inputs): the state for the tokens that follow.
      segment_ids: int [B, T]: a window holds tokens of one segment. A token of a negative id is padding: its output is 0, and
        no window holds it.
      cum_seqlens: int [sequences + 1], [0, n1, n1 + n2, ...], cuts one packed row (B = 1); `cu_seqlens` is another name.

    Raises:
      ValueError: naming the argument. Unsupported: the platform asked for cannot do it.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[[1.0], [2.0], [3.0]]])
    >>> out, state = causal_conv1d(x, jnp.array([[10.0, 1.0]]), return_state=True)
    >>> print(out[0, :, 0], state[0, 0])
    [ 1. 12. 23.] [3.]
    """
    _check(conv_op, "x", x, "B T D")
    _check(conv_op, "weight", weight, "D W")
    check_activation(activation)
    of = sequences(
        conv_op.name,
        (x.shape[0], x.shape[1]),
        (x.shape[2], weight.shape[1] - 1),
        segment_ids=segment_ids,
        cum_seqlens=cum_seqlens,
        cu_seqlens=cu_seqlens,
        initial_state=either(conv_op.name, initial_state=initial_state, state=state),
        return_state=return_state,
    )
    arguments = {"x": x, "weight": weight, "bias": bias, "activation": activation}
    return _prepared(conv_op, arguments, of, "B T F", "F _", return_state)
