"""LSTMs by cuDNN on NVIDIA GPUs, through `jax.experimental.rnn`: whole rows of float32, in one direction or both.

cuDNN takes the weights of a call in one vector, and all it is given in float32. Products of inputs that are narrower may be of
TF32; those of float32 are exact. How much memory a call needs is asked of cuDNN when the call is traced, so that a program can
be made only where there is a GPU. The backward runs the forward again, for what cuDNN keeps of it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import rnn

from kernels.framework.binding import Call
from kernels.framework.interpret import interpreting
from kernels.ops.recurrent.contract import check_weights, op

NO_CUDNN = "cuDNN is asked when a call is traced, and cannot be here: it needs an NVIDIA GPU and JAX's CUDA plugin"


def _packed(weights: dict[str, jax.Array], bidirectional: bool) -> jax.Array:
    """Returns the weights in cuDNN's order: the matrices of each direction, then the biases; 0 for those that there are not.
    Its gates are in torch's order, as ours."""
    ends, parts = ("", "_reverse") if bidirectional else ("",), []
    for which in ("weight", "bias"):
        for end in ends:
            for of in ("ih", "hh"):
                rows = weights[f"weight_hh{end}"].shape[0]
                part = weights.get(f"{which}_{of}{end}", jnp.zeros(rows))
                parts.append(part.astype(jnp.float32).reshape(-1))
    return jnp.concatenate(parts)


def _run(
    inputs: jax.Array, weights: dict[str, jax.Array], initial: jax.Array | None, bidirectional: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, ways F], the states after the last token [B, 1, 2 ways, F]), both in float32."""
    (B, T, D), F, ways = inputs.shape, weights["weight_hh"].shape[1], 1 + bidirectional
    states = jnp.zeros((B, 1, 2 * ways, F)) if initial is None else initial.astype(jnp.float32)
    h, c = jnp.moveaxis(states.reshape(B, ways, 2, F), (2, 1), (0, 1))
    lengths = jnp.full(B, T, jnp.int32)
    arrays = inputs.astype(jnp.float32), h, c, _packed(weights, bidirectional)
    precision = (jax.lax.Precision.HIGHEST if inputs.dtype == jnp.float32 else jax.lax.Precision.HIGH,) * 2
    if interpreting():
        x, h, c, packed = arrays
        each = rnn.unpack_lstm_weights(packed, D, F, 1, bidirectional)
        with jax.default_matmul_precision("highest"):
            out, h, c = rnn.lstm_ref(x, h, c, *each, lengths, D, F, 1, 0.0, bidirectional)
    else:
        out, h, c = rnn.lstm(*arrays, lengths, D, F, 1, 0.0, bidirectional, precision)
    return out, jnp.stack([h, c], axis=1).reshape(2 * ways, B, F).swapaxes(0, 1)[:, None]


def forward(inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states):
    out, final = _run(inputs, weights, initial_state, bidirectional)
    return out.astype(inputs.dtype), final


def backward(saved, inputs, weights, segment_ids, initial_state, cell_type, activation, bidirectional, num_states):
    arrays = {"inputs": inputs, "weights": dict(weights)}
    arrays |= {} if initial_state is None else {"initial_state": initial_state}

    def run(arrays: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        return _run(arrays["inputs"], arrays["weights"], arrays.get("initial_state"), bidirectional)

    _, pull = jax.vjp(run, arrays)
    (gradients,) = pull((saved.d_out.astype(jnp.float32), saved.d_final_state.astype(jnp.float32)))
    return gradients


@functools.cache
def _has_cudnn() -> bool:
    sizes = getattr(getattr(rnn, "gpu_rnn", None), "compute_rnn_workspace_reserve_space_sizes", None)
    if sizes is None:
        return False
    try:
        sizes(8, 8, 1, 1, 1, 0.0, False, False)
    except RuntimeError:  # no library, or no GPU
        return False
    return True


def rejects(call: Call) -> str | None:
    """Returns why cuDNN cannot run a call."""
    if 0 in call.dims.values():
        return "an array has no elements"
    if (call.cell_type, call.activation) != ("lstm", "tanh"):
        return f"JAX has cuDNN's LSTM with tanh alone, and this is {call.cell_type} with {call.activation}"
    if call.segment_ids is not None or call.num_states > 1:
        return "it has documents or padding, which are known only when the call runs: cuDNN takes whole rows"
    check_weights(call.weights, call.dims["D"], call.cell_type, call.activation, call.bidirectional)
    if any(jnp.dtype(w.dtype).itemsize > 4 for w in call.weights.values()):
        return "its weights are wider than float32"
    return None if interpreting() or _has_cudnn() else NO_CUDNN


op.register(forward, backward, platforms={"cuda"}, dtypes={"float32", "bfloat16", "float16"}, rejects=rejects)
