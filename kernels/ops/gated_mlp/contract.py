"""The contracts of a gated MLP, and of the product of its activation and gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.engines.matmul.activations import ACTIVATIONS
from kernels.framework.backend import Case
from kernels.framework.binding import Call
from kernels.framework.config import Tunables
from kernels.framework.contract import Op
from kernels.framework.work import Work, nbytes


def activation_of(name: str) -> Callable[[jax.Array], jax.Array]:
    """Returns the elementwise function with that name. Raises ValueError listing the known names."""
    if name not in ACTIVATIONS:
        raise ValueError(f"gated_mlp: argument 'activation' = {name!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


@dataclass(frozen=True)
class GatedMLPConfig(Tunables):
    """Tunables of the kernels of the activation; None leaves the choice to the configuration chain.

    Attributes:
      block_size, num_warps: elements per program of the forward, and its warps (Triton).
      backward_block_size, backward_num_warps: the same for the backward.
      block_rows, block_cols: shape of a block (Pallas), in both directions.
      block_tokens: of the gated MLP, how many tokens have intermediates of width F at once; None for all.
    """

    block_size: int | None = None
    num_warps: int | None = None
    backward_block_size: int | None = None
    backward_num_warps: int | None = None
    block_rows: int | None = None
    block_cols: int | None = None
    block_tokens: int | None = None


def gated_activation(
    gate: Float[Array, "*lead F"], up: Float[Array, "*lead F"], *, activation: str = "silu"
) -> Float[Array, "*lead F"]:
    """Returns activation(gate) * up, computed in float32 and rounded once to the dtype of gate.

    Raises:
      ValueError: the activation is unknown.
    """
    compute = jnp.promote_types(gate.dtype, jnp.float32)
    return (activation_of(activation)(gate.astype(compute)) * up.astype(compute)).astype(gate.dtype)


def gated_mlp(
    x: Float[Array, "*lead D"],
    gate: Float[Array, "D F"],
    up: Float[Array, "D F"],
    down: Float[Array, "F D"],
    *,
    activation: str = "silu",
) -> Float[Array, "*lead D"]:
    """Returns (activation(x gate) * (x up)) down, with the matmuls accumulated and the activation computed in float32.
    Intermediates of width F have the dtype of x.

    Raises:
      ValueError: the activation is unknown.
    """
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    g, u = (jnp.dot(x, w, preferred_element_type=accumulate).astype(x.dtype) for w in (gate, up))
    h = gated_activation(g, u, activation=activation)
    return jnp.dot(h, down, preferred_element_type=accumulate).astype(x.dtype)


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of the matmuls: 3 forward; 8 backward: two for each, and gate and up recomputed."""
    matmul = 2 * call.x.size * call.dims["F"]
    weights = nbytes(call.gate, call.up, call.down)
    return Work(3 * matmul, 2 * nbytes(call.x) + weights), Work(8 * matmul, 3 * nbytes(call.x) + 2 * weights)


def work_of_activation(call: Call) -> tuple[Work, Work]:
    """Returns the work of both directions: the forward reads two arrays and writes one, the backward reads three and
    writes two."""
    return Work(6 * call.gate.size, 3 * nbytes(call.gate)), Work(12 * call.gate.size, 5 * nbytes(call.gate))


op = Op(
    gated_mlp,
    local_dims={"lead"},
    sum_dims={"F"},  # Shoeybi et al., Megatron-LM, 2019
    weights=("gate", "up", "down"),
    same_dtype=("x", "gate", "up", "down"),
    config=GatedMLPConfig,
    cases=(
        Case("small", {"lead": (2, 5), "D": 16, "F": 24}, tags=frozenset({"smoke"})),
        Case("gelu", {"lead": (3,), "D": 8, "F": 40}, {"activation": "gelu"}),
        Case("gelu_tanh", {"lead": (3,), "D": 8, "F": 40}, {"activation": "gelu_tanh"}),
        Case("relu", {"lead": (1, 2, 3), "D": 9, "F": 7}, {"activation": "relu"}),
        Case("llama_8b", {"lead": (16384,), "D": 4096, "F": 14336}, tags=frozenset({"bench", "code"})),
    ),
    work=work,
)

activation_op = Op(
    gated_activation,
    local_dims={"lead", "F"},
    same_dtype=("gate", "up"),
    config=GatedMLPConfig,
    cases=(
        Case("small", {"lead": (2, 5), "F": 24}, tags=frozenset({"smoke"})),
        Case("gelu", {"lead": (37,), "F": 133}, {"activation": "gelu"}, tags=frozenset({"code"})),
        Case("gelu_tanh", {"lead": (3,), "F": 40}, {"activation": "gelu_tanh"}),
        Case("relu", {"lead": (), "F": 7}, {"activation": "relu"}),
        Case("llama_8b", {"lead": (16384,), "F": 14336}, tags=frozenset({"bench", "code"})),
    ),
    work=work_of_activation,
)
