"""The contracts of recurrent cells and of RWKV-4's time mix: loops over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.engines.scan.chunks import DiagonalConfig
from kernels.engines.scan.recurrence import loop
from kernels.framework.binding import Call, is_array, is_float_array
from kernels.framework.contract import Op
from kernels.framework.measured import bucket
from kernels.framework.work import Work, nbytes
from kernels.ops.recurrent import cases

_ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "sigmoid": jax.nn.sigmoid}
ACTIVATIONS = tuple(_ACTIVATIONS)
# cell type -> (gates, arrays of its state): an LSTM has a hidden and a cell state.
CELLS = {"lstm": (4, 2), "gru": (3, 1), "rnn": (1, 1)}
# Exponent of an empty sum: far below any other, but finite, so that differences of two are not NaN.
EMPTY = -1e38
# Added to an exponent, it makes a weight 0; the sum over a chunk is still far from overflowing.
FORGET = -1e30


def gates_of(cell_type: str, activation: str) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the function (gates of the input, gates of the hidden state, both [B, gates F]; arrays of the state, [B, F] each)
    -> arrays of the next state.

    With s the sigmoid, and x and h the gates of the input and of the hidden state:
    lstm, gates i f g o of x + h: c = s(f) c + s(i) act(g), h = s(o) act(c); state (h, c). Hochreiter and Schmidhuber, 1997.
    gru, gates r z n: n = act(x_n + s(r) h_n), h = (1 - s(z)) n + s(z) h. Cho et al., 2014, in the form that cuDNN has.
    rnn: h = act(x + h). Elman, 1990.
    """
    act, sigmoid = _ACTIVATIONS[activation], jax.nn.sigmoid

    def lstm(x: jax.Array, h: jax.Array, _: jax.Array, c: jax.Array) -> tuple[jax.Array, ...]:
        i, f, g, o = jnp.split(x + h, 4, axis=-1)
        c = sigmoid(f) * c + sigmoid(i) * act(g)
        return sigmoid(o) * act(c), c

    def gru(x: jax.Array, h: jax.Array, before: jax.Array) -> tuple[jax.Array, ...]:
        (xr, xz, xn), (hr, hz, hn) = jnp.split(x, 3, axis=-1), jnp.split(h, 3, axis=-1)
        z, n = sigmoid(xz + hz), act(xn + sigmoid(xr + hr) * hn)
        return ((1 - z) * n + z * before,)

    def rnn(x: jax.Array, h: jax.Array, _: jax.Array) -> tuple[jax.Array, ...]:
        return (act(x + h),)

    return {"lstm": lstm, "gru": gru, "rnn": rnn}[cell_type]


