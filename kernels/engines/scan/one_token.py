"""One token of each row of a recurrence, for kernels that read a state, change it and store it: arguments and gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.framework.binding import is_float_array
from kernels.framework.contract import Op
from kernels.framework.execute import Saved


class Token(NamedTuple):
    """One token of each of M rows. Head n of N reads head n // (N / K) of an array with K heads. Arrays of any float dtype.

    Attributes:
      q: [M, KQ, H]. k: [M, KK, H]. v: [M, KV, Hv]; all may have a dim T = 1 after the first, as what follows.
      a: log decays, [M, N] or [M, N, H], or None. w: weights of what is written, [M, N], or None for 1.
      skip: [N], or None for 0. bonus: [N, H], or None.
      read, back: [M, N, H]: what reads the state before its decay, and what writes that back; or None.
      delta: whether the token replaces what the state has for its key.
      norm_eps: queries and keys are divided by sqrt(|x|^2 + norm_eps); 0: they are not.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    a: jax.Array | None = None
    w: jax.Array | None = None
    skip: jax.Array | None = None
    bonus: jax.Array | None = None
    read: jax.Array | None = None
    back: jax.Array | None = None
    delta: bool = False
    norm_eps: float = 0.0

    @property
    def arrays(self) -> tuple[jax.Array | None, ...]:
        return self.q, self.k, self.v, self.a, self.w, self.skip, self.bonus, self.read, self.back


def gradients(op: Op, saved: Saved, arrays: dict[str, Any], **options: Any) -> dict[str, jax.Array]:
    """Returns the gradients of one token by argument: those of the contract, which computes in float32: the gradient of a
    decay is a difference of products with the state. XLA passes over the states a few times; a chunk of one token would be as
    much work as a full one.

    Args:
      arrays: the arguments by name, None for those that are not there. options: the static ones.
    """
    floats = {n: x for n, x in arrays.items() if x is not None and is_float_array(x)}
    others = {n: x for n, x in arrays.items() if n not in floats}
    with jax.default_matmul_precision("highest"):
        outputs, pull = jax.vjp(lambda f: op.function(**f, **others, **options), floats)
        cotangents = (saved[f"d_{name}"] for name in op.outputs)
        return pull(tuple(jnp.zeros_like(y) if c is None else c.astype(y.dtype) for c, y in zip(cotangents, outputs)))[
            0
        ]


def one_token(T: Any, num_states: int) -> bool:
    """Returns whether a call is one token of each row, and its only state: what kernels of one token compute."""
    return T == 1 and num_states == 1
