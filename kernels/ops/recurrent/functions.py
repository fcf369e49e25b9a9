"""Public functions: recurrent cells over padded or packed sequences, and RWKV-4's time mix."""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from kernels.engines.scan.recurrence import Where, described, either, integers, prepared, sequences, sizes
from kernels.framework.binding import is_array, is_float_array
from kernels.framework.public import Prepared, public
from kernels.ops.recurrent.contract import CELLS, check_weights, op, rwkv4_op


def _of_lengths(lengths: Any, segment_ids: Any, B: Any, T: Any) -> Any:
    if lengths is None:
        return segment_ids
    if segment_ids is not None:
        raise ValueError("recurrent: arguments 'lengths' and 'segment_ids' both define the valid tokens; pass only one")
    each = integers(lengths)
    if each is None or each.shape != (B,):
        got = described(lengths if each is None else each)
        raise ValueError(f"recurrent: argument 'lengths' must be integers [B] = [{B}], got {got}")
    return jnp.where(jnp.arange(T) < jnp.asarray(each)[:, None], 0, -1)


def _stacked(hidden: Any, cell_type: str, bidirectional: bool, count: Any, F: int) -> Any:
    """Returns hidden as [count, rows, F]: the rows are h, or h and c, of each direction."""
    if hidden is None:
        return None
    n = CELLS[cell_type][1]
    parts = list(hidden) if isinstance(hidden, (tuple, list)) else [hidden]
    expected = (2, count, F) if bidirectional else (count, F)
    if not 1 <= len(parts) <= n or any(not is_array(x) or not is_float_array(x) or x.shape != expected for x in parts):
        got = ", ".join(str(getattr(x, "shape", type(x).__name__)) for x in parts)
        form = "(h, c), or h alone for c = 0," if n == 2 else "h"
        raise ValueError(
            f"recurrent: argument 'hidden' of {cell_type} must be {form} of float arrays "
            f"{'[2, B, F]' if bidirectional else '[B, F]'} = {list(expected)} (packed: sequences for B), got {got}"
        )
    parts += [jnp.zeros_like(parts[0])] * (n - len(parts))
    ways = [[x[i] for x in parts] for i in range(2)] if bidirectional else [parts]
    return jnp.stack([x for way in ways for x in way], axis=1)