def cell_of(cell_type: str, activation: str) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Returns `gates_of` with the arrays of a state in one, [B, n, F]."""
    gates = gates_of(cell_type, activation)

    def cell(x: jax.Array, h: jax.Array, state: jax.Array) -> jax.Array:
        return jnp.stack(gates(x, h, *(state[:, i] for i in range(state.shape[1]))), axis=1)

    return cell


def check_weights(
    weights: Any, width: Any, cell_type: str = "lstm", activation: str = "tanh", bidirectional: bool = False
) -> int:
    """Checks the weights for inputs of that width, and returns F.

    Raises:
      ValueError: names the argument, and the entry of 'weights'.
    """
    if not isinstance(cell_type, str) or cell_type not in CELLS:
        raise ValueError(f"recurrent: argument 'cell_type' = {cell_type!r} is unknown; use one of {', '.join(CELLS)}")
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"recurrent: argument 'activation' = {activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}"
        )
    ends = ("", "_reverse") if bidirectional else ("",)
    needed = [f"weight_{which}{end}" for end in ends for which in ("ih", "hh")]
    allowed = [*needed, *(f"bias_{which}{end}" for end in ends for which in ("ih", "hh"))]
    what = "recurrent: argument 'weights'"
    if not isinstance(weights, Mapping):
        raise ValueError(f"{what} must be a dict of arrays, {', '.join(allowed)}, got {type(weights).__name__}")
    if set(weights) - set(allowed) or set(needed) - set(weights):
        hint = "; remove torch's suffix _l0" if any("_l0" in n for n in weights) else ""
        raise ValueError(
            f"{what} must have {', '.join(needed)}, and may have {', '.join(allowed)}; got {sorted(weights)}{hint}"
        )
    for name, value in weights.items():
        if not is_array(value) or not is_float_array(value):
            raise ValueError(
                f"{what} must hold float arrays, but {name!r} is {getattr(value, 'dtype', type(value).__name__)}"
            )
    hidden = weights["weight_hh"]
    F = hidden.shape[1] if hidden.ndim == 2 else 0
    gates = CELLS[cell_type][0]
    for name, value in weights.items():
        shape = (gates * F,) if name.startswith("bias") else (gates * F, width if "_ih" in name else F)
        if value.shape != shape:
            raise ValueError(
                f"{what}: {name!r} of {cell_type} must have the shape {shape}, for {gates} gates of F = {F} (of 'weight_hh') "
                f"and D = {width} (of 'inputs'), got {value.shape}"
            )
    return F


def of_direction(weights: Mapping[str, Any], end: str) -> dict[str, Any]:
    """Returns the weights of one direction, with the suffix ("" or "_reverse") removed from their names."""
    names = [n for n in weights if n.endswith("_reverse") == bool(end)]
    return {n.removesuffix("_reverse"): weights[n] for n in names}


def recurrent(
    inputs: Float[Array, "B T D"],
    weights: dict,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B G _ F"] | None = None,
    *,
    cell_type: str = "lstm",
    activation: str = "tanh",
    bidirectional: bool = False,
    num_states: int = 1,
) -> tuple[Float[Array, "B T _"], Float[Array, "B G _ F"]]:
    """Returns (out [B, T, F], or [B, T, 2 F] if bidirectional; final state), computed in float32, see `cell_of`.

    The gates are weight_ih x + bias_ih of the input and weight_hh h + bias_hh of the hidden state. The state is h, or h
    and c for an LSTM. The states of the reverse direction follow those of the forward one; it starts at the end of each
    row and segment, and its weights have the suffix _reverse. For states and segments see
    `kernels.engines.scan.recurrence`.

    Raises:
      ValueError: missing or ill-shaped weights, an unknown cell or activation.
    """
    F = check_weights(weights, inputs.shape[2], cell_type, activation, bidirectional)
    compute_dtype = jnp.promote_types(inputs.dtype, jnp.float32)
    cell, n = cell_of(cell_type, activation), CELLS[cell_type][1]
    outs, finals = [], []
    for i, end in enumerate(("", "_reverse") if bidirectional else ("",)):
        w = jax.tree.map(lambda x: x.astype(compute_dtype), of_direction(weights, end))

        def step(state: jax.Array, x: jax.Array, w: Any = w) -> tuple[jax.Array, jax.Array]:
            of_input = x @ w["weight_ih"].T + w.get("bias_ih", 0)
            state = cell(of_input, state[:, 0] @ w["weight_hh"].T + w.get("bias_hh", 0), state)
            return state, state[:, 0]

        way = -1 if end else 1
        ids = None if segment_ids is None else segment_ids[:, ::way]
        layer_state = None if initial_state is None else initial_state[:, :, i * n : (i + 1) * n]
        start = jnp.zeros((inputs.shape[0], n, F), compute_dtype)
        out, final = loop(step, inputs[:, ::way].astype(compute_dtype), start, ids, layer_state, num_states)
        outs.append(out[:, ::way])
        finals.append(final)
    return jnp.concatenate(outs, axis=-1).astype(inputs.dtype), jnp.concatenate(finals, axis=2)


def rwkv4(
    w: Float[Array, " F"],
    u: Float[Array, " F"],
    k: Float[Array, "B T F"],
    v: Float[Array, "B T F"],
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B G 3 F"] | None = None,
    *,
    num_states: int = 1,
) -> tuple[Float[Array, "B T F"], Float[Array, "B G 3 F"]]:
    """Returns (out, final state) of RWKV-4's time mix in each channel, in float32. With the decay d = -exp(w):
    out_t = (sum_{s<t} e^{(t-1-s) d + k_s} v_s + e^{u + k_t} v_t) / (the same without v).

    The state is (a, b, p): the running sums are e^p a and e^p b, where p is the largest exponent in them (-1e38 for
    empty sums), so nothing overflows. For states and segments see `kernels.engines.scan.recurrence`.
    Source: Peng et al., RWKV, 2023, arXiv:2305.13048, appendix.
    """
    compute_dtype = jnp.promote_types(k.dtype, jnp.float32)
    decay, bonus = -jnp.exp(w.astype(compute_dtype)), u.astype(compute_dtype)

    def step(state: jax.Array, x: Any) -> tuple[jax.Array, jax.Array]:
        (a, b, p), (k, v) = (state[:, 0], state[:, 1], state[:, 2]), x
        q = jnp.maximum(p, bonus + k)
        before, weight = jnp.exp(p - q), jnp.exp(bonus + k - q)
        out = (before * a + weight * v) / (before * b + weight)
        q = jnp.maximum(p + decay, k)
        before, weight = jnp.exp(p + decay - q), jnp.exp(k - q)
        return jnp.stack([before * a + weight * v, before * b + weight, q], axis=1), out

    zeros = jnp.zeros((k.shape[0], k.shape[2]), compute_dtype)
    start = jnp.stack([zeros, zeros, zeros + EMPTY], axis=1)
    out, final = loop(
        step, (k.astype(compute_dtype), v.astype(compute_dtype)), start, segment_ids, initial_state, num_states
    )
    return out.astype(k.dtype), final


# -- how much there is to do -------------------------------------------------------------------------------------------


def _states(call: Call, size: int) -> int:
    """Returns the bytes of the initial and final states, float32."""
    return call.dims["B"] * call.num_states * size * 4 * (1 if call.initial_state is None else 2)


def work_recurrent(call: Call) -> tuple[Work, Work]:
    """Returns the work of the matmuls: 2 per direction forward; the backward has 4, and recomputes the 2."""
    gates, n = CELLS[call.cell_type]
    F, ways = call.weights["weight_hh"].shape[1], 2 if call.bidirectional else 1
    tokens = call.dims["B"] * call.dims["T"]
    matmuls = ways * 2 * tokens * gates * F * (call.dims["D"] + F)
    weights, ids = nbytes(*jax.tree.leaves(call.weights)), nbytes(call.segment_ids)
    out = tokens * ways * F * call.inputs.dtype.itemsize
    state = _states(call, ways * n * F)
    forward = Work(matmuls, nbytes(call.inputs) + weights + ids + out + state)
    return forward, Work(3 * matmuls, 2 * nbytes(call.inputs) + 2 * weights + ids + out + 2 * state)


def work_rwkv4(call: Call) -> tuple[Work, Work]:
    """Returns the work of the loop: about 20 flops per element, exponentials included; the backward recomputes it, and
    its adjoints take twice as much."""
    elements, ids, state = call.k.size, nbytes(call.segment_ids), _states(call, 3 * call.dims["F"])
    arrays = nbytes(call.w, call.u, call.k, call.v)
    forward = Work(20 * elements, arrays + nbytes(call.k) + ids + state)
    return forward, Work(60 * elements, 2 * arrays + nbytes(call.k) + ids + 2 * state)


def autotune_key_rwkv4(call: Call) -> str:
    """Returns the measurement key of a call: channels of all rows, and tokens."""
    d = call.dims
    return (
        f"{call.dtype} channels{bucket(d['B'] * d['F'], 1024, 8192, 65536)} tokens{bucket(d['T'], 2, 64, 4096, 32768)}"
    )


op = Op(
    recurrent,
    outputs=("out", "final_state"),
    local_dims={"B"},
    see_also={"T": "recurrent"},
    ordered=True,
    cases=cases.RECURRENT,
    work=work_recurrent,
)
rwkv4_op = Op(
    rwkv4,
    outputs=("out", "final_state"),
    local_dims={"B", "F"},
    see_also={"T": "rwkv4"},
    ordered=True,
    weights=("w", "u"),
    autotune_key=autotune_key_rwkv4,
    config=DiagonalConfig,
    cases=cases.RWKV4,
    work=work_rwkv4,
)
