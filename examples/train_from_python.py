"""The training loop of the project from Python, with a loss and batches of one's own: the model learns to count.

The loss is the cross entropy with label smoothing (Szegedy et al. 2016, arXiv:1512.00567). Run it again and it resumes.

python examples/train_from_python.py [KEY=VALUE ...]    # keys of a recipe, run.steps=100
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.models.model import Metric
from ejdist.plugins import BoundModel, LossTerms
from ejdist.training import train
from recipes.schema import compose

B, T, V = 8, 64, 64
SMOOTHING = 0.1
RECIPE = [
    "recipe=long_context", "mesh=single", f"model.vocab_size={V}", "model.num_layers=2", "model.model_dim=32",
    "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=8", "model.ffn_dim=64", f"data.sequence_length={T}",
    f"data.global_batch={B}", "optimizer.learning_rate=1e-2", "optimizer.warmup_steps=5", "run.steps=60", "z_loss=0",
    "run.dir=outputs/train_from_python",
]  # fmt: skip


def batches(step: int) -> dict[str, np.ndarray]:
    """Returns the batch of a step, always the same one: a run that resumes asks for it again."""
    first = np.random.default_rng([0, step]).integers(0, V, (B, 1))
    tokens = (first + np.arange(T + 1)) % V
    return {"tokens": tokens[:, :T], "targets": tokens[:, 1 : T + 1]}


def smoothed(model: BoundModel, batch: Mapping[str, jax.Array]) -> LossTerms:
    """Returns the cross entropy against targets that have 1 - SMOOTHING of the probability, and all tokens the rest."""
    hidden, layers = model.hidden(batch)
    logits = jax.nn.log_softmax((hidden @ model.projection()[0]).astype(jnp.float32))
    counted = batch["targets"] >= 0
    of_target = jnp.take_along_axis(logits, jnp.maximum(batch["targets"], 0)[..., None], axis=-1)[..., 0]
    terms = -(1 - SMOOTHING) * of_target - SMOOTHING * logits.mean(axis=-1)
    accuracy = jnp.where(counted, logits.argmax(axis=-1) == batch["targets"], False).astype(jnp.float32)
    return LossTerms(
        total=jnp.where(counted, terms, 0).sum(),
        count=counted.sum(),
        layers=layers,
        metrics={"accuracy": Metric(accuracy.sum(), "mean")},
    )


def main() -> None:
    """Trains, and prints how it ended."""
    outcome = train(compose([*RECIPE, *sys.argv[1:]]), loss=smoothed, batches=batches)
    if outcome.summary is not None:
        first, last = (f"{outcome.summary[name]:.3f}" for name in ("loss_first", "loss_last"))
        print(f"step {outcome.step}, finished {outcome.finished}: loss {first} -> {last}")


if __name__ == "__main__":
    main()
