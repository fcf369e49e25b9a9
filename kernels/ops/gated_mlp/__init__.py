"""Gated MLP: SwiGLU and its relatives."""

from kernels._core.public import public_as_declared
from kernels.ops.gated_mlp.contract import ACTIVATIONS, op

__all__ = ["ACTIVATIONS", "gated_mlp", "op"]

gated_mlp = public_as_declared(
    op,
    """Returns (activation(x gate) * (x up)) down in x's dtype, [*lead, D].

    Args:
      x: [*lead, D]. gate, up: [D, F]. down: [F, D]. All of one dtype.
      activation: "silu" (SwiGLU), "gelu" (GeGLU), "gelu_tanh" or "relu" (ReGLU).

    The backward keeps x and the weights alone, nothing of width F, and computes the two inner products again.

    Raises:
      ValueError: a shape or dtype does not fit, or the activation is unknown; naming the argument.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.

    >>> import jax.numpy as jnp
    >>> gated_mlp(jnp.ones((2, 4)), jnp.ones((4, 8)), jnp.ones((4, 8)), jnp.ones((8, 4))).shape
    (2, 4)
    """,
)
