"""Launches of the kernels of an LSTM, a loop of one a token, and what is computed for all tokens by XLA."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
from jax import lax

from kernels.framework.binding import Call
from kernels.framework.measured import power_of_two
from kernels.framework.target import MULTIPROCESSORS
from kernels.ops.recurrent.contract import check_weights
from kernels.ops.recurrent.directions import Direction, dot
from kernels.ops.recurrent.triton_lstm import BEGINS, GOES_ON, PADDING, lstm_bwd_kernel, lstm_fwd_kernel
from kernels.toolchains.triton import triton_launch

LEAST = 16  # rows, units or channels of a tile: the least of a product
TOGETHER = 16  # tokens of an iteration of XLA's loop


class Tile(NamedTuple):
    """Rows and hidden units of a program, how many channels a product sums at a time, and what hides its loads. Programs that
    are at most half as many as multiprocessors have half of the units: a product of 8 columns is the least of Hopper's."""

    block_b: int = 64
    block_f: int = 16
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 4


FORWARD, BACKWARD = Tile(), Tile()


class States(NamedTuple):
    """What a forward leaves for its backward: hidden states before each token and after the last, in the dtype of the weights,
    and cell states, float32; [T + 1, B, F], as tokens one after another lie in few pages of memory."""

    hidden: jax.Array
    cells: jax.Array


def _sizes(of: Direction, tile: Tile, channels: int) -> dict[str, Any]:
    (B, T, _), F = of.inputs.shape, of.initial.shape[-1]
    block_b = min(tile.block_b, max(LEAST, power_of_two(B)))
    programs = triton.cdiv(F, tile.block_f) * triton.cdiv(B, block_b)
    block_f = tile.block_f // (2 if 2 * programs <= MULTIPROCESSORS else 1)
    return {
        "T": T,
        "B": B,
        "F": F,
        "BLOCK_B": block_b,
        "BLOCK_F": block_f,
        "BLOCK_K": min(tile.block_k, max(LEAST, power_of_two(channels))),
        "grid": (triton.cdiv(F, block_f), triton.cdiv(B, block_b)),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _codes(of: Direction) -> jax.Array | None:
    """Returns int32 [T, B]: whether a token begins a document, goes on, or is padding; None if all go on."""
    if of.tokens.valid is None:
        return None
    codes = jnp.where(of.tokens.begins, BEGINS.value, GOES_ON.value)
    return jnp.where(of.tokens.valid, codes, PADDING.value).astype(jnp.int32)


def _of_inputs(of: Direction) -> jax.Array:
    """Returns the gates of the inputs with all biases, [T, B, 4 F] float32."""
    w = of.weights
    biases = sum(w[n].astype(jnp.float32) for n in ("bias_ih", "bias_hh") if n in w)
    return dot("btd,gd->tbg", of.inputs, w["weight_ih"]) + biases


def _loop(T: int, body: Any, start: Any) -> Any:
    return lax.fori_loop(0, T, lambda _, carry: body(*carry), start, unroll=min(T, TOGETHER))


def forward(of: Direction) -> tuple[jax.Array, jax.Array, States]:
    """Returns (out [B, T, F], the last state [B, 1, 2, F], what a backward takes)."""
    (B, T, _), F, weight = of.inputs.shape, of.initial.shape[-1], of.weights["weight_hh"]
    h, c = of.initial[:, 0, 0], of.initial[:, 0, 1]
    hidden = jnp.zeros((T + 1, B, F), weight.dtype).at[0].set(h.astype(weight.dtype))
    cells = jnp.zeros((T + 1, B, F), jnp.float32).at[0].set(c)
    of_inputs, codes, sizes = _of_inputs(of), _codes(of), _sizes(of, FORWARD, F)
    first = 3 + (codes is not None)

    def token(step: jax.Array, *states: jax.Array) -> Any:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (step, *states)]
        return triton_launch(
            lstm_fwd_kernel,
            step,
            of_inputs,
            weight,
            codes,
            *states,
            out_shape=tuple(shapes),
            input_output_aliases={first + n: 1 + n for n in range(len(states))},
            **sizes,
        )

    _, hidden, cells, last = _loop(T, token, (jnp.zeros(1, jnp.int32), hidden, cells, h))
    out = hidden[1:]
    if of.tokens.valid is not None:
        out = jnp.where(of.tokens.valid[..., None], out, 0)
    return jnp.moveaxis(out, 0, 1), jnp.stack([last, cells[T]], axis=1)[:, None], States(hidden, cells)


def backward(of: Direction, states: States, d_out: jax.Array, d_final: jax.Array) -> tuple[Any, Any, Any]:
    """Returns (gradients of the gates [T, B, 4 F], the hidden state before each token, gradients of the initial state)."""
    (B, T, _), F, weight = of.inputs.shape, of.initial.shape[-1], of.weights["weight_hh"]
    codes, sizes = _codes(of), _sizes(of, BACKWARD, 4 * F)
    before = states.hidden[:T]
    if codes is not None:
        before = jnp.where((codes == BEGINS.value)[..., None], 0, before)
    gates = _of_inputs(of) + dot("tbf,gf->tbg", before, weight)
    of_all, first = weight.T, 5 + (codes is not None)
    d_out_by_token = jnp.moveaxis(d_out, 0, 1)

    def token(step: jax.Array, *gradients: jax.Array) -> Any:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (step, *gradients)]
        return triton_launch(
            lstm_bwd_kernel,
            step,
            gates,
            of_all,
            states.cells,
            codes,
            d_out_by_token,
            *gradients,
            out_shape=tuple(shapes),
            input_output_aliases={first + n: 1 + n for n in range(len(gradients))},
            **sizes,
        )

    d_gates = jnp.zeros((T + 1, B, 4 * F), weight.dtype)
    start = jnp.full(1, T - 1, jnp.int32), d_gates, d_final[:, 0, 0], d_final[:, 0, 1]
    _, d_gates, d_hidden, d_cell = _loop(T, token, start)
    d_first = dot("bg,gf->bf", d_gates[0], weight)
    if codes is not None:
        d_first = jnp.where((codes[0] == BEGINS.value)[:, None], 0, d_first)
    return d_gates[:T], before, jnp.stack([d_hidden + d_first, d_cell], axis=1)[:, None]


def rejects(call: Call) -> str | None:
    """Returns why the kernels cannot run a call."""
    if 0 in call.dims.values():
        return "an array has no elements"
    if (call.cell_type, call.activation) != ("lstm", "tanh"):
        return f"its kernels are of an LSTM with tanh, and this is {call.cell_type} with {call.activation}"
    if call.num_states > 1:
        return "it has several states a row"
    check_weights(call.weights, call.dims["D"], call.cell_type, call.activation, call.bidirectional)
    other = next((n for n, w in call.weights.items() if w.dtype != call.inputs.dtype), None)
    if other is not None:
        return f"its weight {other!r} is {call.weights[other].dtype} and its inputs are {call.inputs.dtype}; cast them to one"
    return None
