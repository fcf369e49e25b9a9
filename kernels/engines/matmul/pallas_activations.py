"""Activations of gated MLPs in Pallas for TPUs."""

from __future__ import annotations

from collections.abc import Callable

import jax

from kernels.engines.matmul.activations import ACTIVATIONS


def activation_in_vmem(name: str) -> Callable[[jax.Array], jax.Array]:
    """Returns the activation of that name, float32 to float32, of operations that Mosaic has: erf, but not erfc, which
    `jax.nn.gelu` uses."""
    return (lambda x: 0.5 * x * (1 + jax.lax.erf(x * 0.7071067811865476))) if name == "gelu" else ACTIVATIONS[name]
