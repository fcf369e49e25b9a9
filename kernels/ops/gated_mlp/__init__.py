"""Gated MLP: SwiGLU and its relatives, and the product of activation and gate alone."""

from kernels.engines.matmul.activations import ACTIVATIONS
from kernels.framework.public import public_as_declared
from kernels.ops.gated_mlp.contract import GatedMLPConfig, activation_op, op
from kernels.ops.gated_mlp.matmuls import block_tokens

__all__ = ["ACTIVATIONS", "GatedMLPConfig", "activation_op", "block_tokens", "gated_activation", "gated_mlp", "op"]

gated_mlp = public_as_declared(
    op,
    """Returns (activation(x gate) * (x up)) down in x's dtype, [*lead, D].

    Args:
      x: [*lead, D]. gate, up: [D, F]. down: [F, D]. All of the same dtype.
      activation: "silu" (SwiGLU), "gelu" (GeGLU), "gelu_tanh" or "relu" (ReGLU).

    The backward stores only x and the weights, nothing of width F, and recomputes the two inner products. Intermediates
    of width F are stored in x's dtype; the activation is computed in float32.

    Raises:
      ValueError: a shape or dtype does not fit, or the activation is unknown; naming the argument.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.

    >>> import jax.numpy as jnp
    >>> gated_mlp(jnp.ones((2, 4)), jnp.ones((4, 8)), jnp.ones((4, 8)), jnp.ones((8, 4))).shape
    (2, 4)
    """,
)

gated_activation = public_as_declared(
    activation_op,
    """Returns activation(gate) * up, computed in float32, in their dtype, [*lead, F].

    Args:
      gate, up: [*lead, F], of the same dtype.
      activation: "silu", "gelu", "gelu_tanh" or "relu".

    One pass over memory in each direction. The backward stores only gate and up, and recomputes the activation.

    Raises:
      ValueError: a shape or dtype does not fit, or the activation is unknown; naming the argument.

    >>> import jax.numpy as jnp
    >>> print(gated_activation(jnp.array([-1.0, 2.0]), jnp.array([1.0, 3.0]), activation="relu"))
    [0. 6.]
    """,
)
