"""A layer of experts trained by itself: the router's losses, its bias, and what a log says of it.

python examples/moe_layer.py    # seconds, on any device
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from ejdist import moe
from ejdist.experts import summary, update_bias

B, T, D, E, F, K = 4, 32, 16, 8, 32, 2
STEPS, BALANCE, Z, RATE = 40, 1e-2, 1e-4, 2e-2
SHAPES = {"router": (D, E), "gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}


def loss(params: dict, bias: jax.Array, x: jax.Array, targets: jax.Array, segment_ids: jax.Array) -> tuple:
    """Returns the mean squared error plus what keeps the experts balanced, and the statistics of the router."""
    out, stats = moe(x, **params, top_k=K, score="sigmoid", bias=bias, balance="sequence", segment_ids=segment_ids)
    error = jnp.where(segment_ids[..., None] >= 0, jnp.square(out - targets), 0).sum() / (stats.tokens * D)
    # Losses are sums over tokens, so that microbatches and devices add theirs up before this division.
    return error + (BALANCE * stats.balance_loss + Z * stats.z_loss) / stats.tokens, stats


def main() -> None:
    """Trains, and prints what the router does."""
    keys = dict(zip([*SHAPES, "x", "targets"], jax.random.split(jax.random.key(0), len(SHAPES) + 2), strict=True))
    params = {name: shape[-2] ** -0.5 * jax.random.normal(keys[name], shape) for name, shape in SHAPES.items()}
    x = jax.random.normal(keys["x"], (B, T, D)).at[..., 0].set(2.0)  # what all tokens share makes them like one expert
    targets = jnp.sin(3 * x @ jax.random.normal(keys["targets"], (D, D)) / D)
    # Two documents in a row, and padding after them, which no expert sees.
    segment_ids = jnp.broadcast_to(jnp.where(jnp.arange(T) < 28, jnp.arange(T) // 14, -1), (B, T))
    optimizer = optax.adam(1e-2)
    state, bias = optimizer.init(params), jnp.zeros(E)

    @jax.jit
    def step(params: dict, state: optax.OptState, bias: jax.Array) -> tuple:
        (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(params, bias, x, targets, segment_ids)
        updates, state = optimizer.update(gradients, state, params)
        # The bias has no gradient: once a step it moves by the counts of the whole step.
        bias = update_bias(bias, stats.counts, RATE)
        return optax.apply_updates(params, updates), state, bias, value, stats

    for i in range(STEPS):
        params, state, bias, value, stats = step(params, state, bias)
        if i % 10 == 0 or i == STEPS - 1:
            said = ", ".join(f"{name} {float(x):.2f}" for name, x in summary(stats).items())
            print(f"step {i:2d} loss {float(value):.4f} counts {stats.counts.tolist()} {said}")


if __name__ == "__main__":
    main()
