"""The meaning of a gated MLP."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels._core.backend import Case
from kernels._core.binding import Call
from kernels._core.contract import Op
from kernels._core.work import Work, nbytes

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def activation_of(name: str) -> Callable[[jax.Array], jax.Array]:
    """Returns the elementwise function of a name. Raises ValueError naming those there are."""
    if name not in ACTIVATIONS:
        raise ValueError(f"gated_mlp: argument 'activation' = {name!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def gated_mlp(
    x: Float[Array, "*lead D"],
    gate: Float[Array, "D F"],
    up: Float[Array, "D F"],
    down: Float[Array, "F D"],
    *,
    activation: str = "silu",
) -> Float[Array, "*lead D"]:
    """Returns (activation(x gate) * (x up)) down, with matmuls accumulated and the activation computed in float32.

    Raises:
      ValueError: the activation is unknown.
    """
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    g = jnp.dot(x, gate, preferred_element_type=accumulate)
    u = jnp.dot(x, up, preferred_element_type=accumulate)
    h = (activation_of(activation)(g) * u).astype(x.dtype)
    return jnp.dot(h, down, preferred_element_type=accumulate).astype(x.dtype)


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of the matmuls: 3 forward; 8 backward, two for each and gate and up again, which nothing holds."""
    matmul = 2 * call.x.size * call.dims["F"]
    weights = nbytes(call.gate, call.up, call.down)
    return Work(3 * matmul, 2 * nbytes(call.x) + weights), Work(8 * matmul, 3 * nbytes(call.x) + 2 * weights)


op = Op(
    gated_mlp,
    local_dims={"lead"},
    sum_dims={"F"},  # Shoeybi et al., Megatron-LM, 2019
    weights=("gate", "up", "down"),
    same_dtype=("x", "gate", "up", "down"),
    cases=(
        Case("small", {"lead": (2, 5), "D": 16, "F": 24}, tags=frozenset({"smoke"})),
        Case("gelu", {"lead": (3,), "D": 8, "F": 40}, {"activation": "gelu"}),
        Case("gelu_tanh", {"lead": (3,), "D": 8, "F": 40}, {"activation": "gelu_tanh"}),
        Case("relu", {"lead": (1, 2, 3), "D": 9, "F": 7}, {"activation": "relu"}),
        Case("llama_8b", {"lead": (16384,), "D": 4096, "F": 14336}, tags=frozenset({"bench"})),
    ),
    work=work,
)