@public(op)
def recurrent(
    inputs: jax.Array,
    hidden: Any = None,
    weights: Any = None,
    cell_type: str = "lstm",
    bidirectional: bool = False,
    activation: str = "tanh",
    *,
    lengths: Any = None,
    return_state: bool = False,
    **where: Unpack[Where],
) -> Prepared:
    """Returns the hidden states of a recurrent layer, [B, T, F] in the dtype of inputs; [B, T, 2 F] if bidirectional.

    With the gates x_t = weight_ih inputs_t + bias_ih and h_t = weight_hh h_{t-1} + bias_hh, and s the sigmoid:
      "lstm", gates i f g o: c_t = s(f) c_{t-1} + s(i) act(g), h_t = s(o) act(c_t), each gate of x_t + h_t.
      "gru", gates r z n: n = act(x_n + s(r) h_n), h_t = (1 - s(z)) n + s(z) h_{t-1}.
      "rnn": h_t = act(x_t + h_t).

    Args:
      inputs: [B, T, D].
      hidden: the state before the first token: h [B, F], or for an LSTM (h, c), where h alone means c = 0.
        Bidirectional: [2, B, F], forward and reverse. Packed: sequences instead of B. Default: zeros.
      weights: dict of weight_ih [gates * F, D], weight_hh [gates * F, F] and optionally bias_ih and bias_hh [gates *
        F]. If bidirectional, names for the reverse direction end in _reverse. Layout, gate order and names are those of
        torch, without its suffix _l0.
      cell_type: "lstm", "gru" or "rnn".
      bidirectional: whether to run in reverse too, over each row or segment, with a separate state.
      activation: "tanh", "relu" or "sigmoid".
      lengths: int [B], number of valid tokens in each row; the rest is padding. Alternative to segment_ids.
      return_state: whether to return (out, the state after the last token), in the form of `hidden`, float32.

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    >>> import jax.numpy as jnp
    >>> weights = {"weight_ih": jnp.eye(2), "weight_hh": jnp.eye(2)}
    >>> print(recurrent(jnp.ones((1, 3, 2)), None, weights, "rnn", activation="relu")[0])
    [[1. 1.]
     [2. 2.]
     [3. 3.]]
    """
    B, T, D = sizes(op.name, {"inputs": (inputs, "B T D")}).values()
    F = check_weights(weights, D, cell_type, activation, bidirectional)
    ids = _of_lengths(lengths, where.get("segment_ids"), B, T)
    cuts = either(op.name, cum_seqlens=where.get("cum_seqlens"), cu_seqlens=where.get("cu_seqlens"))
    count = B if cuts is None else np.size(integers(cuts)) - 1
    n, ways = CELLS[cell_type][1], 2 if bidirectional else 1
    hidden = either(op.name, hidden=hidden, initial_state=where.get("initial_state"))
    state = _stacked(hidden, cell_type, bidirectional, count, F)
    sequence_arguments = {"segment_ids": ids, "cum_seqlens": cuts, "initial_state": state}
    of = sequences(op.name, (B, T), (ways * n, F), **sequence_arguments, return_state=return_state)
    options = {"cell_type": cell_type, "activation": activation, "bidirectional": bidirectional}
    cut = of.cuts if lengths is None else "lengths"
    call = op.bind(inputs=inputs, weights=dict(weights), **of.arguments, **options)
    if not return_state:
        return Prepared(call, cuts=cut)

    def finish(out: jax.Array, final_state: jax.Array) -> Any:
        rows = of.state(final_state)
        parts = [rows[:, i::n] for i in range(n)]
        parts = [jnp.moveaxis(x, 1, 0) if bidirectional else x[:, 0] for x in parts]
        return out, tuple(parts) if n == 2 else parts[0]

    dims = ("_", *of.state_dims(("F",))) if bidirectional else of.state_dims(("F",))
    return Prepared(call, finish=finish, dims=(("B", "T", "_"), *(dims,) * n), cuts=cut)


@public(rwkv4_op, module="RWKV4")
def rwkv4(
    w: jax.Array,
    u: jax.Array,
    k: jax.Array,
    v: jax.Array,
    state: jax.Array | None = None,
    *,
    return_state: bool = False,
    **where: Unpack[Where],
) -> Prepared:
    """Returns RWKV-4's time mix (wkv) in each channel, [B, T, D] in the dtype of k. With the decay d = -exp(w):
    out_t = (sum_{s<t} e^{(t-1-s) d + k_s} v_s + e^{u + k_t} v_t) / (sum_{s<t} e^{(t-1-s) d + k_s} + e^{u + k_t}).

    Args:
      w: [D], the decay parameter ("time_decay").
      u: [D], the bonus of the current token ("time_first").
      k, v: [B, T, D].
      state: [B, 3, D], float32: a, b and p before the first token, for running sums e^p a and e^p b; default:
        (0, 0, -1e38).
      return_state: whether to return (out, state after the last token).

    Raises:
      ValueError: names the argument. Unsupported: the requested backend cannot run the call.

    Source: Peng et al., RWKV, 2023, arXiv:2305.13048.

    >>> import jax.numpy as jnp
    >>> k, v = jnp.zeros((1, 3, 1)), jnp.array([[[1.0], [2.0], [6.0]]])
    >>> print(rwkv4(jnp.array([-100.0]), jnp.zeros(1), k, v)[0, :, 0])  # no decay: the mean so far
    [1.  1.5 3. ]
    """
    B, T, D = sizes(rwkv4_op.name, {"k": (k, "B T D")}).values()
    arguments = {"w": w, "u": u, "k": k, "v": v}
    return prepared(rwkv4_op, rwkv4_op.name, arguments, (B, T, 3, D), where, state=state, return_state=return_state)
