"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, equation 7), as a loss with its source of pairs.

With log-probabilities of a completion given its prompt, of the trained model and of the model as it started,

    loss = -log sigmoid(beta ((chosen - chosen at the start) - (rejected - rejected at the start)))

averaged over pairs. Rows of FILE.jsonl have three texts: prompt, chosen, rejected.

python -m launch.train plugins=[examples.dpo_loss] recipe=long_context loss=dpo dpo.beta=0.1 z_loss=0 \
    data=files data.source=pairs:FILE.jsonl model.init_from=DIR run.dir=outputs/dpo
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.models.model import Metric
from ejdist.plugins import BoundModel, LossTerms, Reference, register_loss, register_source
from ejdist.training.data.packing import filled_row


@dataclass
class DPOSection:
    """The section `dpo` of a recipe."""

    beta: float = 0.1  # how strongly the trained model is held to the model that it started as

    def validate(self) -> None:
        if not 0 < self.beta < float("inf"):
            raise ValueError(f"dpo.beta must be positive, got {self.beta}")


def log_probabilities(losses: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Returns the sum of -losses over each segment, float32 [B, T // 2, 2]: of the pairs of a row, (chosen, rejected)."""
    B, T = losses.shape
    rows = jnp.arange(B)[:, None]
    # Padding has segment -1, which is put past the end and dropped.
    sums = jnp.zeros((B, T), jnp.float32).at[rows, jnp.where(segment_ids < 0, T, segment_ids)].add(-losses, mode="drop")
    return sums[:, : T // 2 * 2].reshape(B, T // 2, 2)


def dpo(policy: BoundModel, batch: Mapping[str, jax.Array], section: DPOSection, reference: BoundModel) -> LossTerms:
    """Returns the loss over the pairs of a microbatch, with the accuracy and the margin of the implied rewards."""
    losses, layers = policy.token_losses(batch)
    ids = batch["segment_ids"]
    ours = log_probabilities(losses, ids)
    theirs = log_probabilities(reference.token_losses(batch)[0], ids)
    counted = log_probabilities(-(batch["targets"] >= 0).astype(jnp.float32), ids)
    pairs = (counted > 0).all(axis=-1)
    rewards = section.beta * (ours - theirs)
    margin = rewards[..., 0] - rewards[..., 1]
    return LossTerms(
        total=jnp.where(pairs, -jax.nn.log_sigmoid(margin), 0).sum(),
        count=pairs.sum(),
        layers=layers,
        metrics={
            "reward_accuracy": Metric(jnp.where(pairs, margin > 0, False).astype(jnp.float32).sum(), "mean"),
            "reward_margin": Metric(jnp.where(pairs, margin, 0).sum(), "mean"),
        },
    )


class Pairs:
    """Rows of whole pairs, in the order of the file, from its start again at its end. Of a pair the chosen conversation is
    segment 2k of its row and the rejected one 2k + 1, each with the prompt before it; only completions are trained."""

    order = "pairs"

    def __init__(self, path: str, length: int, tokenizer, seed: int) -> None:
        self.length, self._rows = length, [[]]
        used = 0
        for number, line in enumerate(Path(path).read_text().splitlines(), 1):
            pair, where = json.loads(line), f"data.source: {path}, line {number}"
            if missing := {"prompt", "chosen", "rejected"} - set(pair):
                raise ValueError(f"{where} has no {sorted(missing)[0]!r}; a pair has prompt, chosen and rejected")
            prompt = tokenizer.encode(pair["prompt"])
            segments = []
            for name in ("chosen", "rejected"):
                ids = np.concatenate([prompt, tokenizer.encode(pair[name]), [tokenizer.eos_id]])
                segments.append((ids, len(ids), np.arange(len(ids)) >= max(len(prompt), 1)))
            size = sum(count for _, count, _ in segments)
            if size > length:
                raise ValueError(f"{where} has {size} tokens; data.sequence_length = {length} must hold a pair")
            if used + size > length:
                self._rows.append([])
                used = 0
            self._rows[-1] += segments
            used += size
        if not self._rows[0]:
            raise ValueError(f"data.source: {path} has no pairs")
        self.rows_per_epoch = len(self._rows)
        self.tokens_per_row = sum(count for row in self._rows for _, count, _ in row) / self.rows_per_epoch
        self._seed = seed

    def row(self, index: int) -> dict[str, np.ndarray]:
        epoch, number = divmod(index, self.rows_per_epoch)
        order = np.random.default_rng([self._seed, epoch]).permutation(self.rows_per_epoch)
        return filled_row(self.length, self._rows[order[number]])


def identity(path: str) -> str:
    """Returns the digest of the file."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"data.source = 'pairs:{path}' cannot be read: {error.strerror}; name a file") from error


register_loss("dpo", dpo, DPOSection, references={"reference": Reference()})
register_source("pairs", rows=Pairs, identity=identity)
