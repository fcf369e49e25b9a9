"""Rollouts between steps of training, as reinforcement learning and distillation need them: the engine takes the trainer's
parameters after each step, and the log-probabilities of the sampled tokens are the trainer's own.

    python -m examples.rollouts
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.generation import Engine
from ejdist.models.decoder import DecoderConfig, token_losses
from ejdist.models.parameters import initialise
from ejdist.operations import bind_ops

PROMPT, LENGTH = np.arange(1, 9), 24


def rewarded(tokens: list[int]) -> float:
    """Returns the reward of a text: the share of its tokens that are even."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def main(steps: int = 8, rollouts: int = 16) -> list[float]:
    """Trains a small model by REINFORCE (Williams, 1992), and returns the mean reward of each step."""
    sizes = {"model_dim": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "ffn_dim": 64}
    c = DecoderConfig(vocab_size=32, num_layers=2, **sizes)
    model = c.build()
    params, ops = initialise(model.declared, jax.random.key(0)), bind_ops(None)
    engine = Engine(model, params, slots=rollouts, length=LENGTH, chunk=len(PROMPT))

    @jax.jit
    def update(params, batch, advantages):
        def loss(params):
            return jnp.sum(advantages[:, None] * token_losses(params, batch, c, ops)) / batch["tokens"].size

        return jax.tree.map(lambda p, g: p - 2.0 * g, params, jax.grad(loss)(params))

    means = []
    for step in range(steps):
        for i in range(rollouts):
            engine.submit(PROMPT, seed=step * rollouts + i)
        while not engine.idle:
            engine.step()
        results = [*engine.results().values()]
        rewards = np.array([rewarded(result.tokens) for result in results])
        means.append(float(rewards.mean()))
        rows = np.stack([np.append(result.prompt, result.tokens) for result in results])
        targets = np.where(np.arange(LENGTH - 1) < len(PROMPT) - 1, -1, rows[:, 1:])  # what was generated alone
        batch = {"tokens": rows[:, :-1], "targets": targets, "segment_ids": np.zeros_like(targets)}
        batch["positions"] = np.broadcast_to(np.arange(LENGTH - 1), targets.shape)
        params = update(
            params, {name: jnp.asarray(x, jnp.int32) for name, x in batch.items()}, rewards - rewards.mean()
        )
        engine.use(params)
        print(f"step {step + 1}: mean reward {means[-1]:.3f}", flush=True)
    return means


if __name__ == "__main__":
    main()
